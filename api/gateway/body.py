"""Reads the bodies of requests as closed forms: what nobody has taken at the end is refused by name.

So nothing that a client asks for is silently left out. Fields with None count as absent, because clients write out
every field that they know.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import orjson

from ...fabric.chat.choice import FREE, ToolChoice, check_choice
from ...fabric.chat.messages import Tool
from ...fabric.contract.errors import InputError
from ...fabric.contract.limits import LOGPROB_COUNT_MAX, PROMPT_TOKENS_MAX
from ...fabric.contract.sampling import check_sampling, is_whole, shown
from ...fabric.contract.text import did_you_mean, one_line
from ..access.problems import no_json

T = TypeVar("T")

SAMPLED = (  # fields of Sampling that all protocols take by these names, OpenAI's own and vLLM's
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "logit_bias",
)
DEPTH_MAX = 254  # of JSON: orjson's bound where it writes
EMPTY: tuple[Any, ...] = (False, 0, "", [], {})
COUNT_MAX = 128  # completions of one request, OpenAI's bound
WORDS = {str: "a text", bool: "true or false", list: "a list", dict: "an object", int: "a whole number"}


class Body:
    """The fields of a JSON object that are not taken yet. where: what it is, in refusals."""

    def __init__(self, value: Any, where: str = "the request") -> None:
        if not isinstance(value, dict):
            raise InputError(f"{where} is {shown(value)}, expected an object")
        self._left = {name: each for name, each in value.items() if each is not None}
        self._known: set[str] = set()
        self._where = where

    def has(self, name: str) -> bool:
        """Tell whether a field is there."""
        self._known.add(name)
        return name in self._left

    def take(self, name: str) -> Any:
        """Take a field out, whatever it holds; None: it is absent."""
        self._known.add(name)
        return self._left.pop(name, None)

    def optional(self, name: str, kind: type[T]) -> T | None:
        """Take a field of a type; None: it is absent. Raises InputError: it is of another type."""
        value = self.take(name)
        if value is None or (isinstance(value, kind) and (kind is not int or is_whole(value))):
            return value
        raise InputError(f"{self._where}: {name} is {shown(value)}, expected {WORDS[kind]}", name=name)

    def required(self, name: str, kind: type[T]) -> T:
        """Take a field that must be there. Raises InputError."""
        value = self.optional(name, kind)
        if value is None:
            raise InputError(f"{self._where}: {name} is missing, expected {WORDS[kind]}", name=name)
        return value

    def flag(self, name: str) -> bool:
        """Take a truth value, false where it is absent."""
        return self.optional(name, bool) or False

    def ignore(self, *names: str) -> None:
        """Take fields whose meaning is of no use here."""
        for name in names:
            self.take(name)

    def allow(self, name: str, *neutral: Any, advice: str) -> None:
        """Take a field that may hold only what changes nothing. neutral: those values, or else empty ones.

        Raises:
            InputError: it holds more.
        """
        value = self.take(name)
        if value is not None and value not in (neutral or EMPTY):
            raise InputError(f"{self._where}: {name} is {shown(value)}, which is not offered: {advice}", name=name)

    def close(self) -> None:
        """Refuse what is left. Raises InputError: it names the field."""
        if self._left:
            name = one_line(f"{next(iter(self._left)):.60}")
            near = did_you_mean(name, self._known)
            raise InputError(f"{self._where}: {name!r} is not offered: leave it out; {near}", name=name)


def read_json(data: bytes) -> Any:
    """Read a request's body. Raises InputError: it is no JSON, or nested too deeply for who walks through it."""
    try:
        value = orjson.loads(data or b"{}")
    except orjson.JSONDecodeError as error:
        raise InputError(_no_json(data, error)) from error
    try:
        orjson.dumps(value)  # goes less deep than it reads; a walk of our own would hold the loop
    except orjson.JSONEncodeError as error:
        raise InputError(f"the request's body is nested more than {DEPTH_MAX} deep: send it flatter") from error
    return value


def _no_json(data: bytes, error: orjson.JSONDecodeError) -> str:
    try:
        return no_json(data.decode()[: error.pos], error.msg)
    except UnicodeDecodeError as wrong:  # of which orjson tells no place
        return no_json(data[: wrong.start].decode(), "this is no UTF-8")


