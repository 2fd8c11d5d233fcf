"""What the command line says to a person: lines that fit, plain words, and who is not ready for how long."""

from __future__ import annotations

import inspect
import io
import logging
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from rollfab.deploy.cli.logs import plain_lines
from rollfab.deploy.cli.speech import say
from rollfab.deploy.local.broker_watch import BrokerWatch
from rollfab.deploy.local.supervisor import Child, Supervisor
from rollfab.deploy.local.up import UpOptions, _Life
from rollfab.fabric.host.command import with_commands, wrapped
from rollfab.fabric.host.facts import FactsFormatter
from rollfab.fabric.inspect import diagnosis


@given(st.text(alphabet="ab `\n", max_size=300), st.integers(8, 100))
def test_lines_fit_unless_a_word_or_a_command_does_not_and_no_word_is_lost(text: str, width: int) -> None:
    shown = wrapped(text, width)
    assert shown.split() == text.split()
    for line in shown.splitlines():
        assert len(line) <= width or not line.strip() or "`" in line or max(map(len, line.split())) > width


def test_a_command_stays_on_one_line() -> None:
    text = "no broker is known: " + "x " * 28 + "start everything with `rollfab up --model tiny --port 0`, please"
    assert "`rollfab up --model tiny --port 0`" in wrapped(text, 80).split("\n")[1]


@pytest.mark.parametrize("is_terminal", [True, False])
def test_only_a_terminal_gets_broken_lines(is_terminal: bool) -> None:
    file = io.StringIO()
    console = Console(file=file, width=80, force_terminal=is_terminal, color_system=None)
    say(console, "[not markup] " + "word " * 40, "error")
    lines = file.getvalue().rstrip("\n").split("\n")
    assert lines[0].startswith("error: [not markup] word")
    assert (len(lines) > 1, max(map(len, lines)) <= 80) == (is_terminal, is_terminal)


def test_a_warning_of_a_log_fits_too() -> None:
    record = logging.LogRecord("rollfab.x", logging.WARNING, "", 0, "word " * 40, (), None)
    record.worker_id = "w1"
    line = FactsFormatter("%(asctime)s %(levelname)s %(name)s %(message)s", 80).format(record)
    assert max(map(len, line.split("\n"))) <= 80 and "worker_id='w1'" in line


def test_last_words_are_without_what_is_only_noted() -> None:
    log = (
        "2026-01-01 10:00:00,123 INFO rollfab.workers.agent.worker agent.started worker_id='a'\n"
        "error: no broker\n"
        "2026-01-01 10:00:01,123 WARNING rollfab.workers.agent.worker broker.lost url='x'\n"
        "2026-01-01 10:00:01,123 DEBUG rollfab.workers.agent.worker turn\n"
    )
    assert plain_lines(log) == ["error: no broker", "broker.lost url='x'"]


class _Running:
    """A process that runs."""

    pid = 1

    def poll(self) -> None:
        return None


def test_who_is_not_ready_is_told_by_the_time_since_its_own_start(tmp_path: Path) -> None:
    # Given two roles that began together, and one that was started again 100 s later
    file = io.StringIO()
    supervisor = Supervisor(tmp_path)
    options: dict[str, Any] = {"url": None, "model": "tiny", "data": "", "port": 1}
    counts = {"dedicated": 1, "serving": 0, "agents": 1, "slot_count": 1}
    life = _Life(supervisor, "", None, UpOptions(**options, **counts), Console(file=file, width=80))

    def child(name: str, start_at_s: float, start_count: int = 1) -> Child:
        running: Any = _Running()
        place = tmp_path / f"{name}.log"
        return Child(name, [], place, process=running, start_at_s=start_at_s, start_count=start_count)

    both = [child("agent-0", 10.0), child("dedicated-0", 10.2)]
    again = [child("dedicated-0", 110.0, start_count=2)]

    # When it is looked at them now and then
    for missing, now_s in [(both, 12.9), (both, 13.1), (both, 14.0), (both, 22.0), (both, 23.2), (again, 112.0)]:
        life._tell_missing(missing, now_s)
    life._tell_missing(again, 113.4)

    # Then
    told = file.getvalue().splitlines()  # in seconds, rounded
    assert told == [
        "not ready yet after 3 s: agent-0, dedicated-0",
        "not ready yet after 13 s: agent-0, dedicated-0",
        "not ready yet after 3 s: dedicated-0",
    ]


def test_a_silence_of_the_broker_is_said_once_and_so_is_its_end() -> None:
    # Given a broker that is looked at now and then, and answers
    told: list[str] = []
    watch = BrokerWatch("redis://:secret@host/0", lambda text, kind: told.append(f"{kind}: {text}"))
    watch.note({}, "", now_s=100.0)

    # When it is silent for a moment, then for long, then cannot be reached
    for now_s, why in ((103.0, ""), (106.0, ""), (109.0, ""), (112.0, "it is gone")):
        watch.note(None, why, now_s=now_s)
    watch.note({}, "", now_s=120.0)
    watch.note({}, "", now_s=121.0)
    watch.note(None, "it is gone", now_s=127.0)

    # Then each silence has one line, and its end another
    assert told == [
        "warning: everything waits for the broker, for 6 s now: the broker redis://:***@host/0 does not answer; is it "
        "stopped or overloaded?",
        ": the broker redis://:***@host/0 answers again, after 20 s",
        "warning: everything waits for the broker, for 6 s now: it is gone",
    ]


@pytest.mark.parametrize(
    ("path", "typed"),
    [("", "venv/bin/rollfab"), ("venv/bin", "rollfab"), ("elsewhere", "venv/bin/rollfab")],
    ids=["not on the PATH", "on it", "another one on it"],
)
def test_a_next_step_is_what_can_be_typed_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, typed: str
) -> None:
    for place in ("venv/bin", "elsewhere"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "rollfab").touch(mode=0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [str(tmp_path / "venv/bin/rollfab")])
    monkeypatch.setenv("PATH", str(tmp_path / path) if path else "")

    rows = [{"step": "Start one: `rollfab agent`, or rollfab.connect()"}]

    assert with_commands(rows) == [{"step": f"Start one: `{typed} agent`, or rollfab.connect()"}]


def test_a_next_step_is_told_in_a_deleted_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "rollfab"
    program.touch(mode=0o755)
    monkeypatch.setattr("sys.argv", [str(program)])
    monkeypatch.setenv("PATH", "")
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()

    assert with_commands("Start one: `rollfab agent`") == f"Start one: `{program} agent`"


def test_every_next_step_of_the_diagnosis_marks_its_commands() -> None:
    source = inspect.getsource(diagnosis)
    assert re.search("`rollfab [a-z]", source)
    assert not re.findall("[^`]rollfab (?:up|agent|worker|controller|reward|consume|status|lend|runs|dead) ", source)
