"""Runs, workers and leases in memory: the twin of bus/board.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..agreement import Agreement
from ..errors import RunUnknown
from ..limits import EVENT_BYTES_MAX
from ..ports import RunStatus
from ..records import Lease, RunConfig, WorkerInfo
from ..rules.lease import lease_left
from ..rules.runs import check_same_run
from ..wire import check_size, dump_json
from .state import MemoryBroker, RunState


class MemoryLeaseBoard:
    """LeaseBoard (see ports) in memory."""

    def __init__(self, broker: MemoryBroker) -> None:
        self._broker = broker

    async def create_run(self, config: RunConfig) -> RunConfig:
        existing = self._broker.runs.get(config.run_id)
        if existing is None:
            self._broker.runs[config.run_id] = RunState(config=config)
        else:
            check_same_run(existing.config, config)
            existing.config = config
        return config

    async def runs(self) -> dict[str, RunConfig]:
        return {name: state.config for name, state in self._broker.runs.items()}

    async def delete_run(self, run_id: str) -> None:
        self._run(run_id)
        del self._broker.runs[run_id]

    def _run(self, run_id: str) -> RunState:
        state = self._broker.runs.get(run_id)
        if state is None:
            raise RunUnknown(f"run {run_id!r} does not exist on this broker: create it with fabric.run(…)")
        return state

    async def run_status(self, run_id: str) -> RunStatus:
        run = self._run(run_id)
        running = sum(run.trajectories.held.values())
        return RunStatus(
            config=run.config,
            head_version=run.head_version,
            depth=run.depth,
            memory_bytes=run.bytes_held,
            trajectories={
                "queued": run.trajectories.ready_count,
                "running": running,
                "scoring": len(run.trajectories.deadlines) - running,
            },
            turns={"ready": run.turns.ready_count, "claimed": sum(run.turns.held.values())},
            groups_waiting=len(run.completed) + len(run.pending),
            dead_count=len(run.dead),
            counters=dict(run.counters),
            agreement=run.agreement,
        )

    async def set_agreement(self, run_id: str, agreement: Agreement) -> None:
        self._run(run_id).agreement = Agreement.decode(agreement.encode())

    async def heartbeat(self, info: WorkerInfo) -> Lease | None:
        self._broker.workers[info.worker_id] = (info, self._broker.now_ms())
        run_id = self._broker.assignments.get(info.worker_id)
        state = self._broker.runs.get(run_id) if run_id else None
        if state is None or info.worker_id not in state.leases:
            return None
        return lease_left(self._lease(info.worker_id, state), int(self._broker.now_ms()))

    def _lease(self, worker_id: str, state: RunState) -> Lease:
        epoch, slots, until_ms = state.leases[worker_id]
        return Lease(
            worker_id=worker_id,
            run_id=state.config.run_id,
            lease_epoch=epoch,
            slot_count=slots,
            lease_until_ms=int(until_ms) or None,
        )

    async def workers(self) -> dict[str, tuple[WorkerInfo, int]]:
        now = self._broker.now_ms()
        return {name: (info, int(now - beat)) for name, (info, beat) in self._broker.workers.items()}

    async def forget_worker(self, worker_id: str) -> None:
        self._broker.workers.pop(worker_id, None)
        self._broker.assignments.pop(worker_id, None)

    async def lead(self, controller_id: str, duration_ms: int) -> int:
        now = self._broker.now_ms()
        leader = self._broker.leader
        if leader is not None and leader[2] > now and leader[0] != controller_id:
            return 0
        if leader is None or leader[2] <= now:
            self._broker.term += 1
        self._broker.leader = (controller_id, self._broker.term, now + duration_ms)
        return self._broker.term

    async def set_lease(self, lease: Lease, duration_ms: int | None) -> bool:
        run = self._run(lease.run_id)
        held = run.leases.get(lease.worker_id)
        self._broker.assignments[lease.worker_id] = lease.run_id
        if held is not None and held[0] > lease.lease_epoch:
            return False
        until_ms = self._broker.now_ms() + duration_ms if duration_ms else 0
        run.leases[lease.worker_id] = (lease.lease_epoch, lease.slot_count, until_ms)
        if held is None or held[0] != lease.lease_epoch:
            self._broker.lease_bell(lease.worker_id).set()
        return True

    async def end_lease(self, lease: Lease) -> None:
        run = self._run(lease.run_id)
        held = run.leases.get(lease.worker_id)
        if held is not None and held[0] <= lease.lease_epoch:
            del run.leases[lease.worker_id]
        self._broker.lease_bell(lease.worker_id).set()

    async def wait_lease(self, worker_id: str, timeout_s: float) -> None:
        await self._broker.wait(self._broker.lease_bell(worker_id), timeout_s)

    async def leases(self, run_id: str) -> dict[str, Lease]:
        state = self._run(run_id)
        return {name: self._lease(name, state) for name in state.leases}

    async def set_lend(self, worker_id: str, value: str) -> None:
        self._broker.lends[worker_id] = value

    async def lends(self) -> dict[str, str]:
        return dict(self._broker.lends)

    async def add_event(self, kind: str, facts: Mapping[str, Any]) -> None:
        check_size(f"event {kind}", dump_json(dict(facts)), EVENT_BYTES_MAX)
        self._broker.events.append((str(len(self._broker.events) + 1), kind, dict(facts)))

    async def events(self, after: str, count: int, timeout_s: float) -> list[tuple[str, str, dict[str, Any]]]:
        start = int(after.split("-")[0])
        if start >= len(self._broker.events):
            await self._broker.clock.sleep(timeout_s)
        return self._broker.events[start : start + count]
