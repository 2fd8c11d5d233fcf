"""One shard of a run fails at every call: work on the others goes on, and loses nothing."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
import pytest

from rollfab.fabric.broker.connection import open_broker
from rollfab.fabric.contract.errors import BrokerError
from rollfab.fabric.contract.ids import shard_of, turn_id
from rollfab.fabric.contract.records import Lease, RunConfig, Sampling, TurnJob
from rollfab.fabric.opened import RedisFabric
from rollfab.fabric.ports.queue import TrajectoryClaim, TurnClaim, TurnProgress, TurnPush, TurnSettle
from rollfab.fabric.queue.keys import ShardKeys
from rollfab.fabric.queue.trajectories import RedisTrajectoryQueue
from rollfab.fabric.queue.turns import RedisTurnQueue
from rollfab.trainer.checks import make_groups
from tests.support.leases import set_lease
from tests.support.records import result_of, rollout_of

pytestmark = [pytest.mark.redis, pytest.mark.timeout(60)]

RUN = RunConfig(run_id="r1", model="m", environment="e", shard_count=3)
FAILING = 1
EXPIRED_S = 0.3  # claims in these tests last 200 ms


class Stage:
    """A run of three shards."""

    def __init__(self, fabric: RedisFabric, client: Any) -> None:
        self.client = client
        self.board = fabric.board
        self.rollouts = fabric.rollouts(RUN)
        self.trajectories = RedisTrajectoryQueue(client, RUN, claim_ms=200, score_ms=200)
        self.turns = RedisTurnQueue(client, RUN, claim_ms=200)

    async def push(self, prefix: str, shards: Sequence[int] = (0, 1, 2), **settings: Any) -> list[str]:
        """One trajectory on each of these shards."""
        found = {shard_of(name, 3): name for name in (f"{prefix}{index}" for index in range(60))}
        groups = [make_groups([{}], 1, [found[shard]])[0] for shard in shards]
        await self.rollouts.push([dataclasses.replace(group, **settings) for group in groups])
        return [f"{found[shard]}.0" for shard in shards]

    async def asked(self, claims: Sequence[TrajectoryClaim]) -> None:
        """A turn of each of these trajectories."""
        await self.turns.push("a1", [push_of(claim) for claim in claims])

    async def break_shard(self) -> None:
        """No script that touches its tables succeeds there: we may read its inboxes alone."""
        others = [f"~rf:{{r1.{shard}}}*" for shard in range(3) if shard != FAILING]
        await self.client.execute_command("ACL", "SETUSER", "default", "resetkeys", "~rf:{rf}*", "~*:inbox:*", *others)

    async def mend_shard(self) -> None:
        """It works again, and is empty."""
        await self.client.execute_command("ACL", "SETUSER", "default", "~*")
        keys = ShardKeys("r1", FAILING)
        for kind in (keys.trajectory, keys.turn):
            await self.client.delete(kind.deadline, kind.record, *kind.ready)
        await self.client.delete(keys.late)
        await self.board.create_run(RUN)


@pytest.fixture
async def stage(url: str) -> AsyncIterator[Stage]:
    client = await open_broker(url, client_name="tests")
    await client.execute_command("ACL", "SETUSER", "default", "~*")
    await client.flushall()
    async with await RedisFabric.open(url, client_name="tests") as fabric:
        await fabric.board.create_run(RUN)
        lease = Lease(worker_id="w1", run_id="r1", lease_epoch=1, slot_count=64, lease_until_ms=None)
        await set_lease(fabric.board, lease, None)
        yield Stage(fabric, client)
    await client.aclose()


def push_of(claim: TrajectoryClaim) -> TurnPush:
    name = turn_id(claim.job.trajectory_id, 0)
    job = TurnJob(turn_id=name, agent_id="a1", sampling=Sampling(), prompt_ids=np.array([1], np.int32))
    return TurnPush(trajectory_id=claim.job.trajectory_id, fence=claim.fence, job=job)


def settle_of(claim: TurnClaim) -> TurnSettle:
    result = result_of(claim.job.turn_id)
    return TurnSettle(claim=claim, result=result)


def names_of(claims: Sequence[TrajectoryClaim]) -> list[str]:
    return sorted(claim.job.trajectory_id for claim in claims)


async def test_trajectories_of_the_other_shards_are_claimed_whichever_comes_first(stage: Stage) -> None:
    # Given a shard that fails
    await stage.break_shard()
    for prefix in "abc":  # every shard is the first in turn once
        # When an agent claims what waits on the others, then it gets all of it
        names = await stage.push(prefix, (0, 2))
        assert names_of(await stage.trajectories.claim("a1", 8)) == sorted(names)
    # And once there is nothing to get, it is told of the failure
    with pytest.raises(BrokerError):
        await stage.trajectories.claim("a1", 8)


async def test_turns_of_the_other_shards_are_claimed_whichever_comes_first(stage: Stage) -> None:
    # Given turns, also on a shard that fails then
    await stage.push("a")
    claims = await stage.trajectories.claim("a1", 8)
    await stage.asked(claims)
    taken = (await stage.turns.exchange("w1", want=8, lease_epoch=1, active_version=0)).claims
    assert len(taken) == 3
    bad = next(each for each in taken if shard_of(each.job.turn_id.split(".")[0], 3) == FAILING)
    good = [each for each in taken if each is not bad]
    await stage.break_shard()
    settles = [settle_of(each) for each in taken]
    for prefix in "bcd":
        names = await stage.push(prefix, (0, 2))
        await stage.asked(await stage.trajectories.claim("a1", 8))
        # When a worker hands in what it has, and takes what waits
        found = await stage.turns.exchange("w1", settles=settles, want=8, lease_epoch=1, active_version=0)
        # Then it gets all turns of the others, and is told what it must hand in again
        assert sorted(each.job.turn_id for each in found.claims) == sorted(turn_id(name, 0) for name in names)
        assert (found.unsettled, found.refused, found.lost) == ({bad.job.turn_id}, [], [])
    results = await stage.turns.results("a1", 1.0)
    assert {each.turn_id for each in results} == {each.job.turn_id for each in good}
    # And with nothing to get it is told of the failure
    with pytest.raises(BrokerError):
        await stage.turns.exchange("w1", settles=settles, want=8, lease_epoch=1, active_version=0)


async def test_turns_of_the_other_shards_are_kept_and_given_up_whichever_comes_first(stage: Stage) -> None:
    # Given turns that run beside a shard that fails
    await stage.push("a", (0, 2))
    await stage.asked(await stage.trajectories.claim("a1", 8))
    first, second = (await stage.turns.exchange("w1", want=8, lease_epoch=1, active_version=0)).claims
    broken = TurnProgress(claim=TurnClaim(job=turn_on(FAILING, first), fence=1, loss=0))
    await stage.break_shard()
    progress = [TurnProgress(claim=first), TurnProgress(claim=second), broken]
    # When they are renewed for longer than a claim lasts
    for _ in range(8):
        await asyncio.sleep(0.05)
        with pytest.raises(BrokerError):
            await stage.turns.exchange("w1", progress=progress)
        with pytest.raises(BrokerError):
            await stage.turns.reap("a1")
    # Then they are still held
    await stage.mend_shard()
    assert (await stage.turns.exchange("w1", progress=progress[:2])).lost == []
    # And one whose claim is gone is said to be so, though another shard fails
    await stage.break_shard()
    await stage.turns.release("w1", progress[:1])
    found = await stage.turns.exchange("w1", progress=progress)
    assert found.lost == [first.job.turn_id]


async def test_claims_of_the_other_shards_are_taken_back_and_the_failure_is_told(stage: Stage) -> None:
    # Given an agent and a worker that are gone, and groups past their deadline
    names = await stage.push("a", (0, 2))
    await stage.asked(await stage.trajectories.claim("a1", 8))
    await stage.turns.exchange("w1", want=8, lease_epoch=1, active_version=0)
    await stage.push("late", (0, 2), deadline_s=0.05)
    await stage.break_shard()
    await asyncio.sleep(EXPIRED_S)
    # When another one looks after what was lost
    for reap in (lambda: stage.turns.reap("a2"), lambda: stage.trajectories.reap("a2"), stage.rollouts.reap):
        with pytest.raises(BrokerError):
            await reap()
    # Then what they held on the other shards waits again, and those groups are complete
    await stage.mend_shard()
    assert len((await stage.turns.exchange("w1", want=8, lease_epoch=1, active_version=0)).claims) == 2
    assert names_of(await stage.trajectories.claim("a2", 8)) == sorted(names)
    assert (await stage.board.run_status("r1")).groups_waiting == 2


async def test_claims_on_the_other_shards_are_renewed(stage: Stage) -> None:
    # Given an agent that holds something on every shard, the failing one first
    await stage.push("a", (0, 1, 2))
    claims = await stage.trajectories.claim("a1", 8)
    claims.sort(key=lambda claim: shard_of(claim.job.group_id, 3) != FAILING)
    await stage.break_shard()
    # When it goes on renewing for longer than a claim lasts, and another one looks after what was lost
    for _ in range(6):
        with pytest.raises(BrokerError):
            await stage.trajectories.renew("a1", claims)
        await asyncio.sleep(EXPIRED_S / 5)
    with pytest.raises(BrokerError):
        await stage.trajectories.reap("a2")
    # Then it still holds what is on the others
    assert await stage.trajectories.renew("a1", claims[1:]) == []


async def test_rewards_of_the_other_shards_are_asked_for_again(stage: Stage) -> None:
    # Given trajectories that wait for a reward which nobody computes
    names = await stage.push("a", (0, 2))
    claims = await stage.trajectories.claim("a1", 8)
    for claim in claims:
        assert await stage.trajectories.settle(
            claim, rollout_of(claim.job, None, attempt=claim.attempt), is_scored=False
        )
    await stage.break_shard()
    await asyncio.sleep(EXPIRED_S)
    # When somebody looks, then it is told of all of them, and of the failure only when there is nothing else to tell
    assert sorted(name for name, _ in (await stage.trajectories.reap("a1")).scoring) == sorted(names)
    with pytest.raises(BrokerError):
        await stage.trajectories.reap("a1")


def turn_on(shard: int, like: TurnClaim) -> TurnJob:
    name = next(name for name in (f"x{index}" for index in range(60)) if shard_of(name, 3) == shard)
    job = like.job
    return TurnJob(turn_id=f"{name}.0.0", agent_id=job.agent_id, sampling=job.sampling, prompt_ids=job.prompt_ids)
