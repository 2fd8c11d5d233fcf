"""Reading a probe's page: the serving engine's state, and what is new in its rings.

- A page that is not there, not ours, or from an engine that is gone reads as None; it is looked for again by itself.
- Rings that ran over between two looks lose their oldest rows, never mix them.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ...fabric.rules.serving import RunningRequest, ServingState, StepWork, WaitingRequest
from . import page as at
from .page import Tables, Words, tables_of

T = TypeVar("T")
LOOK_AGAIN_S = 0.25  # for a page that is missing, or shows no life
RETRY_COUNT = 20  # while the writer is in the middle; it takes some 20 µs


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that reached the serving engine."""

    at_s: float
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Step:
    """A serving step that was measured, [began_at_s, began_at_s + duration_s)."""

    began_at_s: float
    duration_s: float
    work: StepWork


@dataclass(frozen=True, slots=True)
class End:
    """A serving request that ended. Times as in rules/serving.py."""

    arrived_at_s: float
    first_token_at_s: float
    last_token_at_s: float
    token_count: int

    @property
    def ttft_ms(self) -> float:
        return 1000 * (self.first_token_at_s - self.arrived_at_s)

    @property
    def tpot_ms(self) -> float | None:
        """None: it made one token."""
        if self.token_count < 2:
            return None
        return 1000 * (self.last_token_at_s - self.first_token_at_s) / (self.token_count - 1)


class ProbeReader:
    """The guard's side of one page."""

    def __init__(self, path: Path, name: str = "vllm") -> None:
        """name: who writes the page."""
        self.name = name
        self._path = path
        self._tables: Tables | None = None
        self._inode: tuple[int, int] | None = None
        self._looked_at_s = -1e9
        self._seen = {at.ARRIVED: 0, at.STEPPED: 0, at.ENDED: 0}
        self._last: tuple[tuple[int, ...], ServingState] | None = None

    def writer_pid(self) -> int | None:
        """The process that writes the page; None: there is no page."""
        return None if self._tables is None else int(self._tables.header[at.PID])

    def arrived_count(self) -> int:
        """Requests that have reached the serving engine; costs less than a microsecond."""
        return 0 if self._tables is None else int(self._tables.header[at.ARRIVED])

    def change_count(self) -> int:
        """Grows whenever what the serving engine does changes, but for arrivals; costs less than a microsecond."""
        return 0 if self._tables is None else int(self._tables.header[at.SEQ])

    def read(self, now_s: float) -> ServingState | None:
        """The state as the page shows it; None: there is no page."""
        if self._tables is None or now_s - self._tables.header[at.ALIVE_NS] / 1e9 > LOOK_AGAIN_S:
            self._look_for_it(now_s)
        if self._tables is None:
            return None
        header = self._tables.header
        for _ in range(RETRY_COUNT):
            sequence = int(header[at.SEQ])
            if sequence % 2:
                continue
            state = self._state(self._tables, sequence)
            if int(header[at.SEQ]) == sequence:
                return state
        return self._last[1] if self._last is not None else None

    def new_arrivals(self) -> list[Arrival]:
        """Since the last call."""
        return self._new(at.ARRIVED, lambda tables: tables.arrivals, lambda row: Arrival(row[0] / 1e9, row[1]))

    def new_steps(self) -> list[Step]:
        """Since the last call."""
        return self._new(
            at.STEPPED, lambda tables: tables.steps, lambda row: Step(row[0] / 1e9, row[1] / 1e9, _work(*row[2:]))
        )

    def new_ends(self) -> list[End]:
        """Since the last call."""
        return self._new(
            at.ENDED, lambda tables: tables.ends, lambda row: End(row[0] / 1e9, row[1] / 1e9, row[2] / 1e9, row[3])
        )

    def _new(self, counter: int, table: Callable[[Tables], Words], make: Callable[[list[int]], T]) -> list[T]:
        if self._tables is None:
            return []
        count = int(self._tables.header[counter])
        first = max(self._seen[counter], count - at.RING // 2)  # what is older may be written over as we read
        self._seen[counter] = count
        rows = table(self._tables)
        return [make(rows[index % at.RING].tolist()) for index in range(first, count)]

    def _state(self, tables: Tables, sequence: int) -> ServingState:
        header = tables.header
        arrived = int(header[at.ARRIVED])
        key = (sequence, arrived)
        seen_at_s = float(header[at.ALIVE_NS]) / 1e9
        if self._last is not None and self._last[0] == key:
            return _seen_again(self._last[1], seen_at_s)
        words = header[: at.ENDED + 1].tolist()
        began_ns = words[at.STEP_BEGAN_NS]
        state = ServingState(
            seen_at_s=seen_at_s,
            waiting=tuple(self._waiting(tables, words)),
            running=tuple(
                RunningRequest(first_token_at_s=row[0] / 1e9, token_count=row[1], context_tokens=row[2])
                for row in tables.running[: words[at.RUNNING]].tolist()
            ),
            step=_work(*words[at.STEP_PREFILL : at.STEP_CONTEXT + 1]) if began_ns else None,
            step_began_at_s=began_ns / 1e9,
            kv_used_tokens=words[at.KV_USED],
            kv_capacity_tokens=words[at.KV_CAPACITY],
        )
        self._last = (key, state)
        return state

    def _waiting(self, tables: Tables, words: list[int]) -> list[WaitingRequest]:
        """Those that the scheduler has, oldest first; then those on their way to it."""
        rows = tables.waiting[: min(words[at.WAITING], at.REQUEST_COUNT_MAX)].tolist()
        hidden = words[at.WAITING_PREFILL] - sum(row[1] for row in rows)
        if hidden > 0 and rows:
            rows.append([rows[-1][0], hidden])
        arrived = words[at.ARRIVED]
        rows += [tables.arrivals[i % at.RING].tolist() for i in range(max(words[at.KNOWN], arrived - at.RING), arrived)]
        return [WaitingRequest(arrived_at_s=row[0] / 1e9, prefill_tokens=row[1]) for row in rows]

    def _look_for_it(self, now_s: float) -> None:
        if now_s - self._looked_at_s < LOOK_AGAIN_S:
            return
        self._looked_at_s = now_s
        try:
            with self._path.open("rb") as opened:
                status = os.fstat(opened.fileno())
                inode = (status.st_ino, status.st_ctime_ns)
                if self._tables is not None and inode == self._inode:
                    return
                if status.st_size != at.SIZE_BYTES:
                    return
                tables = tables_of(mmap.mmap(opened.fileno(), at.SIZE_BYTES, prot=mmap.PROT_READ))
        except OSError:
            return
        if tables.header[at.AT_MAGIC] != at.MAGIC or tables.header[at.AT_LAYOUT] != at.LAYOUT:
            return
        self._tables, self._inode, self._last = tables, inode, None
        counters = (at.ARRIVED, at.STEPPED, at.ENDED)
        self._seen = {counter: int(tables.header[counter]) for counter in counters}


def _work(prefill_tokens: int, decode_count: int, context_tokens: int) -> StepWork:
    return StepWork(prefill_tokens=prefill_tokens, decode_count=decode_count, context_tokens=context_tokens)


def _seen_again(state: ServingState, seen_at_s: float) -> ServingState:
    """The same with another sign of life; dataclasses.replace costs ten times as much."""
    return ServingState(
        seen_at_s=seen_at_s,
        waiting=state.waiting,
        running=state.running,
        step=state.step,
        step_began_at_s=state.step_began_at_s,
        kv_used_tokens=state.kv_used_tokens,
        kv_capacity_tokens=state.kv_capacity_tokens,
    )
