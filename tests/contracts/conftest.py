"""The ports under test: in memory, and on a private real server. One suite holds both to the same contract."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from redis.crc import key_slot

from rollfab.fabric.bus.board import RedisLeaseBoard
from rollfab.fabric.bus.connection import open_broker
from rollfab.fabric.bus.embedded import EmbeddedBroker
from rollfab.fabric.bus.rollouts import RedisRolloutStream
from rollfab.fabric.bus.scripts import Call, Scripts
from rollfab.fabric.bus.trajectories import RedisTrajectoryQueue
from rollfab.fabric.bus.turns import RedisTurnQueue
from rollfab.fabric.memory.board import MemoryLeaseBoard
from rollfab.fabric.memory.queue import MemoryTrajectoryQueue, MemoryTurnQueue
from rollfab.fabric.memory.rollouts import MemoryRolloutStream
from rollfab.fabric.memory.state import MemoryBroker
from rollfab.fabric.records import RunConfig


@dataclass
class World:
    """One broker, one run, and every port of it. Claims last 200 ms, so that expiry can be seen."""

    run: RunConfig
    board: Any
    trajectories: Any
    turns: Any
    rollouts: Any
    again: Any  # a second view of the rollouts, as a restarted trainer has


@pytest.fixture(autouse=True)
def one_slot_per_script(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every script that any contract test calls touches one slot of a Redis Cluster."""
    call_many = Scripts.call_many

    async def checked(self: Scripts, calls: Sequence[Call]) -> list[Any]:
        for name, keys, _ in calls:
            slots = {key_slot(key.encode()) for key in keys}
            assert len(slots) == 1, f"script {name} touches {len(slots)} slots: {keys}"
        return await call_many(self, calls)

    monkeypatch.setattr(Scripts, "call_many", checked)


@pytest.fixture(scope="session")
def broker_url() -> Iterator[str]:
    with EmbeddedBroker.start() as broker:
        yield broker.url


@pytest.fixture
def run() -> RunConfig:
    return RunConfig(
        run_id="r1", model="tiny", environment="frozenlake", attempt_count_max=2, trajectory_count_max=20, staleness=1
    )


@pytest.fixture(params=["memory", "redis", "redis-sharded"])
async def world(request: pytest.FixtureRequest, run: RunConfig) -> AsyncIterator[World]:
    if request.param == "memory":
        broker = MemoryBroker()
        board = MemoryLeaseBoard(broker)
        await board.create_run(run)
        yield World(
            run,
            board,
            MemoryTrajectoryQueue(broker, run, claim_ms=200, score_ms=200),
            MemoryTurnQueue(broker, run, claim_ms=200),
            MemoryRolloutStream(broker, run),
            MemoryRolloutStream(broker, run),
        )
        return
    if request.param == "redis-sharded":
        run = RunConfig(**{**run.__dict__, "shard_count": 3, "trajectory_count_max": 60})
    client = await open_broker(request.getfixturevalue("broker_url"), client_name="tests")
    await client.flushall()
    redis_board = RedisLeaseBoard(client)
    await redis_board.create_run(run)
    yield World(
        run,
        redis_board,
        RedisTrajectoryQueue(client, run, claim_ms=200, score_ms=200),
        RedisTurnQueue(client, run, claim_ms=200),
        RedisRolloutStream(client, run),
        RedisRolloutStream(client, run),
    )
    await client.aclose()
