"""Shows how far something is that takes long: a bar on the terminal's stderr after a second; anywhere else, nothing."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, Protocol

from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from .printing import Console

AFTER_S = 1.0  # what is done sooner needs no bar


class Tell(Protocol):
    """Moves the bar to so many of so many. what: is done now; empty: what was done before."""

    def __call__(self, done: float, whole: float | None, what: str = "") -> None: ...


@contextmanager
def progress(
    what: str, *, unit: Literal["bytes", "count", ""] = "", total: int | None = None, is_shown: bool = True
) -> Iterator[Tell]:
    """Show a bar meanwhile; the function given moves it, to so many of so many. unit: empty: only the time is known."""
    columns = {"bytes": (DownloadColumn(),), "count": (MofNCompleteColumn(),), "": ()}[unit]
    console = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        *columns,
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not is_shown or not console.is_terminal,
        redirect_stdout=sys.stdout.isatty(),  # what is printed beside it goes above it, and into a pipe as it is
    )
    task = bar.add_task(what, total=total)

    def tell(done: float, whole: float | None, what: str = "") -> None:
        named: dict[str, Any] = {"description": what} if what else {}
        bar.update(task, completed=done, total=whole, **named)

    timer = threading.Timer(AFTER_S, bar.start)
    timer.daemon = True
    timer.start()
    try:
        yield tell
    finally:
        timer.cancel()
        timer.join()
        bar.stop()
