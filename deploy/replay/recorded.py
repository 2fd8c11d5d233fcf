"""Traces that name every request: CSV of several publishers, JSON lines of Mooncake and of Alibaba.

- Times become seconds since the first request; requests are sorted. A date without a zone is in UTC.
- Stamps that count from 1970 tell by their size whether they are in s, ms, us or ns. Others are in s, in JSON in ms;
  Alibaba's, whose lines have a chat_id, in s. What they were taken for is said with the trace.
- A request that was answered with nothing, or asked nothing, has one token of each. Those of BurstGPT that failed are
  left out.
- Mooncake's conversation trace is stamped every 3 s: a stamp stands for the 3 s after it, drawn evenly.
"""

from __future__ import annotations

import csv
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import numpy as np

from ...fabric.contract.errors import InputError, WireError
from ...fabric.contract.text import counted, told
from ...fabric.contract.wire import load_json
from .numbers import FIELD, SECONDS_MAX, TOKENS_MAX, as_number, number, table
from .records import Arrival

# Names of the same three columns: ours, Azure's, BurstGPT's; in JSON lines Mooncake's and Alibaba's.
COLUMNS = (
    ("t_s", "TIMESTAMP", "Timestamp"),
    ("input_tokens", "ContextTokens", "Request tokens"),
    ("output_tokens", "GeneratedTokens", "Response tokens"),
)
FIELDS = ("timestamp", "input_length", "output_length")
FAILED = "Response tokens"  # BurstGPT's: 0 where the request failed
ALIBABA = "chat_id"
PER_SECOND = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}
SINCE_1970_S = (1.2e9, 4e9)  # 2008 to 2096: in whichever unit a trace's first stamp is within it, it counts from 1970
STAMP_S = 3.0  # between stamps of Mooncake's conversation trace
STAMP_MAX = SECONDS_MAX * PER_SECOND["ns"]


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """The requests of a trace, in order. read_as: what its times were taken for and what was left out, for people."""

    arrivals: list[Arrival]
    read_as: str


def read_csv(text: str) -> Recorded:
    """Read a CSV whose header has the three columns under any of their names.

    Raises:
        InputError: it has not, or a line cannot be read.
    """
    lines = table(text)
    try:
        reader = _Reader(names=_names(lines.fieldnames or []), usual_unit="s")
        for row in lines:
            reader.take(row)
    except InputError:
        raise
    except ValueError as error:
        raise InputError(f"line {lines.line_num} is no request: {error}", line=lines.line_num) from error
    except csv.Error as error:
        raise InputError(f"line {lines.line_num + 1} is no request: {FIELD}", line=lines.line_num + 1) from error
    return reader.recorded(seed=0)


def _names(header: Sequence[str]) -> list[str]:
    """Return the names of the three columns.

    Raises:
        InputError: one is not there.
    """
    if not any(header):
        raise InputError("it is empty")
    names = [next((name for name in known if name in header), "") for known in COLUMNS]
    if not all(names):
        expected = " or ".join(COLUMNS[names.index("")])
        raise InputError(f"no column {expected} in its first line: {told(', '.join(header))}")
    return names


def read_json(data: bytes, seed: int) -> Recorded:
    """Read a request per line, or a list of them: timestamp, input_length, output_length. hash_ids are not used.

    Raises:
        InputError: one cannot be read.
    """
    reader, at = _Reader(names=FIELDS, usual_unit="ms"), 1
    place, items = ("item", _listed(data)) if data.lstrip().startswith(b"[") else ("line", _parsed(data))
    try:
        for item in items:
            if item is not None:
                reader.take(item)
            at += 1
    except (ValueError, WireError) as error:
        raise InputError(f"{place} {at} is no request: {error}", line=at) from error
    return reader.recorded(seed)


def _parsed(data: bytes) -> Iterator[Any]:
    """Parse lines one by one; an empty one is None."""
    return (load_json(line) if line.strip() else None for line in data.splitlines())


