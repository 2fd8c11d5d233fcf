"""What happens when somebody sets the time of the broker's machine: nothing, on every broker."""

from __future__ import annotations

import asyncio

import pytest

from rollfab.fabric.contract.records import Lease, WorkerInfo
from tests.contracts.conftest import World
from tests.contracts.test_queue import EXPIRED_S, group_of_size, lease
from tests.support.leases import end_lease, set_lease

HOUR_S = 3600.0
BOTH_WAYS = pytest.mark.parametrize("step_s", [HOUR_S, -HOUR_S], ids=["forward", "back"])
CLAIM_MAX_S = 1.0  # of a step counts as time that has passed


def info(worker_id: str) -> WorkerInfo:
    return WorkerInfo(worker_id=worker_id, role="serving", pid=1, host="h")


async def expired_within(world: World, tries: int) -> int:
    """How often the reaper had to look until it found the dead worker's trajectory."""
    for count in range(tries):
        if (await world.trajectories.reap("reaper")).ready_count:
            return count + 1
        await asyncio.sleep(0.05)
    raise AssertionError(f"not reaped in {tries} looks")


@BOTH_WAYS
async def test_a_dead_workers_claim_ends_in_time_though_the_clock_was_set(world: World, step_s: float) -> None:
    # Given a claim of a worker that dies
    await world.rollouts.push([group_of_size("g1", 1)])
    await world.trajectories.claim("a1", 1)

    # When the time is set by an hour
    await world.set_clock_ahead(step_s)

    # Then the claim ends after the claim time, not an hour later
    assert await expired_within(world, tries=40) >= 1


async def test_a_step_forward_ends_no_claim_that_is_renewed(world: World) -> None:
    # Given a claim of 60 s
    view = world.view(world.run)
    await world.rollouts.push([group_of_size("g1", 1)])
    view.trajectories._claim_ms = 60_000
    (claim,) = await view.trajectories.claim("a1", 1)

    # When the time is set forward by an hour
    await world.set_clock_ahead(HOUR_S)

    # Then it is not reaped, and can be renewed
    assert (await view.trajectories.reap("reaper")).ready_count == 0
    assert await view.trajectories.renew("a1", [claim]) == []


@BOTH_WAYS
async def test_a_lease_ends_in_time_though_the_clock_was_set(world: World, step_s: float) -> None:
    # Given a revocable lease of 200 ms
    await world.board.heartbeat(info("w1"))
    await lease(world, "w1", ms=200)
    held = await world.board.heartbeat(info("w1"))
    assert held is not None
    assert 0 < held.remaining_ms <= 200

    # When the time is set by an hour
    await world.set_clock_ahead(step_s)

    # Then it has ended soon after, and never has more left than it was given
    left = await world.board.heartbeat(info("w1"))
    assert left is None or left.remaining_ms <= 200
    for _ in range(40):
        if await world.board.heartbeat(info("w1")) is None:
            return
        await asyncio.sleep(0.05)
    raise AssertionError("the lease did not end")


async def test_a_lease_is_read_with_what_is_left_of_it_until_it_has_ended(world: World) -> None:
    # Given a standing lease and one of 200 ms
    await lease(world, "w1")
    await lease(world, "w2", ms=200)
    await world.set_clock_ahead(-HOUR_S)
    # When they are read, then it shows what is left, whatever time it is on the broker's machine
    for leases in ((await world.board.survey()).leases["r1"], await world.board.leases("r1")):
        assert leases["w1"].remaining_ms is None
        assert 0 < leases["w2"].remaining_ms <= 200
    # And when its time is over, then nothing is left of it
    await lease(world, "w1")  # a controller is about: those who only read do not move the clock on
    await asyncio.sleep(EXPIRED_S)
    for leases in ((await world.board.survey()).leases["r1"], await world.board.leases("r1")):
        assert (leases["w1"].remaining_ms, leases["w2"].remaining_ms) == (None, 0)


async def test_a_step_forward_takes_no_worker_for_dead(world: World) -> None:
    await world.board.heartbeat(info("w1"))
    await world.set_clock_ahead(HOUR_S)
    await world.board.lead("c1", 1000)  # controllers set the clock before they look
    for workers in (await world.board.workers(), (await world.board.survey()).workers):
        assert workers["w1"][1] <= CLAIM_MAX_S * 1000 + 200


async def test_where_nobody_sets_the_clock_any_more_readers_see_how_long_everybody_is_silent(world: World) -> None:
    await world.board.heartbeat(info("w1"))
    await world.set_clock_ahead(60.0)  # as nobody looked meanwhile
    for workers in (await world.board.workers(), (await world.board.survey()).workers):
        assert workers["w1"][1] >= 60_000


async def test_a_step_back_does_not_keep_a_dead_worker_alive(world: World) -> None:
    await world.board.heartbeat(info("w1"))
    await world.set_clock_ahead(-HOUR_S)
    await world.board.lead("c1", 1000)  # a controller is about: those who only read do not move the clock on
    await asyncio.sleep(EXPIRED_S)
    ((_, age_ms),) = (await world.board.workers()).values()
    assert age_ms >= 200


@BOTH_WAYS
async def test_a_dead_leader_is_followed_in_time_though_the_clock_was_set(world: World, step_s: float) -> None:
    first = await world.board.lead("c1", 200)
    assert await world.board.lead("c2", 200) == 0
    await world.set_clock_ahead(step_s)
    for _ in range(40):
        if await world.board.lead("c2", 200) > first:
            return
        await asyncio.sleep(0.05)
    raise AssertionError("nobody followed")


async def test_a_lease_of_an_older_term_never_overwrites_a_newer_one(world: World) -> None:
    newer = Lease(worker_id="w1", run_id="r1", lease_epoch=7, slot_count=2, lease_until_ms=None)
    older = Lease(worker_id="w1", run_id="r1", lease_epoch=6, slot_count=8, lease_until_ms=None)
    assert await set_lease(world.board, newer, 1000)
    assert not await set_lease(world.board, older, 1000)
    assert (await world.board.leases("r1"))["w1"].slot_count == 2


async def test_a_worker_is_woken_when_its_lease_changes_and_only_then(world: World) -> None:
    # Given a worker that waits for its lease
    waiting = asyncio.create_task(world.board.wait_lease("w1", 5.0))
    await asyncio.sleep(0.05)
    assert not waiting.done()

    # When it gets one
    await lease(world, "w1", epoch=1, ms=1000)

    # Then it is woken, and not again when the lease is only extended
    await asyncio.wait_for(waiting, 2.0)
    await world.board.wait_lease("w1", 0.05)  # a ring too many is no harm
    await lease(world, "w1", epoch=1, ms=1000)
    again = asyncio.create_task(world.board.wait_lease("w1", 5.0))
    await asyncio.sleep(0.1)
    assert not again.done()

    # But when it ends
    ending = Lease(worker_id="w1", run_id="r1", lease_epoch=2, slot_count=0, lease_until_ms=None)
    await end_lease(world.board, ending)
    await asyncio.wait_for(again, 2.0)
