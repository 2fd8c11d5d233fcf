"""The capacity controller: the only writer of leases.

- The controller reads everything from the broker at every tick, so it may die and come back, or a standby may take
  over, at any moment. Facts that take time to know (demand.py), and debts to runs that take turns, then begin anew.
- Dedicated leases stand without a controller. Serving leases end by the broker's clock soon after it is gone.
- Lease epochs are `term * 2^20 + count`, and all writes carry the controller's term: once a successor has opened its
  own, a controller that lost the lead can write nothing any more. Every process opens a term of its own, even under a
  name that led before or leads: no epoch is given twice, and of processes that share a name, the last to start leads.
- A tick is a handful of round trips, however many workers there are.
- Once a second the controller looks why runs stand still (fabric/inspect/diagnosing.py), and reports changes as events.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...fabric.contract.clock import Clock
from ...fabric.contract.errors import FabricError
from ...fabric.contract.ids import new_process_id
from ...fabric.contract.lease_plan import EPOCHS_PER_TERM, LeaseChange, LeasePlan, PlanRow, RunDemand, term_of
from ...fabric.contract.records import Lease, WorkerInfo
from ...fabric.contract.sharing import LendSetting
from ...fabric.inspect.diagnosing import diagnose_survey
from ...fabric.inspect.diagnosis import Cause
from ...fabric.inspect.history import sample_of
from ...fabric.ports.queue import LeaseBoard, Survey
from ...fabric.rules.lending.advice import Advice, AdviceRule, advise, extra_requests, followed
from ...fabric.rules.lending.capacity import plan
from ...fabric.rules.lending.capacity_facts import CapacityRule, Grant, RunFacts
from ...fabric.rules.lending.division import settle
from ...fabric.rules.lending.hardware import Speeds, read_costs
from .demand import Census, Progress, first_of
from .lease_log import LeaseLog

log = logging.getLogger(__name__)

PASSED_S_MAX = 1.0  # most time between two ticks that counts: nobody knows what became of leases in a longer gap
PLAN_S = 1.0  # between two plans written down for people
COSTS_S = 30.0  # between two times that the queue is told of unlike hardware, where nothing has changed
LOOK_S = 1.0  # between two looks at why runs stand still: a cause seen twice in a row is reported
REASON_LENGTH_MAX = 200  # characters in a plan written down: it has a row for every worker


@dataclass(frozen=True, kw_only=True)
class ControllerConfig:
    """Settings of a controller."""

    worker_id: str
    tick_s: float = 0.25
    """Seconds between plans, [0.05, 5]."""
    lead_ms: int = 2_000
    """A leader that is silent this long has lost the lead."""
    lease_ms: int = 2_000
    """Serving leases end this long after the controller is gone."""
    worker_age_ms_max: int = 5_000
    """A worker that is silent this long is forgotten."""
    sample_s: float = 60.0
    """Seconds between two samples that are kept for people who look later."""
    rule: CapacityRule = field(default_factory=CapacityRule)
    advice: AdviceRule = field(default_factory=AdviceRule)


class Controller:
    """Plans and publishes leases while it leads."""

    def __init__(self, board: LeaseBoard, config: ControllerConfig, clock: Clock) -> None:
        self._board = board
        self._config = config
        self._clock = clock
        self._process = new_process_id()
        self._census = Census()
        self._ticked_at_s: float | None = None
        self._grants: list[Grant] = []
        self._advice: dict[str, Advice] = {}
        self._owed: dict[str, float] = {}
        self._read_costs: dict[str, dict[str, int]] = {}  # by run, as the queue knows them
        self._told_costs_at_s = 0.0
        self._trusting_until_s = 0.0
        self._count = 0
        self._term = 0
        self._shown: LeasePlan | None = None
        self._shown_at_s = 0.0
        self._standing = Standing()
        self._lease_log = LeaseLog()
        self._looked_at_s = -math.inf
        self._sampled_at_s = -math.inf

    async def run(self, stop: asyncio.Event) -> None:
        """Plan until `stop`; wait for a broker that cannot be reached."""
        while not stop.is_set():
            try:
                name, process, is_new = self._config.worker_id, self._process, not self._term
                term = await self._board.lead(name, self._config.lead_ms, process=process, is_new=is_new)
                if term:
                    await self.tick(term)
            except FabricError as error:
                log.warning("controller.tick_failed", extra={"error": str(error)})
            await self._clock.sleep(self._config.tick_s)

    async def tick(self, term: int) -> list[Grant]:
        """Make a plan, publish it, and return it."""
        if term != self._term:
            await self._board.open_term(term)  # before the first reading: nothing older is written after it
            self._begin(term)
            log.info("controller.leads", extra={"term": term})
        passed_s, now_s = self._mind_the_gap()
        survey, lends = await self._board.survey(), await self._board.lends()
        workers, silent = self._told_apart(survey)
        runs = self._census.runs(survey.runs.values(), now_s, survey.leases)
        facts = self._census.workers(workers.values(), survey, lends, now_s=now_s, wall_ms=survey.wall_ms)
        self._owed = settle(self._owed, self._grants, runs, passed_s, self._config.rule)
        runs = [dataclasses.replace(run, owed=self._owed.get(run.run_id, 0.0)) for run in runs]
        self._advice = advise(facts, runs, self._advice, now_s, self._config.advice)
        facts = followed(facts, self._advice)
        grants = self._grants = plan(facts, runs, self._config.rule)
        self._census.learn(facts, grants, now_s)
        changes, news = self._changes(term, grants, {run.run_id: run.names for run in runs}, survey)
        gone = [_ended(lease) for lease in _left_behind(workers, survey)]
        changes += [LeaseChange(lease=lease, is_end=True) for lease in gone]
        news |= {lease.lease_epoch for lease in gone}
        await self._publish(term, changes, news, survey)
        await self._tell_costs(term, workers, survey)
        await self._forget(term, silent)
        shown = await self._show(term, workers, grants, runs, self._census.progress(survey))
        await self._tell(survey, lends, shown)
        return grants

    def _begin(self, term: int) -> None:
        """Begin a term; forget all of an earlier one, as another process may have led since."""
        self._term, self._count = term, 0
        self._census, self._grants, self._advice, self._owed, self._read_costs = Census(), [], {}, {}, {}
        self._shown = None
        self._standing = Standing()
        self._lease_log = LeaseLog()

    def _mind_the_gap(self) -> tuple[float, float]:
        """Return the seconds since the last tick that can be accounted for, and the time now.

        After a time without a tick (a broker outage, a pause of ours) all heartbeats are old. Take no worker for dead
        then until it has had as long again as a live worker may be silent.
        """
        now, age_s = self._clock.now_s(), self._config.worker_age_ms_max / 1000
        gap_s = 0.0 if self._ticked_at_s is None else now - self._ticked_at_s
        if gap_s > age_s / 2:
            self._trusting_until_s = now + age_s
        self._ticked_at_s = now
        return min(gap_s, PASSED_S_MAX), now

    def _told_apart(self, survey: Survey) -> tuple[dict[str, WorkerInfo], dict[str, tuple[WorkerInfo, int]]]:
        """Tell live workers from those that have been silent for too long, with their age; return both."""
        age_ms_max = math.inf if self._clock.now_s() < self._trusting_until_s else self._config.worker_age_ms_max
        live = {name: info for name, (info, age_ms) in survey.workers.items() if age_ms <= age_ms_max}
        return live, {name: each for name, each in survey.workers.items() if name not in live}

    def _changes(
        self, term: int, grants: Sequence[Grant], names: Mapping[str, Sequence[str]], survey: Survey
    ) -> tuple[list[LeaseChange], set[int]]:
        """List the changes of a plan, and the epochs of leases that are news; leave out those that stand as granted.

        names: of the runs that were planned as one. Each has a lease then; the worker goes on following the same one.
        """
        changes: list[LeaseChange] = []
        news: set[int] = set()
        by_worker = _by_worker(survey)
        for grant in grants:
            held = by_worker.get(grant.worker_id, {})
            wanted = () if grant.run_id is None else _in_order(names[grant.run_id], first_of(survey, grant.worker_id))
            for lease in (each for each in held.values() if each.run_id not in wanted):
                ending = self._numbered(term, lease, slot_count=0, reason=grant.reason)
                changes.append(LeaseChange(lease=ending, is_end=True))
                news.add(ending.lease_epoch)
            runs = " ".join(wanted)
            is_told = survey.assignments.get(grant.worker_id) == runs
            for run_id in wanted:
                mine = held.get(run_id)
                is_same = mine is not None and _stands(mine, grant, term)
                if is_same and is_told and grant.is_standing:
                    continue
                lease = mine or Lease(
                    worker_id=grant.worker_id, run_id=run_id, lease_epoch=0, slot_count=0, lease_until_ms=None
                )
                lease = dataclasses.replace(lease, lease_until_ms=None, reason=grant.reason)
                if not is_same:
                    lease = self._numbered(term, lease, slot_count=grant.slot_count, reason=grant.reason)
                    news.add(lease.lease_epoch)
                duration_ms = None if grant.is_standing else self._config.lease_ms
                changes.append(LeaseChange(lease=lease, duration_ms=duration_ms, runs=runs))
        return changes, news

    def _numbered(self, term: int, lease: Lease, *, slot_count: int, reason: str) -> Lease:
        """Return the lease with the next epoch."""
        self._count += 1
        epoch = term * EPOCHS_PER_TERM + self._count
        return dataclasses.replace(lease, lease_epoch=epoch, slot_count=slot_count, lease_until_ms=None, reason=reason)

    async def _publish(self, term: int, changes: Sequence[LeaseChange], news: set[int], survey: Survey) -> None:
        """Carry a plan out, and record its news as events."""
        if not changes:
            return
        done = await self._board.change_leases(term, changes, survey.assignments)
        events = []
        for change, is_done in zip(changes, done, strict=True):
            if is_done and change.lease.lease_epoch in news:
                kind = "lease.ended" if change.is_end else "lease.granted"
                events.append((kind, _event(change.lease)))
                log.info(kind, extra=events[-1][1])
        if not all(done):
            log.warning("controller.refused", extra={"term": term, "count": len(done) - sum(done)})
        if events:
            await self._board.add_events(events)

    async def _tell_costs(self, term: int, workers: Mapping[str, WorkerInfo], survey: Survey) -> None:
        """Tell the queue of runs whose workers are of unlike hardware, and what reading costs there."""
        costs: dict[str, dict[str, int]] = {}
        for run_id, status in survey.runs.items():
            own = [workers[name] for name in survey.leases.get(run_id, ()) if name in workers]
            speeds = [Speeds(info.hardware, info.prefill_us, info.decode_us) for info in own]
            is_wanted = status.config.hardware_affinity and status.config.prefix_affinity
            costs[run_id] = read_costs(speeds, self._read_costs.get(run_id, {})) if is_wanted else {}
        is_due = self._clock.now_s() - self._told_costs_at_s >= COSTS_S  # a run may have been made again
        known = self._read_costs
        news = {name: own for name, own in costs.items() if own != known.get(name, {}) or (own and is_due)}
        if news:
            self._told_costs_at_s = self._clock.now_s()
            await self._board.set_read_costs(term, news)
        self._read_costs = costs

    async def _forget(self, term: int, silent: Mapping[str, tuple[WorkerInfo, int]]) -> None:
        if silent and await self._board.forget_workers(term, list(silent)):
            facts = [
                {"worker_id": name, "role": info.role, "pool": info.pool, "silent_ms": age_ms}
                for name, (info, age_ms) in silent.items()
            ]
            await self._board.add_events([("worker.gone", each) for each in facts])

    async def _show(
        self,
        term: int,
        workers: Mapping[str, WorkerInfo],
        grants: Sequence[Grant],
        runs: Sequence[RunFacts],
        progress: Mapping[str, Progress],
    ) -> LeasePlan | None:
        """Write the plan down for people if it has changed, at most once a second; return the plan as written."""
        now_s = self._clock.now_s()
        if self._shown is not None and now_s - self._shown_at_s < PLAN_S:
            return self._shown
        rows = tuple(_row(workers[grant.worker_id], grant) for grant in grants)
        counts = self._census.open_counts
        demand = tuple(
            _demand(name, counts[name], [grant for grant in grants if grant.run_id == run.run_id], progress[name])
            for run in runs
            for name in run.names
        )
        shown = LeasePlan(
            controller_id=self._config.worker_id,
            term=term,
            made_at_ms=self._clock.wall_ms(),
            rows=rows,
            runs=demand,
            extra_requests=extra_requests(self._advice),
        )
        if self._shown is not None and dataclasses.replace(shown, made_at_ms=self._shown.made_at_ms) == self._shown:
            return self._shown
        if await self._board.set_plan(shown):
            self._shown, self._shown_at_s = shown, now_s
        return self._shown

    async def _tell(self, survey: Survey, lends: Mapping[str, LendSetting], shown: LeasePlan | None) -> None:
        """Report once for every run that it stands still and why, and later that it moves again."""
        now_s = self._clock.now_s()
        if now_s - self._looked_at_s < LOOK_S:
            return
        self._looked_at_s = now_s
        self._lease_log.look(survey)
        causes = await diagnose_survey(self._board, survey, lends, shown, await self._board.memory_bytes())
        events = self._standing.news({run_id: found[0] for run_id, found in causes.items()})
        for kind, facts in events:
            log.info(kind, extra=facts)
        if events:
            await self._board.add_events(events)
        await self._sample(survey, causes, now_s)

    async def _sample(self, survey: Survey, causes: Mapping[str, Sequence[Cause]], now_s: float) -> None:
        """Keep how all goes for people who look later, once a minute."""
        if now_s - self._sampled_at_s >= self._config.sample_s:
            self._sampled_at_s = now_s
            leases = self._lease_log.rows(survey.wall_ms)
            sample = sample_of(survey, causes, await self._board.sharing(), leases)
            await self._board.add_sample(self._term, sample)


class Standing:
    """Remembers which runs were reported to stand still, and why. A cause seen only once is not reported: it may be
    weights on their way."""

    def __init__(self) -> None:
        self._seen: dict[str, str] = {}
        self._told: dict[str, str] = {}

    def news(self, causes: Mapping[str, Cause]) -> list[tuple[str, dict[str, Any]]]:
        """Make an event for each change in the runs' causes. causes: the first cause of each run, as it is now."""
        events = []
        for run_id, cause in causes.items():
            is_steady = self._seen.get(run_id) == cause.code
            if is_steady and not cause.is_well and self._told.get(run_id) != cause.code:
                self._told[run_id] = cause.code
                facts = {"run_id": run_id, "code": cause.code, "text": cause.text, "step": cause.step}
                events.append(("run.stands", facts))
            elif cause.is_well and self._told.pop(run_id, None) is not None:
                events.append(("run.moves", {"run_id": run_id, "code": cause.code, "text": cause.text}))
        self._seen = {run_id: cause.code for run_id, cause in causes.items()}
        self._told = {run_id: code for run_id, code in self._told.items() if run_id in causes}
        return events


