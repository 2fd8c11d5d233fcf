"""How a rollout worker learns of its lease: by the doorbell at once, by the heartbeat in the end, never by spinning."""

from __future__ import annotations

import asyncio

from rollfab.fabric.clock import SystemClock
from rollfab.fabric.errors import BrokerError
from rollfab.fabric.memory.board import MemoryLeaseBoard
from rollfab.fabric.memory.state import MemoryBroker
from rollfab.fabric.records import Lease, RunConfig, WorkerInfo
from rollfab.workers.lease import LeaseKeeper, LeaseOptions
from tests.unit.played_worker import WORKER, PlayedEngine, Stage, until

INFO = WorkerInfo(worker_id=WORKER, role="dedicated", pid=1, host="h", model="m", slot_count=4)


class OddBoard(MemoryLeaseBoard):
    """Counts what it is asked; its doorbell is broken, or never stops ringing."""

    def __init__(self) -> None:
        super().__init__(MemoryBroker())
        self.beat_count = 0
        self.wait_count = 0
        self.error: BrokerError | None = None

    async def heartbeat(self, info: WorkerInfo) -> Lease | None:
        self.beat_count += 1
        return await super().heartbeat(info)

    async def wait_lease(self, worker_id: str, timeout_s: float) -> None:
        self.wait_count += 1
        if self.error is not None:
            raise self.error


def keeper_on(board: MemoryLeaseBoard, *, heartbeat_s: float = 30.0) -> tuple[LeaseKeeper, list[str]]:
    changes: list[str] = []
    options = LeaseOptions(worker_id=WORKER, heartbeat_s=heartbeat_s, retry_s=0.1)
    tools = {"tell": lambda: INFO, "changed": lambda: changes.append("changed")}
    return LeaseKeeper(board, PlayedEngine(), options, SystemClock(), **tools), changes  # type: ignore[arg-type]


async def test_a_revoked_lease_is_known_long_before_the_next_heartbeat() -> None:
    # Given a worker that says hardly ever that it lives
    stage = Stage()
    await stage.ask(1)
    lease = await stage.lease(1, 1)
    async with stage.worker(heartbeat_s=3600.0):
        await until(lambda: stage.engine.turns)
        # When its lease ends, then its turn is back, and a new lease brings it here again
        await stage.fabric.board.end_lease(lease)
        await until(lambda: stage.ready)
        await stage.lease(2, 1)
        await until(lambda: stage.engine.turns)


async def test_a_change_whose_ring_was_lost_is_known_by_the_next_heartbeat() -> None:
    board = OddBoard()
    await board.create_run(RunConfig(run_id="r1", model="m", environment="e"))
    keeper, changes = keeper_on(board, heartbeat_s=0.02)
    task = asyncio.create_task(keeper.beat())
    lease = Lease(worker_id=WORKER, run_id="r1", lease_epoch=1, slot_count=4, lease_until_ms=None)
    await board.set_lease(lease, None)
    await until(lambda: keeper.slot_count == 4)
    await board.end_lease(lease)
    await until(lambda: keeper.slot_count == 0)
    task.cancel()
    assert changes == ["changed", "changed"]


async def test_neither_a_broken_nor_a_stuck_doorbell_makes_a_worker_spin() -> None:
    for error in (BrokerError("the broker is away"), None):
        board = OddBoard()
        board.error = error
        keeper, _ = keeper_on(board)
        tasks = [asyncio.create_task(work()) for work in (keeper.beat, keeper.listen)]
        await asyncio.sleep(0.4)
        for task in tasks:
            task.cancel()
        assert 1 <= board.wait_count <= 21  # 0.4 s at one ring in 20 ms
        assert 1 <= board.beat_count <= 21


async def test_a_lease_that_runs_out_holds_the_engine_though_the_broker_says_nothing() -> None:
    # Given a keeper that hears no more from the broker
    board = OddBoard()
    await board.create_run(RunConfig(run_id="r1", model="m", environment="e"))
    lease = Lease(worker_id=WORKER, run_id="r1", lease_epoch=1, slot_count=4, lease_until_ms=None)
    await board.set_lease(lease, 100)
    engine, changes = PlayedEngine(), []
    options = LeaseOptions(worker_id=WORKER, heartbeat_s=3600.0, retry_s=0.1)
    keeper = LeaseKeeper(
        board, engine, options, SystemClock(), tell=lambda: INFO, changed=lambda: changes.append(keeper.slot_count)
    )  # type: ignore[arg-type]
    tasks = [asyncio.create_task(work()) for work in (keeper.beat, keeper.watch)]
    # When the time of its lease is over, then the engine is held until the turns are given back
    await until(lambda: changes == [4, 0])
    assert (keeper.has_run_out, engine.pauses) == (True, {"lease"})
    await keeper.let_go()
    assert (keeper.has_run_out, engine.pauses) == (False, set())
    for task in tasks:
        task.cancel()


async def test_a_lease_in_doubt_gives_no_slots_until_a_heartbeat_has_said_which_is_good() -> None:
    board = OddBoard()
    await board.create_run(RunConfig(run_id="r1", model="m", environment="e"))
    lease = Lease(worker_id=WORKER, run_id="r1", lease_epoch=1, slot_count=4, lease_until_ms=None)
    await board.set_lease(lease, None)
    keeper, _ = keeper_on(board)
    task = asyncio.create_task(keeper.beat())
    await until(lambda: keeper.slot_count == 4)
    keeper.doubt()
    assert keeper.slot_count == 0
    await until(lambda: keeper.slot_count == 4)
    task.cancel()
    assert board.beat_count == 2
