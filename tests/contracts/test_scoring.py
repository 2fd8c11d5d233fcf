"""Rewards that are long in coming: asked for again and again, at no cost; what workers die over is counted."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from rollfab.fabric.ports.queue import TrajectoryClaim
from rollfab.fabric.rules.queue.retries import BLAME_COUNT_MAX, SCORE_LOSS_MAX
from tests.contracts.conftest import World
from tests.contracts.test_queue import expire, group_of_size, letter_of, rollout_of

TASK = {"map": "4x4"}


async def waiting_claim(world: World) -> TrajectoryClaim:
    """A trajectory that waits for its reward; returns the claim that ended so."""
    await world.rollouts.push([group_of_size("g1", 1)])
    (claim,) = await world.trajectories.claim("a1", 1)
    assert await world.trajectories.settle(claim, rollout_of(claim, None), is_scored=False)
    return cast("TrajectoryClaim", claim)


async def waiting(world: World) -> int:
    """A trajectory that waits for its reward; returns its fence."""
    return (await waiting_claim(world)).fence


async def lose_often(world: World, fence: int) -> None:
    """Let workers die over a reward as often as an attempt may cost agents."""
    for _ in range(BLAME_COUNT_MAX):
        assert await world.trajectories.begin_score("g1.0", fence, "w", 0.0, loss_max=SCORE_LOSS_MAX) is not None
        assert (await world.trajectories.reap("a1")).scoring == (("g1.0", fence),)


async def assert_it_may_still_cost_an_agent(world: World) -> None:
    (claim,) = await world.trajectories.claim("a2", 1)
    assert claim.loss == 0
    await expire(world)
    reaped = await world.trajectories.reap("a3")
    assert (reaped.ready_count, reaped.dead_count) == (1, 0)
    assert not await world.rollouts.dead_letters(10)


async def test_to_wait_for_a_reward_costs_nothing(world: World) -> None:
    # Given a trajectory whose reward nobody computes
    fence = await waiting(world)

    # When it is asked for more often than a reward may be lost, also by one who then does not begin
    for _ in range(2 * SCORE_LOSS_MAX):
        await world.trajectories.keep_scoring([("g1.0", fence)], 0.0)
        reaped = await world.trajectories.reap("a1")
        assert (reaped.scoring, reaped.dead_count) == ((("g1.0", fence),), 0)

    # Then it has cost nothing, and no dead letter
    assert (await world.trajectories.begin_score("g1.0", fence, "w", 1.0)).loss == 0
    assert not await world.rollouts.dead_letters(10)


async def test_a_worker_that_dies_over_a_reward_is_counted_and_in_the_end_it_is_given_up(world: World) -> None:
    fence = await waiting(world)
    queue = world.trajectories
    for loss in range(SCORE_LOSS_MAX):
        # Given a worker that began, and falls silent
        begun = await queue.begin_score("g1.0", fence, f"w{loss}", 0.0, loss_max=SCORE_LOSS_MAX)
        assert begun.loss == loss
        reaped = await queue.reap("a1")
        is_last = loss == SCORE_LOSS_MAX - 1
        assert (reaped.scoring, reaped.dead_count) == (() if is_last else (("g1.0", fence),), int(is_last))
    # Then it is a dead letter that says so, and its group is complete
    (letter,) = await world.rollouts.dead_letters(10)
    assert "while they computed its reward" in letter.reason
    (delivery,) = await world.rollouts.receive("trainer", 1, 0.5)
    assert delivery.group.failures == (("g1.0", letter.reason),)


async def test_a_reward_is_begun_by_one_worker_at_a_time(world: World) -> None:
    fence = await waiting(world)
    queue = world.trajectories
    begun = await queue.begin_score("g1.0", fence, "w1", 0.1)
    assert (begun.loss, begun.rollout.trajectory_id, begun.rollout.reward, begun.task) == (0, "g1.0", None, TASK)
    assert await queue.begin_score("g1.0", fence, "w1", 0.1) is not None  # asked again: its answer may have been lost
    assert await queue.begin_score("g1.0", fence, "w2", 0.1) is None
    assert await queue.begin_score("g1.0", fence + 1, "w1", 0.1) is None

    # When the first falls silent, Then the other may begin, if it takes what has cost a loss
    await expire(world)
    assert (await queue.reap("a1")).scoring == (("g1.0", fence),)
    refused = await queue.begin_score("g1.0", fence, "w2", 0.1)
    assert (refused.loss, refused.rollout) == (1, None)
    assert (await queue.begin_score("g1.0", fence, "w2", 0.1, loss_max=1)).rollout is not None


async def test_a_worker_that_lets_go_of_a_reward_has_cost_nothing(world: World) -> None:
    fence = await waiting(world)
    await world.trajectories.begin_score("g1.0", fence, "w1", 60.0)
    await world.trajectories.keep_scoring([("g1.0", fence)], 0.0, worker_id="w2")  # not his
    assert await world.trajectories.begin_score("g1.0", fence, "w2", 60.0) is None

    assert await world.trajectories.keep_scoring([("g1.0", fence)], 0.0, worker_id="w1") == []

    assert (await world.trajectories.begin_score("g1.0", fence, "w2", 1.0)).loss == 0


async def test_the_second_process_that_is_lost_over_a_reward_is_the_last(world: World) -> None:
    claim = await waiting_claim(world)
    queue, letter = world.trajectories, replace(letter_of(claim), worker_id="w1", reason="exited with code 3")
    # Given a process that was lost: said twice, it counts once
    await queue.begin_score("g1.0", claim.fence, "w1", 60.0)
    assert await queue.lose_score("g1.0", claim.fence, letter) == "retry"
    assert await queue.lose_score("g1.0", claim.fence, letter) == "retry"
    assert (await queue.reap("a1")).scoring == (("g1.0", claim.fence),)  # at once
    assert (await world.board.run_status("r1")).counters["rewards_lost"] == 1

    # When another one is
    await queue.begin_score("g1.0", claim.fence, "w1", 60.0, loss_max=SCORE_LOSS_MAX)
    assert await queue.lose_score("g1.0", claim.fence, letter) == "dead"

    # Then the letter is the function's, and nobody waits any more
    (dead,) = await world.rollouts.dead_letters(10)
    assert dead.reason == "exited with code 3"
    assert await queue.lose_score("g1.0", claim.fence, letter) == "lost"
    assert (await world.board.run_status("r1")).counters["rewards_failed"] == 1


async def test_a_trajectory_that_has_its_reward_waits_for_none(world: World) -> None:
    fence = await waiting(world)
    await world.trajectories.score("g1.0", fence, 0.5)
    assert await world.trajectories.begin_score("g1.0", fence, "w", 1.0) is None


async def test_losses_of_a_reward_are_no_agents_lost_when_it_raises(world: World) -> None:
    # Given a trajectory whose reward cost workers
    claim = await waiting_claim(world)
    await lose_often(world, claim.fence)

    # When the reward raises
    assert await world.trajectories.fail("g1.0", claim.fence, letter_of(claim)) == "retry"

    # Then the first agent that dies with the next attempt is not its last
    await assert_it_may_still_cost_an_agent(world)


async def test_losses_of_a_reward_are_no_agents_lost_when_it_comes_too_late(world: World) -> None:
    # Given a trajectory whose reward cost workers, while the head went beyond what is fresh
    fence = await waiting(world)
    await lose_often(world, fence)
    await world.set_head(9)

    # When the reward comes
    assert not await world.trajectories.score("g1.0", fence, 1.0)

    # Then the first agent that dies with the trajectory, which runs again, is not its last
    await assert_it_may_still_cost_an_agent(world)


async def test_losses_of_a_reward_are_no_agents_lost_when_its_group_is_too_stale_to_be_delivered(
    world: World,
) -> None:
    # Given a group whose reward cost workers and came, while the head went beyond what is fresh
    fence = await waiting(world)
    await lose_often(world, fence)
    assert await world.trajectories.score("g1.0", fence, 1.0)
    await world.set_head(9)

    # When the trainer asks
    assert not await world.rollouts.receive("trainer", 1, 0.01)

    # Then the first agent that dies with the trajectory, which runs again, is not its last
    await assert_it_may_still_cost_an_agent(world)


async def test_agents_that_an_attempt_cost_are_no_losses_of_its_reward(world: World) -> None:
    # Given a trajectory that cost an agent before it ended
    await world.rollouts.push([group_of_size("g1", 1)])
    await world.trajectories.claim("a0", 1)
    await expire(world)
    assert (await world.trajectories.reap("a1")).ready_count == 1
    (claim,) = await world.trajectories.claim("a1", 1)
    assert claim.loss == 1
    assert await world.trajectories.settle(claim, rollout_of(claim, None), is_scored=False)

    # When its reward is begun, Then it has cost nothing
    assert (await world.trajectories.begin_score("g1.0", claim.fence, "w", 1.0)).loss == 0
