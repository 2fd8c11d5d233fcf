"""Reports a replay: latencies as the client saw them, what was promised and kept, and how good the client was.

- TTFT counts from the scheduled arrival. TPOT is a request's mean; TBT is of single gaps between events.
- Nothing games the attainment: a request that failed has missed every promise. Percentiles are of those that have the
  value; how many have not is told beside them. Requests that the user interrupted count only as such.
- Goodput counts requests that met all that was promised, and their tokens, per second of the replay.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ...fabric.contract.text import counted
from ...fabric.rules.serving.facts import Slo
from .figures import number, show
from .records import INTERRUPTED, Outcome

NO_PROMISE = Slo(ttft_ms=math.inf, tpot_ms=math.inf)
LATE_MS_MAX = 5.0  # above it the client, not the server, makes part of the latencies
P99_COUNT_MIN = 500


@dataclass(frozen=True, kw_only=True)
class Attainment:
    """Shares of requests, 0 to 1. joint: both at once. None: nothing was promised, or nobody asked."""

    ttft: float | None
    tpot: float | None
    joint: float | None


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A replay in figures.

    Attributes:
        request_count: answered or failed. interrupted_count: neither.
        error_counts: requests that failed, by kind.
        elapsed_s: from the start to the last answer.
        ttft_ms, ttft_from_send_ms, tpot_ms, tbt_ms: tbt of all gaps together.
        late_ms: of the client itself. client_cpu_ms: its processor time per request; None: not measured.
        good_requests_per_s, good_tokens_per_s: of requests within all that was promised.
        worst_ttft_p99_ms, worst_tpot_p99_ms, worst_joint: of the worst 60 s each.
        notes: what a reader must know before he believes the figures.
    """

    request_count: int
    interrupted_count: int
    error_counts: dict[str, int]
    token_count: int
    elapsed_s: float
    requests_per_s: float
    tokens_per_s: float
    ttft_ms: Spread
    ttft_from_send_ms: Spread
    tpot_ms: Spread
    tbt_ms: Spread
    late_ms: Spread
    client_cpu_ms: float | None
    attainment: Attainment
    good_requests_per_s: float | None
    good_tokens_per_s: float | None
    worst_ttft_p99_ms: Worst | None
    worst_tpot_p99_ms: Worst | None
    worst_joint: Worst | None
    notes: tuple[str, ...]

    def row(self) -> dict[str, Any]:
        """Return the figures for JSON."""
        return asdict(self)


def measured(
    outcomes: Sequence[Outcome], slo: Slo = NO_PROMISE, *, seed: int = 0, client_cpu_s: float | None = None
) -> Measured:
    """Measure a replay.

    outcomes: in order of arrival. seed: of the confidence intervals. client_cpu_s: of the whole replay.
    """
    played = [each for each in outcomes if each.error != INTERRUPTED]
    errors = Counter(each.error for each in played if each.error)
    elapsed_s = max((each.ended_at_s for each in outcomes), default=0.0)
    per_s = 1 / elapsed_s if elapsed_s > 0 else 0.0
    ttft, tpot, gaps = [_ms(each.ttft_s) for each in played], [_ms(each.tpot_s) for each in played], _gaps(played)
    kept_ttft, kept_tpot = _kept(played, ttft, slo.ttft_ms), _kept(played, tpot, slo.tpot_ms)
    kept = [one and other for one, other in zip(kept_ttft, kept_tpot, strict=True)]
    good = [each for each, is_kept in zip(played, kept, strict=True) if is_kept]
    is_promised = slo != NO_PROMISE
    late = spread(_floats([each.late_s * 1e3 for each in outcomes]), seed=seed)
    return Measured(
        request_count=len(played),
        interrupted_count=len(outcomes) - len(played),
        error_counts=dict(sorted(errors.items())),
        token_count=sum(each.token_count for each in outcomes),
        elapsed_s=elapsed_s,
        requests_per_s=len(played) * per_s,
        tokens_per_s=sum(each.token_count for each in outcomes) * per_s,
        ttft_ms=spread(_floats(ttft), seed=seed),
        ttft_from_send_ms=spread(_floats([_ms(each.ttft_from_send_s) for each in played]), seed=seed),
        tpot_ms=spread(_floats(tpot), seed=seed),
        tbt_ms=_without_interval(gaps),
        late_ms=late,
        client_cpu_ms=client_cpu_s / len(outcomes) * 1e3 if client_cpu_s is not None and outcomes else None,
        attainment=Attainment(
            ttft=_share(kept_ttft) if slo.ttft_ms < math.inf else None,
            tpot=_share(kept_tpot) if slo.tpot_ms < math.inf else None,
            joint=_share(kept) if is_promised else None,
        ),
        good_requests_per_s=len(good) * per_s if is_promised else None,
        good_tokens_per_s=sum(each.token_count for each in good) * per_s if is_promised else None,
        worst_ttft_p99_ms=worst_p99(played, ttft),
        worst_tpot_p99_ms=worst_p99(played, tpot),
        worst_joint=worst_share(played, kept) if is_promised else None,
        notes=_notes(len(played), errors, late),
    )


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def _floats(values: Sequence[float | None]) -> Floats:
    return np.array([value for value in values if value is not None], dtype=float)


