"""The keys of the stand-in broker: what each type holds, when a key ends, and who waits for it."""

from __future__ import annotations

from asyncio import Future
from collections.abc import Callable
from copy import deepcopy
from typing import Any, TypeVar

from redis.exceptions import ResponseError

T = TypeVar("T")

WRONG_TYPE = "WRONGTYPE Operation against a key holding the wrong kind of value"


class Hash(dict[bytes, bytes]):
    """field → value"""

    type_name = "hash"


class SortedSet(dict[bytes, float]):
    """member → score"""

    type_name = "zset"

    def rows(self) -> list[tuple[float, bytes]]:
        """In their order."""
        return sorted((score, member) for member, score in self.items())


class List(list[bytes]):
    """The head first."""

    type_name = "list"


class Text(bytes):
    """A string."""

    type_name = "string"


Held = Hash | SortedSet | List | Text | Any


class Keyspace:
    """All keys. Containers that are empty are gone, but for streams.

    Args:
        wall_ms: the machine's time, by which keys end.
    """

    def __init__(self, wall_ms: Callable[[], float]) -> None:
        self.wall_ms = wall_ms
        self.held: dict[bytes, Held] = {}
        self.ends_ms: dict[bytes, float] = {}
        self.waiting: dict[bytes, list[Future[None]]] = {}  # who waits for a list or a stream

    def get(self, key: bytes, kind: type[T]) -> T | None:
        """What a key holds; None when there is none.

        Raises:
            ResponseError: it is of another type.
        """
        if self.ends_ms:
            self._end(key)
        found = self.held.get(key)
        if found is None or type(found) is kind:
            return found
        raise ResponseError(WRONG_TYPE)

    def make(self, key: bytes, kind: type[T]) -> T:
        """As `get`, where an empty one is made if there is none."""
        found = self.get(key, kind)
        if found is None:
            found = self.held[key] = kind()
        return found

    def is_there(self, key: bytes) -> bool:
        """Whether a key holds anything."""
        self._end(key)
        return key in self.held

    def names(self) -> list[bytes]:
        """Of all keys."""
        return [key for key in list(self.held) if self.is_there(key)]

    def put(self, key: bytes, value: bytes, ends_ms: float | None) -> None:
        """Set a string."""
        self.held[key] = Text(value)
        self.ends_ms.pop(key, None)
        if ends_ms is not None:
            self.ends_ms[key] = ends_ms

    def delete(self, key: bytes) -> bool:
        """Whether there was one."""
        was_there = self.is_there(key)
        self.held.pop(key, None)
        self.ends_ms.pop(key, None)
        if was_there:
            self.wake(key)
        return was_there

    def remember(self, prefix: str) -> dict[bytes, tuple[Held, float | None]]:
        """What a replica holds now of the keys that begin so, and when each ends."""
        names = [key for key in self.names() if key.startswith(prefix.encode())]
        return {key: (deepcopy(self.held[key]), self.ends_ms.get(key)) for key in names}

    def fall_back(self, prefix: str, before: dict[bytes, tuple[Held, float | None]]) -> None:
        """The replica takes over, with what it held of the keys that begin so."""
        for key in self.remember(prefix):
            self.delete(key)
        for key, (value, ends_ms) in before.items():
            self.held[key] = deepcopy(value)
            if ends_ms is not None:
                self.ends_ms[key] = ends_ms
            self.wake(key)

    def drop_empty(self, key: bytes, value: Any) -> None:
        """A container that holds nothing any more is gone."""
        if not value:
            self.held.pop(key, None)
            self.ends_ms.pop(key, None)

    def wake(self, key: bytes) -> None:
        """Whoever waits for this key looks again."""
        for future in self.waiting.get(key, ()):
            if not future.done():
                future.set_result(None)

    def _end(self, key: bytes) -> None:
        ends_ms = self.ends_ms.get(key)
        if ends_ms is not None and ends_ms <= self.wall_ms():
            self.held.pop(key, None)
            del self.ends_ms[key]
