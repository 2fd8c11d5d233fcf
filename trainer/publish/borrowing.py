"""Work in threads on a caller's data: a thread reads it while the call lasts, and never after it.

- `in_thread` ends when its thread has, also when it is cancelled: `asyncio.to_thread` would leave the thread behind,
  and a trainer that updates in place would change the data that the thread reads.
- `check` asks a thread to stop; the work calls it between two pieces of the data.
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
    """Run `work` in a thread and return its result; the thread has ended when this returns or raises, in any case.

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
            with contextlib.suppress(asyncio.CancelledError):  # the first cancellation is on its way already
                await asyncio.wait([future])
        future.cancelled() or future.exception()  # somebody has looked
