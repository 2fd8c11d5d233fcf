"""Chat messages in OpenAI's form, as plain JSON dicts: which ones are taken, and when two say the same.

- The form is closed: a key that is not known here is refused by name, so that nothing is silently left out of a prompt.
  Keys with None or an empty list count as absent, because clients write out every key that they know.
- A checked message holds its content as one text. Several text parts are joined by newlines, as vLLM joins them.
- Content with images stays a list of parts (image_parts.py).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..contract.errors import InputError, PayloadTooLarge
from ..contract.limits import IMAGE_COUNT_MAX, KIB, MIB
from ..contract.text import one_line
from .image_parts import check_image, images_in

Message = dict[str, Any]
Tool = dict[str, Any]

MESSAGE_COUNT_MAX = 8192  # two per turn and more; a request with so many is compared with every recorded path
MESSAGES_BYTES_MAX = 8 * MIB  # of all their texts, as UTF-8: a context of a million tokens is smaller
TOOL_COUNT_MAX = 512  # the largest agents known offer about a hundred
TOOLS_BYTES_MAX = MIB  # as JSON; they stand in every prompt
NAME_BYTES_MAX = KIB  # of a tool, a call's id, or a speaker
DEPTH_MAX = 200  # of arguments: rendering and comparing them takes some frames of the stack for each level
IMAGE_ROLES = ("user", "tool")
ROLES = ("system", "developer", "user", "assistant", "tool")
KEYS = {
    **dict.fromkeys(("system", "developer", "user"), ("role", "content", "name")),
    "assistant": ("role", "content", "name", "reasoning_content", "tool_calls"),
    "tool": ("role", "content", "name", "tool_call_id"),
}


def check_messages(value: Any) -> list[Message]:
    """Return messages as everything here takes them: known keys only, none of them None, content as one text.

    Args:
        value: what a client sent: a list of dicts, at least one.

    Returns:
        New dicts. A user's, system's or tool's content is a text; an assistant's is absent where it said nothing. A
        user's or tool's content with images is a list of text and image parts.

    Raises:
        InputError: names the message, the key and what is allowed.
        PayloadTooLarge: too many of them, or too many bytes.
    """
    if not isinstance(value, list | tuple) or not value:
        raise InputError("messages: expected a list of at least one message")
    _check_count("messages", value, MESSAGE_COUNT_MAX, "send a shorter history")
    messages = [_check_message(each, f"message {index}") for index, each in enumerate(value)]
    _check_count("images", list(images_in(messages)), IMAGE_COUNT_MAX, "send fewer")
    _check_bytes("messages", _dumped(messages, "messages"), MESSAGES_BYTES_MAX, "send a shorter history")
    return messages


def check_tools(value: Any) -> list[Tool]:
    """Return tools as chat templates take them: [{"type": "function", "function": {"name": …, "parameters": …}}].

    Returns:
        A copy; empty where `value` is None or empty.

    Raises:
        InputError: names the tool, the key and what is allowed.
        PayloadTooLarge: too many of them, or too many bytes.
    """
    if value is not None and not isinstance(value, list | tuple):
        raise InputError(f"tools: expected a list, not {type(value).__name__}")
    if not value:
        return []
    _check_count("tools", value, TOOL_COUNT_MAX, "offer fewer")
    names = [_check_tool(each, f"tool {index}") for index, each in enumerate(value)]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InputError(f"tools: two are named {one_line(twice)!r}")
    text = _dumped(value, "tools")
    _check_bytes("tools", text, TOOLS_BYTES_MAX, "offer fewer, or describe them in fewer words")
    copied: list[Tool] = json.loads(text)
    return copied


def check_options(value: Any) -> dict[str, Any]:
    """Return variables for a chat template, such as enable_thinking: a dict of JSON values, or None for none.

    Raises:
        InputError: they are something else.
        PayloadTooLarge: too many bytes.
    """
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(key, str) and key.isidentifier() for key in value):
        raise InputError("options of the chat template: expected a dict whose keys are names of variables")
    text = _dumped(dict(value), "options of the chat template")
    _check_bytes("options of the chat template", text, TOOLS_BYTES_MAX, "say it in messages")
    options: dict[str, Any] = json.loads(text)
    return options


def same(recorded: Message, sent: Message) -> bool:
    """Tell whether a client's copy is the message that was recorded. Both are checked messages.

    Absent content is an empty text; the arguments of tool calls are compared as JSON values, ids only where both have
    one, and the reasoning only if the copy has some, because most clients drop it.
    """
    if recorded["role"] != sent["role"] or recorded.get("name") != sent.get("name"):
        return False
    if recorded.get("content", "") != sent.get("content", ""):
        return False
    if "reasoning_content" in sent and recorded.get("reasoning_content") != sent["reasoning_content"]:
        return False
    if _differ(recorded.get("tool_call_id"), sent.get("tool_call_id")):
        return False
    mine, theirs = recorded.get("tool_calls", []), sent.get("tool_calls", [])
    return len(mine) == len(theirs) and all(map(_same_call, mine, theirs))


def same_value(one: Any, other: Any) -> bool:
    """Tell whether two JSON values are the same; true is not 1, and the order of a dict's keys does not matter."""
    return canonical(one) == canonical(other)


