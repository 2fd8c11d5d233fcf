"""Anthropic's messages: blocks become chat messages, and answers blocks.

A user's tool results are messages of their own, before or after its texts as they stand. Marks for caches are dropped;
what thinking a client hands back is compared with what was recorded, and its signature is empty.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from ...fabric.chat.choice import ToolChoice
from ...fabric.chat.messages import Message, Tool, check_messages, check_options, check_tools, read_object
from ...fabric.contract.errors import InputError
from ...fabric.contract.sampling import shown
from ...fabric.ports.sessions import Call
from .body import Body, chosen, guided, take_sampling
from .dialect import Answered, Asked, Dialect, event, parts
from .problems import anthropic_shape

IGNORED = ("model", "metadata", "service_tier", "inference_geo")
STOPS = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens"}


# ---------------------------------------------------------------- requests


def _read(body: Body) -> Asked:
    if not body.has("max_tokens"):
        raise InputError("the request: max_tokens is missing", name="max_tokens")
    sampling = take_sampling(body, length=("max_tokens",), stop="stop_sequences")
    return Asked(call=_call(body, sampling), is_stream=body.flag("stream"))


def read_count(body: Body) -> Call:
    """Read a request to count the tokens of a prompt."""
    return _call(body, {})


def _call(body: Body, sampling: dict[str, Any]) -> Call:
    messages = _messages(body.take("system"), body.required("messages", list))
    form = Body(body.optional("output_config", dict) or {}, "output_config")
    sampling = {**sampling, **guided(form.take("format"), "output_config.format")}
    form.allow("effort", advice="say it in chat_template_kwargs, where the model's template knows it")
    form.close()
    body.allow("thinking", {"type": "disabled"}, advice="say it in chat_template_kwargs, as the model's template does")
    offered = [_tool(each, f"tool {place}") for place, each in enumerate(body.optional("tools", list) or [])]
    tools, choice = _choice(body.optional("tool_choice", dict), check_tools(offered))
    options = check_options(body.take("chat_template_kwargs"))
    body.ignore(*IGNORED)
    return Call(messages=messages, tools=tools, choice=choice, options=options, sampling=sampling)


def _choice(value: dict[str, Any] | None, tools: list[Tool]) -> tuple[list[Tool], ToolChoice]:
    fields = Body(value or {}, "tool_choice")
    kind, is_single = fields.take("type"), fields.flag("disable_parallel_tool_use")
    name = fields.required("name", str) if kind == "tool" else ""
    fields.close()
    return chosen(tools, kind, name, forced=("any", "tool"), is_single=is_single)


def _tool(value: Any, where: str) -> Tool:
    fields = Body(value, where)
    fields.allow("type", "custom", advice="none is run here, so offer tools of your own")
    fields.ignore("cache_control", "input_examples", "eager_input_streaming")
    fields.allow("defer_loading", advice="every tool is offered at once")
    function = {name: each for name in ("name", "description", "strict") if (each := fields.take(name)) is not None}
    parameters = fields.required("input_schema", dict)
    fields.close()
    return {"type": "function", "function": {**function, "parameters": parameters}}


def _messages(system: Any, given: list[Any]) -> list[Message]:
    messages: list[Message] = []
    if system:
        messages.append({"role": "system", "content": _texts(system, "system")})
    for place, each in enumerate(given):
        fields = Body(each, f"message {place}")
        role, content = fields.required("role", str), fields.take("content")
        fields.close()
        if role not in ("user", "assistant"):
            raise InputError(f"message {place}: role is {shown(role)}, expected user or assistant", name="messages")
        if isinstance(content, str) or content is None:
            messages.append({"role": role, "content": content})
        elif role == "user":
            messages += _of_user(content, f"message {place}")
        else:
            messages.append(_of_assistant(content, f"message {place}"))
    return check_messages(messages)


def _of_user(content: Any, where: str) -> list[Message]:
    """Make messages of a user's blocks: each tool result is one, and each row of texts."""
    messages: list[Message] = []
    for fields, kind, place in _blocks(content, where):
        if kind in ("text", "image"):
            part = _part(fields, kind, place)
            if not messages or messages[-1]["role"] != "user":
                messages.append({"role": "user", "content": []})
            messages[-1]["content"].append(part)
        elif kind == "tool_result":
            fields.flag("is_error")  # the result says so itself: chat templates have no word for it
            identifier = fields.required("tool_use_id", str)
            told = _texts(fields.take("content") or "", place, may_see=True)
            messages.append({"role": "tool", "tool_call_id": identifier, "content": told})
        else:
            raise InputError(f"{place} is {shown(kind)}, expected text, image or tool_result", name="messages")
        fields.close()
    return messages


