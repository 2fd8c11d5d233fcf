"""The rollout worker over memory ports, with an engine that the test plays: it ends turns, and dies, when told to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from rollfab.fabric.clock import SystemClock
from rollfab.fabric.errors import EngineError
from rollfab.fabric.ids import turn_id
from rollfab.fabric.memory.fabric import MemoryFabric
from rollfab.fabric.memory.queue import MemoryTurnQueue
from rollfab.fabric.memory.state import JobTable
from rollfab.fabric.ports import Exchange, TurnPush
from rollfab.fabric.records import Lease, RunConfig, Sampling, TurnJob
from rollfab.trainer.checks import make_groups
from rollfab.workers.engines.base import EngineStats, Generation, GenerationRequest
from rollfab.workers.rollout import RolloutConfig, RolloutWorker

RUN = RunConfig(run_id="r1", model="tiny", environment="frozenlake")
WORKER = "w"


def made(request_id: str, finish_reason: str, token_count: int) -> Generation:
    return Generation(
        request_id=request_id,
        finish_reason=finish_reason,
        completion_ids=np.arange(token_count, dtype=np.int32),
        logprobs=np.full(token_count, -1.0, np.float32),
        versions=((0, token_count, 0),) if token_count else (),
    )


class PlayedEngine:
    """Engine (see base) without a model: requests end when the test says so."""

    def __init__(self) -> None:
        self.token_counts: dict[str, int] = {}  # of running requests
        self.aborted: list[str] = []
        self.refused: set[str] = set()
        self.is_dead = False
        self._ended: list[Generation] = []
        self._has_ended = asyncio.Event()

    def end(self, finish_reason: str = "length") -> None:
        """All that runs ends."""
        self._ended += [made(name, finish_reason, count) for name, count in self.token_counts.items()]
        self.token_counts = {}
        self._has_ended.set()

    def die(self) -> None:
        self.is_dead = True
        self.token_counts = dict.fromkeys(self.token_counts, 0)
        self.end("error")

    def generate(self, request: GenerationRequest) -> None:
        if self.is_dead or request.request_id in self.refused:
            raise EngineError("the engine is dead" if self.is_dead else "too long")
        self.token_counts[request.request_id] = 3

    async def finished(self, timeout_s: float) -> list[Generation]:
        await self._has_ended.wait()
        self._has_ended.clear()
        ended, self._ended = self._ended, []
        return ended

    def progress(self, request_ids: Sequence[str]) -> list[Generation]:
        return [made(name, "", self.token_counts[name]) for name in request_ids if name in self.token_counts]

    async def abort(self, request_ids: Sequence[str]) -> list[Generation]:
        names = [name for name in request_ids if name in self.token_counts]
        self.aborted += names
        return [made(name, "abort", self.token_counts.pop(name)) for name in names]

    async def pause(self, reason: str) -> None:
        return

    async def resume(self, reason: str) -> None:
        return

    def stats(self) -> EngineStats:
        if self.is_dead:
            raise EngineError("the engine is dead")
        return EngineStats(
            running_count=0, waiting_count=0, kv_used_fraction=0.0, step_count=0, token_count=0, active_version=0
        )


class LiveWeights:
    """A receiver whose engine is at version 0."""

    version, error = 0, None

    def start(self) -> None:
        return

    async def close(self) -> None:
        return


class WatchedTurns(MemoryTurnQueue):
    """Remembers what each exchange brought: turns handed in, turns taken."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.exchanges: list[tuple[int, int]] = []

    async def exchange(self, worker_id: str, **asked: Any) -> Exchange:
        found = await super().exchange(worker_id, **asked)
        self.exchanges.append((len(asked.get("settles", ())), len(found.claims)))
        return found


class Stage:
    """One run, turns that wait, and a worker with a played engine."""

    def __init__(self) -> None:
        self.fabric = MemoryFabric()
        self.engine = PlayedEngine()
        self.turns = WatchedTurns(self.fabric.broker, RUN)
        self.fabric.turns = lambda run: self.turns  # type: ignore[method-assign]
        self.receiver_count = 0

    @property
    def table(self) -> JobTable:
        return self.fabric.broker.runs["r1"].turns

    async def ask(self, count: int) -> list[str]:
        """Turns of `count` trajectories that agent "a" holds."""
        await self.fabric.board.create_run(RUN)
        self.fabric.broker.runs["r1"].head_version = 0
        await self.fabric.rollouts(RUN).push(make_groups([{"seed": 1}], count, ["g"]))
        pushes = []
        for claim in await self.fabric.trajectories(RUN).claim("a", count):
            name = turn_id(claim.job.trajectory_id, 0)
            job = TurnJob(turn_id=name, agent_id="a", sampling=Sampling(), prompt_ids=np.ones(2, np.int32))
            pushes.append(TurnPush(trajectory_id=claim.job.trajectory_id, fence=claim.fence, job=job))
        assert await self.turns.push("a", pushes) == []
        return [push.job.turn_id for push in pushes]

    async def lease(self, epoch: int, slot_count: int) -> Lease:
        lease = Lease(worker_id=WORKER, run_id="r1", lease_epoch=epoch, slot_count=slot_count, lease_until_ms=None)
        await self.fabric.board.set_lease(lease, None)
        return lease

    def _receiver(self, run_id: str) -> Any:
        self.receiver_count += 1
        return LiveWeights()

    @asynccontextmanager
    async def worker(self, **settings: float) -> AsyncIterator[asyncio.Task[None]]:
        config = RolloutConfig(
            worker_id=WORKER,
            role="dedicated",
            model="tiny",
            slot_count=8,
            **{"heartbeat_s": 0.02, "poll_s": 0.05, **settings},  # type: ignore[arg-type]
        )
        worker = RolloutWorker(self.fabric, self.engine, config, SystemClock(), make_receiver=self._receiver)  # type: ignore[arg-type]
        stop = asyncio.Event()
        task = asyncio.create_task(worker.run(stop))
        try:
            yield task
        finally:
            stop.set()
            await asyncio.gather(task, return_exceptions=True)


