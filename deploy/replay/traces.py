"""Traces by name or path: which format it is, and the part of it that is wanted.

- Formats are told by their content: CSV (ours, Azure, BurstGPT), Mooncake's JSON lines, a rate curve (t_s,req_per_min),
  BurstGPT's aggregates, ServeGen's npz; all but the npz also gzipped.
- The shipped samples are real load; data/README.md names their source and licence.
- The same arguments give the same arrivals.
"""

from __future__ import annotations

import csv
import io
import zipfile
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from gzip import BadGzipFile, decompress
from importlib.resources import files
from pathlib import Path

import numpy as np

from ...fabric.contract.errors import ConfigError, FabricError, InputError, WireError
from ...fabric.contract.text import DAMAGED
from ...fabric.contract.wire import load_json
from ...fabric.host.files import read_regular
from .generated import Generator, parse_json, read_burstgpt, read_curve, read_servegen
from .numbers import FIELD, SECONDS_MAX, TOKENS_MAX, number
from .records import Arrival
from .scale import at_rate, window

BYTES_MAX = 4 << 30  # of a trace, packed or not
SAMPLES = ("azure-conv", "azure-code")
REQUEST_COUNT_MAX = 10_000_000  # that are made of a trace, all in memory
GENERATED_S = 3600.0  # how much is made when no duration is given


@dataclass(frozen=True, kw_only=True)
class Part:
    """The part that is wanted of a trace.

    Attributes:
        start_s, duration_s: of the trace's own time; None: to its end, or an hour of one that is made.
        rate_per_s: mean requests per second; None: as recorded.
        seed: of everything drawn.
        lengths: a trace, by name or path, whose lengths the requests of a mere rate curve have.
    """

    start_s: float = 0.0
    duration_s: float | None = None
    rate_per_s: float | None = None
    seed: int = 0
    lengths: str = SAMPLES[0]


@dataclass(frozen=True, kw_only=True)
class Trace:
    """A part of a trace. arrivals: within [0, span_s), in order; origin: how its rate came about, for people."""

    arrivals: list[Arrival]
    span_s: float
    origin: str


ALL = Part()


def load_trace(source: str | Path, part: Part = ALL) -> list[Arrival]:
    """Return the arrivals of `read_trace`."""
    return read_trace(source, part).arrivals


def read_trace(source: str | Path, part: Part = ALL) -> Trace:
    """Read a part of a trace.

    Args:
        source: a sample's name, or a path.

    Raises:
        ConfigError: there is no such trace, or no such part of it.
        InputError: it cannot be read; names the file.
    """
    name, data = _bytes(source)
    try:
        content = _content(data, part)
        trace = _recorded(content, part) if isinstance(content, list) else _made(content, part)
    except InputError as error:
        raise InputError(f"trace {name}: {error}", **{**error.facts, "trace": name}) from error
    if not trace.arrivals:
        end_s = part.start_s + trace.span_s
        raise ConfigError(f"trace {name} has no request from {part.start_s:g} to {end_s:g} s", trace=name)
    return trace


def _bytes(source: str | Path) -> tuple[str, bytes]:
    """Return the trace's name and content, unpacked."""
    name, path = str(source), Path(source)
    try:
        if name in SAMPLES:
            data = files(__package__).joinpath("data", f"{name}.csv.gz").read_bytes()
        else:
            data = read_regular(path, BYTES_MAX)
        return name, decompress(data) if data.startswith(b"\x1f\x8b") else data
    except FileNotFoundError as error:
        known = ", ".join(SAMPLES)
        raise ConfigError(f"no trace {name!r}: give the path of a file, or one of {known}", trace=name) from error
    except (BadGzipFile, EOFError, zlib.error) as error:
        raise InputError(f"trace {name} cannot be unpacked. {DAMAGED}", trace=name) from error
    except OSError as error:
        raise InputError(f"trace {name} cannot be read: {error.strerror}", trace=name) from error


def _content(data: bytes, part: Part) -> list[Arrival] | Generator:
    """Read the content; its first bytes tell the format."""
    if data.startswith(b"PK"):
        return _npz(data)
    if data.lstrip().startswith(b"{"):
        whole = parse_json(data)
        if whole is not None and "week1_minute_tps" in whole:
            return read_burstgpt(whole, _lengths(part))
        return read_mooncake(data.splitlines(), part.seed)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError("neither CSV, JSON lines nor npz") from error
    if "req_per_min" in text.partition("\n")[0]:
        return read_curve(text, _lengths(part))
    return read_csv(text)


