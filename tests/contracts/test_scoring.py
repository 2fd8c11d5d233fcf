"""Rewards that are long in coming: asked for again and again, given up late, with the right reason."""

from __future__ import annotations

import pytest

from tests.contracts.conftest import World
from tests.contracts.test_queue import group_of_size, rollout_of


async def waiting(world: World) -> int:
    """A trajectory that waits for its reward; returns its fence."""
    await world.rollouts.push([group_of_size("g1", 1)])
    (claim,) = await world.trajectories.claim("a1", 1)
    assert await world.trajectories.settle(claim, rollout_of(claim, None), is_scored=False)
    return int(claim.fence)


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
    assert delivery.group.failures == ("g1.0",)


async def test_a_trajectory_that_has_its_reward_waits_for_none(world: World) -> None:
    fence = await waiting(world)
    assert await world.trajectories.scoring("g1.0") is not None

    await world.trajectories.score("g1.0", fence, 0.5)

    assert await world.trajectories.scoring("g1.0") is None
