"""Directories that a person names on the command line, and files that are their owner's alone."""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ..contract.errors import ConfigError, FabricError, InputError

WEIGHTS = "the directory that weights are read from"


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


@contextmanager
def held(path: Path, option: str) -> Iterator[None]:
    """Hold the directory that `option` gave for the block: what is in it is one command's. A death lets go of it.

    Raises:
        ConfigError: another process holds it, or it cannot be read.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise ConfigError(f"{option}: the directory {path} cannot be read: {error.strerror}", option=option) from error
    try:
        with suppress(OSError):  # file systems that have no such locks
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ConfigError(
                    f"{option}: the directory {path} is in use by another command: end that one, or choose another",
                    option=option,
                ) from error
        yield
    finally:
        os.close(handle)


def place_in(root: Path, name: str) -> Path:
    """Find what lies at a path below the directory that weights are read from; no link and no ".." leads out of it.

    Raises:
        InputError: it lies elsewhere, is not there, or has a name that no path can have.
    """
    try:
        whole = root.expanduser().resolve()
        place = (whole / name).resolve()
        is_inside, is_there = place.is_relative_to(whole), place.exists()
    except (OSError, ValueError, RuntimeError):  # a name that no path can have
        is_inside, is_there = True, False
    if not is_inside:
        raise InputError(
            f"{name!r:.200} is not in {WEIGHTS}, and nothing else is read: save it there", name="directory"
        )
    if not is_there:
        raise InputError(f"{name!r:.200} is not there in {WEIGHTS}: write it first", name="directory")
    return place


def weights_in(root: Path, name: str) -> Path:
    """Find a directory or file of weights as `place_in`; all files in it are plain ones below `root`.

    Raises:
        InputError: as `place_in`, or names the file that is not.
    """
    place, whole = place_in(root, name), root.expanduser().resolve()
    for file in place.iterdir() if place.is_dir() else [place]:
        target = file.resolve()
        if file.suffix in (".safetensors", ".json") and not (target.is_file() and target.is_relative_to(whole)):
            raise InputError(f"{file.name} of {name!r:.200} is no plain file in {WEIGHTS}", name="directory")
    return place


@contextmanager
def told_below(root: Path | None) -> Iterator[None]:
    """Tell callers of other machines, in errors of the block, what lies where below a directory, and not where that is.

    root: None: there is none.
    """
    try:
        yield
    except FabricError as error:
        whole = "/" if root is None else str(root.expanduser().resolve())
        if whole == "/":
            raise

        def below(said: Any) -> Any:
            return said.replace(f"{whole}/", "").replace(whole, WEIGHTS) if isinstance(said, str) else said

        facts = {name: below(fact) for name, fact in error.facts.items()}
        raise type(error)(below(error.message), **facts) from error


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


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a file beside this one to write to: once the block has ended and it is on the disk, it gets this one's name.

    So nobody reads half a file under that name, and after a failure, or if nothing is written, the one before is as it
    was.

    Raises:
        OSError: it cannot be written.
    """
    new = path.with_name(f"{path.name}.new")
    try:
        yield new
        if new.exists():
            with new.open("rb") as file:
                os.fsync(file.fileno())
            os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)


def write_private(path: Path, text: str, *, is_new: bool = False) -> None:
    """Write a file whole or not at all, never readable by other users, not for a moment.

    is_new: what is there already stays.

    Raises:
        OSError: it cannot be written.
    """
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with open(fresh, "x", opener=owner_only) as file:
            file.write(text)
        if is_new:
            os.link(fresh, path)
        else:
            fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)
