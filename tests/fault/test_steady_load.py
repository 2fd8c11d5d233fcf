"""A day of steady load on a real broker: its memory stays flat, and every key is one that the key table knows.

The day is simulated: its work is done as fast as the broker takes it, and what carries a time to live is aged by an
hour at the end of each simulated hour. Memories that are bounded by count are filled up to their bounds first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
from redis import Redis

from rollfab.fabric.broker.embedded import EmbeddedBroker
from rollfab.fabric.contract.ids import turn_id
from rollfab.fabric.contract.records import Lease, RunConfig, Sampling, TurnJob, WorkerInfo
from rollfab.fabric.opened import RedisFabric
from rollfab.fabric.ports.queue import TrajectoryClaim, TurnPush, TurnSettle
from rollfab.fabric.queue.keys import CONSUMED_COUNT_MAX, EVENT_COUNT_MAX, ShardKeys
from rollfab.fabric.rules.queue.length import TASK_COUNT, TASK_NAMES
from rollfab.trainer.checks import make_groups
from rollfab.trainer.publish.publisher import Publisher
from tests.support.brokers.key_table import rows, unaccounted
from tests.support.leases import end_lease, set_lease
from tests.support.records import result_of, rollout_of

pytestmark = [pytest.mark.slow, pytest.mark.redis]

RUN = RunConfig(
    run_id="day", model="tiny", environment="frozenlake", when_stale="keep", kept_bytes_max=1 << 19
)  # an hour fills what may be kept
HOURS = 24
WARM_HOURS = 4
ROUNDS_AN_HOUR = 15
GROUPS_A_ROUND = 20
GROUP_SIZE = 4
TURN_COUNT = 3
VERSIONS_AN_HOUR = 12
HOUR_MS = 3_600_000


@dataclass
class Day:
    """Who works this day. The agent is another one every hour: they come and go."""

    ports: RedisFabric
    redis: Redis
    weights: np.ndarray = field(default_factory=lambda: np.zeros(4096, np.uint16))
    version: int = 0
    group_count: int = 0
    memory: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.publisher = Publisher(self.ports.weights, RUN.run_id)
        self.turns = self.ports.turns(RUN)
        self.trajectories = self.ports.trajectories(RUN)
        self.rollouts = self.ports.rollouts(RUN)

    async def hour(self, index: int) -> None:
        agent, worker = f"agent-{index}", f"worker-{index}"
        board = self.ports.board
        for name, role in ((agent, "agent"), (worker, "dedicated")):
            await board.heartbeat(WorkerInfo(worker_id=name, role=role, pid=1, host="h"))
        lease = Lease(worker_id=worker, run_id=RUN.run_id, lease_epoch=index, slot_count=4096, lease_until_ms=None)
        await set_lease(board, lease, None)
        for _ in range(VERSIONS_AN_HOUR):
            self.weights[self.version % 4096] ^= 1
            await self.publisher.publish({"w": self.weights}, self.version)
            self.version += 1
        for number in range(ROUNDS_AN_HOUR):
            await self.round(f"h{index}-{number}", agent, worker, index)
        await end_lease(board, lease)
        for name in (agent, worker):
            await board.forget_worker(name)
            await board.add_event("worker.gone", {"worker_id": name})
        self._age()
        self.memory.append(int(self.redis.info("memory")["used_memory"]))  # type: ignore[index]

    async def round(self, name: str, agent: str, worker: str, epoch: int) -> None:
        """Some groups from push to acknowledgement; a quarter of them end at a quorum, leaving the rest unfinished."""
        names = [f"{name}-{index}" for index in range(GROUPS_A_ROUND)]
        quorum_count = GROUPS_A_ROUND // 4
        await self.rollouts.push(make_groups([{}] * quorum_count, GROUP_SIZE, names[:quorum_count], quorum=2))
        await self.rollouts.push(make_groups([{}] * (len(names) - quorum_count), GROUP_SIZE, names[quorum_count:]))
        claims = await self.trajectories.claim(agent, GROUPS_A_ROUND * GROUP_SIZE)
        assert len(claims) == GROUPS_A_ROUND * GROUP_SIZE
        for turn_index in range(TURN_COUNT):
            await self.turn(claims, turn_index, agent, worker, epoch)
        await asyncio.gather(*(self.trajectories.settle(c, rollout_of(c.job), is_scored=True) for c in claims))
        delivered = await self.rollouts.receive("trainer", GROUPS_A_ROUND, 1.0)
        assert len(delivered) == GROUPS_A_ROUND
        await asyncio.gather(*map(self.rollouts.acknowledge, delivered))
        self.group_count += len(delivered)

    async def turn(self, claims: list[TrajectoryClaim], index: int, agent: str, worker: str, epoch: int) -> None:
        ids = np.arange(32, dtype=np.int32)
        pushes = []
        for claim in claims:
            name = turn_id(claim.job.trajectory_id, index)
            job = TurnJob(turn_id=name, agent_id=agent, sampling=Sampling(), prompt_ids=ids)
            pushes.append(TurnPush(trajectory_id=claim.job.trajectory_id, fence=claim.fence, job=job))
        assert not any(await self.turns.push(agent, pushes))
        asked = {"want": len(claims), "lease_epoch": epoch, "active_version": self.version}
        taken = (await self.turns.exchange(worker, **asked)).claims
        settles = []
        for claim in taken:
            result = result_of(claim.job.turn_id, ids[:8])
            settles.append(TurnSettle(claim=claim, result=result))
        assert not (await self.turns.exchange(worker, settles=settles)).refused
        count = 0
        while count < len(claims):
            count += len(await self.turns.results(agent, 1.0))

    def _age(self) -> None:
        """An hour passes for what has a time to live."""
        for key in list(self.redis.scan_iter(count=1000)):
            left_ms = int(self.redis.pttl(key))  # type: ignore[arg-type]
            if left_ms >= 0:
                self.redis.pexpire(key, max(1, left_ms - HOUR_MS))


@pytest.fixture
def broker() -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker.start() as started:
        yield started


def fill_bounded_memories(redis: Redis) -> None:
    """What is bounded by count, up to its bound."""
    consumed = ShardKeys(RUN.run_id, 0).consumed
    for start in range(0, CONSUMED_COUNT_MAX, 5000):
        redis.zadd(consumed, {f"before-{index}-000": index for index in range(start, start + 5000)})
    names = (f"{index:04x}" for index in range(TASK_NAMES))
    redis.hset(ShardKeys(RUN.run_id, 0).lengths, mapping=dict.fromkeys(names, f"{TASK_COUNT} {TASK_COUNT * 20}"))
    pipeline = redis.pipeline()
    for index in range(EVENT_COUNT_MAX + 200):
        facts = b'{"worker_id":"worker-%d"}' % index
        pipeline.xadd("rf:{rf}:events", {b"kind": b"worker.gone", b"facts": facts}, maxlen=EVENT_COUNT_MAX)
    pipeline.execute()


@pytest.mark.long
@pytest.mark.timeout(240)
async def test_a_day_of_steady_load_leaves_the_broker_as_it_was(broker: EmbeddedBroker) -> None:
    # Given a broker whose bounded memories are full
    redis = Redis.from_url(broker.url)
    fill_bounded_memories(redis)
    async with await RedisFabric.open(broker.url, client_name="tests") as ports:
        await ports.board.create_run(RUN)
        day = Day(ports, redis)

        # When it serves a day of steady load
        for index in range(HOURS):
            await day.hour(index + 1)
            assert unaccounted(redis) == []

        # Then, after the first hours, its memory has not grown
        warm, rest = day.memory[:WARM_HOURS], day.memory[WARM_HOURS:]
        print("MB by hour:", [round(used / 1e6, 2) for used in day.memory])
        assert max(rest) <= max(warm) * 1.02

        # And of all that work nothing is left but totals
        status = await ports.board.run_status(RUN.run_id)
        assert status.counters["groups_consumed"] == day.group_count == HOURS * ROUNDS_AN_HOUR * GROUPS_A_ROUND
        assert (status.depth, status.memory_bytes, status.groups_waiting) == (0, 0, 0)
        assert not any((*status.trajectories.values(), *status.turns.values()))

        # And nothing but the fabric's own keys when the run is deleted
        await ports.board.delete_run(RUN.run_id)
        assert all(key.startswith(b"rf:{rf}:") for key in redis.scan_iter(count=1000))
    redis.close()


def test_the_key_table_can_be_read() -> None:
    table = rows()
    assert len(table) > 25
    wrong = "rf:{r1.0}:turn:reddy:0"
    assert not any(pattern.match(wrong) for pattern, _ in table)
    assert [kind for pattern, kind in table if pattern.match("rf:{r1.0}:turn:ready:0")] == ["stream"]
    assert [kind for pattern, kind in table if pattern.match("rf:{r1.w}:chunk:3:delta.1:0")] == ["string"]
