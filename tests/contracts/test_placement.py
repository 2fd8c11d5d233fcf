"""Where a turn is made, as every queue promises it: see rules/queue/placement.py."""

from __future__ import annotations

import asyncio
import dataclasses

import numpy as np
import pytest

from rollfab.fabric.contract.ids import shard_of
from rollfab.fabric.contract.records import Lease
from rollfab.fabric.ports.queue import Exchange, TurnPush, TurnSettle
from rollfab.fabric.rules.queue.placement import GRACE_MS, PATIENCE_MS_MAX, READY_MS
from tests.contracts.conftest import World
from tests.contracts.test_queue import group_of_size, held_one, lease, result_of, turn_of
from tests.support.leases import end_lease

TOKENS = 500
US_PER_TOKEN = 1000  # half a second to read TOKENS anew


def homed(push: TurnPush, home: str = "w1", **settings: int) -> TurnPush:
    job = dataclasses.replace(push.job, prompt_ids=np.arange(TOKENS, dtype=np.int32))
    return dataclasses.replace(push, job=job, home=home, **settings)


async def take(
    world: World, worker_id: str, want: int = 8, us_per_token: int = US_PER_TOKEN, hardware: str = ""
) -> Exchange:
    exchange: Exchange = await world.turns.exchange(
        worker_id, want=want, lease_epoch=1, us_per_token=us_per_token, hardware=hardware
    )
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
    await lease(world, "w2", slots=1)
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


async def many(world: World, count: int, **slots: int) -> None:
    """So many turns that wait for w1, of trajectories of one group."""
    assert await world.rollouts.push([group_of_size("g1", count)]) == [True]
    claims = await world.trajectories.claim("a1", count)
    for worker_id, slot_count in slots.items():
        await lease(world, worker_id, slots=slot_count)
    await world.turns.push("a1", [homed(turn_of(claim)) for claim in claims])


@pytest.mark.parametrize(("slots", "count"), [({"w1": 8, "w2": 8}, 5), ({"w1": 24, "w2": 8}, 7), ({"w1": 8}, 8)])
async def test_a_home_leaves_to_others_what_is_beyond_its_share_of_the_slots(
    world: World, slots: dict[str, int], count: int
) -> None:
    await many(world, 8, **slots)  # a share and an eighth of it: 4.5, 6.75
    assert len(names(await take(world, "w1"))) == count
    assert names(await take(world, "w1")) == []
    if "w2" in slots:
        other = await take(world, "w2")
        assert names(other) == [] and other.next_ms is not None
        await let_pass(world, TOKENS * US_PER_TOKEN / 1000 + 50)
        assert names(await take(world, "w1")) == []
        assert len(names(await take(world, "w2"))) == 8 - count


async def test_a_home_takes_what_others_left_beyond_their_patience(world: World) -> None:
    await many(world, 8, w1=8, w2=8)
    assert len(names(await take(world, "w1"))) == 5
    await let_pass(world, TOKENS * US_PER_TOKEN / 1000 + GRACE_MS + 50)
    assert len(names(await take(world, "w1"))) == 3


async def test_a_home_takes_all_that_it_has_places_for_while_demand_is_more_than_supply(world: World) -> None:
    await many(world, 16, w1=8, w2=4)
    assert len(names(await take(world, "w1", 16))) == 8


async def test_a_lease_that_ended_has_no_share(world: World) -> None:
    await many(world, 8, w1=8, w2=8)
    await end_lease(world.board, Lease(worker_id="w2", run_id="r1", lease_epoch=1, slot_count=8, lease_until_ms=None))
    assert len(names(await take(world, "w1"))) == 8


async def test_another_is_woken_where_a_home_has_more_than_its_share(world: World) -> None:
    # Given that w1 makes six turns that were for anybody
    assert await world.rollouts.push([group_of_size("g1", 7)]) == [True]
    claims = await world.trajectories.claim("a1", 7)
    for worker_id in ("w1", "w2"):
        await lease(world, worker_id)
    await world.turns.push("a1", [turn_of(claim) for claim in claims[:6]])
    assert len(names(await take(world, "w1", us_per_token=0))) == 6
    for _ in range(8):
        await world.turns.wait("w2", 0.05)  # what those pushes have rung
    wait = asyncio.create_task(world.turns.wait("w2", 60))
    await asyncio.sleep(0.1)
    assert not wait.done()
    # When a seventh waits for it
    await world.turns.push("a1", [homed(turn_of(claims[6]))])
    await asyncio.wait_for(wait, 30)
    exchange = await take(world, "w2")
    assert names(exchange) == [] and exchange.next_ms is not None


async def first_turns(world: World, count: int, **slots: int) -> None:
    """So many turns that are for anybody."""
    assert await world.rollouts.push([group_of_size("g1", count)]) == [True]
    claims = await world.trajectories.claim("a1", count)
    for worker_id, slot_count in slots.items():
        await lease(world, worker_id, slots=slot_count)
    await world.turns.push("a1", [turn_of(claim) for claim in claims])


