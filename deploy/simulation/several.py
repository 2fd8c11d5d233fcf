"""Several runs that share a cluster: which parts of it each was due and had, and how long it had none.

- Of the slots that are ready for runs with work, each of these is due its weight's part. That is counted while several
  runs have work, and each has trajectories enough for what it is due.
- A run waits while it has work and no worker that is ready for it, or its weights are on their way. A fair turn is how
  long it takes until everybody has had slices by weight, and this run one of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ...fabric.rules.lending.capacity import CapacityRule
from .cluster import Cluster

LOOK_S = 0.5  # between two looks
TOLD_S = 30.0  # in which shares are counted, at least, or none is told


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """What a run had. had: slot-seconds over those that it was due; None: there was no time to tell by.

    longest_wait: in fair turns.
    """

    weight: float
    step_s: float
    had: float | None
    longest_wait: float


@dataclass
class Sharing:
    """Looks at runs that share a cluster, as long as there are several with work; changes nothing."""

    _due: dict[int, float] = field(default_factory=dict)
    _had: dict[int, float] = field(default_factory=dict)
    _waits: dict[int, float] = field(default_factory=dict)
    _counted_s: float = 0.0
    _longest: dict[int, float] = field(default_factory=dict)

    def watch(self, cluster: Cluster) -> None:
        """Look now, and again and again."""
        runs = [each for each in cluster.beside if sum(each.counts())]
        slots = dict.fromkeys((each.index for each in runs), 0)
        worker_count = 0
        for engine in cluster.engines:
            if engine.is_ready and engine.tenant in slots:
                slots[engine.tenant] += engine.slot_count
                worker_count += 1
        weights = sum(each.run.weight for each in runs)
        due = {each.index: sum(slots.values()) * each.run.weight / weights for each in runs}
        if len(runs) > 1 and all(sum(each.counts()) >= due[each.index] for each in runs):
            self._counted_s += LOOK_S
            for index in due:
                self._due[index] = self._due.get(index, 0.0) + due[index] * LOOK_S
                self._had[index] = self._had.get(index, 0.0) + slots[index] * LOOK_S
        for each in cluster.beside:
            is_waiting = each.index in slots and not slots[each.index]
            self._waits[each.index] = self._waits.get(each.index, 0.0) + LOOK_S if is_waiting else 0.0
            if is_waiting and worker_count:
                turn_s = CapacityRule().slice_s * weights / (each.run.weight * worker_count)
                turns = self._waits[each.index] / turn_s
                self._longest[each.index] = max(self._longest.get(each.index, 0.0), turns)
        cluster.events.after(LOOK_S, self.watch, cluster)

    def of(self, run: Cluster, step_s: float) -> Shared:
        """Sum up a run."""
        due = self._due.get(run.index, 0.0)
        return Shared(
            weight=run.run.weight,
            step_s=step_s,
            had=self._had[run.index] / due if due and self._counted_s >= TOLD_S else None,
            longest_wait=self._longest.get(run.index, 0.0),
        )
