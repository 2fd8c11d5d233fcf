"""One step in a process of its own: started, watched, ended with all that it started, and read.

- A step that hangs is killed at its limit, with every process that came from it: they are known by a mark in their
  environment, whatever group or session they are in.
- A module tells its figures by a line; tests by their report.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import secrets
import signal
import subprocess
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MARK = "ROLLFAB_KIT_STEP"
FIGURES = "figures: "  # begins the line that a step tells them by
SKIPPED = "skipped: "  # and the one that says why there is nothing to show here
PASSED, FAILED, TIMED_OUT, SKIPPED_STATE = "passed", "failed", "timed out", "skipped"
TAIL_CHARACTERS = 600
PARENT_DEATH_SIGNAL = 1  # Linux: PR_SET_PDEATHSIG
END_S = 10.0  # between asking a process to end and killing it


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a step. reason: why it is not passed; "" if it is."""

    state: str
    seconds: float
    reason: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)


def run_child(
    words: Sequence[str], *, limit_s: float, log: Path, environment: Mapping[str, str], report: Path | None = None
) -> Outcome:
    """Run a command to its end, or to the limit; nothing of it is left.

    Args:
        log: where its output goes.
        report: where tests write their report (JUnit); None: it is a module of steps/.
    """
    mark = f"{os.getpid()}-{secrets.token_hex(8)}"
    began_s = time.monotonic()
    if report is not None:
        report.unlink(missing_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**environment, MARK: mark},
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
        try:
            process.wait(limit_s)
            is_late = False
        except subprocess.TimeoutExpired:
            is_late = True
        finally:
            end_all(mark, process)
    seconds = time.monotonic() - began_s
    told = _told(log, report)
    if is_late:
        return Outcome(state=TIMED_OUT, seconds=seconds, reason=f"no end within {limit_s:g} s", figures=told.figures)
    if process.returncode:
        is_explained = report is not None and told.reason
        reason = told.reason if is_explained else f"exit code {process.returncode}: {_tail(log)}"
        return Outcome(state=FAILED, seconds=seconds, reason=reason, figures=told.figures)
    if told.state != PASSED:
        return Outcome(state=told.state, seconds=seconds, reason=told.reason, figures=told.figures)
    return Outcome(state=PASSED, seconds=seconds, figures=told.figures)


def _die_with_parent() -> None:
    """Where the run itself is killed, its step must not stay and hold the device."""
    ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL)


def end_all(mark: str, process: subprocess.Popen[bytes]) -> None:
    """End a child and all that came from it: ask first, so that memory is given back, then kill."""
    never = threading.Event()
    for number in (signal.SIGTERM, signal.SIGKILL):
        until_s = time.monotonic() + END_S
        while (pids := marked(mark)) and time.monotonic() < until_s:
            for pid in pids:  # again: one may have been started since
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)
            never.wait(0.1)
            process.poll()
    process.wait(END_S)


def marked(mark: str) -> list[int]:
    """Processes whose environment has the mark; this one never has it."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if wanted in (path / "environ").read_bytes().split(b"\0"):
                found.append(int(path.name))
    return found


def _told(log: Path, report: Path | None) -> Outcome:
    """State and figures, as the step itself says."""
    if report is not None:
        return _of_tests(report)
    figures: dict[str, Any] = {}
    for line in log.read_text("utf-8", "replace").splitlines():
        if line.startswith(SKIPPED):
            return Outcome(state=SKIPPED_STATE, seconds=0.0, reason=line.removeprefix(SKIPPED))
        if line.startswith(FIGURES):
            with contextlib.suppress(ValueError):
                figures |= json.loads(line.removeprefix(FIGURES))
    if not figures:
        return Outcome(state=FAILED, seconds=0.0, reason=f"it told no figures, and last said: {_tail(log)}")
    return Outcome(state=PASSED, seconds=0.0, figures=figures)


def _of_tests(report: Path) -> Outcome:
    try:
        suites = list(ElementTree.parse(report).getroot().iter("testsuite"))
    except (OSError, ElementTree.ParseError):
        return Outcome(state=FAILED, seconds=0.0)
    counts = {
        name: sum(int(suite.get(name, 0)) for suite in suites) for name in ("tests", "failures", "errors", "skipped")
    }
    cases = [case for suite in suites for case in suite.iter("testcase")]
    bad = [
        str(case.get("name")) for case in cases if case.find("failure") is not None or case.find("error") is not None
    ]
    figures: dict[str, Any] = {**counts, "failed": bad} if bad else counts
    if bad:
        text = f"{len(bad)} of {counts['tests']} tests failed: {', '.join(bad)}"
        return Outcome(state=FAILED, seconds=0.0, reason=text, figures=figures)
    if counts["tests"] == counts["skipped"]:
        return Outcome(state=SKIPPED_STATE, seconds=0.0, reason="no test of it runs here", figures=figures)
    return Outcome(state=PASSED, seconds=0.0, figures=figures)


def _tail(log: Path) -> str:
    """The last line that it said; the log has all of them."""
    lines = [line for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
    return lines[-1][:TAIL_CHARACTERS] if lines else "nothing"
