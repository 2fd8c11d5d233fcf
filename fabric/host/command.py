"""Commands of ours as a person types them here, so that the next step can be copied from a message.

Texts name commands as `rollfab …`, in backticks; code that shows a text to a person puts in how the program is called.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
import textwrap
from pathlib import Path
from typing import Any, TypeVar, cast

T = TypeVar("T")
COMMAND = re.compile(r"`[^`\n]+`|export \S+")  # copied by those who read it
GLUE = "\0"  # a blank that no line is broken at


def command(words: str = "") -> str:
    """Return the words to type here to run a command of ours: a program outside the PATH is named by its path."""
    name = shutil.which("rollfab")
    own = next(
        (each for each in (Path(sys.argv[0]), Path(sys.executable).with_name("rollfab")) if _is_ours(each)), None
    )
    if own is None:
        typed = f"{shlex.quote(sys.executable)} -m rollfab"
    elif name is not None and os.path.samefile(name, own):
        typed = "rollfab"
    else:
        path = os.path.abspath(own)
        try:
            near = os.path.relpath(path)
        except OSError:  # the working directory has been deleted
            near = ".."
        typed = shlex.quote(path if near.startswith("..") else near)
    return f"{typed} {words}".rstrip()


def _is_ours(path: Path) -> bool:
    return path.name == "rollfab" and path.is_file() and os.access(path, os.X_OK)


def with_commands(shown: T) -> T:
    """Rewrite the quoted commands in a text, or in all texts of plain values (dicts, lists), as one types them here."""
    return cast(T, _put(shown, f"`{command()} "))


def plain_commands(text: str) -> str:
    """Undo `with_commands`, in a text that leaves this machine: it names commands as `rollfab …` again."""
    return text.replace(f"`{command()} ", "`rollfab ")


def _put(shown: Any, begin: str) -> Any:
    if isinstance(shown, str):
        return shown.replace("`rollfab ", begin)
    if isinstance(shown, dict):
        return {name: _put(each, begin) for name, each in shown.items()}
    return [_put(each, begin) for each in shown] if isinstance(shown, list | tuple) else shown


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
