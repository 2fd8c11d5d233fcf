"""What a protocol is here: how its requests become calls, and replies its answers, whole or as a stream.

A stream is made from the settled answer: a turn is recorded as one, errors keep their status, and a client that lost
its connection gets the very same tokens. So it is written at once, in a few parts at the borders of words.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import orjson

from ...fabric.ports.sessions import Call, Reply
from .body import Body
from .problems import Shape

PART_COUNT = 8  # of a text, in a stream
WORD = re.compile(r"\s*\S+|\s+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request, understood.

    top_count: likeliest tokens to tell beside each one. wants_usage: a stream tells at its end how many tokens it has.
    """

    call: Call
    is_stream: bool = False
    wants_logprobs: bool = False
    top_count: int = 0
    wants_usage: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """A request and its reply. model: the session's."""

    asked: Asked
    reply: Reply
    model: str

    @property
    def prompt_token_count(self) -> int:
        return self.reply.prompt_token_count

    @property
    def completion_token_count(self) -> int:
        return sum(len(each.tokens) for each in self.reply.completions)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """One protocol. read: raises InputError. stream: server-sent events, as bytes. shape: of its errors."""

    read: Callable[[Body], Asked]
    whole: Callable[[Answered], dict[str, Any]]
    stream: Callable[[Answered], Iterable[bytes]]
    shape: Shape


def event(data: Any, name: str = "") -> bytes:
    """Write one server-sent event."""
    return (f"event: {name}\n".encode() if name else b"") + b"data: " + orjson.dumps(data) + b"\n\n"


def parts(text: str) -> Iterator[str]:
    """Cut a text into at most PART_COUNT parts at the borders of words; together they are the text."""
    words = WORD.findall(text)
    size = max(1, -(-len(words) // PART_COUNT))
    return ("".join(words[start : start + size]) for start in range(0, len(words), size))