def _gaps(outcomes: Sequence[Outcome]) -> Floats:
    """Collect all gaps of all requests, in milliseconds."""
    arrays = [np.array(each.gaps_us, dtype=float) for each in outcomes]
    return np.concatenate(arrays) / 1e3 if arrays else np.empty(0)


def _without_interval(values: Floats) -> Spread:
    """Compute the spread of gaps alone: a bootstrap of millions would take minutes, and gaps are not independent."""
    if not len(values):
        return spread(values, seed=0)
    p50, p90, p99 = (float(by_rank(values, fraction)) for fraction in (0.5, 0.9, 0.99))
    mean, most = float(values.mean()), float(values.max())
    return Spread(count=len(values), mean=mean, p50=p50, p90=p90, p99=p99, p99_low=None, p99_high=None, max=most)


def _kept(outcomes: Sequence[Outcome], values_ms: Sequence[float | None], limit_ms: float) -> list[bool]:
    """Tell which requests kept the limit. One answered in full with a single token has no TPOT that it could miss."""
    return [
        not each.error and (value is None or value <= limit_ms) for each, value in zip(outcomes, values_ms, strict=True)
    ]


def _share(kept: Sequence[bool]) -> float | None:
    return sum(kept) / len(kept) if kept else None


def _notes(count: int, errors: Counter[str], late: Spread) -> tuple[str, ...]:
    notes = []
    if late.p99 is not None and late.p99 > LATE_MS_MAX:
        notes.append(
            f"the client was {number(late.p99)} ms late at P99 (limit {LATE_MS_MAX:g} ms): TTFT from arrival holds its"
            " own wait too; give it a core of its own, or replay less"
        )
    if count < P99_COUNT_MIN:
        notes.append(f"{counted(count, 'request')}: a P99 of fewer than {P99_COUNT_MIN} says little; see its interval")
    if errors:
        notes.append(f"{sum(errors.values())} of {count} requests failed; percentiles are of tokens that came")
    return tuple(notes)


def print_measured(title: str, found: Measured, slo: Slo = NO_PROMISE, notes: Sequence[str] = ()) -> None:
    """Print a table for people, and below it what is not a latency."""
    rows = [
        _row("TTFT", found.ttft_ms, slo.ttft_ms),
        _row("TTFT from sending", found.ttft_from_send_ms),
        _row("TPOT", found.tpot_ms, slo.tpot_ms),
        _row("TBT", found.tbt_ms),
        _row("client late", found.late_ms),
    ]
    columns = ("ms", "count", "P50", "P90", "P99", "95 % of P99", "max", "SLO")
    show(title, columns, rows, [*_lines(found), *notes, *found.notes])


