"""The life of trajectories and their turns through our queues, in batches, with every role in this one process.

A lane is an agent, a rollout worker and a trainer that take turns; several lanes at once keep the broker busy while
this process encodes and decodes. Lanes share the queues: a lane may be handed another's trajectories and turns, but
each takes as many as it pushed, so none waits for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rollfab.fabric.contract.ids import new_group_id, trajectory_id, turn_id
from rollfab.fabric.contract.records import (
    Lease,
    Rollout,
    RunConfig,
    Sampling,
    Span,
    TrajectoryJob,
    TurnJob,
    TurnResult,
)
from rollfab.fabric.opened import RedisFabric
from rollfab.fabric.ports.queue import Delivery, GroupPush, TrajectoryClaim, TurnClaim, TurnPush, TurnSettle
from tests.support.leases import set_lease

WORKER_ID = "bench-worker"
LEASE_EPOCH = 1
WAIT_S = 5.0
PROMPT_IDS = np.arange(256, dtype=np.int32)  # 1 KiB: what a peer's job carries too
COMPLETION_IDS = np.arange(16, dtype=np.int32)
LOGPROBS = np.full(16, -0.5, dtype=np.float32)
MASK = np.ones(16, dtype=np.uint8)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """How work is cut. A lane handles `batch_count` trajectories at once, in groups of `group_size`."""

    lane_count: int
    batch_count: int
    group_size: int
    turn_count: int

    @property
    def jobs_per_pass(self) -> int:
        """Jobs, trajectories and turns alike, that all lanes together do when each goes through once."""
        return self.lane_count * self.batch_count * (1 + self.turn_count)


async def open_run(fabric: RedisFabric, run_id: str, *, shard_count: int = 1) -> RunConfig:
    """A run of its own, with a lease for the worker of this bench."""
    run = RunConfig(
        run_id=run_id, model="none", environment="none", trajectory_count_max=1_000_000, shard_count=shard_count
    )
    await fabric.board.create_run(run)
    lease = Lease(
        worker_id=WORKER_ID, run_id=run_id, lease_epoch=LEASE_EPOCH, slot_count=1_000_000, lease_until_ms=None
    )
    await set_lease(fabric.board, lease, None)
    return run


async def close_run(fabric: RedisFabric, run: RunConfig) -> None:
    """Leave nothing behind."""
    await fabric.board.delete_run(run.run_id)
    await fabric.board.forget_worker(WORKER_ID)


@dataclass
class Tally:
    """What went in and what came out; `delivered` counts each trajectory's arrivals."""

    pushed: set[str] = field(default_factory=set)
    delivered: dict[str, int] = field(default_factory=dict)
    turn_count: int = 0

    @property
    def lost_count(self) -> int:
        return len(self.pushed - self.delivered.keys())

    @property
    def duplicated_count(self) -> int:
        return sum(count - 1 for count in self.delivered.values())


