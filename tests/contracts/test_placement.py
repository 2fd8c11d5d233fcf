"""Where a turn is made, as every queue promises it: see rules/queue/placement.py."""

from __future__ import annotations

import asyncio
import dataclasses

import numpy as np
import pytest

from rollfab.fabric.contract.ids import shard_of
from rollfab.fabric.contract.records import Lease
from rollfab.fabric.ports.queue import Exchange, TurnPush, TurnSettle
from rollfab.fabric.rules.queue.placement import GRACE_MS, PATIENCE_MS_MAX
from tests.contracts.conftest import World
from tests.contracts.test_queue import group_of_size, held_one, lease, result_of, turn_of
from tests.support.leases import end_lease

TOKENS = 500
US_PER_TOKEN = 1000  # half a second to read TOKENS anew


def homed(push: TurnPush, home: str = "w1", **settings: int) -> TurnPush:
    job = dataclasses.replace(push.job, prompt_ids=np.arange(TOKENS, dtype=np.int32))
    return dataclasses.replace(push, job=job, home=home, **settings)


async def take(world: World, worker_id: str, want: int = 8, us_per_token: int = US_PER_TOKEN) -> Exchange:
    exchange: Exchange = await world.turns.exchange(worker_id, want=want, lease_epoch=1, us_per_token=us_per_token)
    return exchange


async def let_pass(world: World, ms: float) -> None:
    """Let time pass as the shards' clocks show it: at most a second between two looks at them."""
    while ms > 0:
        await world.set_clock_ahead(min(ms, 900) / 1000)
        await take(world, "nobody")  # who has no lease
        ms -= 900


def neighbour(world: World) -> str:
    """A group on the shard of g1."""
    count = world.run.shard_count
    return next(name for name in (f"n{index}" for index in range(99)) if shard_of(name, count) == shard_of("g1", count))


def names(exchange: Exchange) -> list[str]:
    return [each.job.turn_id for each in exchange.claims]


async def pushed(world: World, home: str = "w1", **settings: int) -> TurnPush:
    """A turn that waits for its home; w1 and w2 have leases."""
    claim = await held_one(world)
    for worker_id in ("w1", "w2"):
        await lease(world, worker_id)
    push = homed(turn_of(claim), home, **settings)
    assert await world.turns.push("a1", [push]) == [None]
    return push


async def test_a_turn_waits_for_its_home_and_another_worker_is_told_how_long(world: World) -> None:
    await pushed(world)
    assert (await world.board.run_status("r1")).turns["ready"] == 1
    other = await take(world, "w2")
    assert other.claims == []
    assert other.next_ms is not None and 0 < other.next_ms <= TOKENS * US_PER_TOKEN / 1000
    home = await take(world, "w1")
    assert names(home) == ["g1.0.0"] and home.next_ms is None
    assert home.claims[0].waited_s is not None and 0 <= home.claims[0].waited_s < 5
    assert (await world.board.run_status("r1")).turns["ready"] == 0
    assert (await take(world, "w2")).next_ms is None


async def test_a_turn_that_waited_as_long_as_reading_it_would_take_is_anybodys(world: World) -> None:
    await pushed(world)
    await let_pass(world, TOKENS * US_PER_TOKEN / 1000 + 50)
    slow = await take(world, "w2", us_per_token=9 * US_PER_TOKEN)  # who reads slowly leaves it to its home
    assert slow.claims == [] and slow.next_ms is not None
    assert names(await take(world, "w2")) == ["g1.0.0"]
    assert names(await take(world, "w1")) == []


async def test_no_turn_waits_longer_than_patience_allows_however_large_it_is(world: World) -> None:
    await pushed(world)
    await let_pass(world, PATIENCE_MS_MAX + 50)
    assert names(await take(world, "w2", us_per_token=10**6)) == ["g1.0.0"]


async def test_a_home_takes_its_own_turns_before_others_of_their_urgency(world: World) -> None:
    # Given a turn for anybody that is older than one for w1
    other = neighbour(world)
    claim = await held_one(world, other)
    await world.turns.push("a1", [turn_of(claim)])
    await pushed(world)
    assert names(await take(world, "w1", 1)) == ["g1.0.0"]
    assert names(await take(world, "w1", 1)) == [f"{other}.0.0"]


async def test_a_turn_that_nobody_took_for_long_goes_before_all_others(world: World) -> None:
    await pushed(world)
    other = neighbour(world)
    claim = await held_one(world, other)
    await world.turns.push("a1", [turn_of(claim)])
    await let_pass(world, TOKENS * US_PER_TOKEN / 1000 + GRACE_MS + 50)
    assert names(await take(world, "w2")) == ["g1.0.0", f"{other}.0.0"]


