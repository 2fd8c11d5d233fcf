"""One measurement of a kind at a time on one machine: two at once would spoil each other's figures.

- The lock is the kernel's (flock) on a file in shared memory: it ends with the process that holds it and those forked
  from it, however they end.
- The file stays, and names the process that measured last; nobody waits for it.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rollfab.fabric.contract.errors import ConfigError
from rollfab.workers.serving.wiring import memory_directory

__all__ = ["alone"]


@contextmanager
def alone(name: str, directory: Path | None = None) -> Iterator[None]:
    """Hold this machine's lock of the bench `name` meanwhile.

    Args:
        directory: where the lock is; default: shared memory, or else the directory for temporary files.

    Raises:
        ConfigError: another process is measuring, which is named; or the lock cannot be opened.
    """
    path = (directory or memory_directory()) / f"rollfab-bench-{name}.lock"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        raise ConfigError(
            f"bench {name}: its lock cannot be opened: {error}. Remove {path}, if nobody measures", path=str(path)
        ) from error
    with os.fdopen(descriptor, "r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            pid = file.read(20).strip() or "unknown"
            raise ConfigError(
                f"bench {name} is being measured on this machine by process {pid}: two at once spoil each other's"
                " figures. Wait until it has ended, or end it",
                pid=pid,
                path=str(path),
            ) from error
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield
