"""Is an environment that freezes the agent named, and nobody else?"""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from rollfab.fabric.contract.records import RunConfig, TrajectoryJob
from rollfab.fabric.model.tokenizer import CharTokenizer
from rollfab.fabric.ports.queue import TrajectoryClaim
from rollfab.workers.agent.episode import Episode, Limits
from rollfab.workers.agent.loop_watchdog import watching
from rollfab.workers.environments.base import Environment, Observation, Step
from rollfab.workers.environments.registry import Registry
from tests.support.until import until

BLOCKED_S = 0.4


class Blocking(Environment):
    """Claims to be asynchronous, and blocks."""

    isolation = "none"

    async def reset(self, task: dict[str, Any], seed: int) -> Observation:
        time.sleep(4 * BLOCKED_S)  # noqa: ASYNC251
        raise RuntimeError("enough")

    async def step(self, action: str) -> Step:
        raise AssertionError("its reset has raised")


class BlockingInline(Blocking):
    """The same, on the loop by its own word."""

    inline = True


async def start_episode(name: str, registry: Registry) -> None:
    run = RunConfig(run_id="r", model="tiny", environment=name)
    job = TrajectoryJob(trajectory_id="g.0", group_id="g", task_id="t", index=0, task={}, seed=0)
    facts: dict[str, Any] = {"worker_id": "a"} if "worker_id" in TrajectoryClaim.__slots__ else {}
    claim = TrajectoryClaim(job=job, fence=1, attempt=0, loss=0, **facts)
    limits = Limits(agent_id="a", call_timeout_s=10.0)
    await Episode(run, claim, registry, CharTokenizer(), limits, None).run()  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["Blocking", "BlockingInline"])
async def test_an_environment_that_blocks_is_named_with_its_stack_and_the_remedy(
    caplog: pytest.LogCaptureFixture, name: str
) -> None:
    # Given an agent under watch, that has loaded its environments; when one of them blocks it
    async with Registry([f"{name}={__name__}:{name}"]) as registry:
        registry.make(name)
        with watching(BLOCKED_S), pytest.raises(Exception, match="enough"):
            await asyncio.create_task(start_episode(name, registry))
    # Then the log says once which, where, and what to do
    (told,) = [record for record in caplog.records if record.message == "environment.blocks_the_agent"]
    assert f"environment '{name}'" in told.who  # type: ignore[attr-defined]
    last = told.stack.splitlines()[-1]  # type: ignore[attr-defined]
    assert last.startswith(__file__) and "in reset: time.sleep" in last
    assert "asyncio" not in told.stack and "episode.py" not in told.stack  # type: ignore[attr-defined]
    assert 'isolation = "process"' in told.remedy  # type: ignore[attr-defined]
    assert told.levelno == logging.WARNING


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="no kernel here tells of waiting for a processor")
@pytest.mark.timeout(60)
async def test_a_loop_without_a_processor_is_not_blamed(caplog: pytest.LogCaptureFixture) -> None:
    # Given an agent whose processor others use, too: it runs a twentieth of the time at most
    cores = os.sched_getaffinity(0)
    spin = f"import os; os.sched_setaffinity(0, [{min(cores)}])\nwhile True: pass"
    others = [subprocess.Popen([sys.executable, "-c", spin]) for _ in range(20)]  # noqa: ASYNC220
    try:
        with watching(BLOCKED_S):
            os.sched_setaffinity(0, [min(cores)])  # of this thread alone: the watchdog looks on time
            # When a step of its loop works for a quarter of what may be blamed, and takes far longer
            begun_s, works_until_s = time.monotonic(), time.thread_time() + BLOCKED_S / 4
            while time.thread_time() < works_until_s:
                pass
            took_s = time.monotonic() - begun_s
            await asyncio.sleep(0)
    finally:
        os.sched_setaffinity(0, cores)
        for each in others:
            each.kill()
            each.wait()
    assert took_s > 2 * BLOCKED_S, "the others took no processor from it"
    # Then nobody is blamed
    assert caplog.messages == []


@pytest.mark.slow
async def test_that_the_agent_goes_on_is_said_too(caplog: pytest.LogCaptureFixture) -> None:
    with watching(BLOCKED_S):
        time.sleep(3 * BLOCKED_S)  # noqa: ASYNC251
        await until(lambda: "agent.turns_again" in caplog.messages)
    assert caplog.messages == ["agent.is_blocked", "agent.turns_again"]


async def test_a_loop_that_turns_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    with watching(10.0):
        for _ in range(50):
            await asyncio.sleep(0.002)
    assert caplog.messages == []
    assert not [thread for thread in threading.enumerate() if thread.name == "watchdog"]
