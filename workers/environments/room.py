"""Memory for the snapshots that pass through one agent: bounded in their sum, whoever makes them.

- A snapshot is weighed before it is read; its share of the room is its own from then until it is saved, or restored.
- One that finds no room within a while is left: the trajectory goes on without it, from an older one or by its turns.
"""

from __future__ import annotations

import asyncio
import logging
from types import TracebackType

log = logging.getLogger(__name__)

HELD_PER_BYTE = 24  # of JSON: empty lists in a list take that many bytes each when they are decoded
WAIT_S = 2.0  # for others to be saved, or restored: nothing of theirs waits for foreign code while it is read


class Room:
    """A sum of bytes that may be held at once."""

    def __init__(self, bytes_max: int) -> None:
        self._left = self._bytes_max = bytes_max
        self._changed = asyncio.Event()
        self.refused_count = 0

    def share(self) -> Share:
        """A part of it that is given back when its block ends."""
        return Share(self)

    async def take(self, size_bytes: int) -> bool:
        """Take what so many bytes of JSON need; False: there was no room for them for a while."""
        need = min(size_bytes * HELD_PER_BYTE, self._bytes_max)
        try:
            async with asyncio.timeout(WAIT_S):
                while self._left < need:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            self.refused_count += 1
            if self.refused_count & (self.refused_count - 1) == 0:  # the first, and ever fewer after it
                log.warning("snapshots.no_room", extra={"bytes": size_bytes, "left_count": self.refused_count})
            return False
        self._left -= need
        return True

    def give(self, size_bytes: int) -> None:
        """Give back what was taken for so many bytes."""
        self._left += min(size_bytes * HELD_PER_BYTE, self._bytes_max)
        self._changed.set()


class Share:
    """What one snapshot holds of the room."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._held_bytes = 0
        self.is_refused = False

    async def take(self, size_bytes: int) -> bool:
        """Whether there is room for it."""
        self.is_refused = not await self._room.take(size_bytes)
        if not self.is_refused:
            self._held_bytes += size_bytes
        return not self.is_refused

    def __enter__(self) -> Share:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._room.give(self._held_bytes)
