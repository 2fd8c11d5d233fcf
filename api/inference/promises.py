"""Answers that their clients come back for: each is made once, however often it is asked for, and kept for a while.

- A promise that nobody has asked for in ASKED_S is given up, and its slots are free: its client is gone.
- An answer is kept for ASKED_S after it was last asked for, as it may have been lost on the way; the oldest answers go
  first where there are more than KEPT_MAX, or more bytes than KEPT_BYTES_MAX.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any

from ...fabric.host.helpers import end_all

ASKED_S = 120.0
KEPT_MAX = 4096
KEPT_BYTES_MAX = 256 << 20


@dataclass(slots=True)
class Promise:
    """One answer. asked_s: when it was last asked for, on the loop's clock."""

    task: asyncio.Task[bytes]
    asked_s: float


class Promises:
    """All promises of a process, by name."""

    def __init__(self) -> None:
        self._promises: dict[str, Promise] = {}
        self._kept: dict[str, int] = {}  # answers that are there, the oldest first: their bytes
        self._kept_bytes = 0
        self._sweep: asyncio.TimerHandle | None = None

    def has(self, name: str) -> bool:
        """Whether there is one of this name."""
        return name in self._promises

    def begin(self, name: str, work: Coroutine[Any, Any, bytes], on_end: Callable[[], None]) -> None:
        """Have `work` done in the background. on_end: called once it has ended, in whatever way."""
        loop = asyncio.get_running_loop()
        task = loop.create_task(work)
        task.add_done_callback(lambda _: on_end())
        task.add_done_callback(partial(self._keep, name))
        self._promises[name] = Promise(task, loop.time())
        if self._sweep is None:
            self._sweep = loop.call_later(ASKED_S / 4, self._give_up)

    async def ended(self, name: str, wait_s: float) -> asyncio.Task[bytes] | None:
        """Wait for an answer; None: it is not there yet. Raises KeyError: there is no such promise."""
        promise, loop = self._promises[name], asyncio.get_running_loop()
        promise.asked_s = loop.time()
        await asyncio.wait((promise.task,), timeout=wait_s)
        promise.asked_s = loop.time()
        return promise.task if promise.task.done() else None

    def cancel(self, name: str) -> None:
        """Give a promise up, if there is one."""
        promise = self._promises.pop(name, None)
        if promise is not None:
            self._kept_bytes -= self._kept.pop(name, 0)
            promise.task.cancel()

    async def close(self) -> None:
        """Give all of them up."""
        if self._sweep is not None:
            self._sweep.cancel()
        promises, self._promises = self._promises, {}
        await end_all([each.task for each in promises.values()])

    def _keep(self, name: str, task: asyncio.Task[bytes]) -> None:
        """Keep an answer that is there now, and forget the oldest ones that are too many."""
        if task.cancelled():
            return
        size = 0 if task.exception() is not None else len(task.result())
        if name not in self._promises:
            return
        self._kept[name] = size
        self._kept_bytes += size
        while len(self._kept) > KEPT_MAX or (self._kept_bytes > KEPT_BYTES_MAX and len(self._kept) > 1):
            self.cancel(next(iter(self._kept)))

    def _give_up(self) -> None:
        loop = asyncio.get_running_loop()
        for name in [name for name, each in self._promises.items() if loop.time() - each.asked_s > ASKED_S]:
            self.cancel(name)
        self._sweep = loop.call_later(ASKED_S / 4, self._give_up) if self._promises else None
