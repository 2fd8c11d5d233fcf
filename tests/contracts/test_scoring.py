"""Rewards that are long in coming: asked for again and again, given up late, with the right reason."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from rollfab.fabric.ports import TrajectoryClaim
from rollfab.fabric.rules.giving_up import LOSS_COUNT_MAX
from tests.contracts.conftest import World
from tests.contracts.test_queue import EXPIRED_S, group_of_size, letter_of, rollout_of


async def waiting_claim(world: World) -> TrajectoryClaim:
    """A trajectory that waits for its reward; returns the claim that ended so."""
    await world.rollouts.push([group_of_size("g1", 1)])
    (claim,) = await world.trajectories.claim("a1", 1)
    assert await world.trajectories.settle(claim, rollout_of(claim, None), is_scored=False)
    return cast("TrajectoryClaim", claim)


async def waiting(world: World) -> int:
    """A trajectory that waits for its reward; returns its fence."""
    return (await waiting_claim(world)).fence


async def look_often(world: World, fence: int) -> None:
    """Ask for a reward as often as an attempt may cost agents."""
    for _ in range(LOSS_COUNT_MAX):
        await world.trajectories.keep_scoring([("g1.0", fence)], 0.0)
        assert (await world.trajectories.reap("a1")).scoring == (("g1.0", fence),)


async def assert_it_may_still_cost_an_agent(world: World) -> None:
    (claim,) = await world.trajectories.claim("a2", 1)
    assert claim.loss == 0
    await asyncio.sleep(EXPIRED_S)
    reaped = await world.trajectories.reap("a3")
    assert (reaped.ready_count, reaped.dead_count) == (1, 0)
    assert not await world.rollouts.dead_letters(10)


async def test_a_reward_is_given_up_only_after_many_askings(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("bus.trajectories", "memory.queue"):
        monkeypatch.setattr(f"rollfab.fabric.{module}.SCORE_COUNT_MAX", 9)
    # Given a trajectory whose reward nobody computes
    fence = await waiting(world)

    # When it is asked for as often as may be, Then the trajectory stays
    for _ in range(8):
        await world.trajectories.keep_scoring([("g1.0", fence)], 0.0)
        reaped = await world.trajectories.reap("a1")
        assert (reaped.scoring, reaped.dead_count) == ((("g1.0", fence),), 0)

    # And the next time it is a dead letter that says what is missing
    await world.trajectories.keep_scoring([("g1.0", fence)], 0.0)
    reaped = await world.trajectories.reap("a1")
    assert (reaped.scoring, reaped.dead_count) == ((), 1)
    (letter,) = await world.rollouts.dead_letters(10)
    assert "is a reward worker running?" in letter.reason
    (delivery,) = await world.rollouts.receive("trainer", 1, 0.5)
    assert delivery.group.failures == (("g1.0", letter.reason),)


async def test_a_trajectory_that_has_its_reward_waits_for_none(world: World) -> None:
    fence = await waiting(world)
    assert await world.trajectories.scoring("g1.0") is not None

    await world.trajectories.score("g1.0", fence, 0.5)

    assert await world.trajectories.scoring("g1.0") is None


async def test_looks_after_a_reward_are_no_agents_lost_when_it_raises(world: World) -> None:
    # Given a trajectory whose reward was long in coming
    claim = await waiting_claim(world)
    await look_often(world, claim.fence)

    # When the reward raises
    assert await world.trajectories.fail("g1.0", claim.fence, letter_of(claim)) == "retry"

    # Then the first agent that dies with the next attempt is not its last
    await assert_it_may_still_cost_an_agent(world)


async def test_looks_after_a_reward_are_no_agents_lost_when_it_comes_too_late(world: World) -> None:
    # Given a trajectory whose reward was long in coming, while the head went beyond what is fresh
    fence = await waiting(world)
    await look_often(world, fence)
    await world.set_head(9)

    # When the reward comes
    assert not await world.trajectories.score("g1.0", fence, 1.0)

    # Then the first agent that dies with the trajectory, which runs again, is not its last
    await assert_it_may_still_cost_an_agent(world)


async def test_looks_after_a_reward_are_no_agents_lost_when_its_group_is_too_stale_to_be_delivered(
    world: World,
) -> None:
    # Given a group that waited long for its reward and has it, while the head went beyond what is fresh
    fence = await waiting(world)
    await look_often(world, fence)
    assert await world.trajectories.score("g1.0", fence, 1.0)
    await world.set_head(9)

    # When the trainer asks
    assert not await world.rollouts.receive("trainer", 1, 0.01)

    # Then the first agent that dies with the trajectory, which runs again, is not its last
    await assert_it_may_still_cost_an_agent(world)


async def test_agents_that_an_attempt_cost_are_no_looks_after_its_reward(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("bus.trajectories", "memory.queue"):
        monkeypatch.setattr(f"rollfab.fabric.{module}.SCORE_COUNT_MAX", 2)
    # Given a trajectory that cost an agent before it ended
    await world.rollouts.push([group_of_size("g1", 1)])
    await world.trajectories.claim("a0", 1)
    await asyncio.sleep(EXPIRED_S)
    assert (await world.trajectories.reap("a1")).ready_count == 1
    (claim,) = await world.trajectories.claim("a1", 1)
    assert claim.loss == 1
    assert await world.trajectories.settle(claim, rollout_of(claim, None), is_scored=False)

    # When its reward is looked after for the first time of two, Then it stays
    await world.trajectories.keep_scoring([("g1.0", claim.fence)], 0.0)
    reaped = await world.trajectories.reap("a1")
    assert (reaped.scoring, reaped.dead_count) == ((("g1.0", claim.fence),), 0)
