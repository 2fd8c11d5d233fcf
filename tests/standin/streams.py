"""Streams of the stand-in broker, with their consumer groups."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from typing import Any

from redis.exceptions import ResponseError

Id = tuple[int, int]
FIRST, LAST = (0, 0), (1 << 64, 0)


@dataclass(slots=True)
class Pending:
    """An entry that a consumer was given and has not acknowledged."""

    consumer: bytes
    given_ms: float
    count: int = 1


@dataclass(slots=True)
class ConsumerGroup:
    """Who has been given what."""

    last: Id
    pending: dict[Id, Pending] = field(default_factory=dict)
    seen_ms: dict[bytes, float] = field(default_factory=dict)  # consumer → when it asked last

    def held_by(self, consumer: bytes) -> list[Id]:
        """In their order."""
        return sorted(entry for entry, each in self.pending.items() if each.consumer == consumer)


class Stream:
    """Entries by id, and the groups that read them."""

    type_name = "stream"

    def __init__(self) -> None:
        self.ids: list[Id] = []
        self.entries: dict[Id, list[bytes]] = {}
        self.last: Id = FIRST
        self.groups: dict[bytes, ConsumerGroup] = {}

    def add(self, fields: list[bytes], wall_ms: int) -> Id:
        """Append an entry; its id is above all before it, whatever the time is."""
        entry = (wall_ms, 0) if wall_ms > self.last[0] else (self.last[0], self.last[1] + 1)
        self.last = entry
        self.ids.append(entry)
        self.entries[entry] = fields
        return entry

    def delete(self, entry: Id) -> bool:
        """Whether it was there."""
        if self.entries.pop(entry, None) is None:
            return False
        del self.ids[bisect_left(self.ids, entry)]
        return True

    def trim(self, count: int) -> None:
        """Keep the newest."""
        over = len(self.ids) - count
        if over > 0:
            for entry in self.ids[:over]:
                del self.entries[entry]
            del self.ids[:over]

    def after(self, last: Id, count: int | None) -> list[Id]:
        """Ids of entries above `last`."""
        first = bisect_right(self.ids, last)
        return self.ids[first : None if count is None else first + count]

    def between(self, first: Id, last: Id) -> list[Id]:
        """Ids of entries in this range, its ends too."""
        return self.ids[bisect_left(self.ids, first) : bisect_right(self.ids, last)]

    def row(self, entry: Id) -> list[Any]:
        """As it is sent; without fields where it was deleted."""
        fields = self.entries.get(entry)
        return [id_text(entry), None if fields is None else list(fields)]


def id_text(entry: Id) -> bytes:
    """As Redis writes it."""
    return b"%d-%d" % entry


def read_id(text: bytes, *, is_end: bool = False) -> Id:
    """An id, whole or without its second number, or an end of a range.

    Raises:
        ResponseError: it is none.
    """
    if text in (b"-", b"+"):
        return FIRST if text == b"-" else LAST
    head, dash, tail = text.partition(b"-")
    try:
        return int(head), int(tail) if dash else (1 << 64 if is_end else 0)
    except ValueError:
        raise ResponseError("ERR Invalid stream ID specified as stream command argument") from None
