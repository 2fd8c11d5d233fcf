"""Work that may get stuck, in a thread that can be given up.

- The caller waits for the work as long as it makes progress, and `patience_s` longer; then it leaves the thread behind.
- A thread left behind ends at its next step. Until it has, no other work is begun: at most one is ever stuck.
- The thread is a daemon: it does not keep the process from ending.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from ...contract.errors import FabricError
from .invitations import CollectiveFailed

T = TypeVar("T")


class Progress:
    """How far the work is; its thread writes this, the waiting task reads it."""

    def __init__(self) -> None:
        self.step_count = 0
        self.is_given_up = False

    def step(self) -> None:
        """Note that a step is done.

        Raises:
            CollectiveFailed: nobody waits any more.
        """
        self.step_count += 1
        if self.is_given_up:
            raise CollectiveFailed("the round was given up")


class SideThread:
    """Runs one piece of work at a time."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._future: Future[Any] | None = None

    @property
    def is_busy(self) -> bool:
        """Whether work is under way, or left behind."""
        return self._future is not None and not self._future.done()

    async def run(self, work: Callable[[Progress], T], patience_s: float) -> T:
        """Run `work` in the thread, and return its result.

        Raises:
            CollectiveFailed: no step for `patience_s`, earlier work is still stuck, or `work` raised another error than
                a FabricError.
            FabricError: of `work`.
        """
        if self.is_busy:
            raise CollectiveFailed("an earlier round has not come back yet")
        progress: Progress = Progress()
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()  # so that giving up cannot cancel it while the thread runs
        self._future = future
        self._thread = threading.Thread(target=_work, args=(work, progress, future), name=self._name, daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            self._future = self._thread = None
            raise CollectiveFailed(f"there is no thread for the round: {error}") from error
        try:
            return await _result(future, progress, patience_s)
        finally:
            progress.is_given_up = True

    async def close(self, patience_s: float) -> None:
        """Wait for work that was given up to end, no longer than `patience_s`."""
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, patience_s)


def _work(work: Callable[[Progress], T], progress: Progress, future: Future[T]) -> None:
    try:
        result = work(progress)
    except FabricError as error:
        future.set_exception(error)
        return
    except BaseException as error:  # noqa: BLE001 - raised again, by the task that waits
        failure = CollectiveFailed(f"the group's work failed: {type(error).__name__}: {error}")
        failure.__cause__ = error
        future.set_exception(failure)
        return
    future.set_result(result)


async def _result(future: Future[T], progress: Progress, patience_s: float) -> T:
    wrapped = asyncio.wrap_future(future)
    wrapped.add_done_callback(lambda done: done.cancelled() or done.exception())  # also when nobody waits any more
    while True:
        before = progress.step_count
        await asyncio.wait({wrapped}, timeout=patience_s)
        if wrapped.done():
            return wrapped.result()
        if progress.step_count == before:
            raise CollectiveFailed(f"nothing moved for {patience_s:g} s")
