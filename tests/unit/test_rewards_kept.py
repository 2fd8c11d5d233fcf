"""Whoever sees to a reward says so: a reward worker that is killed, or an agent that dies, costs seconds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from rollfab.fabric.memory.fabric import MemoryFabric
from rollfab.fabric.memory.queue import MemoryTrajectoryQueue
from rollfab.fabric.records import Rollout, RunConfig, Span
from rollfab.trainer.checks import make_groups
from rollfab.workers.environments.registry import Registry
from rollfab.workers.jobs import KEEP_S, QUEUED_S, RewardAsker, RewardWorker

RUN = RunConfig(run_id="r1", model="tiny", environment="frozenlake", reward="lazy")
computed: list[str] = []


def lazy(task: dict[str, Any], rollout: Rollout) -> float:
    computed.append(rollout.trajectory_id)
    time.sleep(task["work_s"])
    return 1.0


class WatchedTrajectories(MemoryTrajectoryQueue):
    """Remembers for how long who was kept."""

    kept: list[tuple[list[str], float]]

    async def keep_scoring(self, rows: Sequence[tuple[str, int]], duration_s: float) -> list[str]:
        self.kept.append(([name for name, _ in rows], duration_s))
        return await super().keep_scoring(rows, duration_s)


class Setting:
    """A run whose trajectories wait for their reward."""

    def __init__(self) -> None:
        self.fabric = MemoryFabric()
        self.queue = WatchedTrajectories(self.fabric.broker, RUN)
        self.queue.kept = []
        self.fabric.trajectories = lambda run: self.queue  # type: ignore[method-assign]
        computed.clear()

    async def scoring(self, count: int, work_s: float = 0.0) -> list[tuple[str, int]]:
        await self.fabric.board.create_run(RUN)
        await self.fabric.rollouts(RUN).push(make_groups([{"work_s": work_s}], count, ["g"]))
        rows = []
        for claim in await self.queue.claim("a", count):
            ids = np.ones(1, np.int32)
            rollout = Rollout(
                trajectory_id=claim.job.trajectory_id,
                group_id="g",
                task_id=claim.job.task_id,
                reward=None,
                finish_reason="terminated",
                turn_count=1,
                attempt=0,
                seed=0,
                spans=(Span(0, 1, "w", 0),),
                prompt_ids=ids,
                completion_ids=ids,
                logprobs=np.zeros(1, np.float32),
                completion_mask=np.ones(1, np.uint8),
            )
            assert await self.queue.settle(claim, rollout, is_scored=False)
            rows.append((claim.job.trajectory_id, claim.fence))
        return rows

    def left_s(self, trajectory_id: str) -> float:
        """Until its reward is asked for again."""
        return (self.queue.run.trajectories.deadlines[trajectory_id] - self.fabric.broker.now_ms()) / 1000

    def worker(self) -> RewardWorker:
        registry = Registry(rewards=[f"lazy={__name__}:lazy"])
        return RewardWorker(self.fabric, registry, "reward", asyncio.get_running_loop())


class PlayedClock:
    """A clock that the test moves; nobody waits by it."""

    def __init__(self) -> None:
        self.time_s = 0.0

    def now_s(self) -> float:
        return self.time_s

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0)


class PlayedQueue:
    """An rq queue that takes everything."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.count = 0  # of what waits there by now

    def enqueue_call(self, name: str, *, args: tuple[Any, ...], **settings: Any) -> None:
        self.calls.append(args)


async def test_a_reward_that_nobody_asked_for_is_asked_for_within_seconds() -> None:
    setting = Setting()
    ((name, _),) = await setting.scoring(1)
    assert setting.left_s(name) <= KEEP_S


async def asked(asker: RewardAsker, rows: list[tuple[str, int]], *, is_again: bool) -> None:
    """Ask, and wait until that is through."""
    for name, fence in rows:
        await asker.ask("r1", name, fence, is_again=is_again)
    assert asker._sending is not None
    await asker._sending


async def test_what_is_asked_for_together_travels_in_one_job() -> None:
    queue = PlayedQueue()
    rows = [("g.0", 1), ("g.1", 3)]
    await asked(RewardAsker(queue, PlayedClock()), rows, is_again=False)  # type: ignore[arg-type]
    assert queue.calls == [("r1", rows)]


async def test_a_reward_that_may_still_be_on_the_queue_is_not_put_there_twice() -> None:
    # Given a reward on the queue, behind others
    queue, clock = PlayedQueue(), PlayedClock()
    asker = RewardAsker(queue, clock)  # type: ignore[arg-type]
    rows = [("g.0", 1)]
    await asked(asker, rows, is_again=False)
    queue.count = 7

    # When it is asked for again, soon and much later
    await asked(asker, rows, is_again=True)
    assert len(queue.calls) == 1
    clock.time_s += QUEUED_S
    await asked(asker, rows, is_again=True)

    # Then only the second time counts
    assert len(queue.calls) == 2


async def test_a_reward_that_was_lost_on_its_way_is_asked_for_again_at_once() -> None:
    queue = PlayedQueue()
    asker = RewardAsker(queue, PlayedClock())  # type: ignore[arg-type]
    await asked(asker, [("g.0", 1)], is_again=False)
    await asked(asker, [("g.0", 1)], is_again=True)
    assert len(queue.calls) == 2


async def test_a_reward_is_kept_only_while_it_is_being_computed() -> None:
    # Given a reward that takes longer than the time between two renewals
    setting = Setting()
    rows = await setting.scoring(1, work_s=1.3)
    await setting.queue.keep_scoring(rows, QUEUED_S)
    task = asyncio.create_task(asyncio.to_thread(setting.worker().score, "r1", [list(row) for row in rows]))
    async with asyncio.timeout(5):
        while len(setting.queue.kept) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        # Then it is asked for again soon after its worker has fallen silent, not after the time of the queue
        assert setting.left_s(rows[0][0]) <= KEEP_S
        await task
    # and nothing is kept once it is done
    count = len(setting.queue.kept)
    await asyncio.sleep(0.7)
    assert len(setting.queue.kept) == count
    assert setting.queue.run.counters["trajectories_completed"] == 1


async def test_a_reward_that_is_not_waited_for_any_more_is_not_computed() -> None:
    setting = Setting()
    rows = await setting.scoring(2)
    await setting.queue.score(*rows[0], 1.0)
    await asyncio.to_thread(setting.worker().score, "r1", [list(row) for row in rows])
    assert computed == [rows[1][0]]


async def test_rewards_of_a_run_that_was_deleted_are_nobody_s() -> None:
    setting = Setting()
    await asyncio.to_thread(setting.worker().score, "gone", [["g.0", 1]])
    assert computed == []
