"""What a new version costs a vLLM that generates: the longest time between two of its steps, staging included.

- The engine has a full batch all the time. A version is published beforehand; from when the receiver begins until two
  steps after the commit, a thread looks at the page for every step's end (see control.py).
- A look that comes late sees several steps: the longest gap among them is at most what an ordinary step each leaves.
- Sums of the first version are made anew; audits are left to the receiver's usual count.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from rollfab.deploy.replay.figures import percentile
from rollfab.fabric.broker.embedded import EmbeddedBroker
from rollfab.fabric.contract.records import Sampling
from rollfab.fabric.format.codec import Bits
from rollfab.fabric.opened import RedisFabric
from rollfab.fabric.ports.weights import WeightStore
from rollfab.workers.engines.base import GenerationRequest
from rollfab.workers.engines.vllm.common.config import VllmConfig
from rollfab.workers.engines.vllm.engine import VllmEngine
from rollfab.workers.engines.vllm.local import LocalDoor
from rollfab.workers.engines.vllm.step.scheduler_page import STEP_AT_NS, STEPS
from rollfab.workers.engines.vllm.write_probe import lively
from rollfab.workers.rollout.weights import WeightReceiver
from tests.support.weights.random_trainer import RUN, RandomTrainer

BATCH = 8
CONTEXT_TOKENS = 512
DENSITY = 0.01
LOOK_S = 0.0005
QUIET_S = 1.0  # without a version, to know what an ordinary step is

Steps = list[tuple[int, int]]  # count and time of the last one, in ns, at every look that saw another


class Stalls:
    """An engine of a preset with so many ranks, brought from version to version."""

    def __init__(self, model: str, rank_count: int, seed: int) -> None:
        several = {"tensor_parallel_size": rank_count} if rank_count > 1 else {}
        config = VllmConfig(
            model=model,
            slot_count=BATCH,
            context_tokens_max=CONTEXT_TOKENS,
            seed=seed,
            probes_writes=False,
            arguments=several,
        )
        self._rank_count = rank_count
        self._door = LocalDoor(config)
        self._engine = VllmEngine(config, door=self._door)
        self._runner = asyncio.Runner()
        self._begun_count = 0

    def __enter__(self) -> Stalls:
        self._runner.run(self._engine.start())
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.run(self._engine.close())
        self._runner.close()

    def measure(self, version_count: int) -> dict[str, Any]:
        """A row of figures."""
        return self._runner.run(self._measured(version_count))

    async def _measured(self, version_count: int) -> dict[str, Any]:
        with EmbeddedBroker.start() as broker:
            async with await RedisFabric.open(broker.url, client_name="bench") as fabric:
                return await self._measure(fabric.weights, version_count)

    async def _measure(self, store: WeightStore, version_count: int) -> dict[str, Any]:
        layout = self._engine.layout
        first = lively(layout)

        def draw(version: int) -> dict[str, Bits]:
            return {name: np.roll(bits, version) for name, bits in first.items()}

        trainer = RandomTrainer(layout, draw=draw)
        receiver = WeightReceiver(store, RUN, self._engine)
        await trainer.publish(store)
        await receiver.update()
        batch = asyncio.create_task(self._keep_batch())
        ordinary: list[float] = []
        longest, pauses = [], []
        try:
            for _ in range(1 + version_count):
                await asyncio.to_thread(trainer.train, DENSITY)
                await trainer.publish(store)
                with Looking(self._door.page.words) as quiet:
                    await asyncio.sleep(QUIET_S)
                with Looking(self._door.page.words) as looking:
                    await receiver.update()
                    await asyncio.sleep(3 * QUIET_S / 10)
                ordinary += [gap / count for gap, count in gaps(quiet.steps) for _ in range(count)]
                step_ms = percentile(ordinary, 0.5)
                longest.append(max(gap - (count - 1) * step_ms for gap, count in gaps(looking.steps)))
                assert receiver.last is not None
                pauses.append(1000 * receiver.last.pause_s)
        finally:
            batch.cancel()
        del longest[0], pauses[0]  # compiled code is loaded, and fresh memory touched
        return {
            "rank_count": self._rank_count,
            "version_count": version_count,
            "changed_count": round(DENSITY * layout.element_count),
            "step_ms_p50": step_ms,
            "step_ms_p99": percentile(ordinary, 0.99),
            "stalled_ms_p50": percentile(longest, 0.5),
            "stalled_ms_p99": percentile(longest, 0.99),
            "stalled_of_step": percentile(longest, 0.5) / step_ms,
            "pause_ms_p50": percentile(pauses, 0.5),
        }

    async def _keep_batch(self) -> None:
        """Full."""
        sampling = Sampling(temperature=1.0, max_tokens=CONTEXT_TOKENS)
        while True:
            stats = self._engine.stats()
            for _ in range(BATCH - stats.running_count - stats.waiting_count):
                self._begun_count += 1
                prompt = np.arange(5, 37, dtype=np.int32)
                name = f"request-{self._begun_count}"
                self._engine.generate(GenerationRequest(request_id=name, prompt_ids=prompt, sampling=sampling))
            await self._engine.finished(0.05)


class Looking:
    """Notes every step's end while it is entered. words: of the page."""

    def __init__(self, words: Any) -> None:
        self._words = words
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self.steps: Steps = []

    def __enter__(self) -> Looking:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _look(self) -> None:
        seen = -1
        while not self._is_over.is_set():
            steps, at_ns = int(self._words[STEPS]), int(self._words[STEP_AT_NS])
            if steps != seen:
                self.steps.append((steps, at_ns))
                seen = steps
            time.sleep(LOOK_S)


def gaps(steps: Sequence[tuple[int, int]]) -> list[tuple[float, int]]:
    """Milliseconds from one look that saw a new step to the next, and how many steps that were."""
    return [((last[1] - first[1]) / 1e6, last[0] - first[0]) for first, last in pairwise(steps)]
