"""Which worker serves which run, and with how many slots: a pure function of demand and supply.

- Dedicated workers serve whenever a run of their model exists; their lease stands until it is replaced.
- Serving workers are lent only while their team's switch is on, demand is more than the dedicated slots can run, and
  their SLO headroom is not used up; they are taken back when demand has been gone for a while (hysteresis).
- An engine that sleeps is capacity like any other, but those that cost nothing to activate go first.
- Runs with work share the slots of their model by weight. Where workers cannot be divided so, they take turns: `settle`
  keeps, for every run, the slot-seconds that it is owed, and a worker moves when that makes another run the needier one
  by nearly a worker's slice. It stays that long at least: moving costs a weight switch and every cached prefix.
- A run without work gives its share up at once, and is owed nothing once it has had none for a while.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFacts:
    """A rollout worker as the controller sees it. `lend`: slots its team offers; None: dedicated, all of them.

    activation_ms: what waking it is expected to take; 0: it is awake.
    """

    worker_id: str
    model: str
    slot_count: int
    lend: int | None = None
    headroom_fraction: float | None = None
    run_id: str | None = None
    is_lent: bool = False
    activation_ms: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """A run's demand. `open_count`: trajectories queued or running. `idle_s`: how long it has been without any.

    owed: slot-seconds that it is behind its share of the time so far; below 0: ahead of it.
    """

    run_id: str
    model: str
    weight: float
    has_weights: bool
    open_count: int
    idle_s: float
    owed: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityRule:
    """Bounds of the plan."""

    headroom_min_fraction: float = 0.1  # below this a serving worker keeps everything for serving
    take_back_after_s: float = 3.0  # longer than a synchronous trainer's step, or it would be taken back every step
    slice_s: float = 10.0  # shortest time for which a worker serves one of several runs that take turns


STAY_FRACTION = 0.9  # of a worker's slots: how much needier another run must be; at 1 a new run might wait for ever


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """One worker's part of the plan; slot_count 0 means: serve nothing. The reason is for people."""

    worker_id: str
    run_id: str | None
    slot_count: int
    is_standing: bool
    reason: str


def plan(workers: Sequence[WorkerFacts], runs: Sequence[RunFacts], rule: CapacityRule) -> list[Grant]:
    """What every worker should serve now, in the order given."""
    places: dict[str, RunFacts] = {}
    for model in dict.fromkeys(worker.model for worker in workers):
        places |= _places([worker for worker in workers if worker.model == model], _fitting(model, runs), rule)
    given = dict.fromkeys((run.run_id for run in runs), 0.0)
    grants: dict[str, Grant] = {}
    for worker in sorted(workers, key=_order):
        grant = _grant(worker, places.get(worker.worker_id), given, rule)
        if grant.run_id is not None:
            given[grant.run_id] += grant.slot_count
        grants[worker.worker_id] = grant
    return [grants[worker.worker_id] for worker in workers]


def settle(
    owed: Mapping[str, float], grants: Sequence[Grant], runs: Sequence[RunFacts], passed_s: float, rule: CapacityRule
) -> dict[str, float]:
    """What every run is owed after `grants` were in force for `passed_s`, in slot-seconds.

    Of the slots that served runs of a model with work, each of these was due a share by weight. What all runs of a
    model are owed adds up to nothing, so one that comes new, or comes back, starts level; and no debt exceeds two
    slices of all slots, whatever happened.
    """
    found: dict[str, float] = {}
    for model in dict.fromkeys(run.model for run in runs):
        fitting = [run for run in runs if run.model == model and run.has_weights]
        sharing = [run for run in fitting if run.open_count > 0]
        counted = [run for run in fitting if run.open_count > 0 or run.idle_s < rule.take_back_after_s]
        served = {run.run_id: sum(each.slot_count for each in grants if each.run_id == run.run_id) for run in sharing}
        slots, weights = sum(served.values()), sum(run.weight for run in sharing)
        debts = {run.run_id: owed.get(run.run_id, 0.0) for run in counted}
        for run in sharing:
            debts[run.run_id] += (slots * run.weight / weights - served[run.run_id]) * passed_s
        mean = sum(debts.values()) / max(1, len(debts))
        bound = 2 * rule.slice_s * max(slots, 1)
        found |= {name: max(-bound, min(bound, debt - mean)) for name, debt in debts.items()}
    return found


def _fitting(model: str, runs: Sequence[RunFacts]) -> list[RunFacts]:
    """Runs that a worker of this model can serve: those with work; without any of these, all."""
    fitting = [run for run in runs if run.model == model and run.has_weights]
    return [run for run in fitting if run.open_count > 0] or fitting