class Lane:
    """One pass of a batch, step by step."""

    def __init__(self, fabric: RedisFabric, run: RunConfig, name: str, shape: Shape, tally: Tally) -> None:
        self._trajectories = fabric.trajectories(run)
        self._turns = fabric.turns(run)
        self._rollouts = fabric.rollouts(run)
        self._shape = shape
        self._tally = tally
        self._turn_claims: list[TurnClaim] = []
        self._claims: list[TrajectoryClaim] = []
        self._deliveries: list[Delivery] = []
        self._turn_index = 0
        self.agent_id = f"agent-{name}"
        self._consumer = f"trainer-{name}"

    def steps(self) -> list[tuple[str, Callable[[], Awaitable[None]]]]:
        """One pass, in order."""
        turn = [
            ("push turns", self.push_turns),
            ("claim turns", self.claim_turns),
            ("settle turns", self.settle_turns),
            ("take results", self.take_results),
        ]
        begin = [("push groups", self.push_groups), ("claim trajectories", self.claim_trajectories)]
        end = [
            ("settle trajectories", self.settle_trajectories),
            ("receive", self.receive),
            ("acknowledge", self.acknowledge),
        ]
        return [*begin, *turn * self._shape.turn_count, *end]

    async def push_groups(self) -> None:
        groups = [new_group(self._shape.group_size) for _ in range(self._shape.batch_count // self._shape.group_size)]
        taken = await self._rollouts.push(groups)
        assert all(taken)
        self._tally.pushed.update(job.trajectory_id for group in groups for job in group.jobs)

    async def claim_trajectories(self) -> None:
        self._claims = await self._trajectories.claim(self.agent_id, self._shape.batch_count)
        self._turn_index = 0
        assert len(self._claims) == self._shape.batch_count

    async def push_turns(self) -> None:
        pushes = [new_turn(claim, self._turn_index, self.agent_id) for claim in self._claims]
        assert not any(await self._turns.push(self.agent_id, pushes))
        self._turn_index += 1

    async def claim_turns(self) -> None:
        exchange = await self._turns.exchange(WORKER_ID, want=self._shape.batch_count, lease_epoch=LEASE_EPOCH)
        self._turn_claims = exchange.claims
        assert len(exchange.claims) == self._shape.batch_count

    async def settle_turns(self) -> None:
        settles = [TurnSettle(claim=claim, result=result_of(claim)) for claim in self._turn_claims]
        exchange = await self._turns.exchange(WORKER_ID, settles=settles)
        assert exchange.refused == []

    async def take_results(self) -> None:
        count = 0
        while count < self._shape.batch_count:
            found = await self._turns.results(self.agent_id, WAIT_S)
            assert found, "results that never came"
            count += len(found)
        self._tally.turn_count += count

    async def settle_trajectories(self) -> None:
        settling = (
            self._trajectories.settle(claim, _rollout_of(claim, self._turn_index), is_scored=True)
            for claim in self._claims
        )
        settled = await asyncio.gather(*settling)
        assert all(settled)

    async def receive(self) -> None:
        want = self._shape.batch_count // self._shape.group_size
        self._deliveries = []
        while len(self._deliveries) < want:
            found = await self._rollouts.receive(self._consumer, want - len(self._deliveries), WAIT_S)
            assert found, "groups that never came"
            self._deliveries += found

    async def acknowledge(self) -> None:
        acknowledged = await asyncio.gather(*map(self._rollouts.acknowledge, self._deliveries))
        assert all(acknowledged)
        for delivery in self._deliveries:
            for rollout in delivery.group.rollouts:
                seen = self._tally.delivered.get(rollout.trajectory_id, 0)
                self._tally.delivered[rollout.trajectory_id] = seen + 1


def lanes_of(fabric: RedisFabric, run: RunConfig, shape: Shape, tally: Tally) -> list[Lane]:
    """All lanes of a shape."""
    return [Lane(fabric, run, str(index), shape, tally) for index in range(shape.lane_count)]


async def live(lanes: list[Lane], pass_count: int) -> None:
    """Take every lane through `pass_count` passes, all lanes at once."""

    async def go(lane: Lane) -> None:
        for _ in range(pass_count):
            for _, step in lane.steps():
                await step()

    await asyncio.gather(*map(go, lanes))


def new_group(size: int) -> GroupPush:
    group_id = new_group_id()
    task: dict[str, Any] = {"map": "4x4"}
    jobs = tuple(
        TrajectoryJob(
            trajectory_id=trajectory_id(group_id, index),
            group_id=group_id,
            task_id="task",
            index=index,
            task=task,
            seed=index,
        )
        for index in range(size)
    )
    return GroupPush(group_id=group_id, task_id="task", task=task, jobs=jobs)


def new_turn(claim: TrajectoryClaim, index: int, agent_id: str) -> TurnPush:
    name = claim.job.trajectory_id
    job = TurnJob(turn_id=turn_id(name, index), agent_id=agent_id, sampling=Sampling(), prompt_ids=PROMPT_IDS)
    return TurnPush(trajectory_id=name, fence=claim.fence, job=job)


def result_of(claim: TurnClaim) -> TurnResult:
    """What a worker without an engine hands in: 16 tokens."""
    return TurnResult(
        turn_id=claim.job.turn_id,
        finish_reason="stop",
        spans=(Span(0, len(COMPLETION_IDS), WORKER_ID, 0),),
        completion_ids=COMPLETION_IDS,
        logprobs=LOGPROBS,
    )


def _rollout_of(claim: TrajectoryClaim, turn_count: int) -> Rollout:
    return Rollout(
        trajectory_id=claim.job.trajectory_id,
        group_id=claim.job.group_id,
        task_id=claim.job.task_id,
        reward=1.0,
        finish_reason="terminated",
        turn_count=turn_count,
        attempt=claim.attempt,
        seed=claim.job.seed,
        spans=(Span(0, len(COMPLETION_IDS), WORKER_ID, 0),),
        prompt_ids=PROMPT_IDS,
        completion_ids=COMPLETION_IDS,
        logprobs=LOGPROBS,
        completion_mask=MASK,
    )
