"""Chunks in the shared memory of a node: one file each, named by hash and size, for all processes of one user.

- A file has its name only once it is complete; every read checks its fast digest, and removes a corrupt file. Only this
  user may write here; chunks from other nodes were proven before they came here (relay_client.py).
- A process alone keeps within the budget: the least recently used files leave first. Each further process that
  writes at the same time may add an eighth of it, until one of them looks again.
- Files of dead processes go: unfinished files when room is made, a whole cache when another one of the same user is
  opened or its last user closes it. The kernel's locks say who is alive, never a process id.
- The cache only saves work: a full or missing disk, or a file taken away, is a miss.

node_store.py decides which process fetches missing chunks.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import secrets
import shutil
import threading
from pathlib import Path
from typing import NamedTuple

from ..contract.errors import ConfigError, WireError
from ..contract.ids import check_name
from ..format.manifest import WeightManifest, chunk_digest, chunk_hash

log = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
BUDGET_BYTES = 2 << 30  # a gigabyte-sized keyframe, or hundreds of deltas
FREE_BYTES_MIN = 128 << 20  # below it (containers often have 64 MB) a cache would only be churned
FREE_SHARE = 2  # at most this part (1/2) of what is free becomes the budget
SLACK_SHARE = 8  # an eighth of the budget is written between two looks at the files
HEX = "[0-9a-f]{64}|[0-9a-f]{16}"
DIGEST = re.compile(rf"(?:{HEX})\Z")
ALIVE, UNFINISHED, FETCH_LOCK = "alive", "new-", "turn-"  # names that older processes of the node know
OURS = re.compile(rf"{ALIVE}|{UNFINISHED}\w+|{FETCH_LOCK}[\d-]+|(?:{HEX})-\d+")  # the files of a cache
ENTER_COUNT_MAX, ENTER_PAUSE_S = 100, 0.01  # a cache that is being cleared away is gone within a second


class ChunkName(NamedTuple):
    """A chunk's name, made from its content.

    digest: its hash (SHA-256, hex), so that nobody can make another chunk of that name; xxh3-64 for a chunk of an older
    publisher, which is never fetched from other nodes. fast: xxh3-64, hex, if known.
    """

    digest: str
    size: int
    fast: str = ""

    def matches(self, data: bytes | memoryview) -> bool:
        """Tell whether `data`, which was proven or came from the broker, is still that chunk."""
        is_quick = len(data) == self.size and chunk_digest(data) in (self.fast, self.digest)
        return is_quick or (len(data) == self.size and chunk_hash(data) == self.digest)


def chunk_name(manifest: WeightManifest, index: int) -> ChunkName:
    """Return the name of chunk `index` of a version.

    Raises:
        WireError: the manifest does not hold a digest there.
    """
    fast = manifest.chunk_digests[index]
    digest = manifest.chunk_hashes[index] if manifest.has_proofs else fast
    name = ChunkName(digest, int(manifest.chunk_bytes[index]), fast)
    check_chunk_name(name)
    return name


def check_chunk_name(name: ChunkName) -> None:
    """Require a name that may be part of a path.

    Raises:
        WireError: it is not one.
    """
    if not isinstance(name.digest, str) or not DIGEST.match(name.digest) or name.size < 0:
        raise WireError(f"{name.digest!r} of {name.size} bytes is not the digest of a chunk: 64 hex digits are")


def open_cache(broker_id: str, *, root: Path | None = None) -> ChunkCache | None:
    """Open the node's cache of one broker's chunks; None, with one warning, if there is no room for it.

    BUDGET_BYTES are kept, but at most half of the free space there. They count as memory of the container whose process
    wrote them.

    Args:
        broker_id: a name that all processes of this broker and node agree on.
        root: directory above it; by default one of this user in shared memory.

    Raises:
        ConfigError: `broker_id` cannot be part of a path.
    """
    check_name("broker id", broker_id)
    directory = root or SHARED_MEMORY / f"rollfab-{os.getuid()}"
    try:
        _prepare(directory)
        free_bytes = _free_bytes(directory) + _kept_bytes(directory / broker_id)  # its own files can make room
        if free_bytes < FREE_BYTES_MIN:
            raise ConfigError(f"{free_bytes >> 20} MiB are free, {FREE_BYTES_MIN >> 20} are needed")
        _clear_dead(directory, keep=broker_id)
        return ChunkCache(directory / broker_id, min(BUDGET_BYTES, free_bytes // FREE_SHARE))
    except (OSError, ConfigError) as error:
        log.warning(
            "relay.no_cache: every process fetches for itself; give the container more shared memory (--shm-size)",
            extra={"directory": str(directory), "error": str(error)},
        )
        return None


class ChunkCache:
    """Files in `directory`, which is made if missing. Synchronous: call `read` and `write` in a thread.

    Raises:
        OSError: the directory cannot be used. ConfigError: it is another user's.
    """

    def __init__(self, directory: Path, budget_bytes: int = BUDGET_BYTES) -> None:
        self.directory = directory
        self._budget_bytes = budget_bytes
        self._unseen_bytes = budget_bytes  # written since the last look: the first write looks
        self._alive = _enter(directory)

    def has(self, name: ChunkName) -> bool:
        """Tell whether a file of that name is there."""
        return self._path(name).exists()

    def read(self, name: ChunkName) -> bytes | None:
        """Return the chunk, verified; None if it is not there."""
        path = self._path(name)
        try:
            data = path.read_bytes()
            if name.matches(data):
                os.utime(path)  # the kernel's access times are not kept for every read
                return data
            path.unlink(missing_ok=True)
        except OSError:
            return None
        log.warning("relay.chunk_corrupt", extra={"file": str(path)})
        return None

    def write(self, name: ChunkName, data: bytes) -> bool:
        """Keep a chunk that was verified; return whether it is there now."""
        path = self._path(name)
        if path.exists():
            return True
        if len(data) > self._budget_bytes // SLACK_SHARE:
            return False
        unfinished = self.directory / f"{UNFINISHED}{secrets.token_hex(8)}"
        try:
            self._make_room(len(data))
            with unfinished.open("xb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # while we live, nobody clears it away
                file.write(data)
                file.flush()
                unfinished.rename(path)
            return True
        except OSError as error:
            log.debug("relay.chunk_not_kept", extra={"file": str(path), "error": str(error)})
            with contextlib.suppress(OSError):
                unfinished.unlink()
            return False

    def close(self) -> None:
        """Leave; the last process to leave removes the files."""
        if self._alive < 0:
            return
        with contextlib.suppress(OSError):
            fcntl.flock(self._alive, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(self.directory, ignore_errors=True)
        os.close(self._alive)
        self._alive = -1

    def _path(self, name: ChunkName) -> Path:
        return self.directory / f"{name.digest}-{name.size}"

    def _make_room(self, size: int) -> None:
        """Look at the files if enough was written since the last look, and remove the least recently used."""
        slack = self._budget_bytes // SLACK_SHARE
        self._unseen_bytes += size
        if self._unseen_bytes <= slack:
            return
        self._unseen_bytes = size
        found = _files(self.directory)
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if total + slack <= self._budget_bytes:
                break
            path.unlink(missing_ok=True)
            total -= size


def _files(directory: Path) -> list[tuple[int, int, Path]]:
    """List (last use, bytes, path) of every chunk; remove unfinished files of dead processes."""
    found = []
    for entry in os.scandir(directory):
        path = Path(entry.path)
        with contextlib.suppress(OSError):  # another process removed it
            if entry.name == ALIVE or entry.name.startswith(FETCH_LOCK):
                continue
            if entry.name.startswith(UNFINISHED):
                _remove_if_dead(path)
                continue
            status = entry.stat()
            found.append((status.st_mtime_ns, status.st_size, path))
    return found


def _remove_if_dead(path: Path) -> None:
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # OSError: its writer lives
        path.unlink(missing_ok=True)


def _prepare(directory: Path) -> None:
    """Make a directory of our own, or require that it is ours.

    Raises:
        ConfigError: it belongs to another user, so its files could hold anything.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = directory.lstat()
    if status.st_uid != os.getuid() or directory.is_symlink() or status.st_mode & 0o022:
        raise ConfigError(f"{directory} is not this user's alone: remove it, or name another directory")


