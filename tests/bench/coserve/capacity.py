"""The SLO capacity of serving alone: the highest rate at which every repetition has both P99s within their objectives.

Found between a rate that is within and one that is not; what is returned was within when it was tried, on the arrivals
that the arms get: what one of their repetitions alone cannot bear says nothing of a guard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from rollfab.fabric.contract.errors import FabricError
from rollfab.fabric.rules.serving.facts import Slo

from .arms import Rounds

GROWTH = 1.5
DOUBLINGS_MAX = 8
HALVINGS = 3


def find_capacity(rounds: Rounds, slo: Slo, rate_per_s: float, repetitions: Iterable[int]) -> float:
    """Requests per second, of as many requests as `rounds` has.

    Raises:
        FabricError: it is not even within at the rate that the objectives were calibrated at, less a third.
    """

    def holds(rate: float) -> bool:
        rounds.load = replace(rounds.load, rate_per_s=rate)
        return all(rounds.calibrate(each).is_within(slo) for each in repetitions)

    found = search(holds, rate_per_s)
    if found is None:
        raise FabricError(
            f"serving alone misses its objectives at {rate_per_s / GROWTH:.1f} requests per second:"
            " does something else run on this machine?"
        )
    return found


def search(holds: Callable[[float], bool], rate_per_s: float) -> float | None:
    """The highest rate that was seen to hold; None: none did."""
    low = rate_per_s / GROWTH
    if not holds(low):
        return None
    high = rate_per_s
    for _ in range(DOUBLINGS_MAX):
        if not holds(high):
            break
        low, high = high, high * GROWTH
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
