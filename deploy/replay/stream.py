"""A streamed answer, read as it comes: when tokens arrived, and what the server says at the end.

- Only the last event is parsed (and the first of a chat): the client shares its cores with what it measures.
- An event of tokens may bring several when the server could not send them one by one; `usage` tells their count.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import orjson

from .records import no_gaps

GAP_US_MAX = 2**32 - 1  # 71 minutes: what an array of them holds


@dataclass(frozen=True, kw_only=True)
class Told:
    """An answer so far. first_at_s, last_at_s: of the events that brought tokens; None without any."""

    token_count: int = 0
    first_at_s: float | None = None
    last_at_s: float | None = None
    gaps_us: array[int]
    error: str = ""

    @property
    def tpot_s(self) -> float | None:
        """Mean after the first token."""
        if self.first_at_s is None or self.last_at_s is None or self.token_count < 2:
            return None
        return (self.last_at_s - self.first_at_s) / (self.token_count - 1)


class TokenStream:
    """Server-sent events of one answer. opens_empty: the first may bring no token (a chat's role). is_done: [DONE]."""

    def __init__(self, *, opens_empty: bool = False) -> None:
        self._opens_empty = opens_empty
        self._rest = b""
        self._times: list[float] = []
        self._first = self._last = b""
        self.is_done = False

    def feed(self, data: bytes, at_s: float) -> None:
        """Bytes that have just come, in any pieces."""
        buffer = self._rest + data
        if b"\r" in buffer:
            buffer = buffer.replace(b"\r\n", b"\n")
        *events, self._rest = buffer.split(b"\n\n")
        for event in events:
            if event.startswith(b"data:"):
                self._add(event[5:].strip(), at_s)

    def _add(self, event: bytes, at_s: float) -> None:
        if event == b"[DONE]":
            self.is_done = True
            return
        self._times.append(at_s)
        self._first = self._first or event
        self._last = event

    def told(self) -> Told:
        """What has come, events without tokens left out."""
        times, last = self._times[:], _parsed(self._last)
        usage = last.get("usage") or {}
        if times and not last.get("choices"):
            times.pop()
        if times and self._opens_empty and not _has_text(_parsed(self._first)):
            times.pop(0)
        gaps_us = no_gaps()
        gaps_us.extend(min(round((after - before) * 1e6), GAP_US_MAX) for before, after in pairwise(times))
        return Told(
            token_count=usage.get("completion_tokens", len(times)),
            first_at_s=times[0] if times else None,
            last_at_s=times[-1] if times else None,
            gaps_us=gaps_us,
            error=_error(last),
        )


def _parsed(event: bytes) -> dict[str, Any]:
    """Without an event, one with tokens that says nothing more."""
    try:
        found = orjson.loads(event) if event else {"choices": [{}]}
    except orjson.JSONDecodeError:
        return {"error": event.decode(errors="replace")}
    return found if isinstance(found, dict) else {"error": str(found)}


def _error(event: dict[str, Any]) -> str:
    error = event.get("error")
    if not error:
        return ""
    return str(error.get("message", error) if isinstance(error, dict) else error)


def _has_text(event: dict[str, Any]) -> bool:
    choices = event.get("choices") or [{}]
    delta = choices[0].get("delta") or {}
    return any(delta.get(name) for name in ("content", "reasoning_content", "reasoning", "tool_calls"))
