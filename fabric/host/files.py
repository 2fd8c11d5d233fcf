"""Reads a file that somebody named, and TOML as people write it."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from ..contract.errors import ConfigError

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
        ValueError: it is none; it is nested too deep, or a number in it is beyond all bounds.
    """
    try:
        tables = tomllib.loads(data.decode("utf-8"))
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
    open_: list[Any] = [tables]
    while open_:
        each = open_.pop()
        if isinstance(each, int) and each.bit_length() > WHOLE_BITS:
            raise ValueError(f"a whole number in it has more than {WHOLE_BITS} bits")
        open_ += each.values() if isinstance(each, dict) else each if isinstance(each, list) else ()
    return tables
