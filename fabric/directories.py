"""Directories that a person names on the command line."""

from __future__ import annotations

from pathlib import Path

from .errors import ConfigError


def make_directory(path: Path, option: str) -> Path:
    """Make the directory that `option` gave, unless it is there.

    Raises:
        ConfigError: it cannot be one.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{option}: the directory {path} cannot be made: {error.strerror}; "
            "choose another or change its permissions",
            option=option,
        ) from error
    return path