def canonical(value: Any) -> str:
    """Write a JSON value as one text, the same for the same value."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def read_object(text: str) -> dict[str, Any] | None:
    """Read the JSON object that a text is; None: it is something else, or would not survive being written again.

    That is so for numbers beyond a float's, NaN, halves of characters, keys that stand twice, and values nested so
    deeply that who walks through them would run out of stack.
    """
    try:
        value = json.loads(
            text, parse_constant=_refuse_constant, parse_float=_read_float, object_pairs_hook=_read_pairs
        )
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and not _is_deep(value) else None


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(DEPTH_MAX):
        level = [
            part
            for each in level
            for part in (each.values() if isinstance(each, dict) else each)
            if isinstance(part, dict | list)
        ]
        if not level:
            return False
    return True


def _same_call(mine: dict[str, Any], theirs: dict[str, Any]) -> bool:
    ours, copy = mine["function"], theirs["function"]
    if ours["name"] != copy["name"] or _differ(mine.get("id"), theirs.get("id")):
        return False
    return ours["arguments"] == copy["arguments"] or same_value(
        json.loads(ours["arguments"]), json.loads(copy["arguments"])
    )


def _differ(one: str | None, other: str | None) -> bool:
    return one is not None and other is not None and one != other


def _check_message(value: Any, where: str) -> Message:
    if not isinstance(value, Mapping):
        raise InputError(f"{where} is {type(value).__name__}, expected a dict")
    role = value.get("role")
    if role not in ROLES:
        raise InputError(f"{where}: role is {role!r:.40}, expected {', '.join(ROLES)}")
    given = {key: each for key, each in value.items() if each is not None and each != []}
    unknown = [key for key in given if key not in KEYS[role]]
    if unknown:
        raise InputError(
            f"{where}: {one_line(f'{unknown[0]!r:.60}')} is no key of role {role}: {', '.join(KEYS[role])} are"
        )
    message: Message = {"role": role}
    content = _check_content(given.get("content"), where, may_see=role in IMAGE_ROLES)
    if content is None and role != "assistant":
        raise InputError(f"{where}: content is missing")
    if content is not None and (content or role != "assistant"):
        message["content"] = content
    for key in ("name", "tool_call_id"):
        if key in given:
            message[key] = _check_text(given[key], f"{where}: {key}", NAME_BYTES_MAX)
    if "reasoning_content" in given:
        message["reasoning_content"] = _check_text(given["reasoning_content"], f"{where}: reasoning_content")
    if "tool_calls" in given:
        message["tool_calls"] = _check_calls(given["tool_calls"], where)
    return message


def _check_content(value: Any, where: str, *, may_see: bool) -> str | list[dict[str, Any]] | None:
    if value is None or isinstance(value, str):
        return value if value is None else _check_text(value, f"{where}: content")
    if not isinstance(value, list | tuple):
        raise InputError(f"{where}: content is {type(value).__name__}, expected a text or a list of parts")
    parts = [_check_part(part, f"{where}: content part {index}", may_see) for index, part in enumerate(value)]
    if any(part["type"] != "text" for part in parts):
        return parts
    return "\n".join(part["text"] for part in parts)


def _check_part(part: Any, where: str, may_see: bool) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text":
        if set(part) != {"type", "text"}:
            raise InputError(f"{where}: expected the keys type and text")
        return {"type": "text", "text": _check_text(part["text"], where)}
    if kind not in ("image_url", "image"):
        said = f"of type {kind!r:.40}" if isinstance(part, Mapping) else f"{part!r:.40}"
        raise InputError(f"{where} is {one_line(said)}, expected a dict of type text or image_url")
    if not may_see:
        raise InputError(f"{where} is an image, which messages of role {' and '.join(IMAGE_ROLES)} alone may have")
    return check_image(part, where)


def _check_calls(value: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(value, list | tuple):
        raise InputError(f"{where}: tool_calls is {type(value).__name__}, expected a list")
    return [_check_call(each, f"{where}: tool call {index}") for index, each in enumerate(value)]


def _check_call(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not isinstance(value.get("function"), Mapping):
        raise InputError(f"{where}: expected {{id, type, function: {{name, arguments}}}}")
    if set(value) - {"id", "type", "function", "index"} or value.get("type", "function") != "function":
        raise InputError(f"{where}: expected the keys id, type (function) and function")
    function = value["function"]
    if set(function) != {"name", "arguments"}:
        raise InputError(f"{where}: expected the keys name and arguments in function")
    arguments = _check_text(function["arguments"], f"{where}: arguments")
    if read_object(arguments) is None:
        raise InputError(f"{where}: arguments is no text of a JSON object")
    call: dict[str, Any] = {
        "type": "function",
        "function": {"name": _check_text(function["name"], f"{where}: name", NAME_BYTES_MAX), "arguments": arguments},
    }
    if value.get("id") is not None:
        call["id"] = _check_text(value["id"], f"{where}: id", NAME_BYTES_MAX)
    return call


def _check_tool(value: Any, where: str) -> str:
    if not isinstance(value, Mapping) or value.get("type") != "function" or set(value) != {"type", "function"}:
        raise InputError(f'{where}: expected {{"type": "function", "function": {{…}}}}')
    function = value["function"]
    if not isinstance(function, Mapping):
        raise InputError(f"{where}: function is {type(function).__name__}, expected a dict")
    unknown = set(function) - {"name", "description", "parameters", "strict"}
    if unknown:
        raise InputError(
            f"{where}: {one_line(f'{min(map(str, unknown)):.60}')!r} is no key of a function: "
            "name, description, parameters and strict are"
        )
    parameters = function.get("parameters", {})
    if not isinstance(parameters, Mapping):
        raise InputError(f"{where}: parameters is no JSON schema")
    if not isinstance(parameters.get("properties") or {}, Mapping):
        raise InputError(
            f"{where}: properties of its parameters is {type(parameters['properties']).__name__}, expected a dict"
        )
    return _check_text(function.get("name"), f"{where}: name", NAME_BYTES_MAX)


def _check_text(value: Any, where: str, bytes_max: int = MESSAGES_BYTES_MAX) -> str:
    if not isinstance(value, str):
        raise InputError(f"{where} is {type(value).__name__}, expected a text")
    try:
        size = len(value.encode())
    except UnicodeEncodeError as error:
        raise InputError(f"{where} holds half a character, which UTF-8 has no bytes for") from error
    if size > bytes_max:
        raise PayloadTooLarge(
            f"{where} has {size:,} bytes, the limit is {bytes_max:,}: send less",
            size_bytes=size,
            limit_bytes=bytes_max,
        )
    return value


def _check_count(what: str, values: Sequence[Any], count_max: int, advice: str) -> None:
    if len(values) > count_max:
        raise PayloadTooLarge(f"{len(values):,} {what}, the limit is {count_max:,}: {advice}", count=len(values))


def _check_bytes(what: str, text: str, limit: int, advice: str) -> None:
    size = len(text.encode())
    if size > limit:
        raise PayloadTooLarge(
            f"the {what} have {size:,} bytes, the limit is {limit:,}: {advice}", size_bytes=size, limit_bytes=limit
        )


def _dumped(value: Any, what: str) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"{what}: this is no JSON: {one_line(str(error))}") from error
    return text


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _read_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is no finite number")
    return value


def _read_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("a key stands twice")
    return value
