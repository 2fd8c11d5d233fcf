"""Groups of tasks that took long go first, as every queue promises it: see rules/queue/length.py."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from rollfab.fabric.contract.ids import shard_of
from rollfab.fabric.contract.records import Rollout
from rollfab.fabric.ports.queue import GroupPush, TrajectoryClaim
from rollfab.fabric.queue.keys import RunShards
from rollfab.fabric.rules.queue.length import KNOWN_COUNT, LONG, RUN_COUNT, TASK_COUNT, task_name
from tests.contracts.conftest import World
from tests.contracts.test_queue import group_of_size, lease, rollout_of, turn_of

SHORT = 10  # tokens
PASSED_MS = 60_000  # queue/lua/use/ring.lua
# Lengths are known by shard, and so is the order.
of_one_shard = pytest.mark.parametrize("world", ["stand-in", "redis"], indirect=True)


def group_of(name: str, task_id: str, size: int = 1) -> GroupPush:
    group = group_of_size(name, size)
    jobs = tuple(dataclasses.replace(job, task_id=task_id) for job in group.jobs)
    return dataclasses.replace(group, task_id=task_id, jobs=jobs)


def as_long_as(claim: TrajectoryClaim, tokens: int) -> Rollout:
    return dataclasses.replace(
        rollout_of(claim, 1.0),
        task_id=claim.job.task_id,
        spans=(),
        completion_ids=np.ones(tokens, np.int32),
        logprobs=np.zeros(tokens, np.float32),
        completion_mask=np.ones(tokens, np.uint8),
    )


def is_beside(name: str, group_id: str, world: World) -> bool:
    """Whether two groups are on one shard."""
    count = world.run.shard_count
    return shard_of(name, count) == shard_of(group_id, count)


async def live(world: World, task_id: str, tokens: int, count: int = KNOWN_COUNT) -> None:
    """Have `count` trajectories of a task, each so long; nobody keeps their groups."""
    for index in range(count):
        await world.rollouts.push([group_of(f"{task_id}-{tokens}-{index}", task_id)])
        (claim,) = await world.trajectories.claim("a", 1)
        assert await world.trajectories.settle(claim, as_long_as(claim, tokens), is_scored=True)
        (delivery,) = await world.rollouts.receive("trainer", 1, 1.0)
        await world.rollouts.acknowledge(delivery)


async def taken(world: World, count: int) -> list[str]:
    """The tasks of the trajectories that wait, in the order in which an agent gets them."""
    found = []
    while len(found) < count:
        claims = await world.trajectories.claim("a", 1)
        assert claims, f"only {found} came"
        found += [claim.job.task_id for claim in claims]
    return found


@of_one_shard
async def test_a_group_whose_task_took_long_goes_before_those_that_came_earlier(world: World) -> None:
    # Given short tasks, and one that takes three times as long as all do on the average
    await live(world, "short", SHORT)
    await live(world, "long", 10 * SHORT, count=2)
    # When more of them come, the long one last
    await world.rollouts.push([group_of("s1", "short"), group_of("new", "new"), group_of("l1", "long", size=2)])
    # Then the long one is the first to be taken, and others are as they came
    assert await taken(world, 4) == ["long", "long", "short", "new"]


@of_one_shard
async def test_a_task_that_takes_as_long_as_others_gets_nothing_ahead(world: World) -> None:
    await live(world, "short", SHORT)
    await live(world, "longer", int(SHORT * LONG) - 1, count=4)
    await world.rollouts.push([group_of("s1", "short"), group_of("l1", "longer")])
    assert await taken(world, 2) == ["short", "longer"]


@of_one_shard
async def test_a_run_that_does_not_ask_for_it_keeps_no_lengths_and_its_order(world: World) -> None:
    # Given a run whose settings have it off
    world = world.view(dataclasses.replace(world.run, longest_first=False))
    await live(world, "short", SHORT)
    await live(world, "long", 10 * SHORT, count=2)
    # Then it goes as it came
    await world.rollouts.push([group_of("s1", "short"), group_of("l1", "long")])
    assert await taken(world, 2) == ["short", "long"]
    assert await world.do("EXISTS", RunShards("r1", 1).all[0].lengths) == 0


@pytest.mark.parametrize("is_on", [True, False])
async def test_the_last_of_a_group_go_before_others_unless_the_run_has_it_otherwise(world: World, is_on: bool) -> None:
    world = world.view(dataclasses.replace(world.run, nearest_first=is_on))
    # Given a group of which one in four is missing, whose last trajectory fails once
    await world.rollouts.push([group_of("g1", "near", size=4)])
    *settled, last = await world.trajectories.claim("a", 4)
    for claim in settled:
        assert await world.trajectories.settle(claim, as_long_as(claim, SHORT), is_scored=True)
    (other,) = [name for index in range(99) if is_beside(name := f"n{index}", "g1", world)][:1]
    # When another group came before a turn of it is asked for
    await world.rollouts.push([group_of(other, "other")])
    (claim,) = await world.trajectories.claim("a", 1)
    await lease(world)
    assert await world.turns.push("a", [turn_of(claim), turn_of(last)]) == [None, None]
    # Then the near one's is made first
    (first,) = (await world.turns.exchange("w1", want=1, lease_epoch=1)).claims
    assert first.job.turn_id.startswith("g1." if is_on else other)


@of_one_shard
async def test_what_has_waited_for_a_minute_is_passed_by_nothing_that_comes_later(world: World) -> None:
    keys = RunShards("r1", 1).all[0]
    await live(world, "short", SHORT)
    await live(world, "long", 10 * SHORT, count=2)
    # Given a group that has waited for as long as the broker lets one
    await world.rollouts.push([group_of("s1", "short")])
    ready = keys.trajectory.ready[1]
    seconds, _ = await world.do("TIME")
    await world.do("DEL", ready)
    await world.do("XGROUP", "CREATE", ready, "workers", "0", "MKSTREAM")
    await world.do("XADD", ready, f"{int(seconds) * 1000 - PASSED_MS}-0", "id", "s1.0")
    # When a long one comes, then it has to wait its turn
    await world.rollouts.push([group_of("l1", "long")])
    assert await taken(world, 2) == ["short", "long"]


@of_one_shard
async def test_what_is_kept_of_lengths_has_bounds_and_survives_foreign_rows(world: World) -> None:
    keys = RunShards("r1", 1).all[0]
    own = task_name(world.run, "t")
    # Given rows that are none, and one that is as long as it may be
    for name, row in ((own, "x"), ("-", "9" * 30 + " 9")):
        await world.do("HSET", keys.lengths, name, row)
    await live(world, "t", SHORT, count=1)
    found = [await world.do("HGET", keys.lengths, name) for name in (own, "-")]
    assert found == [b"1 10", b"1 10"]
    # When a task's and the run's counts are full, then half of what they knew is forgotten
    for name, count in ((own, TASK_COUNT), ("-", RUN_COUNT)):
        await world.do("HSET", keys.lengths, name, f"{count} {count * 30}")
    await live(world, "t", 2 * SHORT, count=1)
    found = [await world.do("HGET", keys.lengths, name) for name in (own, "-")]
    assert found == [f"{count // 2 + 1} {count // 2 * 30 + 20}".encode() for count in (TASK_COUNT, RUN_COUNT)]
