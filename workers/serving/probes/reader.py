"""Reading a probe's page: the serving engine's state, and what is new in its rings.

- A page that is not there, not ours, or from an engine that is gone reads as None; it is looked for again by itself.
  `trouble` says what is wrong with it, and what to do.
- What the page shows decides how much is lent, so it is believed only where nobody but the worker's own user, root, or
  a user who was named could have written it.
- Rings that ran over between two looks lose their oldest rows, never mix them.
"""

from __future__ import annotations

import os
import pwd
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from ....fabric.rules.serving.facts import RunningRequest, ServingState, StepWork, WaitingRequest
from . import probe_page as at
from .probe_page import PageFile, Table

T = TypeVar("T")
LOOK_AGAIN_S = 0.25  # for a page that is missing, or shows no life
SILENT_S = 1.0  # without a sign of life, before an engine counts as gone
WORLD = stat.S_IWGRP | stat.S_IWOTH
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
    """A serving request that ended. Times as in fabric/rules/serving/facts.py."""

    arrived_at_s: float
    first_token_at_s: float
    last_token_at_s: float
    token_count: int

    @property
    def ttft_ms(self) -> float:
        return 1000 * (self.first_token_at_s - self.arrived_at_s)

    @property
    def tpot_ms(self) -> float | None:
        """Milliseconds per token after the first; None: it made one token."""
        if self.token_count < 2:
            return None
        return 1000 * (self.last_token_at_s - self.first_token_at_s) / (self.token_count - 1)


class _ProbePage:
    """An open page. It reads as zeros beyond its end, so that one that was cut short shows no life."""

    def __init__(self, handle: int) -> None:
        self.status = os.fstat(handle)
        self._file = PageFile(handle)

    def word(self, word: int) -> int:
        return int.from_bytes(self._file.read(word * at.WORD, at.WORD), "little", signed=True)

    def header(self) -> list[int]:
        words: list[int] = np.frombuffer(self._file.read(0, at.HEADER_WORDS * at.WORD), dtype="<i8").tolist()
        return words

    def rows(self, table: Table, first: int, count: int) -> list[list[int]]:
        """Read `count` rows from number `first` on; row n of a ring stands at n modulo its length."""
        begin = first % table.row_count
        ahead = min(count, table.row_count - begin)
        if not ahead:
            return []
        read = self._file.read(table.at + begin * table.row_bytes, ahead * table.row_bytes)
        rows: list[list[int]] = np.frombuffer(read, dtype="<i8").reshape(ahead, table.column_count).tolist()
        return rows + (self.rows(table, first + ahead, count - ahead) if count > ahead else [])

    def text(self, start: int, size: int) -> str:
        """Read a text as one line that a terminal can show."""
        said = self._file.read(start, size).partition(b"\0")[0].decode(errors="replace")
        return "".join(each if each.isprintable() else " " for each in said)


