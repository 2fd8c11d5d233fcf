"""Memory that several processes of one machine map.

- Where the system has anonymous files (Linux), nobody has to clean up: the memory is gone with the processes that use
  it, however they end. Elsewhere it is a temporary file that its owner removes.
- Room is reserved when the file is made, so a full machine is an error here and not a crash at some later write.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

LARGE_BYTES = 16 << 20  # copying this takes some milliseconds

P = ParamSpec("P")
T = TypeVar("T")


async def aside(byte_count: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Do it; beside the event loop where it moves many bytes: claims and leases must be renewed meanwhile."""
    if byte_count < LARGE_BYTES:
        return work(*args, **kwargs)
    return await asyncio.to_thread(work, *args, **kwargs)


class SharedFile:
    """A new file of zeros. path: how another process of this machine opens it while the owner lives."""

    def __init__(self, name: str, size: int) -> None:
        """Raises OSError when there is no room."""
        if hasattr(os, "memfd_create"):
            self._handle = os.memfd_create(name)
            self.path = Path(f"/proc/{os.getpid()}/fd/{self._handle}")
            self._is_named = False
        else:
            self._handle, made = tempfile.mkstemp(prefix=f"{name}-")
            self.path = Path(made)
            self._is_named = True
        self._is_open = True
        try:
            os.posix_fallocate(self._handle, 0, max(size, 1))
        except OSError:
            self.close()
            raise

    def write(self, data: bytes | memoryview, start: int = 0) -> None:
        """Fill it from `start`, in bytes."""
        view, done = memoryview(data), 0
        while done < len(view):
            done += os.pwrite(self._handle, view[done:], start + done)

    def close(self) -> None:
        """Let go of it; whoever has it mapped keeps it."""
        if not self._is_open:
            return
        self._is_open = False
        os.close(self._handle)
        if self._is_named:
            self.path.unlink(missing_ok=True)