@pytest.mark.parametrize("home", ["", "unknown"])
async def test_a_turn_without_a_home_or_whose_home_has_no_lease_is_anybodys(world: World, home: str) -> None:
    await pushed(world, home)
    exchange = await take(world, "w2")
    assert names(exchange) == ["g1.0.0"] and exchange.next_ms is None


async def test_a_turn_whose_home_lost_its_lease_is_anybodys(world: World) -> None:
    claim = await held_one(world)
    await lease(world, "w2")
    await lease(world, "w1")
    await end_lease(world.board, Lease(worker_id="w1", run_id="r1", lease_epoch=1, slot_count=8, lease_until_ms=None))
    await world.turns.push("a1", [homed(turn_of(claim))])
    assert names(await take(world, "w2")) == ["g1.0.0"]


async def test_a_turn_stays_at_home_until_weights_come_that_end_its_cache(world: World) -> None:
    await world.set_head(4)
    claim = await held_one(world)
    for worker_id in ("w1", "w2"):
        await lease(world, worker_id)
    await world.turns.push("a1", [homed(turn_of(claim, 0), home_version=4), homed(turn_of(claim, 1), home_version=3)])
    exchange = await world.turns.exchange("w2", want=8, lease_epoch=1, active_version=4, us_per_token=US_PER_TOKEN)
    assert names(exchange) == ["g1.0.1"]
    assert names(await world.turns.exchange("w1", want=8, lease_epoch=1, active_version=4)) == ["g1.0.0"]


async def test_a_turn_that_its_agent_gave_up_is_nobodys_at_home_too(world: World) -> None:
    push = await pushed(world)
    await world.turns.cancel("a1", [push])
    assert names(await take(world, "w1")) == []
    assert (await world.board.run_status("r1")).turns["ready"] == 0


async def test_a_turn_that_is_asked_for_again_waits_once(world: World) -> None:
    push = await pushed(world)
    assert await world.turns.push("a1", [push]) == [None]
    assert (await world.board.run_status("r1")).turns["ready"] == 1
    assert names(await take(world, "w1")) == ["g1.0.0"]
    assert names(await take(world, "w1")) == []


async def test_a_turn_that_was_given_back_is_anybodys(world: World) -> None:
    await pushed(world)
    (claim,) = (await take(world, "w1")).claims
    settle = TurnSettle(claim=claim, result=result_of("g1.0.0"))
    await let_pass(world, 300)
    assert (await world.turns.reap("w2")).ready_count == 1
    assert names(await take(world, "w2")) == ["g1.0.0"]
    assert (await world.turns.exchange("w1", settles=[settle])).refused == ["g1.0.0"]


async def test_a_home_takes_no_more_than_it_has_places_for_and_the_rest_waits(world: World) -> None:
    assert await world.rollouts.push([group_of_size("g1", 3)]) == [True]
    claims = await world.trajectories.claim("a1", 3)
    await lease(world, "w1", slots=2)
    await lease(world, "w2")
    await world.turns.push("a1", [homed(turn_of(claim)) for claim in claims])
    assert names(await take(world, "w1")) == ["g1.0.0", "g1.1.0"]
    assert names(await take(world, "w2")) == []
    await let_pass(world, TOKENS * US_PER_TOKEN / 1000 + 50)
    assert names(await take(world, "w2")) == ["g1.2.0"]


async def test_a_worker_whose_name_begins_with_anothers_does_not_get_its_turns(world: World) -> None:
    await pushed(world, "w1")
    for worker_id in ("w", "w1-2", "w10"):
        await lease(world, worker_id)
        assert names(await take(world, worker_id)) == []
    assert names(await take(world, "w1")) == ["g1.0.0"]


async def test_its_home_is_woken_and_nobody_else_while_it_has_a_place(world: World) -> None:
    waits = {name: asyncio.create_task(world.turns.wait(name, 60)) for name in ("w1", "w2")}
    await asyncio.sleep(0.1)
    assert not any(wait.done() for wait in waits.values())
    await pushed(world)
    await asyncio.wait(waits.values(), timeout=30, return_when=asyncio.FIRST_COMPLETED)
    assert {name: wait.done() for name, wait in waits.items()} == {"w1": True, "w2": False}
    waits["w2"].cancel()
    await asyncio.gather(*waits.values(), return_exceptions=True)
