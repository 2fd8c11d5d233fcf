"""Every command in the hands of somebody who mistypes: a line that names the thing, no traceback, and the exit code."""

from __future__ import annotations

import shlex
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rollfab.deploy import main as cli
from rollfab.fabric.broker.embedded import EmbeddedBroker
from rollfab.trainer.client import connect

pytestmark = pytest.mark.redis

DONE, FAILED, WRONG = 0, 1, 2
AWAY = "redis://127.0.0.1:1"
Typed = Callable[[str, str | None], tuple[int, str]]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with EmbeddedBroker.start() as broker:
        with connect(broker.url) as fabric:
            fabric.run("my-run", model="tiny", environment="frozenlake")
        yield broker.url


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "empty").write_text("")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00\x01")
    (tmp_path / "text").write_text("not json\n")
    (tmp_path / "number").write_text("17\n")
    (tmp_path / "good").write_text('{"seed": 1}\n')
    (tmp_path / "directory").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def typed(desk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Typed:
    """What main() ends with, and what it says, of a line and the broker's URL."""

    def type_in(line: str, url: str | None) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["rollfab", *shlex.split(line)])
        monkeypatch.delenv("ROLLFAB_URL", raising=False)
        if url is not None:
            monkeypatch.setenv("ROLLFAB_URL", url)
        with pytest.raises(SystemExit) as ended:
            cli.main()
        said, code = capsys.readouterr(), ended.value.code
        assert "Traceback" not in said.err
        return (int(code) if isinstance(code, int) else 0), " ".join((said.out + said.err).replace("│", " ").split())

    return type_in


@pytest.mark.parametrize(
    ("line", "code", "says"),
    [
        ("stauts", WRONG, "Did you mean 'status'?"),
        ("runs list", WRONG, "No such command 'list'"),
        ("status --wach", WRONG, "--watch"),
        ("status --nonsense", WRONG, "--nonsense"),
        ("runs rm 'my run' --yes", WRONG, "run 'my run' does not exist, and none can have that name"),
        ("runs rm my-rnu --yes", WRONG, "run 'my-rnu' does not exist on this broker; did you mean my-run?"),
        ("dead ls --run my-rnu", WRONG, "did you mean my-run?"),
        ("dead show g.0 --run my-rnu", WRONG, "did you mean my-run?"),
        ("dead show g.0 --run my-run", FAILED, "no dead letter 'g.0'"),
        ("dead retry g.0 --run my-run", FAILED, "no dead letter 'g.0'"),
        ("dead discard g.0 --run my-run", FAILED, "no dead letter 'g.0'"),
        ("weights verify my-rnu", WRONG, "run 'my-rnu' does not exist"),
        ("weights inspect my-run abc", WRONG, "'version'"),
        ("weights inspect my-run 3", FAILED, "3"),
        ("submit missing --run my-run", WRONG, "'missing' does not exist"),
        ("submit directory --run my-run", WRONG, "'directory' is a directory"),
        ("submit binary --run my-run", FAILED, "binary: line 1 is no task: not JSON: "),
        ("submit text --run my-run", FAILED, "line 1 is no task"),
        ("submit /dev/zero --run my-run", FAILED, "/dev/zero has more than 1,073,741,824 bytes of tasks"),
        ("submit number --run my-run", FAILED, "line 1 is no task: expected a JSON object"),
        ("submit empty --run my-run", FAILED, "empty holds no task"),
        ("submit good --run my-rnu", WRONG, "run 'my-rnu' does not exist"),
        ("submit good --run my-run --group-size x", WRONG, "--group-size"),
        ("submit good --run my-run --group-size 2 --quorum 3", FAILED, "quorum"),
        ("consume --run my-rnu", WRONG, "run 'my-rnu' does not exist"),
        ("consume --run my-run --timeout x", WRONG, "--timeout"),
        ("consume --run my-run --timeout 0.1 --keep vareid", FAILED, "did you mean varied?"),
        ("submit good --run new --model tinny --environment frozenlake", WRONG, "did you mean 'tiny'?"),
        ("submit good --run new --model tiny --environment frozenlaek", WRONG, "did you mean frozenlake?"),
        ("worker --model smal", WRONG, "did you mean 'small'?"),
        ("up --model Tinny --port 0", WRONG, "did you mean 'tiny'?"),
        ("weights ls my-rnu", WRONG, "did you mean my-run?"),
        ("weights verify my-run", FAILED, "run.publish(model.named_parameters(), version=0)"),
        ("consume --run my-run --timeout 0.1 --takeover 0", FAILED, "takeover is 0"),
        ("lend onn", WRONG, "did you mean"),
        ("lend off --pool caht", WRONG, "no pool 'caht'"),
        ("worker --role servign", WRONG, "neither dedicated nor serving: did you mean serving?"),
        ("worker --engine transfromers", WRONG, "did you mean transformers?"),
        ("worker --slots 0", WRONG, "--slots"),
        ("agent --environment frozenlake", WRONG, "--environment NAME=module:attr"),
        ("agent --count many", WRONG, "--count"),
        ("reward --reward score", WRONG, "--reward NAME=module:attr"),
        ("controller --name a.b", WRONG, "worker 'a.b' is not a valid name: use 1 to 63 letters"),
        ("agent --name 'a b'", WRONG, "worker 'a b' is not a valid name: use 1 to 63 letters"),
        ("worker --name x*", WRONG, "worker 'x*' is not a valid name: use 1 to 63 letters"),
        ("reward --name 'a b'", WRONG, "worker 'a b' is not a valid name: use 1 to 63 letters"),
        ("agent --timeout 0", WRONG, "--timeout is 0: give a finite number of seconds above 0"),
        ("agent --timeout -1", WRONG, "--timeout is -1: give a finite number of seconds above 0"),
        ("agent --timeout nan", WRONG, "--timeout is nan: give a finite number"),
        ("reward --timeout inf", WRONG, "--timeout is inf: give a finite number"),
        ("api --models-from .", WRONG, "--models-from is for trainers: give --train"),
        ("api --train --weights missing", WRONG, "--weights missing is no directory"),
        ("api --train --models-from missing", WRONG, "--models-from missing is no directory"),
        ("broker --port x", WRONG, "Invalid value for '--port': it is 'x', expected a whole number"),
        ("broker --port -1", WRONG, "Invalid value for '--port': it is -1, expected 1 or more"),
        ("broker --port 0", WRONG, "Invalid value for '--port': it is 0, expected 1 or more"),
        ("broker --port 70000", WRONG, "Invalid value for '--port': it is 70000, expected 65535 or less"),
        ("trace --state foo", WRONG, "Invalid value for '--state': 'foo' is not one of 'open', 'waiting', 'finished'"),
        ("train --output text", WRONG, "error: --output: the directory"),
        ("demo --output text", WRONG, "error: --output: the directory"),
        ("up --data text", WRONG, "error: --data: the directory"),
        ("up --port 0 --environment bad", WRONG,
         "--environment 'bad' does not name code: write --environment NAME=module:attr"),
        ("up --port 0 --environment w=/nowhere/python:m:W", WRONG,
         "virtual environment, --environment NAME=/venv/bin/python:module:attr"),
        ("up --port 0 --reward bad", WRONG, "--reward 'bad' does not name code: write --reward NAME=module:attr"),
        ("up --port 0 --reward r=python:m:f", WRONG, "a reward function is written --reward NAME=module:attr"),
        ("train --environment frozenlaek --output out", WRONG, "frozenlake"),
        ("demo --environment frozenlaek", WRONG, "frozenlake"),
        ("demo --engine vlm", WRONG, "did you mean vllm?"),
        ("up --engine transformer --port 0", WRONG, "did you mean transformers?"),
        ("replay azure-conv --url http://127.0.0.1:1", FAILED, "cannot be reached"),
        ("acl --nothing", WRONG, "--nothing"),
        ("bench quue", WRONG, "Did you mean 'queue'?"),
    ],
)  # fmt: skip
@pytest.mark.timeout(60)
def test_a_mistyped_command_is_told_what_is_wrong(
    line: str, code: int, says: str, url: str, desk: Path, typed: Typed
) -> None:
    before = {each: each.read_bytes() if each.is_file() else b"" for each in desk.iterdir()}
    found, said = typed(line, None if line.startswith(("up ", "broker ")) else url)  # those bring their own
    assert (found, says in said) == (code, True), said
    assert {each: each.read_bytes() if each.is_file() else b"" for each in desk.iterdir()} == before


