"""Work in threads on what a caller has handed over: it is read while the call lasts, and never after it.

- `in_thread` ends when its thread has, also when it is cancelled: `asyncio.to_thread` would leave the thread behind,
  and a trainer that goes on in place would change what that is reading.
- A thread is asked to stop by `check`, which work calls between two pieces of what it reads.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable
from typing import TypeVar

from ...fabric.contract.errors import WeightError
from ...fabric.versions.snapshot import Check as Check

T = TypeVar("T")


async def in_thread(work: Callable[[Check], T]) -> T:
    """The result of `work`, which runs in a thread and has ended when this returns or raises, however it does.

    Raises:
        WeightError: nobody ran the event loop for a while, and `work` saw it.
    """
    loop, stop = asyncio.get_running_loop(), threading.Event()

    def check() -> None:
        # A signal's handler may have thrown its exception right through the loop: the call is over for its caller.
        if stop.is_set() or not loop.is_running():
            raise WeightError("publishing was interrupted, nothing was sent: publish again")

    # A future and no task: a loop that is closing cancels all tasks, and the thread would go on without one.
    future = loop.run_in_executor(None, contextvars.copy_context().run, work, check)
    try:
        return await asyncio.shield(future)
    finally:
        stop.set()
        while not future.done():
            with contextlib.suppress(asyncio.CancelledError):  # the first one is on its way already
                await asyncio.wait([future])
        future.cancelled() or future.exception()  # somebody has looked
