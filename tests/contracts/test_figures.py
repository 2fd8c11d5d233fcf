"""The figures that the broker keeps of a run: the curve of its rewards, and how long things take."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import numpy as np
import pytest

from rollfab.fabric.contract.records import Rollout, RunConfig, Span, WorkerInfo
from rollfab.fabric.queue.keys import RunShards
from rollfab.fabric.rules.queue.curve import BUCKET_COUNT_MAX, RewardBucket, put_together
from rollfab.fabric.rules.queue.timings import BOUNDS_S, BUCKET_COUNT, Histogram, Histograms, Timings
from tests.contracts.conftest import World
from tests.contracts.test_queue import claimed_turn, group_of_size, letter_of, rollout_of


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
@pytest.mark.parametrize(
    "world",
    ["stand-in", "redis-sharded", pytest.param("redis-cluster", marks=pytest.mark.slow)],
    indirect=True,
)
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


# ---------------------------------------------------------------- how long things take


def info(worker_id: str = "w1", role: str = "dedicated") -> WorkerInfo:
    return WorkerInfo(worker_id=worker_id, role=role, pid=1, host="h")


async def timed(world: World) -> Histograms:
    histograms: Histograms = (await world.board.timings())["r1"]
    return histograms


async def test_a_run_that_nobody_has_measured_has_no_histograms(world: World) -> None:
    assert await world.board.timings() == {"r1": {}}
    await world.board.delete_run("r1")
    assert await world.board.timings() == {}


async def test_what_two_workers_measure_is_added_up_by_role(world: World) -> None:
    first, second, lent = Timings("a"), Timings("b"), Timings("c")
    first.of("r1").note("ttft", 0.003, "g.0")
    second.of("r1").note("ttft", 0.004)
    lent.of("r1").note("ttft", 5.0)
    for timings, who in ((first, info()), (second, info("w2")), (lent, info("w3", "serving"))):
        await world.board.add_timings(who, timings)
        await world.board.add_timings(who, timings)  # nothing is new

    mine, theirs = (await timed(world))["ttft", "dedicated"], (await timed(world))["ttft", "serving"]
    assert (mine.counts[2], sum(mine.counts), round(mine.sum_s, 6)) == (2, 2, 0.007)
    assert (theirs.counts[13], sum(theirs.counts)) == (1, 1)
    assert [(place, *latest[1:]) for place, latest in mine.latest.items()] == [(2, 0.003, "g.0")]
    await world.board.forget_worker("w1")
    assert (await timed(world))["ttft", "dedicated"] == mine


async def test_a_report_whose_answer_was_lost_counts_once(world: World) -> None:
    class Deaf(Timings):
        hears = False

        def heard(self) -> None:
            if self.hears:
                super().heard()

    timings = Deaf("a")
    timings.of("r1").note("tpot", 0.01)
    await world.board.add_timings(info(), timings)
    timings.of("r1").note("tpot", 0.01)
    timings.hears = True
    await world.board.add_timings(info(), timings)  # the first report again
    assert sum((await timed(world))["tpot", "dedicated"].counts) == 1
    await world.board.add_timings(info(), timings)
    assert sum((await timed(world))["tpot", "dedicated"].counts) == 2


async def test_another_process_of_the_name_is_not_taken_for_the_first(world: World) -> None:
    for process in ("a", "b"):
        timings = Timings(process)
        timings.of("r1").note("reward", 1.0)
        await world.board.add_timings(info(role="reward"), timings)
    assert sum((await timed(world))["reward", "reward"].counts) == 2


async def test_a_run_that_is_deleted_takes_its_histograms_with_it_and_gets_none_back(world: World) -> None:
    timings = Timings("a")
    timings.of("r1").note("ttft", 1.0)
    await world.board.add_timings(info(), timings)
    await world.board.delete_run("r1")
    timings.of("r1").note("ttft", 1.0)
    await world.board.add_timings(info(), timings)
    assert timings.reports() == []
    await world.board.create_run(world.run)
    assert await timed(world) == {}


async def test_a_group_is_timed_from_its_push_to_its_end_by_the_broker(world: World) -> None:
    await world.rollouts.push([group_of_size("g1", 1)])
    await asyncio.sleep(0.05)
    (claim,) = await world.trajectories.claim("a", 1)
    assert claim.waited_s is not None and 0.04 < claim.waited_s < 5
    await world.trajectories.settle(claim, rollout_of(claim), is_scored=True)
    histogram = (await timed(world))["group", "broker"]
    assert sum(histogram.counts) == 1 and 0.04 < histogram.sum_s < 5
    assert histogram.counts[next(place for place, bound in enumerate(BOUNDS_S) if bound >= histogram.sum_s)] == 1


async def test_a_clock_that_is_set_back_makes_no_wait_of_less_than_nothing(world: World) -> None:
    _, turn = await claimed_turn(world)
    assert turn.waited_s is not None and turn.waited_s >= 0  # type: ignore[attr-defined]
    ready = RunShards("r1", world.run.shard_count).of("g9").trajectory.ready[1]
    await world.do("XADD", ready, "9999999999999-0", "id", "g8.0")  # before the clock was set back
    await world.rollouts.push([group_of_size("g9", 1)])
    (claim,) = await world.trajectories.claim("b", 2)
    assert claim.waited_s == 0


async def test_rows_that_cannot_be_read_are_left_out(world: World) -> None:
    timings = Timings("a")
    timings.of("r1").note("ttft", 1.0)
    await world.board.add_timings(info(), timings)
    key = RunShards("r1", world.run.shard_count).all[0].timings
    before = await timed(world)
    rows = ["nonsense", "ttft dedicated 25", "ttft dedicated x", "ttft stranger 1", "else dedicated 1"]
    for row in rows:
        await world.do("HSET", key, row, "1")
    for row, value in (("ttft dedicated 3", "-1"), ("tpot dedicated 3", "9" * 400), ("tpot dedicated 4", "nan")):
        await world.do("HSET", key, row, value)
    for place, value in enumerate(("1 nan g.0", "1 inf g.0", "x 0.001 g.0", "1 0.001", '1 0.001 "}\n', "1 9.0 g.0")):
        await world.do("HSET", key, f"ttft dedicated ~{place}", value)
    assert await timed(world) == before
    await world.do("SET", key, "of another type")
    assert await timed(world) == {}
    timings.of("r1").note("ttft", 1.0)
    await world.board.add_timings(info(), timings)
    assert sum((await timed(world))["ttft", "dedicated"].counts) == 1


async def test_every_run_has_its_own_histograms(world: World) -> None:
    other: RunConfig = replace(world.run, run_id="r2", shard_count=2)
    await world.board.create_run(other)
    timings = Timings("a")
    timings.of("r2").note("ttft", 3600.0 * 24)
    await world.board.add_timings(info(), timings)
    last = Histogram(counts=[0] * (BUCKET_COUNT - 1) + [1], sum_s=86400.0)
    assert await world.board.timings() == {"r1": {}, "r2": {("ttft", "dedicated"): last}}
