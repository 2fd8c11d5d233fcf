"""Whose turn it is to fetch for the node: locks that the kernel takes from the dead.

- A turn is an flock on one of a fixed number of files, so nothing has to be cleaned up after anybody.
- Each turn shows a token of its own, and beats while its owner is at work. Who has waited too long for a sign of life
  calls that token stalled, and may then take the lock behind it; so an owner that is frozen is passed by one process,
  not by all.
- No call here waits.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

import xxhash

from .node_cache import TURN

SLOT_COUNT = 64  # versions that share a slot take turns for nothing, which only costs a moment
DEPTH = 4  # so many stalled owners in a row are passed one by one; behind them everybody fetches for himself
TOKEN_BYTES = 8


class Owner(NamedTuple):
    """Whose turn it is. beat_ns: when it gave its last sign of life, by the file's clock."""

    token: bytes
    beat_ns: int


class Turn:
    """The right to fetch, until `release`."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def beat(self) -> None:
        """Give a sign of life."""
        os.utime(self._handle)

    def release(self) -> None:
        """Let the next one."""
        os.close(self._handle)


def take_turn(directory: Path, key: str, stalled: Collection[bytes]) -> Turn | Owner:
    """A turn to fetch `key`, or whose turn it is.

    Args:
        directory: of the node's cache.
        key: what the turn is for.
        stalled: tokens not to wait for any longer.

    Raises:
        OSError: the directory is gone, or full.
    """
    slot = xxhash.xxh3_64_intdigest(key.encode()) % SLOT_COUNT
    with contextlib.ExitStack() as held:
        mine: int | None = None
        for depth in range(DEPTH):
            handle = os.open(directory / f"{TURN}{slot}-{depth}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            held.callback(os.close, handle)
            if _lock(handle):
                mine = handle if mine is None else mine
                continue
            token = os.pread(handle, TOKEN_BYTES, 0)
            if token not in stalled:  # also when we have one: somebody who passed a stalled owner is at work already
                return Owner(token, os.fstat(handle).st_mtime_ns)
        if mine is None:
            raise OSError(f"all {DEPTH} turns of {key!r} are stalled")
        os.pwrite(mine, secrets.token_bytes(TOKEN_BYTES), 0)
        return Turn(os.dup(mine))  # the lock lasts as long as one copy of its handle


def _lock(handle: int) -> bool:
    with contextlib.suppress(OSError):
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False
