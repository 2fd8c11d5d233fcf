"""Memory for the snapshots that pass through one agent: bounded in sum over all environments.

- A snapshot is weighed before it is read; it holds its share of the room from then until it is saved, or restored.
- A snapshot that finds no room within WAIT_S is dropped: a take-over goes on from an older one, or by the turns.
"""

from __future__ import annotations

import asyncio
import logging
from types import TracebackType

log = logging.getLogger(__name__)

HELD_PER_BYTE = 24  # bytes of memory for a byte of JSON: so many for each byte of empty lists in a list, decoded
WAIT_S = 2.0  # for other snapshots to be saved or restored: none of them waits for foreign code meanwhile


class Room:
    """A sum of bytes that may be held at once."""

    def __init__(self, bytes_max: int) -> None:
        self._left = self._bytes_max = bytes_max
        self._changed = asyncio.Event()
        self.refused_count = 0

    def share(self) -> Share:
        """Make a share of the room, which gives its bytes back when its `with` block ends."""
        return Share(self)

    async def take(self, size_bytes: int) -> bool:
        """Take the memory that `size_bytes` of JSON need; return False if there was no room within WAIT_S."""
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
        """Give back the memory taken for `size_bytes` of JSON."""
        self._left += min(size_bytes * HELD_PER_BYTE, self._bytes_max)
        self._changed.set()


class Share:
    """The part of the room that one snapshot holds."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._held_bytes = 0
        self.is_refused = False

    async def take(self, size_bytes: int) -> bool:
        """Take memory for `size_bytes` of JSON; return whether there was room."""
        self.is_refused = not await self._room.take(size_bytes)
        if not self.is_refused:
            self._held_bytes += size_bytes
        return not self.is_refused

    def __enter__(self) -> Share:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._room.give(self._held_bytes)
