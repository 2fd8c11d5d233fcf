"""Passwords and keys are nowhere but where they belong: not in logs, error texts, answers, arguments or reprs."""

from __future__ import annotations

import ast
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from rollfab.api.access.config import ApiConfig
from rollfab.api.access.keys import add_key, hash_key, new_key, read_keys_file
from rollfab.deploy.cli.arguments import refuse_secrets
from rollfab.deploy.roles.options import RoleOptions
from rollfab.fabric.contract.errors import ConfigError
from tests.support.brokers.redis_server import RedisServer, free_port, redis_server
from tests.support.processes.fabric_processes import PYTHONPATH
from tests.support.until import wait_until

pytestmark = [pytest.mark.redis, pytest.mark.timeout(60)]  # each starts several processes

PASSWORD = "correct-horse-battery-staple"
WRONG = "hunter2-is-not-it"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    lines = ("appendonly yes", "maxmemory-policy noeviction", f"requirepass {PASSWORD}")
    with redis_server(tmp_path, *lines) as server:
        yield server


def url(server: RedisServer, password: str) -> str:
    return f"redis://:{password}@127.0.0.1:{server.port}/0"


def run(*words: str, timeout_s: float = 40, **environment: str) -> str:
    """Everything that a command prints, also one that is stopped after a while."""
    return end(*words, timeout_s=timeout_s, **environment)[1]


def end(*words: str, timeout_s: float = 40, **environment: str) -> tuple[int, str]:
    """The same, after the exit code."""
    everything = {**os.environ, "PYTHONPATH": PYTHONPATH, **environment}
    words = (sys.executable, "-m", "rollfab", *words)
    process = subprocess.Popen(words, env=everything, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        said = process.communicate(timeout=timeout_s)[0]
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=20)[0]
    return process.returncode, said


ROLES = (
    ["controller"],
    ["agent"],
    ["worker"],
    ["reward"],
    ["api", "--port", "0"],
    ["status"],
    ["lend", "on", "--all"],
    ["dead", "ls", "--run", "r1"],
    ["train", "--run", "r1"],
)


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("words", ROLES, ids=lambda words: words[0])
@pytest.mark.parametrize("is_there", [True, False], ids=["wrong-password", "broker-away"])
def test_a_password_that_gets_nobody_in_is_told_of_and_not_told(
    server: RedisServer, words: list[str], is_there: bool
) -> None:
    if not is_there:
        server.kill()
    code, said = end(*words, "--debug", ROLLFAB_URL=url(server, WRONG))

    assert ("refused to let us in" if is_there else "is not reachable") in said, said
    assert code == 1
    assert WRONG not in said


@pytest.mark.parametrize("malformed", ["redis://:{}#x@127.0.0.1:1/0", "http://u:{}@h", "redis://:{}@h:port/0", "{}"])
def test_a_malformed_url_is_told_of_without_its_password(malformed: str) -> None:
    said = run("status", "--debug", ROLLFAB_URL=malformed.format(WRONG))

    assert "URL" in said
    assert WRONG not in said


def test_the_text_of_an_error_is_printed_as_it_is() -> None:
    said = run("status", "--url", "redis://127.0.0.1:1?[/bold]=1")
    assert "unknown setting '[/bold]'" in " ".join(said.split())


QUEUE = f"redis://h?reward_queue=redis%3A%2F%2F%3A{WRONG}%40other%3A1"


