"""The SLO capacity of serving alone: the highest rate of this traffic at which both P99s are within their objectives.

Found between a rate that is within and one that is not; what is returned was within when it was tried.
"""

from __future__ import annotations

from collections.abc import Callable

from ..fabric.errors import FabricError
from ..fabric.rules.serving import Slo
from .coserve_arms import Load, Rounds

GROWTH = 1.5
DOUBLINGS_MAX = 8
HALVINGS = 3
PROBE_S = 15.0
PROBE_REQUESTS_MIN = 200
SEED = 500_000


def find_capacity(rounds: Rounds, slo: Slo, rate_per_s: float) -> float:
    """Requests per second.

    Raises:
        FabricError: it is not even within at the rate that the objectives were calibrated at, less a third.
    """

    def holds(rate: float) -> bool:
        rounds.load = Load(rate_per_s=rate, request_count=max(PROBE_REQUESTS_MIN, round(PROBE_S * rate)))
        return rounds.calibrate(SEED).is_within(slo)

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
