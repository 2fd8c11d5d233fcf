"""Is an agent spoken for while its loop stands, and given up when it hangs? And does a call's limit run meanwhile?"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from rollfab.fabric.contract.clock import SystemClock
from rollfab.fabric.contract.ids import trajectory_id
from rollfab.fabric.contract.records import RunConfig, TrajectoryJob, WorkerInfo
from rollfab.fabric.ports.queue import TrajectoryClaim
from rollfab.fabric.queue.trajectories import RedisTrajectoryQueue
from rollfab.fabric.rules.queue.timings import Timings
from rollfab.workers.agent.keeper import Elsewhere, Keeper, KeeperConfig
from rollfab.workers.environments import base
from rollfab.workers.environments.base import in_thread, time_limit
from tests.standin.fabric import StandInFabric
from tests.support.until import until
from tests.support.virtual_time import in_virtual_time

RUN = RunConfig(run_id="r1", model="tiny", environment="frozenlake")


class Part:
    """What an agent serves of a run."""

    run = RUN

    def __init__(self) -> None:
        job = TrajectoryJob(trajectory_id=trajectory_id("g", 0), group_id="g", task_id="t", index=0, task={}, seed=0)
        self.claims = {"g.0": TrajectoryClaim(job=job, worker_id="a", fence=1, attempt=0, loss=0)}
        self.lost: list[str] = []

    async def renew(self, trajectories: Any) -> dict[str, int]:
        held = list(self.claims.values())
        return dict.fromkeys(await trajectories.renew("a", held), held[0].fence)

    def lose(self, lost: Any) -> None:
        self.lost += lost


class Stage:
    """A keeper in a thread of its own, over a fabric whose calls it counts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, hung_s: float) -> None:
        self.renewed_at_s: list[float] = []
        self.beats = 0
        self.part = Part()
        config = KeeperConfig(worker_id="a", renew_s=0.05, reap_s=0.05, hung_s=hung_s)
        self._keeper = Keeper(
            config, SystemClock(), say=self._say, kept=lambda: {"r1": self.part}, timings=Timings("p")
        )
        monkeypatch.setattr(RedisTrajectoryQueue, "renew", self._renew)

    async def _renew(self, *_: Any) -> list[str]:
        self.renewed_at_s.append(time.monotonic())
        return []

    def _say(self) -> WorkerInfo:
        self.beats += 1
        return WorkerInfo(worker_id="a", role="agent", pid=1, host="h")

    @contextlib.asynccontextmanager
    async def kept(self) -> AsyncIterator[None]:
        async def open_fabric() -> Any:
            fabric = StandInFabric()
            await fabric.board.create_run(RUN)
            return contextlib.nullcontext(fabric)

        async def ask(*_: Any, **__: Any) -> None:
            """Nobody asks for rewards here."""

        elsewhere = Elsewhere(open_fabric=open_fabric, make_ask_reward=lambda: ask)
        async with self._keeper.keeping(StandInFabric(), ask, elsewhere) as check:
            await until(lambda: self.renewed_at_s)
            yield
            check()

    def renewed_within(self, from_s: float, to_s: float) -> int:
        return sum(from_s <= at_s <= to_s for at_s in self.renewed_at_s)


async def test_claims_are_renewed_while_the_agent_s_loop_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(monkeypatch, hung_s=30.0)
    async with stage.kept():
        began_s = time.monotonic()
        time.sleep(1.0)  # noqa: ASYNC251
        assert stage.renewed_within(began_s, time.monotonic()) >= 3


@pytest.mark.slow
async def test_an_agent_that_hangs_is_spoken_for_no_more_until_it_turns_again(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(monkeypatch, hung_s=0.5)
    async with stage.kept():
        # When the loop stands for far longer than it may
        time.sleep(3.0)  # noqa: ASYNC251
        # Then it was not spoken for at the end of that
        now_s = time.monotonic()
        assert stage.renewed_within(now_s - 1.0, now_s) == 0
        # And is again, once it turns
        await until(lambda: stage.renewed_within(now_s, time.monotonic()))


async def test_what_is_lost_is_told_in_the_agent_s_own_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(monkeypatch, hung_s=30.0)
    loops: list[Any] = []

    async def lose(*_: Any) -> list[str]:
        return ["g.0"]

    stage.part.lose = lambda lost: loops.append((asyncio.get_running_loop(), lost))  # type: ignore[method-assign]
    async with stage.kept():
        monkeypatch.setattr(RedisTrajectoryQueue, "renew", lose)
        await until(lambda: loops)
    assert loops[0] == (asyncio.get_running_loop(), {"g.0": 1})


# ---- a call's time limit


@pytest.mark.slow
async def test_a_call_is_not_late_because_the_loop_stood() -> None:
    # Given a call that takes a moment, in a thread; when the loop stands for longer than the limit
    async with asyncio.timeout(20), time_limit(1.0):
        call = asyncio.create_task(in_thread(lambda: time.sleep(0.2)))
        await asyncio.sleep(0.05)
        time.sleep(2.0)  # noqa: ASYNC251
        # Then its answer, which came in time, is read
        await call


async def test_a_call_that_takes_too_long_is_ended_though_the_loop_stands_now_and_then() -> None:
    async def call() -> None:
        async with asyncio.timeout(20), time_limit(0.5):
            while True:
                await asyncio.sleep(0.3)
                time.sleep(0.2)  # noqa: ASYNC251

    with pytest.raises(TimeoutError):
        await call()


@in_virtual_time
@pytest.mark.parametrize(("running_count", "times"), [(1, 1.0), (4, 2.0), (1000, 8.0)])
async def test_a_limit_is_longer_where_processes_share_processors(
    running_count: int, times: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "loadavg").write_text(f"0.1 0.2 0.3 {running_count}/2000 99\n")
    monkeypatch.setattr(base, "LOADAVG", tmp_path / "loadavg")
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    with pytest.raises(TimeoutError):
        async with time_limit(10.0):
            await asyncio.sleep(1000.0)
    assert loop.time() - began_s == pytest.approx(10.0 * times)
