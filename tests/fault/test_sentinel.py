"""Fail-over to a replica that did not get the last writes: what was lost is done again, and nothing is used twice."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis.exceptions import RedisError
from rq import Queue

from rollfab.fabric.broker.connection import check_broker, open_broker
from rollfab.fabric.contract.errors import BrokerError
from rollfab.fabric.contract.records import RunConfig, Sampling, TurnJob
from rollfab.fabric.opened import RedisFabric
from rollfab.fabric.ports.queue import TurnPush
from rollfab.workers.rewards.jobs import check_queue, enqueue, open_queue
from tests.support.brokers.port_life import Held, Life, group_of, more_work, rollout_of
from tests.support.brokers.redis_sentinel import SentinelService, sentinel_service
from tests.support.brokers.redis_server import ask
from tests.support.until import wait_until

pytestmark = [pytest.mark.fault, pytest.mark.slow, pytest.mark.redis, pytest.mark.timeout(120)]

RUN = RunConfig(run_id="r1", model="tiny", environment="frozenlake", trajectory_count_max=1000)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[SentinelService]:
    with sentinel_service(tmp_path) as service:
        yield service


async def end_group(fabric: RedisFabric) -> None:
    """Claim and settle what is ready."""
    trajectories = fabric.trajectories(RUN)
    for claim in await trajectories.claim("agent", 8):
        assert await trajectories.settle(claim, rollout_of(Held(claim, [0, 1, 2])), is_scored=True)


async def test_the_sentinels_lead_to_the_primary_and_patience_covers_a_fail_over(service: SentinelService) -> None:
    client = await open_broker(service.url, client_name="test", patience_s=1.0)
    assert client.get_retry()._patience_s >= 10.5  # type: ignore[union-attr]
    assert not (await check_broker(client)).is_replica
    assert (await client.info("server"))["tcp_port"] == service.primary.port
    await client.aclose()


async def test_everyone_goes_on_at_the_promoted_replica_and_lost_writes_are_done_again(
    service: SentinelService,
) -> None:
    # Given all roles at work, and a replica that gets nothing any more
    async with await RedisFabric.open(service.url, client_name="test") as fabric:
        life = Life(fabric, RUN, has_ledger=True, pace_s=0.005)
        playing = asyncio.create_task(life.play(150))
        await more_work(life.tally, playing)
        await asyncio.to_thread(service.cut_replica_off)
        await more_work(life.tally, playing)

        # When the primary is killed and that replica takes its place
        await asyncio.to_thread(service.fail_over)
        tally = await playing

        # Then pushes or acknowledgements were lost indeed, and yet every group was used exactly once
        assert tally.taken_again + tally.again > 0
        tally.check()


async def test_a_lost_acknowledgement_comes_again_marked_redelivered(service: SentinelService) -> None:
    # Given a group that was received, and acknowledged after the replica was cut off
    async with await RedisFabric.open(service.url, client_name="test") as fabric:
        await fabric.board.create_run(RUN)
        await fabric.rollouts(RUN).push([group_of("g1")])
        await end_group(fabric)
        (delivery,) = await fabric.rollouts(RUN).receive("trainer", 1, 1.0)
        await asyncio.sleep(0.2)
        await asyncio.to_thread(service.cut_replica_off)
        assert await fabric.rollouts(RUN).acknowledge(delivery)

        # When the replica takes over
        await asyncio.to_thread(service.fail_over)

        # Then the trainer is given it once more, and told so
        (again,) = await fabric.rollouts(RUN).receive("trainer", 1, 5.0)
        assert (again.group.group_id, again.group.redelivered) == ("g1", True)
        assert await fabric.rollouts(RUN).acknowledge(again)


async def test_a_number_that_was_given_twice_lets_only_its_second_holder_write(service: SentinelService) -> None:
    # Given an agent whose claim was lost with the tail
    async with await RedisFabric.open(service.url, client_name="test") as fabric:
        await fabric.board.create_run(RUN)
        await fabric.rollouts(RUN).push([group_of("g1")])
        await asyncio.sleep(0.2)
        await asyncio.to_thread(service.cut_replica_off)
        trajectories, turns = fabric.trajectories(RUN), fabric.turns(RUN)
        old = (await trajectories.claim("old", 1))[0]
        await asyncio.to_thread(service.fail_over)

        # When another agent is given the same trajectory under the same fence
        new = next(each for each in await trajectories.claim("new", 8) if each.job == old.job)
        assert new.fence == old.fence

        # Then the first one's writes are refused, and the second one's are taken
        turn = TurnJob(
            turn_id=f"{old.job.trajectory_id}.0",
            agent_id="old",
            sampling=Sampling(max_tokens=1),
            prompt_ids=rollout_of(Held(old, [0])).prompt_ids,
        )
        push = TurnPush(trajectory_id=old.job.trajectory_id, fence=old.fence, job=turn)
        assert await turns.push("old", [push]) == ["lost"]
        assert await trajectories.renew("old", [old]) == [old.job.trajectory_id]
        assert not await trajectories.settle(old, rollout_of(Held(old, [0, 1, 2])), is_scored=True)
        assert await trajectories.settle(new, rollout_of(Held(new, [0, 1, 2])), is_scored=True)


async def test_a_push_confirmed_by_a_replica_survives_its_promotion(service: SentinelService) -> None:
    # Given pushes that waited for the replica, while it was there
    groups = [group_of(f"g{index}") for index in range(20)]
    async with await RedisFabric.open(f"{service.url}?durability=replica", client_name="test") as fabric:
        await fabric.board.create_run(RUN)
        rollouts = fabric.rollouts(RUN)
        for group in groups:
            assert await rollouts.push([group]) == [True]

        # When the primary is killed in the same moment, and the replica takes over
        await asyncio.to_thread(service.fail_over)

        # Then it has all of them
        assert (await fabric.board.run_status(RUN.run_id)).counters["groups_submitted"] == 20


async def test_the_reward_queue_is_at_the_primary_before_and_after_a_fail_over(service: SentinelService) -> None:
    queue = open_queue(service.url)
    check_queue(queue)
    enqueue(queue, "score", "r1", [["g1.0", 1]])
    await asyncio.to_thread(service.fail_over)
    await asyncio.to_thread(wait_until, lambda: is_asked(queue), "the sentinels agree on the new primary")
    assert ask(service.replica, "EXISTS", "rq:queue:rollfab") == 1
    queue.connection.close()


def is_asked(queue: Queue) -> bool:
    """Ask for a reward once more, as reaping does."""
    try:
        enqueue(queue, "score", "r1", [["g1.0", 1]])
    except RedisError:
        return False
    return True


async def test_a_service_without_any_sentinel_or_primary_is_told_apart(service: SentinelService) -> None:
    for sentinel in service.sentinels:
        os.kill(sentinel.pid, signal.SIGKILL)
    with pytest.raises(BrokerError) as caught:
        await open_broker(service.url, client_name="test", open_patience_s=0.2)
    assert caught.value.facts["reason"] == "failover"
    assert "no sentinel names the primary of 'main'" in str(caught.value)
