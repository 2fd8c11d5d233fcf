"""The probe's page: a file in memory in which a serving engine's plug-in shows what the engine does, step by step.

- One file, one writing process. The file is replaced, not reused, when an engine starts: a reader of the old one sees
  its sign of life stop. A writer looks at its file now and then: it makes a file whole that was removed or cut short,
  and ends where another engine has put its own.
- It is written and read by calls and never mapped: a file that somebody cuts short ends no process, on either side. The
  calls keep the interpreter's lock, as they take a microsecond: a scheduler's thread must not lose its turn by them.
- What changes together (requests, the step under way, KV use) is written between two increments of SEQ, odd meanwhile;
  a reader that sees it change reads again. Rings (arrivals, steps, ends) have a count that is raised after the row.
- Arrivals are written by another thread than the rest: a request is seen while the step before it still computes.
- Behind the tables stand two texts: what the engine is, and why it shows nothing any more, if that is so.
- Times are nanoseconds of the monotonic clock of the machine.
- Needs the standard library and numpy alone: it runs in the serving team's engine.
- Stores are seen in order on x86-64. Elsewhere a row may be torn in rare cases, which costs one poor decision.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ....fabric.contract.errors import ConfigError
from ....fabric.rules.serving.facts import StepWork

Words = NDArray[np.int64]

MAGIC, LAYOUT = 0x726F6C6C70726F62, 2
REQUEST_COUNT_MAX = 1024  # rows of each kind; of waiting requests beyond these only the tokens are counted
RING = 1024

FRESH_NS = 1_000_000_000  # a page that was written since shows an engine that lives
LEFT_OVER_S = 60.0  # a page that has no name by then never gets one: its writer was killed
WORD = 8  # bytes
HEADER_WORDS = 32
(
    AT_MAGIC,
    AT_LAYOUT,
    PID,
    ALIVE_NS,
    SEQ,
    STEP_BEGAN_NS,  # 0: between two steps
    STEP_PREFILL,
    STEP_DECODE,
    STEP_CONTEXT,
    WAITING,
    WAITING_PREFILL,  # tokens of all of them
    RUNNING,
    KV_USED,
    KV_CAPACITY,
    KNOWN,  # arrivals that the scheduler has; later ones are still on their way to it
    ARRIVED,
    STEPPED,
    ENDED,
) = range(18)


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of int64. at: the byte where they begin."""

    at: int
    row_count: int
    column_count: int

    @property
    def row_bytes(self) -> int:
        return self.column_count * WORD

    @property
    def end(self) -> int:
        return self.at + self.row_count * self.row_bytes


WAITING_ROWS = Table(HEADER_WORDS * WORD, REQUEST_COUNT_MAX, 2)  # arrived_ns, prefill_tokens
RUNNING_ROWS = Table(WAITING_ROWS.end, REQUEST_COUNT_MAX, 3)  # first_token_ns, token_count, context_tokens
ARRIVAL_ROWS = Table(RUNNING_ROWS.end, RING, 2)  # arrived_ns, prompt_tokens
STEP_ROWS = Table(ARRIVAL_ROWS.end, RING, 5)  # began_ns, duration_ns, prefill_tokens, decode_count, context_tokens
END_ROWS = Table(STEP_ROWS.end, RING, 4)  # arrived_ns, first_token_ns, last_token_ns, token_count
ENGINE_AT, ENGINE_BYTES = END_ROWS.end, 64  # UTF-8, zeros behind it
NOTE_AT, NOTE_BYTES = ENGINE_AT + ENGINE_BYTES, 448
SIZE_BYTES = NOTE_AT + NOTE_BYTES


