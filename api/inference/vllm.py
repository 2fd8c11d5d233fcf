"""vLLM's token routes: /inference/v1/generate, and /v1/completions with token ids as its prompt.

Source: vllm/entrypoints/scale_out/token_in_token_out/protocol.py and vllm/entrypoints/openai/completion/protocol.py of
vLLM 0.32. A token's log-probability has the integer `token_id` of that version, and `token` as versions before it wrote
it ("token_id:5"), which clients still look for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...fabric.contract.errors import InputError
from ...fabric.ports.inference import Completions, Made, Prompt
from ..gateway.body import Body, guided
from .fields import NOTHING_BEHIND, Sampled, take_pin, take_vllm_sampling, token_ids

LOGPROB_MIN = -9999.0  # vLLM's, for what is impossible: JSON has no infinity
SHORT = 16  # max_tokens of /v1/completions where it says none, as everywhere


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request, understood. wants_prompt: the prompt's tokens come back, too."""

    prompt: Prompt
    top_count: int | None
    wants_prompt: bool = False


def _prompt(body: Body, ids: Any, name: str, sampled: Sampled) -> Prompt:
    return Prompt(
        token_ids=token_ids(ids, name),
        sampling=sampled.sampling,
        count=sampled.count,
        ends_at_eos=sampled.ends_at_eos,
        pin=take_pin(body),
        request_id=body.optional("request_id", str) or "",
    )


def _read_common(body: Body) -> None:
    """Take what both routes have, and is of no use here, or cannot be had."""
    body.ignore("model", "priority", "cache_salt", "user", "stream_options")
    body.allow("stream", False, advice="the answer comes whole")
    for name in ("kv_transfer_params", "ec_transfer_params", "vllm_xargs"):
        body.allow(name, advice=NOTHING_BEHIND)


def read_generate(body: Body) -> Asked:
    """Read a request to /inference/v1/generate. Raises InputError."""
    fields = Body(body.required("sampling_params", dict), "sampling_params")
    sampled = take_vllm_sampling(fields)
    fields.close()
    prompt = _prompt(body, body.take("token_ids"), "token_ids", sampled)
    _read_common(body)
    for name in ("features", "content_parts"):
        body.allow(name, advice="only tokens are taken here, no images: play such tasks by a session of the gateway")
    body.allow("output_mode", "tokens", advice="make text of the tokens")
    body.allow("reasoning_parser_kwargs", advice="say what is to hold from the first token on in structured_outputs")
    body.ignore("token_offsets", "reasoning_ended")
    return Asked(prompt=prompt, top_count=sampled.top_count, wants_prompt=body.flag("return_token_ids"))


def read_detokenize(vocabulary_size: int, body: Body) -> list[int]:
    """Read a request to /detokenize; an answer that was given up has no tokens. Raises InputError."""
    body.ignore("model")
    given = body.take("tokens")
    ids: list[int] = [] if given == [] else token_ids(given, "tokens").tolist()
    for index, each in enumerate(ids):
        if each >= vocabulary_size:
            raise InputError(
                f"the request: tokens[{index}] is {each}, expected an id below {vocabulary_size}, the size of the "
                "vocabulary",
                name="tokens",
            )
    return ids


def generated(asked: Asked, answer: Completions, head: Mapping[str, Any], request_id: str) -> dict[str, Any]:
    """Write the answer of /inference/v1/generate. head: model and the like."""
    choices = [_generate_choice(asked, index, made) for index, made in enumerate(answer.made)]
    return {
        "request_id": request_id,
        **head,
        "output_mode": "tokens",
        "choices": choices,
        "usage": _usage(asked, answer),
        "prompt_logprobs": None,
        "prompt_token_ids": asked.prompt.token_ids.tolist() if asked.wants_prompt else None,
        "kv_transfer_params": None,
        **versions(answer),
    }


def _generate_choice(asked: Asked, index: int, made: Made) -> dict[str, Any]:
    logprobs = (
        None if asked.top_count is None else {"content": [_content(made, at) for at in range(len(made.logprobs))]}
    )
    return {
        "index": index,
        "finish_reason": made.finish,
        "stop_reason": stop_reason(asked.prompt, made),
        "token_ids": made.token_ids,
        "logprobs": logprobs,
        "routed_experts": None,
        "weight_versions": _stretches(made),
    }


