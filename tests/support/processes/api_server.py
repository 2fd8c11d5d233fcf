"""A real api on a real broker, with a hand on the fabric: what the tests of the api and of its page stand on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
from fastapi import APIRouter

from rollfab.api.access.config import ApiConfig
from rollfab.api.server import serve
from rollfab.fabric.broker.connection import open_broker
from rollfab.fabric.contract.errors import FabricError
from rollfab.fabric.contract.ids import trajectory_id
from rollfab.fabric.contract.records import DeadLetter, RunConfig, TrajectoryJob, WorkerInfo
from rollfab.fabric.opened import RedisFabric
from rollfab.fabric.ports.queue import GroupPush, TrajectoryClaim
from tests.support.records import rollout_of

RUN = RunConfig(run_id="r1", model="tiny", environment="frozenlake", trajectory_count_max=100)


@dataclass
class ApiWorld:
    """One api, its address, and the fabric behind it."""

    url: str
    http: httpx.AsyncClient
    fabric: RedisFabric
    living: dict[str, WorkerInfo] = field(default_factory=dict)
    """Workers whose heart beats."""

    async def json(self, path: str, status: int = 200, **options: Any) -> Any:
        """GET, and the answer's body."""
        answer = await self.http.get(path, **options)
        assert answer.status_code == status, answer.text
        return answer.json()

    async def beat(self, worker_id: str, role: str, **facts: Any) -> None:
        """A worker's heartbeat; it goes on, as a living worker's does."""
        info = WorkerInfo(worker_id=worker_id, role=role, pid=7, host="box", **facts)
        await self.fabric.board.heartbeat(info)
        self.living[worker_id] = info

    async def keep_beating(self) -> None:
        """Beat for all that live, once a second; a broker that is away is waited for."""
        while True:
            await asyncio.sleep(1)
            with suppress(FabricError):
                for info in tuple(self.living.values()):
                    await self.fabric.board.heartbeat(info)

    async def push_group(self, group_id: str, size: int) -> None:
        """Submit a group, as a trainer does."""
        jobs = tuple(
            TrajectoryJob(
                trajectory_id=trajectory_id(group_id, index),
                group_id=group_id,
                task_id="t1",
                index=index,
                task={},
                seed=7,
            )
            for index in range(size)
        )
        await self.fabric.rollouts(RUN).push([GroupPush(group_id=group_id, task_id="t1", task={}, jobs=jobs)])

    async def claim(self, count: int) -> list[TrajectoryClaim]:
        """Take trajectories, as an agent worker does."""
        return await self.fabric.trajectories(RUN).claim("agent-1", count)

    async def settle(self, claim: TrajectoryClaim, reward: float = 1.0) -> None:
        """Finish a trajectory."""
        assert await self.fabric.trajectories(RUN).settle(
            claim, rollout_of(claim.job, reward, (0,), spans=()), is_scored=True
        )

    async def bury(self, claim: TrajectoryClaim, reason: str) -> None:
        """Give a trajectory up for good."""
        letter = DeadLetter(
            trajectory_id=claim.job.trajectory_id,
            run_id=RUN.run_id,
            worker_id="agent-1",
            reason=reason,
            traceback="Traceback: line 1",
            attempt=1,
            job={},
        )
        await self.fabric.trajectories(RUN).fail(claim.job.trajectory_id, claim.fence, letter, is_final=True)


@asynccontextmanager
async def running_api(
    broker_url: str, *, training: APIRouter | None = None, **settings: Any
) -> AsyncIterator[ApiWorld]:
    """An emptied broker with run r1, and an api on a free port; it is stopped at the end."""
    client = await open_broker(broker_url, client_name="tests")
    await client.flushall()
    await client.aclose()
    async with await RedisFabric.open(broker_url, client_name="tests", patience_s=0.5) as fabric:
        await fabric.board.create_run(RUN)
        stop, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
        config = ApiConfig(**{"port": 0, **settings})
        serving = asyncio.create_task(serve(fabric, config, stop, training=training, on_ready=ready.set_result))
        await asyncio.wait((serving, ready), return_when=asyncio.FIRST_COMPLETED)
        assert not serving.done(), serving.exception()
        try:
            async with httpx.AsyncClient(base_url=ready.result(), timeout=5) as http:
                world = ApiWorld(ready.result(), http, fabric)
                hearts = asyncio.create_task(world.keep_beating())
                try:
                    yield world
                finally:
                    hearts.cancel()
        finally:
            stop.set()
            await asyncio.wait_for(serving, 5)
