"""Makes load from statistics of real load: curves of its rate, and ServeGen's clients.

- A curve says how many requests come, minute by minute; their lengths are drawn from a trace that names them. What
  varies faster than the curve is Poisson: lay `scale.bursty` over it.
- ServeGen: every client has its own rate and gaps (Gamma or Weibull) in every 10 minutes, and its own lengths in every
  6 hours; bursts of single clients are what makes the sum bursty. More load is more of every client.
"""

from __future__ import annotations

import csv
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import orjson

from ...fabric.contract.errors import InputError
from .numbers import FIELD, PER_SECOND_MAX, SECONDS_MAX, TOKENS_MAX, number, table, within
from .records import Arrival
from .scale import Floats, placed, window

WINDOW_S = 600.0
LENGTHS_S = 6 * 3600.0
WEEK_MINUTES = 7 * 24 * 60
GAMMA, WEIBULL = 1, 2  # `pattern` of a client in a window; 0: it sends nothing
MISSING = -1


class Generator(Protocol):
    """Load of which any part can be drawn, within the time that was observed."""

    @property
    def span_s(self) -> float:
        """The time that was observed."""
        ...

    def mean_per_s(self, start_s: float, duration_s: float) -> float:
        """Return the observed mean rate in a window."""
        ...

    def draw(self, start_s: float, duration_s: float, factor: float, seed: int) -> list[Arrival]:
        """Draw arrivals in [0, duration_s), at `factor` times the observed rate."""
        ...


@dataclass(frozen=True)
class Curve:
    """A rate over time, straight between its points. lengths: of requests, to draw from."""

    at_s: Floats
    per_s: Floats
    lengths: Sequence[Arrival]

    @property
    def span_s(self) -> float:
        """The time of its last point."""
        return float(self.at_s[-1])

    def _seconds(self, start_s: float, duration_s: float) -> Floats:
        middles = start_s + np.arange(math.ceil(duration_s)) + 0.5
        rates: Floats = np.interp(middles, self.at_s, self.per_s)
        return rates

    def mean_per_s(self, start_s: float, duration_s: float) -> float:
        """Return the curve's mean rate in a window."""
        return float(self._seconds(start_s, duration_s).mean())

    def draw(self, start_s: float, duration_s: float, factor: float, seed: int) -> list[Arrival]:
        """Draw Poisson arrivals around the curve; their count is the curve's, to the request."""
        dice = np.random.default_rng(seed)
        rates = self._seconds(start_s, duration_s) * factor
        count = round(float(rates.mean()) * duration_s)
        times = placed(rates, count, duration_s, dice).tolist()
        picked = dice.integers(0, len(self.lengths), count).tolist()
        lengths = (self.lengths[index] for index in picked)
        return [Arrival(at, one.prompt_tokens, one.completion_tokens) for at, one in zip(times, lengths, strict=True)]


def read_curve(text: str, lengths: Sequence[Arrival]) -> Curve:
    """Read a CSV with t_s and req_per_min.

    Raises:
        InputError: a line cannot be read, or there are fewer than two.
    """
    reader, rows = table(text), []
    try:
        for row in reader:
            rows.append(
                (number(row, "t_s", SECONDS_MAX, -SECONDS_MAX), number(row, "req_per_min", 60 * PER_SECOND_MAX))
            )
    except ValueError as error:
        raise InputError(f"no curve of t_s and req_per_min: line {reader.line_num}: {error}") from error
    except csv.Error as error:
        raise InputError(f"no curve of t_s and req_per_min: line {reader.line_num + 1}: {FIELD}") from error
    if len({at_s for at_s, _ in rows}) < 2:
        raise InputError("a curve needs two points, at different times")
    at_s, per_min = np.array(sorted(rows)).T
    return Curve(at_s - at_s[0], per_min / 60, lengths)