@pytest.mark.parametrize(
    "words",
    [
        ("status", "--url", f"redis://:{WRONG}@127.0.0.1:1/0"),
        ("controller", f"--url=rediss://user:{WRONG}@h"),
        ("up", "--url", f"redis+sentinel://{WRONG}@a:1,b:2/service"),
        ("doctor", "--url", f"redis://:hunt/{WRONG}@h"),
        ("agent", "--url", f"unix:///broker.sock?password={WRONG}"),
        ("reward", "--url", f"redis+sentinel://h/s?sentinel_password={WRONG}"),
        ("train", "--url", QUEUE),
        ("worker", "--engine", "vllm", "--server", f"http://user:{WRONG}@h:8000", "--model", "m"),
        ("worker", "--role", "serving", "--probe", f"https://{WRONG}@h:8000"),
        ("worker", "--engine", "vllm", "--server", f"http://h:8000?api_key={WRONG}", "--model", "m"),
        ("worker", "--engine", "vllm", "--", "--hf-token", WRONG),
        ("worker", "--engine", "vllm", "--", f"--api-key={WRONG}"),
        ("replay", "azure-conv", "--url", "http://h:8000", "--api-key", WRONG),
        ("replay", "azure-conv", "--url", f"http://:{WRONG}@h:8000"),
        ("bench", "queue", "--url", f"redis://:{WRONG}@h"),
    ],
    ids=lambda words: " ".join(words).replace(WRONG, "…"),
)
def test_an_argument_that_holds_a_secret_is_refused_and_not_repeated(words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=r"would show .* by the environment, ") as caught:
        refuse_secrets(words)
    assert caught.value.facts["option"] in ("--url", "--server", "--probe", "--hf-token", "--api-key")
    assert WRONG not in str(caught.value)


@pytest.mark.parametrize(("debug", "code"), [((), 2), (("--debug",), 1)], ids=["plain", "debug"])
def test_a_command_with_a_password_in_its_url_ends_before_it_does_anything(debug: tuple[str, ...], code: int) -> None:
    found, said = end("status", "--url", f"redis://:{WRONG}@127.0.0.1:1/0", *debug)

    assert found == code
    assert "--url would show the password in a URL to every user of this machine" in " ".join(said.split())
    assert WRONG not in said


@pytest.mark.parametrize(
    "words",
    [
        ("--url", "redis://h:1/0?socket_timeout=3"),
        ("--url", "unix:///run/a@b.sock"),
        ("--url", "rediss://h?ssl_keyfile=/a/b"),
        ("acl", "--passwords", "users.passwords"),
        ("replay", "trace", "--url", "http://h:8000/v1?a=b"),
        ("--model", "org/name@main"),
        ("--environment", "a=/venv/bin/python:m:W"),
        ("--", "--max-num-batched-tokens", "8", "--skip-tokenizer-init", "--kv-cache-dtype", "auto"),
    ],
    ids=" ".join,
)
def test_what_is_no_secret_may_be_an_argument(words: tuple[str, ...]) -> None:
    refuse_secrets(words)


# ---- everything at once, for a while


