"""Plans which worker serves which run, and with how many slots: a pure function of demand and supply.

- Dedicated workers serve whenever a run of their model exists; their lease stands until it is replaced.
- Serving workers are lent only while their team offers them, their guard and their headroom allow it, demand is more
  than the slots that are given already, and the run gets on faster with them (see benefit below).
- Workers that are lent come first, then the least risky: most headroom and most open, awake, with the weights at hand.
- A lent worker is kept through short lulls and short doubts, and a worker taken back for serving rests a while: under
  facts that do not change no worker is lent and taken back in turn. A lease ends at once only where serving is
  not safe (switched off, guard gone, headroom gone without a guard).
- Runs with work share the workers of their model by weight (see division.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .capacity_facts import CapacityRule, Grant, RunFacts, WorkerFacts, is_same_model
from .division import Offer, divide, slice_of

RISK_LEVELS = 5  # of headroom times openness: finer ones would only reorder workers that are equally safe


def plan(workers: Sequence[WorkerFacts], runs: Sequence[RunFacts], rule: CapacityRule) -> list[Grant]:
    """Decide what every worker should serve now, in the order given."""
    ordered = sorted(workers, key=_order)
    by_model: dict[tuple[str, str], list[WorkerFacts]] = {}
    for worker in ordered:
        by_model.setdefault((worker.model, worker.model_digest), []).append(worker)
    grants: dict[str, Grant] = {}
    for (model, digest), group in by_model.items():
        known = [run for run in runs if is_same_model(model, digest, run.model, run.model_digest)]
        fitting = _fitting(known)
        grants |= _Lending(group, fitting, rule, _idle_reason(model, known)).grants()
    return [grants[worker.worker_id] for worker in workers]


def _order(worker: WorkerFacts) -> tuple[int, bool, int, int, str]:
    setup_ms = worker.activation_ms + worker.fetch_ms
    rank = 0 if worker.lend is None else 1 if worker.is_spared else 2
    return rank, not worker.is_lent, _risk_level(worker), setup_ms, worker.worker_id


def _risk_level(worker: WorkerFacts) -> int:
    """Return how risky it is to lend the worker; 0: not at all. Dedicated workers serve nobody else."""
    if worker.lend is None:
        return 0
    headroom = 1.0 if worker.headroom_fraction is None else worker.headroom_fraction
    openness = 1.0 if worker.open_fraction is None else worker.open_fraction
    return int((1.0 - headroom * openness) * RISK_LEVELS)


def _fitting(runs: Sequence[RunFacts]) -> list[RunFacts]:
    """List the runs, of those of one model, that its workers can serve; an unfit one has no work while others have."""
    fitting = [run for run in runs if run.has_weights]
    if not any(run.open_count > 0 and not run.is_unfit for run in fitting):
        return fitting
    return [replace(run, open_count=0) if run.is_unfit else run for run in fitting]


def _idle_reason(model: str, runs: Sequence[RunFacts]) -> str:
    """Say why a worker serves none of these runs of its model."""
    if not runs:
        return f"no run has its model {model!r}"
    return f"waits for the first weights of run {runs[0].run_id!r}"


class _Lending:
    """The plan for the workers of one model, in their order: what each run was given so far decides about the next."""

    def __init__(
        self, workers: Sequence[WorkerFacts], runs: Sequence[RunFacts], rule: CapacityRule, idle_reason: str
    ) -> None:
        self._workers = workers
        self._rule = rule
        self._idle_reason = idle_reason
        self._refusals = {each.worker_id: _refusal(each, rule) for each in workers if each.lend is not None}
        known = [each.slot_tokens_per_s for each in workers if each.lend is None and each.slot_tokens_per_s]
        self._slot_tokens_per_s = sum(known) / len(known) if known else None
        offers = {each.worker_id: self._offer(each) for each in workers}
        self._places = divide(offers, {each.worker_id: each.run_id for each in workers}, runs)
        self._given = dict.fromkeys((run.run_id for run in runs), 0)
        self._speeds = dict.fromkeys(self._given, 0.0)
        self._fastest = dict.fromkeys(self._given, 0.0)

    def _offer(self, worker: WorkerFacts) -> Offer:
        slot_count = 0 if self._refusals.get(worker.worker_id) else _offered(worker)
        is_held = worker.lend is None or worker.is_lent
        slice_s, leave_after_s = slice_of(worker.switch_s, self._rule), worker.switch_s if is_held else 0.0
        return Offer(slot_count, self._speed_of(worker), slice_s, leave_after_s)

    def _speed_of(self, worker: WorkerFacts) -> float:
        return speed_of(worker, self._slot_tokens_per_s)

    def grants(self) -> dict[str, Grant]:
        """Grant each worker, in order, what it should serve; returns the grants by worker."""
        found = {}
        for worker in self._workers:
            speed, slice_s = self._speed_of(worker), slice_of(worker.switch_s, self._rule)
            grant = self._grant(worker, self._places.get(worker.worker_id))
            grant = replace(grant, speed=speed, slice_s=slice_s)
            found[worker.worker_id] = grant
            if grant.run_id is not None:
                self._give(grant.run_id, grant.slot_count, speed)
        return found

    def _give(self, run_id: str, slot_count: int, speed: float) -> None:
        self._given[run_id] += slot_count
        self._speeds[run_id] += slot_count * speed
        self._fastest[run_id] = max(self._fastest[run_id], speed)

    def _grant(self, worker: WorkerFacts, run: RunFacts | None) -> Grant:
        if run is None:
            return _made(worker, None, 0, self._idle_reason)
        if worker.lend is None:
            return _made(worker, run, worker.slot_count, "dedicated")
        refusal = self._refusals[worker.worker_id]
        if refusal is not None:
            return _made(worker, run, 0, refusal, is_for_serving=_offered(worker) > 0)
        if worker.is_lent:
            return self._kept(worker, run)
        if not self._is_worth(worker, run):
            return _made(worker, run, 0, self._no_need(worker, run))
        return _made(worker, run, _offered(worker), self._demand(run))

    def _kept(self, worker: WorkerFacts, run: RunFacts) -> Grant:
        """Keep a worker that is lent as long as it is of use, and a while longer."""
        rule, slots = self._rule, _offered(worker)
        if run.open_count == 0:
            if worker.is_spared:
                return _made(worker, run, slots, "kept for the next step: serving's router sends it nothing")
            if run.idle_s < rule.take_back_after_s:
                return _made(worker, run, slots, f"kept: demand is gone for {run.idle_s:.1f} s only")
            return _made(worker, run, 0, "the slots given are enough")
        if worker.is_spared or self._is_worth(worker, run):
            return _made(worker, run, slots, self._demand(run))
        why = self._no_need(worker, run)
        if worker.doubt_s < rule.take_back_after_s:
            return _made(worker, run, slots, f"kept for now: {why}", is_doubted=True)
        return _made(worker, run, 0, why)

    def _is_worth(self, worker: WorkerFacts, run: RunFacts) -> bool:
        backlog = Backlog(
            open_count=run.open_count,
            slot_count=self._given[run.run_id],
            speed=self._speeds[run.run_id],
            fastest=self._fastest[run.run_id],
            slot_s=slot_time_s(run.left_tokens, self._slot_tokens_per_s),
        )
        return is_worth(worker, self._speed_of(worker), backlog, self._rule)

    def _demand(self, run: RunFacts) -> str:
        return f"{run.open_count} trajectories open, {self._given[run.run_id]} slots given"

    def _no_need(self, worker: WorkerFacts, run: RunFacts) -> str:
        if run.open_count <= self._given[run.run_id]:
            return "the slots given are enough"
        setup_s = 0.0 if worker.is_lent else (worker.activation_ms + worker.fetch_ms) / 1000
        after = f" after {setup_s:.1f} s to get ready" if setup_s else ""
        speed = f"{self._speed_of(worker):.0%} of a dedicated one's speed"
        return f"{self._demand(run)}: too few more for a worker at {speed}{after}"


def _made(
    worker: WorkerFacts,
    run: RunFacts | None,
    slot_count: int,
    reason: str,
    *,
    is_doubted: bool = False,
    is_for_serving: bool = False,
) -> Grant:
    return Grant(
        worker_id=worker.worker_id,
        run_id=run.run_id if run is not None and slot_count else None,
        slot_count=slot_count,
        is_standing=worker.lend is None,
        reason=reason,
        is_doubted=is_doubted,
        is_for_serving=is_for_serving,
    )


def _offered(worker: WorkerFacts) -> int:
    """Count the slots with which a worker could serve runs."""
    return worker.slot_count if worker.lend is None else max(0, min(worker.lend, worker.slot_count))


def _refusal(worker: WorkerFacts, rule: CapacityRule) -> str | None:
    """Say why nothing of a serving worker may be lent now, whatever the demand; None: it may be lent."""
    if worker.slot_count <= 0:
        return "it has no slots"  # it failed, or only observes, whatever its team says
    if _offered(worker) <= 0:
        return worker.lend_reason
    if worker.probe is None:
        if rule.requires_probe:
            return "nobody sees its serving engine: it has no probe"
    elif worker.guard_state is None:
        return f"its guard does not see the serving engine by its probe {worker.probe}"
    if worker.guard_state == "shut" and not (worker.is_lent and worker.shut_s < rule.drain_after_s):
        return f"its guard has been shut for {worker.shut_s:.1f} s"
    if not worker.is_lent and worker.withdrawn_s < rule.rest_s:
        return f"rests: it was taken back for serving {worker.withdrawn_s:.1f} s ago"
    if worker.is_spared is False:
        return "it serves for the workers that its pool's router sends nothing to"
    if worker.guard_state is not None:
        return None  # it keeps the promise by itself, and uses the headroom up on purpose: how open it is counts
    least = rule.headroom_min_fraction if worker.is_lent else rule.headroom_lend_fraction
    return _low_headroom(worker, least) if _is_below(worker, least) else None


def _is_below(worker: WorkerFacts, fraction: float) -> bool:
    return worker.headroom_fraction is not None and worker.headroom_fraction < fraction


def _low_headroom(worker: WorkerFacts, fraction: float) -> str:
    return f"headroom {worker.headroom_fraction:.0%} is below {fraction:.0%}"


# ---------------------------------------------------------------- benefit
#
# The benefit gate: does a run get on faster with one more borrowed worker?
#
#     X = N - S - b * (1 - f / m)         surplus: trajectories beyond those for which it pays
#
#     it is kept   while  X > 0
#     it is lent   where  f * (X / V - C) > R
#
# N: open trajectories. S: slots given already, V: their speeds added up, m: the fastest of them. b: slots of the
# borrowed worker, f: the speed of each. Speeds are in dedicated slots. C: wake + fetch, R: computing a prefix again,
# both in *slot times*: what the remaining work of a mean trajectory takes in one slot of a dedicated worker.
#
# - While X > 0 the run makes no fewer tokens a second than without the worker, whoever has which turn: at most b turns
#   are on it and make b * f. They leave at most S + b - N of the slots given empty, which is less than b * f / m, so
#   less than b * f is lost there.
# - Turns move between workers and keep their tokens. So what matters is the speed of all slots together, and not when
#   a slow worker would end a trajectory: as X is gone, its turns go on elsewhere.
# - V trajectories end in a slot time, so X lasts X / V. In that time, less C, each slot of the borrowed worker does f
#   of a dedicated one's work. What is on it as X is gone computes its prefix once more. A lease that would not make
#   up for that is not begun, so demand that hovers around X = 0 begins none; one that was begun outlasts short doubts.
# - Where nothing is given yet, any worker that generates at all is better than none.
#
# So all open work ends at the latest when the slots given need for it, plus the longest trajectory and one prefix:
# the same as without lending, but for the prefix (tests/unit/fabric/rules/lending/test_benefit.py plays it through).
#
# Source: PEARL's benefit gate (lend only what pays for its activation), with what slow slots keep from fast ones.


@dataclass(frozen=True, slots=True, kw_only=True)
class Backlog:
    """A run's work and who has it.

    open_count: trajectories. slot_count: slots given so far; speed: theirs together, fastest: the fastest one's, both
    in dedicated slots. slot_s: a slot time.
    """

    open_count: int
    slot_count: int
    speed: float
    fastest: float = 1.0
    slot_s: float | None = None


def slot_time_s(left_tokens: float | None, slot_tokens_per_s: float | None) -> float | None:
    """Compute the seconds of one slot time; None: nobody knows the work left, or how fast a dedicated slot is."""
    if not left_tokens or not slot_tokens_per_s:
        return None
    return left_tokens / slot_tokens_per_s


def speed_of(worker: WorkerFacts, slot_tokens_per_s: float | None) -> float:
    """Compute the speed of a worker's slot in dedicated slots.

    It was measured while the worker was lent; else it is what its guard lets through.
    """
    if worker.lend is None:
        return 1.0
    if worker.slot_tokens_per_s is not None and slot_tokens_per_s:
        return worker.slot_tokens_per_s / slot_tokens_per_s
    return 1.0 if worker.open_fraction is None else worker.open_fraction


def is_worth(worker: WorkerFacts, speed: float, backlog: Backlog, rule: CapacityRule) -> bool:
    """Tell whether a run gets on faster with this worker, and by more than lending it costs.

    A worker that is lent has paid for that. Where slot times are not known in seconds, waking and fetching count as
    nothing.

    Args:
        speed: of each of its slots, in dedicated slots.
    """
    if speed <= 0 or backlog.open_count <= backlog.slot_count:
        return False
    if backlog.speed <= 0:
        return True
    kept_from_faster = _offered(worker) * max(0.0, 1 - speed / backlog.fastest)
    surplus = backlog.open_count - backlog.slot_count - kept_from_faster
    if worker.is_lent:
        return surplus > 0
    setup_s = (worker.activation_ms + worker.fetch_ms) / 1000
    setup = setup_s / backlog.slot_s if backlog.slot_s else 0.0
    return speed * (surplus / backlog.speed - setup) > rule.refill_fraction
