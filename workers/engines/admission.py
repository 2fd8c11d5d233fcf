"""What every engine requires of a request."""

from __future__ import annotations

import numpy as np

from ...fabric.errors import EngineError
from ...fabric.limits import TEMPERATURE_MAX, TEMPERATURE_MIN
from ...fabric.records import Int32
from .base import GenerationRequest
from .seeds import check_seed


def context_of(request: GenerationRequest, *, context_tokens_max: int, vocabulary_size: int) -> Int32:
    """Prompt and prior tokens, int32 (T,).

    Raises:
        EngineError: nothing can follow them in this engine, they are not of its vocabulary, or its seed or temperature
            is none.
    """
    check_seed(request)
    check_temperature(request)
    prior = request.prior_ids
    ids = np.concatenate([request.prompt_ids, prior]) if prior.size else request.prompt_ids
    if not 0 < ids.size < context_tokens_max:
        raise EngineError(
            f"request {request.request_id!r} has {ids.size} tokens before its first new one, this engine takes 1 to"
            f" {context_tokens_max - 1}: shorten the prompt or raise context_tokens_max",
            request_id=request.request_id,
            token_count=ids.size,
            context_tokens_max=context_tokens_max,
        )
    if ids.min() < 0 or ids.max() >= vocabulary_size:
        raise EngineError(
            f"request {request.request_id!r} has token ids from {ids.min()} to {ids.max()}, the model knows 0 to"
            f" {vocabulary_size - 1}: use the model's own tokenizer",
            request_id=request.request_id,
        )
    return ids


def check_temperature(request: GenerationRequest) -> None:
    """Require a temperature that every engine samples at as it is written.

    Raises:
        EngineError: names the request and its temperature.
    """
    temperature = request.sampling.temperature
    if temperature != 0 and not TEMPERATURE_MIN <= temperature <= TEMPERATURE_MAX:  # NaN is in no interval
        raise EngineError(
            f"request {request.request_id!r} has temperature {temperature!r}, this engine takes 0 (greedy) or"
            f" {TEMPERATURE_MIN} to {TEMPERATURE_MAX:g}",
            request_id=request.request_id,
        )
