"""Failures of users' code as dead letters: the reason in one line, the traceback, and all it takes to try again.

- A letter is bounded, can always be written, and is safe on any terminal: we make harmful text plain here.
- An exception of user code is user code, too: its text may be of any size, and asking for it may raise.
"""

from __future__ import annotations

import dataclasses
import traceback

from ...fabric.contract.errors import FabricError
from ...fabric.contract.records import DeadLetter, TrajectoryJob
from ...fabric.contract.text import printable

REASON_LENGTH_MAX = 2_000  # an error may quote any result of the user's code
TRACEBACK_LENGTH_MAX = 20_000
CAUSE_COUNT_MAX = 5  # errors that led to one another, in one traceback


def dead_letter(error: Exception, job: TrajectoryJob, *, run_id: str, worker_id: str, attempt: int) -> DeadLetter:
    """Make the letter for one failed attempt; the broker decides whether it is the last."""
    told = str(error.facts.get("traceback", "")) if isinstance(error, FabricError) else ""
    return DeadLetter(
        trajectory_id=job.trajectory_id,
        run_id=run_id,
        worker_id=worker_id,
        reason=reason_of(error),
        traceback=printable(told or traceback_of(error))[-TRACEBACK_LENGTH_MAX:],
        attempt=attempt,
        job=dataclasses.asdict(job),
    )


def reason_of(error: BaseException) -> str:
    """Put an error into one bounded, printable text."""
    try:
        text = str(error)[:REASON_LENGTH_MAX]
    except Exception:  # noqa: BLE001 - str() of a user's error; the report goes on without its text
        text = "(its text cannot be read)"
    return printable(f"{type(error).__name__}: {text}")[:REASON_LENGTH_MAX]


def traceback_of(error: BaseException) -> str:
    """Show where an error was raised, and which errors led to it; bounded, whatever the error's text."""
    parts: list[str] = []
    each: BaseException | None = error
    while each is not None and len(parts) < CAUSE_COUNT_MAX:
        stack = "".join(traceback.format_tb(each.__traceback__))[-TRACEBACK_LENGTH_MAX:]
        parts.append(f"Traceback (most recent call last):\n{stack}{reason_of(each)}")
        each = each.__cause__ or (None if each.__suppress_context__ else each.__context__)
    return "\n\nwhich led to:\n\n".join(reversed(parts))