async def test_whoever_comes_first_leaves_turns_for_anybody_to_others_beyond_its_share(world: World) -> None:
    await first_turns(world, 8, w1=8, w2=8)
    first = await take(world, "w1")
    assert len(names(first)) == 5 and first.next_ms is not None and 0 < first.next_ms <= READY_MS
    other = await take(world, "w2")
    assert len(names(other)) == 3 and other.next_ms is None
    assert (await take(world, "w1")).next_ms is None


async def test_turns_for_anybody_that_nobody_came_for_are_taken_beyond_a_share(world: World) -> None:
    await first_turns(world, 8, w1=8, w2=8)
    assert len(names(await take(world, "w1"))) == 5
    await asyncio.sleep(2 * READY_MS / 1000)  # by the machine's clock, which orders the streams
    assert len(names(await take(world, "w1"))) == 3


@pytest.mark.parametrize(("slots", "us_per_token"), [({"w1": 8, "w2": 8}, 0), ({"w1": 8}, US_PER_TOKEN)])
async def test_whoever_comes_takes_all_without_prefix_affinity_or_others(
    world: World, slots: dict[str, int], us_per_token: int
) -> None:
    await first_turns(world, 8, **slots)
    exchange = await take(world, "w1", us_per_token=us_per_token)
    assert len(names(exchange)) == 8 and exchange.next_ms is None


async def test_a_full_worker_is_not_told_to_come_again(world: World) -> None:
    await first_turns(world, 8, w1=2, w2=8)
    assert len(names(await take(world, "w1"))) == 2
    assert (await take(world, "w1")).next_ms is None


# ---- unlike hardware: reading a token costs 100 us less than expected on kind "good", and 100 us more on "poor"

READ_COSTS = {"good": -100, "poor": 100}
SLOTS = 8


async def firsts(world: World, *token_counts: int, costs: dict[str, int] | None = None) -> None:
    """Turns without a home, of so many tokens; the first is of g1. w1 and w2 have leases."""
    for worker_id in ("w1", "w2"):
        await lease(world, worker_id, slots=SLOTS)
    await world.board.set_read_costs(1, {"r1": READ_COSTS if costs is None else costs})
    pushes = []
    for name, count in zip(("g1", neighbour(world)), token_counts, strict=True):
        push = turn_of(await held_one(world, name))
        job = dataclasses.replace(push.job, prompt_ids=np.arange(count, dtype=np.int32))
        pushes.append(dataclasses.replace(push, job=job))
    assert await world.turns.push("a1", pushes) == [None, None]


@pytest.mark.parametrize(("hardware", "is_long"), [("poor", False), ("good", True)])
async def test_hardware_takes_what_suits_it_and_leaves_the_rest_to_others(
    world: World, hardware: str, is_long: bool
) -> None:
    await firsts(world, 2000, 400)  # 1200 are usual
    found = await take(world, "w2", hardware=hardware)
    assert names(found) == ["g1.0.0" if is_long else f"{neighbour(world)}.0.0"]
    assert found.next_ms is not None and 0 < found.next_ms <= SLOTS * 0.1 * 800
    assert len(names(await take(world, "w1", hardware="good" if hardware == "poor" else "poor"))) == 1


async def test_a_turn_that_waited_as_long_as_it_costs_more_is_anybodys(world: World) -> None:
    await firsts(world, 2000, 400)
    await let_pass(world, SLOTS * 0.1 * 800 + 50)
    assert len(names(await take(world, "w2", hardware="poor"))) == 2


@pytest.mark.parametrize(
    ("tokens", "hardware", "costs"),
    [((900, 900), "poor", None), ((2000, 400), "unknown", None), ((2000, 400), "poor", {})],
    ids=["contexts alike", "a kind that is not known", "hardware alike"],
)
async def test_nothing_is_left_to_others_where_nothing_is_known_to_be_unlike(
    world: World, tokens: tuple[int, int], hardware: str, costs: dict[str, int] | None
) -> None:
    await firsts(world, *tokens, costs=costs)
    assert len(names(await take(world, "w2", hardware=hardware))) == 2


async def test_every_idle_worker_looks_at_a_turn_that_waits_for_what_suits_it(world: World) -> None:
    await firsts(world, 2000, 400)
    waits = [world.turns.wait(name, 30) for name in ("w1", "w2")]
    await asyncio.wait_for(asyncio.gather(*waits), 10)


async def test_a_new_leader_takes_hardware_to_be_alike_until_it_knows_better(world: World) -> None:
    await firsts(world, 2000, 400)
    await world.board.open_term(4)
    await world.board.set_read_costs(3, {"r1": READ_COSTS})  # of the old one, too late
    assert len(names(await take(world, "w2", hardware="poor"))) == 2
