"""A pool of workers that say they are there, and runs with work: what a controller plans for.

No engine and no agent runs: workers are heartbeats and runs are groups on their streams, which is all that a
controller sees of either.
"""

from __future__ import annotations

import asyncio
import dataclasses
from random import Random

import numpy as np

from rollfab.fabric.contract.ids import trajectory_id
from rollfab.fabric.contract.records import RunConfig, TrajectoryJob, WorkerInfo
from rollfab.fabric.opened import RedisFabric
from rollfab.fabric.ports.queue import GroupPush
from rollfab.trainer.publish.publisher import Publisher

MODEL = "bench"
SLOT_COUNT = 8
GROUP_SIZE = 500


def run_config(index: int) -> RunConfig:
    """Runs of different weights."""
    return RunConfig(
        run_id=f"bench-{index}", model=MODEL, environment="none", weight=1.0 + index % 3, trajectory_count_max=1_000_000
    )


def worker_infos(count: int) -> list[WorkerInfo]:
    """Half of them dedicated, half serving, with probes, guards and rates."""
    return [
        WorkerInfo(
            worker_id=f"worker-{index:04}",
            role="dedicated" if index % 2 else "serving",
            pid=index,
            host="bench",
            model=MODEL,
            slot_count=SLOT_COUNT,
            engine="none",
            state="ready",
        )
        for index in range(count)
    ]


def stirred(info: WorkerInfo, random: Random) -> WorkerInfo:
    """What a worker says a while later: serving comes and goes, turns run."""
    running = random.randint(1, SLOT_COUNT)
    changed = dataclasses.replace(
        info,
        running_count=running,
        token_count=info.token_count + random.randint(1, 500),
        tokens_per_s=running * random.uniform(20, 40),
    )
    if info.role == "dedicated":
        return changed
    return dataclasses.replace(
        changed,
        probe="vllm",
        guard_state=random.choices(("open", "narrow", "shut"), (80, 15, 5))[0],
        headroom_fraction=round(random.uniform(0.05, 1.0), 3),
        open_fraction=round(random.uniform(0.3, 1.0), 3),
        state="asleep" if random.random() < 0.1 else "ready",
        wake_ms=1500,
    )


class Stage:
    """Workers and runs on one broker."""

    def __init__(self, fabric: RedisFabric, worker_count: int, seed: int) -> None:
        self.fabric = fabric
        self.infos = worker_infos(worker_count)
        self._random = Random(seed)
        self._group_count = 0

    async def open(self, runs: list[RunConfig]) -> None:
        """All is there: weights, work for every run, and every worker."""
        board = self.fabric.board
        for run in runs:
            await board.create_run(run)
            await Publisher(self.fabric.weights, run.run_id).publish({"w": np.zeros(8, np.float32)}, 0)
            await self.work(run, max(1, len(self.infos) * SLOT_COUNT // len(runs)))
        await self.beat(len(self.infos))
        await board.set_lend("*", "on")

    async def work(self, run: RunConfig, count: int) -> None:
        """So many trajectories more."""
        while count > 0:
            size, name = min(count, GROUP_SIZE), f"g{self._group_count}"
            jobs = [
                TrajectoryJob(
                    trajectory_id=trajectory_id(name, index), group_id=name, task_id="t", index=index, task={}, seed=1
                )
                for index in range(size)
            ]
            await self.fabric.rollouts(run).push([GroupPush(group_id=name, task_id="t", task={}, jobs=tuple(jobs))])
            self._group_count += 1
            count -= size

    async def beat(self, count: int) -> None:
        """So many workers say how they are now."""
        chosen = self._random.sample(range(len(self.infos)), count)
        for index in chosen:
            self.infos[index] = stirred(self.infos[index], self._random)
        await asyncio.gather(*(self.fabric.board.heartbeat(self.infos[index]) for index in chosen))