class ProbeReader:
    """The guard's side of one page. `arrived_count` and `change_count` may be called on any thread."""

    def __init__(self, path: Path, name: str = "vllm", *, owner_uid: int | None = None) -> None:
        """name: the program that writes the page. owner_uid: another user whose page is believed."""
        self.name = name
        self._path = path
        self._owners = {0, os.getuid()} | ({owner_uid} if owner_uid is not None else set())
        self._page: _ProbePage | None = None
        self._refusal = ""
        self._looked_at_s = -1e9
        self._seen = {at.ARRIVED: 0, at.STEPPED: 0, at.ENDED: 0}
        self._last: tuple[tuple[int, int], ServingState] | None = None

    def writer_pid(self) -> int | None:
        """Return the process that writes the page; None: there is no page."""
        return None if self._page is None else self._page.word(at.PID)

    def engine(self) -> str:
        """Return the name and version of what writes the page; "" if that is not known."""
        return "" if self._page is None else self._page.text(at.ENGINE_AT, at.ENGINE_BYTES)

    def arrived_count(self) -> int:
        """Count the requests that have reached the serving engine; costs a microsecond."""
        return 0 if (page := self._page) is None else page.word(at.ARRIVED)

    def change_count(self) -> int:
        """Return a number that grows whenever the engine changes state, but for arrivals; costs a microsecond."""
        return 0 if (page := self._page) is None else page.word(at.SEQ)

    def read(self, now_s: float) -> ServingState | None:
        """Read the state that the page shows; None: there is no page, or its first state is being written."""
        header = self._page.header() if self._page is not None else []
        if not header or now_s - header[at.ALIVE_NS] / 1e9 > LOOK_AGAIN_S:
            self._look_for_it(now_s)
        page = self._page
        if page is None:
            return None
        for _ in range(RETRY_COUNT):
            header = page.header()
            if header[at.SEQ] % 2:
                continue
            state = self._state(page, header)
            if page.word(at.SEQ) == header[at.SEQ]:
                self._last = (_key(header), state)  # not before: what was read while it changed belongs to no moment
                return state
        return self._last[1] if self._last is not None else None

    def trouble(self, now_s: float) -> str:
        """Say why the serving engine is not seen at `now_s`, and what to do; "" if it is seen."""
        state = self.read(now_s)
        page = self._page
        if page is None:
            return self._refusal
        if note := page.text(at.NOTE_AT, at.NOTE_BYTES):
            return (
                f"the probe in process {self.writer_pid()} has ended: {note}. Start the serving engine again, or see"
                " it by its metrics: --probe http://HOST:PORT"
            )
        if page.word(at.AT_MAGIC) != at.MAGIC:
            return _cut_short(self._path)
        if state is None or abs(now_s - state.seen_at_s) > SILENT_S:
            return (
                f"process {self.writer_pid()}, which wrote {self._path}, gives no sign of life: it has ended or stands"
                " still. Start the serving engine again as before"
            )
        return ""

    def new_arrivals(self) -> list[Arrival]:
        """Return the arrivals since the last call."""
        return self._new(at.ARRIVED, at.ARRIVAL_ROWS, lambda row: Arrival(row[0] / 1e9, row[1]))

    def new_steps(self) -> list[Step]:
        """Return the steps since the last call."""
        return self._new(
            at.STEPPED, at.STEP_ROWS, lambda row: Step(row[0] / 1e9, row[1] / 1e9, _work(row[2], row[3], row[4]))
        )

    def new_ends(self) -> list[End]:
        """Return the requests that ended since the last call."""
        return self._new(at.ENDED, at.END_ROWS, lambda row: End(row[0] / 1e9, row[1] / 1e9, row[2] / 1e9, row[3]))

    def _new(self, counter: int, table: Table, make: Callable[[list[int]], T]) -> list[T]:
        if self._page is None:
            return []
        count = self._page.word(counter)
        first = max(self._seen[counter], count - at.RING // 2)  # what is older may be written over as we read
        self._seen[counter] = count
        return [make(row) for row in self._page.rows(table, first, count - first)] if count > first else []

    def _state(self, page: _ProbePage, header: list[int]) -> ServingState:
        seen_at_s = header[at.ALIVE_NS] / 1e9
        if self._last is not None and self._last[0] == _key(header):
            return _seen_again(self._last[1], seen_at_s)
        began_ns = header[at.STEP_BEGAN_NS]
        running_count = min(max(0, header[at.RUNNING]), at.REQUEST_COUNT_MAX)
        return ServingState(
            seen_at_s=seen_at_s,
            waiting=tuple(_waiting(page, header)),
            running=tuple(
                RunningRequest(first_token_at_s=row[0] / 1e9, token_count=row[1], context_tokens=row[2])
                for row in page.rows(at.RUNNING_ROWS, 0, running_count)
            ),
            step=_work(*header[at.STEP_PREFILL : at.STEP_CONTEXT + 1]) if began_ns else None,
            step_began_at_s=began_ns / 1e9,
            kv_used_tokens=header[at.KV_USED],
            kv_capacity_tokens=header[at.KV_CAPACITY],
        )

    def _look_for_it(self, now_s: float) -> None:
        """Open the page that is at the path now, if it is another one than before and can be believed."""
        if now_s - self._looked_at_s < LOOK_AGAIN_S:
            return
        self._looked_at_s = now_s
        try:
            page = _ProbePage(at.opened(self._path))
        except OSError as error:
            self._refusal = _unopened(self._path, error)
            if isinstance(error, FileNotFoundError):
                self._page = self._last = None
            return
        self._refusal = _refusal(self._path, page, self._owners)
        if self._refusal:
            self._page = self._last = None
        elif self._page is None or not os.path.samestat(page.status, self._page.status):
            self._page, self._last = page, None
            header = page.header()
            self._seen = {counter: header[counter] for counter in (at.ARRIVED, at.STEPPED, at.ENDED)}


def _key(header: list[int]) -> tuple[int, int]:
    """Return the two numbers of a header that change with the state."""
    return header[at.SEQ], header[at.ARRIVED]


def _waiting(page: _ProbePage, header: list[int]) -> list[WaitingRequest]:
    """List the requests that the scheduler has, oldest first; then those on their way to it."""
    rows = page.rows(at.WAITING_ROWS, 0, min(max(0, header[at.WAITING]), at.REQUEST_COUNT_MAX))
    hidden = header[at.WAITING_PREFILL] - sum(row[1] for row in rows)
    if hidden > 0 and rows:
        rows.append([rows[-1][0], hidden])
    arrived = header[at.ARRIVED]
    first = max(header[at.KNOWN], arrived - at.RING)
    rows += page.rows(at.ARRIVAL_ROWS, first, arrived - first) if arrived > first else []
    return [WaitingRequest(arrived_at_s=row[0] / 1e9, prefill_tokens=row[1]) for row in rows]


def _unopened(path: Path, error: OSError) -> str:
    """Say why there is no page, and what to do."""
    if path.is_symlink():
        return f"{path} is a symbolic link, which may lead anywhere: name the page itself"
    if not isinstance(error, FileNotFoundError):
        return f"{path} cannot be read ({error.strerror}): let this worker's user read it"
    ranks = sorted(each.name for each in path.parent.glob(f"{path.name}-dp*"))
    if ranks:
        return (
            f"{path} is the page of a data-parallel engine: give each rank a worker, --probe {path.parent / ranks[0]}"
        )
    return (
        f"no page at {path} yet. On the serving side, with rollfab installed beside vLLM, type:"
        f" ROLLFAB_PROBE={path} vllm serve ... (a line about the rollfab probe in vLLM's log says how it went)"
    )


def _refusal(path: Path, page: _ProbePage, owners: set[int]) -> str:
    """Say why a file cannot be believed, and what to do; "" if it can."""
    status, header = page.status, page.header()
    is_file = stat.S_ISREG(status.st_mode)
    if is_file and status.st_size == 0:
        return _cut_short(path)
    if not is_file or header[at.AT_MAGIC] != at.MAGIC:
        return f"{path} is no page of a probe: remove it, or name another path on both sides"
    if status.st_uid not in owners:
        return (
            f"{path} belongs to user {_user(status.st_uid)}, who may have forged it. If that user runs the serving"
            f" engine, start this worker with --probe-user {_user(status.st_uid)}; else remove the file"
        )
    if status.st_mode & WORLD:
        return f"{path} can be written by others than its owner, who may have forged it: type chmod go-w {path}"
    if header[at.AT_LAYOUT] != at.LAYOUT:
        return (
            f"{path} was written by another version of rollfab: install the same one beside vLLM and here, and start"
            " the serving engine again"
        )
    if status.st_size != at.SIZE_BYTES:
        return _cut_short(path)
    return ""


def _cut_short(path: Path) -> str:
    return f"{path} was cut short: its engine writes it anew within a second, if it still runs; else start that again"


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _work(prefill_tokens: int, decode_count: int, context_tokens: int) -> StepWork:
    return StepWork(prefill_tokens=prefill_tokens, decode_count=decode_count, context_tokens=context_tokens)


def _seen_again(state: ServingState, seen_at_s: float) -> ServingState:
    """Copy a state with a newer sign of life; dataclasses.replace costs ten times as much."""
    return ServingState(
        seen_at_s=seen_at_s,
        waiting=state.waiting,
        running=state.running,
        step=state.step,
        step_began_at_s=state.step_began_at_s,
        kv_used_tokens=state.kv_used_tokens,
        kv_capacity_tokens=state.kv_capacity_tokens,
    )
