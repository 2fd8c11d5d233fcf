"""A trainer with a checkpoint, killed again and again at any point: no group is learnt twice, and none is lost."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from docs.examples.checkpointed import GROUP_COUNT, GROUP_SIZE, STEP_COUNT
from redis import Redis

import rollfab
from rollfab.fabric.contract.records import RunConfig, Span
from rollfab.fabric.opened import RedisFabric
from tests.support.processes import killed_trainer
from tests.support.processes.fabric_processes import PYTHONPATH
from tests.support.records import rollout_of

pytestmark = [pytest.mark.redis, pytest.mark.timeout(120)]

COUNT = STEP_COUNT * GROUP_COUNT * GROUP_SIZE
LIFE_COUNT_MIN = 4
SEED = "1"  # a failure prints every life, and where it ended


async def play(ports: RedisFabric, run: RunConfig) -> None:
    """Be the workers: end every trajectory at once, at the head's version, with a token that is its own."""
    queue = ports.trajectories(run)
    while True:
        for claim in await queue.claim("agent", 100):
            token = int(claim.job.group_id.removeprefix("group-")) * GROUP_SIZE + claim.job.index
            head = (await ports.weights.head(run.run_id)).version
            made = rollout_of(claim.job, ids=[token])
            await queue.settle(claim, replace(made, spans=(Span(0, 1, "w1", head),)), is_scored=True)
        await asyncio.sleep(0.005)


@asynccontextmanager
async def played(url: str) -> AsyncIterator[RedisFabric]:
    async with await RedisFabric.open(url, client_name="test") as ports:
        config = RunConfig(run_id="checkpointed", model="example/toy", environment="frozenlake", staleness=1)
        agent = asyncio.create_task(play(ports, await ports.board.create_run(config)))
        yield ports
        assert not agent.done(), agent
        agent.cancel()


async def test_whatever_kills_it_a_trainer_learns_every_group_once(url: str, redis: Redis, tmp_path: Path) -> None:
    # Given workers, and the trainer of the recipe, killed at points that a seed chooses until it comes to its end
    words = [sys.executable, killed_trainer.__file__, SEED, str(tmp_path)]
    place = {**os.environ, "PYTHONPATH": PYTHONPATH, "ROLLFAB_URL": url, "OPENBLAS_NUM_THREADS": "1"}
    async with played(url):
        process = await asyncio.create_subprocess_exec(
            *words, env=place, stdout=subprocess.PIPE, start_new_session=True
        )
        try:
            said, _ = await process.communicate()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # a life that waits for ever, too
    assert process.returncode == 0, said
    assert said.count(b"killed before") >= LIFE_COUNT_MIN, said

    # Then its checkpoint holds what each rollout taught, once
    state = json.loads((tmp_path / "checkpoint.json").read_text())
    assert state["weights"] == [1.0] * COUNT + [0.0] * (len(state["weights"]) - COUNT), said
    assert state["step"] == STEP_COUNT and len(set(state["done"])) == len(state["done"]) == STEP_COUNT * GROUP_COUNT

    # And workers hold just that, and nothing of the run is left
    with rollfab.connect(url) as fabric:
        run = fabric.run("checkpointed")
        assert run.weights()["weights"].tolist() == state["weights"] and run.head_version() == state["version"]
        assert run.status().depth == 0
