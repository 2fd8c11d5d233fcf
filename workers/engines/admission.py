"""What every engine requires of a request, whoever sent it: a library that is given less fails all rows.

- Every value is looked at before anything of the request reaches an engine's thread or process.
- A request that is refused costs itself alone: what it gets is an EngineError that names it and the value.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...fabric.contract.errors import EngineError
from ...fabric.contract.limits import TEMPERATURE_MAX, TEMPERATURE_MIN
from ...fabric.contract.records import Int32
from .base import GenerationRequest
from .seeds import check_seed

STOP_COUNT_MAX = 1024  # looked through for every token
SHOWN_MAX = 80  # characters of a value that is refused
NOT_NUMBERS = (
    "its logits are not numbers: these weights cannot continue this prompt. Look at the published weights for NaN and"
    " infinity, or take a wider dtype"
)


def context_of(request: GenerationRequest, *, context_tokens_max: int, vocabulary_size: int) -> Int32:
    """Prompt and prior tokens, int32 (T,).

    Raises:
        EngineError: nothing can follow them in this engine, they are not of its vocabulary, or its sampling is none.
    """
    check_seed(request)
    check_temperature(request)
    _check_rest(request, vocabulary_size)
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
    is_number = isinstance(temperature, (int, float)) and not isinstance(temperature, bool)
    # NaN is in no interval
    if not is_number or (temperature != 0 and not TEMPERATURE_MIN <= temperature <= TEMPERATURE_MAX):
        takes = f"0 (greedy) or {TEMPERATURE_MIN} to {TEMPERATURE_MAX:g}"
        raise _refused(request, "temperature", temperature, takes)


def _check_rest(request: GenerationRequest, vocabulary_size: int) -> None:
    """Require counts and token ids that are whole numbers, and arrays of them."""
    sampling = request.sampling
    if not _is_whole(sampling.max_tokens):
        raise _refused(request, "max_tokens", sampling.max_tokens, "a whole number")
    stop_ids: Any = sampling.stop_ids
    is_list = isinstance(stop_ids, (tuple, list)) and len(stop_ids) <= STOP_COUNT_MAX
    if not is_list or not all(_is_whole(each) and 0 <= each < vocabulary_size for each in stop_ids):
        raise _refused(
            request, "stop_ids", stop_ids, f"at most {STOP_COUNT_MAX} token ids from 0 to {vocabulary_size - 1}"
        )
    for name in ("prompt_ids", "prior_ids"):
        ids: Any = getattr(request, name)
        if not isinstance(ids, np.ndarray) or ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise _refused(request, name, ids, "an array of token ids")


def _is_whole(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _refused(request: GenerationRequest, name: str, value: Any, takes: str) -> EngineError:
    text = repr(value)
    shown = text if len(text) <= SHOWN_MAX else f"{text[:SHOWN_MAX]}…"
    request_id = request.request_id
    return EngineError(f"request {request_id!r} has {name} {shown}, this engine takes {takes}", request_id=request_id)
