"""A trainer, an agent and a worker on the bare ports: groups from push to acknowledgement, while a test breaks things.

No environments and no engines: a turn "generates" its own index, so that a rollout shows whether its turns are whole
and in order. Every role does what the real ones do where faults matter: it asks again for what does not come, drops
what it lost, and takes back what others lost.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

import numpy as np

from rollfab.fabric.contract.errors import ClaimLost
from rollfab.fabric.contract.ids import trajectory_id, turn_id
from rollfab.fabric.contract.records import (
    Lease,
    Rollout,
    RunConfig,
    Sampling,
    TrajectoryJob,
    TurnJob,
    TurnResult,
)
from rollfab.fabric.opened import RedisFabric
from rollfab.fabric.ports.queue import GroupPush, TrajectoryClaim, TurnClaim, TurnPush, TurnSettle
from tests.support import records
from tests.support.leases import set_lease
from tests.support.until import until

GROUP_SIZE = 2
TURN_COUNT = 3
ASK_AGAIN_S = 1.0
PUSH_AGAIN_S = 1.0
WORKER_ID = "worker"
# Groups that may be pushed before the oldest of them is acknowledged: a slow machine pushes no further.
AHEAD_COUNT = 15


@dataclass
class Tally:
    """What a trainer saw.

    Attributes:
        used: group → how often it was used.
        again: deliveries of groups that had been acknowledged: their acknowledgement was lost.
        lost: groups whose delivery was forgotten before it could be acknowledged.
        taken_again: pushes of groups that had been taken in: that was lost.
    """

    pushed: list[str] = field(default_factory=list)
    used: dict[str, int] = field(default_factory=dict)
    acknowledged: set[str] = field(default_factory=set)
    lost: set[str] = field(default_factory=set)
    again: int = 0
    taken_again: int = 0
    broken: list[str] = field(default_factory=list)

    @property
    def missing(self) -> list[str]:
        return [name for name in self.pushed if name not in self.acknowledged]

    def check(self) -> None:
        """Every group was used exactly once, and its rollouts are whole."""
        assert self.missing == []
        assert set(self.used.values()) == {1}
        assert self.broken == []


@dataclass
class Held:
    """A trajectory in an agent's hands."""

    claim: TrajectoryClaim
    tokens: list[int]  # one per turn
    asked_s: float = 0.0


