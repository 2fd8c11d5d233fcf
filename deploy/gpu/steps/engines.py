"""Runs real vLLM engines for the steps: on a model of models.py, asked, written and read through our engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....fabric.contract.records import Sampling
from ....fabric.versions.commit import Staged
from ....workers.engines.base import Generation, GenerationRequest
from ....workers.engines.vllm.common.config import VllmConfig
from ....workers.engines.vllm.engine import VllmEngine
from .models import SHAPES

FINISH_S = 120.0
Bits = Mapping[str, NDArray[Any]]


@asynccontextmanager
async def engine(
    directory: Path, name: str, *, slot_count: int = 4, context_tokens: int = 256, **arguments: Any
) -> AsyncIterator[VllmEngine]:
    """Yield an engine that has started. name: of the model there. arguments: vLLM's own."""
    given = {"skip_tokenizer_init": True, "dtype": SHAPES[name]["dtype"], **arguments}
    config = VllmConfig(
        model=str(directory), slot_count=slot_count, context_tokens_max=context_tokens, seed=0, arguments=given
    )
    made = VllmEngine(config)
    try:
        await made.start()
        yield made
    finally:
        await made.close()


def whole(version: int, bits: Bits) -> Staged:
    """Stage every element of every tensor."""
    return Staged(version, {name: (None, values) for name, values in bits.items()})


def some(version: int, old: Bits, new: Bits) -> Staged:
    """Stage what differs."""
    writes = {}
    for name, values in new.items():
        places = np.flatnonzero(values != old[name])
        if len(places):
            writes[name] = (places, values[places])
    return Staged(version, writes)


def request(request_id: str, max_tokens: int, temperature: float = 0.0) -> GenerationRequest:
    prompt = np.arange(5, 45, dtype=np.int32)
    return GenerationRequest(
        request_id=request_id, prompt_ids=prompt, sampling=Sampling(temperature=temperature, max_tokens=max_tokens)
    )


async def answer(made: VllmEngine, request_id: str) -> Generation:
    """Return the greedy tokens of one request, alone. Ends the process if there are none."""
    made.generate(request(request_id, 24))
    ended = await made.finished(FINISH_S)
    assert [each.request_id for each in ended] == [request_id] and ended[0].error is None, ended
    return ended[0]


async def check(made: VllmEngine, bits: Bits) -> None:
    """Require that these are the live weights; ends the process if not."""
    live = await made.read_weights()
    wrong = [name for name, values in bits.items() if not np.array_equal(live[name], values)]
    assert not wrong, f"live weights are not what was written: {', '.join(wrong)}"
