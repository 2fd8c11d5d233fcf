"""Speaks to a person: in lines as wide as the terminal, in which a command stays whole.

What goes into a file or a pipe is not broken: other programs read it.
"""

from __future__ import annotations

from typing import Literal

from rich.text import Text

from ...fabric.contract.text import printable
from ...fabric.host.command import with_commands, wrapped
from .printing import Console

STYLES = {"error": "bold red", "warning": "yellow"}


def say_nothing(text: str) -> None:
    """Say that there is nothing to list, to the person alone: what goes into a pipe stays empty."""
    say(Console(stderr=True), printable(with_commands(text)))


def say(console: Console, text: str, kind: Literal["", "error", "warning"] = "", *, indent: int = 0) -> None:
    """Print a message, with what it is before it. The text must be printable (see fabric/contract/text.py).

    indent: as in `wrapped`.
    """
    told = f"{kind}: {text}" if kind else text
    shown = Text(wrapped(told, console.width, indent) if console.is_terminal else told)
    if kind:
        shown.stylize(STYLES[kind], 0, len(kind) + 1)
    console.print(shown, highlight=False, soft_wrap=True)