@contextmanager
def up(server: RedisServer, directory: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """`rollfab up` at DEBUG on a broker with a password."""
    words = ["up", "--debug", "--data", str(directory / "data"), "--port", str(port), "--serving", "1"]
    environment = {**os.environ, "ROLLFAB_URL": url(server, PASSWORD), "PYTHONPATH": PYTHONPATH}
    with (directory / "up.log").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "rollfab", *words], env=environment, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def wait_until_ready(page: httpx.Client, logs: Path) -> None:
    """Until the api answers, and a worker of each kind is known to it."""

    def are_there() -> bool:
        try:
            roles = {row["role"] for row in page.get("/v1/workers").json()["workers"]}
        except (httpx.TransportError, KeyError):
            return False
        return roles >= {"controller", "agent", "dedicated", "serving", "reward"}

    wait_until(are_there, lambda: "\n".join(path.read_text()[-2000:] for path in logs.rglob("*.log")), every_s=0.1)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_password_is_in_no_log_answer_or_argument_of_a_fabric_that_works_and_one_that_loses_its_broker(
    server: RedisServer, tmp_path: Path
) -> None:
    port = free_port()
    with up(server, tmp_path, port) as process, httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=20) as page:
        # Given all roles at work, a run, and a broker that goes away for a moment
        key = _when_there(tmp_path / "data" / "api.key")
        page.headers.update(_bearer(key))
        wait_until_ready(page, tmp_path)
        said = [run("submit", _tasks(tmp_path), *RUN, ROLLFAB_URL=url(server, PASSWORD))]
        assert "1 group pushed" in said[0]
        answers = [page.get(path).text for path in PATHS]
        children = psutil.Process(process.pid).children(recursive=True)
        arguments = [" ".join(child.cmdline()) for child in children]
        assert all(child.environ()["ROLLFAB_DEBUG"] == "1" for child in children)
        server.kill()
        answers += [page.get(path).text for path in ("/v1/status", "/readyz")]

    # Then the password is nowhere
    assert len(arguments) >= 6
    texts = {path.name: path.read_text(errors="replace") for path in tmp_path.rglob("*.log")}
    texts = {name: text for name, text in texts.items() if name != "test.log"}
    assert {"up.log", "controller.log", "agent-0.log", "api.log", "reward.log", "dedicated-0.log"} <= set(texts)
    assert any("broker" in text for text in texts.values()), "nobody said that the broker went away"
    # Nor in what the broker itself has written of events, heartbeats and jobs, nor in any file of ours
    texts |= {str(path): path.read_text(errors="replace") for path in (tmp_path / "data").rglob("*") if path.is_file()}
    kept = [path.read_bytes().decode("latin1") for path in tmp_path.rglob("*.aof")]
    assert any("heartbeat" in text or "dedicated-0" in text for text in kept)
    for place in (*texts.values(), *kept, *answers, *arguments, *said):
        assert PASSWORD not in place
        assert key not in place
    assert "redis://***@" in texts["up.log"] or "redis://:***@" in texts["up.log"]


def _when_there(path: Path) -> str:
    wait_until(path.exists, f"{path} is written", 60.0)
    return path.read_text().strip()


PATHS = ("/v1/status", "/v1/runs", "/v1/workers", "/v1/weights", "/readyz", "/metrics", "/openapi.json", "/v1/runs/r1")
RUN = ("--run", "r1", "--model", "tiny", "--environment", "frozenlake", "--group-size", "1", "--debug")


def _tasks(directory: Path) -> str:
    (directory / "tasks.jsonl").write_text('{"seed": 1}\n')
    return str(directory / "tasks.jsonl")


# ---- the api's keys


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_key_is_in_no_log_answer_or_argument_of_the_api(server: RedisServer, tmp_path: Path) -> None:
    # Given an api with keys from a file and from the environment
    file, port, plain = tmp_path / "api.keys", free_port(), new_key()
    read, control = add_key(file, "grafana", "read"), add_key(file, "alice", "control")
    environment = {**os.environ, "ROLLFAB_URL": url(server, PASSWORD), "ROLLFAB_READ_KEYS": plain}
    words = [sys.executable, "-m", "rollfab", "api", "--keys", str(file), "--port", str(port), "--debug"]
    with (tmp_path / "api.log").open("wb") as output:
        process = subprocess.Popen(words, env=environment, stdout=output, stderr=subprocess.STDOUT)
    try:
        # When they are used, well and badly
        page = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=20)
        answers = [_get(page, "/v1/status", key) for key in (read, control, plain)]
        assert [answer.status_code for answer in answers] == [200, 200, 200]
        answers += [_get(page, path, control) for path in ("/v1/none", "/v1/runs/none", "/v1/events?after=x")]
        answers.append(page.post("/v1/workers/*/lend", headers=_bearer(read), json={"value": "on"}))
        assert answers[-1].status_code == 403
        answers.append(page.post("/v1/workers/*/lend", headers=_bearer(control), json={"value": "on"}))
        assert answers[-1].status_code == 200
        answers.append(_get(page, "/v1/status", WRONG))
        assert answers[-1].status_code == 401
        arguments = " ".join(psutil.Process(process.pid).cmdline())
        page.close()
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(20)

    # Then neither they nor their hashes are said
    hashes = [hash_key(key).removeprefix("sha256:") for key in (read, control, plain)]
    for place in ((tmp_path / "api.log").read_text(), arguments, *(answer.text for answer in answers)):
        for secret in (read, control, plain, WRONG, *hashes):
            assert secret not in place
    assert not any(key in file.read_text() for key in (read, control))