def _by_worker(survey: Survey) -> dict[str, dict[str, Lease]]:
    """Return the leases of each worker, by run."""
    found: dict[str, dict[str, Lease]] = {}
    for run_id, leases in survey.leases.items():
        for name, lease in leases.items():
            found.setdefault(name, {})[run_id] = lease
    return found


def _in_order(names: Sequence[str], first: str) -> Sequence[str]:
    """Put `first` in front, if it is among these names."""
    return [first, *(name for name in names if name != first)] if first in names else names


def _stands(lease: Lease, grant: Grant, term: int) -> bool:
    """Tell whether a lease is as granted; a lease that has ended is not: it is granted anew, with a new epoch."""
    is_whole = lease.slot_count == grant.slot_count
    return is_whole and term_of(lease) >= term and not lease.has_ended


def _left_behind(workers: Mapping[str, WorkerInfo], survey: Survey) -> list[Lease]:
    """List the leases of workers that are gone."""
    return [lease for leases in survey.leases.values() for name, lease in leases.items() if name not in workers]


def _ended(lease: Lease) -> Lease:
    """Return the lease as the event of its end shows it."""
    return dataclasses.replace(lease, slot_count=0, reason="its worker left, died or was silent for too long")


def _event(lease: Lease) -> dict[str, Any]:
    return {
        "worker_id": lease.worker_id,
        "run_id": lease.run_id,
        "slot_count": lease.slot_count,
        "lease_epoch": lease.lease_epoch,
        "reason": lease.reason,
    }


def _row(info: WorkerInfo, grant: Grant) -> PlanRow:
    return PlanRow(
        worker_id=grant.worker_id,
        role=info.role,
        slot_count=grant.slot_count,
        run_id=grant.run_id,
        reason=grant.reason if len(grant.reason) <= REASON_LENGTH_MAX else grant.reason[: REASON_LENGTH_MAX - 1] + "…",
    )


def _demand(run_id: str, open_count: int, grants: Sequence[Grant], progress: Progress) -> RunDemand:
    """Show what a run needs and may use: the slots of these grants, all of them."""
    return RunDemand(
        run_id=run_id,
        open_count=open_count,
        dedicated_count=sum(grant.slot_count for grant in grants if grant.is_standing),
        borrowed_count=sum(grant.slot_count for grant in grants if not grant.is_standing),
        moved_at_ms=progress.moved_at_ms,
        stale_count=progress.stale_count,
    )
