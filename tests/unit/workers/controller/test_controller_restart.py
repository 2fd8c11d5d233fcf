"""A controller that is started again under its name opens a term of its own: no epoch is given twice."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from rollfab.fabric.contract.clock import SystemClock
from rollfab.fabric.contract.lease_plan import EPOCHS_PER_TERM
from rollfab.fabric.contract.records import RunConfig, WorkerInfo
from rollfab.workers.controller.controller import Controller, ControllerConfig
from tests.standin.fabric import StandInFabric
from tests.support.leases import end_lease
from tests.support.until import until

SERVING = WorkerInfo(worker_id="serving", role="serving", pid=1, host="here", model="m", slot_count=8)
CONFIG = ControllerConfig(worker_id="controller", tick_s=0.05)


class Stage:
    """A run with work, and a serving worker that its team lends."""

    def __init__(self) -> None:
        self.fabric = StandInFabric()
        self.board = self.fabric.board
        self.tables = self.fabric.tables

    async def begin(self) -> Stage:
        await self.board.create_run(RunConfig(run_id="run", model="m", environment="e"))
        run = self.fabric.tables_of("run")
        run.head_version, run.depth = 0, 20
        run.trajectories.set_ready(f"group.{index}" for index in range(20))
        await self.board.heartbeat(SERVING)
        await self.board.set_lend("*", "on")
        return self

    async def life(self) -> list[int]:
        """Epochs of the leases that one life of the controller granted, of two."""
        first = len(self.tables.events)
        stop = asyncio.Event()
        running = asyncio.create_task(Controller(self.board, CONFIG, SystemClock()).run(stop))
        for word, kind in (("2", "lease.granted"), ("off", "lease.ended"), ("on", "lease.granted")):
            seen = len(self.tables.events)
            await self.board.set_lend("*", word)
            await until(lambda seen=seen, kind=kind: kind in [name for name, _ in self.tables.events[seen:]])
        stop.set()
        await running
        granted = [facts for kind, facts in self.tables.events[first:] if kind == "lease.granted"]
        return [facts["lease_epoch"] for facts in granted]


async def test_no_epoch_is_given_twice_though_the_lease_that_had_it_is_gone() -> None:
    stage = await Stage().begin()
    before = await stage.life()
    await end_lease(stage.board, (await stage.board.leases("run"))["serving"])
    after = await stage.life()
    assert min(after) > max(before)


async def test_a_new_term_of_one_controller_begins_with_nothing_that_it_knew() -> None:
    # Given a controller that has just taken a worker back for the sake of serving, so that it rests
    stage = await Stage().begin()
    controller = Controller(stage.board, CONFIG, SystemClock())
    for headroom in (0.9, 0.0, 0.9):
        await stage.board.heartbeat(replace(SERVING, headroom_fraction=headroom))
        await controller.tick(1)
    assert await stage.board.leases("run") == {}
    # When it loses the lead, and leads again
    await controller.tick(2)
    # Then it counts from then on
    assert set(await stage.board.leases("run")) == {"serving"}


async def test_of_two_live_processes_of_one_name_the_later_leads_and_the_other_writes_nothing() -> None:
    # Given a controller that leads
    stage, stop = await Stage().begin(), asyncio.Event()
    first, second = (Controller(stage.board, CONFIG, SystemClock()) for _ in range(2))
    running = [asyncio.create_task(first.run(stop))]
    await until(lambda: stage.tables.term)
    before = stage.tables.term
    # When another one is started under its name, while it lives, and both go on for a while
    running.append(asyncio.create_task(second.run(stop)))
    await until(lambda: stage.tables.term > before)
    after, seen = stage.tables.term, len(stage.tables.events)
    for word in ("2", "off", "on"):
        await stage.board.set_lend("*", word)
        await asyncio.sleep(4 * CONFIG.tick_s)
    stop.set()
    await asyncio.gather(*running)
    # Then there was one change of the lead, and all that was granted since is of the second's term, and its alone
    assert stage.tables.term == after
    assert (first._term, second._term) == (before, after)
    epochs = [facts["lease_epoch"] for kind, facts in stage.tables.events[seen:] if kind.startswith("lease.")]
    assert epochs and {epoch // EPOCHS_PER_TERM for epoch in epochs} == {after}
