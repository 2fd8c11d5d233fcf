"""A Redis Cluster as one broker: found from any node, checked as a whole, and good for a run from end to end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from redis.crc import key_slot

from rollfab.fabric.broker.clients.cluster_client import ClusterClient
from rollfab.fabric.broker.clients.waiting import first_found
from rollfab.fabric.broker.connection import check_broker, open_broker
from rollfab.fabric.contract.errors import BrokerError, BrokerFull, ConfigError
from rollfab.fabric.contract.records import RunConfig
from rollfab.fabric.opened import RedisFabric
from rollfab.fabric.queue.board import RedisLeaseBoard
from rollfab.fabric.queue.keys import CONSUMER_GROUP_TRAINER, RunShards
from rollfab.fabric.queue.rollouts import RedisRolloutStream
from rollfab.trainer.aio import AsyncRun
from rollfab.workers.rewards.jobs import check_queue, enqueue, open_queue
from tests.support.brokers.port_life import Life
from tests.support.brokers.redis_cluster import RedisCluster, redis_cluster
from tests.support.brokers.redis_server import RedisServer, ask, free_port, redis_server

pytestmark = [pytest.mark.redis, pytest.mark.timeout(30)]

RUN = RunConfig(run_id="r1", model="tiny", environment="frozenlake", trajectory_count_max=3000, shard_count=3)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisCluster]:
    with redis_cluster(tmp_path_factory.mktemp("c"), "appendonly yes") as cluster:
        yield cluster


@pytest.fixture
async def client(cluster: RedisCluster) -> AsyncIterator[ClusterClient]:
    cluster.flush()
    client = await open_broker(cluster.url, client_name="test")
    assert isinstance(client, ClusterClient)
    yield client
    await client.aclose()


async def test_any_node_leads_to_the_whole_cluster(cluster: RedisCluster) -> None:
    urls = [each for server in cluster.primaries for each in (server.url, server.unix_url)]
    for url in (*urls, cluster.explicit_url, f"redis+cluster://127.0.0.1:1,127.0.0.1:{cluster.primaries[2].port}"):
        client = await open_broker(url, client_name="test")
        assert isinstance(client, ClusterClient)
        assert len(client.primaries()) == 3
        facts = await check_broker(client)
        assert facts.is_cluster and facts.is_aof_on
        await client.aclose()


async def test_the_urls_user_is_the_user_on_every_node(cluster: RedisCluster) -> None:
    for server in cluster.primaries:
        ask(server, "ACL", "SETUSER", "app", "on", ">pw", "~*", "&*", "+@all")
    client = await open_broker(cluster.url.replace("redis://", "redis://app:pw@"), client_name="test")
    assert isinstance(client, ClusterClient)
    assert {await node.acl_whoami() for node in client.primaries()} == {"app"}
    await client.aclose()


async def test_one_unfit_node_makes_the_cluster_unfit(cluster: RedisCluster, client: ClusterClient) -> None:
    bad = cluster.primaries[1]
    ask(bad, "CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    try:
        with pytest.raises(BrokerError, match=rf"127\.0\.0\.1:{bad.port}.*allkeys-lru"):
            await check_broker(client)
    finally:
        ask(bad, "CONFIG", "SET", "maxmemory-policy", "noeviction")
    await check_broker(client)


async def test_a_node_that_is_full_is_named_and_the_others_take_what_is_theirs(cluster: RedisCluster) -> None:
    # Given a run on all nodes, of which one has no room left
    cluster.flush()
    full = cluster.primaries[1]
    async with await RedisFabric.open(cluster.url, client_name="test") as fabric:
        await fabric.board.create_run(RUN)
        run = AsyncRun(fabric, RUN)
        names = [f"g{index}" for index in range(24)]
        ask(full, "CONFIG", "SET", "maxmemory", "1")
        # When its trainer pushes
        try:
            with pytest.raises(
                BrokerFull, match=rf"the broker at 127\.0\.0\.1:{full.port} is at its memory limit"
            ) as caught:
                await run.submit([{}] * len(names), group_size=1, group_ids=names)
        finally:
            ask(full, "CONFIG", "SET", "maxmemory", "0")
        # Then the error says where there is no room, and what is in
        facts = caught.value.facts
        assert facts["broker"] == f"127.0.0.1:{full.port}"
        assert facts["taken"] and facts["refused"] and sorted(facts["taken"] + facts["refused"]) == sorted(names)
        assert await run.submit([{}] * len(names), group_size=1, group_ids=names) == names


async def test_a_cluster_without_slots_says_so(tmp_path: Path) -> None:
    with redis_server(tmp_path, "cluster-enabled yes", f"cluster-port {free_port()}") as server:
        with pytest.raises(BrokerError) as caught:
            await open_broker(server.url, client_name="test", open_patience_s=6.0)
        assert caught.value.facts["reason"] == "cluster"


async def test_a_run_goes_from_push_to_acknowledge_on_a_cluster(cluster: RedisCluster) -> None:
    cluster.flush()
    async with await RedisFabric.open(cluster.url, client_name="test") as fabric:
        tally = await Life(fabric, RUN).play(60, timeout_s=20)
        tally.check()
        assert tally.again == 0
        sizes = [ask(server, "DBSIZE") for server in cluster.primaries]
        assert all(size > 0 for size in sizes)  # each node holds a part of the run, or of the fabric
        await fabric.board.delete_run(RUN.run_id)
        assert await fabric.board.runs() == {}


async def test_rewards_need_a_queue_that_is_no_cluster_and_the_url_can_name_one(
    cluster: RedisCluster, tmp_path: Path
) -> None:
    cluster.flush()
    scored = RunConfig(run_id="r2", model="tiny", environment="frozenlake", reward="success")
    async with await RedisFabric.open(cluster.url, client_name="test") as fabric:
        with pytest.raises(ConfigError, match="reward_queue=redis://host:port"):
            await fabric.board.create_run(scored)
    with pytest.raises(ConfigError, match="reward_queue=redis://host:port"):
        check_queue(open_queue(cluster.url))

    with redis_server(tmp_path) as server:
        url = f"{cluster.url}?reward_queue={server.url}"
        async with await RedisFabric.open(url, client_name="test") as fabric:
            await fabric.board.create_run(scored)
        queue = open_queue(url)
        check_queue(queue)
        enqueue(queue, "score", "r2", [["g1.0", 1]])
        assert ask(server, "EXISTS", "rq:queue:rollfab") == 1
        queue.connection.close()


async def test_a_wait_over_several_slots_ends_with_the_first_that_has_something(client: ClusterClient) -> None:
    names = ["list-a", "list-b", "list-c"]  # on different nodes

    def wait(timeout_s: float) -> Coroutine[Any, Any, list[bytes]]:
        return first_found([client.blpop([name], timeout=timeout_s) for name in names])

    for index, name in enumerate(names):
        waiting = asyncio.create_task(wait(30))
        await asyncio.sleep(0.05)
        await client.rpush(name, index)
        assert await asyncio.wait_for(waiting, 25) == [name.encode(), b"%d" % index]
    assert await wait(0.05) == []


async def test_a_consumer_that_waits_over_several_slots_leaves_nothing_taken_and_unseen(client: ClusterClient) -> None:
    # Given a run of three shards, each on another node
    await RedisLeaseBoard(client).create_run(RUN)
    stream = RedisRolloutStream(client, RUN)
    names = [keys.completed for keys in RunShards(RUN.run_id, 3).all]

    # When entries arrive on all of them at once, again and again, while it waits
    seen = 0
    for _ in range(10):
        waiting = asyncio.create_task(stream._fresh("me", 1, 30.0))
        await asyncio.sleep(0.01)
        await asyncio.gather(*(client.xadd(name, {"group": "g1"}) for name in names))
        seen += len(await asyncio.wait_for(waiting, 25))

    # Then what was delivered to it and what it saw are the same
    assert seen >= 10
    pending = [await client.xpending(name, CONSUMER_GROUP_TRAINER) for name in names]
    assert sum(each["pending"] for each in pending) == seen


def ends_of_a_move(cluster: RedisCluster, slot: int) -> tuple[RedisServer, RedisServer]:
    """The node that has a slot, and another one."""
    source = next(server for server in cluster.primaries if cluster.holds(server, slot))
    return source, cluster.primaries[cluster.primaries.index(source) - 1]


async def test_a_slot_that_is_halfway_to_another_node_is_served_from_both(
    cluster: RedisCluster, client: ClusterClient
) -> None:
    # Given a slot of two keys, one of which has moved to the next node
    slot = key_slot(b"halfway")
    source, target = ends_of_a_move(cluster, slot)
    await client.set("{halfway}:stays", 1)
    await client.set("{halfway}:moves", 2)
    cluster.begin_move(slot, source, target)
    ask(source, "MIGRATE", "127.0.0.1", target.port, "{halfway}:moves", 0, 5000)

    # When both are read, and a third is made
    answers = await client.channel().ask_many([("GET", "{halfway}:stays"), ("GET", "{halfway}:moves")])
    await client.set("{halfway}:new", 3)

    # Then each is where it belongs
    assert answers == [b"1", b"2"]
    assert sorted(ask(target, "CLUSTER", "GETKEYSINSLOT", slot, 10)) == [b"{halfway}:moves", b"{halfway}:new"]
    cluster.end_move(slot, source, target)
    assert [await client.get(f"{{halfway}}:{name}") for name in ("stays", "moves", "new")] == [b"1", b"2", b"3"]


async def test_a_wait_for_a_write_that_was_sent_on_is_made_where_the_write_is(
    cluster: RedisCluster, client: ClusterClient
) -> None:
    # Given a slot that is halfway to another node
    slot = key_slot(b"waited")
    source, target = ends_of_a_move(cluster, slot)
    await client.set("{waited}:stays", 1)
    cluster.begin_move(slot, source, target)

    # When a write of a new key goes together with commands that speak of its connection, as WAIT and WAITAOF do
    channel = client.channel()
    written, info, count = await channel.ask_alone([("SET", "{waited}:new", 2), ("CLIENT", "INFO"), ("WAIT", 0, 1)])

    # Then these are answered by the node that has the write
    assert (written, count) == (b"OK", 0)
    assert f" laddr=127.0.0.1:{target.port} ".encode() in info
    assert ask(target, "CLUSTER", "GETKEYSINSLOT", slot, 10) == [b"{waited}:new"]
    cluster.end_move(slot, source, target)


async def test_commands_of_several_nodes_keep_their_order_of_answers(client: ClusterClient) -> None:
    channel = client.channel()
    await asyncio.gather(*(channel.ask("SET", f"key-{index}", index) for index in range(200)))
    answers = await channel.ask_many([("GET", f"key-{index}") for index in range(200)])
    assert answers == [b"%d" % index for index in range(200)]
