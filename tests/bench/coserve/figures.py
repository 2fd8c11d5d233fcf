"""Figures of co-serving from requests and token counts. Pure.

- A repetition of an arm is judged by itself: its P99 is within an objective or not, whatever other repetitions say.
- The tax is over the serving-alone arm of the same repetition, which had the same arrivals a minute earlier or later.
- What is borrowed is compared with the arm that knows the future, of the same repetition. What was borrowed by breaking
  a promise counts as nothing in `borrowed_within_slo`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rollfab.deploy.replay.figures import percentile
from rollfab.deploy.replay.records import Outcome
from rollfab.deploy.replay.report import p99_interval
from rollfab.fabric.rules.serving.facts import Slo
from tests.bench.measure import Figure

ALONE, ORACLE = "alone", "oracle"
P99 = 0.99
NEVER_MS = 1e12  # stands for infinite where values are computed with
FAR_MS = 1e9  # beyond all that was measured: it comes of NEVER_MS
P99_FACTOR = 1.25
P50_FACTOR = 3.0
LATENCIES = ("ttft", "tpot")
GUARD_TIMES = ("lent_s", "computing_s")  # of a slice, in Round.guard


@dataclass(frozen=True, kw_only=True)
class Round:
    """One arm in one repetition. Latencies by request in milliseconds; tokens per second of rollouts.

    late_ms_max: how late the client itself was, at worst; it is part of the latencies. failures: of requests; they are
    infinitely late. turns_moved: rollout turns given back or taken over. guard: what the guard said last.
    stolen_fraction: of the processors' time, kept by the hypervisor. again_count: slices measured again for that.
    """

    arm: str
    repetition: int
    ttft_ms: tuple[float, ...]
    tpot_ms: tuple[float, ...]
    duration_s: float
    late_ms_max: float
    dedicated_per_s: float
    borrowed_per_s: float
    failures: tuple[str, ...] = ()
    turns_moved: int = 0
    reclaim_ms: tuple[float, ...] = ()
    guard: Mapping[str, Any] = field(default_factory=dict)
    stolen_fraction: float = 0.0
    again_count: int = 0

    @property
    def total_per_s(self) -> float:
        """Rollout tokens per second of both workers."""
        return self.dedicated_per_s + self.borrowed_per_s

    def values(self, latency: str) -> tuple[float, ...]:
        """Of "ttft" or "tpot"."""
        return self.ttft_ms if latency == "ttft" else self.tpot_ms

    def at(self, latency: str, fraction: float) -> float:
        """A percentile of "ttft" or "tpot", in milliseconds."""
        return percentile(self.values(latency), fraction)

    def beyond(self, slo: Slo) -> int:
        """Requests that missed an objective."""
        pairs = zip(self.ttft_ms, self.tpot_ms, strict=True)
        return sum(ttft > slo.ttft_ms or tpot > slo.tpot_ms for ttft, tpot in pairs)

    def is_within(self, slo: Slo) -> bool:
        """Whether both P99s are within their objectives."""
        limits = {"ttft": slo.ttft_ms, "tpot": slo.tpot_ms}
        return all(self.at(name, P99) <= limit for name, limit in limits.items())


def merged(parts: Sequence[Round]) -> Round:
    """The slices of one arm in one repetition as one: requests in order, rates by duration, the guard's times added."""
    first, last = parts[0], parts[-1]
    assert all((each.arm, each.repetition) == (first.arm, first.repetition) for each in parts)
    duration_s = sum(each.duration_s for each in parts)
    summed = {name: sum(each.guard.get(name, 0.0) for each in parts) for name in GUARD_TIMES if name in last.guard}
    return Round(
        arm=first.arm,
        repetition=first.repetition,
        ttft_ms=tuple(value for each in parts for value in each.ttft_ms),
        tpot_ms=tuple(value for each in parts for value in each.tpot_ms),
        duration_s=duration_s,
        late_ms_max=max(each.late_ms_max for each in parts),
        dedicated_per_s=sum(each.dedicated_per_s * each.duration_s for each in parts) / duration_s,
        borrowed_per_s=sum(each.borrowed_per_s * each.duration_s for each in parts) / duration_s,
        failures=tuple(text for each in parts for text in each.failures),
        turns_moved=sum(each.turns_moved for each in parts),
        reclaim_ms=tuple(ms for each in parts for ms in each.reclaim_ms),
        guard={**last.guard, **summed},
        stolen_fraction=sum(each.stolen_fraction * each.duration_s for each in parts) / duration_s,
        again_count=sum(each.again_count for each in parts),
    )


def latencies_ms(outcomes: Sequence[Outcome]) -> dict[str, tuple[float, ...]]:
    """By name, in order of arrival. A request that failed never had its tokens: infinite."""

    def whole(each: Outcome, value_s: float | None) -> float:
        return math.inf if each.error or value_s is None else 1000 * value_s

    return {
        "ttft_ms": tuple(whole(each, each.ttft_s) for each in outcomes),
        "tpot_ms": tuple(whole(each, each.tpot_s) for each in outcomes),
    }


def promised(rounds: Sequence[Round]) -> Slo:
    """P99 of serving alone in the repetition where it is greatest, and a quarter more.

    Of all arrivals together it would be a promise that serving alone breaks whenever the busiest of them come.
    """
    parts = [[each for each in rounds if each.repetition == name] for name in {each.repetition for each in rounds}]
    limits = {name: P99_FACTOR * max(percentile(_pooled(part, name), P99) for part in parts) for name in LATENCIES}
    return Slo(ttft_ms=limits["ttft"], tpot_ms=limits["tpot"])


