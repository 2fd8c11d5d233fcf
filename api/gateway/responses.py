"""OpenAI's responses, as far as a model alone can give them: nothing is stored, and every tool is the client's own.

Items become messages: reasoning, a message and function calls that follow one another are one assistant's message, as
they are one answer here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ...fabric.chat.messages import Message, Tool, check_messages, check_options, check_tools
from ...fabric.contract.errors import InputError
from ...fabric.contract.sampling import shown
from ...fabric.ports.sessions import Call, Completion
from .body import Body, guided, take_choice, take_sampling
from .dialect import Answered, Asked, Dialect, event, parts
from .problems import openai_shape

IGNORED = (
    "model",
    "user",
    "metadata",
    "store",  # the client's default is true: nothing is stored, and previous_response_id is refused
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "stream_options",
)
ENCRYPTED = "reasoning.encrypted_content"  # clients ask for it always; there is none
CHOICES = {False: "auto", True: "required"}
IMAGE_PART = "input_image"
CONTENT_PARTS = ("input_text", "output_text", "text", IMAGE_PART)


# ---------------------------------------------------------------- requests


def _read(body: Body) -> Asked:
    messages = _messages(body.optional("instructions", str), body.take("input"))
    sampling = take_sampling(body, length=("max_output_tokens",), stop="stop")
    form = Body(body.optional("text", dict) or {}, "text")
    sampling |= guided(form.take("format"), "text.format")
    form.allow("verbosity", "medium", advice="say it in the instructions")
    form.close()
    _read_neutral(body)
    offered = [_tool(each, f"tool {place}") for place, each in enumerate(body.optional("tools", list) or [])]
    tools, choice = take_choice(body, check_tools(offered))
    options = check_options(body.take("chat_template_kwargs"))
    body.ignore(*IGNORED)
    call = Call(messages=messages, tools=tools, choice=choice, options=options, sampling=sampling)
    return Asked(call=call, is_stream=body.flag("stream"))


def _read_neutral(body: Body) -> None:
    stored = "nothing is stored here: send the whole history as input"
    for name in ("previous_response_id", "conversation", "prompt"):
        body.allow(name, advice=stored)
    body.allow("background", advice="wait for the answer")
    body.allow("truncation", "disabled", advice="send a shorter history")
    body.allow("top_logprobs", advice="ask for logprobs in chat completions")
    body.allow("max_tool_calls", advice="every tool is run by the client, which may count")
    body.allow("include", [], [ENCRYPTED], advice="what there is, is in the answer")
    reasoning = Body(body.optional("reasoning", dict) or {}, "reasoning")
    reasoning.ignore("summary", "generate_summary")
    reasoning.allow("effort", advice="say it in chat_template_kwargs, where the model's template knows it")
    reasoning.close()


def _tool(value: Any, where: str) -> Tool:
    fields = Body(value, where)
    kind = fields.required("type", str)
    if kind != "function":
        raise InputError(f"{where} is {shown(kind)}, expected function: none is run here", name="tools")
    function = {name: each for name in ("name", "description", "parameters", "strict") if (each := fields.take(name))}
    fields.allow("defer_loading", advice="every tool is offered at once")
    fields.close()
    return {"type": "function", "function": function}


def _messages(instructions: str | None, items: Any) -> list[Message]:
    """Make messages of the input: a text, or items. Raises InputError."""
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    if not isinstance(items, list):
        raise InputError(f"the request: input is {shown(items)}, expected a text or a list of items", name="input")
    messages: list[Message] = [] if instructions is None else [{"role": "system", "content": instructions}]
    is_open = False  # whether the last message is an assistant's that further items may belong to
    for place, item in enumerate(items):
        fields = Body(item, f"input item {place}")
        kind = fields.take("type") or "message"
        read = READERS.get(kind) if isinstance(kind, str) else None
        if read is None:
            raise InputError(f"input item {place} is {shown(kind)}, expected {', '.join(READERS)}", name="input")
        message = read(fields)
        fields.close()
        if is_open and message["role"] == "assistant" and _goes_on(messages[-1], message):
            _merge(messages[-1], message)
        else:
            messages.append(message)
        is_open = message["role"] == "assistant"
    try:
        return check_messages(messages)
    except InputError as error:
        error.facts.setdefault("name", "input")
        raise


def _goes_on(last: Message, message: Message) -> bool:
    """Tell whether an answer that has come so far may go on so: reasoning, then a text, then calls."""
    order = ("reasoning_content", "content", "tool_calls")
    rank = max(order.index(key) for key in message if key in order)
    reached = max(order.index(key) for key in last if key in order)
    return rank > reached or rank == reached == order.index("tool_calls")


def _merge(last: Message, message: Message) -> None:
    calls = [*last.get("tool_calls", ()), *message.get("tool_calls", ())]
    last.update(message)
    if calls:
        last["tool_calls"] = calls


def _read_message(fields: Body) -> Message:
    fields.ignore("id", "status", "phase")
    role = fields.required("role", str)
    return {"role": role, "content": _parts(fields.take("content"), CONTENT_PARTS, "content")}


def _read_call(fields: Body) -> Message:
    fields.ignore("id", "status")
    function = {"name": fields.required("name", str), "arguments": fields.required("arguments", str)}
    call = {"id": fields.required("call_id", str), "type": "function", "function": function}
    return {"role": "assistant", "tool_calls": [call]}


def _read_output(fields: Body) -> Message:
    fields.ignore("id", "status")
    identifier = fields.required("call_id", str)
    return {
        "role": "tool",
        "tool_call_id": identifier,
        "content": _parts(fields.take("output"), CONTENT_PARTS, "output"),
    }


def _read_reasoning(fields: Body) -> Message:
    fields.ignore("id", "status", "summary", "encrypted_content")
    thought = _parts(fields.take("content"), ("reasoning_text",), "content")
    is_listed = isinstance(thought, list)
    return {
        "role": "assistant",
        "reasoning_content": "\n".join(part["text"] for part in thought) if is_listed else thought,
    }


READERS: dict[str, Callable[[Body], Message]] = {
    "message": _read_message,
    "function_call": _read_call,
    "function_call_output": _read_output,
    "reasoning": _read_reasoning,
}


def _parts(value: Any, kinds: tuple[str, ...], name: str) -> Any:
    """Return text and image parts in the form of chat completions; a text as it is. Raises InputError."""
    return (
        [_part(part, kinds, f"{name} part {place}") for place, part in enumerate(value)]
        if isinstance(value, list)
        else value
    )


def _part(part: Any, kinds: tuple[str, ...], where: str) -> dict[str, Any]:
    fields = Body(part, where)
    kind = fields.take("type")
    if kind not in kinds:
        raise InputError(f"{where} is {shown(kind)}, expected {', '.join(kinds)}", name="input")
    made: dict[str, Any]
    if kind == IMAGE_PART:
        fields.allow("file_id", advice="no files are kept here: send the image itself in image_url")
        image = {"url": fields.required("image_url", str), "detail": fields.take("detail")}
        made = {"type": "image_url", "image_url": image}
    else:
        fields.ignore("annotations", "logprobs")
        made = {"type": "text", "text": fields.required("text", str)}
    fields.close()
    return made


# ---------------------------------------------------------------- answers


def _whole(answered: Answered) -> dict[str, Any]:
    completion = answered.reply.completions[0]
    is_cut = completion.finish == "length"
    prompt, made = answered.prompt_token_count, answered.completion_token_count
    usage = {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": made,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + made,
    }
    return {
        **_begun(answered),
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "output": _items(answered.reply.call_id, completion),
        "usage": usage,
    }


def _begun(answered: Answered) -> dict[str, Any]:
    choice = answered.asked.call.choice
    return {
        "id": f"resp_{answered.reply.call_id}",
        "object": "response",
        "created_at": answered.reply.created_s,
        "status": "in_progress",
        "model": answered.model,
        "output": [],
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "parallel_tool_calls": not choice.is_single,
        "previous_response_id": None,
        "store": False,
        "tool_choice": {"type": "function", "name": choice.name} if choice.name else CHOICES[choice.is_forced],
        "tools": [],
        "usage": None,
    }


def _items(call_id: str, completion: Completion) -> list[dict[str, Any]]:
    message, status = completion.message, "incomplete" if completion.finish == "length" else "completed"
    items: list[dict[str, Any]] = []
    if reasoning := message.get("reasoning_content"):
        part = {"type": "reasoning_text", "text": reasoning}
        items.append({"id": f"rs_{call_id}", "type": "reasoning", "summary": [], "content": [part], "status": status})
    calls = message.get("tool_calls") or ()
    if (text := message.get("content") or "") or not calls:
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        items.append(
            {"id": f"msg_{call_id}", "type": "message", "role": "assistant", "content": [part], "status": status}
        )
    for place, call in enumerate(calls):
        head = {"id": f"fc_{call_id}.{place}", "type": "function_call", "call_id": call["id"], "status": status}
        items.append({**head, **call["function"]})
    return items


def _stream(answered: Answered) -> Iterator[bytes]:
    for number, (name, data) in enumerate(_events(answered)):
        yield event({"type": name, "sequence_number": number, **data}, name)


Event = tuple[str, dict[str, Any]]


def _events(answered: Answered) -> Iterator[Event]:
    whole = _whole(answered)
    yield "response.created", {"response": _begun(answered)}
    yield "response.in_progress", {"response": _begun(answered)}
    for index, item in enumerate(whole["output"]):
        place = {"output_index": index, "item_id": item["id"]}
        empty = {**item, "status": "in_progress", **({"arguments": ""} if "arguments" in item else {"content": []})}
        yield "response.output_item.added", {"output_index": index, "item": empty}
        yield from _call_events(place, item) if "arguments" in item else _part_events(place, item)
        yield "response.output_item.done", {"output_index": index, "item": item}
    yield f"response.{whole['status']}", {"response": whole}


def _call_events(place: dict[str, Any], item: dict[str, Any]) -> Iterator[Event]:
    for part in parts(item["arguments"]):
        yield "response.function_call_arguments.delta", {**place, "delta": part}
    done = {**place, "name": item["name"], "arguments": item["arguments"]}
    yield "response.function_call_arguments.done", done


def _part_events(place: dict[str, Any], item: dict[str, Any]) -> Iterator[Event]:
    part, at = item["content"][0], {**place, "content_index": 0}
    more: dict[str, Any] = {"logprobs": []} if part["type"] == "output_text" else {}
    yield "response.content_part.added", {**at, "part": {**part, "text": ""}}
    for each in parts(part["text"]):
        yield f"response.{part['type']}.delta", {**at, "delta": each, **more}
    yield f"response.{part['type']}.done", {**at, "text": part["text"], **more}
    yield "response.content_part.done", {**at, "part": part}


RESPONSES = Dialect(read=_read, whole=_whole, stream=_stream, shape=openai_shape)
