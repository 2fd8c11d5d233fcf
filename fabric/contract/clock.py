"""Time as a parameter: the one place that reads a clock.

Wire times are integer milliseconds of the broker's clock (scripts read it themselves). Durations inside a
process are float seconds of the monotonic clock below. Code that takes a Clock can be simulated.
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """All that a component may know about time."""

    def now_s(self) -> float:
        """Return monotonic seconds; only differences mean anything."""
        ...

    def wall_ms(self) -> int:
        """Return wall-clock milliseconds, for display and logs, never for decisions."""
        ...

    async def sleep(self, duration_s: float) -> None:
        """Wait without blocking the loop."""
        ...


class SystemClock:
    """The machine's clocks."""

    def now_s(self) -> float:
        return time.monotonic()

    def wall_ms(self) -> int:
        return time.time_ns() // 1_000_000

    async def sleep(self, duration_s: float) -> None:
        await asyncio.sleep(duration_s)


class LoopClock(SystemClock):
    """The clock of the loop that runs: the machine's, but in a simulation."""

    def now_s(self) -> float:
        return asyncio.get_running_loop().time()


def wall_offset_ns() -> int:
    """Return the wall clock less the monotonic one, nanoseconds: to show others when a measured time was."""
    return time.time_ns() - time.monotonic_ns()
