"""The `rollfab` command, also as `python -m rollfab`: an interrupt while it loads ends it without a word."""

from __future__ import annotations

import os
import signal
from typing import Any

from .deploy.cli.exits import INTERRUPTED


def main() -> None:
    """Entry point: load the commands, and run the one that was typed."""
    is_heard = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # else somebody wants it ignored
    if is_heard:
        signal.signal(signal.SIGINT, _leave)
    from .deploy import main as cli

    if is_heard:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    cli.main()


def _leave(*_: Any) -> None:
    os._exit(INTERRUPTED)  # nothing is held yet


if __name__ == "__main__":
    main()
