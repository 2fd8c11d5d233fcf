"""Process groups that must be gone at the end of a test."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterable

import psutil

LIMIT_S = 10.0


def living(groups: Iterable[int]) -> list[int]:
    """Processes of these groups that have not ended. A zombie has: whoever adopted it is slow, not it."""
    found = []
    wanted = set(groups)
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) in wanted and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


class Groups:
    """The groups that a test has seen."""

    def __init__(self, numbers: Iterable[int] = ()) -> None:
        self.numbers = set(numbers)

    def add(self, number: int) -> None:
        assert number > 1 and number != os.getpgrp()
        self.numbers.add(number)

    def __len__(self) -> int:
        return len(self.numbers)

    def __contains__(self, number: int) -> bool:
        return number in self.numbers

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait, blocking."""
        limit_s = time.monotonic() + LIMIT_S
        while not condition():
            assert time.monotonic() < limit_s, f"living: {living(self.numbers)}"
            time.sleep(0.01)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait while the loop turns."""
        limit_s = time.monotonic() + LIMIT_S
        while not condition():
            assert time.monotonic() < limit_s, f"living: {living(self.numbers)}"
            await asyncio.sleep(0.01)

    def check_gone(self) -> None:
        """All of them have ended, soon at the latest."""
        self.wait_until(lambda: not living(self.numbers))