def _bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def _get(page: httpx.Client, path: str, key: str) -> httpx.Response:
    """An answer, once there is somebody to answer."""

    def asked() -> list[httpx.Response]:
        try:
            return [page.get(path, headers=_bearer(key))]
        except httpx.TransportError:
            return []

    return wait_until(asked, "somebody answers", every_s=0.1)[0]  # type: ignore[no-any-return]


def test_a_plain_key_on_the_command_line_is_refused_and_not_repeated() -> None:
    for option in ("--read-key", "--control-key"):
        said = run("api", option, WRONG, ROLLFAB_URL="redis://127.0.0.1:1")
        assert "rollfab api keys new" in " ".join(said.split())
        assert WRONG not in said


def test_keys_are_made_listed_and_dropped(tmp_path: Path) -> None:
    place = {"ROLLFAB_KEYS_FILE": str(tmp_path / "api.keys")}
    first = run("api", "keys", "new", "alice", "--control", **place).strip()
    second = run("api", "keys", "new", "bob", **place).strip()

    assert first.startswith("rfk_") and len(first) >= 43 and first != second
    assert json.loads(run("api", "keys", "ls", "--json", **place)) == [
        {"name": "alice", "right": "control"},
        {"name": "bob", "right": "read"},
    ]
    rows = read_keys_file(tmp_path / "api.keys")
    assert [row.hashed for row in rows] == [hash_key(first), hash_key(second)]
    assert (tmp_path / "api.keys").stat().st_mode & 0o777 == 0o600
    assert "has a key 'bob' already" in " ".join(run("api", "keys", "new", "bob", **place).split())
    run("api", "keys", "drop", "alice", **place)
    assert [row.name for row in read_keys_file(tmp_path / "api.keys")] == ["bob"]


def test_a_keys_file_that_others_may_write_or_that_holds_plain_keys_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "api.keys"
    add_key(path, "alice", "read")
    path.chmod(0o664)
    with pytest.raises(ConfigError, match="can be written by other users: chmod 600"):
        read_keys_file(path)
    path.chmod(0o600)
    path.write_text(f"read {WRONG} alice\n")
    with pytest.raises(ConfigError, match="line 1") as caught:
        read_keys_file(path)
    assert WRONG not in str(caught.value)


def test_no_record_shows_a_field_that_may_hold_a_secret() -> None:
    shown = []
    for path in (path for room in ROOMS for path in (ROOT / room).rglob("*.py")):
        for kind in ast.walk(ast.parse(path.read_text())):
            if isinstance(kind, ast.ClassDef) and "dataclass" in " ".join(map(ast.unparse, kind.decorator_list)):
                fields = (each for each in kind.body if isinstance(each, ast.AnnAssign) and "str" in ast.unparse(each))
                for each in fields:
                    if SECRET.search(ast.unparse(each.target)) and "repr=False" not in ast.unparse(each):
                        shown.append(f"{path.name}: {kind.name}.{ast.unparse(each.target)}")
    assert shown == []


ROOT = Path(__file__).resolve().parents[3]
ROOMS = ("api", "bench", "commands", "fabric", "trainer", "workers")
SECRET = re.compile(r"^(broker_|client_)?url$|(^|_)(password|secret|api_key|server_key|reward_queue)$|_keys$")


def test_settings_do_not_show_what_they_hold() -> None:
    assert PASSWORD not in repr(RoleOptions(url=f"redis://:{PASSWORD}@h"))
    config = ApiConfig(read_keys=(WRONG,), control_keys=(PASSWORD,))
    assert WRONG not in repr(config) + str(vars(config))
    assert PASSWORD not in repr(config) + str(vars(config))
    assert hash_key(WRONG).removeprefix("sha256:") not in repr(config)
