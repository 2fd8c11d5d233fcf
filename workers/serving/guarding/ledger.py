"""What sharing a device cost and gave: requests with and without rollouts in their time, and how fast it came back.

- Requests, and those within the objectives, are counted since the beginning. What percentiles are taken of is bounded:
  the last COUNT_MAX requests of each kind. So are the intervals in which rollouts computed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ....fabric.contract.sharing import Latencies
from ....fabric.rules.serving.facts import Slo
from ....fabric.rules.serving.tax import quantile_ranks
from ..probes.reader import End

COUNT_MAX = 2048
INTERVAL_COUNT_MAX = 4096
JOINED_S = 0.002  # between two rollout steps that count as one stretch


class SharingLedger:
    """The counts of one guard since it began."""

    def __init__(self, slo: Slo) -> None:
        self._slo = slo
        self._begins: deque[float] = deque(maxlen=INTERVAL_COUNT_MAX)
        self._ends: deque[float] = deque(maxlen=INTERVAL_COUNT_MAX)
        self._alone, self._shared = _Requests(slo), _Requests(slo)
        self._reclaims_s: deque[float] = deque(maxlen=COUNT_MAX)
        self._reclaim_count = 0
        self._passed_s = self._lent_s = self._could_lend_s = self._computing_s = 0.0

    def passed(self, seconds: float, *, is_open: bool, is_lent: bool) -> None:
        """Count time that went by: as lent, or as time in which the guard would have let rollouts run."""
        self._passed_s += seconds
        if is_lent:
            self._lent_s += seconds
        elif is_open:
            self._could_lend_s += seconds

    def computed(self, began_s: float, ended_s: float) -> None:
        """Count rollouts' computing in [began_s, ended_s); calls come in order of time."""
        self._computing_s += ended_s - began_s
        if self._ends and began_s - self._ends[-1] < JOINED_S:
            self._ends[-1] = ended_s
            return
        self._begins.append(began_s)
        self._ends.append(ended_s)

    def is_shared(self, from_s: float, to_s: float) -> bool:
        """Tell whether rollouts computed in that time."""
        if not self._ends or self._ends[-1] <= from_s:
            return False
        at = bisect_right(self._begins, to_s)
        return at > 0 and self._ends[at - 1] > from_s

    def ended(self, end: End) -> None:
        """Count a serving request that is over."""
        is_shared = self.is_shared(end.arrived_at_s, end.last_token_at_s)
        (self._shared if is_shared else self._alone).add(end)

    def reclaimed(self, seconds: float) -> None:
        """Count a reclaim: the seconds from an arrival to the end of the rollout step that it found."""
        self._reclaim_count += 1
        self._reclaims_s.append(seconds)

    def report(self) -> dict[str, Any]:
        """Return the fields of a SharingReport."""
        return {
            "since_s": round(self._passed_s, 3),
            "ttft_slo_ms": self._slo.ttft_ms,
            "tpot_slo_ms": self._slo.tpot_ms,
            "alone": asdict(self._alone.latencies()),
            "shared": asdict(self._shared.latencies()),
            "violation_count": self._shared.count - self._shared.attained_count,
            "lent_s": round(self._lent_s, 3),
            "computing_s": round(self._computing_s, 3),
            "could_lend_s": round(self._could_lend_s, 3),
            "reclaim_count": self._reclaim_count,
            "reclaim_ms_p50": round(1000 * _at(sorted(self._reclaims_s), 0.5), 3),
            "reclaim_ms_p99": round(1000 * _at(sorted(self._reclaims_s), 0.99), 3),
        }


class _Requests:
    """Requests of one kind that ended: all of them counted, the newest kept."""

    def __init__(self, slo: Slo) -> None:
        self.count = self.attained_count = 0
        self._slo = slo
        self._newest: deque[End] = deque(maxlen=COUNT_MAX)

    def add(self, end: End) -> None:
        self.count += 1
        self.attained_count += _attains(end, self._slo)
        self._newest.append(end)

    def latencies(self) -> Latencies:
        """Return what a SharingReport says of these requests."""
        if not self.count:
            return Latencies()
        ttfts = sorted(end.ttft_ms for end in self._newest)
        tpots = sorted(tpot for end in self._newest if (tpot := end.tpot_ms) is not None)
        began_s, ended_s = self._newest[0].arrived_at_s, self._newest[-1].last_token_at_s
        ttft_low, ttft_high = _p99_bounds(ttfts)
        tpot_low, tpot_high = _p99_bounds(tpots)
        return Latencies(
            request_count=self.count,
            span_s=round(ended_s - began_s, 3),
            ttft_count=len(ttfts),
            tpot_count=len(tpots),
            ttft_ms_p99_low=ttft_low,
            ttft_ms_p99_high=ttft_high,
            tpot_ms_p99_low=tpot_low,
            tpot_ms_p99_high=tpot_high,
            ttft_ms_p50=round(_at(ttfts, 0.5), 3),
            ttft_ms_p99=round(_at(ttfts, 0.99), 3),
            tpot_ms_p50=round(_at(tpots, 0.5), 3),
            tpot_ms_p99=round(_at(tpots, 0.99), 3),
            attained_fraction=round(self.attained_count / self.count, 6),
        )


def _attains(end: End, slo: Slo) -> bool:
    tpot_ms = end.tpot_ms
    return end.ttft_ms <= slo.ttft_ms and (tpot_ms is None or tpot_ms <= slo.tpot_ms)


def _p99_bounds(ordered: Sequence[float]) -> tuple[float, float]:
    low, high = (0.0 if rank is None else round(ordered[rank - 1], 3) for rank in quantile_ranks(len(ordered), 0.99))
    return low, high


def _at(ordered: Sequence[float], fraction: float) -> float:
    """Return a value that at least `fraction` of all are at or below; 0 without any."""
    return ordered[min(len(ordered) - 1, int(len(ordered) * fraction))] if ordered else 0.0