def _order(worker: WorkerFacts) -> tuple[bool, int, str]:
    return worker.lend is not None, worker.activation_ms, worker.worker_id


def _places(workers: Sequence[WorkerFacts], runs: Sequence[RunFacts], rule: CapacityRule) -> dict[str, RunFacts]:
    """Which of these runs each of these workers, all of one model, should serve if it serves any.

    Workers stay where they are, the rest go where most is lacking, and then, one by one, whoever is missed least
    moves to where most is lacking, as long as that is worth it.
    """
    if not runs:
        return {}
    division = _Division(
        {worker.worker_id: _offered(worker, rule) for worker in sorted(workers, key=_order)}, runs, rule
    )
    by_id = {run.run_id: run for run in runs}
    own = {worker.worker_id: by_id[worker.run_id] for worker in workers if worker.run_id in by_id}
    for name, run in own.items():
        division.put(name, run)
    for name in division.offers:
        if name not in own:
            division.put(name, division.neediest())
    for _ in division.offers:
        goal = division.neediest()
        mover = max(division.offers, key=lambda name: division.worth(name, goal))
        if division.worth(mover, goal) <= 1e-9:
            break
        division.put(mover, goal)
    return division.places


class _Division:
    """Workers of one model and the runs they serve, while that is being decided. `offers`: slots of each worker."""

    def __init__(self, offers: Mapping[str, int], runs: Sequence[RunFacts], rule: CapacityRule) -> None:
        self.offers = offers
        self.places: dict[str, RunFacts] = {}
        self._runs = runs
        self._given = dict.fromkeys((run.run_id for run in runs), 0)
        self._scale = sum(offers.values()) / sum(run.weight for run in runs)
        self._payback = STAY_FRACTION / rule.slice_s  # no worker can then change hands twice within a slice

    def put(self, worker_id: str, run: RunFacts) -> None:
        """Let a worker serve this run."""
        before = self.places.get(worker_id)
        if before is not None:
            self._given[before.run_id] -= self.offers[worker_id]
        self._given[run.run_id] += self.offers[worker_id]
        self.places[worker_id] = run

    def neediest(self) -> RunFacts:
        """Where most is lacking, among runs that have work for more."""
        wanting = [run for run in self._runs if run.open_count > self._given[run.run_id]]
        return max(wanting or self._runs, key=lambda run: (self._lack(run), run.run_id))

    def worth(self, worker_id: str, goal: RunFacts) -> float:
        """Slots by which a move makes things more even; endless, where the worker's own run has no use for it."""
        own, slots = self.places[worker_id], self.offers[worker_id]
        if own is goal or not slots or goal.open_count <= self._given[goal.run_id]:
            return 0.0
        if own.open_count <= self._given[own.run_id] - slots:
            return math.inf
        return self._lack(goal) - self._lack(own) - slots * (1 + STAY_FRACTION)

    def _lack(self, run: RunFacts) -> float:
        """Slots that it lacks of its share, and of what it is owed."""
        return self._scale * run.weight - self._given[run.run_id] + run.owed * self._payback


def _offered(worker: WorkerFacts, rule: CapacityRule) -> int:
    """Slots that a worker could serve runs with."""
    if worker.lend is None:
        return worker.slot_count
    return min(worker.lend, worker.slot_count) if _has_headroom(worker, rule) else 0


def _has_headroom(worker: WorkerFacts, rule: CapacityRule) -> bool:
    return worker.headroom_fraction is None or worker.headroom_fraction >= rule.headroom_min_fraction


def _grant(worker: WorkerFacts, run: RunFacts | None, given: dict[str, float], rule: CapacityRule) -> Grant:
    def make(slot_count: int, reason: str) -> Grant:
        run_id = run.run_id if run is not None and slot_count else None
        return Grant(
            worker_id=worker.worker_id,
            run_id=run_id,
            slot_count=slot_count,
            is_standing=worker.lend is None,
            reason=reason,
        )

    if run is None:
        return make(0, "no run of this model has weights")
    if worker.lend is None:
        return make(worker.slot_count, "dedicated")
    slots = min(worker.lend, worker.slot_count)
    if slots <= 0:
        return make(0, "lending is switched off")
    if not _has_headroom(worker, rule):
        return make(0, f"headroom {worker.headroom_fraction:.0%} is below {rule.headroom_min_fraction:.0%}")
    if run.open_count > given[run.run_id]:
        return make(slots, f"{run.open_count} trajectories open, {given[run.run_id]:.0f} slots given")
    if worker.is_lent and run.idle_s < rule.take_back_after_s:
        return make(slots, f"kept: demand is gone for {run.idle_s:.1f} s only")
    return make(0, "dedicated slots are enough")
