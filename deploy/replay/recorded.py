"""Traces that name every request: CSV of several publishers, JSON lines of Mooncake.

- Times become seconds since the first request; requests are sorted.
- A request that was answered with nothing, or asked nothing, has one token of each.
- Mooncake's conversation trace is stamped every 3 s: a stamp stands for the 3 s after it, drawn evenly.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import datetime

import numpy as np
import orjson

from ...fabric.contract.errors import InputError
from .records import Arrival

# Names of the same three columns: ours, Azure's, BurstGPT's.
TIME = ("t_s", "TIMESTAMP", "Timestamp")
PROMPT = ("input_tokens", "ContextTokens", "Request tokens")
COMPLETION = ("output_tokens", "GeneratedTokens", "Response tokens")
STAMP_MS = 3000
Row = tuple[float, float, float]  # seconds, prompt tokens, completion tokens


def read_csv(text: str) -> list[Arrival]:
    """A CSV with a header that has the three columns under any of their names.

    Raises:
        InputError: it has not, or a line cannot be read.
    """
    reader = csv.DictReader(text.splitlines())
    header = reader.fieldnames or []
    columns = [next((name for name in names if name in header), None) for names in (TIME, PROMPT, COMPLETION)]
    if None in columns:
        raise InputError(f"no column for time, prompt and completion among {', '.join(header) or 'nothing'}")
    at, prompt, completion = (name for name in columns if name is not None)
    rows: list[Row] = []
    for line in reader:
        try:
            rows.append((_seconds(line[at]), float(line[prompt]), float(line[completion])))
        except (ValueError, TypeError) as error:
            raise InputError(f"line {reader.line_num} is no request: {error}", line=reader.line_num) from error
    return _arrivals(rows)


def _seconds(text: str) -> float:
    """Of seconds, or of a date with its time."""
    try:
        return float(text)
    except ValueError:
        return datetime.fromisoformat(text).timestamp()


def read_mooncake(lines: Iterable[bytes], seed: int) -> list[Arrival]:
    """One request per line: timestamp (ms), input_length, output_length. Their hash_ids are not used.

    Raises:
        InputError: a line cannot be read.
    """
    rows = [_mooncake_row(line, number) for number, line in enumerate(lines, 1) if line.strip()]
    stamps_ms = {at_s * 1000 for at_s, _, _ in rows}
    if len(stamps_ms) > 1 and all(stamp % STAMP_MS == 0 for stamp in stamps_ms):
        jitter_s = np.random.default_rng(seed).uniform(0, STAMP_MS / 1000, len(rows)).tolist()
        rows = [(row[0] + late_s, *row[1:]) for row, late_s in zip(rows, jitter_s, strict=True)]
    return _arrivals(rows)


def _mooncake_row(line: bytes, number: int) -> Row:
    try:
        row = orjson.loads(line)
        return row["timestamp"] / 1000, row["input_length"], row["output_length"]
    except (ValueError, TypeError, KeyError) as error:
        raise InputError(f"line {number} is no request: {error!r}", line=number) from error


def _arrivals(rows: Sequence[Row]) -> list[Arrival]:
    """In order, from zero on.

    Raises:
        InputError: there is none.
    """
    if not rows:
        raise InputError("no request in it")
    arrivals = sorted(
        (Arrival(at_s, max(1, int(prompt)), max(1, int(completion))) for at_s, prompt, completion in rows),
        key=lambda each: each.at_s,
    )
    first_s = arrivals[0].at_s
    return [replace(each, at_s=each.at_s - first_s) for each in arrivals]
