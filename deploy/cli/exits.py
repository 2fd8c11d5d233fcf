"""Exit codes, and the end by Ctrl-C while libraries load. Light imports alone: this is read before anything else."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

INTERRUPTED = 130  # as shells have it: 128 and the number of SIGINT


@contextmanager
def leaving_at_once() -> Iterator[None]:
    """End the process at Ctrl-C while the block loads libraries: some swallow it, and go on loaded by halves.

    Nothing may be held yet. A signal that somebody else handles, or wants ignored, is left to him.
    """
    is_ours = threading.current_thread() is threading.main_thread()
    if not is_ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
