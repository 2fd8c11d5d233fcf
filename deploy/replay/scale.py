"""Makes traces smaller, larger, shorter or burstier, and tells their load then. Pure: all dice are seeded.

- Time is not compressed unless `faster` is called: the ratio of bursts to reaction times is what a replay is about.
- Less load: requests are drawn from the trace. More: copies of it, each shifted in a circle by a time of its own, are
  laid over it. Both give the rate that was asked for, to the request.
- Every arrival stays within [0, span_s), in order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from .records import Arrival

Floats = npt.NDArray[np.float64]
ROSE_PEAK_OVER_MEAN = 4.22  # per second, of the trace in its paper (24 hours)
ENVELOPE_S = 60.0  # `bursty` keeps what is slower than this
SHAPES = np.geomspace(0.05, 200.0, 24).tolist()  # of the Gamma; 200 is all but Poisson
TRIALS, DRAWS = 4, 16  # to know the peak of a shape; to choose from with the right one


def window(arrivals: Sequence[Arrival], start_s: float, duration_s: float) -> list[Arrival]:
    """Return the arrivals in [start_s, start_s + duration_s), their times counted from start_s."""
    end_s = start_s + duration_s
    return [replace(each, at_s=each.at_s - start_s) for each in arrivals if start_s <= each.at_s < end_s]


def at_rate(arrivals: Sequence[Arrival], rate_per_s: float, *, span_s: float, seed: int) -> list[Arrival]:
    """Give a load another mean rate: thin it, or lay it over itself.

    Args:
        arrivals: in order, within [0, span_s).
        rate_per_s: wanted mean over span_s.

    Returns:
        round(rate_per_s * span_s) arrivals in order, within [0, span_s); none when there were none.
    """
    count = round(rate_per_s * span_s)
    if not arrivals:
        return []
    dice = np.random.default_rng(seed)
    found: list[Arrival] = []
    for copy in range(math.ceil(count / len(arrivals))):
        shift_s = float(dice.uniform(0, span_s)) if copy else 0.0
        wanted = min(len(arrivals), count - len(found))
        chosen = np.sort(dice.choice(len(arrivals), wanted, replace=False)).tolist()
        found += [_shifted(arrivals[index], shift_s, span_s) for index in chosen]
    return sorted(found, key=lambda each: each.at_s)


def _shifted(arrival: Arrival, shift_s: float, span_s: float) -> Arrival:
    if not shift_s:
        return arrival
    at_s = (arrival.at_s + shift_s) % span_s
    return replace(arrival, at_s=at_s if at_s < span_s else 0.0)  # % may round up to span_s itself


def faster(arrivals: Sequence[Arrival], speed: float) -> list[Arrival]:
    """Compress time itself: bursts get shorter and steeper. Say so wherever a figure of it is shown."""
    assert speed > 0
    return [replace(each, at_s=each.at_s / speed) for each in arrivals]


def with_lengths(arrivals: Sequence[Arrival], factor: float) -> list[Arrival]:
    """Scale prompts and completions, to at least one token each."""
    assert factor > 0
    return [
        replace(
            each,
            prompt_tokens=max(1, round(each.prompt_tokens * factor)),
            completion_tokens=max(1, round(each.completion_tokens * factor)),
        )
        for each in arrivals
    ]


def fitted(arrivals: Sequence[Arrival], context_tokens: int) -> tuple[list[Arrival], int]:
    """Cut requests to the model's context; returns all of them, and how many were cut.

    Both prompt and completion keep half of the context.
    """
    assert context_tokens >= 2
    cut = [_cut(each, context_tokens) for each in arrivals]
    return cut, sum(one != other for one, other in zip(arrivals, cut, strict=True))


def _cut(arrival: Arrival, context_tokens: int) -> Arrival:
    if arrival.prompt_tokens + arrival.completion_tokens <= context_tokens:
        return arrival
    completion = min(arrival.completion_tokens, max(context_tokens // 2, context_tokens - arrival.prompt_tokens))
    return replace(
        arrival,
        prompt_tokens=min(arrival.prompt_tokens, context_tokens - completion),
        completion_tokens=completion,
    )


def bursty(
    arrivals: Sequence[Arrival], peak_over_mean: float = ROSE_PEAK_OVER_MEAN, *, span_s: float, seed: int
) -> list[Arrival]:
    """Redraw the times of the same requests, in the same order, from a Gamma-modulated Poisson process.

    The rate of each second is that of the trace's minute times a Gamma of mean 1; its shape is the one whose busiest
    second is on average nearest to `peak_over_mean`, and of some draws with it the nearest is taken. Few requests a
    second are burstier than that by chance alone: then what comes out is Poisson, and its statistics say so.
    """
    if not arrivals:
        return []
    rates = _minute_rates(arrivals, span_s)

    def drawn(shape: float, index: int) -> Floats:
        dice = np.random.default_rng((seed, index))
        return placed(rates * dice.gamma(shape, 1 / shape, len(rates)), len(arrivals), span_s, dice)

    def miss(*draws: Floats) -> float:
        return abs(sum(Load.of_times(times, span_s).max_over_mean for times in draws) / len(draws) - peak_over_mean)

    shape = min(SHAPES, key=lambda each: miss(*(drawn(each, index) for index in range(TRIALS))))
    times = min((drawn(shape, index) for index in range(DRAWS)), key=miss)
    return [replace(each, at_s=at_s) for each, at_s in zip(arrivals, times.tolist(), strict=True)]


def _minute_rates(arrivals: Sequence[Arrival], span_s: float) -> Floats:
    """Return the rate of each second, shape (ceil(span_s),): the mean of the minute that the second is in."""
    seconds = np.arange(math.ceil(span_s))
    minutes = (np.array([each.at_s for each in arrivals]) / ENVELOPE_S).astype(int)
    counts = np.bincount(minutes, minlength=math.ceil(span_s / ENVELOPE_S)).astype(float)
    lasted_s = np.bincount((seconds / ENVELOPE_S).astype(int), minlength=len(counts))
    rates: Floats = (counts / np.maximum(lasted_s, 1))[(seconds / ENVELOPE_S).astype(int)]
    return rates


def placed(rates: Floats, count: int, span_s: float, dice: np.random.Generator) -> Floats:
    """Draw `count` times of a Poisson process whose rate changes every second, given that there are so many of them.

    Args:
        rates: any unit, shape (ceil(span_s),); all zero means even.

    Returns:
        float64 seconds in order, shape (count,), within [0, span_s).
    """
    widths: Floats = np.minimum(np.arange(len(rates)) + 1, span_s) - np.arange(len(rates))
    weights = rates * widths
    if not weights.sum():
        weights = widths
    edges = np.concatenate(([0.0], np.cumsum(weights)))
    ends = np.concatenate((np.arange(len(rates)), [span_s]))
    times = np.interp(dice.uniform(0, edges[-1], count), edges, ends)
    return np.minimum(np.sort(times), np.nextafter(span_s, 0))


@dataclass(frozen=True, kw_only=True)
class Load:
    """The shape of a load: requests per second, counted in seconds of their own.

    Attributes:
        count: requests.
        mean_per_s: over the whole span.
        p99_over_mean, max_over_mean: of the seconds.
        idc: index of dispersion (variance over mean of the seconds); 1 is Poisson.
    """

    count: int
    mean_per_s: float
    p99_over_mean: float
    max_over_mean: float
    idc: float

    @classmethod
    def of(cls, arrivals: Sequence[Arrival], span_s: float) -> Load:
        """Compute the load of arrivals within [0, span_s)."""
        return cls.of_times(np.array([each.at_s for each in arrivals]), span_s)

    @classmethod
    def of_times(cls, times: Floats, span_s: float) -> Load:
        """Compute the load of times within [0, span_s)."""
        counts = np.bincount(times.astype(int), minlength=math.ceil(span_s))
        mean = float(counts.mean()) if len(times) else 0.0
        if not mean:
            return cls(count=0, mean_per_s=0.0, p99_over_mean=0.0, max_over_mean=0.0, idc=0.0)
        return cls(
            count=len(times),
            mean_per_s=len(times) / span_s,
            p99_over_mean=float(np.percentile(counts, 99)) / mean,
            max_over_mean=float(counts.max()) / mean,
            idc=float(counts.var()) / mean,
        )