def _enter(directory: Path) -> int:
    """Return a descriptor whose shared lock says that the cache is in use."""
    for _ in range(ENTER_COUNT_MAX):
        handle = -1
        with contextlib.suppress(FileNotFoundError, BlockingIOError):  # somebody is clearing it away
            _prepare(directory)
            handle = os.open(directory / ALIVE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if os.fstat(handle).st_ino == (directory / ALIVE).stat().st_ino:
                return handle
        if handle >= 0:
            os.close(handle)
        threading.Event().wait(ENTER_PAUSE_S)
    raise ConfigError(f"{directory} cannot be used, or is being cleared away all the time: look at its rights")


def _clear_dead(root: Path, *, keep: str) -> None:
    """Remove the caches under `root` that no process uses any more, except the one named `keep`.

    Also remove a cache without its lock's file: the process that was removing it was killed. Directories with other
    files stay.
    """
    for entry in os.scandir(root):
        if entry.name == keep:
            continue
        with contextlib.suppress(OSError):
            if all(OURS.fullmatch(name) for name in os.listdir(entry.path)):
                _clear_if_dead(Path(entry.path))


def _clear_if_dead(directory: Path) -> None:
    with (directory / ALIVE).open("ab") as alive:
        fcntl.flock(alive, fcntl.LOCK_EX | fcntl.LOCK_NB)  # OSError: somebody lives there
        shutil.rmtree(directory, ignore_errors=True)


def _kept_bytes(directory: Path) -> int:
    """Sum the bytes of a cache's files; 0 if there is no cache."""
    kept = 0
    with contextlib.suppress(FileNotFoundError):
        for entry in os.scandir(directory):
            with contextlib.suppress(FileNotFoundError):
                kept += entry.stat().st_size
    return kept


def _free_bytes(directory: Path) -> int:
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize
