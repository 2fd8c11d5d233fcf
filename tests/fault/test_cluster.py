"""A Redis Cluster whose nodes crash, are replaced, and hand over slots, while all roles are at work on it."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from redis.crc import key_slot

from rollfab.fabric.contract.records import RunConfig
from rollfab.fabric.opened import RedisFabric
from rollfab.fabric.queue.keys import ShardKeys
from tests.support.brokers.port_life import GROUP_SIZE, TURN_COUNT, Life, more_work
from tests.support.brokers.redis_cluster import RedisCluster, redis_cluster
from tests.support.brokers.redis_server import ask
from tests.support.until import wait_until

pytestmark = [pytest.mark.fault, pytest.mark.slow, pytest.mark.redis, pytest.mark.timeout(60)]

RUN = RunConfig(run_id="r1", model="tiny", environment="frozenlake", trajectory_count_max=3000, shard_count=3)
COUNT = 80


async def check_books(fabric: RedisFabric) -> None:
    """Every group and every turn was counted once, and nothing of them is kept."""
    status = await fabric.board.run_status(RUN.run_id)
    assert (status.depth, status.memory_bytes) == (0, 0)
    assert status.counters["groups_submitted"] == status.counters["groups_consumed"] == COUNT
    assert status.counters["turns_settled"] == COUNT * GROUP_SIZE * TURN_COUNT


async def test_a_node_that_crashes_and_comes_back_loses_and_doubles_nothing(tmp_path: Path) -> None:
    # Given all roles at work on three nodes
    with redis_cluster(tmp_path, "appendonly yes", "appendfsync always") as cluster:
        async with await RedisFabric.open(cluster.url, client_name="test") as fabric:
            life = Life(fabric, RUN, pace_s=0.005)
            playing = asyncio.create_task(life.play(COUNT))

            # When two of them are killed and started again, one after the other
            for server in cluster.primaries[:2]:
                await asyncio.sleep(0.2)
                server.kill()
                await asyncio.to_thread(server.start)
                await asyncio.to_thread(wait_until, cluster.is_well, "the cluster is well again")
            tally = await playing

            # Then every group was used once, and the broker's books are right
            tally.check()
            assert tally.again == 0
            await check_books(fabric)


async def test_a_replica_takes_the_place_of_a_lost_node_and_lost_writes_are_done_again(tmp_path: Path) -> None:
    # Given all roles at work, and a replica that gets nothing any more of what its primary is told
    with redis_cluster(tmp_path, "appendonly yes", replica_count=1) as cluster:
        primary, replica = cluster.primaries[0], cluster.replicas[0]
        async with await RedisFabric.open(cluster.explicit_url, client_name="test") as fabric:
            life = Life(fabric, RUN, has_ledger=True, pace_s=0.005)
            playing = asyncio.create_task(life.play(COUNT))
            await more_work(life.tally, playing)
            os.kill(replica.pid, signal.SIGSTOP)
            ask(primary, "CLIENT", "KILL", "TYPE", "replica")
            await more_work(life.tally, playing)

            # When that primary is lost for good
            primary.kill()
            os.kill(replica.pid, signal.SIGCONT)
            tally = await playing

            # Then its replica serves its slots, and yet every group was used exactly once
            wait_until(lambda: ask(replica, "ROLE")[0] == b"master", "the replica is the primary")
            tally.check()


async def test_slots_that_move_under_load_are_followed(tmp_path: Path) -> None:
    # Given all roles at work
    with redis_cluster(tmp_path) as cluster:
        async with await RedisFabric.open(cluster.url, client_name="test") as fabric:
            life = Life(fabric, RUN, pace_s=0.005)
            playing = asyncio.create_task(life.play(COUNT))
            await asyncio.sleep(0.3)

            # When every shard of the run moves to another node, key by key
            for shard in range(RUN.shard_count):
                await asyncio.to_thread(move_slot, cluster, key_slot(ShardKeys(RUN.run_id, shard).run.encode()))
            tally = await playing

            # Then nobody noticed
            tally.check()
            assert tally.again == 0
            await check_books(fabric)


def move_slot(cluster: RedisCluster, slot: int) -> None:
    """Give a slot and its keys to the next node, as resharding does: ASK in the middle, MOVED in the end."""
    source = next(server for server in cluster.primaries if cluster.holds(server, slot))
    target = cluster.primaries[cluster.primaries.index(source) - 1]
    cluster.begin_move(slot, source, target)
    cluster.end_move(slot, source, target)