async def until(condition: Callable[[], Any]) -> None:
    for _ in range(1500):
        if condition():
            return
        await asyncio.sleep(0.002)
    raise AssertionError("it never came true")


async def test_slots_that_come_free_are_filled_in_the_exchange_that_hands_in() -> None:
    # Given four turns for two slots
    stage = Stage()
    await stage.ask(4)
    await stage.lease(1, 2)
    async with stage.worker():
        await until(lambda: len(stage.engine.token_counts) == 2)
        stage.turns.exchanges.clear()

        # When the first two end
        stage.engine.end()
        await until(lambda: stage.engine.token_counts)

        # Then one exchange hands both in and brings the other two
        assert [each for each in stage.turns.exchanges if each != (0, 0)] == [(2, 2)]
        stage.engine.end()
        results = await stage.turns.results("a", 1.0)
        await until(lambda: stage.table.held == {})
    assert [len(each.completion_ids) for each in results] == [3, 3]


async def test_a_new_epoch_of_the_same_lease_interrupts_nothing() -> None:
    # Given a turn that runs, and another worker's slots that would be free
    stage = Stage()
    names = await stage.ask(3)
    await stage.lease(1, 1)
    async with stage.worker(heartbeat_s=30.0):
        await until(lambda: len(stage.engine.token_counts) == 1)

        # When the lease is replaced, and the worker learns of it by being refused
        await stage.lease(2, 3)
        stage.engine.end()
        await until(lambda: len(stage.engine.token_counts) == 2)

        # Then it goes on under the new one: no turn given back, weights not fetched again
        assert stage.engine.aborted == []
        assert stage.receiver_count == 1
        assert sorted(stage.engine.token_counts) == sorted(names)[1:]


async def test_a_lease_that_ends_gives_turns_back_with_their_tokens() -> None:
    stage = Stage()
    (name,) = await stage.ask(1)
    lease = await stage.lease(1, 1)
    async with stage.worker():
        await until(lambda: stage.engine.token_counts)
        await stage.fabric.board.end_lease(lease)
        await until(lambda: stage.table.ready == [name])
        assert stage.engine.aborted == [name]
        assert stage.table.logs[name].completion_ids.tolist() == [0, 1, 2]
        assert (stage.table.records[name].attempt, stage.table.records[name].loss) == (0, 0)


async def test_a_worker_that_is_stopped_gives_turns_back_with_their_tokens() -> None:
    stage = Stage()
    names = await stage.ask(2)
    await stage.lease(1, 2)
    async with stage.worker():
        await until(lambda: len(stage.engine.token_counts) == 2)
    assert sorted(stage.table.ready) == sorted(names)
    assert {len(log.completion_ids) for log in stage.table.logs.values()} == {3}
    assert WORKER not in stage.fabric.broker.workers


async def test_a_turn_that_the_engine_refuses_ends_as_an_error() -> None:
    stage = Stage()
    (name,) = await stage.ask(1)
    stage.engine.refused.add(name)
    await stage.lease(1, 1)
    async with stage.worker():
        (result,) = await stage.turns.results("a", 1.0)
    assert (result.finish_reason, result.error) == ("error", "too long")


async def test_no_turn_pays_for_an_engine_that_died() -> None:
    # Given a turn whose tokens so far are saved, and others that wait
    stage = Stage()
    await stage.ask(3)
    await stage.lease(1, 1)
    async with stage.worker(log_s=0.01) as task:
        await until(lambda: stage.table.logs)
        (running,) = stage.engine.token_counts

        # When the engine dies
        stage.engine.die()
        with pytest.raises(EngineError):
            await task

    # Then the worker ends, nothing is settled as an error, and what was saved is still there
    assert await stage.turns.results("a", 0.01) == []
    assert len(stage.table.ready) == 3
    assert stage.table.logs[running].completion_ids.tolist() == [0, 1, 2]
    assert {record.attempt for record in stage.table.records.values()} == {0}
