"""How long a turn waits between its push and its claim, at an open-loop rate.

The agent pushes on schedule whatever the worker does; the worker sleeps on the doorbell, and one exchange hands in what
it has and takes what is there. Each has its own connections. The time of the push travels in the turn's payload.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

import numpy as np

from rollfab.fabric.contract.ids import new_group_id, trajectory_id, turn_id
from rollfab.fabric.contract.records import RunConfig, Sampling, TrajectoryJob, TurnJob
from rollfab.fabric.opened import RedisFabric
from rollfab.fabric.ports.queue import GroupPush, TrajectoryClaim, TurnClaim, TurnPush, TurnQueue, TurnSettle

from .life import LEASE_EPOCH, PROMPT_IDS, WAIT_S, WORKER_ID, result_of

AGENT_ID = "latency-agent"
GROUP_SIZE = 50
WANT = 64


@dataclass
class Waits:
    """Milliseconds from push to claim, and how late the pusher itself was (the machine's, not the queue's)."""

    claim_ms: list[float] = field(default_factory=list)
    late_ms: list[float] = field(default_factory=list)


async def measure_waits(url: str, run_id: str, *, turns_per_s: float, duration_s: float) -> Waits:
    """Push at this rate for this long; every turn is claimed, settled and its result taken."""
    waits = Waits()
    count = int(turns_per_s * duration_s)
    async with (
        await RedisFabric.open(url, client_name="bench-agent") as agent,
        await RedisFabric.open(url, client_name="bench-worker") as worker,
    ):
        run = RunConfig(run_id=run_id, model="none", environment="none")
        claims = await _held_trajectories(agent, run, count)
        await asyncio.gather(
            _push(agent.turns(run), claims, 1 / turns_per_s, waits),
            _take(agent.turns(run), count),
            _work(worker.turns(run), count, waits),
        )
    return waits


async def _held_trajectories(agent: RedisFabric, run: RunConfig, count: int) -> list[TrajectoryClaim]:
    groups = [_group(min(GROUP_SIZE, count - start)) for start in range(0, count, GROUP_SIZE)]
    await agent.rollouts(run).push(groups)
    claims = await agent.trajectories(run).claim(AGENT_ID, count)
    assert len(claims) == count
    return claims


async def _push(turns: TurnQueue, claims: list[TrajectoryClaim], period_s: float, waits: Waits) -> None:
    start_s = time.perf_counter() + 0.1  # the worker is asleep by then
    for index, claim in enumerate(claims):
        due_s = start_s + index * period_s
        await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
        waits.late_ms.append((time.perf_counter() - due_s) * 1e3)
        assert not any(await turns.push(AGENT_ID, [_stamped_turn(claim)]))


async def _work(turns: TurnQueue, count: int, waits: Waits) -> None:
    claims: list[TurnClaim] = []
    while len(waits.claim_ms) < count or claims:
        settles = [TurnSettle(claim=claim, result=result_of(claim)) for claim in claims]
        exchange = await turns.exchange(WORKER_ID, settles=settles, want=WANT, lease_epoch=LEASE_EPOCH)
        now_ns = time.perf_counter_ns()
        claims = exchange.claims
        waits.claim_ms += [(now_ns - _stamp(claim)) / 1e6 for claim in claims]
        if not claims and len(waits.claim_ms) < count:
            await turns.wait(WORKER_ID, WAIT_S)


async def _take(turns: TurnQueue, count: int) -> None:
    while count > 0:
        count -= len(await turns.results(AGENT_ID, WAIT_S))


def _stamped_turn(claim: TrajectoryClaim) -> TurnPush:
    ids = PROMPT_IDS.copy()
    ids[:2] = np.frombuffer(time.perf_counter_ns().to_bytes(8, "little"), dtype="<i4")
    name = claim.job.trajectory_id
    job = TurnJob(turn_id=turn_id(name, 0), agent_id=AGENT_ID, sampling=Sampling(), prompt_ids=ids)
    return TurnPush(trajectory_id=name, fence=claim.fence, job=job)


def _stamp(claim: TurnClaim) -> int:
    return int.from_bytes(claim.job.prompt_ids[:2].tobytes(), "little")


def _group(size: int) -> GroupPush:
    group_id = new_group_id()
    jobs = tuple(
        TrajectoryJob(
            trajectory_id=trajectory_id(group_id, index),
            group_id=group_id,
            task_id="task",
            index=index,
            task={},
            seed=0,
        )
        for index in range(size)
    )
    return GroupPush(group_id=group_id, task_id="task", task={}, jobs=jobs)
