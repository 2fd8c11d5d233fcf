"""A controller that is started again under its name leads on in its own term, where leases of its first life stand."""

from __future__ import annotations

from rollfab.fabric.clock import SystemClock
from rollfab.fabric.memory.board import MemoryLeaseBoard
from rollfab.fabric.memory.state import MemoryBroker
from rollfab.fabric.records import RunConfig, WorkerInfo
from rollfab.workers.controller import EPOCHS_PER_TERM, Controller, ControllerConfig

SERVING = WorkerInfo(worker_id="serving", role="serving", pid=1, host="here", model="m", slot_count=8)


async def test_its_first_word_ends_what_it_granted_before() -> None:
    # Given a controller that has changed a lease many times
    broker = MemoryBroker()
    board = MemoryLeaseBoard(broker)
    await board.create_run(RunConfig(run_id="run", model="m", environment="e"))
    broker.runs["run"].head_version = 0
    broker.runs["run"].trajectories.ready = ([f"group.{index}" for index in range(20)], [], [])
    await board.heartbeat(SERVING)
    config = ControllerConfig(worker_id="controller")
    term = await board.lead("controller", config.lead_ms)
    first = Controller(board, config, SystemClock())
    for index in range(9):
        await board.set_lend("*", str(index % 2 + 1))
        await first.tick(term)
    assert (await board.leases("run"))["serving"].lease_epoch == term * EPOCHS_PER_TERM + 9

    # When it dies, and another start of it is told to end the lease
    again = Controller(board, config, SystemClock())
    assert await board.lead("controller", config.lead_ms) == term
    await board.set_lend("*", "off")
    await again.tick(term)

    # Then one word is enough
    assert await board.leases("run") == {}