def _listed(data: bytes) -> Iterator[Any]:
    try:
        return iter(load_json(data))
    except WireError as error:
        raise InputError(f"it begins as a list of JSON and is none: {error}") from error


@dataclass(kw_only=True)
class _Reader:
    """Takes the rows of one trace; the first one tells what its times are.

    Attributes:
        names: of time, prompt and completion.
        usual_unit: of stamps that do not count from 1970.
        numbers: three of each row that was taken.
    """

    names: Sequence[str]
    usual_unit: str
    is_dated: bool = False
    numbers: array[float] = field(default_factory=lambda: array("d"))
    failed_count: int = 0

    def take(self, row: Mapping[str, Any]) -> None:
        """Take a row.

        Raises:
            ValueError: it is no request.
        """
        if not isinstance(row, dict):
            raise ValueError("it is no JSON object")
        time, prompt, completion = self.names
        if not self.numbers:
            self.is_dated = _date_s(row.get(time)) is not None
            self.usual_unit = "s" if ALIBABA in row else self.usual_unit
        at = self._time(row, time)
        tokens = number(row, prompt, TOKENS_MAX), number(row, completion, TOKENS_MAX)
        if tokens[1] or completion != FAILED:
            self.numbers.extend((at, *tokens))
        else:
            self.failed_count += 1

    def _time(self, row: Mapping[str, Any], name: str) -> float:
        value = row.get(name)
        if value is None:
            instead = (
                ", only a delay: each request needs its own time" if "delay" in row else ""
            )  # as Dynamo's sessions
            raise ValueError(f"it has no {name}{instead}")
        at = _date_s(value) if self.is_dated else as_number(value, STAMP_MAX, -STAMP_MAX)
        if at is None:
            expected = "a date and time as before" if self.is_dated else "a number, or a date and time in every line"
            raise ValueError(f"its {name} is {told(value)}: expected {expected}, such as 2023-11-16 18:15:46.68")
        return at

    def recorded(self, seed: int) -> Recorded:
        """Make arrivals of what was taken. seed: of what is drawn.

        Raises:
            InputError: there is none, or they cannot belong together.
        """
        if not self.numbers:
            raise InputError("no request in it")
        at, *tokens = np.frombuffer(self.numbers, dtype=np.float64).reshape(-1, 3).T
        unit, read_as = ("s", "its times dates") if self.is_dated else _unit(float(at.min()), self.usual_unit)
        at_s = at / PER_SECOND[unit]
        if self.names is FIELDS and unit == "ms" and at_s.min() < at_s.max() and not np.any(at_s % STAMP_S):
            at_s += np.random.default_rng(seed).uniform(0, STAMP_S, len(at_s))
        at_s -= at_s.min()
        if at_s.max() > SECONDS_MAX:
            raise InputError(f"its times, {read_as}, are more than {SECONDS_MAX:g} s apart")
        order = np.argsort(at_s, kind="stable")
        lengths = (np.maximum(1, each[order].astype(np.int64)).tolist() for each in tokens)
        if self.failed_count:
            read_as += f", {counted(self.failed_count, 'request')} that failed left out"
        return Recorded(arrivals=list(map(Arrival, at_s[order].tolist(), *lengths)), read_as=read_as)


def _unit(first: float, usual: str) -> tuple[str, str]:
    """Tell the unit of stamps by the first one, and what to say of them."""
    least, most = SINCE_1970_S
    unit = next((unit for unit, per_second in PER_SECOND.items() if least <= first / per_second <= most), None)
    return (unit, f"its times in {unit} since 1970") if unit else (usual, f"its times in {usual}")


def _date_s(value: Any) -> float | None:
    """Read a date and time as seconds since 1970; None: it is none, as is a number such as 20240510."""
    with suppress(ValueError, TypeError, OverflowError):
        if ":" in value:
            found = datetime.fromisoformat(value)
            return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
    return None
