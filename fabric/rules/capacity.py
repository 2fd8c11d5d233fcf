"""Which worker serves which run, and with how many slots: a pure function of demand and supply.

- Dedicated workers serve whenever a run of their model exists; their lease stands until it is replaced.
- Serving workers are lent only while their team's switch is on, demand is more than the dedicated slots can run, and
  their SLO headroom is not used up; they are taken back when demand has been gone for a while (hysteresis).
- A worker keeps its run as long as that run has work: moving costs a weight switch and every cached prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFacts:
    """A rollout worker as the controller sees it. `lend`: slots its team offers; None: dedicated, all of them."""

    worker_id: str
    model: str
    slot_count: int
    lend: int | None = None
    headroom_fraction: float | None = None
    run_id: str | None = None
    is_lent: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """A run's demand. `open_count`: trajectories queued or running. `idle_s`: how long it has been without any."""

    run_id: str
    model: str
    weight: float
    has_weights: bool
    open_count: int
    idle_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityRule:
    """Bounds of the plan."""

    headroom_min_fraction: float = 0.1  # below this a serving worker keeps everything for serving
    take_back_after_s: float = 3.0  # longer than a synchronous trainer's step, or it would be taken back every step


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
    demand = {run.run_id: run for run in runs}
    given: dict[str, float] = {run.run_id: 0.0 for run in runs}
    grants: dict[str, Grant] = {}
    for worker in sorted(workers, key=lambda each: (each.lend is not None, each.worker_id)):
        run = _choose_run(worker, runs, given)
        grant = _grant(worker, demand.get(run) if run else None, given, rule)
        if grant.run_id is not None and grant.slot_count:
            given[grant.run_id] += grant.slot_count
        grants[worker.worker_id] = grant
    return [grants[worker.worker_id] for worker in workers]


def _choose_run(worker: WorkerFacts, runs: Sequence[RunFacts], given: dict[str, float]) -> str | None:
    """The run this worker should serve: its own while that has work, else the one furthest below its share."""
    fitting = [run for run in runs if run.model == worker.model and run.has_weights]
    busy = [run for run in fitting if run.open_count > 0] or fitting
    if not busy:
        return None

    def share(run: RunFacts) -> float:
        """What the run would have with this worker, by weight."""
        return (given[run.run_id] + worker.slot_count) / run.weight

    poorest = min(busy, key=lambda run: (share(run), run.run_id))
    own = next((run for run in busy if run.run_id == worker.run_id), None)
    return own.run_id if own is not None and share(own) <= share(poorest) else poorest.run_id


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
    if worker.headroom_fraction is not None and worker.headroom_fraction < rule.headroom_min_fraction:
        return make(0, f"headroom {worker.headroom_fraction:.0%} is below {rule.headroom_min_fraction:.0%}")
    if run.open_count > given[run.run_id]:
        return make(slots, f"{run.open_count} trajectories open, {given[run.run_id]:.0f} slots given")
    if worker.is_lent and run.idle_s < rule.take_back_after_s:
        return make(slots, f"kept: demand is gone for {run.idle_s:.1f} s only")
    return make(0, "dedicated slots are enough")
