"""Whoever sees to a reward says so: a reward worker that is killed, or an agent that dies, costs seconds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from rollfab.fabric.contract.clock import SystemClock
from rollfab.fabric.contract.errors import RewardFailed
from rollfab.fabric.contract.records import Rollout, RunConfig
from rollfab.fabric.queue.trajectories import RedisTrajectoryQueue
from rollfab.fabric.rules.queue.retries import PROCESS_LOSS
from rollfab.trainer.checks import make_groups
from rollfab.workers.rewards.jobs import BATCH_COUNT_MAX, QUEUED_S, RewardAsker
from rollfab.workers.rewards.scoring import KEEP_S, Scoring, ScoringConfig
from tests.standin.broker import DirectClient
from tests.standin.fabric import StandInFabric
from tests.support.records import rollout_of
from tests.support.until import until

RUN = RunConfig(run_id="r1", model="tiny", environment="frozenlake", reward="played")


class WatchedTrajectories(RedisTrajectoryQueue):
    """Remembers for how long who was kept."""

    kept: list[tuple[list[str], float]]

    async def keep_scoring(
        self, rows: Sequence[tuple[str, int]], duration_s: float, *, worker_id: str = "-"
    ) -> list[str]:
        self.kept.append(([name for name, _ in rows], duration_s))
        return await super().keep_scoring(rows, duration_s, worker_id=worker_id)


class PlayedFunctions:
    """Reward functions that take as long as the task says; a "fault" is a reason to fail."""

    def __init__(self) -> None:
        self.begun: list[tuple[str, str]] = []
        self.running: dict[str, int] = {}
        self.most: dict[str, int] = {}

    async def compute(self, name: str, owner: str, task: Mapping[str, Any], rollout: Rollout) -> float:
        self.begun.append((owner, rollout.trajectory_id))
        self.running[owner] = self.running.get(owner, 0) + 1
        self.most[owner] = max(self.most.get(owner, 0), self.running[owner])
        try:
            await asyncio.sleep(task.get("work_s", 0.0))
            if "fault" in task:
                raise RewardFailed("it failed", reason=task["fault"])
            return 1.0
        finally:
            self.running[owner] -= 1


class Setting:
    """Runs whose trajectories wait for their reward, and one reward worker without rq."""

    def __init__(self) -> None:
        self.fabric = StandInFabric()
        self.queue = WatchedTrajectories(DirectClient(self.fabric.broker), RUN)
        self.queue.kept = []
        make = self.fabric.trajectories
        self.fabric.trajectories = lambda run: self.queue if run.run_id == "r1" else make(run)  # type: ignore
        self.functions = PlayedFunctions()
        self.scoring = self.worker("w1")

    def worker(self, name: str, **settings: Any) -> Scoring:
        config = ScoringConfig(worker_id=name, **settings)
        scoring = Scoring(self.fabric, self.functions, config, SystemClock())  # type: ignore[arg-type]
        scoring.offered = ["played"]
        return scoring

    async def waiting(self, count: int, run: RunConfig = RUN, group: str = "g", **task: Any) -> list[tuple[str, int]]:
        await self.fabric.board.create_run(run)
        await self.fabric.rollouts(run).push(make_groups([task], count, [group]))
        queue, rows = self.fabric.trajectories(run), []
        for claim in await queue.claim("a", count):
            assert await queue.settle(claim, rollout_of(claim.job, None), is_scored=False)
            rows.append((claim.job.trajectory_id, claim.fence))
        return rows

    def left_s(self, trajectory_id: str) -> float:
        """Until its reward is asked for again."""
        run = self.fabric.tables_of("r1")
        return (run.trajectories.deadlines[trajectory_id] - run.now_ms) / 1000

    def counters(self, run_id: str = "r1") -> dict[str, int]:
        return self.fabric.tables_of(run_id).counters

    async def until_completed(self, count: int, run_id: str = "r1") -> None:
        await until(lambda: self.counters(run_id).get("trajectories_completed", 0) >= count)


@asynccontextmanager
async def at_work(scoring: Scoring) -> AsyncIterator[None]:
    """A reward worker that leaves with the block."""
    task = asyncio.create_task(scoring.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


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


def asker_of(queue: PlayedQueue, clock: PlayedClock) -> RewardAsker:
    return RewardAsker(lambda run_id: queue, clock)  # type: ignore[arg-type, return-value]


async def asked(asker: RewardAsker, rows: list[tuple[str, int]], *, is_again: bool) -> None:
    """Ask, and wait until that is through."""
    for name, fence in rows:
        await asker.ask("r1", name, fence, is_again=is_again)
    assert asker._sending is not None
    await asker._sending


# ---- asking


async def test_a_reward_that_nobody_asked_for_is_asked_for_within_seconds() -> None:
    setting = Setting()
    ((name, _),) = await setting.waiting(1)
    assert setting.left_s(name) <= KEEP_S


async def test_what_is_asked_for_together_travels_in_one_job() -> None:
    queue = PlayedQueue()
    rows = [("g.0", 1), ("g.1", 3)]
    await asked(asker_of(queue, PlayedClock()), rows, is_again=False)
    assert queue.calls == [("r1", rows)]


async def test_a_job_holds_a_bounded_number_of_rewards() -> None:
    queue = PlayedQueue()
    rows = [(f"g.{index}", 1) for index in range(BATCH_COUNT_MAX + 1)]
    await asked(asker_of(queue, PlayedClock()), rows, is_again=False)
    assert queue.calls == [("r1", rows[:-1]), ("r1", rows[-1:])]


async def test_a_reward_that_may_still_be_on_the_queue_is_not_put_there_twice() -> None:
    # Given a reward on the queue, behind others
    queue, clock = PlayedQueue(), PlayedClock()
    asker = asker_of(queue, clock)
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
    asker = asker_of(queue, PlayedClock())
    await asked(asker, [("g.0", 1)], is_again=False)
    await asked(asker, [("g.0", 1)], is_again=True)
    assert len(queue.calls) == 2


# ---- computing


async def test_a_reward_is_kept_only_while_it_is_seen_to() -> None:
    # Given a reward that takes longer than the time between two renewals
    setting = Setting()
    rows = await setting.waiting(1, work_s=1.3)
    async with at_work(setting.scoring):
        await setting.scoring.take("r1", rows)
        await until(lambda: len(setting.queue.kept) >= 3)
        # Then it is asked for again soon after its worker has fallen silent, not after the time of the queue
        assert setting.left_s(rows[0][0]) <= KEEP_S
        await setting.until_completed(1)
        # and nothing is kept once it is done
        count = len(setting.queue.kept)
        await asyncio.sleep(0.7)
        assert len(setting.queue.kept) == count


async def test_a_reward_that_is_not_waited_for_any_more_is_not_computed() -> None:
    setting = Setting()
    rows = await setting.waiting(2)
    await setting.queue.score(*rows[0], 1.0)
    async with at_work(setting.scoring):
        await setting.scoring.take("r1", rows)
        await setting.until_completed(2)
    assert setting.functions.begun == [("r1", rows[1][0])]


async def test_a_reward_that_is_handed_in_twice_is_computed_once() -> None:
    setting = Setting()
    rows = await setting.waiting(3, work_s=0.1)
    async with at_work(setting.scoring):
        for _ in range(3):
            await setting.scoring.take("r1", rows)
        await setting.until_completed(3)
    assert sorted(name for _, name in setting.functions.begun) == ["g.0", "g.1", "g.2"]


async def test_rewards_of_a_run_that_is_not_there_or_not_ours_are_left() -> None:
    setting = Setting()
    other = RunConfig(run_id="r2", model="tiny", environment="frozenlake", reward="of-another-worker")
    rows = await setting.waiting(1, other)
    async with at_work(setting.scoring):
        await setting.scoring.take("gone", [("g.0", 1)])
        await setting.scoring.take("r2", rows)
        await asyncio.sleep(0.1)
    assert setting.functions.begun == []
    assert "rewards_lost" not in setting.counters("r2")


async def test_the_computing_ends_when_nobody_wants_the_reward_any_more() -> None:
    setting = Setting()
    rows = await setting.waiting(1, work_s=60.0)
    async with at_work(setting.scoring):
        await setting.scoring.take("r1", rows)
        await until(lambda: setting.functions.begun)
        await setting.fabric.rollouts(RUN).cancel("g")
        await until(lambda: not setting.scoring.running_count)
    assert setting.functions.running["r1"] == 0


async def test_a_worker_that_leaves_lets_go_at_once_and_has_cost_nothing() -> None:
    setting = Setting()
    rows = await setting.waiting(2, work_s=60.0)
    async with at_work(setting.scoring):
        await setting.scoring.take("r1", rows)
        await asyncio.sleep(0.1)
    assert sorted((await setting.queue.reap("a")).scoring) == sorted(rows)
    assert "rewards_lost" not in setting.counters()


async def test_what_was_lost_before_is_computed_alone_and_the_least_suspicious_first() -> None:
    # Given rewards that cost a worker once, and one that cost a process
    setting = Setting()
    rows = await setting.waiting(6, work_s=0.02)
    for name, fence in rows:
        await setting.queue.begin_score(name, fence, "dead", 0.0)
    await setting.queue.reap("a")
    setting.fabric.tables_of("r1").trajectories.blame(rows[0][0], PROCESS_LOSS)

    # When a worker sees to them
    async with at_work(setting.scoring):
        await setting.scoring.take("r1", rows)
        await setting.until_completed(6)

    # Then never two at once, and that one not before the others
    assert setting.functions.most["r1"] == 1
    assert setting.functions.begun[0][1] != rows[0][0]


async def test_runs_with_rewards_that_hang_leave_room_for_the_others() -> None:
    # Given many runs whose every reward hangs, once their functions had looked well
    setting = Setting()
    scoring = setting.worker("w1", process_count_max=4)
    bad = [RunConfig(run_id=f"bad{n}", model="tiny", environment="frozenlake", reward="played") for n in range(9)]
    async with at_work(scoring):
        for run in bad:
            await scoring.take(run.run_id, await setting.waiting(8, run, f"{run.run_id}-well", work_s=0.03))
        for run in bad:
            await setting.until_completed(8, run.run_id)
        for run in bad:
            await scoring.take(run.run_id, await setting.waiting(30, run, f"{run.run_id}-bad", work_s=60.0))
        await asyncio.sleep(0.2)

        # When another run wants rewards, Then it gets them
        await scoring.take("r1", await setting.waiting(20))
        await setting.until_completed(20)
        assert scoring.running_count <= 4 + len(bad)


async def test_a_process_that_was_lost_sets_its_run_back_to_one_at_a_time() -> None:
    setting = Setting()
    async with at_work(setting.scoring):
        await setting.scoring.take("r1", await setting.waiting(30, work_s=0.03))
        await setting.until_completed(30)
        assert setting.functions.most["r1"] > 4
        rows = await setting.waiting(30, group="bad", work_s=0.03, fault="timeout")
        await setting.scoring.take("r1", rows)
        await until(lambda: setting.counters().get("rewards_lost", 0) >= 20)
        setting.functions.most.clear()
        await asyncio.sleep(0.1)
        assert setting.functions.most.get("r1", 0) <= 2  # one, and one that has cost something before