class PageFile:
    """An open page; closed with the last reference to it."""

    def __init__(self, handle: int) -> None:
        self.handle = handle
        libc = ctypes.PyDLL(None, use_errno=True)  # PyDLL: without giving up the interpreter's lock
        self._pread, self._pwrite = libc.pread, libc.pwrite
        for call in (self._pread, self._pwrite):
            call.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64)
            call.restype = ctypes.c_ssize_t

    def __del__(self) -> None:
        os.close(self.handle)

    def read(self, start: int, size: int) -> bytes:
        """Read `size` bytes; zeros beyond the file's end."""
        read = ctypes.create_string_buffer(size)
        self._pread(self.handle, read, size, start)
        return read.raw

    def write(self, address: int, start: int, size: int) -> None:
        """Write the `size` bytes that stand at that address of memory. Raises OSError."""
        if self._pwrite(self.handle, address, size, start) != size:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))


def opened(path: Path) -> int:
    """Open a page to read from, and return its handle; never follows a link, never waits for a pipe. Raises OSError."""
    return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)


def writer_of(path: Path) -> int | None:
    """Return the process that lives and writes its page there; None: no process does, or the file is something else."""
    try:
        handle = opened(path)
    except OSError:
        return None
    try:
        words = np.frombuffer(os.read(handle, HEADER_WORDS * WORD), dtype=np.int64)
    except (OSError, ValueError):
        return None
    finally:
        os.close(handle)
    is_ours = words.size == HEADER_WORDS and words[AT_MAGIC] == MAGIC
    return int(words[PID]) if is_ours and 0 < time.monotonic_ns() - int(words[ALIVE_NS]) < FRESH_NS else None


