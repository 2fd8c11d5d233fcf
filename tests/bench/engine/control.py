"""How soon a vLLM stands still: aborted, paused, or with a limit of 0 written for it.

- A step is one that ran tokens, as the scheduler counts them on the page (page.py), with the time of its end: the
  machine's monotonic clock, which every process of it reads alike. The step that is under way counts as the first.
- A sample begins at some moment within a step, with a full batch that has made steps, and is over once no step has
  ended for many steps' time. Its latency runs from just before the call to the end of the last step.
- Nothing of the fabric runs beside it: this is the engine, with its door and its processes.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from rollfab.deploy.replay.figures import percentile
from rollfab.fabric.contract.errors import FabricError
from rollfab.fabric.contract.records import Sampling
from rollfab.workers.engines.base import EngineLimits, GenerationRequest
from rollfab.workers.engines.vllm.common.config import VllmConfig
from rollfab.workers.engines.vllm.engine import VllmEngine
from rollfab.workers.engines.vllm.local import LocalDoor
from rollfab.workers.engines.vllm.step.scheduler_page import STEP_AT_NS, STEPS

BATCHES = (1, 32)
CONTEXT_TOKENS = 512
PROMPT_TOKENS = 32
SAMPLES_PER_FILL = 20  # of a few steps each, so that no request ends by itself
STEPS_BEFORE = 3
QUIET_STEPS = 8  # without one for as long as these take (and at least QUIET_S): it stands
QUIET_S = 0.05
STILL_TIMEOUT_S = 5.0
LOOK_S = 0.0005
REASON = "bench"

ACTIONS: Mapping[str, str] = MappingProxyType(
    {
        "abort": "abort of all requests",
        "pause": "pause",
        "running": "running_count = 0 written",
        "step_tokens": "step_tokens = 0 written",
    }
)


@dataclass(frozen=True, kw_only=True)
class Stop:
    """One sample. steps: ended after the call; ms: to the end of the last of them, 0 if there was none."""

    steps: int
    ms: float
    answer_ms: float


class Control:
    """An engine of a preset, driven to standstill again and again. Enter it in a process that has computed nothing."""

    def __init__(self, model: str, seed: int) -> None:
        config = VllmConfig(
            model=model,
            slot_count=max(BATCHES),
            context_tokens_max=CONTEXT_TOKENS,
            seed=seed,
            probes_writes=False,  # seen at every start of a worker; here no weights are written
        )
        self._door = LocalDoor(config)
        self._engine = VllmEngine(config, door=self._door)
        self._runner = asyncio.Runner()
        self._random = random.Random(seed)
        self._request_count = 0
        self._names: list[str] = []

    def __enter__(self) -> Control:
        self._runner.run(self._engine.start())
        self._words = self._door.page.words
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.run(self._engine.close())
        self._runner.close()

    def measure(self, sample_count: int) -> list[dict[str, Any]]:
        """A row for every batch and action, of as many samples each.

        Raises:
            FabricError: the engine did not stop, or did not start again.
        """
        return self._runner.run(self._measure(sample_count))

    async def _measure(self, sample_count: int) -> list[dict[str, Any]]:
        found = []
        for batch in BATCHES:
            await self._refill(batch)
            step_ms = await self._step_times(max(60, sample_count))
            for action in ACTIONS:
                stops = [await self._sample(action, batch, index, step_ms) for index in range(sample_count)]
                found.append(row(action, batch, stops, step_ms))
        return found

    async def _sample(self, action: str, batch: int, index: int, step_ms: Sequence[float]) -> Stop:
        step_s = percentile(step_ms, 0.5) / 1000
        if index % SAMPLES_PER_FILL == 0 or not self._names:
            await self._refill(batch)
        await self._steps(STEPS_BEFORE)
        await asyncio.sleep(self._random.uniform(0, 2 * step_s))
        do, undo = self._actions()[action]
        steps, begin_ns = int(self._words[STEPS]), time.monotonic_ns()
        await do()
        answer_ms = (time.monotonic_ns() - begin_ns) / 1e6
        await self._standstill(max(QUIET_S, QUIET_STEPS * step_s))
        ms = (int(self._words[STEP_AT_NS]) - begin_ns) / 1e6
        stop = Stop(steps=int(self._words[STEPS]) - steps, ms=max(0.0, ms), answer_ms=answer_ms)
        await undo()
        return stop

    def _actions(self) -> dict[str, tuple[Callable[[], Awaitable[Any]], Callable[[], Awaitable[Any]]]]:
        """What stops it, and what lets it go on."""
        engine = self._engine

        async def limit(limits: EngineLimits) -> None:
            engine.set_limits(limits)

        async def nothing() -> None: ...

        return {
            "abort": (self._abort, nothing),
            "pause": (lambda: engine.pause(REASON), lambda: engine.resume(REASON)),
            "running": (lambda: limit(EngineLimits(running_count=0)), lambda: limit(EngineLimits())),
            "step_tokens": (lambda: limit(EngineLimits(step_tokens=0)), lambda: limit(EngineLimits())),
        }

    # ---- the batch

    async def _abort(self) -> None:
        names, self._names = self._names, []
        await self._engine.abort(names)

    async def _refill(self, batch: int) -> None:
        """A new batch, all of it running."""
        await self._abort()
        sampling = Sampling(temperature=1.0, max_tokens=CONTEXT_TOKENS)
        for _ in range(batch):
            self._request_count += 1
            name = f"request-{self._request_count}"
            prompt = np.array([self._random.randrange(5, 100) for _ in range(PROMPT_TOKENS)], dtype=np.int32)
            self._engine.generate(GenerationRequest(request_id=name, prompt_ids=prompt, sampling=sampling))
            self._names.append(name)
        await self._until(lambda: self._engine.stats().running_count == batch, "fill its batch")

    async def _steps(self, count: int) -> None:
        start = int(self._words[STEPS])
        await self._until(lambda: int(self._words[STEPS]) >= start + count, "go on")
        if await self._engine.finished(0):
            raise FabricError("a request ended by itself while stops were measured")

    async def _step_times(self, count: int) -> list[float]:
        """Milliseconds from one step's end to the next one's."""
        found: list[float] = []
        seen, seen_ns = int(self._words[STEPS]), int(self._words[STEP_AT_NS])
        while len(found) < count:
            await asyncio.sleep(LOOK_S)
            steps, at_ns = int(self._words[STEPS]), int(self._words[STEP_AT_NS])
            if steps > seen:
                found += [(at_ns - seen_ns) / 1e6 / (steps - seen)] * (steps - seen)
                seen, seen_ns = steps, at_ns
        return found[1:]

    async def _standstill(self, quiet_s: float) -> None:
        deadline_s = time.monotonic() + STILL_TIMEOUT_S
        seen, seen_s = int(self._words[STEPS]), time.monotonic()
        while time.monotonic() - seen_s < quiet_s:
            await asyncio.sleep(LOOK_S)
            if int(self._words[STEPS]) != seen:
                seen, seen_s = int(self._words[STEPS]), time.monotonic()
            if time.monotonic() > deadline_s:
                raise FabricError(f"the engine did not stand still within {STILL_TIMEOUT_S:g} s")

    async def _until(self, is_so: Callable[[], bool], what: str) -> None:
        deadline_s = time.monotonic() + STILL_TIMEOUT_S
        while not is_so():
            await asyncio.sleep(LOOK_S)
            if time.monotonic() > deadline_s:
                raise FabricError(f"the engine did not {what} within {STILL_TIMEOUT_S:g} s")


def row(action: str, batch: int, stops: Sequence[Stop], step_ms: Sequence[float]) -> dict[str, Any]:
    """The figures of one action. over_step: what a latency has above the median step."""
    step_ms_p50 = percentile(step_ms, 0.5)
    figures = {
        "steps": [float(stop.steps) for stop in stops],
        "ms": [stop.ms for stop in stops],
        "answer_ms": [stop.answer_ms for stop in stops],
        "over_step_ms": [stop.ms - step_ms_p50 for stop in stops],
        "step_ms": step_ms,
    }
    found: dict[str, Any] = {"action": action, "batch": batch, "sample_count": len(stops)}
    for name, values in figures.items():
        found[f"{name}_p50"], found[f"{name}_p99"] = percentile(values, 0.5), percentile(values, 0.99)
    return found


def worst(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The headline figures: of each the worst of all batches; a budget is either limit."""
    actions = {"abort": ("abort",), "pause": ("pause",), "budget": ("running", "step_tokens")}
    found: dict[str, Any] = {}
    for name, members in actions.items():
        mine = [each for each in rows if each["action"] in members]
        for figure in ("steps_p50", "steps_p99", "ms_p50", "ms_p99", "over_step_ms_p99"):
            found[f"{name}_{figure}"] = max(each[figure] for each in mine)
    found |= {name: max(each[name] for each in rows) for name in ("step_ms_p50", "step_ms_p99")}
    return found
