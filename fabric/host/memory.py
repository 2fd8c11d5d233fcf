"""The memory that processes hold in RAM, from /proc: other systems than Linux do not tell it so.

Pages that processes share count for each of them.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Collection

from ..contract.clock import Clock

LOOK_S = 10.0  # a look reads a line for each process of this machine: 20 us each


def resident_bytes(pid: int | str = "self") -> int | None:
    """Return the memory of one process; None: it is not told."""
    found = _read(pid)
    return found[1] if found is not None else None


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
        """Look once."""
        found = _family(os.getpid())
        self.resident_bytes = sum(found.values()) or None
        self.device_bytes = self._ask_devices(found or (os.getpid(),))


def _family(pid: int) -> dict[int, int]:
    """Return the memory of a process and of all below it, by their ids."""
    try:
        names = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return {}
    rows = {name: row for name in names if (row := _read(name)) is not None}
    children: dict[int, list[int]] = {}
    for name, (parent, _) in rows.items():
        children.setdefault(parent, []).append(name)
    found: dict[int, int] = {}
    left = [pid]
    while left:
        name = left.pop()
        if name in rows and name not in found:
            found[name] = rows[name][1]
            left += children.get(name, [])
    return found


def _read(pid: int | str) -> tuple[int, int] | None:
    """Read a process' parent and its memory; None: it has ended, or this is no Linux."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            words = file.read().rpartition(b")")[2].split()  # its name, in brackets before, may hold anything
        return int(words[1]), int(words[21]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return None