def relative(rounds: Sequence[Round]) -> Slo:
    """Three times the P50 of serving alone."""
    limits = {name: P50_FACTOR * percentile(_pooled(rounds, name), 0.5) for name in LATENCIES}
    return Slo(ttft_ms=limits["ttft"], tpot_ms=limits["tpot"])


def _pooled(rounds: Sequence[Round], latency: str) -> list[float]:
    return [value for each in rounds for value in each.values(latency)]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Between which values P99 lies; values in order of arrival, in milliseconds, and some of them infinite."""
    found = p99_interval(np.minimum(np.asarray(values, dtype=np.float64), NEVER_MS), seed=0)
    low, high = (math.inf if edge >= FAR_MS else edge for edge in found)
    return low, high


def arm_figures(rounds: Sequence[Round], all_rounds: Sequence[Round], slo: Slo, second: Slo) -> dict[str, Any]:
    """What one arm did, over its repetitions."""
    alone, oracle = _by_repetition(all_rounds, ALONE), _by_repetition(all_rounds, ORACLE)
    found: dict[str, Any] = {
        "violations": sum(not each.is_within(slo) for each in rounds),
        "within_by_repetition": [each.is_within(slo) for each in rounds],
        "requests": sum(len(each.ttft_ms) for each in rounds),
        "requests_failed": sum(len(each.failures) for each in rounds),
        "requests_beyond": sum(each.beyond(slo) for each in rounds),
        "requests_beyond_3x_p50": sum(each.beyond(second) for each in rounds),
        "tokens_per_s": {
            "dedicated": _spread(rounds, lambda each: each.dedicated_per_s),
            "borrowed": _spread(rounds, lambda each: each.borrowed_per_s),
            "borrowed_within_slo": _spread(rounds, lambda each: each.borrowed_per_s if each.is_within(slo) else 0.0),
            "total": _spread(rounds, lambda each: each.total_per_s),
        },
        "harvest_of_oracle": _ratio(rounds, oracle, lambda each: each.borrowed_per_s),
        "harvest_repetitions": len(_ratios(rounds, oracle, lambda each: each.borrowed_per_s)),
        "speedup_over_dedicated": _ratio(rounds, alone, lambda each: each.total_per_s),
        **_reclaims(rounds),
        "turns_moved": sum(each.turns_moved for each in rounds),
        "slices_again": sum(each.again_count for each in rounds),
        "stolen_fraction": _spread(rounds, lambda each: each.stolen_fraction),
        "client_late_ms_max": max(each.late_ms_max for each in rounds),
        "step_error_p50": _guarded(rounds, "step_error_p50"),
        "step_error_p95": _guarded(rounds, "step_error_p95"),
        "guard": [dict(each.guard) for each in rounds],
    }
    for name in LATENCIES:
        found[f"{name}_ms"] = _latency(rounds, name)
        taxes = [ratio - 1 for ratio in _ratios(rounds, alone, _p99(name))]
        found[f"{name}_tax_p99"] = Figure(tuple(taxes)).median if taxes else None
        found[f"{name}_tax_p99_by_repetition"] = taxes
    return found


def _p99(name: str) -> Callable[[Round], float]:
    return lambda each: each.at(name, P99)


def _latency(rounds: Sequence[Round], name: str) -> dict[str, Any]:
    """The interval is of all requests of the arm, drawn in blocks: those of one burst share their wait."""
    pooled = _pooled(rounds, name)
    return {
        "p50": _spread(rounds, lambda each: each.at(name, 0.5)),
        "p99": _spread(rounds, _p99(name)),
        "p99_of_all": percentile(pooled, P99),
        "p99_of_all_ci": interval(pooled),
    }


def _reclaims(rounds: Sequence[Round]) -> dict[str, Any]:
    values = [ms for each in rounds for ms in each.reclaim_ms]
    if not values:
        return {"reclaim_count": 0, "reclaim_ms_p50": None, "reclaim_ms_p99": None}
    return {
        "reclaim_count": len(values),
        "reclaim_ms_p50": percentile(values, 0.5),
        "reclaim_ms_p99": percentile(values, P99),
    }


def _guarded(rounds: Sequence[Round], name: str) -> float | None:
    values = [each.guard[name] for each in rounds if each.guard.get(name) is not None]
    return Figure(tuple(values)).median if values else None


def _spread(rounds: Sequence[Round], value: Callable[[Round], float]) -> dict[str, Any]:
    figure = Figure(tuple(map(value, rounds)))
    return {"median": figure.median, "spread": figure.spread}


def _by_repetition(rounds: Sequence[Round], arm: str) -> dict[int, Round]:
    return {each.repetition: each for each in rounds if each.arm == arm}


def _ratios(rounds: Sequence[Round], base: Mapping[int, Round], value: Callable[[Round], float]) -> list[float]:
    pairs = [(value(each), value(base[each.repetition])) for each in rounds if each.repetition in base]
    return [ours / theirs for ours, theirs in pairs if theirs > 0]


def _ratio(rounds: Sequence[Round], base: Mapping[int, Round], value: Callable[[Round], float]) -> float | None:
    """The median of all repetitions; None: the other arm was not measured, or did nothing."""
    ratios = _ratios(rounds, base, value)
    return Figure(tuple(ratios)).median if ratios else None
