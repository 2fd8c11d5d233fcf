"""Answers that their clients come back for: each is made once, however often it is asked for, and kept for a while.

- A future that nobody has asked for in ASKED_S is given up, and its slots are free: its client is gone.
- An answer is kept for ASKED_S after it was last asked for, as it may have been lost on the way; the oldest answers go
  first where there are more than KEPT_MAX, or more bytes than KEPT_BYTES_MAX.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.responses import Response

from ...fabric.host.helpers import end_all

ASKED_S = 120.0
KEPT_MAX = 4096
KEPT_BYTES_MAX = 256 << 20


@dataclass(slots=True)
class Future:
    """One answer. asked_s: when it was last asked for, on the loop's clock."""

    task: asyncio.Task[Response]
    asked_s: float


class Futures:
    """All futures of a process, by name."""

    def __init__(self) -> None:
        self._futures: dict[str, Future] = {}
        self._kept: dict[str, int] = {}  # answers that are there, the oldest first: their bytes
        self._kept_bytes = 0
        self._sweep: asyncio.TimerHandle | None = None

    def has(self, name: str) -> bool:
        """Tell whether there is one of this name."""
        return name in self._futures

    def begin(self, name: str, work: Coroutine[Any, Any, Response], on_end: Callable[[], None]) -> None:
        """Have `work` done in the background. on_end: called once it has ended, in whatever way."""
        loop = asyncio.get_running_loop()
        task = loop.create_task(work)
        task.add_done_callback(lambda _: on_end())
        task.add_done_callback(partial(self._keep, name))
        self._futures[name] = Future(task, loop.time())
        if self._sweep is None:
            self._sweep = loop.call_later(ASKED_S / 4, self._give_up)

    async def ended(self, name: str, wait_s: float) -> asyncio.Task[Response] | None:
        """Wait for an answer; None: it is not there yet. Raises KeyError: there is no such future."""
        future, loop = self._futures[name], asyncio.get_running_loop()
        future.asked_s = loop.time()
        await asyncio.wait((future.task,), timeout=wait_s)
        future.asked_s = loop.time()
        return future.task if future.task.done() else None

    def cancel(self, name: str) -> None:
        """Give a future up, if there is one."""
        future = self._futures.pop(name, None)
        if future is not None:
            self._kept_bytes -= self._kept.pop(name, 0)
            future.task.cancel()

    async def close(self) -> None:
        """Give all of them up."""
        if self._sweep is not None:
            self._sweep.cancel()
        futures, self._futures = self._futures, {}
        await end_all([each.task for each in futures.values()])

    def _keep(self, name: str, task: asyncio.Task[Response]) -> None:
        """Keep an answer that is there now, and forget the oldest ones that are too many."""
        if task.cancelled():
            return
        size = 0 if task.exception() is not None else len(task.result().body)
        if name not in self._futures:
            return
        self._kept[name] = size
        self._kept_bytes += size
        while len(self._kept) > KEPT_MAX or (self._kept_bytes > KEPT_BYTES_MAX and len(self._kept) > 1):
            self.cancel(next(iter(self._kept)))

    def _give_up(self) -> None:
        loop = asyncio.get_running_loop()
        for name in [name for name, each in self._futures.items() if loop.time() - each.asked_s > ASKED_S]:
            self.cancel(name)
        self._sweep = loop.call_later(ASKED_S / 4, self._give_up) if self._futures else None