def _row(name: str, values: Spread, limit_ms: float = math.inf) -> list[str]:
    interval = f"{_text(values.p99_low)}–{_text(values.p99_high)}" if values.p99_low is not None else ""
    figures = [_text(value) for value in (values.p50, values.p90, values.p99)]
    promise = number(limit_ms) if limit_ms < math.inf else ""
    return [name, f"{values.count:,}", *figures, interval, _text(values.max), promise]


def _text(value: float | None) -> str:
    return "" if value is None else number(value)


def _lines(found: Measured) -> list[str]:
    lines = [
        f"{counted(found.request_count, 'request')}, {counted(found.token_count, 'token')} in {found.elapsed_s:,.1f} s:"
        f" {number(found.requests_per_s)} requests/s, {number(found.tokens_per_s)} tokens/s"
    ]
    if found.error_counts:
        lines.append("failed: " + ", ".join(f"{count} {kind}" for kind, count in found.error_counts.items()))
    if found.interrupted_count:
        lines.append(f"interrupted on their way: {found.interrupted_count}")
    for name, worst in (("TTFT", found.worst_ttft_p99_ms), ("TPOT", found.worst_tpot_p99_ms)):
        if worst is not None:
            lines.append(f"worst 60 s: {name} P99 {number(worst.value)} ms, from {worst.from_s:.0f} s on")
    shares = [(name, value) for name, value in asdict(found.attainment).items() if value is not None]
    if shares:
        kept = ", ".join(f"{name.upper() if name != 'joint' else 'both'} {value:.2%}" for name, value in shares)
        least = "" if found.worst_joint is None else f"; worst 60 s {found.worst_joint.value:.2%}"
        lines.append(f"within the SLO: {kept}{least}")
        lines.append(
            f"goodput: {_text(found.good_requests_per_s)} requests/s, {_text(found.good_tokens_per_s)} tokens/s"
        )
    if found.client_cpu_ms is not None:
        lines.append(f"the client used {number(found.client_cpu_ms)} ms of processor time per request")
    return lines


# ---------------------------------------------------------------- percentiles
#
# Percentiles of a replay, how sure they are, and when it was worst.
#
# - A percentile is a value that occurred, by rank, as in the benches.
# - Intervals are of a moving-block bootstrap: requests of one burst share their wait, so drawing them one by one would
#   make a P99 look surer than it is. A block is the cube root of the count, as is usual.


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
    """Return, along the last axis, a value that at least `fraction` of all are at or below; it is one that occurred."""
    assert values.shape[-1] and 0 < fraction <= 1
    rank = min(values.shape[-1] - 1, int(values.shape[-1] * fraction))
    found: Floats = np.partition(values, rank, axis=-1)[..., rank]
    return found


def spread(values: Floats, *, seed: int) -> Spread:
    """Compute the spread of float64 milliseconds in order of arrival, shape (count,)."""
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
    """Find between which values P99 lies, at 95 % confidence. With fewer than some 500 values it says little.

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
    """Find the worst window by P99; None: no window has enough requests.

    values: one per outcome, milliseconds; None where there is none.
    """
    pairs = [(each.arrival.at_s, value) for each, value in zip(outcomes, values, strict=True) if value is not None]
    return _worst(pairs, lambda window: float(by_rank(window, 0.99)))


def worst_share(outcomes: Sequence[Outcome], kept: Sequence[bool]) -> Worst | None:
    """Find the window with the lowest share of requests that were kept. kept: one per outcome."""
    pairs = [(each.arrival.at_s, float(one)) for each, one in zip(outcomes, kept, strict=True)]
    found = _worst(pairs, lambda window: -float(window.mean()))
    return None if found is None else Worst(from_s=found.from_s, value=-found.value, request_count=found.request_count)


def _worst(pairs: Sequence[tuple[float, float]], badness: Callable[[Floats], float]) -> Worst | None:
    """Find the worst window of those that begin every 5 s and hold 10 requests; pairs are in order of time."""
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
