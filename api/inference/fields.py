"""Fields of requests that several routes have: token ids, sampling as vLLM names it, version pins, paths of weights."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from starlette.requests import Request

from ...fabric.contract.errors import InputError
from ...fabric.contract.limits import PROMPT_TOKENS_MAX
from ...fabric.contract.records import Int32
from ...fabric.contract.sampling import check_sampling, is_whole, shown
from ...fabric.ports.inference import ANY, Pin
from ..gateway.body import Body, read_json, take_count, take_sampling, take_top

T = TypeVar("T")

SESSION_HEADERS = ("x-session-id", "x-smg-routing-key", "x-correlation-id")  # vLLM's routers', SGLang's, others'
SESSION_LENGTH_MAX = 256
TOKEN_ID_MAX = 2**31 - 1
VERSION = re.compile(r"(?:[\w.-]+/)?(?:weight_v)?(\d{1,15})")  # a number, or Stitch's name of one
VERSION_MAX = 2**53 - 1
NOTHING_BEHIND = "what stands behind these routes is a fleet, and no single engine has it"
# Settings of vLLM that say how text is made of tokens, or how its engine passes them on: they change no token.
WITHOUT_EFFECT = (
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "detokenize",
    "output_kind",
    "include_stop_str_in_output",
    "skip_clone",
    "skip_reading_prefix_cache",
    "routed_experts_prompt_start",
    "flat_logprobs",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """How to sample, as a request says it. top_count: likeliest tokens to tell of; None: no log-probabilities."""

    sampling: Mapping[str, Any]
    count: int
    ends_at_eos: bool
    top_count: int | None


async def read_body(request: Request, read: Callable[[Body], T]) -> T:
    """Return what `read` makes of a request's body, which must have taken all of it. Raises InputError."""
    body = Body(read_json(await request.body()))
    found = read(body)
    body.close()
    return found


def token_ids(value: Any, name: str) -> Int32:
    """Return a list of token ids as int32 (T,). Raises InputError: it is none, or empty."""
    if isinstance(value, list) and value and not isinstance(value[0], bool):
        try:
            ids = np.asarray(value)
        except (ValueError, OverflowError):
            ids = np.zeros((0, 0))
        if ids.ndim == 1 and ids.dtype.kind == "i" and ids.min() >= 0 and ids.max() <= TOKEN_ID_MAX:
            return ids.astype(np.int32)
    raise InputError(f"the request: {name} is {shown(value)}, expected a list of token ids, at least one", name=name)


def session_of(request: Request) -> str:
    """Return what names the session of a request, or an empty text. Raises InputError: it is too long."""
    for header in SESSION_HEADERS:
        if found := request.headers.get(header, ""):
            if len(found) > SESSION_LENGTH_MAX:
                raise InputError(f"{header} has {len(found):,} characters, the limit is {SESSION_LENGTH_MAX}")
            return found
    return ""


def take_pin(body: Body) -> Pin:
    """Take which policy versions are accepted: {"weight_version": {"min_version": 3, "exact_version": null}}."""
    value = body.take("weight_version")
    if value is None:
        return ANY
    fields = Body(value, "weight_version")
    pin = Pin(min_version=_version(fields, "min_version"), exact_version=_version(fields, "exact_version"))
    fields.close()
    if pin.exact_version is not None and pin.min_version is not None and pin.exact_version < pin.min_version:
        raise InputError(
            f"weight_version: exact_version {pin.exact_version} is below min_version {pin.min_version}: leave one out",
            name="weight_version",
        )
    return pin


def _version(fields: Body, name: str) -> int | None:
    value = fields.take(name)
    if value is None or (is_whole(value) and 0 <= value <= VERSION_MAX):
        return None if value is None else int(value)
    raise InputError(f"weight_version: {name} is {shown(value)}, expected a whole number of at least 0", name=name)


def version_named(value: Any) -> int | None:
    """Return the version that a client names: a number, also as text, or as weight_v000007; None: it names none.

    Raises:
        InputError: it is no number.
    """
    if value is None or value == "default":  # SGLang's word for none
        return None
    if is_whole(value) and 0 <= value <= VERSION_MAX:
        return int(value)
    found = VERSION.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        text = f"weight_version is {shown(value)}, expected a whole number, also as text: versions are numbers here"
        raise InputError(f"the request: {text}", name="weight_version")
    return int(found[1])


def take_vllm_sampling(body: Body, *, length_default: int = PROMPT_TOKENS_MAX) -> Sampled:
    """Take the fields of vLLM's SamplingParams. length_default: where it says no max_tokens; cut by the context.

    Raises:
        InputError: names what cannot be had.
    """
    sampling = take_sampling(body, length=("max_tokens",), stop="stop")
    sampling.setdefault("max_tokens", length_default)
    take_stop_ids(body, sampling)
    sampling |= _structured(body.take("structured_outputs"))
    top_count = take_top(body, "logprobs", sampling)
    ends_at_eos = not body.flag("ignore_eos")
    body.allow("min_tokens", 0, 1, advice="let the answer end where it ends")
    body.allow("bad_words", advice="give them a logit_bias")
    body.allow("allowed_token_ids", advice="use a grammar in structured_outputs")
    body.allow("truncate_prompt_tokens", advice="send the tokens that are meant")
    body.allow("prompt_logprobs", advice="let a run of the environment `score` tell how likely a text is")
    body.allow("extra_args", advice="leave it out")
    body.ignore(*WITHOUT_EFFECT)
    return Sampled(sampling=sampling, count=take_count(body), ends_at_eos=ends_at_eos, top_count=top_count)


def take_stop_ids(body: Body, sampling: dict[str, Any]) -> None:
    """Take stop_token_ids, as Sampling's stop_ids."""
    ids = body.take("stop_token_ids")
    if ids is not None:
        sampling |= check_sampling({"stop_ids": ids}, "the request")


def _structured(value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    fields = Body(value, "structured_outputs")
    names = {"json": "guided_json", "regex": "guided_regex", "structural_tag": "guided_tag"}
    found = {setting: each for name, setting in names.items() if (each := fields.take(name)) is not None}
    if fields.flag("json_object"):
        found["guided_json"] = {"type": "object"}
    for name in ("choice", "grammar"):
        fields.allow(name, advice="say it as json, regex or structural_tag")
    fields.ignore("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")
    fields.close()
    return check_sampling(found, "structured_outputs")
