"""What every engine requires of a request, whoever sent it: a library that is given less fails all rows.

- Every value is looked at before anything of the request reaches an engine's thread or process.
- A request that is refused costs itself alone: what it gets is an EngineError that names it and the value.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from ...fabric.chat.vision import Vision
from ...fabric.contract.errors import EngineError, EngineUnsupported, InputError
from ...fabric.contract.limits import KEPT_ID_COUNT_MAX, TURN_SIDES_BYTES_MAX
from ...fabric.contract.records import Int32
from ...fabric.contract.sampling import FIELDS, GUIDED, given_fields, is_field, is_whole
from ...fabric.contract.text import shown
from .base import GenerationRequest
from .stops import Pieces, StopMatcher

NO_NUMBERS = "its logits are not numbers"
NOT_NUMBERS = (
    f"{NO_NUMBERS}: these weights cannot continue this prompt. Look at the published weights for NaN and"
    " infinity, or take a wider dtype"
)
KEEPS_TOO_MANY = (
    f"kept_tokens: top_p, top_k and min_p left it more than {KEPT_ID_COUNT_MAX:,} ids in all to draw from, the most"
    " that a turn may record: cut more, or let max_tokens be smaller"
)
OVER_CONTEXT = "tokens before its first new one"  # in the error of a prompt that leaves no room for an answer


def context_of(
    request: GenerationRequest,
    *,
    context_tokens_max: int,
    vocabulary_size: int,
    engine: str = "this engine",
    cannot: Mapping[str, str] = MappingProxyType({}),
) -> Int32:
    """Prompt and prior tokens, int32 (T,).

    cannot: fields of sampling that the engine has not, and "images", each with the reason.

    Raises:
        EngineUnsupported: no other attempt would do better here: its sampling asks for one of these, or is none, or its
            prompt fills the context, or has images or ids that the model has not.
        EngineError: nothing can follow them in this engine, or they are not of its vocabulary.
    """
    names = given_fields(request.sampling)
    _check_sampling(request, names, vocabulary_size)
    for name in names:
        if name in cannot and name in request.sampling.row():  # 0 for 0.0 asks for nothing
            raise EngineUnsupported(
                f"request {request.request_id!r} asks for {name}, which {engine} cannot do: {cannot[name]}",
                request_id=request.request_id,
                field=name,
            )
    if request.images and "images" in cannot:
        raise EngineUnsupported(
            f"request {request.request_id!r} has images, which {engine} cannot take: {cannot['images']}",
            request_id=request.request_id,
            field="images",
        )
    for name in ("prompt_ids", "prior_ids"):
        given: Any = getattr(request, name)
        if not isinstance(given, np.ndarray) or given.ndim != 1 or given.dtype.kind not in "iu":
            raise _refused(request, name, given, "an array of token ids")
    prior = request.prior_ids
    ids = np.concatenate([request.prompt_ids, prior]) if prior.size else request.prompt_ids
    if not 0 < ids.size < context_tokens_max:
        # tokens that a wider engine made may fill it as well: another attempt makes others
        error = EngineUnsupported if request.prompt_ids.size >= context_tokens_max else EngineError
        raise error(
            f"request {request.request_id!r} has {ids.size} {OVER_CONTEXT}, this engine takes 1 to"
            f" {context_tokens_max - 1}: let the prompt be shorter, or start workers with a larger --context, as far as"
            " the model goes",
            request_id=request.request_id,
            token_count=ids.size,
            context_tokens_max=context_tokens_max,
        )
    count = request.sampling.prompt_logprobs
    if count is not None and 4 * (1 + 2 * count) * ids.size > TURN_SIDES_BYTES_MAX:
        most = f"{TURN_SIDES_BYTES_MAX // (4 * (1 + 2 * count)):,} tokens of prompt"
        raise _refused(request, "prompt_logprobs", count, f"with it at most {most}, and this one has {ids.size:,}")
    if ids.view(f"u{ids.itemsize}").max() >= vocabulary_size:  # below 0 is far above it
        # prior tokens are an engine's, and another attempt makes others; a prompt stays what it is
        own = request.prompt_ids
        error = EngineUnsupported if own.size and (own.min() < 0 or own.max() >= vocabulary_size) else EngineError
        raise error(
            f"request {request.request_id!r} has token ids from {ids.min()} to {ids.max()}, the model knows 0 to"
            f" {vocabulary_size - 1}: use the model's own tokenizer",
            request_id=request.request_id,
        )
    return ids


def check_images(request: GenerationRequest, vision: Vision) -> None:
    """Require that the tokens of each image are those that the model makes of it. Reads the heads of files alone.

    Raises:
        EngineUnsupported: no other attempt would do better here: they are not, or a file is no image.
    """
    end = 0
    for image in request.images:
        try:
            count = vision.token_count(image.data)
        except InputError as error:
            raise EngineUnsupported(
                f"request {request.request_id!r}: {error}", request_id=request.request_id
            ) from error
        tokens = request.prompt_ids[image.start : image.end]
        if image.start < end or tokens.size != count or (tokens != vision.token_id).any():
            raise EngineUnsupported(
                f"request {request.request_id!r} has an image at tokens {image.start} to {image.end}, where this model"
                f" has {count} tokens {vision.token_id}: use the model's own chat template and image processor, of"
                " equal versions in agents and workers",
                request_id=request.request_id,
            )
        end = image.end


def _check_sampling(request: GenerationRequest, names: Sequence[str], vocabulary_size: int) -> None:
    """Require values that every engine samples at as they are written, and token ids of the model.

    names: of the fields that are not at their defaults. A `max_tokens` that leaves nothing to make ends a request at
    once, and is no fault.
    """
    sampling = request.sampling
    for name in names:
        value = getattr(sampling, name)
        if not is_field(name, value) and not (name == "max_tokens" and is_whole(value)):
            raise _refused(request, name, value, FIELDS[name].takes)
    for name in ("stop_ids", "logit_bias"):
        beyond = [token for token in getattr(sampling, name) if not _is_of(token, vocabulary_size)]
        if beyond:
            raise _refused(request, name, beyond, f"token ids from 0 to {vocabulary_size - 1}")
    guides = sorted(GUIDED.intersection(names))
    if len(guides) > 1:
        raise _refused(request, " and ".join(guides), getattr(sampling, guides[-1]), "one of them")


def _is_of(token: Any, vocabulary_size: int) -> bool:
    return is_whole(token) and token < vocabulary_size


def _refused(request: GenerationRequest, name: str, value: Any, takes: str) -> EngineUnsupported:
    request_id = request.request_id
    return EngineUnsupported(
        f"request {request_id!r} has {name} {shown(value)}, this engine takes {takes}", request_id=request_id
    )


def stops_of(request: GenerationRequest, pieces: Pieces | None) -> StopMatcher | None:
    """What looks for the request's stop texts, if it has any."""
    stops = request.sampling.stop
    return StopMatcher(pieces, stops) if stops and pieces is not None else None


def is_over(request: GenerationRequest, stop_ids: Collection[int], matcher: StopMatcher | None, room: int) -> str:
    """Why there is nothing left to make: "stop" or "length"; "" where there is. The matcher takes the prior tokens.

    stop_ids: tokens that end it. room: how many more it may make.
    """
    prior = request.prior_ids.tolist()
    if (matcher is not None and matcher.feed(prior) is not None) or (prior and prior[-1] in stop_ids):
        return "stop"
    return "length" if room <= 0 else ""
