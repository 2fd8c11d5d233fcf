"""Traces by name or path: which format it is, and the part of it that is wanted.

- Formats are told by their content: CSV (ours, Azure's, BurstGPT's), JSON lines (Mooncake's, Alibaba's), a rate curve
  (t_s,req_per_min), BurstGPT's aggregates, ServeGen's npz; all but the npz also gzipped.
- The shipped samples are real load; data/README.md names their source and licence.
- The same arguments give the same arrivals.
"""

from __future__ import annotations

import io
import zipfile
import zlib
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE
from dataclasses import dataclass
from gzip import BadGzipFile, GzipFile
from importlib.resources import files
from pathlib import Path

import numpy as np

from ...fabric.contract.errors import ConfigError, FabricError, InputError
from ...fabric.contract.text import DAMAGED
from ...fabric.host.files import read_regular
from .generated import Generator, parse_json, read_burstgpt, read_curve, read_servegen
from .recorded import Recorded, read_csv, read_json
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
        trace = _recorded(content, part) if isinstance(content, Recorded) else _made(content, part)
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
        return name, _unpacked(data) if data.startswith(b"\x1f\x8b") else data
    except FileNotFoundError as error:
        known = ", ".join(SAMPLES)
        raise ConfigError(f"no trace {name!r}: give the path of a file, or one of {known}", trace=name) from error
    except (BadGzipFile, EOFError, zlib.error) as error:
        raise InputError(f"trace {name} cannot be unpacked. {DAMAGED}", trace=name) from error
    except OSError as error:
        raise InputError(f"trace {name} cannot be read: {error.strerror}", trace=name) from error


def _unpacked(data: bytes) -> bytes:
    """Unpack gzip, up to what a trace may have.

    Raises:
        ConfigError: it is more.
    """
    found = GzipFile(fileobj=io.BytesIO(data)).read(BYTES_MAX + 1)
    if len(found) > BYTES_MAX:
        raise ConfigError(f"it is more than {BYTES_MAX:,} bytes when unpacked: take a part of it")
    return found


def _content(data: bytes, part: Part) -> Recorded | Generator:
    """Read the content; its first bytes tell the format."""
    if data.startswith(b"PK"):
        return _npz(data)
    if data.startswith(b"version https://git-lfs"):
        raise InputError("it is a pointer of Git LFS and not the file: run `git lfs pull` where it was cloned")
    try:
        data = _utf8(data)
        if data.lstrip().startswith((b"{", b"[")):
            whole = parse_json(data)
            if whole is not None and "week1_minute_tps" in whole:
                return read_burstgpt(whole, _lengths(part))
            return read_json(data, part.seed)
        text = data.decode()
    except UnicodeDecodeError as error:
        raise InputError("neither CSV, JSON lines nor npz") from error
    if "req_per_min" in text.partition("\n")[0]:
        return read_curve(text, _lengths(part))
    return read_csv(text)


def _utf8(data: bytes) -> bytes:
    """Return text as UTF-8 without a mark at its begin: Excel writes one, PowerShell UTF-16."""
    if data.startswith((BOM_UTF16_LE, BOM_UTF16_BE)):
        return data.decode("utf-16").encode()
    return data.removeprefix(BOM_UTF8)


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


def _recorded(recorded: Recorded, part: Part) -> Trace:
    """Cut a recorded trace, then thin or superpose it."""
    arrivals = recorded.arrivals
    end_s = arrivals[-1].at_s
    whole_s = max(1.0, np.nextafter(end_s, np.inf) - part.start_s)  # so that the last request is within
    _check_within(part, end_s)
    span_s = float(part.duration_s or whole_s)
    found = window(arrivals, part.start_s, span_s)
    if part.rate_per_s is None or not found:
        return Trace(arrivals=found, span_s=span_s, origin=f"as recorded, {recorded.read_as}")
    _check_count(part.rate_per_s * span_s)
    factor = part.rate_per_s * span_s / len(found)
    origin = f"thinned to {factor:.3g} of it" if factor < 1 else f"{factor:.3g} shifted copies superposed"
    arrivals = at_rate(found, part.rate_per_s, span_s=span_s, seed=part.seed)
    return Trace(arrivals=arrivals, span_s=span_s, origin=f"{origin}, {recorded.read_as}")


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
