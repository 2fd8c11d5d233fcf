"""Which worker serves which run, and with how many slots: a pure function of demand and supply.

- Dedicated workers serve whenever a run of their model exists; their lease stands until it is replaced.
- Serving workers are lent only while their team offers them, their guard and their headroom allow it, demand is more
  than the slots that are given already, and they would end what they take sooner than those (benefit.py).
- Those that are lent come first, then the least risky: most headroom and most open, awake, with the weights at hand.
- What is lent is kept through short lulls and short doubts, and what was taken back for the sake of serving rests a
  while: under facts that do not change no worker is lent and taken back in turn. Only what says that serving is not
  safe (switched off, guard gone, headroom gone without a guard) ends a lease at once.
- Runs with work share the slots of their model by weight (division.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from .benefit import Backlog, is_worth, slot_time_s, speed_of
from .capacity_facts import CapacityRule, Grant, RunFacts, WorkerFacts, is_same_model
from .division import divide, settle

__all__ = ["CapacityRule", "Grant", "RunFacts", "WorkerFacts", "plan", "settle"]

RISK_LEVELS = 5  # of headroom times openness: finer ones would only reorder workers that are equally safe


def plan(workers: Sequence[WorkerFacts], runs: Sequence[RunFacts], rule: CapacityRule) -> list[Grant]:
    """What every worker should serve now, in the order given."""
    ordered = sorted(workers, key=_order)
    by_model: dict[tuple[str, str], list[WorkerFacts]] = {}
    for worker in ordered:
        by_model.setdefault((worker.model, worker.model_digest), []).append(worker)
    grants: dict[str, Grant] = {}
    for (model, digest), group in by_model.items():
        known = [run for run in runs if is_same_model(model, digest, run.model, run.model_digest)]
        grants |= _Lending(group, _fitting(known), rule, _idle_reason(model, known)).grants()
    return [grants[worker.worker_id] for worker in workers]


def _order(worker: WorkerFacts) -> tuple[bool, bool, int, int, str]:
    setup_ms = worker.activation_ms + worker.fetch_ms
    return worker.lend is not None, not worker.is_lent, _risk_level(worker), setup_ms, worker.worker_id


def _risk_level(worker: WorkerFacts) -> int:
    """0: nothing is at risk there. Dedicated workers serve nobody else."""
    if worker.lend is None:
        return 0
    headroom = 1.0 if worker.headroom_fraction is None else worker.headroom_fraction
    openness = 1.0 if worker.open_fraction is None else worker.open_fraction
    return int((1.0 - headroom * openness) * RISK_LEVELS)


def _fitting(runs: Sequence[RunFacts]) -> list[RunFacts]:
    """Runs that workers of a model can serve, of those of that model: those with work; without any of these, all."""
    fitting = [run for run in runs if run.has_weights]
    return [run for run in fitting if run.open_count > 0] or fitting


def _idle_reason(model: str, runs: Sequence[RunFacts]) -> str:
    """Why a worker serves none of these runs of its model, where it serves none."""
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
        offers = {each.worker_id: 0 if self._refusals.get(each.worker_id) else _offered(each) for each in workers}
        self._places = divide(offers, {each.worker_id: each.run_id for each in workers}, runs, rule)
        self._given = dict.fromkeys((run.run_id for run in runs), 0)
        self._speeds = dict.fromkeys(self._given, 0.0)
        known = [each.slot_tokens_per_s for each in workers if each.lend is None and each.slot_tokens_per_s]
        self._slot_tokens_per_s = sum(known) / len(known) if known else None

    def grants(self) -> dict[str, Grant]:
        """By worker."""
        found = {}
        for worker in self._workers:
            grant = found[worker.worker_id] = self._grant(worker, self._places.get(worker.worker_id))
            if grant.run_id is not None:
                self._given[grant.run_id] += grant.slot_count
                self._speeds[grant.run_id] += grant.slot_count * speed_of(worker, self._slot_tokens_per_s)
        return found

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
        if run.open_count <= self._given[run.run_id]:
            return _made(worker, run, 0, "the slots given are enough")
        if not self._is_worth(worker, run):
            return _made(worker, run, 0, self._too_slow(worker))
        return _made(worker, run, _offered(worker), self._demand(run))

    def _kept(self, worker: WorkerFacts, run: RunFacts) -> Grant:
        """A worker that is lent: as long as it is of use, and a while longer."""
        rule, slots = self._rule, _offered(worker)
        if run.open_count == 0:
            if run.idle_s < rule.take_back_after_s:
                return _made(worker, run, slots, f"kept: demand is gone for {run.idle_s:.1f} s only")
            return _made(worker, run, 0, "the slots given are enough")
        is_spare = not worker.running_count and run.open_count <= self._given[run.run_id]
        if is_spare:
            why = "the slots given are enough"
        elif not self._is_worth(worker, run):
            why = self._too_slow(worker)
        else:
            return _made(worker, run, slots, self._demand(run))
        if worker.doubt_s < rule.take_back_after_s:
            return _made(worker, run, slots, f"kept for now: {why}", is_doubted=True)
        return _made(worker, run, 0, why)

    def _is_worth(self, worker: WorkerFacts, run: RunFacts) -> bool:
        slot_s = slot_time_s(run.left_tokens, self._slot_tokens_per_s)
        backlog = Backlog(open_count=run.open_count, speed=self._speeds[run.run_id], slot_s=slot_s)
        return is_worth(worker, speed_of(worker, self._slot_tokens_per_s), backlog, self._rule)

    def _demand(self, run: RunFacts) -> str:
        return f"{run.open_count} trajectories open, {self._given[run.run_id]} slots given"

    def _too_slow(self, worker: WorkerFacts) -> str:
        setup_s = 0.0 if worker.is_lent else (worker.activation_ms + worker.fetch_ms) / 1000
        after = f" after {setup_s:.1f} s to get ready" if setup_s else ""
        speed = speed_of(worker, self._slot_tokens_per_s)
        return f"the slots given end sooner what it would take: it has {speed:.0%} of a dedicated one's speed{after}"


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
    """Slots that a worker could serve runs with."""
    return worker.slot_count if worker.lend is None else max(0, min(worker.lend, worker.slot_count))


def _refusal(worker: WorkerFacts, rule: CapacityRule) -> str | None:
    """Why nothing of a serving worker may be lent now, whatever the demand; None: it may."""
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
    if worker.guard_state is not None:
        return None  # it keeps the promise by itself, and uses the headroom up on purpose: how open it is counts
    least = rule.headroom_min_fraction if worker.is_lent else rule.headroom_lend_fraction
    return _low_headroom(worker, least) if _is_below(worker, least) else None


def _is_below(worker: WorkerFacts, fraction: float) -> bool:
    return worker.headroom_fraction is not None and worker.headroom_fraction < fraction


def _low_headroom(worker: WorkerFacts, fraction: float) -> str:
    return f"headroom {worker.headroom_fraction:.0%} is below {fraction:.0%}"
