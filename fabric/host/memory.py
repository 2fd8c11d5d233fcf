"""The memory that processes hold in RAM, from /proc: other systems than Linux do not tell it so.

Pages that processes share count for each of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Collection

from ..contract.clock import Clock

LOOK_S = 10.0  # a look reads a line for each of its processes and of their threads: 10 us each


def resident_bytes(pid: int | str = "self") -> int | None:
    """Return the memory of one process; None: it has ended, or this is no Linux."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            words = file.read().rpartition(b")")[2].split()  # its name, in brackets before, may hold anything
        return int(words[21]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return None


class HeldMemory:
    """The memory of this process and of those that it started, and theirs, looked at now and then in a thread.

    resident_bytes: of RAM. device_bytes: of devices. None: not told, or not looked at yet.
    """

    def __init__(self, clock: Clock, ask_devices: Callable[[Collection[int]], int | None]) -> None:
        """Make it. ask_devices: returns the device memory of the processes of these ids."""
        self.resident_bytes: int | None = None
        self.device_bytes: int | None = None
        self._clock = clock
        self._ask_devices = ask_devices

    async def follow(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            await asyncio.to_thread(self.look)
            await self._clock.sleep(LOOK_S)

    def look(self) -> None:
        found = _family(os.getpid())
        self.resident_bytes = sum(found.values()) or None
        self.device_bytes = self._ask_devices(found or (os.getpid(),))


def _family(pid: int) -> dict[int, int]:
    """Return the memory of a process and of all below it, by their ids."""
    found: dict[int, int] = {}
    left = [pid]
    while left:
        name = left.pop()
        if name not in found and (row := resident_bytes(name)) is not None:
            found[name] = row
            left += _children(name)
    return found


def _children(pid: int) -> list[int]:
    """Return whom the threads of a process started; none where it has ended, or the kernel does not tell it."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                found += map(int, file.read().split())
    return found
