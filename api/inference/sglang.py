"""SGLang's /generate, with token ids as its input.

Source: sglang/srt/managers/io_struct.py (GenerateReqInput) as slime, miles and Stitch use it. Several inputs in one
request, or n above 1, are answered by a list.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...fabric.contract.errors import InputError
from ...fabric.contract.sampling import check_sampling
from ...fabric.ports.inference import ABORT, Completions, Made, Prompt
from ..gateway.body import COUNT_MAX, Body, take_count, take_sampling, take_top
from .fields import NOTHING_BEHIND, take_pin, take_stop_ids, token_ids

LENGTH_DEFAULT = 128  # of max_new_tokens, SGLang's
INPUT_COUNT_MAX = 128  # of one request


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request, understood. is_list: the answer is a list."""

    prompts: list[Prompt]
    wants_logprobs: bool
    is_list: bool


def read_generate(body: Body) -> Asked:
    """Read a request. Raises InputError."""
    sampling, count, ends_at_eos = _sampling(body.optional("sampling_params", dict) or {})
    top_count = take_top(body, "top_logprobs_num", {})
    if top_count:
        sampling["logprobs"] = top_count
    ids, rid, pin = body.take("input_ids"), body.take("rid"), take_pin(body)
    if ids is None and body.has("text"):
        raise InputError("the request: text is not taken: send its tokens as input_ids", name="text")
    is_batch = isinstance(ids, list) and bool(ids) and isinstance(ids[0], list)
    inputs = ids if is_batch else [ids]
    if len(inputs) > INPUT_COUNT_MAX or len(inputs) * count > COUNT_MAX:
        raise InputError(f"the request asks for {len(inputs)} inputs, n {count}: at most {COUNT_MAX} answers in one")
    names = _names(rid, len(inputs))
    prompts = [
        Prompt(
            token_ids=token_ids(each, "input_ids"),
            sampling=sampling,
            count=count,
            ends_at_eos=ends_at_eos,
            pin=pin,
            request_id=name,
        )
        for each, name in zip(inputs, names, strict=True)
    ]
    wants_logprobs = body.flag("return_logprob")
    _read_neutral(body)
    return Asked(prompts=prompts, wants_logprobs=wants_logprobs, is_list=is_batch or count > 1)


def _names(rid: Any, count: int) -> list[str]:
    names = rid if isinstance(rid, list) else [rid] * count
    if len(names) != count or not all(each is None or isinstance(each, str) for each in names):
        raise InputError("the request: rid is not a text for each input", name="rid")
    return [each or "" for each in names]


def _sampling(value: dict[str, Any]) -> tuple[dict[str, Any], int, bool]:
    fields = Body(value, "sampling_params")
    sampling = take_sampling(fields, length=("max_new_tokens",), stop="stop")
    sampling.setdefault("max_tokens", LENGTH_DEFAULT)
    take_stop_ids(fields, sampling)
    seed = fields.take("sampling_seed")
    settings = {"seed": seed, "guided_json": fields.take("json_schema"), "guided_regex": fields.take("regex")}
    sampling |= check_sampling({name: each for name, each in settings.items() if each is not None}, "sampling_params")
    fields.allow("min_new_tokens", 0, advice="let the answer end where it ends")
    for name in ("custom_params", "ebnf", "structural_tag", "stop_regex"):
        fields.allow(name, advice="leave it out")
    fields.ignore("skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim", "stream_interval")
    count, ends_at_eos = take_count(fields), not fields.flag("ignore_eos")
    fields.close()
    return sampling, count, ends_at_eos


def _read_neutral(body: Body) -> None:
    body.allow("stream", False, advice="the answer comes whole")
    body.allow("logprob_start_len", -1, advice="only tokens that are made have log-probabilities here")
    for name in ("image_data", "video_data", "audio_data", "input_embeds", "lora_path", "token_ids_logprob"):
        body.allow(name, advice="leave it out")
    for name in ("return_hidden_states", "return_routed_experts", "session_params", "custom_logit_processor"):
        body.allow(name, advice=NOTHING_BEHIND)
    body.ignore("return_text_in_logprobs", "extra_key", "priority", "log_metrics", "model", "routing_key")


def entries(asked: Asked, answers: list[Completions], texts: list[list[str]]) -> Any:
    """Write the answer: one object, or a list of them."""
    found = [
        _entry(asked, prompt, answer, made, text)
        for prompt, answer, said in zip(asked.prompts, answers, texts, strict=True)
        for made, text in zip(answer.made, said, strict=True)
    ]
    return found if asked.is_list else found[0]


def _entry(asked: Asked, prompt: Prompt, answer: Completions, made: Made, text: str) -> dict[str, Any]:
    own = [each.version for each in made.stretches]
    start, end = min(own, default=answer.start_version), max(own, default=answer.end_version)
    meta = {
        "id": prompt.request_id,
        "finish_reason": _finish(prompt, made),
        "prompt_tokens": len(prompt.token_ids),
        "completion_tokens": len(made.token_ids),
        "cached_tokens": 0,
        "weight_version": str(end),
        "weight_version_start": start,
        "weight_version_end": end,
    }
    if asked.wants_logprobs:
        pairs = zip(made.logprobs, made.token_ids, strict=True)
        meta |= {
            "input_token_logprobs": [],
            "output_token_logprobs": [[logprob, each, None] for logprob, each in pairs],
        }
        if made.tops:
            meta["output_top_logprobs"] = [[[logprob, each, None] for each, logprob in top] for top in made.tops]
    return {"text": text, "output_ids": made.token_ids, "meta_info": meta}


def _finish(prompt: Prompt, made: Made) -> dict[str, Any]:
    if made.finish == "length":
        return {"type": "length", "length": len(made.token_ids)}
    if made.finish == ABORT:
        return {"type": "abort", "message": "it was given up"}
    return {"type": "stop", "matched": made.token_ids[-1] if made.token_ids else None}
