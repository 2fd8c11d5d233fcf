"""Tasks that run beside their owner: begun together, watched in one place, and ended with it.

The error of a helper ends its owner, at the owner's next `check`: never in the middle of what it does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from types import TracebackType
from typing import Any


class Helpers:
    """The helpers of one owner: `async with Helpers(self._beat(), self._listen()) as helpers`."""

    def __init__(self, *work: Coroutine[Any, Any, None]) -> None:
        self._tasks = [asyncio.create_task(each) for each in work]

    def check(self) -> None:
        """Raise the error of a helper that failed."""
        for task in self._tasks:
            if task.done() and not task.cancelled():
                task.result()

    def cancel(self) -> None:
        """Have all of them end."""
        for task in self._tasks:
            task.cancel()

    async def end(self) -> None:
        """Have all of them end, and wait for that."""
        self.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def __aenter__(self) -> Helpers:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.end()
