"""Speaks to a person: in lines as wide as the terminal, in which a command stays whole.

What goes into a file or a pipe is not broken: other programs read it.
"""

from __future__ import annotations

import re
import textwrap
from typing import Literal

from rich.text import Text

from ...fabric.contract.text import printable
from ...fabric.host.command import with_commands
from .printing import Console

COMMAND = re.compile(r"`[^`\n]+`|export \S+")  # copied by those who read it
GLUE = "\0"  # a blank that no line is broken at
STYLES = {"error": "bold red", "warning": "yellow"}


def wrapped(text: str, width: int, indent: int = 0) -> str:
    """Break a text at blanks into lines of at most `width` characters; a word or command is left whole.

    indent: of the lines that a line goes on in.
    """

    lines = COMMAND.sub(lambda found: found.group().replace(" ", GLUE), text).split("\n")
    whole = [
        line
        if len(line) <= width
        else textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False, subsequent_indent=" " * indent)
        for line in lines
    ]
    return "\n".join(whole).replace(GLUE, " ")


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
