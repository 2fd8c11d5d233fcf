"""Shows how far something is that takes long: a bar on the terminal's stderr after a second; anywhere else, nothing."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from .printing import Console

AFTER_S = 1.0  # what is done sooner needs no bar

Tell = Callable[[int, int], None]


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
    timer = threading.Timer(AFTER_S, bar.start)
    timer.daemon = True
    timer.start()
    try:
        yield lambda done, whole: bar.update(task, completed=done, total=whole)
    finally:
        timer.cancel()
        timer.join()
        bar.stop()