class Life:
    """All roles of one run on one connection.

    Args:
        has_ledger: the trainer remembers what it pushed and used: it pushes again what does not come, and drops what
                comes again. Without it, it takes the broker at its word.
        pace_s: between pushes.
    """

    def __init__(self, fabric: RedisFabric, run: RunConfig, *, has_ledger: bool = False, pace_s: float = 0.0) -> None:
        self.tally = Tally()
        self._pace_s = pace_s
        self._ahead = asyncio.Semaphore(AHEAD_COUNT)
        self._fabric = fabric
        self._run = run
        self._has_ledger = has_ledger
        self._trajectories = fabric.trajectories(run)
        self._turns = fabric.turns(run)
        self._rollouts = fabric.rollouts(run)
        self._held: dict[str, Held] = {}

    async def play(self, group_count: int, *, name: str = "g", timeout_s: float = 40.0) -> Tally:
        """Push groups while all roles run, until every group is acknowledged."""
        await self._fabric.board.create_run(self._run)
        async with asyncio.timeout(timeout_s), asyncio.TaskGroup() as tasks:
            roles = [tasks.create_task(role) for role in (self._agent(), self._worker(), self._controller())]
            pusher = tasks.create_task(self._push(group_count, name))
            await self._consume(pusher)
            for role in roles:
                role.cancel()
        return self.tally

    async def _push(self, group_count: int, name: str) -> None:
        for index in range(group_count):
            group_id = f"{name}{index}"
            await self._ahead.acquire()
            await self._rollouts.push([group_of(group_id)])
            self.tally.pushed.append(group_id)
            await asyncio.sleep(self._pace_s)

    async def _consume(self, pusher: asyncio.Task[None]) -> None:
        push_again_s = time.monotonic() + PUSH_AGAIN_S
        while self.tally.missing or not pusher.done():
            for delivery in await self._rollouts.receive("trainer", 4, 0.1):
                self._use(delivery.group.group_id, delivery.group.rollouts)
                try:
                    await self._rollouts.acknowledge(delivery)
                except ClaimLost:  # a fail-over lost that it was complete: it runs again
                    if not self._has_ledger:
                        raise
                    self.tally.lost.add(delivery.group.group_id)
                    continue
                if delivery.group.group_id not in self.tally.acknowledged:
                    self.tally.acknowledged.add(delivery.group.group_id)
                    self._ahead.release()
            if self._has_ledger and time.monotonic() > push_again_s:
                taken = await self._rollouts.push([group_of(group_id) for group_id in self.tally.missing])
                self.tally.taken_again += sum(taken)
                push_again_s = time.monotonic() + PUSH_AGAIN_S

    def _use(self, group_id: str, rollouts: tuple[Rollout, ...]) -> None:
        self.tally.again += group_id in self.tally.acknowledged
        if self._has_ledger and group_id in self.tally.acknowledged | self.tally.lost:
            return
        self.tally.used[group_id] = self.tally.used.get(group_id, 0) + 1
        whole = [each.completion_ids.tolist() == list(range(TURN_COUNT)) for each in rollouts]
        if whole != [True] * GROUP_SIZE:
            self.tally.broken.append(group_id)

    async def _agent(self) -> None:
        while True:
            for claim in await self._trajectories.claim("agent", 8):
                held = self._held[claim.job.trajectory_id] = Held(
                    claim, [int(each.completion_ids[0]) for each in claim.turns]
                )
                await self._ask(held)
            for name in await self._trajectories.renew("agent", [held.claim for held in self._held.values()]):
                self._held.pop(name, None)
            for result in await self._turns.results("agent", 0.05):
                await self._go_on(result)
            for held in list(self._held.values()):
                if time.monotonic() - held.asked_s > ASK_AGAIN_S:
                    await self._ask(held)
            await self._trajectories.reap("agent")
            await self._turns.reap("agent")

    async def _go_on(self, result: TurnResult) -> None:
        trajectory, _, index = result.turn_id.rpartition(".")
        held = self._held.get(trajectory)
        if held is not None and int(index) == len(held.tokens):
            held.tokens.append(int(result.completion_ids[0]))
            await self._ask(held)

    async def _ask(self, held: Held) -> None:
        """Ask for the next turn, or hand in what is complete."""
        held.asked_s = time.monotonic()
        job = held.claim.job
        if len(held.tokens) < TURN_COUNT:
            name = turn_id(job.trajectory_id, len(held.tokens))
            prompt = np.full(4, len(held.tokens), np.int32)
            turn = TurnJob(turn_id=name, agent_id="agent", sampling=Sampling(max_tokens=1), prompt_ids=prompt)
            push = TurnPush(trajectory_id=job.trajectory_id, fence=held.claim.fence, job=turn)
            if not any(await self._turns.push("agent", [push])):
                return
        else:
            await self._trajectories.settle(held.claim, rollout_of(held), is_scored=True)
        self._held.pop(job.trajectory_id, None)

    async def _worker(self) -> None:
        claims: list[TurnClaim] = []
        while True:
            settles = [TurnSettle(claim=claim, result=result_of(claim)) for claim in claims]
            found = await self._turns.exchange(WORKER_ID, settles=settles, want=8, lease_epoch=1, active_version=0)
            claims = found.claims
            if not claims:
                await self._turns.wait(WORKER_ID, 0.05)

    async def _controller(self) -> None:
        """Publish the worker's lease, again and again: a fail-over may have lost it."""
        lease = Lease(worker_id=WORKER_ID, run_id=self._run.run_id, lease_epoch=1, slot_count=64, lease_until_ms=None)
        while True:
            await self._fabric.board.create_run(self._run)
            await set_lease(self._fabric.board, lease, None)
            await asyncio.sleep(0.5)


def group_of(group_id: str) -> GroupPush:
    """A group of GROUP_SIZE trajectories."""
    jobs = tuple(
        TrajectoryJob(
            trajectory_id=trajectory_id(group_id, index), group_id=group_id, task_id="t", index=index, task={}, seed=1
        )
        for index in range(GROUP_SIZE)
    )
    return GroupPush(group_id=group_id, task_id="t", task={}, jobs=jobs)


def result_of(claim: TurnClaim) -> TurnResult:
    """A turn's own index, as its only token."""
    return records.result_of(claim.job.turn_id, **records.made_of(claim.job.prompt_ids[:1], WORKER_ID))


def rollout_of(held: Held) -> Rollout:
    """What an agent makes of TURN_COUNT turns."""
    return records.rollout_of(
        held.claim.job,
        ids=held.tokens,
        **records.made_of(held.tokens, WORKER_ID),
        turn_count=TURN_COUNT,
        attempt=held.claim.attempt,
    )


async def more_work(tally: Tally, playing: asyncio.Task[Tally]) -> None:
    """Until some more groups were pushed and some more acknowledged.

    Raises:
        AssertionError: the play ended, so that no more come.
    """
    pushed, acknowledged = len(tally.pushed) + 5, len(tally.acknowledged) + 5
    await until(lambda: playing.done() or (len(tally.pushed) >= pushed and len(tally.acknowledged) >= acknowledged))
    if playing.done():
        await playing
        raise AssertionError("the play ended before more was pushed and acknowledged")
