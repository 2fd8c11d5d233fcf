"""`rollfab logs`, and what bounds the logs that it reads."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from rollfab.deploy.local import supervisor as supervisors
from rollfab.deploy.local.logs import LogFile, Wanted
from rollfab.deploy.local.supervisor import Supervisor
from rollfab.deploy.main import app
from tests.support.until import wait_until


def stamped(second: int, text: str, level: str = "INFO") -> str:
    return f"2026-01-01 00:00:{second:02},000 {level} rollfab.x {text}\n"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "agent-0.log").write_text(
        stamped(1, "role.started worker_id='agent-box-1' pid=1")
        + stamped(4, "agent.attempt_failed job_id='g1.1'", "WARNING")
        + "Traceback (most recent call last):\n  ValueError: no\n"
        + stamped(6, "agent.claim_lost job_id='g1.10'")
    )
    (logs / "dedicated-0.log").write_text(
        stamped(2, "role.started worker_id='w-1' pid=2")
        + "2026-01-01 00:00:03,500 - Batching - INFO - cache ready \x1b[2J漢字\n"
        + stamped(5, "turn.done job_id='g1.1.0'")
    )
    (logs / "controller.log").write_text(stamped(7, "lease.granted worker_id='w-1'"))
    return tmp_path


def shown(data: Path, *words: str) -> list[str]:
    done = typed("--data", str(data), *words)
    assert done.exit_code == 0, done.output
    return [
        line.split(maxsplit=1)[0] + "|" + line.split("rollfab.x ")[-1].split()[0] for line in done.stdout.splitlines()
    ]


def typed(*words: str) -> Result:
    return CliRunner().invoke(app, ["logs", *words])


def test_the_lines_of_all_roles_come_in_the_order_of_time_and_tracebacks_stay_with_their_event(data: Path) -> None:
    done = typed("--data", str(data)).stdout
    roles = [line.split()[0] for line in done.splitlines()]
    assert roles == [
        "agent-0",
        "dedicated-0",
        "dedicated-0",
        "agent-0",
        "agent-0",
        "agent-0",
        "dedicated-0",
        "agent-0",
        "controller",
    ]
    assert "\x1b[2J" not in done and "漢字" in done
    assert len(typed("--data", str(data), "-n", "2").stdout.splitlines()) == 2


def test_a_role_a_trajectory_and_a_worker_choose_lines(data: Path) -> None:
    assert {line.split("|")[0] for line in shown(data, "--role", "agent")} == {"agent-0"}
    assert {line.split("|")[0] for line in shown(data, "--role", "agent-0", "--role", "controller")} == {
        "agent-0",
        "controller",
    }
    events = [line.split("|")[1] for line in shown(data, "--trajectory", "g1.1")]
    assert events == ["agent.attempt_failed", "agent-0", "agent-0", "turn.done"], "with its traceback, without g1.10"
    assert len(shown(data, "--trajectory", "g1")) == 5
    by_worker = [line.split("|")[1] for line in shown(data, "--worker", "w-1")]
    assert by_worker == ["role.started", "dedicated-0", "turn.done", "lease.granted"], "its own, and what names it"
    assert len(shown(data, "--worker", "w-1", "--trajectory", "g1.1")) == 1


def test_json_has_a_line_a_row(data: Path) -> None:
    rows = [
        json.loads(line) for line in typed("--data", str(data), "--json", "--trajectory", "g1.1").stdout.splitlines()
    ]
    assert rows[0] == {
        "role": "agent-0",
        "time": "2026-01-01 00:00:04,000",
        "level": "WARNING",
        "text": stamped(4, "agent.attempt_failed job_id='g1.1'", "WARNING").rstrip(),
    }
    assert rows[1]["time"] == rows[0]["time"]


def test_what_is_not_there_is_told_with_the_next_step(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(data)
    assert "did you mean agent-0?" in str(typed("--data", ".", "--role", "agnet").exception)
    assert "give the directory with --data" in str(typed().exception)
    nothing = typed("--data", ".", "--trajectory", "(a+)+$[")
    assert (nothing.exit_code, nothing.stdout) == (0, "")
    said = " ".join(nothing.stderr.split())
    assert "none in the logs of agent-0, controller, dedicated-0 in logs/ names trajectory '(a+)+$['; only what" in said
    assert "rollfab trace` lists those that are there" in said
    assert said.endswith("32 MiB of each role are kept, the newest")
    said = " ".join(typed("--data", ".", "--role", "agent", "--trajectory", "g9", "--worker", "w-9").stderr.split())
    assert "none in the logs of agent-0 in logs/ names trajectory 'g9' and worker 'w-9'; only what" in said
    said = " ".join(typed("--data", ".", "--worker", "w-9").stderr.split())
    assert "names worker 'w-9'; `" in said and "lists the workers that are there" in said and "trajectory" not in said
    (data / "logs" / "empty-0.log").touch()
    said = " ".join(typed("--data", ".", "--role", "empty").stderr.split())
    assert "no line is shown: the logs of empty-0 in logs/ are empty. `" in said
    (data / "rollfab-data").mkdir()
    (data / "logs").rename(data / "rollfab-data" / "logs")
    assert "controller" in typed().stdout, "found by itself"


def test_a_log_that_is_moved_away_while_it_is_followed_loses_no_line(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text(stamped(1, "one"))
    file = LogFile(path, Wanted())
    assert len(list(file.lines(10_000))) == 1
    with path.open("a") as log:
        log.write(stamped(2, "two"))
    os.replace(path, tmp_path / "a.log.1")
    path.write_text("")
    assert [line.text[-3:] for line in file.lines()] == ["two"]
    assert list(file.lines()) == [], "the older part is not read again"
    with path.open("a") as log:
        log.write(stamped(3, "three") + "half a li")
    assert len(list(file.lines())) == 1, "a line that is being written comes when it is whole"
    with path.open("a") as log:
        log.write("ne\n")
    assert [line.text for line in file.lines()] == ["half a line"]


@pytest.mark.timeout(60)
def test_logs_of_children_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisors, "LOG_BYTES_MAX", 400)
    monkeypatch.setattr(supervisors, "LOG_LOOK_S", 0.0)
    with Supervisor(tmp_path) as supervisor:
        supervisor.add("chatty", ["status", "--help"])

        def has_turned() -> bool:
            supervisor.watch()
            return (tmp_path / "chatty.log.1").exists()

        wait_until(has_turned, limit_s=10, every_s=0.02)
    assert (tmp_path / "chatty.log").stat().st_size < 4_000
    assert (tmp_path / "chatty.log.1").stat().st_mode & 0o077 == 0, "for its user alone"


@pytest.mark.timeout(60)
def test_what_comes_is_followed_also_of_a_role_that_is_started_later(data: Path) -> None:
    words = [sys.executable, "-m", "rollfab", "logs", "--data", str(data), "--follow", "--trajectory", "g9.1"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as reader:
        assert reader.stdout is not None and reader.stderr is not None
        assert "no line is shown" in reader.stderr.readline(), "it has read what there was"
        with (data / "logs" / "controller.log").open("a") as log:
            log.write(stamped(8, "other job_id='g9.2'") + stamped(8, "mine job_id='g9.1'"))
        (data / "logs" / "late-0.log").write_text(stamped(9, "late job_id='g9.1.0'"))
        seen = sorted(reader.stdout.readline().split("rollfab.x ")[1].split()[0] for _ in range(2))
        assert seen == ["late", "mine"]
        reader.send_signal(signal.SIGINT)
        assert (reader.wait(20), reader.stderr.read()) == (130, "")