def take_sampling(body: Body, *, length: Iterable[str], stop: str | None) -> dict[str, Any]:
    """Take the fields that say how to sample, as values of Sampling.

    length: names of the field with the most tokens, of which one may be there. stop: name of the one with stop texts;
    None: they are taken elsewhere.
    """
    found: dict[str, Any] = {name: body.take(name) for name in SAMPLED if body.has(name)}
    if found.get("top_k") == -1:  # vLLM's word for all
        found["top_k"] = 0
    for name in length:
        if body.has(name):
            if "max_tokens" in found:
                raise InputError(f"the request has {' and '.join(length)}: leave one of them out", name=name)
            found["max_tokens"] = _length(name, body.take(name))
    stops = None if stop is None else body.take(stop)
    if stops is not None:
        found["stop"] = [stops] if isinstance(stops, str) else stops
    return check_sampling(found, "the request")


def take_top(body: Body, name: str, sampling: dict[str, Any]) -> int | None:
    """Take how many of the likeliest tokens to tell beside each one, and ask for them; None: it is absent."""
    count = body.take(name)
    if count is None:
        return None
    if not is_whole(count) or not 0 <= count <= LOGPROB_COUNT_MAX:
        raise InputError(f"the request: {name} is {shown(count)}, expected 0 to {LOGPROB_COUNT_MAX}", name=name)
    if count:
        sampling["logprobs"] = count
    return int(count)


def take_count(body: Body) -> int:
    """Take n, how many completions there shall be."""
    count = body.optional("n", int)
    if count is not None and not 1 <= count <= COUNT_MAX:
        raise InputError(f"the request: n is {count}, expected 1 to {COUNT_MAX}", name="n")
    return count or 1


def take_choice(body: Body, tools: list[Tool]) -> tuple[list[Tool], ToolChoice]:
    """Take tool_choice and parallel_tool_calls, OpenAI's: the tools that they leave, and how these are to be called.

    Raises:
        InputError: they are of no form that is known, or ask for a tool that is not offered.
    """
    is_single = body.optional("parallel_tool_calls", bool) is False
    value, name = body.take("tool_choice"), ""
    if isinstance(value, Mapping):
        fields = Body(value, "tool_choice")
        value = fields.take("type")
        if value == "function":  # chat completions have its name one object deeper than responses
            inner = Body(fields.take("function"), "tool_choice.function") if fields.has("function") else fields
            name = inner.required("name", str)
            inner.close()
        fields.close()
    return chosen(tools, value, name, forced=("required", "function"), is_single=is_single)


def chosen(
    tools: list[Tool], kind: Any, name: str, *, forced: tuple[str, ...], is_single: bool
) -> tuple[list[Tool], ToolChoice]:
    """Return the tools that a tool_choice of a kind leaves, and how they are to be called.

    forced: a protocol's words for any tool, and for one by its name.

    Raises:
        InputError: the kind is another one, or the tool is not offered.
    """
    if kind not in (None, "auto", "none", *forced) or (kind == forced[1] and not name):
        text = (
            f"the request: tool_choice is {shown(kind)}, expected auto, none, {forced[0]} or a {forced[1]} by its name"
        )
        raise InputError(text, name="tool_choice")
    choice = ToolChoice(is_forced=kind in forced, is_single=is_single, name=name)
    return ([], FREE) if kind == "none" else (tools, check_choice(choice, tools))


def guided(form: Any, name: str) -> dict[str, Any]:
    """Return the setting of Sampling that a response format asks for. form: {"type": …, "schema": …}, or None."""
    if form is None:
        return {}
    fields = Body(form, name)
    kind = fields.required("type", str)
    fields.ignore("name", "description", "strict")
    if kind == "json_schema":
        found = {"guided_json": fields.required("schema", dict)}
    elif kind == "json_object":
        found = {"guided_json": {"type": "object"}}
    elif kind == "text":
        found = {}
    else:
        raise InputError(f"{name}: type is {shown(kind)}, expected text, json_object or json_schema", name=name)
    fields.close()
    return check_sampling(found, "the request")


def _length(name: str, value: Any) -> int:
    if not is_whole(value) or not 1 <= value <= PROMPT_TOKENS_MAX:
        raise InputError(f"the request: {name} is {shown(value)}, expected 1 to {PROMPT_TOKENS_MAX:,}", name=name)
    return int(value)
