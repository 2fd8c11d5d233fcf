"""The curve of a run's rewards, kept where its rollouts are completed."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from rollfab.fabric.contract.records import Rollout, Span
from rollfab.fabric.rules.queue.curve import BUCKET_COUNT_MAX, RewardBucket, put_together
from tests.contracts.conftest import World
from tests.contracts.test_queue import group_of_size, letter_of, rollout_of


def bucket_of(version: int, reward: float, token_count: int) -> RewardBucket:
    """One rollout's."""
    return RewardBucket(
        version=version,
        width=1,
        count=1,
        reward_sum=reward,
        reward_square_sum=reward * reward,
        reward_min=reward,
        reward_max=reward,
        token_sum=token_count,
    )


async def complete(world: World, group_id: str, rewards: list[float], version: int, *, is_scored: bool = True) -> None:
    """A group whose rollouts are of one version, and each as many tokens long as its index says."""
    await world.rollouts.push([group_of_size(group_id, len(rewards))])
    for claim in await world.trajectories.claim("a", len(rewards)):
        index = claim.job.index
        rollout = of_version(rollout_of(claim, rewards[index] if is_scored else None), version, 1 + index)
        assert await world.trajectories.settle(claim, rollout, is_scored=is_scored)
        if not is_scored:
            assert await world.trajectories.score(claim.job.trajectory_id, claim.fence, rewards[index])


def of_version(rollout: Rollout, version: int, tokens: int) -> Rollout:
    return replace(
        rollout,
        spans=(Span(0, tokens, "w", version),) if version >= 0 else (),
        completion_ids=np.ones(tokens, np.int32),
        logprobs=np.zeros(tokens, np.float32),
        completion_mask=np.ones(tokens, np.uint8),
    )


async def consume(world: World) -> list[Rollout]:
    """The group that is complete."""
    (delivery,) = await world.rollouts.receive("trainer", 1, 1.0)
    await world.rollouts.acknowledge(delivery)
    return list(delivery.group.rollouts)


async def curve(world: World) -> tuple[RewardBucket, ...]:
    found: tuple[RewardBucket, ...] = (await world.board.run_status("r1")).rewards
    return found


def check(curve: tuple[RewardBucket, ...], rollouts: list[Rollout]) -> None:
    """Each bucket says what numpy says of the rollouts of its versions, and each rollout is in one."""
    assert sum(bucket.count for bucket in curve) == len(rollouts)
    for bucket in curve:
        own = [each for each in rollouts if bucket.version <= each.policy_version < bucket.version + bucket.width]
        rewards = np.array([each.reward for each in own])
        assert bucket.count == len(own)
        assert bucket.reward_mean == pytest.approx(rewards.mean(), rel=1e-12)
        assert bucket.reward_deviation == pytest.approx(rewards.std(), abs=1e-6)
        assert (bucket.reward_min, bucket.reward_max) == (rewards.min(), rewards.max())
        assert bucket.token_mean == pytest.approx(np.mean([len(each.completion_ids) for each in own]))


async def test_a_run_without_rollouts_has_no_curve(world: World) -> None:
    assert await curve(world) == ()


@pytest.mark.parametrize("is_scored", [True, False])
async def test_the_curve_says_what_numpy_says_of_the_rollouts(world: World, is_scored: bool) -> None:
    dice = random.Random(3)
    rollouts: list[Rollout] = []
    for version in range(6):
        await world.set_head(version)
        rewards = [dice.gauss(0.1, 1e3) * 10.0 ** dice.randint(-9, 3) for _ in range(4)]
        await complete(world, f"g{version}", rewards, version, is_scored=is_scored)
        rollouts += await consume(world)
    assert len(rollouts) == 24
    found = await curve(world)
    assert [bucket.version for bucket in found] == list(range(6))
    check(found, rollouts)


