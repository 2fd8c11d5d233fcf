"""The places for environments of one agent worker, shared between its runs as fabric/rules/queue/share.py says.

- A run takes places before it asks the broker for trajectories, and gives up those that none came for: there are never
  more trajectories than places, however many runs ask at once.
- A run may have work from the time it asks until a claim brings less than it wanted.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Sequence

from ...fabric.ports.queue import TrajectoryClaim
from ...fabric.rules.queue.retries import is_suspect
from ...fabric.rules.queue.share import Sharer, more, owed


class Places:
    """Counts how many of `total` places each run holds."""

    def __init__(self, total: int, wanted: Callable[[str], int] | None = None) -> None:
        """wanted: the most places that a run may hold; None: all that are its share."""
        self._total = total
        self._wanted = wanted
        self._runs: dict[str, Sharer] = {}
        self._changed = asyncio.Event()

    @property
    def held_count(self) -> int:
        """Count the places that runs have taken, in use or not yet."""
        return sum(run.held for run in self._runs.values())

    def join(self, run_id: str, weight: float) -> None:
        """Add a run, or change its weight."""
        run = self._runs.get(run_id)
        if run is None:
            run = Sharer(run_id=run_id, weight=weight, held=0, may_have_work=True, served=self._least_served())
        self._runs[run_id] = dataclasses.replace(run, weight=weight)

    def leave(self, run_id: str) -> None:
        """Remove a run; its places are for others."""
        self._runs.pop(run_id, None)
        self.tell()

    def take(self, run_id: str) -> int:
        """Take as many places as the run may have now, and return how many; 0: wait for `changed`."""
        run = self._runs[run_id]
        if self._wanted is not None and self._wanted(run_id) <= run.held:
            return 0
        if not run.may_have_work:  # places that it did not want meanwhile are no debt to it
            run = dataclasses.replace(run, may_have_work=True, served=max(run.served, self._least_served()))
        self._runs[run_id] = run
        count = more(self._total, list(self._runs.values()), run_id)
        if self._wanted is not None:
            count = min(count, self._wanted(run_id) - run.held)
        self._runs[run_id] = dataclasses.replace(run, held=run.held + count)
        return count

    def note_stalled(self, run_id: str, is_stalled: bool) -> None:
        """Note whether the run waits for turns that do not come."""
        run = self._runs[run_id]
        if run.is_stalled != is_stalled:
            self._runs[run_id] = dataclasses.replace(run, is_stalled=is_stalled)
            self.tell()

    def owed(self) -> dict[str, int]:
        """Count the places that stalled runs must give back: see share.py."""
        return owed(self._total, list(self._runs.values()))

    def used(self, run_id: str, taken: int, used: int) -> None:
        """Note how many of the places taken are used; fewer than taken means that the run has no more work."""
        run = self._runs.get(run_id)
        if run is None:
            return
        self._runs[run_id] = dataclasses.replace(
            run,
            held=run.held - taken + used,
            may_have_work=used == taken,
            served=run.served + used / run.weight,
        )
        if used < taken:
            self.tell()

    def give(self, run_id: str) -> None:
        """Give back the place of a trajectory that has ended."""
        run = self._runs.get(run_id)
        if run is not None:
            self._runs[run_id] = dataclasses.replace(run, held=run.held - 1)
        self.tell()

    async def changed(self, timeout_s: float) -> None:
        """Return when there may be places again, or after `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()

    def tell(self) -> None:
        """Wake those who wait for `changed`."""
        self._changed.set()
        self._changed = asyncio.Event()

    def _least_served(self) -> float:
        return min((run.served for run in self._runs.values() if run.may_have_work), default=0.0)


class Quarantine:
    """The agent's only place for a suspect: taken to ask for a suspect, and held until it has got on, or ended."""

    def __init__(self) -> None:
        self._holder: tuple[str, int] | None = None  # trajectory and fence; ("", 0): we are asking for a suspect

    def take(self) -> bool:
        """Take the place if it is free; return whether it was. The caller then calls `hold` with its claims."""
        if self._holder is not None:
            return False
        self._holder = ("", 0)
        return True

    def hold(self, claims: Sequence[TrajectoryClaim]) -> None:
        """Keep the place for the suspect among these claims; free it if there is none."""
        suspects = ((claim.job.trajectory_id, claim.fence) for claim in claims if is_suspect(claim.loss))
        self._holder = next(suspects, None)

    def clear(self, claim: TrajectoryClaim) -> None:
        """Free the place if this claim holds it: it has got on, or ended."""
        if self._holder == (claim.job.trajectory_id, claim.fence):
            self._holder = None
