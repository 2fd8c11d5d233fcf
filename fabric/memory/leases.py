"""Leases, leadership and the plan in memory: the twin of queue/leases.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..contract.lease_plan import LeaseChange, LeasePlan, term_of
from ..contract.limits import EVENT_BYTES_MAX
from ..contract.records import Lease
from ..contract.wire import check_size, dump_json
from ..rules.lending.lease import time_left
from .state import Leader, MemoryBroker, RunState

TERM_FROM_S = 1_700_000_000  # as in queue/lua/leases/lead.lua


class MemoryLeases:
    """The controller's part of LeaseBoard (see ports) in memory."""

    def __init__(self, broker: MemoryBroker) -> None:
        self._broker = broker

    def _run(self, run_id: str) -> RunState:
        state = self._broker.runs.get(run_id)
        if state is None:
            raise self._broker.no_run(run_id)
        return state

    async def lead(self, controller_id: str, duration_ms: int, *, process: str = "", is_new: bool = False) -> int:
        now = self._broker.now_ms()
        leader = self._broker.leader
        if leader is not None and leader.until_ms <= now:
            leader = None
        if leader is not None and (leader.name != controller_id or (leader.process != process and not is_new)):
            return 0
        if leader is None or is_new:
            wall_s = int(self._broker.clock.wall_ms() / 1000 + self._broker.set_ahead_s)
            self._broker.term = max(self._broker.term + 1, wall_s - TERM_FROM_S)
        self._broker.leader = Leader(controller_id, process, now + duration_ms)
        return self._broker.term

    async def open_term(self, term: int) -> None:
        for run in self._broker.runs.values():
            run.lease_term = max(run.lease_term, term)

    async def change_leases(self, term: int, changes: Sequence[LeaseChange], assigned: Mapping[str, str]) -> list[bool]:
        for change in changes:
            self._run(change.lease.run_id)
        found: dict[int, bool] = {}
        for change in sorted(changes, key=lambda change: not change.is_end):  # as there: ends first
            found[id(change)] = self._change(term, change)
        return [found[id(change)] for change in changes]

    def _change(self, term: int, change: LeaseChange) -> bool:
        lease, run = change.lease, self._run(change.lease.run_id)
        held = run.leases.get(lease.worker_id)
        if not change.is_end and term >= self._broker.term:
            self._broker.assignments[lease.worker_id] = lease.run_id
        is_refused = term < run.lease_term or (held is not None and held[0] > lease.lease_epoch)
        run.lease_term = max(run.lease_term, term)
        if is_refused:
            return False
        if change.is_end:
            run.leases.pop(lease.worker_id, None)
        else:
            until_ms = self._broker.now_ms() + change.duration_ms if change.duration_ms else 0
            run.leases[lease.worker_id] = (lease.lease_epoch, lease.slot_count, until_ms)
        if change.is_end or held is None or held[0] != lease.lease_epoch:
            self._broker.lease_bell(lease.worker_id).set()
        return True

    async def set_lease(self, lease: Lease, duration_ms: int | None) -> bool:
        change = LeaseChange(lease=lease, duration_ms=duration_ms)
        return (await self.change_leases(term_of(lease), [change], {}))[0]

    async def end_lease(self, lease: Lease) -> None:
        await self.change_leases(term_of(lease), [LeaseChange(lease=lease, is_end=True)], {})

    async def leases(self, run_id: str) -> dict[str, Lease]:
        state = self._run(run_id)
        return {name: self._lease(name, state) for name in state.leases}

    def _lease(self, worker_id: str, state: RunState) -> Lease:
        epoch, slots, last = state.leases[worker_id]
        until_ms = int(last) or None
        return Lease(
            worker_id=worker_id,
            run_id=state.config.run_id,
            lease_epoch=epoch,
            slot_count=slots,
            lease_until_ms=until_ms,
            remaining_ms=time_left(until_ms, int(self._broker.now_ms())),
        )

    async def forget_workers(self, term: int, worker_ids: Sequence[str]) -> bool:
        if term < self._broker.term:
            return False
        for table in (self._broker.workers, self._broker.assignments, self._broker.sharing):
            for name in worker_ids:
                table.pop(name, None)
        return True

    async def set_plan(self, plan: LeasePlan) -> bool:
        if plan.term < self._broker.term:
            return False
        self._broker.plan = LeasePlan.decode(plan.encode())
        return True

    async def plan(self) -> LeasePlan | None:
        return self._broker.plan

    async def add_events(self, events: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
        for kind, facts in events:
            check_size(f"event {kind}", dump_json(dict(facts)), EVENT_BYTES_MAX)
            self._broker.events.append((str(len(self._broker.events) + 1), kind, dict(facts)))
