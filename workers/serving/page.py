"""The probe's page: shared memory in which a serving engine's plug-in shows what the engine does, step by step.

- One file, one writing process. The file is replaced, not reused, when an engine starts: who has the old one mapped
  sees its sign of life stop.
- What changes together (requests, the step under way, KV use) is written between two increments of SEQ, odd meanwhile;
  a reader that sees it change reads again. Rings (arrivals, steps, ends) have a count that is raised after the row.
- Arrivals are written by another thread than the rest: a request is seen while the step before it still computes.
- Times are nanoseconds of the monotonic clock of the machine.
- Stores are seen in order on x86-64. Elsewhere a row may be torn in rare cases, which costs one poor decision.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ...fabric.errors import ConfigError
from ...fabric.rules.serving import StepWork

Words = NDArray[np.int64]

MAGIC, LAYOUT = 0x726F6C6C70726F62, 1
REQUEST_COUNT_MAX = 1024  # rows of each kind; of waiting requests beyond these only the tokens are counted
RING = 1024

FRESH_NS = 1_000_000_000  # a page that was written since shows an engine that lives
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

# Tables: columns of each row.
WAITING_COLUMNS = 2  # arrived_ns, prefill_tokens
RUNNING_COLUMNS = 3  # first_token_ns, token_count, context_tokens
ARRIVAL_COLUMNS = 2  # arrived_ns, prompt_tokens
STEP_COLUMNS = 5  # began_ns, duration_ns, prefill_tokens, decode_count, context_tokens
END_COLUMNS = 4  # arrived_ns, first_token_ns, last_token_ns, token_count
TABLES = (
    ("waiting", REQUEST_COUNT_MAX, WAITING_COLUMNS),
    ("running", REQUEST_COUNT_MAX, RUNNING_COLUMNS),
    ("arrivals", RING, ARRIVAL_COLUMNS),
    ("steps", RING, STEP_COLUMNS),
    ("ends", RING, END_COLUMNS),
)
SIZE_BYTES = 8 * (HEADER_WORDS + sum(rows * columns for _, rows, columns in TABLES))


@dataclass(frozen=True, slots=True)
class Tables:
    """Views of the page: header int64 (HEADER_WORDS,), the others int64 (rows, columns)."""

    header: Words
    waiting: Words
    running: Words
    arrivals: Words
    steps: Words
    ends: Words


def tables_of(memory: mmap.mmap) -> Tables:
    """The tables of a mapped page."""
    words = np.frombuffer(memory, dtype=np.int64)
    views, at = [], HEADER_WORDS
    for _, rows, columns in TABLES:
        views.append(words[at : at + rows * columns].reshape(rows, columns))
        at += rows * columns
    return Tables(words[:HEADER_WORDS], *views)


def _require_free(path: Path) -> None:
    """Two engines on one page would hide one another.

    Raises:
        ConfigError: a process that lives writes there.
    """
    try:
        words = np.frombuffer(path.read_bytes()[: 8 * HEADER_WORDS], dtype=np.int64)
    except (OSError, ValueError):
        return
    is_ours = words.size == HEADER_WORDS and words[AT_MAGIC] == MAGIC
    if is_ours and words[PID] != os.getpid() and 0 < time.monotonic_ns() - int(words[ALIVE_NS]) < FRESH_NS:
        raise ConfigError(
            f"ROLLFAB_PROBE is {path}: process {int(words[PID])} writes its page there; give every engine its own",
            path=str(path),
        )


class ProbeWriter:
    """The serving engine's side."""

    def __init__(self, path: Path) -> None:
        """Make a new page at `path`.

        Raises:
            ConfigError: it cannot be made there; says why.
        """
        self.path = path
        _require_free(path)
        try:
            handle, made = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
            try:
                os.fchmod(handle, 0o644)  # the worker that reads it may be another user
                os.posix_fallocate(handle, 0, SIZE_BYTES)
                self._memory = mmap.mmap(handle, SIZE_BYTES)
            finally:
                os.close(handle)
            self._tables = tables_of(self._memory)
            header = self._tables.header
            header[AT_MAGIC], header[AT_LAYOUT], header[PID] = MAGIC, LAYOUT, os.getpid()
            os.replace(made, path)
        except OSError as error:
            raise ConfigError(
                f"ROLLFAB_PROBE is {path}: no page can be made there ({error}); name a file in a directory in memory"
                " that this process may write, such as /dev/shm/rollfab-serving",
                path=str(path),
            ) from error

    def alive(self, now_ns: int) -> None:
        """A sign of life; also while nothing happens."""
        self._tables.header[ALIVE_NS] = now_ns

    def arrived(self, arrived_ns: int, prompt_tokens: int) -> None:
        """A request has reached this process."""
        header = self._tables.header
        count = int(header[ARRIVED])
        self._tables.arrivals[count % RING] = (arrived_ns, prompt_tokens)
        header[ARRIVED] = count + 1

    def ended(self, arrived_ns: int, first_token_ns: int, last_token_ns: int, token_count: int) -> None:
        """A request has ended with tokens."""
        header = self._tables.header
        count = int(header[ENDED])
        self._tables.ends[count % RING] = (arrived_ns, first_token_ns, last_token_ns, token_count)
        header[ENDED] = count + 1

    def stepped(self, began_ns: int, duration_ns: int, work: StepWork) -> None:
        """A step has been computed."""
        header = self._tables.header
        count = int(header[STEPPED])
        row = (began_ns, duration_ns, work.prefill_tokens, work.decode_count, work.context_tokens)
        self._tables.steps[count % RING] = row
        header[STEPPED] = count + 1

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
        """All that changes with a step.

        Args:
            waiting: (arrived_ns, prefill_tokens), oldest first. running: (first_token_ns, token_count, context_tokens).
            step: when it began and what it computes; None: between two steps.
            known: of all requests that arrived, those that the scheduler has had.
            kv_used, kv_capacity: tokens.
        """
        tables = self._tables
        header = tables.header
        header[SEQ] += 1
        shown = waiting[:REQUEST_COUNT_MAX]
        if shown:
            tables.waiting[: len(shown)] = shown
        header[WAITING], header[WAITING_PREFILL] = len(waiting), sum(tokens for _, tokens in waiting)
        followed = running[:REQUEST_COUNT_MAX]
        if followed:
            tables.running[: len(followed)] = followed
        header[RUNNING] = len(followed)
        began_ns, work = step or (0, StepWork())
        header[STEP_BEGAN_NS] = began_ns
        header[STEP_PREFILL : STEP_CONTEXT + 1] = (work.prefill_tokens, work.decode_count, work.context_tokens)
        header[KNOWN], header[KV_USED], header[KV_CAPACITY] = known, kv_used, kv_capacity
        header[SEQ] += 1
