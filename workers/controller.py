"""The capacity controller: the only writer of leases.

- Stateless but for how long demand has been gone and what runs that take turns are owed: everything else is read from
  the broker at every tick, so it may die and come back, or a standby may take over, at any moment; runs then start
  level.
- Dedicated leases stand without it. Serving leases end by the broker's clock soon after it is gone.
- Lease epochs are `term * 2^20 + count`: a controller that lost the lead can never overwrite its successor's.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from dataclasses import dataclass, field

from ..fabric.clock import Clock
from ..fabric.errors import FabricError
from ..fabric.ports import LeaseBoard, RunStatus
from ..fabric.records import Lease, WorkerInfo
from ..fabric.rules.capacity import CapacityRule, Grant, RunFacts, WorkerFacts, plan, settle

log = logging.getLogger(__name__)

EPOCHS_PER_TERM = 1 << 20  # one change of lease every 100 ms would use them up in 29 hours of one term
ROLES = ("dedicated", "serving")
WAKE_MS = 10_000  # of a sleeping engine that was never woken: later than any that is known to be quicker
PASSED_S_MAX = 1.0  # of the time between two ticks: nobody knows what became of leases in a longer gap


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
    rule: CapacityRule = field(default_factory=CapacityRule)


class Controller:
    """Plans and publishes leases while it leads."""

    def __init__(self, board: LeaseBoard, config: ControllerConfig, clock: Clock) -> None:
        self._board = board
        self._config = config
        self._clock = clock
        self._busy_at_s: dict[str, float] = {}
        self._ticked_at_s: float | None = None
        self._grants: list[Grant] = []
        self._owed: dict[str, float] = {}
        self._trusting_until_s = 0.0
        self._count = 0

    async def run(self, stop: asyncio.Event) -> None:
        """Plan until `stop`; a broker that cannot be reached is waited for."""
        while not stop.is_set():
            try:
                term = await self._board.lead(self._config.worker_id, self._config.lead_ms)
                if term:
                    await self.tick(term)
            except FabricError as error:
                log.warning("controller.tick_failed", extra={"error": str(error)})
            await self._clock.sleep(self._config.tick_s)

    async def tick(self, term: int) -> list[Grant]:
        """One plan, published; returns it."""
        passed_s = self._mind_the_gap()
        workers = await self._live_workers()
        lends = await self._board.lends()
        statuses = [await self._board.run_status(name) for name in await self._board.runs()]
        current = {status.config.run_id: await self._board.leases(status.config.run_id) for status in statuses}
        self._count = max([self._count, *_counts(term, current)])
        facts = [_worker_facts(info, lends, current) for info in workers.values() if info.role in ROLES]
        runs = [self._run_facts(status) for status in statuses]
        self._owed = settle(self._owed, self._grants, runs, passed_s, self._config.rule)
        runs = [dataclasses.replace(run, owed=self._owed.get(run.run_id, 0.0)) for run in runs]
        grants = self._grants = plan(facts, runs, self._config.rule)
        for grant in grants:
            await self._publish(term, grant, current)
        await self._drop_dead(workers, current)
        return grants

    def _mind_the_gap(self) -> float:
        """Seconds since the last tick that can be accounted for.

        After a time without a tick (a broker outage, a pause of ours) heartbeats are old for everyone.

        Workers then get as long as a live one may be silent before any is taken for dead.
        """
        now, age_s = self._clock.now_s(), self._config.worker_age_ms_max / 1000
        gap_s = 0.0 if self._ticked_at_s is None else now - self._ticked_at_s
        if gap_s > age_s / 2:
            self._trusting_until_s = now + age_s
        self._ticked_at_s = now
        return min(gap_s, PASSED_S_MAX)

    async def _live_workers(self) -> dict[str, WorkerInfo]:
        live: dict[str, WorkerInfo] = {}
        for name, (info, age_ms) in (await self._board.workers()).items():
            if age_ms <= self._config.worker_age_ms_max or self._clock.now_s() < self._trusting_until_s:
                live[name] = info
            else:
                await self._board.forget_worker(name)
                await self._board.add_event("worker.gone", {"worker_id": name, "role": info.role})
        return live

    def _run_facts(self, status: RunStatus) -> RunFacts:
        now = self._clock.now_s()
        open_count = status.trajectories["queued"] + status.trajectories["running"]
        run_id = status.config.run_id
        if open_count or run_id not in self._busy_at_s:
            self._busy_at_s[run_id] = now
        return RunFacts(
            run_id=run_id,
            model=status.config.model,
            weight=status.config.weight,
            has_weights=status.head_version >= 0,
            open_count=open_count,
            idle_s=now - self._busy_at_s[run_id],
        )

    async def _publish(self, term: int, grant: Grant, current: dict[str, dict[str, Lease]]) -> None:
        for run_id, leases in current.items():
            held = leases.get(grant.worker_id)
            if held is not None and run_id != grant.run_id:
                await self._end(term, held, grant.reason)
        if grant.run_id is None:
            return
        held = current[grant.run_id].get(grant.worker_id)
        is_same = (
            held is not None and held.slot_count == grant.slot_count and held.lease_epoch >= term * EPOCHS_PER_TERM
        )
        if is_same and grant.is_standing:
            return
        lease = Lease(
            worker_id=grant.worker_id,
            run_id=grant.run_id,
            lease_epoch=held.lease_epoch if held is not None and is_same else self._next_epoch(term),
            slot_count=grant.slot_count,
            lease_until_ms=None,
            reason=grant.reason,
        )
        await self._board.set_lease(lease, None if grant.is_standing else self._config.lease_ms)
        if not is_same:
            await self._say("lease.granted", lease)

    async def _end(self, term: int, held: Lease, reason: str) -> None:
        ending = Lease(
            worker_id=held.worker_id,
            run_id=held.run_id,
            lease_epoch=self._next_epoch(term),
            slot_count=0,
            lease_until_ms=None,
            reason=reason,
        )
        await self._board.end_lease(ending)
        await self._say("lease.ended", ending)

    async def _drop_dead(self, workers: dict[str, WorkerInfo], current: dict[str, dict[str, Lease]]) -> None:
        for leases in current.values():
            for name, lease in leases.items():
                if name not in workers:
                    await self._board.end_lease(lease)

    def _next_epoch(self, term: int) -> int:
        self._count += 1
        return term * EPOCHS_PER_TERM + self._count

    async def _say(self, kind: str, lease: Lease) -> None:
        facts = {
            "worker_id": lease.worker_id,
            "run_id": lease.run_id,
            "slot_count": lease.slot_count,
            "lease_epoch": lease.lease_epoch,
            "reason": lease.reason,
        }
        log.info(kind, extra=facts)
        await self._board.add_event(kind, facts)


def _counts(term: int, current: dict[str, dict[str, Lease]]) -> list[int]:
    """Lease numbers of this term in use: a controller that is started again under its name goes on in its own term."""
    epochs = [lease.lease_epoch for leases in current.values() for lease in leases.values()]
    return [epoch % EPOCHS_PER_TERM for epoch in epochs if epoch // EPOCHS_PER_TERM == term]


def _worker_facts(info: WorkerInfo, lends: dict[str, str], current: dict[str, dict[str, Lease]]) -> WorkerFacts:
    leased = next((run_id for run_id, leases in current.items() if info.worker_id in leases), None)
    return WorkerFacts(
        worker_id=info.worker_id,
        model=info.model or "",
        slot_count=info.slot_count if info.state != "failed" else 0,
        lend=None if info.role == "dedicated" else lend_limit(info, lends),
        headroom_fraction=info.headroom_fraction,
        run_id=leased or info.run_id,  # what it says of itself is a heartbeat old
        is_lent=leased is not None,
        activation_ms=_activation_ms(info) if leased is None else 0,  # under a lease it wakes already
    )


def _activation_ms(info: WorkerInfo) -> int:
    if info.state != "asleep":
        return 0
    return max(1, WAKE_MS if info.wake_ms is None else info.wake_ms)


def lend_limit(info: WorkerInfo, lends: dict[str, str]) -> int:
    """Slots that a serving worker's team offers now: its own switch, else the one for all, else none."""
    value = lends.get(info.worker_id, lends.get("*", "off"))
    if value == "on":
        return info.slot_count
    return int(value) if value.isdigit() else 0
