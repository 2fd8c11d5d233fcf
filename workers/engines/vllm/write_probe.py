"""Seeing that written weights change an answer, before the first turn relies on it.

- Some backends compute with packed copies of their weights: writing the parameter then does nothing, and nobody is
  told. Here one tensor of every kind is changed, and an answer must change with it; afterwards all is as it was.
- Only a part of a tensor is written, as a delta would: the rows of the prompt's own tokens among them.
- Weights made up by vLLM ("dummy") are so small that most of them change nothing that a float32 can show; others are
  written for the time of the probe.
- The answer is to an image, where the model sees and images are taken; else its eyes are left out.
- Where whole checkpoints are loaded, only the embedding is tried: an output layer tied to it may be forgotten.
- Experts are left out: a short prompt need not reach one.
"""

from __future__ import annotations

import asyncio
import io
import logging
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ....fabric.contract.errors import EngineError
from ....fabric.contract.images import Image, digest_of
from ....fabric.contract.records import Sampling
from ....fabric.format.layout import Layout, TensorSpec
from ....fabric.versions.commit import Staged
from ..base import Bits, Engine, GenerationRequest, Writes

if TYPE_CHECKING:
    from .common.backend import ModelFacts
    from .images import Eyes

log = logging.getLogger(__name__)

PROMPT_TOKENS = 16
IMAGE_PIXELS = 56  # wide and high: four pieces of Qwen2-VL, in which no place is like another
OF_EYES = ".visual."  # in the names of a model's tensors
ROWS = 48  # of a matrix that are written: those of the prompt's tokens, and as many that it does not have
DRAWN_COUNT = 1_000_003  # a prime: the rows of a matrix differ, however long they are
TIMEOUT_S = 120.0
FLOATS = ("float32", "bfloat16", "float16")


async def probe_writes(
    engine: Engine, facts: ModelFacts, *, is_dummy: bool, is_whole: bool = False, eyes: Eyes | None = None
) -> None:
    """Require that the engine computes with the weights that are written.

    Args:
        is_dummy: its weights are made up.
        is_whole: a commit is a checkpoint, loaded by vLLM itself.
        eyes: those of its model, if it takes images.

    Raises:
        EngineError: it does not; names the parameters.
    """
    probe = await asyncio.to_thread(_probe, facts, eyes)
    before = await _answer(engine, probe)
    if is_dummy:
        found = {name: bits.copy() for name, bits in engine.weight_bits().items()}
        await _write(engine, {name: (None, bits) for name, bits in lively(facts.layout).items()})
    kinds = [spec for spec in one_of_each_kind(facts.layout) if eyes is not None or OF_EYES not in spec.name]
    if is_whole:
        kinds = [spec for spec in kinds if _is_vocabulary(spec, facts)]
    dead = await _dead_tensors(engine, facts, probe, kinds)
    if is_dummy:
        await _write(engine, {name: (None, bits) for name, bits in found.items()})
    if dead:
        raise EngineError(
            f"written weights change nothing: this vLLM computes with copies of {', '.join(dead)}, and would serve old"
            " weights for ever. Start it with rollfab in its environment and --weight-transfer-config"
            """ '{"backend": "rollfab"}', or report the model and device"""
        )
    if await _answer(engine, probe) != before:
        raise EngineError("weights that were changed and changed back give another answer: do not use this engine")
    log.info("engine.writes_are_live", extra={"kind_count": len(kinds)})


async def _dead_tensors(
    engine: Engine, facts: ModelFacts, probe: GenerationRequest, kinds: Sequence[TensorSpec]
) -> list[str]:
    """Names of tensors that were written without changing the answer."""
    dead = []
    usual = await _answer(engine, probe)
    for spec in kinds:
        for indices in _places(spec, facts):
            old = engine.weight_bits()[spec.name][indices].copy()
            await _write(engine, {spec.name: (indices, shifted(old, spec.dtype))})
            if await _answer(engine, probe) == usual:
                dead.append(spec.name)
            await _write(engine, {spec.name: (indices, old)})
    return dead


