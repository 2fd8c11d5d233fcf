"""Waiting at several shards of a Redis Cluster, where no command may name keys of more than one slot.

- One task waits at each shard; the first that finds something ends the others. That loses nothing: XREAD, which waits
  at a stream, takes nothing, and a bell that was taken for nobody is only a hint (queue/keys.py).
- On a single broker one command names all shards, and there is one wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, TypeVar

from ...host.helpers import end_all

T = TypeVar("T")


async def first_found(waits: Sequence[Coroutine[Any, Any, Iterable[T] | None]]) -> list[T]:
    """Return the findings of the first of several waits, and of others that ended meanwhile; nothing if none finds any.

    Waits that still run are cancelled, so no wait may record what it has read: the caller does that.
    Raises the error of a wait unless another one has found something.
    """
    if len(waits) == 1:
        return list(await waits[0] or ())
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    waiting = set(tasks)
    try:
        while waiting:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if any(task.exception() or task.result() for task in done):
                break
    finally:
        await end_all(tasks)
    ended = [task for task in tasks if not task.cancelled()]
    found = [row for task in ended if task.exception() is None for row in task.result() or ()]
    return found or [row for task in ended for row in task.result() or ()]
