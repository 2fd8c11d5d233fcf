"""A rollout worker whose engine makes a step in a fixed time, as one on a device of its own would.

It is the tiny engine, held back after each of its steps: so two workers on a machine with few cores take each other no
time, as long as the machine can make both's steps in theirs.
"""

from __future__ import annotations

import time
from typing import Any

from rollfab.deploy.roles.engines import EngineOptions
from rollfab.deploy.roles.options import WorkerOptions
from rollfab.deploy.roles.run import run_worker
from rollfab.workers.engines.transformers.engine import TransformersConfig, TransformersEngine


def run_paced(url: str, *, slot_count: int, step_s: float, context_tokens: int) -> None:
    """Generate turns under a lease until told to stop, a step every `step_s` seconds."""
    engine = EngineOptions(model="tiny", slot_count=slot_count, context_tokens_max=context_tokens)
    options = WorkerOptions(url=url, engine=engine)
    run_worker(options, make_engine=lambda made, _: PacedEngine(made.for_transformers(), step_s))


class PacedEngine(TransformersEngine):
    """The engine, whose steps begin at least step_s apart."""

    def __init__(self, config: TransformersConfig, step_s: float) -> None:
        super().__init__(config)
        self._step_s = step_s

    def _build(self, deliver: Any) -> Any:
        loop = super()._build(deliver)
        step = loop._generation_loop_body

        def paced(*given: Any, **named: Any) -> bool:
            begun_s, count = time.monotonic(), loop.current_batch
            goes_on: bool = step(*given, **named)
            if loop.current_batch > count:
                time.sleep(max(0.0, begun_s + self._step_s - time.monotonic()))
            return goes_on

        loop._generation_loop_body = paced  # type: ignore[method-assign]
        return loop