def read_burstgpt(data: dict[str, Any], lengths: Sequence[Arrival]) -> Curve:
    """Read tokens per second of each minute of a week as requests; a minute that is not named had none.

    The mean tokens of a request are those of the same data. Use its shape at a rate of your own: it is a small service.

    Raises:
        InputError: the data is not as expected.
    """
    try:
        minutes, tokens_per_s = _pairs(data, "week1_minute_tps").T
        requests, tokens = _pairs(data, "daily_req_tok").sum(axis=0)
        within(minutes, "the minutes of week1_minute_tps", WEEK_MINUTES)
        within(tokens_per_s, "the tokens of week1_minute_tps", PER_SECOND_MAX * TOKENS_MAX)
        within(np.array((requests, tokens)), "the sums of daily_req_tok", sys.float_info.max, 1)
    except ValueError as error:
        raise InputError(f"no aggregates of BurstGPT: {error}") from error
    rates: Floats = np.zeros(int(minutes.max()) + 1)
    rates[minutes.astype(int)] = tokens_per_s / (tokens / requests)
    return Curve(np.arange(len(rates), dtype=np.float64) * 60, rates, lengths)


def _pairs(data: Mapping[str, Any], name: str) -> Floats:
    """Raises ValueError: it is not there, or no list of pairs of numbers."""
    try:
        found: Floats = np.array(data[name], dtype=np.float64)
    except KeyError as error:
        raise ValueError(f"it has no {name}") from error
    except (ValueError, TypeError, OverflowError) as error:
        raise ValueError(f"its {name} is no list of pairs of numbers") from error
    if found.ndim != 2 or found.shape[1] != 2 or not found.size:
        raise ValueError(f"its {name} is no list of pairs of numbers")
    return found


@dataclass(frozen=True)
class ServeGen:
    """Clients of a service, C of them, in W windows of 10 minutes and L windows of 6 hours, lengths at Q levels.

    Attributes:
        rate_C_W: float32, requests per second, 0 where a client is silent.
        pattern_C_W: uint8. shape_C_W: float32, of its gaps.
        levels_Q: float64. prompt_C_L_Q, completion_C_L_Q: int32 tokens, -1 where they are not known.
    """

    rate_C_W: npt.NDArray[np.float32]
    pattern_C_W: npt.NDArray[np.uint8]
    shape_C_W: npt.NDArray[np.float32]
    levels_Q: Floats
    prompt_C_L_Q: npt.NDArray[np.int32]
    completion_C_L_Q: npt.NDArray[np.int32]

    @property
    def span_s(self) -> float:
        """The time that was observed, 14 days."""
        return float(self.rate_C_W.shape[1] * WINDOW_S)

    def _windows(self, start_s: float, duration_s: float) -> range:
        return range(int(start_s / WINDOW_S), math.ceil((start_s + duration_s) / WINDOW_S))

    def mean_per_s(self, start_s: float, duration_s: float) -> float:
        """Return the mean rate of all clients together, over the windows that are touched."""
        windows = self._windows(start_s, duration_s)
        return float(self.rate_C_W[:, windows.start : windows.stop].sum(axis=0).mean())

    def draw(self, start_s: float, duration_s: float, factor: float, seed: int) -> list[Arrival]:
        """Draw whole windows and cut them, so that a longer replay begins as a shorter one does."""
        found: list[Arrival] = []
        for index in self._windows(start_s, duration_s):
            for client in np.flatnonzero(self.rate_C_W[:, index]).tolist():
                found += self._drawn(client, index, factor, np.random.default_rng((seed, index, client)))
        return window(sorted(found, key=lambda each: each.at_s), start_s, duration_s)

    def _drawn(self, client: int, index: int, factor: float, dice: np.random.Generator) -> list[Arrival]:
        count = int(dice.poisson(self.rate_C_W[client, index] * factor * WINDOW_S))
        ends = np.cumsum(self._gaps(client, index, count + 1, dice))
        times = index * WINDOW_S + ends[:-1] / ends[-1] * WINDOW_S
        prompts, completions = self._lengths(client, index, count, dice)
        rows = zip(times.tolist(), prompts.tolist(), completions.tolist(), strict=True)
        return [Arrival(at_s, max(1, round(prompt)), max(1, round(completion))) for at_s, prompt, completion in rows]

    def _gaps(self, client: int, index: int, count: int, dice: np.random.Generator) -> Floats:
        """Draw gaps in any unit; they are never all zero."""
        shape, pattern = float(self.shape_C_W[client, index]), int(self.pattern_C_W[client, index])
        if not shape > 0 or pattern not in (GAMMA, WEIBULL):
            return dice.exponential(size=count)
        gaps: Floats = dice.gamma(shape, size=count) if pattern == GAMMA else dice.weibull(shape, size=count)
        return np.maximum(gaps, 1e-12)

    def _lengths(self, client: int, index: int, count: int, dice: np.random.Generator) -> tuple[Floats, Floats]:
        part = min(int(index * WINDOW_S / LENGTHS_S), self.prompt_C_L_Q.shape[1] - 1)
        if not self._knows(part)[client]:
            client = self._other(index, part, dice)
        draws = dice.uniform(size=(2, count))
        return (
            np.interp(draws[0], self.levels_Q, self.prompt_C_L_Q[client, part]),
            np.interp(draws[1], self.levels_Q, self.completion_C_L_Q[client, part]),
        )

    def _knows(self, part: int) -> npt.NDArray[np.bool_]:
        """Tell which clients' lengths are known, shape (C,)."""
        lengths = np.concatenate((self.prompt_C_L_Q[:, part], self.completion_C_L_Q[:, part]), axis=1)
        known: npt.NDArray[np.bool_] = (lengths != MISSING).all(axis=1)
        return known

    def _other(self, index: int, part: int, dice: np.random.Generator) -> int:
        """Choose a client whose lengths are known, by its traffic.

        Raises:
            InputError: there is none.
        """
        weights = self.rate_C_W[:, index].astype(float) * self._knows(part)
        if not weights.sum():
            weights = self._knows(part).astype(float)
        if not weights.sum():
            raise InputError(f"no client's lengths are known at {index * WINDOW_S:.0f} s: start elsewhere")
        return int(dice.choice(len(weights), p=weights / weights.sum()))