def _npz(data: bytes) -> Generator:
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            return read_servegen(dict(arrays))
    except (ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        if isinstance(error, FabricError):
            raise
        raise InputError(f"not an npz of arrays of numbers. {DAMAGED}") from error


def _lengths(part: Part) -> list[Arrival]:
    """Read the trace whose lengths are borrowed.

    Raises:
        ConfigError: that one is a curve too.
    """
    name, data = _bytes(part.lengths)
    if "req_per_min" in data[:200].decode(errors="replace") or b"week1_minute_tps" in data[:200]:
        raise ConfigError(f"trace {name} has no lengths of its own: take another one for them", trace=name)
    return load_trace(part.lengths)


def _recorded(arrivals: list[Arrival], part: Part) -> Trace:
    """Cut a recorded trace, then thin or superpose it."""
    end_s = arrivals[-1].at_s
    whole_s = max(1.0, np.nextafter(end_s, np.inf) - part.start_s)  # so that the last request is within
    _check_within(part, end_s)
    span_s = float(part.duration_s or whole_s)
    found = window(arrivals, part.start_s, span_s)
    if part.rate_per_s is None or not found:
        return Trace(arrivals=found, span_s=span_s, origin="as recorded")
    _check_count(part.rate_per_s * span_s)
    factor = part.rate_per_s * span_s / len(found)
    origin = f"thinned to {factor:.3g} of it" if factor < 1 else f"{factor:.3g} shifted copies superposed"
    return Trace(arrivals=at_rate(found, part.rate_per_s, span_s=span_s, seed=part.seed), span_s=span_s, origin=origin)


def _made(generator: Generator, part: Part) -> Trace:
    """Draw a trace at the wanted rate."""
    _check_within(part, generator.span_s)
    span_s = part.duration_s or min(GENERATED_S, generator.span_s - part.start_s)
    observed = generator.mean_per_s(part.start_s, span_s)
    if not observed:
        return Trace(arrivals=[], span_s=span_s, origin="")
    factor = 1.0 if part.rate_per_s is None else part.rate_per_s / observed
    _check_count(observed * factor * span_s)
    drawn = generator.draw(part.start_s, span_s, factor, part.seed)
    return Trace(arrivals=drawn, span_s=span_s, origin=f"drawn at {factor:.3g} times the observed rate")


def _check_count(count: float) -> None:
    """Refuse to make more requests than a machine has room for.

    Raises:
        ConfigError: they are.
    """
    if not count <= REQUEST_COUNT_MAX:
        said = f"{count:,.0f} requests would have to be made, {REQUEST_COUNT_MAX:,} at most"
        raise ConfigError(f"{said}: take a lower rate, or a shorter part of the trace")


def _check_within(part: Part, end_s: float) -> None:
    """Refuse a window that is partly outside the trace: it would have another rate.

    Raises:
        ConfigError: it is.
    """
    wanted_s = part.start_s + (part.duration_s or 0.0)
    if part.start_s < 0 or part.start_s > end_s or wanted_s > end_s + 1:
        raise ConfigError(
            f"the trace ends at {end_s:,.0f} s, wanted is {part.start_s:g} to {wanted_s:g} s: choose a part of it",
            end_s=end_s,
        )


# ---------------------------------------------------------------- recorded
#
# Traces that name every request: CSV of several publishers, JSON lines of Mooncake.
#
# - Times become seconds since the first request; requests are sorted.
# - A request that was answered with nothing, or asked nothing, has one token of each.
# - Mooncake's conversation trace is stamped every 3 s: a stamp stands for the 3 s after it, drawn evenly.


# Names of the same three columns: ours, Azure's, BurstGPT's.
TIME = ("t_s", "TIMESTAMP", "Timestamp")
PROMPT = ("input_tokens", "ContextTokens", "Request tokens")
COMPLETION = ("output_tokens", "GeneratedTokens", "Response tokens")
STAMP_MS = 3000
Row = tuple[float, float, float]  # seconds, prompt tokens, completion tokens


def read_csv(text: str) -> list[Arrival]:
    """Read a CSV whose header has the three columns under any of their names.

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
    try:
        for line in reader:
            tokens = number(line, prompt, TOKENS_MAX), number(line, completion, TOKENS_MAX)
            rows.append((_seconds(line, at), *tokens))
    except ValueError as error:
        raise InputError(f"line {reader.line_num} is no request: {error}", line=reader.line_num) from error
    except csv.Error as error:
        raise InputError(f"line {reader.line_num + 1} is no request: {FIELD}", line=reader.line_num + 1) from error
    return _arrivals(rows)


def _seconds(row: dict[str, str], name: str) -> float:
    """Read seconds, or a date with its time."""
    try:
        return number(row, name, SECONDS_MAX, -SECONDS_MAX)
    except ValueError as error:
        try:
            return datetime.fromisoformat(row[name]).timestamp()
        except (ValueError, TypeError, OverflowError):
            raise error from None


def read_mooncake(lines: Iterable[bytes], seed: int) -> list[Arrival]:
    """Read one request per line: timestamp (ms), input_length, output_length. Their hash_ids are not used.

    Raises:
        InputError: a line cannot be read.
    """
    rows = [_mooncake_row(line, at) for at, line in enumerate(lines, 1) if line.strip()]
    stamps_ms = {at_s * 1000 for at_s, _, _ in rows}
    if len(stamps_ms) > 1 and all(stamp % STAMP_MS == 0 for stamp in stamps_ms):
        jitter_s = np.random.default_rng(seed).uniform(0, STAMP_MS / 1000, len(rows)).tolist()
        rows = [(row[0] + late_s, *row[1:]) for row, late_s in zip(rows, jitter_s, strict=True)]
    return _arrivals(rows)


def _mooncake_row(line: bytes, line_number: int) -> Row:
    try:
        row = load_json(line)
        if not isinstance(row, dict):
            raise ValueError("it is no JSON object")
        at_ms = number(row, "timestamp", SECONDS_MAX * 1000, -SECONDS_MAX * 1000)
        return at_ms / 1000, number(row, "input_length", TOKENS_MAX), number(row, "output_length", TOKENS_MAX)
    except (ValueError, WireError) as error:
        raise InputError(f"line {line_number} is no request: {error}", line=line_number) from error


def _arrivals(rows: Sequence[Row]) -> list[Arrival]:
    """Make arrivals in order, counted from zero.

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
