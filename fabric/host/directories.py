"""Directories that a person names on the command line, and files that are their owner's alone."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from ..contract.errors import ConfigError


def make_directory(path: Path, option: str) -> Path:
    """Make the directory that `option` gave, unless it is there.

    Raises:
        ConfigError: it cannot be one.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{option}: the directory {path} cannot be made: {error.strerror}; "
            "choose another or change its permissions",
            option=option,
        ) from error
    return path


def owner_only(path: str, flags: int) -> int:
    """Opener for `open`: no other user may read or write the file, whatever the umask is or an older file's mode was.

    Raises:
        OSError: it cannot be opened, is a link, or is another user's.
    """
    handle = os.open(path, flags | os.O_NOFOLLOW, 0o600)
    try:
        os.fchmod(handle, 0o600)
    except OSError:
        os.close(handle)
        raise
    return handle


def write_private(path: Path, text: str) -> None:
    """Write a file whole or not at all, never readable by other users, not for a moment.

    Raises:
        OSError: it cannot be written.
    """
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with open(fresh, "x", opener=owner_only) as file:
        file.write(text)
    fresh.replace(path)