def read_servegen(arrays: dict[str, npt.NDArray[Any]]) -> ServeGen:
    """Make the clients from the arrays of an npz.

    Raises:
        InputError: one is missing.
    """
    names = ("rate_rps", "pattern", "pat_shape", "quantile_levels", "input_tokens_q", "output_tokens_q")
    missing = [name for name in names if name not in arrays]
    if missing:
        raise InputError(f"no arrays of ServeGen: {', '.join(missing)} missing")
    found = ServeGen(*(arrays[name] for name in names))
    try:
        _check_servegen(found)
    except ValueError as error:
        raise InputError(f"no arrays of ServeGen: {error}") from error
    return found


def _check_servegen(found: ServeGen) -> None:
    """Require that the arrays go together and hold numbers that clients can have.

    Raises:
        ValueError: they do not.
    """
    windows, lengths = found.rate_C_W.shape, found.prompt_C_L_Q.shape
    if len(windows) != 2 or {found.pattern_C_W.shape, found.shape_C_W.shape} != {windows} or not found.rate_C_W.size:
        raise ValueError("rate_rps, pattern and pat_shape are not of the same clients and windows")
    is_alike = len(lengths) == 3 and found.completion_C_L_Q.shape == lengths and found.prompt_C_L_Q.size
    if not is_alike or (lengths[0], *found.levels_Q.shape) != (windows[0], lengths[2]):
        raise ValueError("input_tokens_q and output_tokens_q are not of these clients, at these quantile_levels")
    within(found.rate_C_W, "rate_rps", PER_SECOND_MAX)
    within(found.pattern_C_W, "pattern", 255)
    within(np.nan_to_num(found.shape_C_W, nan=0.0, posinf=np.inf), "pat_shape", float(np.finfo(np.float32).max), -1)
    within(found.levels_Q, "quantile_levels", 1)
    within(found.prompt_C_L_Q, "input_tokens_q", TOKENS_MAX, MISSING)
    within(found.completion_C_L_Q, "output_tokens_q", TOKENS_MAX, MISSING)


def parse_json(data: bytes) -> dict[str, Any] | None:
    """Parse one JSON object; None if there are several, or there is none."""
    try:
        found = orjson.loads(data)
    except orjson.JSONDecodeError:
        return None
    return found if isinstance(found, dict) else None
