"""The facts of a capacity plan, from the board's readings, and since when each has been so.

- A reading shows one moment. The census keeps the facts that take time: how long demand has been gone, or a worker of
  no use, a guard shut, a lease in doubt, when a worker was taken back, and how fast its slots were while it was lent.
- All of it may be lost: a controller that starts anew counts from then on.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ...fabric.contract.records import Lease, WorkerInfo
from ...fabric.contract.sharing import ALL, LendSetting
from ...fabric.ports.queue import RunStatus, Survey
from ...fabric.rules.lending.capacity_facts import SWITCH_S_MAX, Grant, RunFacts, WorkerFacts
from ...fabric.rules.lending.hours import minute_of_week
from ...fabric.rules.lending.terms import LendTerms, terms
from ...fabric.rules.lending.together import together

ROLES = ("dedicated", "serving")
WAKE_MS = 10_000  # assumed if an engine never woke yet: so it comes after all engines that are known to be quicker
SAMPLE_COUNT_MIN = 5  # heartbeats in a row under load, before we believe a speed
SPEED_S = 60.0  # we believe a speed so long after its last sample: a worker found slow is not tried again at once
SMOOTHING = 0.2  # weight of a new sample
FAILS_S = 3.0  # that a worker cannot get a run's weights, before other runs go first: a chain may just be mended
REST_S = 60.0  # for which they do, unless the run has another version
THINK_S = 5.0  # a run that has asked for no turn for so long wants no slots until it does, however much it has open
IDLE_S = 3600.0  # for which a run without work or a worker has had none, when it is seen for the first time
LATELY_S = 0.5  # beside others, a run has work for as many slots as it had turns at once in this time


@dataclass(slots=True)
class _Speed:
    """Tokens a second of a worker's busy slot, smoothed, over heartbeats with turns running before and after.

    believed_per_s: the speed when it was last known well enough, at at_s.
    """

    per_s: float = 0.0
    believed_per_s: float = 0.0
    sample_count: int = 0
    at_s: float = -math.inf
    seen: tuple[int, int] = (-1, 0)  # tokens made and turns running, at the last heartbeat

    def look(self, info: WorkerInfo, now_s: float) -> None:
        """Take a sample from a heartbeat, unless it was seen before: token_count grows with each under load."""
        before, self.seen = self.seen, (info.token_count, info.running_count)
        if before == self.seen:
            return
        busy = (before[1] + info.running_count) / 2
        if not before[1] or not info.running_count or not info.tokens_per_s:
            self.sample_count = 0 if not info.running_count else self.sample_count
            return
        weight = SMOOTHING if self.sample_count else 1.0
        self.per_s += (info.tokens_per_s / busy - self.per_s) * weight
        self.sample_count += 1
        if self.sample_count >= SAMPLE_COUNT_MIN:
            self.believed_per_s, self.at_s = self.per_s, now_s

    def known(self, now_s: float) -> float | None:
        """Return the speed, or None if it was never known well enough, or too long ago."""
        return self.believed_per_s if now_s - self.at_s < SPEED_S else None


@dataclass(frozen=True, slots=True)
class Progress:
    """What has come of a run.

    sign: what changes with each token, turn and end; moved_at_ms: since when it is so, by the fabric's clock.
    completed_max: the most trajectories that were completed at a time since a group was consumed last; rerun_count:
    those that had run again by then. stale_count: those that have run again since, as they ended too stale.
    """

    sign: int
    moved_at_ms: int
    completed_max: int = 0
    consumed_count: int = 0
    rerun_count: int = 0
    stale_count: int = 0

    def then(self, sign: int, now_ms: int, counters: Mapping[str, int]) -> Progress:
        """Return what it is with newer counters."""
        completed, consumed = counters.get("trajectories_completed", 0), counters.get("groups_consumed", 0)
        reruns = counters.get("reruns", 0)
        has_more = completed > self.completed_max or consumed > self.consumed_count
        has_more |= reruns < self.rerun_count  # fewer: they began anew
        rerun_count = reruns if has_more else self.rerun_count
        return Progress(
            sign=sign,
            moved_at_ms=self.moved_at_ms if sign == self.sign else now_ms,
            completed_max=completed if has_more else self.completed_max,
            consumed_count=consumed,
            rerun_count=rerun_count,
            stale_count=reruns - rerun_count,
        )


class Census:
    """Makes facts for the rules, from one reading after another.

    open_counts: the slots that each run has work for, by itself.
    """

    def __init__(self) -> None:
        self.open_counts: dict[str, int] = {}
        self._busy_at_s: dict[str, float] = {}
        self._asked_at_s: dict[str, float] = {}
        self._turns: dict[str, list[tuple[float, int]]] = {}  # run → turns that it had at once, and when, lately
        self._shut_at_s: dict[str, float] = {}
        self._doubt_at_s: dict[str, float] = {}
        self._withdrawn_at_s: dict[str, float] = {}
        self._speeds: dict[str, _Speed] = {}
        self._switching: dict[str, tuple[str, float]] = {}  # worker → run that it goes to, and since when
        self._failing: dict[str, float] = {}  # run whose weights no worker can get → since when
        self._unfit: dict[str, tuple[int, float]] = {}  # run → its head that a worker could not get, and when
        self._given: dict[str, list[int]] = {}  # run → slots of its workers, by the last plan
        self._spare_at_s: dict[str, float] = {}
        self._firsts: dict[str, str] = {}  # run → the one as which it is planned, with others
        self._progress: dict[str, Progress] = {}

    def progress(self, survey: Survey) -> Mapping[str, Progress]:
        """Say what has come of each run; at first it moved at the time of the first reading.

        A worker that serves several does not tell whose its tokens are: they are those of a run with turns claimed.
        """
        made: dict[str, int] = {}
        for info, _ in survey.workers.values():
            for run_id in (info.run_id or "", *info.guest_versions):
                status = survey.runs.get(run_id)
                if not info.guest_versions or (status is not None and status.turns.get("claimed")):
                    made[run_id] = made.get(run_id, 0) + info.token_count
        found: dict[str, Progress] = {}
        for run_id, status in survey.runs.items():
            sign = sum(status.counters.values()) + made.get(run_id, 0)
            before = self._progress.get(run_id)
            if before is None:
                before = Progress(sign, survey.now_ms, completed_max=-1)
            found[run_id] = before.then(sign, survey.now_ms, status.counters)
        self._progress = found
        return found

    def workers(
        self,
        infos: Iterable[WorkerInfo],
        survey: Survey,
        lends: Mapping[str, LendSetting],
        *,
        now_s: float,
        wall_ms: int,
    ) -> list[WorkerFacts]:
        """Make the facts of the rollout workers among these."""
        self._busy_at_s = {name: at_s for name, at_s in self._busy_at_s.items() if name in survey.runs}
        self._asked_at_s = {name: at_s for name, at_s in self._asked_at_s.items() if name in survey.runs}
        self._turns = {name: counts for name, counts in self._turns.items() if name in survey.runs}
        leased = _leased(survey)
        offers = _Offers(lends, minute_of_week(wall_ms))
        return [
            self._worker(info, leased.get(info.worker_id), now_s, offers.of(info))
            for info in infos
            if info.role in ROLES
        ]

    def _worker(
        self,
        info: WorkerInfo,
        leased: str | None,
        now_s: float,
        offer: tuple[int | None, str],
    ) -> WorkerFacts:
        name = info.worker_id
        if info.guard_state != "shut":
            self._shut_at_s.pop(name, None)
        self._look_at_weights(info, now_s)
        speed = self._speeds.setdefault(name, _Speed())
        speed.look(info, now_s)
        run_id = leased or info.run_id  # the worker's own word is a heartbeat old
        return WorkerFacts(
            worker_id=name,
            model=info.model or "",
            model_digest=info.model_digest,
            slot_count=info.slot_count if info.state != "failed" else 0,
            lend=offer[0],
            lend_reason=offer[1],
            headroom_fraction=info.headroom_fraction,
            load_fraction=info.load_fraction,
            request_count=info.request_count,
            pool=info.pool,
            run_id=None if run_id is None else self._firsts.get(run_id, run_id),
            is_lent=leased is not None,
            activation_ms=_activation_ms(info) if leased is None else 0,  # under a lease it is waking already
            fetch_ms=(info.switch_ms or 0) if leased is None else 0,
            switch_s=self._switch_s(info, leased, now_s),
            probe=info.probe,
            guard_state=info.guard_state,
            shut_s=now_s - self._shut_at_s.setdefault(name, now_s) if info.guard_state == "shut" else 0.0,
            open_fraction=info.open_fraction,
            slot_tokens_per_s=speed.known(now_s),
            doubt_s=now_s - self._doubt_at_s.get(name, now_s),
            withdrawn_s=now_s - self._withdrawn_at_s.get(name, -math.inf),
        )

    def _look_at_weights(self, info: WorkerInfo, now_s: float) -> None:
        """Note a run that a worker came to, and whose weights it cannot get: another run should have the worker."""
        run_id = info.run_id
        if run_id is None:
            return
        is_failing = info.active_version < 0 and bool(info.error or info.weights_note)
        if info.active_version >= 0:
            self._failing.pop(run_id, None)
            self._unfit.pop(run_id, None)
        elif is_failing and now_s - self._failing.setdefault(run_id, now_s) >= FAILS_S:
            self._unfit[run_id] = info.head_version, now_s

    def _is_unfit(self, status: RunStatus, now_s: float) -> bool:
        head_version, at_s = self._unfit.get(status.config.run_id, (-1, -math.inf))
        return head_version == status.head_version and now_s - at_s < REST_S

    def _switch_s(self, info: WorkerInfo, leased: str | None, now_s: float) -> float:
        """Say what going to another run takes: as long as the last time, or SWITCH_S_MAX while it is under way.

        Something that keeps the worker from arriving, and that it knows, is no reason to wait for it.
        """
        name, known_s = info.worker_id, (info.switch_ms or 0) / 1000
        is_there = info.run_id == leased and info.active_version >= 0
        if leased is None or is_there or info.state == "failed" or info.error or info.weights_note:
            self._switching.pop(name, None)
            return known_s
        run_id, since_s = self._switching.get(name, ("", 0.0))
        if run_id != leased:
            self._switching[name] = leased, now_s
            return SWITCH_S_MAX
        return SWITCH_S_MAX if now_s - since_s < SWITCH_S_MAX else known_s

    def runs(
        self, statuses: Iterable[RunStatus], now_s: float, leases: Mapping[str, Mapping[str, Lease]] | None = None
    ) -> list[RunFacts]:
        """Make the facts of all runs. leases: by run and worker; a run that has one was at work lately.

        Where another run of its model asks for turns, a run wants as many slots as it had turns at once lately: what is
        in its environments would keep a worker idle, and the other waiting. Runs of the same weights are one.
        """
        asked = [(status, self._turn_count(status, now_s)) for status in statuses]
        asking = Counter(_pool_key(status) for status, count in asked if count)
        asking_alike = Counter(_engine_key(status) for status, count in asked if count)
        found = []
        for status, count in asked:
            has_others = asking[_pool_key(status)] > asking_alike[_engine_key(status)]
            is_served = leases is None or bool(leases.get(status.config.run_id))
            facts = self.run(status, now_s, turn_count=count if has_others else None, is_served=is_served)
            found.append(facts)
        self.open_counts = {run.run_id: run.open_count for run in found}
        found = together(found)
        self._firsts = {name: run.run_id for run in found for name in run.runs}
        spare_s = {run.run_id: self._spare_s(run.run_id, run.open_count, now_s) for run in found if run.runs}
        return [replace(run, spare_s=spare_s.get(run.run_id, run.spare_s)) for run in found]

    def _turn_count(self, status: RunStatus, now_s: float) -> int:
        """Count the turns that a run had at once lately, ready or claimed: the most. Without weights it has none."""
        known = self._turns.get(status.config.run_id, [])
        lately = [(at_s, count) for at_s, count in known if now_s - at_s < LATELY_S]
        lately.append((now_s, sum(status.turns.values()) if status.head_version >= 0 else 0))
        self._turns[status.config.run_id] = lately
        return max(count for _, count in lately)

    def run(
        self, status: RunStatus, now_s: float, *, turn_count: int | None = None, is_served: bool = True
    ) -> RunFacts:
        """Make the facts of one run.

        turn_count: the most slots that it wants; None: one for each open trajectory. is_served: whether it has a
        worker; one without, and without work, that is seen for the first time has rested for long. A controller that
        begins to lead would else take every run that was ever through for one between two steps.

        A run whose trajectories all hang or think, or that no agent plays, wants no slots: others would wait for it.
        """
        queued, running = status.trajectories["queued"], status.trajectories["running"]
        open_count, run_id = queued + running, status.config.run_id
        if sum(status.turns.values()) or not open_count or run_id not in self._asked_at_s:
            self._asked_at_s[run_id] = now_s
        if now_s - self._asked_at_s[run_id] >= THINK_S:
            open_count = 0
        if turn_count is not None:
            open_count = min(open_count, turn_count)
        if open_count:
            self._busy_at_s[run_id] = now_s
        self._busy_at_s.setdefault(run_id, now_s if is_served else now_s - IDLE_S)
        return RunFacts(
            run_id=run_id,
            model=status.config.model,
            model_digest=status.config.model_digest,
            weight=status.config.weight,
            has_weights=status.head_version >= 0,
            open_count=open_count,
            idle_s=now_s - self._busy_at_s[run_id],
            spare_s=self._spare_s(run_id, open_count, now_s),
            weights=status.weights,
            is_unfit=self._is_unfit(status, now_s),
            left_tokens=_left_tokens(status, queued, running),
        )

    def _spare_s(self, run_id: str, open_count: int, now_s: float) -> float:
        """Return how long the run has had a worker more than it has work for: of one without work, since its last."""
        given = self._given.get(run_id)
        if not given or open_count > sum(given) - min(given):
            self._spare_at_s.pop(run_id, None)
            return 0.0
        return now_s - self._spare_at_s.setdefault(run_id, now_s if open_count else self._asked_at_s[run_id])

    def learn(self, facts: Sequence[WorkerFacts], grants: Sequence[Grant], now_s: float) -> None:
        """Note the decision on each worker: when a doubt began or ended, and when serving took the worker back."""
        for worker, grant in zip(facts, grants, strict=True):
            if grant.is_doubted:
                self._doubt_at_s.setdefault(worker.worker_id, now_s)
            else:
                self._doubt_at_s.pop(worker.worker_id, None)
            if worker.is_lent and grant.is_for_serving and not grant.slot_count:
                self._withdrawn_at_s[worker.worker_id] = now_s
        self._given = {}
        for grant in grants:
            if grant.run_id is not None:
                self._given.setdefault(grant.run_id, []).append(grant.slot_count)
        self._unfit = {run_id: row for run_id, row in self._unfit.items() if run_id in self._busy_at_s}
        self._failing = {run_id: at_s for run_id, at_s in self._failing.items() if run_id in self._busy_at_s}
        self._spare_at_s = {run_id: at_s for run_id, at_s in self._spare_at_s.items() if run_id in self._given}
        self._forget({worker.worker_id for worker in facts})

    def _forget(self, known: set[str]) -> None:
        """Drop the entries of workers that are gone."""
        for table in (self._shut_at_s, self._doubt_at_s, self._withdrawn_at_s, self._speeds, self._switching):
            for name in [name for name in table if name not in known]:
                del table[name]


def _leased(survey: Survey) -> dict[str, str]:
    """Return the run whose lease each worker has; of those with several, the one whose weights it follows."""
    found: dict[str, str] = {}
    for run_id, leases in survey.leases.items():
        for name, lease in leases.items():
            if not lease.has_ended and (name not in found or first_of(survey, name) == run_id):
                found[name] = run_id
    return found


def first_of(survey: Survey, worker_id: str) -> str:
    """Return the run whose weights a worker was told to follow; "": none."""
    return survey.assignments.get(worker_id, "").partition(" ")[0]


class _Offers:
    """The offers of serving teams at this minute of the week; looks up once all workers that the same settings name."""

    def __init__(self, lends: Mapping[str, LendSetting], minute: int) -> None:
        self._lends = lends
        self._minute = minute
        self._named = frozenset(lends[ALL].names) if ALL in lends else frozenset()
        self._found: dict[tuple[str, str, bool], LendTerms] = {}

    def of(self, info: WorkerInfo) -> tuple[int | None, str]:
        """Return how many slots a worker may be lent for, and why no more; None for a dedicated worker."""
        if info.role == "dedicated":
            return None, ""
        name = info.worker_id if info.worker_id in self._lends else ""
        key = (name, info.pool, info.worker_id in self._named)
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = terms(self._lends, info.worker_id, info.pool, self._minute)
        if not found.may_lend:
            return 0, found.reason
        limit = info.slot_count if found.slot_count_max is None else min(found.slot_count_max, info.slot_count)
        return limit, found.reason


def _pool_key(status: RunStatus) -> str:
    return status.config.model_digest or status.config.model


def _engine_key(status: RunStatus) -> tuple[str, str]:
    """Return what runs have in common that one engine can serve at once."""
    return _pool_key(status), status.weights or status.config.run_id


def _activation_ms(info: WorkerInfo) -> int:
    if info.state != "asleep":
        return 0
    return max(1, WAKE_MS if info.wake_ms is None else info.wake_ms)


def _left_tokens(status: RunStatus, queued: int, running: int) -> float | None:
    """Estimate the tokens left to a mean open trajectory: all if it is queued, half if it runs; None if unknown."""
    ended = status.counters.get("trajectories_completed", 0)
    if not ended or not queued + running:
        return None
    share = (queued + running / 2) / (queued + running)
    return share * status.counters.get("tokens", 0) / ended
