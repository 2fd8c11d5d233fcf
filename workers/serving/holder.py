"""One worker beside one serving engine: each would use up the slack that the other one counts on.

- An advisory lock (flock) on a file of its own, held for as long as the process lives: `kill -9` lets go of it.
- Not on the page itself: that is another file after each start of the serving engine, and none before the first.
- The file stays, with the process id of its last holder; it is never removed, or two could hold one of each.
- A forked engine has no part in it: left over by a killed worker, it gets no orders and computes nothing.
- What is one engine is told by the page's real path, or a URL's host, port and path: two names of one host are two.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
from contextlib import suppress
from pathlib import Path

from ...fabric.contract.errors import ConfigError
from .probes.scrape import target_of

MEMORY = Path("/dev/shm")


def memory_directory() -> Path:
    """Where files of this machine live that are gone after it has started anew, if there is such a place."""
    return MEMORY if MEMORY.is_dir() else Path(tempfile.gettempdir())


def lock_path_of(probe: str) -> Path:
    """The lock of a page, or of a server's URL. Raises ConfigError: the URL is none."""
    if "://" not in probe:
        return Path(os.path.realpath(probe) + ".lock")
    target = target_of(probe)
    name = hashlib.sha256(f"{target.host}:{target.port}{target.path}".encode()).hexdigest()[:16]
    return memory_directory() / f"rollfab-probe-{name}.lock"


class ProbeHold:
    """Being the one worker that sees by a probe."""

    def __init__(self, probe: str) -> None:
        """Raises ConfigError: another process is, or there is no place for a lock."""
        path = lock_path_of(probe)
        try:
            self._handle: int | None = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ConfigError(
                f"--probe {probe}: its lock {path} cannot be opened ({error.strerror}). Name a page in a directory that"
                " this process may write; where another user's worker has left the lock there, remove it",
                path=str(path),
            ) from error
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(self._handle, 32, 0).decode(errors="replace").strip() or "unknown"
            self.close()
            raise ConfigError(
                f"--probe {probe}: process {holder} is the worker beside this serving engine (it holds {path})."
                " Two would each use up its slack: end that one first, or give this one the probe of another engine",
                path=str(path),
                pid=holder,
            ) from error
        os.ftruncate(self._handle, 0)
        os.pwrite(self._handle, f"{os.getpid()}\n".encode(), 0)
        os.register_at_fork(after_in_child=self._forget)

    def close(self) -> None:
        """Let another one be it."""
        if self._handle is not None:
            os.close(self._handle)
        self._handle = None

    def _forget(self) -> None:
        """In a forked child: the lock is its parent's."""
        with suppress(OSError):
            self.close()
