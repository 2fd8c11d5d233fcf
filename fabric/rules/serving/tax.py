"""Computes what rollouts cost the serving requests beside them: a serving team decides on it.

- A tax is shared over alone less one: 0.05 is 5 % slower. Without requests on both sides there is none to tell,
  nor of TPOT where none of them had a second token.
- Percentiles of several workers cannot be added up: the worst worker's stand for all of them.
- A percentile of few requests says little: `quantile_ranks` says between which of them the true one lies, and whether
  enough were measured to bound it at all (368 for a P99).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ...contract.sharing import SharingReport

CONFIDENCE = 0.95  # of the bounds of a quantile
TAXES = ("ttft_ms_p50", "ttft_ms_p99", "tpot_ms_p50", "tpot_ms_p99")  # the latencies that are compared
P99S = ("ttft_ms_p99", "tpot_ms_p99")
SUMS = ("lent_s", "computing_s", "could_lend_s", "token_count", "violation_count", "reclaim_count")


@dataclass(frozen=True, slots=True, kw_only=True)
class SharingTotals:
    """The figures of all workers together; null: nothing was measured to tell it by."""

    worker_count: int
    alone_request_count: int
    shared_request_count: int
    alone_attained_fraction: float | None
    shared_attained_fraction: float | None
    violation_count: int
    ttft_ms_p99_alone_worst: float | None
    ttft_ms_p99_shared_worst: float | None
    tpot_ms_p99_alone_worst: float | None
    tpot_ms_p99_shared_worst: float | None
    ttft_tax_p99_worst: float | None
    """The highest of any worker's; percentiles of several cannot be added up."""
    tpot_tax_p99_worst: float | None
    lent_s: float
    computing_s: float
    could_lend_s: float
    token_count: int
    reclaim_count: int
    reclaim_ms_p99_worst: float | None


def taxes(report: SharingReport) -> dict[str, float | None]:
    """Compute each latency's tax, by its name without the unit: ttft_tax_p99."""
    return {name.replace("_ms_", "_tax_"): _tax(report.alone, report.shared, name) for name in TAXES}


def with_taxes(report: SharingReport) -> dict[str, Any]:
    """Return a report as plain values, with its taxes, and which of its P99s are of too few requests to mean much."""
    return {**report.__dict__, **taxes(report), "few": few(report)}


def few(report: SharingReport) -> list[str]:
    """Name the P99s that no measured request bounds from above, as alone.ttft_ms_p99."""
    found = []
    for kind in ("alone", "shared"):
        row = getattr(report, kind)
        for name in P99S:
            count = int(row.get(name.replace("_ms_p99", "_count"), row.get("request_count", 0)))
            if row.get(name) and quantile_ranks(count, 0.99)[1] is None:
                found.append(f"{kind}.{name}")
    if report.reclaim_count and quantile_ranks(report.reclaim_count, 0.99)[1] is None:
        found.append("reclaim_ms_p99")
    return found


def quantile_ranks(count: int, fraction: float) -> tuple[int | None, int | None]:
    """Find between which of `count` independent samples the true quantile lies, whatever their distribution.

    Each bound is missed with a probability of at most half of what is left of CONFIDENCE.

    Returns:
        Ranks in ascending order, the least sample is 1; None: there are too few samples for that bound.
    """
    low = high = None
    miss = (1.0 - CONFIDENCE) / 2
    log_chance, at_most = count * math.log(fraction), 0.0  # of exactly, and of at most `above` samples above it
    for above in range(count):
        at_most += math.exp(log_chance)
        if at_most <= miss:
            high = count - above
        if at_most >= 1.0 - miss:
            low = count - above
            break
        log_chance += math.log((count - above) / (above + 1)) + math.log((1.0 - fraction) / fraction)
    return low, high


def sharing_totals(reports: Iterable[SharingReport]) -> SharingTotals:
    """Sum up all workers: totals, attainment over all requests, and the highest of each worker's P99 tax."""
    reports = list(reports)
    found: dict[str, Any] = {name: sum(getattr(report, name) for report in reports) for name in SUMS}
    for name in ("alone", "shared"):
        rows = [getattr(report, name) for report in reports]
        count = sum(row.get("request_count", 0) for row in rows)
        attained = sum(row.get("request_count", 0) * row.get("attained_fraction", 0.0) for row in rows)
        found[f"{name}_request_count"] = int(count)
        found[f"{name}_attained_fraction"] = attained / count if count else None
        for latency in ("ttft_ms_p99", "tpot_ms_p99"):
            measured = [row[latency] for row in rows if row.get("request_count") and row.get(latency)]
            found[f"{latency}_{name}_worst"] = max(measured, default=None)
    for name in ("ttft_tax_p99", "tpot_tax_p99"):
        known = [tax for report in reports if (tax := taxes(report)[name]) is not None]
        found[f"{name}_worst"] = max(known, default=None)
    found["reclaim_ms_p99_worst"] = max((r.reclaim_ms_p99 for r in reports if r.reclaim_count), default=None)
    return SharingTotals(**found, worker_count=len(reports))


def _tax(alone: Mapping[str, float], shared: Mapping[str, float], name: str) -> float | None:
    if not all(row.get("request_count") and row.get(name) for row in (alone, shared)):
        return None
    return shared[name] / alone[name] - 1
