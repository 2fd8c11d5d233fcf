"""Several runs that share a cluster: which parts of it each was due and had, and how long it had none.

- Of the slots that are ready for runs with work, each of these is due its weight's part. That is counted while several
  runs have work, and each has trajectories enough for what it is due.
- A run waits while it has work and no worker that is ready for it, or its weights are on their way. A fair turn is how
  long it takes until everybody has had slices by weight, and this run one of its own.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ...fabric.rules.lending.capacity_facts import CapacityRule
from ...fabric.rules.lending.division import slice_of
from .cluster import Cluster

LOOK_S = 0.5  # between two looks
TOLD_S = 30.0  # in which shares are counted, at least, or none is told


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """What a run had. had: slot-seconds over those that it was due; made: tokens over its weight's part of all, as one
    slot is faster than another; None: there was no time to tell by. longest_wait: in fair turns.
    """

    weight: float
    step_s: float
    had: float | None
    made: float | None
    longest_wait: float


@dataclass
class Sharing:
    """Looks at runs that share a cluster, as long as there are several with work; changes nothing. All is by run."""

    _counted_s: float = 0.0
    _due: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))  # slots
    _had: Counter[int] = field(default_factory=Counter)
    _fair: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))  # tokens
    _made: Counter[int] = field(default_factory=Counter)
    _kept: Counter[int] = field(default_factory=Counter)  # tokens until the last look
    _waits_s: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    _longest: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))

    def watch(self, cluster: Cluster) -> None:
        """Look now, and again and again."""
        busy = [each for each in cluster.beside if sum(each.counts())]
        workers = [each for each in cluster.engines if each.is_ready]
        slots = {run.index: sum(e.slot_count for e in workers if e.tenant == run.index) for run in busy}
        self._count(busy, slots)
        self._time(cluster, busy, slots, sum(each.tenant in slots for each in workers))
        self._kept = Counter({run.index: run.kept_count for run in cluster.beside})
        cluster.events.after(LOOK_S, self.watch, cluster)

    def _count(self, busy: Sequence[Cluster], slots: Mapping[int, int]) -> None:
        """Add what each run had since the last look, and was due."""
        weights, all_slots = sum(run.run.weight for run in busy), sum(slots.values())
        due = {run.index: all_slots * run.run.weight / weights for run in busy}
        if len(busy) < 2 or any(sum(run.counts()) < due[run.index] for run in busy):
            return
        made = {run.index: run.kept_count - self._kept[run.index] for run in busy}
        self._counted_s += LOOK_S
        for run in busy:
            self._due[run.index] += due[run.index]
            self._had[run.index] += slots[run.index]
            self._fair[run.index] += sum(made.values()) * run.run.weight / weights
            self._made[run.index] += made[run.index]

    def _time(self, cluster: Cluster, busy: Sequence[Cluster], slots: Mapping[int, int], worker_count: int) -> None:
        """Note how long each run has waited for a worker."""
        weights = sum(run.run.weight for run in busy)
        for run in cluster.beside:
            is_waiting = run in busy and not slots[run.index]
            self._waits_s[run.index] = self._waits_s[run.index] + LOOK_S if is_waiting else 0.0
            if is_waiting and worker_count:
                slice_s = slice_of(cluster.setup.fetch_s, CapacityRule())
                turn_s = slice_s * weights / (run.run.weight * worker_count)
                self._longest[run.index] = max(self._longest[run.index], self._waits_s[run.index] / turn_s)

    def of(self, run: Cluster, step_s: float) -> Shared:
        """Sum up a run."""
        is_known, index = self._counted_s >= TOLD_S, run.index
        return Shared(
            weight=run.run.weight,
            step_s=step_s,
            had=self._had[index] / self._due[index] if is_known and self._due[index] else None,
            made=self._made[index] / self._fair[index] if is_known and self._fair[index] else None,
            longest_wait=self._longest[index],
        )
