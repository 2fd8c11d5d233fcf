"""`rollfab up` as a person meets it at a terminal of 80 columns: what it says, when, and what it leaves behind."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import ssl
from pathlib import Path

import httpx
import psutil
import pytest

from rollfab.fabric.broker.embedded import EmbeddedBroker
from tests.support.brokers.certificates import make_certificate
from tests.support.processes.process_groups import children_of, wait_until_gone
from tests.support.terminal import Terminal

pytestmark = [pytest.mark.slow, pytest.mark.redis]

NOTHING = ("--dedicated", "0", "--agents", "0")
CTRL_C = "\x03"


def up(data: Path, *words: str, url: str | None = None, cwd: Path | None = None) -> Terminal:
    return Terminal("up", "--data", str(data), "--port", "0", *words, url=url, cwd=cwd)


@pytest.mark.timeout(120)
def test_up_is_said_when_every_role_works_and_one_interrupt_is_answered_and_ends_all(tmp_path: Path) -> None:
    with up(tmp_path / "data", "--serving", "1", "--slots", "7") as terminal:
        shown = terminal.until("Logs: ")
        shown = terminal.until("status --watch")
        before, _, after = shown.partition("rollfab is up.")
        assert "starting controller, agent-0, dedicated-0, serving-0, reward, api" in before
        assert "not ready yet after 3 s: " in before
        assert "dedicated-0 holds the model tiny (transformers" in after and "on cpu, 7 slots)" in after
        assert "lend on --pool local" in after
        children = children_of(terminal.process.pid)
        assert len(children) == 7  # six roles and the broker
        # The page's address has the key of this life, which opens the api, and nothing else does
        page, _, key = re.findall(r"Page: (\S+/)(#key=)(\S+)", after)[0]
        file = tmp_path / "data" / "api.key"
        assert (file.read_text(), file.stat().st_mode & 0o777) == (f"{key}\n", 0o600)
        assert httpx.get(f"{page}v1/status").status_code == 401
        answer = httpx.post(f"{page}v1/workers/*/lend", json={"mode": "on"}, headers={"authorization": f"Bearer {key}"})
        assert answer.status_code == 200
        for child in map(psutil.Process, children):
            assert key not in " ".join((*child.cmdline(), *child.environ().values()))
        terminal.type(CTRL_C)
        terminal.until("stopping: controller, agent-0, dedicated-0, serving-0, reward, api give back what they hold")
        assert terminal.end() == 130
        assert "queued work and weights are kept in" in terminal.shown
        assert not file.exists()
        assert not any(key in path.read_text(errors="replace") for path in (tmp_path / "data").rglob("*.log"))
        wait_until_gone(*children)


def test_up_is_said_where_the_file_gives_the_api_a_certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_certificate(tmp_path, "localhost")
    config = tmp_path / "rollfab.toml"
    config.write_text(f'[api]\ntls_cert = "{made.pem}"\ntls_key = "{made.key}"\nhost = "localhost"\n')
    monkeypatch.setenv("ROLLFAB_CONFIG", str(config))
    with up(tmp_path / "data", *NOTHING) as terminal:
        shown = terminal.until("For your trainer:")
        (page,) = re.findall(r"rollfab is up. Page: (https://localhost:\d+/)#key=", shown)
        authority = ssl.create_default_context(cafile=str(made.authority))
        assert httpx.get(f"{page}healthz", verify=authority).status_code == 200
        terminal.type(CTRL_C)
        assert terminal.end() == 130


@pytest.mark.timeout(180)
def test_a_role_that_came_back_is_said_to_be_ready_again(tmp_path: Path) -> None:
    # Given all roles, of which one is killed some time later
    with up(tmp_path / "data", "--dedicated", "0") as terminal:
        terminal.until("status --watch")
        (agent,) = [pid for pid in children_of(terminal.process.pid) if b"\0agent\0" in command_line(pid) + b"\0"]
        os.kill(agent, signal.SIGKILL)

        # Then its end, and that it is there again, are said in plain words
        shown = terminal.until("agent-0 is ready again").partition("status --watch")[2]
        assert "warning: agent-0 ended with code -9 and is started again" in shown
        assert " INFO " not in shown


def command_line(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


@pytest.mark.timeout(120)
def test_a_second_one_on_the_same_data_is_refused_and_leaves_the_first_its_key(tmp_path: Path) -> None:
    with up(tmp_path / "data", *NOTHING) as first:
        first.until("rollfab is up.")
        key = (tmp_path / "data" / "api.key").read_text()
        with up(tmp_path / "data", *NOTHING) as second:
            assert second.end() == 1
            assert f"started by process {first.process.pid}: stop that one" in second.shown
        assert (tmp_path / "data" / "api.key").read_text() == key


@pytest.mark.timeout(180)
def test_a_broker_that_is_frozen_is_said_and_that_it_answers_again(tmp_path: Path) -> None:
    # Given all roles at work
    with up(tmp_path / "data", *NOTHING) as terminal:
        terminal.until("rollfab is up.")
        (broker,) = [pid for pid in children_of(terminal.process.pid) if b"valkey-server" in command_line(pid)]

        # When their broker stands still for a while, then
        os.kill(broker, signal.SIGSTOP)
        shown = terminal.until("everything waits for the broker, for ")
        os.kill(broker, signal.SIGCONT)
        assert "answers again" not in shown
        terminal.until("answers again, after ")
        terminal.type(CTRL_C)
        assert terminal.end() == 130


@pytest.mark.timeout(120)
def test_a_second_interrupt_ends_everything_at_once(tmp_path: Path) -> None:
    with up(tmp_path / "data", "--dedicated", "0") as terminal:
        terminal.until("rollfab is up.")
        children = children_of(terminal.process.pid)
        for pid in children:  # nobody hears that it is to stop
            os.kill(pid, signal.SIGSTOP)
        terminal.type(CTRL_C)
        terminal.until("once more ends everything at once")
        terminal.type(CTRL_C)
        assert terminal.end() == 130
        assert "ended at once" in terminal.shown
        for pid in children:  # the broker is not ours to kill: it stops because its owner is gone
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        wait_until_gone(*children)


@pytest.mark.timeout(120)
def test_whoever_is_killed_leaves_no_process_behind(tmp_path: Path) -> None:
    with up(tmp_path / "data", "--dedicated", "0") as terminal:
        terminal.until("starting ")
        terminal.until("rollfab is up.")
        children = children_of(terminal.process.pid)
        terminal.process.kill()
        wait_until_gone(*children)


@pytest.mark.timeout(120)
def test_a_url_that_was_left_from_an_earlier_life_is_passed_over_and_a_living_one_is_used(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with EmbeddedBroker.start(starter="rollfab up") as private, EmbeddedBroker.start() as foreign:
        for url, says in (
            (f"unix://{data}/broker/broker.sock", "ROLLFAB_URL is passed over, nobody answers there"),
            (private.url, "ROLLFAB_URL is passed over, it names the private broker of an earlier"),
            (foreign.url, f"using the broker of ROLLFAB_URL: {foreign.url}"),
        ):
            with up(data, *NOTHING, url=url) as terminal:
                shown = terminal.until("export ROLLFAB_URL=")
                assert says in shown
                terminal.type(CTRL_C)
                assert terminal.end() == 130
                own = f"export ROLLFAB_URL=unix://{data}"
                assert (own in terminal.shown) is (url != foreign.url)


def test_a_broker_that_was_asked_for_and_is_not_there_is_an_error(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with up(data, *NOTHING, "--url", "redis://127.0.0.1:1") as terminal:
        assert terminal.end() == 1
        assert terminal.shown.startswith("error: the broker redis://127.0.0.1:1/0 is not reachable")
    assert not data.exists()


def test_a_model_without_a_tokenizer_is_refused_where_agents_would_need_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    with up(tmp_path / "data", "--model", str(tmp_path)) as terminal:
        assert terminal.end() == 2
    assert "has no tokenizer: that directory holds no tokenizer.json" in terminal.shown
    assert not (tmp_path / "data").exists()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("command", ["up", "worker"])
def test_a_model_that_is_not_there_is_refused_in_one_line_before_anything_starts(tmp_path: Path, command: str) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    for model, says in (
        ("./missing", "there is no such directory"),
        (str(tmp_path / "missing"), "there is no such directory"),
        ("a b", "it is no hub name"),
        ("file", "it is not a directory"),
        ("./file", "it is not a directory"),
        ("empty", "holds no config.json"),
    ):
        words = ("--data", "data") if command == "up" else ("--url", "redis://127.0.0.1:1")
        with Terminal(command, "--model", model, *words, cwd=tmp_path) as terminal:
            assert terminal.end() == 2
            assert terminal.shown.startswith(f"error: model {model!r}: ") and says in terminal.shown
    assert not (tmp_path / "data").exists()


@pytest.mark.timeout(120)
def test_a_role_that_keeps_dying_is_given_up_with_its_reason(tmp_path: Path) -> None:
    # Given a model whose config cannot be read
    (tmp_path / "model").mkdir()
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / "model" / name).write_text("{}")
    with up(tmp_path / "data", "--model", "./model", cwd=tmp_path) as terminal:
        assert terminal.end() == 1
        assert "error: dedicated-0 ended " in terminal.shown and "its log: " in terminal.shown
        assert "rollfab is up" not in terminal.shown
        assert "nothing else is kept running without it" in terminal.shown
        assert "'./model'" in terminal.shown
