"""Two samples: are they of one distribution? Exact tests by permutation, which hold for ties and for few values."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Statistic = Callable[[Floats, Floats], float]

DRAW_COUNT = 2000
ALL_MAX = 2000  # ways of dividing that are all gone through


def mean_distance(one: Floats, other: Floats) -> float:
    """Compute how far the means are apart."""
    return float(abs(one.mean() - other.mean()))


def largest_gap(one: Floats, other: Floats) -> float:
    """Compute the two-sample Kolmogorov-Smirnov statistic: the largest gap between the cumulative distributions."""
    places = np.unique(np.concatenate((one, other)))
    shares = [np.searchsorted(np.sort(each), places, side="right") / len(each) for each in (one, other)]
    return float(np.abs(shares[0] - shares[1]).max())


def chance(one: Sequence[float], other: Sequence[float], statistic: Statistic, seed: int = 0) -> float:
    """Compute the share of all ways to divide the pooled values whose statistic is at least that of the samples.

    Goes through all ways where they are few, else through DRAW_COUNT random ones with the samples' own added.
    Source: Fisher's permutation test; the added one, Phipson and Smyth 2010.
    """
    pooled, count = np.array([*one, *other], np.float64), len(one)
    found = statistic(pooled[:count], pooled[count:]) - 1e-12
    if math.comb(len(pooled), count) <= ALL_MAX:
        ways = [list(each) for each in itertools.combinations(range(len(pooled)), count)]
        hits = sum(statistic(pooled[way], np.delete(pooled, way)) >= found for way in ways)
        return hits / len(ways)
    dice = np.random.default_rng(seed)
    hits = 0
    for _ in range(DRAW_COUNT):
        mixed = dice.permutation(pooled)
        hits += statistic(mixed[:count], mixed[count:]) >= found
    return (hits + 1) / (DRAW_COUNT + 1)
