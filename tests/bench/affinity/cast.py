"""The processes of `rollfab bench affinity`: workers that count the prompts' tokens they read, and an agent that draws.

- A counting worker is the one of every day. What its engine was given to read so far, and what of that it had in its
  cache, stand in files that the bench reads between rounds.
- A drawing agent hands every turn to a worker that it draws, the first of a trajectory included, as if that were its
  home. The workers of that arm say that reading is as dear as may be, so nobody takes a turn that was handed to another
  before PATIENCE_MS_MAX; a worker's share holds as ever.
"""

from __future__ import annotations

import os
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from rollfab.deploy.roles.engines import EngineOptions
from rollfab.deploy.roles.options import WorkerOptions
from rollfab.deploy.roles.run import run_worker
from rollfab.fabric.contract.fields import WHOLE_MAX
from rollfab.fabric.rules.queue.placement import US_PER_TOKEN_MAX, Home, Homes, PrefillSpeed
from rollfab.workers.engines.transformers.engine import TransformersConfig, TransformersEngine

from ..witness import SharedCount, read_count


@dataclass(frozen=True, slots=True)
class Read:
    """Tokens of prompts that engines were given, and those of them that they had in their caches."""

    prompt_count: int
    cached_count: int

    def __sub__(self, before: Self) -> Read:
        return Read(self.prompt_count - before.prompt_count, self.cached_count - before.cached_count)

    @property
    def hit_fraction(self) -> float:
        """What was in a cache, of all."""
        return self.cached_count / max(1, self.prompt_count)


def read_so_far(directory: Path) -> Read:
    """What all workers with this directory have read."""
    prompts, cached = (sum(map(read_count, directory.glob(f"*.{kind}"))) for kind in ("prompt", "cached"))
    return Read(prompts, cached)


def run_counting(
    url: str, name: str, *, model: str, slot_count: int, context_tokens: int, directory: Path, is_patient: bool
) -> None:
    """Generate turns under a lease until told to stop. is_patient: leaves to others what was handed to them."""
    if is_patient:
        PrefillSpeed.us_per_token = US_PER_TOKEN_MAX  # type: ignore[method-assign, assignment]
    engine = EngineOptions(model=model, slot_count=slot_count, context_tokens_max=context_tokens)
    options = WorkerOptions(url=url, name=name, engine=engine)
    run_worker(options, make_engine=lambda made, _: CountingEngine(made.for_transformers(), directory))


class CountingEngine(TransformersEngine):
    """The engine, which writes down its counts before it hands in a turn."""

    def __init__(self, config: TransformersConfig, directory: Path) -> None:
        super().__init__(config)
        self._prompts, self._cached = (
            SharedCount(directory / f"{os.getpid()}.{kind}") for kind in ("prompt", "cached")
        )

    async def finished(self, timeout_s: float) -> Any:
        found = await super().finished(timeout_s)
        stats = self.stats()
        self._prompts.set(stats.prompt_token_count)
        self._cached.set(stats.cached_token_count)
        return found


def draw_homes() -> None:
    """Run `rollfab agent` with the words that follow the workers' names, which end in a `--`."""
    from rollfab.__main__ import main

    words = sys.argv[sys.argv.index("drawing") + 1 :]
    end = words.index("--")
    workers, dice = words[:end], random.Random()
    Homes.leave = lambda *_: Home(dice.choice(workers), WHOLE_MAX)  # type: ignore[method-assign]
    sys.argv = [sys.argv[0], "agent", *words[end + 1 :]]
    main()
