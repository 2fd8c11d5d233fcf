"""A rollout worker whose engine makes a step in a fixed time, as one on a device of its own would.

It is the real engine, held back in each of its steps: so two workers on a machine with few cores take each other no
time, as long as the machine can make both's steps in theirs.
"""

from __future__ import annotations

import time
from typing import Any

from rollfab.deploy.roles.engines import EngineOptions
from rollfab.deploy.roles.options import WorkerOptions
from rollfab.deploy.roles.run import run_worker
from rollfab.workers.engines.transformers.engine import TransformersConfig, TransformersEngine
from rollfab.workers.serving.options import ServingOptions


def run_paced(
    url: str, *, model: str, slot_count: int, step_s: float, context_tokens: int, role: str, pool: str
) -> None:
    """Generate turns under a lease until told to stop, a step every `step_s` seconds at most."""
    engine = EngineOptions(model=model, slot_count=slot_count, context_tokens_max=context_tokens)
    options = WorkerOptions(url=url, role=role, engine=engine, serving=ServingOptions(pool=pool))
    run_worker(options, make_engine=lambda made, _: PacedEngine(made.for_transformers(), step_s))


class PacedEngine(TransformersEngine):
    """The engine, whose steps take step_s at least: their tokens come at their end, as a device's do."""

    def __init__(self, config: TransformersConfig, step_s: float) -> None:
        super().__init__(config)
        self._step_s = step_s

    def _build(self, deliver: Any) -> Any:
        loop = super()._build(deliver)
        step = loop._generation_step

        def paced() -> None:
            begun_s = time.monotonic()
            step()
            time.sleep(max(0.0, begun_s + self._step_s - time.monotonic()))

        loop._generation_step = paced
        return loop