class ProbeWriter:
    """The serving engine's side. Any thread may call it; every call may raise OSError."""

    def __init__(self, path: Path, engine: str = "") -> None:
        """Make a new page at `path`. engine: what shows itself there, with its version.

        Raises:
            ConfigError: it cannot be made there; says why.
        """
        self.path = path
        self._lock = threading.Lock()
        self._image = bytearray(SIZE_BYTES)  # of all that the page holds
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._image))
        self._words: Words = np.frombuffer(self._image, dtype=np.int64, count=ENGINE_AT // WORD)
        self._words[[AT_MAGIC, AT_LAYOUT, PID]] = MAGIC, LAYOUT, os.getpid()
        self._image[ENGINE_AT:NOTE_AT] = _text(engine, ENGINE_BYTES)
        other = writer_of(path)
        if other not in (None, os.getpid()):
            raise _taken(path, other)
        try:
            self._file = _made(path, self._image)
            _remove_left_over(path, os.fstat(self._file.handle).st_mtime)
        except OSError as error:
            raise ConfigError(
                f"ROLLFAB_PROBE is {path}: no page can be made there ({error}); name a file in a directory in memory"
                " that this process may write, such as /dev/shm/rollfab-serving",
                path=str(path),
            ) from error

    def keep(self) -> None:
        """Make the page whole again where it was removed or cut short: by hand, or by what cleans that directory up.

        Raises:
            ConfigError: another engine has put its page there; nobody sees this one any more.
        """
        ours = os.fstat(self._file.handle)
        try:
            there = os.lstat(self.path)
        except FileNotFoundError:
            with self._lock:
                self._file = _made(self.path, self._image)
            return
        if not os.path.samestat(ours, there):
            raise _taken(self.path, writer_of(self.path))
        if ours.st_size != SIZE_BYTES:
            with self._lock:
                self._put(0, SIZE_BYTES)

    def end(self, note: str) -> None:
        """Show that the engine is seen no more, and why."""
        with self._lock:
            self._image[NOTE_AT:] = _text(note, NOTE_BYTES)
            self._put(NOTE_AT, SIZE_BYTES)
            self._set(ALIVE_NS, 0)

    def alive(self, now_ns: int) -> None:
        """Give a sign of life; call it also while nothing happens."""
        with self._lock:
            self._set(ALIVE_NS, now_ns)

    def arrived(self, arrived_ns: int, prompt_tokens: int) -> None:
        """Write down a request that has reached this process."""
        self._append(ARRIVAL_ROWS, ARRIVED, (arrived_ns, prompt_tokens))

    def ended(self, arrived_ns: int, first_token_ns: int, last_token_ns: int, token_count: int) -> None:
        """Write down a request that has ended with tokens."""
        self._append(END_ROWS, ENDED, (arrived_ns, first_token_ns, last_token_ns, token_count))

    def stepped(self, began_ns: int, duration_ns: int, work: StepWork) -> None:
        """Write down a step that has been computed."""
        row = (began_ns, duration_ns, work.prefill_tokens, work.decode_count, work.context_tokens)
        self._append(STEP_ROWS, STEPPED, row)

    def show(
        self,
        *,
        waiting: Sequence[tuple[int, int]],
        running: Sequence[tuple[int, int, int]],
        step: tuple[int, StepWork] | None,
        known: int,
        kv_used: int,
        kv_capacity: int,
    ) -> None:
        """Write all that changes with a step.

        Args:
            waiting: (arrived_ns, prefill_tokens), oldest first. running: (first_token_ns, token_count, context_tokens).
            step: when it began and what it computes; None: between two steps.
            known: of all requests that arrived, those that the scheduler has had.
            kv_used, kv_capacity: tokens.
        """
        began_ns, work = step or (0, StepWork())
        with self._lock:
            words = self._words
            self._set(SEQ, int(words[SEQ]) + 1)
            self._put_rows(WAITING_ROWS, waiting)
            self._put_rows(RUNNING_ROWS, running)
            words[STEP_BEGAN_NS : STEP_CONTEXT + 1] = (
                began_ns,
                work.prefill_tokens,
                work.decode_count,
                work.context_tokens,
            )
            words[WAITING : RUNNING + 1] = (
                len(waiting),
                sum(tokens for _, tokens in waiting),
                min(len(running), REQUEST_COUNT_MAX),
            )
            words[KV_USED : KNOWN + 1] = kv_used, kv_capacity, known
            self._put(STEP_BEGAN_NS * WORD, (KNOWN + 1) * WORD)
            self._set(SEQ, int(words[SEQ]) + 1)

    def _append(self, table: Table, counter: int, row: tuple[int, ...]) -> None:
        with self._lock:
            count = int(self._words[counter])
            at = table.at + count % table.row_count * table.row_bytes
            self._words[at // WORD : (at + table.row_bytes) // WORD] = row
            self._put(at, at + table.row_bytes)
            self._set(counter, count + 1)

    def _put_rows(self, table: Table, rows: Sequence[tuple[int, ...]]) -> None:
        """Write the first rows of a table."""
        shown = rows[: table.row_count]
        if shown:
            end = table.at + len(shown) * table.row_bytes
            self._words[table.at // WORD : end // WORD] = list(chain.from_iterable(shown))
            self._put(table.at, end)

    def _set(self, word: int, value: int) -> None:
        self._words[word] = value
        self._put(word * WORD, (word + 1) * WORD)

    def _put(self, start: int, end: int) -> None:
        self._file.write(self._address + start, start, end - start)


def _made(path: Path, image: bytearray) -> PageFile:
    """Put a file of that content at `path`."""
    handle, made = tempfile.mkstemp(prefix=_prefix(path), dir=path.parent)
    try:
        os.fchmod(handle, 0o644)  # the worker that reads it may be another user
        os.posix_fallocate(handle, 0, SIZE_BYTES)
        os.pwrite(handle, image, 0)
        os.replace(made, path)
    except BaseException:
        os.close(handle)
        with suppress(OSError):
            os.unlink(made)
        raise
    return PageFile(handle)


def _prefix(path: Path) -> str:
    return f".{path.name}-"


def _remove_left_over(path: Path, now_s: float) -> None:
    """Remove what writers that were killed in the middle of `_made` have left. now_s: wall time."""
    for left in path.parent.glob(f"{_prefix(path)}????????"):
        with suppress(OSError):
            status = left.lstat()
            if status.st_uid == os.getuid() and now_s - status.st_mtime > LEFT_OVER_S:
                left.unlink()


def _text(text: str, size: int) -> bytes:
    return text.encode()[:size].ljust(size, b"\0")


def _taken(path: Path, other: int | None) -> ConfigError:
    whose = f"process {other} writes its page there" if other else "another engine has put its page there"
    return ConfigError(f"ROLLFAB_PROBE is {path}: {whose}; give every engine its own", path=str(path))
