"""What a person types here to run a command of ours: the next step of a message can be copied from it.

Texts name commands as `rollfab …`, in backticks; whoever shows one to a person puts in how the program is called.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any, TypeVar, cast

__all__ = ["command", "with_commands"]

T = TypeVar("T")


def command(words: str = "") -> str:
    """What to type here to run a command of ours: a program that is not on the PATH is named by where it is."""
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
        near = os.path.relpath(path)
        typed = shlex.quote(path if near.startswith("..") else near)
    return f"{typed} {words}".rstrip()


def _is_ours(path: Path) -> bool:
    return path.name == "rollfab" and path.is_file() and os.access(path, os.X_OK)


def with_commands(shown: T) -> T:
    """A text whose quoted commands can be typed here; or plain values (dicts, lists) with every text so."""
    return cast(T, _put(shown, f"`{command()} "))


def _put(shown: Any, begin: str) -> Any:
    if isinstance(shown, str):
        return shown.replace("`rollfab ", begin)
    if isinstance(shown, dict):
        return {name: _put(each, begin) for name, each in shown.items()}
    return [_put(each, begin) for each in shown] if isinstance(shown, list | tuple) else shown
