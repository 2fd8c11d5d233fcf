"""Percentiles of a replay, how sure they are, and when it was worst.

- A percentile is a value that occurred, by rank, as everywhere in the bench room.
- Intervals are of a moving-block bootstrap: requests of one burst share their wait, so drawing them one by one would
  make a P99 look surer than it is. A block is the cube root of the count, as is usual.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .records import Outcome

Floats = npt.NDArray[np.float64]
RESAMPLES = 1000
CONFIDENCE = 0.95
WORST_S, WORST_STEP_S, WORST_COUNT_MIN = 60.0, 5.0, 10


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Values in milliseconds; p99_low and p99_high: the 95 % confidence interval of p99. None: there are no values."""

    count: int
    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None
    p99_low: float | None
    p99_high: float | None
    max: float | None


NOTHING = Spread(count=0, mean=None, p50=None, p90=None, p99=None, p99_low=None, p99_high=None, max=None)


def by_rank(values: Floats, fraction: float) -> Floats:
    """Along the last axis: the value that `fraction` of them are at or below; one that occurred."""
    assert values.shape[-1] and 0 < fraction <= 1
    rank = min(values.shape[-1] - 1, int(values.shape[-1] * fraction))
    found: Floats = np.partition(values, rank, axis=-1)[..., rank]
    return found


def spread(values: Floats, *, seed: int) -> Spread:
    """values: float64 milliseconds in order of arrival, shape (count,)."""
    if not len(values):
        return NOTHING
    low, high = p99_interval(values, seed=seed)
    p50, p90, p99 = (float(by_rank(values, fraction)) for fraction in (0.5, 0.9, 0.99))
    return Spread(
        count=len(values),
        mean=float(values.mean()),
        p50=p50,
        p90=p90,
        p99=p99,
        p99_low=low,
        p99_high=high,
        max=float(values.max()),
    )


def p99_interval(values: Floats, *, seed: int) -> tuple[float, float]:
    """Between which values P99 lies, at 95 % confidence. With fewer than some 500 values it says little.

    Args:
        values: float64 in order of arrival, shape (count,).
    """
    dice = np.random.default_rng(seed)
    count = len(values)
    block = max(1, round(count ** (1 / 3)))
    circle = np.concatenate((values, values[: block - 1]))
    blocks = np.lib.stride_tricks.sliding_window_view(circle, block)
    found = np.empty(RESAMPLES)
    for index in range(RESAMPLES):  # one by one: all at once would take gigabytes for an hour's requests
        chosen = dice.integers(0, count, -(-count // block))
        found[index] = by_rank(blocks[chosen].reshape(-1)[:count], 0.99)
    edge = (1 - CONFIDENCE) / 2
    return float(np.quantile(found, edge)), float(np.quantile(found, 1 - edge))


@dataclass(frozen=True, kw_only=True)
class Worst:
    """The 60 s of arrivals in which a figure was worst. from_s: where they begin; value: milliseconds, or a share."""

    from_s: float
    value: float
    request_count: int


def worst_p99(outcomes: Sequence[Outcome], values: Sequence[float | None]) -> Worst | None:
    """By P99. values: one per outcome, milliseconds; None where there is none. None: too few requests for a window."""
    pairs = [(each.arrival.at_s, value) for each, value in zip(outcomes, values, strict=True) if value is not None]
    return _worst(pairs, lambda window: float(by_rank(window, 0.99)))


def worst_share(outcomes: Sequence[Outcome], kept: Sequence[bool]) -> Worst | None:
    """By the share of those that were kept, the lowest. kept: one per outcome."""
    pairs = [(each.arrival.at_s, float(one)) for each, one in zip(outcomes, kept, strict=True)]
    found = _worst(pairs, lambda window: -float(window.mean()))
    return None if found is None else Worst(from_s=found.from_s, value=-found.value, request_count=found.request_count)


def _worst(pairs: Sequence[tuple[float, float]], badness: Callable[[Floats], float]) -> Worst | None:
    """Over windows that begin every 5 s and hold at least 10 requests; pairs are in order of time."""
    if not pairs:
        return None
    times, values = np.array(pairs).T
    found: list[Worst] = []
    for from_s in np.arange(0.0, max(times[-1] - WORST_S, 0.0) + WORST_STEP_S, WORST_STEP_S).tolist():
        first, last = np.searchsorted(times, (from_s, from_s + WORST_S))
        if last - first >= WORST_COUNT_MIN:
            value = badness(values[first:last])
            found.append(Worst(from_s=from_s, value=value, request_count=int(last - first)))
    return max(found, key=lambda each: each.value, default=None)
