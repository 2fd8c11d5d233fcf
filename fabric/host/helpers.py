"""Tasks that run beside their owner: begun together, watched in one place, and ended with it.

The error of a helper ends its owner, at the owner's next `check` or at the end: never in the middle of a step. An owner
without steps of its own waits in `watch`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from types import TracebackType
from typing import Any


async def end_all(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel tasks and wait for their end; nobody sees their errors."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def serve_together(stop: asyncio.Event, *work: Coroutine[Any, Any, None]) -> None:
    """Run coroutines that end when `stop` is set; the first that ends sets it.

    Raises an error of theirs, when all have ended: a server logs a traceback where its loop ends before it.
    """
    tasks = [asyncio.create_task(each) for each in work]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    stop.set()
    await asyncio.wait(tasks)
    for task in tasks:
        task.result()


class Helpers:
    """The helpers of one owner: `async with Helpers(self._beat(), self._listen()) as helpers`."""

    def __init__(self, *work: Coroutine[Any, Any, None]) -> None:
        self._tasks = [asyncio.create_task(each) for each in work]

    @property
    def error(self) -> BaseException | None:
        """Return the error that ended a helper, if any."""
        ended = (task.exception() for task in self._tasks if task.done() and not task.cancelled())
        return next((error for error in ended if error is not None), None)

    def check(self) -> None:
        """Raise the error of a helper that failed."""
        if (error := self.error) is not None:
            raise error

    async def watch(self, stop: asyncio.Event | None = None) -> None:
        """Wait until `stop` is set, or a helper ends; raise the error of a helper that failed. stop None: never set."""
        stopping = asyncio.create_task((stop or asyncio.Event()).wait())
        try:
            await asyncio.wait([stopping, *self._tasks], return_when=asyncio.FIRST_COMPLETED)
        finally:
            await end_all([stopping])
        self.check()

    async def end(self) -> None:
        await end_all(self._tasks)

    async def __aenter__(self) -> Helpers:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.end()
        if kind is None:
            self.check()
