"""Every command in the hands of somebody who mistypes: a line that names the thing, no traceback, and the exit code."""

from __future__ import annotations

import logging
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollfab.deploy import main as cli
from rollfab.deploy.cli.logs import NOISY
from rollfab.fabric.broker.embedded import EmbeddedBroker
from rollfab.trainer.client import connect

pytestmark = pytest.mark.redis

DONE, FAILED, WRONG = 0, 1, 2
AWAY = "redis://127.0.0.1:1"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with EmbeddedBroker.start() as broker:
        with connect(broker.url) as fabric:
            fabric.run("my-run", model="tiny", environment="frozenlake")
        yield broker.url


@pytest.fixture(autouse=True)
def _logs_as_before() -> Iterator[None]:
    """main() sets levels for its process, which here is that of other tests too."""
    loggers = [logging.getLogger(name) for name in ("rollfab", *NOISY)]
    levels = [each.level for each in loggers]
    yield
    for each, level in zip(loggers, levels, strict=True):
        each.setLevel(level)


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


def typed(
    line: str, url: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[int, str]:
    """What main() ends with, and what it says."""
    monkeypatch.setattr(sys, "argv", ["rollfab", *line.split()])
    monkeypatch.delenv("ROLLFAB_URL", raising=False)
    if url is not None:
        monkeypatch.setenv("ROLLFAB_URL", url)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    captured = capsys.readouterr()
    code = ended.value.code
    return (int(code) if isinstance(code, int) else 0), " ".join(
        (captured.out + captured.err).replace("│", " ").split()
    )


@pytest.mark.parametrize(
    ("line", "code", "says"),
    [
        ("stauts", WRONG, "Did you mean 'status'?"),
        ("runs list", WRONG, "No such command 'list'"),
        ("status --wach", WRONG, "--watch"),
        ("runs rm my-rnu --yes", WRONG, "run 'my-rnu' does not exist on this broker; did you mean my-run?"),
        ("dead ls --run my-rnu", WRONG, "did you mean my-run?"),
        ("dead show g.0 --run my-rnu", WRONG, "did you mean my-run?"),
        ("dead show g.0 --run my-run", FAILED, "no dead letter 'g.0'"),
        ("dead retry g.0 --run my-run", FAILED, "no dead letter 'g.0'"),
        ("dead discard g.0 --run my-run", FAILED, "no dead letter 'g.0'"),
        ("weights ls my-rnu", WRONG, "run 'my-rnu' does not exist"),
        ("weights verify my-rnu", WRONG, "run 'my-rnu' does not exist"),
        ("weights inspect my-run abc", WRONG, "'version'"),
        ("weights inspect my-run 3", FAILED, "3"),
        ("submit missing --run my-run", WRONG, "'missing' does not exist"),
        ("submit directory --run my-run", WRONG, "'directory' is a directory"),
        ("submit binary --run my-run", FAILED, "line 1 is no task"),
        ("submit text --run my-run", FAILED, "line 1 is no task"),
        ("submit number --run my-run", FAILED, "line 1 is int, expected a JSON object"),
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
        ("controller --name a.b", WRONG, "not a valid name"),
        ("broker --port x", WRONG, "--port"),
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
    line: str, code: int, says: str, url: str, desk: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    found, said = typed(line, url, monkeypatch, capsys)
    assert (found, says in said) == (code, True), said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    "line",
    ["status", "status --json", "lend status", "lend off", "runs ls", "runs rm x --yes", "dead ls --run x",
     "dead show a --run x", "dead retry a --run x", "submit good --run x", "consume --run x", "weights ls x",
     "weights verify x"],
)  # fmt: skip
def test_a_broker_that_is_away_is_one_line(
    line: str, desk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found, said = typed(line, AWAY, monkeypatch, capsys)
    assert (found, said) == (
        FAILED,
        "error: the broker redis://127.0.0.1:1/0 is not reachable, nothing listens there: start it, or correct the URL",
    )


def test_commands_in_messages_can_be_typed_here(
    desk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Given a program that is in a virtual environment below, and not on the PATH
    program = desk / ".venv" / "bin" / "rollfab"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program.with_name("python")))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert typed("status", None, monkeypatch, capsys)[1].endswith("start everything with `.venv/bin/rollfab up`")
    # When it is on the PATH, or is nowhere
    monkeypatch.setenv("PATH", str(program.parent))
    assert "`rollfab up`" in typed("status", None, monkeypatch, capsys)[1]
    program.unlink()
    assert "/python -m rollfab up`" in typed("status", None, monkeypatch, capsys)[1]


def test_a_port_that_is_taken_is_named(
    url: str, desk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found, said = typed(f"api --port {port}", url, monkeypatch, capsys)
        assert (found != DONE, str(port) in said, "Traceback" in said) == (True, True, False), said