def lively(layout: Layout) -> dict[str, Bits]:
    """Stored bits of a model whose every weight matters. Drawn once, and repeated: a large model would take minutes."""
    drawn = np.random.default_rng(0).normal(0.0, 0.25, DRAWN_COUNT).astype(np.float32)
    kinds = {(dtype, base): _stored(drawn + np.float32(base), dtype) for dtype in FLOATS for base in (0, 1)}
    made = {}
    for number, spec in enumerate(layout.tensors):
        if spec.dtype in FLOATS:
            drawn_bits = kinds[spec.dtype, int("norm" in spec.name)]
            made[spec.name] = np.resize(drawn_bits[number % (DRAWN_COUNT // 2) :], spec.element_count)
    return made


def one_of_each_kind(layout: Layout) -> list[TensorSpec]:
    """The first tensor of every name that differs by more than numbers; no experts, no integers."""
    kinds: dict[str, TensorSpec] = {}
    for spec in layout.tensors:
        if "expert" not in spec.name and spec.dtype in FLOATS:
            kinds.setdefault(re.sub(r"\d+", "0", spec.name), spec)
    return list(kinds.values())


def _places(spec: TensorSpec, facts: ModelFacts) -> list[NDArray[np.int64]]:
    """Flat positions to write, one set a probe.

    A tied embedding has two: rows of the prompt, seen at the input, and others, seen only at the output.
    """
    row_tokens = max(1, spec.element_count // max(1, spec.shape[0])) if spec.shape else 1
    rows = min(ROWS, spec.shape[0] if spec.shape else 1)
    is_tied = _is_vocabulary(spec, facts) and not any("lm_head" in other.name for other in facts.layout.tensors)
    if not is_tied:
        return [np.arange(rows * row_tokens, dtype=np.int64)]
    split = PROMPT_TOKENS * row_tokens
    return [np.arange(split, dtype=np.int64), np.arange(split, rows * row_tokens, dtype=np.int64)]


def _is_vocabulary(spec: TensorSpec, facts: ModelFacts) -> bool:
    return len(spec.shape) == 2 and spec.shape[0] == facts.vocabulary_size >= ROWS


def shifted(bits: Bits, dtype: str) -> Bits:
    """Other values of about the size that these have, as stored bits; never all moved alike."""
    if dtype == "bfloat16":
        values = (bits.astype(np.uint32) << 16).view(np.float32)
    else:
        values = bits.view(np.float16 if dtype == "float16" else np.float32).astype(np.float32)
    size = max(0.1, float(np.abs(values).max(initial=0.0)))
    other = (values + size * np.cos(np.arange(values.size) * 0.7)).astype(np.float32)
    return _stored(other, dtype)


def _stored(values: NDArray[np.float32], dtype: str) -> Bits:
    """float32 values as bits of `dtype`; a bfloat16 is the upper half of a float32."""
    if dtype == "float16":
        return values.astype(np.float16).view(np.dtype("<u2"))
    bits: Bits = values.view(np.dtype("<u4"))
    if dtype == "bfloat16":
        bits = (bits >> 16).astype(np.dtype("<u2"))
    return bits


async def _write(engine: Engine, writes: Writes) -> None:
    await engine.apply(Staged(-1, writes), turns="recompute")  # what every door can


def _probe(facts: ModelFacts, eyes: Eyes | None) -> GenerationRequest:
    """A request to which every tensor matters: a few tokens, after an image where it sees."""
    ids = np.arange(min(PROMPT_TOKENS, facts.vocabulary_size, facts.context_tokens_max - 4), dtype=np.int32)
    images: tuple[Image, ...] = ()
    if eyes is not None:
        data = noise()
        count = eyes.vision.token_count(data)
        ids = np.concatenate([np.full(count, eyes.vision.token_id, np.int32), ids])
        images = (Image(start=0, end=count, digest=digest_of(data), data=data),)
    sampling = Sampling(temperature=0.0, max_tokens=2)
    return GenerationRequest(request_id="probe", prompt_ids=ids, sampling=sampling, images=images)


def noise() -> bytes:
    """A small PNG in which no two pieces are alike."""
    from PIL import Image as Pillow

    pixels = np.random.default_rng(0).integers(0, 256, (IMAGE_PIXELS, IMAGE_PIXELS, 3), dtype=np.uint8)
    file = io.BytesIO()
    Pillow.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


async def _answer(engine: Engine, probe: GenerationRequest) -> tuple[Any, ...]:
    """Tokens and log-probabilities of a greedy answer, as bits."""
    engine.generate(probe)
    for generation in await engine.finished(TIMEOUT_S):
        if generation.error is None:
            return generation.completion_ids.tobytes(), generation.logprobs.tobytes()
        raise EngineError(f"vLLM cannot answer: {generation.error}")
    raise EngineError(f"vLLM did not answer within {TIMEOUT_S:.0f} s")