async def test_rollouts_without_tokens_are_of_no_version(world: World) -> None:
    await complete(world, "g1", [0.25, 0.75], -1)
    (bucket,) = await curve(world)
    assert (bucket.version, bucket.count, bucket.reward_mean) == (-1, 2, 0.5)


async def test_what_fails_or_is_settled_twice_is_not_counted_twice(world: World) -> None:
    await world.rollouts.push([group_of_size("g1", 2)])
    first, second = await world.trajectories.claim("a", 2)
    for _ in range(2):
        assert await world.trajectories.settle(first, of_version(rollout_of(first, 1.0), 0, 1), is_scored=True)
    assert await world.trajectories.fail(second.job.trajectory_id, second.fence, letter_of(second)) == "retry"
    (again,) = await world.trajectories.claim("a", 1)
    assert not await world.trajectories.settle(second, rollout_of(second, 5.0), is_scored=True)
    assert await world.trajectories.settle(again, of_version(rollout_of(again, 2.0), 0, 1), is_scored=False)
    for _ in range(2):
        assert await world.trajectories.score(again.job.trajectory_id, again.fence, 3.0)
    (delivery,) = await world.rollouts.receive("trainer", 1, 0.2)
    world.rollouts.put_back(delivery)
    assert len(await world.rollouts.receive("trainer", 1, 0.2)) == 1  # again

    (bucket,) = await curve(world)

    assert (bucket.count, bucket.reward_sum) == (2, 4.0)


async def test_a_rollout_too_stale_to_be_delivered_counts_for_its_version_and_its_rerun_for_another(
    world: World,
) -> None:
    await complete(world, "g1", [1.0], 0)
    await world.set_head(9)
    assert not await world.rollouts.receive("trainer", 1, 0.01)
    (claim,) = await world.trajectories.claim("a", 1)
    assert await world.trajectories.settle(claim, of_version(rollout_of(claim, 2.0), 9, 1), is_scored=True)
    assert [(bucket.version, bucket.reward_mean) for bucket in await curve(world)] == [(0, 1.0), (9, 2.0)]


@pytest.mark.timeout(60)
async def test_a_long_run_has_a_bounded_curve(world: World) -> None:
    # Given more versions than there are buckets, with gaps
    rollouts: list[Rollout] = []
    versions = [3 * n if n % 7 else 3 * n + 1 for n in range(BUCKET_COUNT_MAX + 60)]
    for version in versions:
        await world.set_head(version)
        await complete(world, f"g{version}", [version / 3, 1.0], version)
        rollouts += await consume(world)

    found = await curve(world)

    assert BUCKET_COUNT_MAX // 4 < len(found) <= BUCKET_COUNT_MAX
    assert len({bucket.width for bucket in found}) == 1
    check(found, rollouts)


def test_curves_of_any_widths_come_together() -> None:
    dice = random.Random(1)
    rows = [(dice.randrange(5000) if dice.random() > 0.05 else -1, dice.random()) for _ in range(4000)]
    shards = [put_together(bucket_of(*row, 2) for row in rows[n :: n + 2]) for n in range(3)]
    whole = put_together(bucket for shard in shards for bucket in shard)
    assert len(whole) <= BUCKET_COUNT_MAX
    wanted = [row for n in range(3) for row in rows[n :: n + 2]]
    assert sum(bucket.count for bucket in whole) == len(wanted)
    for bucket in whole:
        own = [reward for version, reward in wanted if bucket.version <= version < bucket.version + bucket.width]
        own = own if bucket.version >= 0 else [reward for version, reward in wanted if version == -1]
        assert bucket.reward_sum == pytest.approx(sum(own))


def test_a_sparse_curve_with_versions_far_apart_is_put_together_in_bounded_steps() -> None:
    buckets = [bucket_of(n * 10**12, 1.0, 1) for n in range(BUCKET_COUNT_MAX + 1)]
    assert len(put_together(buckets)) <= BUCKET_COUNT_MAX
