"""Answers that their clients come back for: each is made once, however often it is asked for, and kept for a while.

- A promise that nobody has asked for in ASKED_S is given up, and its slots are free: its client is gone.
- An answer is kept for ASKED_S after it was last asked for, as it may have been lost on the way; the oldest answers go
  first where there are more than KEPT_MAX.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from ...fabric.host.helpers import end_all

ASKED_S = 120.0
KEPT_MAX = 4096


@dataclass(slots=True)
class Promise:
    """One answer. asked_s: when it was last asked for, on the loop's clock."""

    task: asyncio.Task[Any]
    asked_s: float


class Promises:
    """All promises of a process, by name."""

    def __init__(self) -> None:
        self._promises: dict[str, Promise] = {}
        self._sweep: asyncio.TimerHandle | None = None

    def has(self, name: str) -> bool:
        """Whether there is one of this name."""
        return name in self._promises

    def begin(self, name: str, work: Coroutine[Any, Any, Any], on_end: Callable[[], None]) -> None:
        """Have `work` done in the background. on_end: called once it has ended, in whatever way."""
        loop = asyncio.get_running_loop()
        task = loop.create_task(work)
        task.add_done_callback(_note)
        task.add_done_callback(lambda _: on_end())
        self._promises[name] = Promise(task, loop.time())
        self._make_room()
        if self._sweep is None:
            self._sweep = loop.call_later(ASKED_S / 4, self._give_up)

    async def ended(self, name: str, wait_s: float) -> asyncio.Task[Any] | None:
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
            promise.task.cancel()

    async def close(self) -> None:
        """Give all of them up."""
        if self._sweep is not None:
            self._sweep.cancel()
        promises, self._promises = self._promises, {}
        await end_all([each.task for each in promises.values()])

    def _make_room(self) -> None:
        """Forget the oldest answers that are too many."""
        over = len(self._promises) - KEPT_MAX
        for name in [name for name, each in self._promises.items() if each.task.done()][: max(0, over)]:
            del self._promises[name]

    def _give_up(self) -> None:
        loop = asyncio.get_running_loop()
        for name in [name for name, each in self._promises.items() if loop.time() - each.asked_s > ASKED_S]:
            self.cancel(name)
        self._sweep = loop.call_later(ASKED_S / 4, self._give_up) if self._promises else None


def _note(task: asyncio.Task[Any]) -> None:
    """Look at an error: nobody may ever ask for it."""
    if not task.cancelled():
        task.exception()
