"""Remembers which run held each worker's lease, and what its guard said, until a sample takes it down for people.

- It is looked at once a second: a lease that is shorter may be missed.
- A guard may change its mind many times a minute. Its state begins a row of its own at most once in GUARD_MS, while a
  change of lease always does.
- With each change goes what was before, and what lasts is said again within the hour. So an hour of samples says of
  every worker what it held all along.
- A sample takes ROW_COUNT_MAX rows, the oldest first; what is over waits for the next one. Where ever more comes, the
  oldest is dropped.
"""

from __future__ import annotations

from ...fabric.contract.lease_plan import LeaseSample
from ...fabric.contract.records import Lease
from ...fabric.inspect.diagnosis import ROLLOUT_ROLES
from ...fabric.ports.queue import Survey
from .demand import first_of

ROW_COUNT_MAX = 512  # of a sample: 40 bytes each
WAITING_COUNT_MAX = 8 * ROW_COUNT_MAX
GUARD_MS = 60_000
SAY_AGAIN_MS = 45 * 60_000  # so that it is within the hour also where some samples are full
GONE = "gone"


class LeaseLog:
    """Owns what each worker holds now, and the rows that no sample has taken yet."""

    def __init__(self) -> None:
        self._now: dict[str, LeaseSample] = {}
        self._said_ms: dict[str, int] = {}
        self._waiting: dict[tuple[str, int], LeaseSample] = {}

    def look(self, survey: Survey) -> None:
        """Take in what every worker holds now."""
        now_ms, leases = survey.wall_ms, _by_worker(survey)
        for name, (info, _) in survey.workers.items():
            if info.role in ROLLOUT_ROLES:
                lease = leases.get(name)
                run_id, slot_count = (lease.run_id, lease.slot_count) if lease is not None else ("", 0)
                self._take(LeaseSample(name, now_ms, run_id, slot_count, info.guard_state or ""))
        for name in self._now.keys() - survey.workers.keys():
            self._take(LeaseSample(name, now_ms, "", 0, GONE))
            del self._now[name]
            self._said_ms.pop(name, None)
        for key in list(self._waiting)[: max(0, len(self._waiting) - WAITING_COUNT_MAX)]:
            del self._waiting[key]

    def rows(self, now_ms: int) -> tuple[LeaseSample, ...]:
        """Return the rows of a sample that is taken now; they are not returned again."""
        old = [row for name, row in self._now.items() if now_ms - self._said_ms.get(name, now_ms) > SAY_AGAIN_MS]
        for row in old[: max(0, ROW_COUNT_MAX - len(self._waiting))]:
            self._say(row)
        found = list(self._waiting.values())[:ROW_COUNT_MAX]
        for row in found:
            del self._waiting[row.worker_id, row.since_ms]
            if row.worker_id in self._now:
                self._said_ms[row.worker_id] = now_ms
        return tuple(found)

    def _take(self, row: LeaseSample) -> None:
        before = self._now.get(row.worker_id)
        if before is not None:
            if (before.run_id, before.slot_count) == (row.run_id, row.slot_count):
                is_brief = row.guard_state != GONE and row.since_ms - before.since_ms < GUARD_MS
                if before.guard_state == row.guard_state or is_brief:
                    return
            self._say(before)
        self._now[row.worker_id] = row
        self._say(row)

    def _say(self, row: LeaseSample) -> None:
        self._waiting[row.worker_id, row.since_ms] = row


def _by_worker(survey: Survey) -> dict[str, Lease]:
    """Return the lease of each worker that has one; of several, that of the run whose weights it was told to follow.

    While it goes from one run to another, it is the newer.
    """
    held = [lease for leases in survey.leases.values() for lease in leases.values()]
    held.sort(key=lambda lease: (first_of(survey, lease.worker_id) == lease.run_id, lease.lease_epoch))
    return {lease.worker_id: lease for lease in held if lease.slot_count and not lease.has_ended}
