"""Reads a file that somebody named, and TOML as people write it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

from ..contract.errors import ConfigError

PLACE = re.compile(r"\(at (line \d+, column \d+)\)$")
TOML_FAULTS = {  # how the library's texts begin
    "Cannot ": "a setting or table is there twice",
    "Duplicate": "a setting is there twice",
    "Expected '=' ": "a name has no = and value after it",
    "Expected ']": "a table's name has no ] at its end",
    "Expected newline": "more stands on the line than one setting",
    "Found invalid character": "a text has no end on its line",
    "Illegal character": "a character may not stand there",
    "Invalid date": "there is no such date or time",
    "Invalid hex": "there is no such character",
    "Invalid initial": "a name is missing, or has to stand in quotes",
    "Invalid statement": "this is neither name = value nor [table]",
    "Invalid value": "a value is missing, or is a text without quotes",
    "Unclosed": "a list or table has no bracket at its end",
    "Unescaped": r"a \ in a text begins nothing: write \\, or the text in single quotes",
    "Unterminated": "a text has no quotes at its end",
}
WHOLE_BITS = 1000  # what fits into a float: a number above it has no place in any bound


def read_regular(path: Path, bytes_max: int) -> bytes:
    """Read a regular file: a pipe would be waited for, a device read without end.

    Raises:
        ConfigError: it is none, or larger than `bytes_max`.
        OSError: it is not there, or cannot be read.
    """
    size = path.stat().st_size
    if not path.is_file():
        raise ConfigError(f"{path} cannot be read: it is no regular file")
    if size > bytes_max:
        raise ConfigError(f"{path} has {size:,} bytes, and may have {bytes_max:,}")
    return path.read_bytes()


def parse_toml(data: bytes) -> dict[str, Any]:
    """Parse TOML.

    Raises:
        ValueError: it is none, and where; it is nested too deep, or a number in it is beyond all bounds.
    """
    try:
        tables = tomllib.loads(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(f"line {line} is no UTF-8 text: save the file as UTF-8") from error
    except tomllib.TOMLDecodeError as error:
        raise ValueError(_plain(str(error), data)) from error
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
    open_: list[Any] = [tables]
    while open_:
        each = open_.pop()
        if isinstance(each, int) and each.bit_length() > WHOLE_BITS:
            raise ValueError(f"a whole number in it has more than {WHOLE_BITS} bits")
        open_ += each.values() if isinstance(each, dict) else each if isinstance(each, list) else ()
    return tables


def _plain(said: str, data: bytes) -> str:
    """Put into plain words, with the next step, what the library says of a text that is no TOML."""
    place = PLACE.search(said)
    where = place[1] if place else f"line {len(data.splitlines())}, its end"
    what = next((ours for theirs, ours in TOML_FAULTS.items() if said.startswith(theirs)), "it cannot be read there")
    return f"{where}: {what}. Mend the file there"
