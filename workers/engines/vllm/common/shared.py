"""Memory that several processes of one machine map.

- Where the system has anonymous files (Linux), nobody has to clean up: the memory is gone with the processes that use
  it, however they end. Elsewhere it is a temporary file that its owner removes.
- Room is reserved when the file is made, so a full machine is an error here and not a crash at some later write.
- `open_shared` opens a file by a path that may come from somebody else, as an engine in vLLM's development mode takes
  it from whoever reaches its port. Only a file that a SharedFile made is opened, of the same user, under the name that
  is due; no other file can be read or written by that way.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

from .....fabric.contract.errors import WeightError

ADD_SEALS, GET_SEALS = 1033, 1034  # fcntl's, which not every build of Python names
SIZE_SEALS = 0x1 | 0x2 | 0x4  # no further seals, nor shrinking, nor growing: what is mapped stays there
HANDLE = re.compile(r"/proc/[0-9]+/fd/[0-9]+")
LARGE_BYTES = 16 << 20  # copying this takes some milliseconds

P = ParamSpec("P")
T = TypeVar("T")


async def aside(byte_count: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Do `work`; beside the event loop where it moves many bytes, for claims and leases must be renewed meanwhile."""
    if byte_count < LARGE_BYTES:
        return work(*args, **kwargs)
    return await asyncio.to_thread(work, *args, **kwargs)


class SharedFile:
    """A new file of zeros. path: how another process of this machine opens it while the owner lives."""

    def __init__(self, name: str, size: int) -> None:
        """Raises OSError: there is no room."""
        if hasattr(os, "memfd_create"):
            self._handle = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            self.path = Path(f"/proc/{os.getpid()}/fd/{self._handle}")
            self._is_named = False
        else:
            self._handle, made = tempfile.mkstemp(prefix=f"{name}-")
            self.path = Path(made)
            self._is_named = True
        self._is_open = True
        try:
            os.posix_fallocate(self._handle, 0, max(size, 1))
            if not self._is_named:
                fcntl.fcntl(self._handle, ADD_SEALS, SIZE_SEALS)
        except OSError:
            self.close()
            raise

    def write(self, data: bytes | memoryview, start: int = 0) -> None:
        """Fill the file from `start`, in bytes."""
        view, done = memoryview(data), 0
        while done < len(view):
            done += os.pwrite(self._handle, view[done:], start + done)

    def close(self) -> None:
        """Let go of the file; whoever has it mapped keeps it."""
        if not self._is_open:
            return
        self._is_open = False
        os.close(self._handle)
        if self._is_named:
            self.path.unlink(missing_ok=True)


def open_shared(path: str | Path, name: str, *, is_written: bool = False) -> int:
    """Open the SharedFile of that name and path, of another process of this user; returns a descriptor to close.

    Raises:
        WeightError: it is another thing, of which nothing was read or written.
        OSError: it is not there.
    """
    if hasattr(os, "memfd_create"):
        # Before it is opened too: opening a pipe or a device may already do something.
        if not HANDLE.fullmatch(str(path)) or os.readlink(path) != f"/memfd:{name} (deleted)":
            raise _foreign(path, name)
        handle = os.open(path, (os.O_RDWR if is_written else os.O_RDONLY) | os.O_CLOEXEC | os.O_NONBLOCK)
        is_ours = _is_sealed(handle) and os.readlink(f"/proc/self/fd/{handle}") == f"/memfd:{name} (deleted)"
    else:
        if Path(path).parent != Path(tempfile.gettempdir()) or not Path(path).name.startswith(f"{name}-"):
            raise _foreign(path, name)
        handle = os.open(path, (os.O_RDWR if is_written else os.O_RDONLY) | os.O_CLOEXEC | os.O_NOFOLLOW)
        is_ours = True
    status = os.fstat(handle)
    if is_ours and stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
        return handle
    os.close(handle)
    raise _foreign(path, name)


def _is_sealed(handle: int) -> bool:
    """Tell whether a handle is of an anonymous file whose size stays; no other kind of file knows seals."""
    try:
        return fcntl.fcntl(handle, GET_SEALS) & SIZE_SEALS == SIZE_SEALS
    except OSError:
        return False


def _foreign(path: str | Path, name: str) -> WeightError:
    return WeightError(f"{str(path)[:100]!r} is no memory {name!r} of a rollfab worker of this user: nothing was done")
