"""The ports under test, on the stand-in, a real server and a Redis Cluster. One suite, one contract."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from redis.crc import key_slot

from rollfab.fabric.broker.connection import open_broker
from rollfab.fabric.broker.embedded import EmbeddedBroker
from rollfab.fabric.contract.records import RunConfig
from rollfab.fabric.queue.board import RedisLeaseBoard
from rollfab.fabric.queue.keys import CLOCK, RunShards
from rollfab.fabric.queue.reading import RedisTrajectoryReader
from rollfab.fabric.queue.rollouts import RedisRolloutStream
from rollfab.fabric.queue.scripts import Call, Scripts, keys_of
from rollfab.fabric.queue.trajectories import RedisTrajectoryQueue
from rollfab.fabric.queue.turns import RedisTurnQueue
from tests.standin.broker import Broker, DirectClient
from tests.standin.tables import RunTables, copied
from tests.support.brokers.redis_cluster import RedisCluster, redis_cluster


@dataclass
class World:
    """One broker, one run, and every port of it. Claims last 200 ms, so that expiry can be seen."""

    run: RunConfig
    board: Any
    trajectories: Any
    turns: Any
    rollouts: Any
    reading: Any
    again: Any  # a second view of the rollouts, as a restarted trainer has
    set_head: Callable[..., Awaitable[None]]  # a version, and its publisher's epoch: as a publisher's last step does
    set_clock_ahead: Callable[[float], Awaitable[None]]  # somebody sets the broker machine's time, by seconds
    do: Callable[..., Awaitable[Any]]  # a command of somebody who writes there
    view: Callable[[RunConfig], World]  # the same broker with other settings of the run
    check_integrity: Callable[[], None] = lambda: None  # of all that the broker holds; at a test's end, too


@pytest.fixture(autouse=True)
def one_slot_per_script(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every script that any contract test calls touches one slot of a Redis Cluster."""
    call_many = Scripts.call_many

    async def checked(self: Scripts, calls: Sequence[Call]) -> list[Any]:
        for name, owners, _ in calls:
            keys = keys_of(name, owners)
            slots = {key_slot(key.encode()) for key in keys}
            assert len(slots) == 1, f"script {name} touches {len(slots)} slots: {keys}"
        return await call_many(self, calls)

    monkeypatch.setattr(Scripts, "call_many", checked)


@pytest.fixture(autouse=True)
def no_contract_waits_for_anybody(nobody_is_waited_for: None) -> None:
    """Nobody works on a run that a contract test deletes."""


@pytest.fixture(scope="session")
def broker_url() -> Iterator[str]:
    with EmbeddedBroker.start() as broker:
        yield broker.url


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisCluster]:
    """Three primaries that share the slots."""
    with redis_cluster(tmp_path_factory.mktemp("c")) as cluster:
        yield cluster


@pytest.fixture
def run() -> RunConfig:
    return RunConfig(
        run_id="r1", model="tiny", environment="frozenlake", attempt_count_max=2, trajectory_count_max=20, staleness=1
    )


@pytest.fixture(params=["stand-in", "redis-sharded", "redis-cluster"])
async def world(request: pytest.FixtureRequest, run: RunConfig) -> AsyncIterator[World]:
    if request.param not in ("stand-in", "redis"):
        run = RunConfig(**{**run.__dict__, "shard_count": 3, "trajectory_count_max": 60})
    client = await empty_broker(request)
    await RedisLeaseBoard(client).create_run(run)
    world = on_redis(client, run)

    def check_integrity() -> None:
        if request.param == "stand-in":
            broker = client.broker
        elif request.param == "redis-cluster":
            broker = copied(server.url for server in request.getfixturevalue("cluster").primaries)
        else:
            broker = copied([request.getfixturevalue("broker_url")])
        for shard in range(run.shard_count):
            RunTables(broker, run.run_id, shard).check_integrity()

    world.check_integrity = check_integrity
    yield world
    check_integrity()
    await client.aclose()


async def empty_broker(request: pytest.FixtureRequest) -> Any:
    """A client of the broker that a test is parametrised with; it holds nothing."""
    if request.param == "stand-in":
        return DirectClient(Broker())
    if request.param == "redis-cluster":
        cluster: RedisCluster = request.getfixturevalue("cluster")
        cluster.flush()
        return await open_broker(cluster.url, client_name="tests")
    client = await open_broker(request.getfixturevalue("broker_url"), client_name="tests")
    await client.flushall()
    return client


HEAD_EPOCH = 1


def on_redis(client: Any, run: RunConfig) -> World:
    """A world on the broker of a client."""

    async def set_head(version: int, epoch: int = HEAD_EPOCH) -> None:
        for keys in RunShards(run.run_id, run.shard_count).all:
            await Scripts(client).call("set_head", [keys], [version, "", epoch])

    async def set_clock_ahead(seconds: float) -> None:
        """To the broker it is all one whether its machine's time goes forward or what it remembers of it goes back."""
        moved = 0
        for key in (CLOCK, *(keys.clock for keys in RunShards(run.run_id, run.shard_count).all)):
            remembered = await client.get(key)
            if remembered is not None:
                moved += 1
                wall, now = remembered.split()
                await client.set(key, f"{int(wall) - int(seconds * 1000)} {int(now)}")
        assert moved, "no clock of the fabric goes yet"

    return World(
        run,
        RedisLeaseBoard(client),
        RedisTrajectoryQueue(client, run, claim_ms=200, score_ms=200),
        RedisTurnQueue(client, run, claim_ms=200),
        RedisRolloutStream(client, run),
        RedisTrajectoryReader(client, run),
        RedisRolloutStream(client, run),
        set_head,
        set_clock_ahead,
        client.execute_command,
        lambda changed: on_redis(client, changed),
    )
