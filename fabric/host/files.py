"""Reads a file that somebody named."""

from __future__ import annotations

from pathlib import Path

from ..contract.errors import ConfigError


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
