"""Exit codes, and the end by Ctrl-C whenever it comes. Light imports alone: this is read before anything else.

A command loads (leaving_at_once), runs (KeyboardInterrupt), has its coroutines run (run_async), and ends, after which
the interpreter shuts down (ending_by_interrupt).
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")

INTERRUPTED = 130  # as shells have it: 128 and the number of SIGINT


@contextmanager
def leaving_at_once() -> Iterator[None]:
    """End the process at Ctrl-C while the block loads libraries: some swallow it, and go on loaded by halves.

    Nothing may be held yet. A signal that somebody else handles, or wants ignored, is left to him.
    """
    if not _is_ours():
        yield
        return
    signal.signal(signal.SIGINT, _leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def ending_by_interrupt() -> Iterator[None]:
    """End the process with INTERRUPTED where Ctrl-C ends the block, and at Ctrl-C while the interpreter shuts down."""
    try:
        yield
    except BaseException as error:
        if is_interrupt(error):
            sys.exit(INTERRUPTED)
        raise
    finally:
        if _is_ours():  # what the command held is given back
            signal.signal(signal.SIGINT, _leave)


def is_interrupt(error: BaseException | None) -> bool:
    """Whether Ctrl-C is behind it: a library that was loading, or a question, may have made something else of it."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def run_async(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine as asyncio.run does, and bear Ctrl-C also while its loop is made and closed.

    Interrupted there, asyncio leaves halves of a loop, which complain as they are collected.

    Raises:
        KeyboardInterrupt: Ctrl-C came, and the coroutine has been cancelled, or was never begun; or it came twice.
    """
    import asyncio

    if not _is_ours():
        return asyncio.run(work)  # noqa: TID251
    count = 0
    cancels: list[Callable[[], object]] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal count
        count += 1
        if count > 1:
            raise KeyboardInterrupt
        for cancel in cancels:
            cancel()

    async def main() -> tuple[T, int]:
        if count:
            raise asyncio.CancelledError
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        cancels.append(lambda: loop.call_soon_threadsafe(task.cancel))
        try:
            return await work, count
        finally:
            cancels.clear()

    signal.signal(signal.SIGINT, interrupt)
    try:
        with asyncio.Runner() as runner:
            result, heard_count = runner.run(main())
    except asyncio.CancelledError:
        if count:
            raise KeyboardInterrupt from None
        raise
    finally:
        work.close()  # where it was never begun
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if count > heard_count:  # it came as the loop was closed
        raise KeyboardInterrupt
    return result


def _is_ours() -> bool:
    is_main = threading.current_thread() is threading.main_thread()
    return is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def _leave(number: int, frame: FrameType | None) -> None:
    os._exit(INTERRUPTED)
