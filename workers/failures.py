"""What users' code did wrong, as a dead letter: the reason in one line, the traceback, and all it takes to try again.

- A letter is bounded, can always be written, and shown on any terminal: text that could do harm is made plain here.
"""

from __future__ import annotations

import dataclasses
import traceback

from ..fabric.errors import FabricError
from ..fabric.records import DeadLetter, TrajectoryJob
from ..fabric.text import printable

REASON_LENGTH_MAX = 2_000  # an error may quote whatever the user's code returned
TRACEBACK_LENGTH_MAX = 20_000


def dead_letter(error: Exception, job: TrajectoryJob, *, run_id: str, worker_id: str, attempt: int) -> DeadLetter:
    """The letter for one failed attempt; whether it is the last one is the broker's to decide."""
    told = str(error.facts.get("traceback", "")) if isinstance(error, FabricError) else ""
    return DeadLetter(
        trajectory_id=job.trajectory_id,
        run_id=run_id,
        worker_id=worker_id,
        reason=reason_of(error),
        traceback=printable(told or "".join(traceback.format_exception(error)))[-TRACEBACK_LENGTH_MAX:],
        attempt=attempt,
        job=dataclasses.asdict(job),
    )


def reason_of(error: Exception) -> str:
    """An error in one bounded text that can travel."""
    return printable(f"{type(error).__name__}: {error}")[:REASON_LENGTH_MAX]
