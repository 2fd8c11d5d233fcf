"""Runs one step in a process of its own: starts and watches it, ends it with all that it started, and reads it.

- A step that hangs is killed at its limit, with every process that came from it, whatever group or session it is in.
  They are seen below it while it runs, and known by a mark in their environment once their parents are gone (brokers
  write their title over it).
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
from typing import Any, NamedTuple

MARK = "ROLLFAB_KIT_STEP"
FIGURES = "figures: "  # begins the line that a step tells them by
SKIPPED = "skipped: "  # and the one that says why there is nothing to show here
PASSED, FAILED, TIMED_OUT, SKIPPED_STATE = "passed", "failed", "timed out", "skipped"
TAIL_CHARACTERS = 600
PARENT_DEATH_SIGNAL = 1  # Linux: PR_SET_PDEATHSIG
LOOK_S = 1.0  # between two looks at what a step has started
END_S = 10.0  # between asking a process to end and killing it


class Known(NamedTuple):
    """A process. Its number is given again, but not together with the time when it started."""

    pid: int
    started: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of a step. reason: why it is not passed; "" if it is."""

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
        family: set[Known] = set()
        try:
            is_late = not _ends(process, began_s + limit_s, family)
        finally:
            end_all(mark, process, family)
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
    """Have the kernel kill the step with its parent: where the run is killed, no step may stay and hold the device."""
    ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL)


def _ends(process: subprocess.Popen[bytes], until_s: float, family: set[Known]) -> bool:
    """Wait for its end; returns whether it came in time. family: is told of all processes that are seen below it."""
    while (left_s := until_s - time.monotonic()) > 0:
        family |= below(process.pid)
        try:
            process.wait(min(LOOK_S, left_s))
            return True
        except subprocess.TimeoutExpired:
            continue
    return False


def end_all(mark: str, process: subprocess.Popen[bytes], family: set[Known]) -> None:
    """End a child and all that came from it: ask first, so that memory is given back, then kill."""
    family |= below(process.pid)
    never = threading.Event()
    for number in (signal.SIGTERM, signal.SIGKILL):
        until_s = time.monotonic() + END_S
        while (pids := marked(mark) | living(family)) and time.monotonic() < until_s:
            for pid in pids:  # again: one may have been started since
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)
            never.wait(0.1)
            process.poll()
    process.wait(END_S)


def below(pid: int) -> set[Known]:
    """Find all processes that come from this one, as far as their parents live."""
    parents: dict[int, list[Known]] = {}
    for path in Path("/proc").glob("[0-9]*"):
        if (row := _row(int(path.name))) is not None:
            parents.setdefault(row[0], []).append(row[1])
    found: set[Known] = set()
    waiting = [pid]
    while waiting:
        children = parents.get(waiting.pop(), [])
        found.update(children)
        waiting += [child.pid for child in children]
    return found


def living(family: set[Known]) -> set[int]:
    """Return the ids of those that have not ended, and whose numbers are nobody else's by now."""
    return {known.pid for known in family if (row := _row(known.pid)) is not None and row[1] == known}


def _row(pid: int) -> tuple[int, Known] | None:
    """Return a process' parent, and what it is known by; None: it has ended."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if words[0] in "ZX" else (int(words[1]), Known(pid, int(words[19])))


def marked(mark: str) -> set[int]:
    """Find the processes whose environment has the mark; this one never has it."""
    wanted = f"{MARK}={mark}".encode()
    found = set()
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if wanted in (path / "environ").read_bytes().split(b"\0"):
                found.add(int(path.name))
    return found


def _told(log: Path, report: Path | None) -> Outcome:
    """Read state and figures, as the step itself tells them."""
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
    """Return the last line that the step printed; the log has all of them."""
    lines = [line for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
    return lines[-1][:TAIL_CHARACTERS] if lines else "nothing"