@pytest.mark.parametrize(
    "line",
    ["status", "status --json", "lend status", "lend off", "runs ls", "runs rm x --yes", "dead ls --run x",
     "dead show a --run x", "dead retry a --run x", "submit good --run x", "consume --run x", "weights ls x",
     "weights verify x"],
)  # fmt: skip
def test_a_broker_that_is_away_is_one_line(line: str, typed: Typed) -> None:
    assert typed(line, AWAY) == (
        FAILED,
        "error: the broker redis://127.0.0.1:1/0 is not reachable, nothing listens there: start it, or correct the URL",
    )


def test_commands_in_messages_can_be_typed_here(desk: Path, monkeypatch: pytest.MonkeyPatch, typed: Typed) -> None:
    # Given a program that is in a virtual environment below, and not on the PATH
    program = desk / ".venv" / "bin" / "rollfab"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program.with_name("python")))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    code, said = typed("status", None)
    assert code == WRONG and "no broker: give --url" in said
    assert said.endswith("start everything with `.venv/bin/rollfab up`")
    # When it is on the PATH, or is nowhere
    monkeypatch.setenv("PATH", str(program.parent))
    assert "`rollfab up`" in typed("status", None)[1]
    program.unlink()
    assert "/python -m rollfab up`" in typed("status", None)[1]


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("api", "Address already in use; choose another port, or 0 for a free one"),
        ("up", "Address already in use; choose another port, or --port 0 for a free one"),
    ],
)
def test_a_port_that_is_taken_is_named(command: str, says: str, url: str, desk: Path, typed: Typed) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found, said = typed(f"{command} --port {port}", url if command == "api" else None)
    assert (found, str(port) in said, says in said) == (WRONG, True, True), said
    assert not (desk / "rollfab-data").exists()