def _content(made: Made, at: int) -> dict[str, Any]:
    own = _entry(made.token_ids[at], made.logprobs[at])
    others = made.tops[at] if made.tops else ()
    tops = [own, *(_entry(*each) for each in others if each[0] != made.token_ids[at])] if others else []
    return {**own, "top_logprobs": tops}


def _entry(token_id: int, logprob: float) -> dict[str, Any]:
    return {
        "token": token_name(token_id),
        "token_id": token_id,
        "logprob": _finite(logprob),
        "bytes": None,
        "rank": None,
    }


def read_completions(body: Body) -> Asked:
    """Read a request to /v1/completions. Raises InputError."""
    sampled = take_vllm_sampling(body, length_default=SHORT)
    form = guided(body.take("response_format"), "response_format")
    prompt = _prompt(body, body.take("prompt"), "prompt", sampled)
    prompt = replace(prompt, sampling={**prompt.sampling, **form})
    _read_common(body)
    for name in ("echo", "suffix", "use_beam_search", "prompt_embeds", "logprob_token_ids"):
        body.allow(name, advice="leave it out")
    body.allow("best_of", 1, sampled.count, advice="ask for n and choose")
    body.allow("length_penalty", 1, advice="leave it out")
    body.ignore("add_special_tokens", "return_tokens_as_token_ids", "truncation_side")
    return Asked(prompt=prompt, top_count=sampled.top_count, wants_prompt=body.flag("return_token_ids"))


def completed(
    asked: Asked, answer: Completions, head: Mapping[str, Any], request_id: str, texts: Sequence[str]
) -> dict[str, Any]:
    """Write the answer of /v1/completions."""
    choices = []
    for index, (made, text) in enumerate(zip(answer.made, texts, strict=True)):
        choice = {
            "index": index,
            "text": text,
            "finish_reason": made.finish,
            "stop_reason": stop_reason(asked.prompt, made),
            "logprobs": None if asked.top_count is None else _columns(made),
            "weight_versions": _stretches(made),
        }
        if asked.wants_prompt:
            choice |= {"token_ids": made.token_ids, "prompt_token_ids": asked.prompt.token_ids.tolist()}
        choices.append(choice)
    usage = _usage(asked, answer)
    return {
        "id": request_id,
        "object": "text_completion",
        **head,
        "choices": choices,
        "usage": usage,
        **versions(answer),
    }


def _columns(made: Made) -> dict[str, Any]:
    names = [token_name(each) for each in made.token_ids]
    tops: Any = [None] * len(names)
    if made.tops:
        own = zip(names, made.logprobs, made.tops, strict=True)
        tops = [{name: _finite(mine), **{token_name(i): _finite(p) for i, p in top}} for name, mine, top in own]
    return {"tokens": names, "token_logprobs": [*map(_finite, made.logprobs)], "top_logprobs": tops, "text_offset": []}


def token_name(token_id: int) -> str:
    """Name a token as vLLM does where it makes no text of it."""
    return f"token_id:{token_id}"


def stop_reason(prompt: Prompt, made: Made) -> int | None:
    """Return the token by which an answer ended, where the request named it; a stop text is not told."""
    named = prompt.sampling.get("stop_ids", ())
    last = made.token_ids[-1] if made.token_ids else None
    return last if made.finish == "stop" and last in named else None


def versions(answer: Completions) -> dict[str, int]:
    """Say by which policy versions an answer was made, in the words of the version contract."""
    return {"weight_version_start": answer.start_version, "weight_version_end": answer.end_version}


def _stretches(made: Made) -> list[dict[str, Any]]:
    return [{"version": str(each.version), "start": each.start, "end": each.end} for each in made.stretches]


def _usage(asked: Asked, answer: Completions) -> dict[str, int]:
    prompt, made = len(asked.prompt.token_ids), sum(len(each.token_ids) for each in answer.made)
    return {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}


def _finite(logprob: float) -> float:
    return max(logprob, LOGPROB_MIN)
