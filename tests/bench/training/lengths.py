"""How long answers are when the worker that makes them is taken away all the time.

- The policy ends an answer by chance: with random weights its end token is one of some hundred about equally likely
  ones, so lengths spread widely. Long answers meet a revocation more often than short ones.
- `undisturbed`: through broker and workers, and no lease ends. `revoked`: the same while the leases of both workers end
  by turns, again and again. Turns go on elsewhere with the tokens that they have.
- `rerun`: the same engine, fed directly. At each revocation its turns are aborted, their tokens dropped, and they begin
  anew with new dice, as a queue does that knows whole turns only. Revocations come after as many engine tokens as they
  did, on average, in the other arm; so the arms are disturbed alike, however fast either is.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rollfab.fabric.contract.records import Sampling
from rollfab.fabric.model.tokenizer import CharTokenizer
from rollfab.workers.engines.base import GenerationRequest
from rollfab.workers.engines.transformers.engine import TransformersConfig, TransformersEngine
from rollfab.workers.engines.transformers.model import load_model

from ..resume.asker import Asker
from ..resume.stage import SLOT_COUNT, WORKERS, Stage

PROMPT_TOKENS = 8
TOKENS_MAX = 440
TOGETHER = SLOT_COUNT * len(WORKERS)
HELD_S = 0.12  # from a lease's begin to its end: an answer of middle length takes about as long
SAMPLING = Sampling(temperature=1.0, max_tokens=TOKENS_MAX, stop_ids=(CharTokenizer.eos_id,))


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Tokens of each answer, in no order. revoked_count: leases that ended. made_count: tokens that engines made."""

    values: list[float]
    revoked_count: int
    made_count: int


def plain_weights() -> dict[str, np.ndarray]:
    """The preset's weights as they are made: all tokens are about equally likely."""
    return {name: each.detach().numpy() for name, each in load_model("tiny", "float32", "cpu").named_parameters()}


async def through_fabric(directory: Path, count: int, seed: int) -> tuple[Lengths, Lengths]:
    """Measure `count` answers undisturbed, then as many under revocation."""
    async with Stage(directory, seed, plain_weights) as stage:
        quiet = await _ask(stage.asker, count)
        made_before = stage.token_count()
        harm = asyncio.create_task(_revoke(stage))
        try:
            values = await _ask(stage.asker, count)
        finally:
            harm.cancel()
            revoked_count = await harm
        made = stage.token_count()
    undisturbed = Lengths(values=quiet, revoked_count=0, made_count=made_before)
    return undisturbed, Lengths(values=values, revoked_count=revoked_count, made_count=made - made_before)


async def _ask(asker: Asker, count: int) -> list[float]:
    """Ask for `count` answers, TOGETHER at a time in each of several series; return their lengths."""
    found: list[float] = []
    while len(found) < count:
        turns = await asker.ask(asker.prompts(TOGETHER, PROMPT_TOKENS), SAMPLING)
        await asker.collect(turns)
        found += [float(len(each.completion_ids)) for each in turns.results.values()]
    return found


async def _revoke(stage: Stage) -> int:
    """End one worker's lease, then the other's, until cancelled; return how many ended."""
    count = 0
    try:
        for name in itertools.cycle(WORKERS):
            await asyncio.sleep(HELD_S)
            await stage.revoke(name)
            count += 1
            await stage.lend(name)
    except asyncio.CancelledError:
        return count
    raise AssertionError("cycle never ends")


async def rerun(count: int, seed: int, revoked_every: int) -> Lengths:
    """Measure `count` answers of an engine whose turns begin anew when it is taken away.

    Args:
        revoked_every: tokens between two revocations.
    """
    engine = TransformersEngine(
        TransformersConfig(model="tiny", slot_count=SLOT_COUNT, context_tokens_max=512, seed=seed)
    )
    dice = np.random.default_rng(seed)
    low = int(CharTokenizer().encode("a")[0])
    prompts = dice.integers(low, low + 26, (count, PROMPT_TOKENS)).astype(np.int32)
    attempts = [0] * count
    waiting, running = list(range(count)), dict[str, int]()
    values: list[float] = []
    revoked_count = 0

    def ask() -> None:
        while waiting and len(running) < SLOT_COUNT:
            index = waiting.pop(0)
            attempts[index] += 1
            name = f"{index}.{attempts[index]}"
            running[name] = index
            engine.generate(GenerationRequest(request_id=name, prompt_ids=prompts[index], sampling=SAMPLING))

    await engine.start()
    try:
        next_at = revoked_every
        while len(values) < count:
            ask()
            for each in await engine.finished(0.002):
                if each.request_id in running:
                    values.append(float(len(each.completion_ids)))
                    del running[each.request_id]
            if engine.stats().token_count >= next_at:
                revoked_count += 1
                for each in await engine.abort(list(running)):
                    if each.finish_reason != "abort":  # it just ended
                        values.append(float(len(each.completion_ids)))
                    else:
                        waiting.append(running[each.request_id])
                    del running[each.request_id]
                next_at = engine.stats().token_count + revoked_every
        made_count = engine.stats().token_count
    finally:
        await engine.close()
    return Lengths(values=values, revoked_count=revoked_count, made_count=made_count)


def quantiles(values: Sequence[float]) -> list[float]:
    """Return the tenths of a sample."""
    return [round(float(each), 1) for each in np.quantile(values, np.linspace(0.1, 0.9, 9))]
