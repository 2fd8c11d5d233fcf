"""OpenAI's chat completions and (legacy) completions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ...fabric.chat.messages import check_messages, check_options, check_tools
from ...fabric.contract.errors import InputError
from ...fabric.contract.sampling import shown
from ...fabric.ports.sessions import Call, Completion, Token
from .body import Body, guided, take_choice, take_count, take_sampling, take_top
from .dialect import Answered, Asked, Dialect, event, parts
from .problems import openai_shape

IGNORED = (
    "model",
    "user",
    "metadata",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
)
DONE = b"data: [DONE]\n\n"


def _read_chat(body: Body) -> Asked:
    messages = check_messages(body.take("messages"))
    sampling = take_sampling(body, length=("max_completion_tokens", "max_tokens"), stop="stop")
    sampling |= guided(_flat_format(body.take("response_format")), "response_format")
    wants_logprobs, top_count = body.flag("logprobs"), take_top(body, "top_logprobs", sampling)
    if top_count and not wants_logprobs:
        raise InputError("the request: top_logprobs is there without logprobs: true", name="top_logprobs")
    body.allow("store", advice="nothing is stored")
    body.allow("modalities", ["text"], advice="there is text alone")
    body.allow("functions", advice="send them as tools")
    body.allow("function_call", "auto", "none", advice="send tools and tool_choice")
    body.allow("audio", advice="there is text alone")
    body.allow("reasoning_effort", advice="say it in chat_template_kwargs, where the model's template knows it")
    tools, choice = take_choice(body, check_tools(body.take("tools")))
    options = check_options(body.take("chat_template_kwargs"))
    call = Call(messages=messages, tools=tools, choice=choice, options=options, sampling=sampling)
    asked = _asked(body, replace(call, count=take_count(body)))
    return replace(asked, wants_logprobs=wants_logprobs, top_count=top_count or 0)


def _read_text(body: Body) -> Asked:
    prompt = body.take("prompt")
    if not isinstance(prompt, str):
        text = f"the request: prompt is {shown(prompt)}, expected one text: send several one by one, and tokens as text"
        raise InputError(text, name="prompt")
    count = take_count(body)
    body.allow("best_of", count, advice="ask for n completions and choose")
    body.allow("echo", advice="put the prompt before the answer yourself")
    body.allow("suffix", advice="only what follows a text is made")
    sampling = take_sampling(body, length=("max_tokens",), stop="stop")
    top_count = take_top(body, "logprobs", sampling)
    asked = _asked(body, Call(text=prompt, sampling=sampling, count=count))
    return replace(asked, wants_logprobs=top_count is not None, top_count=top_count or 0)


def _asked(body: Body, call: Call) -> Asked:
    body.ignore(*IGNORED)
    options = Body(body.optional("stream_options", dict) or {}, "stream_options")
    wants_usage = options.flag("include_usage")
    options.ignore("include_obfuscation")
    options.close()
    return Asked(call=call, is_stream=body.flag("stream"), wants_usage=wants_usage)


def _flat_format(form: Any) -> Any:
    """Write a response format as responses have it: the schema beside the type."""
    if not isinstance(form, dict) or "json_schema" not in form:
        return form
    inner = form["json_schema"]
    outer = {name: each for name, each in form.items() if name != "json_schema"}
    return {**outer, **inner} if isinstance(inner, dict) and "type" not in inner else {**outer, "schema": inner}


def _whole_chat(answered: Answered) -> dict[str, Any]:
    choices = [
        {
            "index": index,
            "message": {"content": None, "refusal": None, **each.message, "role": "assistant"},
            "logprobs": _logprobs(answered.asked, each),
            "finish_reason": each.finish,
        }
        for index, each in enumerate(answered.reply.completions)
    ]
    return {**_head(answered, "chatcmpl", "chat.completion"), "choices": choices, "usage": _usage(answered)}


def _whole_text(answered: Answered) -> dict[str, Any]:
    choices = [
        {
            "index": index,
            "text": each.text,
            "logprobs": _text_logprobs(answered.asked, each),
            "finish_reason": _text_finish(each),
        }
        for index, each in enumerate(answered.reply.completions)
    ]
    return {**_head(answered, "cmpl", "text_completion"), "choices": choices, "usage": _usage(answered)}


def _stream_chat(answered: Answered) -> Iterator[bytes]:
    head = _head(answered, "chatcmpl", "chat.completion.chunk")
    for index, completion in enumerate(answered.reply.completions):
        yield from (event({**head, "choices": [each]}) for each in _chat_chunks(answered, index, completion))
    if answered.asked.wants_usage:
        yield event({**head, "choices": [], "usage": _usage(answered)})
    yield DONE


def _chat_chunks(answered: Answered, index: int, completion: Completion) -> Iterator[dict[str, Any]]:
    message = completion.message
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    deltas += [{"reasoning_content": part} for part in parts(message.get("reasoning_content") or "")]
    deltas += [{"content": part} for part in parts(message.get("content") or "")]
    deltas += [{"tool_calls": [{"index": place, **each}]} for place, each in enumerate(message.get("tool_calls") or ())]
    chunk = {"index": index, "logprobs": None, "finish_reason": None}
    yield from ({**chunk, "delta": delta} for delta in deltas)
    logprobs = _logprobs(answered.asked, completion)
    yield {"index": index, "delta": {}, "logprobs": logprobs, "finish_reason": completion.finish}


def _stream_text(answered: Answered) -> Iterator[bytes]:
    head = _head(answered, "cmpl", "text_completion")
    for index, completion in enumerate(answered.reply.completions):
        for part in parts(completion.text):
            choice = {"index": index, "text": part, "logprobs": None, "finish_reason": None}
            yield event({**head, "choices": [choice]})
        logprobs = _text_logprobs(answered.asked, completion)
        last = {"index": index, "text": "", "logprobs": logprobs, "finish_reason": _text_finish(completion)}
        yield event({**head, "choices": [last]})
    if answered.asked.wants_usage:
        yield event({**head, "choices": [], "usage": _usage(answered)})
    yield DONE


def _head(answered: Answered, prefix: str, kind: str) -> dict[str, Any]:
    return {
        "id": f"{prefix}-{answered.reply.call_id}",
        "object": kind,
        "created": answered.reply.created_s,
        "model": answered.model,
        "system_fingerprint": f"policy-{answered.reply.policy_version}",
    }


def _usage(answered: Answered) -> dict[str, int]:
    prompt, completion = answered.prompt_token_count, answered.completion_token_count
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _logprobs(asked: Asked, completion: Completion) -> dict[str, Any] | None:
    if not asked.wants_logprobs:
        return None
    content = [
        {**_logprob(each), "top_logprobs": [_logprob(top) for top in each.top[: asked.top_count]]}
        for each in completion.tokens
    ]
    return {"content": content, "refusal": None}


def _logprob(token: Token) -> dict[str, Any]:
    return {"token": token.text, "logprob": token.logprob, "bytes": _bytes(token)}


def _bytes(token: Token) -> list[int] | None:
    """Return a token's bytes; None: it is a part of a character, whose bytes are not known here."""
    return None if "\ufffd" in token.text else list(token.text.encode())


def _text_logprobs(asked: Asked, completion: Completion) -> dict[str, Any] | None:
    if not asked.wants_logprobs:
        return None
    tokens, offsets, offset = list(completion.tokens), [], 0
    for each in tokens:
        offsets.append(offset)
        offset += len(each.text)
    tops = [{top.text: top.logprob for top in reversed((*each.top[: asked.top_count], each))} for each in tokens]
    return {
        "tokens": [each.text for each in tokens],
        "token_logprobs": [each.logprob for each in tokens],
        "top_logprobs": tops if asked.top_count else None,
        "text_offset": offsets,
    }


def _text_finish(completion: Completion) -> str:
    return "length" if completion.finish == "length" else "stop"


CHAT = Dialect(read=_read_chat, whole=_whole_chat, stream=_stream_chat, shape=openai_shape)
TEXT = Dialect(read=_read_text, whole=_whole_text, stream=_stream_text, shape=openai_shape)