def _of_assistant(content: Any, where: str) -> Message:
    message: Message = {"role": "assistant", "content": [], "tool_calls": []}
    for fields, kind, place in _blocks(content, where):
        if kind == "text":
            message["content"].append({"type": "text", "text": fields.required("text", str)})
            fields.ignore("citations")
        elif kind == "tool_use":
            arguments = json.dumps(fields.required("input", dict), ensure_ascii=False)
            function = {"name": fields.required("name", str), "arguments": arguments}
            message["tool_calls"].append({"id": fields.required("id", str), "type": "function", "function": function})
            fields.ignore("caller")
        elif kind == "thinking":
            if thinking := fields.required("thinking", str):
                message["reasoning_content"] = message.get("reasoning_content", "") + thinking
            fields.ignore("signature")
        else:
            raise InputError(f"{place} is {shown(kind)}, expected text, tool_use or thinking", name="messages")
        fields.close()
    return message


def _blocks(content: Any, where: str) -> Iterator[tuple[Body, Any, str]]:
    """Give each block's fields, its type and its place."""
    if not isinstance(content, list):
        raise InputError(f"{where}: content is {shown(content)}, expected a text or a list of blocks", name="messages")
    for index, block in enumerate(content):
        place = f"{where}: block {index}"
        fields = Body(block, place)
        fields.ignore("cache_control")
        yield fields, fields.take("type"), place


def _texts(content: Any, where: str, *, may_see: bool = False) -> Any:
    """Return text blocks, and images where those are allowed, as parts of chat completions; a text as it is."""
    if isinstance(content, str):
        return content
    found = []
    for fields, kind, place in _blocks(content, where):
        if kind != "text" and not (may_see and kind == "image"):
            expected = "text or image" if may_see else "text"
            raise InputError(f"{place} is {shown(kind)}, expected {expected}", name="messages")
        found.append(_part(fields, kind, place))
        fields.ignore("citations")
        fields.close()
    return found


def _part(fields: Body, kind: str, place: str) -> dict[str, Any]:
    """Return a text or image block as a part of chat completions."""
    if kind == "text":
        return {"type": "text", "text": fields.required("text", str)}
    source = Body(fields.required("source", dict), f"{place}: source")
    if (form := source.take("type")) != "base64":
        raise InputError(
            f"{place}: the source of the image is {shown(form)}, expected base64: nothing is fetched from an address",
            name="messages",
        )
    url = f"data:{source.required('media_type', str)};base64,{source.required('data', str)}"
    source.close()
    return {"type": "image_url", "image_url": {"url": url}}


# ---------------------------------------------------------------- answers


def _whole(answered: Answered) -> dict[str, Any]:
    completion = answered.reply.completions[0]
    message = completion.message
    stop = None
    if completion.finish == "stop":
        stop = next((each for each in answered.asked.call.sampling.get("stop", ()) if each in completion.text), None)
    blocks: list[dict[str, Any]] = []
    if reasoning := message.get("reasoning_content"):
        blocks.append({"type": "thinking", "thinking": reasoning, "signature": ""})
    if text := message.get("content"):
        blocks.append({"type": "text", "text": text})
    for call in message.get("tool_calls") or ():
        function = call["function"]
        arguments = read_object(function["arguments"]) or {}
        blocks.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": arguments})
    return {
        **_begun(answered),
        "content": blocks,
        "stop_reason": STOPS[completion.finish] if stop is None else "stop_sequence",
        "stop_sequence": stop,
        "usage": {"input_tokens": answered.prompt_token_count, "output_tokens": answered.completion_token_count},
    }


def _begun(answered: Answered) -> dict[str, Any]:
    return {
        "id": f"msg_{answered.reply.call_id}",
        "type": "message",
        "role": "assistant",
        "model": answered.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": answered.prompt_token_count, "output_tokens": 0},
    }


def _stream(answered: Answered) -> Iterator[bytes]:
    for name, data in _events(answered):
        yield event({"type": name, **data}, name)


def _events(answered: Answered) -> Iterator[tuple[str, dict[str, Any]]]:
    whole = _whole(answered)
    yield "message_start", {"message": _begun(answered)}
    for index, block in enumerate(whole["content"]):
        empty, deltas = _deltas(block)
        yield "content_block_start", {"index": index, "content_block": empty}
        yield from (("content_block_delta", {"index": index, "delta": delta}) for delta in deltas)
        yield "content_block_stop", {"index": index}
    delta = {"stop_reason": whole["stop_reason"], "stop_sequence": whole["stop_sequence"]}
    yield "message_delta", {"delta": delta, "usage": whole["usage"]}
    yield "message_stop", {}


def _deltas(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return a block as it begins, and the parts that fill it."""
    if block["type"] == "tool_use":
        text = json.dumps(block["input"], ensure_ascii=False)
        return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": part} for part in parts(text)]
    kind = block["type"]
    return {**block, kind: ""}, [{"type": f"{kind}_delta", kind: part} for part in parts(block[kind])]


MESSAGES = Dialect(read=_read, whole=_whole, stream=_stream, shape=anthropic_shape)
