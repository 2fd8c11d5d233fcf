"""Computes what arrivals cost a serving engine: the time to keep free for requests that have not arrived yet, and the
load of its device, if it serves just fast enough for its objectives.

- Learned from arrivals alone: their rate over one second and over thirty, their prompts' length and its spread, and how
  much their counts per second scatter (index of dispersion; 1 for a Poisson process).
- The higher of the two rates counts: a burst raises the reserve at once, its end lowers it within a second.
- Memory is a dozen numbers, whatever the load; the reserve is bounded.
- An engine with a single request is inside a step all the time, so its busy time tells nothing of its load. What it
  needs is the time of the prompts that arrive, of the tokens that they ask for, and of as many steps a second as were
  promised. Where answers are long its KV cache is full before its time is: so what is held of that is a load as well.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Self

from .facts import ServingState, Slo, StepWork
from .step_time import StepModel, predict

FAST_S, SLOW_S = 1.0, 30.0
GAIN = 1 / 64  # of a length in its mean and spread, after the first ones
BIN_S, BIN_GAIN = 1.0, 1 / 60  # counts per second, over a minute
HORIZON_OF_TTFT = 0.6  # the guard divides by the same horizon
PACE = 0.9  # of the objective: the guard's margin is the same
DISPERSION_MAX = 16.0  # above it the load changed, rather than scatters; seconds of real traces: 1.1 to 13


@dataclass(frozen=True, slots=True, kw_only=True)
class BurstRule:
    """The distance to look ahead, and the certainty, of the reserve."""

    horizon_s: float = 0.3
    quantile: float = 0.9  # simulated, at 0.95 of SLO capacity: 0.95 harvests a fifth less and keeps no promise better
    reserve_max_s: float = 10.0

    @classmethod
    def of(cls, slo: Slo) -> Self:
        """Make the rule for an objective: what arrives within three fifths of it competes with what is waiting now."""
        return cls(horizon_s=HORIZON_OF_TTFT * slo.ttft_ms / 1000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """The recent arrival process. Rates are per second as of `at_s`."""

    at_s: float = -math.inf
    since_s: float = math.inf
    count: int = 0
    fast_per_s: float = 0.0
    slow_per_s: float = 0.0
    tokens_mean: float = 0.0
    tokens_spread: float = 0.0  # variance
    bin_began_s: float = -math.inf
    bin_count: int = 0
    counts_mean: float = 0.0
    counts_spread: float = 0.0  # variance
    bins: int = 0

    def rates(self, now_s: float) -> tuple[float, float]:
        """Compute arrivals per second over the last second and the last thirty; over less, while less has been seen."""
        passed = max(0.0, now_s - self.at_s) if self.count else 0.0
        age = max(now_s - self.since_s, FAST_S) if self.count else FAST_S
        known = 1.0 - math.exp(-age / SLOW_S)  # what of a thirty-second average can have been seen yet
        return self.fast_per_s * math.exp(-passed / FAST_S), self.slow_per_s * math.exp(-passed / SLOW_S) / known

    @property
    def dispersion(self) -> float:
        """Variance of counts per second over their mean, [1, 16]."""
        if self.bins < 5 or self.counts_mean <= 0:
            return 1.0
        return min(max(self.counts_spread / self.counts_mean, 1.0), DISPERSION_MAX)


def arrived(arrivals: Arrivals, at_s: float, prefill_tokens: int) -> Arrivals:
    """Add a request whose prompt has `prefill_tokens` tokens to compute. Times that run backwards count as now."""
    at_s = max(at_s, arrivals.at_s)
    passed = at_s - arrivals.at_s if arrivals.count else 0.0
    arrivals = _binned(arrivals, at_s)
    count = arrivals.count + 1
    gain = max(GAIN, 1.0 / count)
    off = prefill_tokens - arrivals.tokens_mean
    return replace(
        arrivals,
        at_s=at_s,
        since_s=min(arrivals.since_s, at_s),
        count=count,
        fast_per_s=arrivals.fast_per_s * math.exp(-passed / FAST_S) + 1.0 / FAST_S,
        slow_per_s=arrivals.slow_per_s * math.exp(-passed / SLOW_S) + 1.0 / SLOW_S,
        tokens_mean=arrivals.tokens_mean + gain * off,
        tokens_spread=(1.0 - gain) * (arrivals.tokens_spread + gain * off * off),
        bin_count=arrivals.bin_count + 1,
    )


def reserve_s(arrivals: Arrivals, now_s: float, model: StepModel, rule: BurstRule) -> float:
    """Bound the seconds of serving work that requests of the next `horizon_s` bring, with `quantile` certainty.

    Their number and their lengths scatter: the sum's mean and variance are those of a compound process, its quantile is
    a normal one's, which for a few requests is about one prompt above the mean. Within [0, reserve_max_s].
    """
    if not arrivals.count:
        return 0.0
    expected = max(arrivals.rates(now_s)) * rule.horizon_s
    tokens = expected * arrivals.tokens_mean
    scatter = expected * (arrivals.tokens_spread + arrivals.dispersion * arrivals.tokens_mean**2)
    bound = tokens + max(0.0, deviations(rule.quantile)) * math.sqrt(scatter)
    base = predict(model, StepWork())
    per_token = (predict(model, StepWork(prefill_tokens=1000)) - base) / 1000
    return min(max(bound * per_token, 0.0), rule.reserve_max_s)


def deviations(quantile: float) -> float:
    """Compute a quantile of the normal distribution, in standard deviations, to 0.0005.

    Source: Abramowitz and Stegun, Handbook of Mathematical Functions, 26.2.23.
    """
    assert 0.0 < quantile < 1.0
    t = math.sqrt(-2.0 * math.log(min(quantile, 1.0 - quantile)))
    tail = t - (2.515517 + 0.802853 * t + 0.010328 * t * t) / (1 + 1.432788 * t + 0.189269 * t * t + 0.001308 * t**3)
    return tail if quantile >= 0.5 else -tail


def _binned(arrivals: Arrivals, at_s: float) -> Arrivals:
    """Close the seconds that have passed, empty ones too (of a long pause only as many as are remembered)."""
    if not arrivals.count:
        return replace(arrivals, bin_began_s=at_s)
    passed = int((at_s - arrivals.bin_began_s) / BIN_S)
    if passed < 1:
        return arrivals
    mean, spread, bins, count = arrivals.counts_mean, arrivals.counts_spread, arrivals.bins, arrivals.bin_count
    for _ in range(min(passed, 120)):
        gain = max(BIN_GAIN, 1.0 / (bins + 1))
        off = count - mean
        mean, spread = mean + gain * off, (1.0 - gain) * (spread + gain * off * off)
        bins, count = min(bins + 1, 1_000_000), 0
    began = arrivals.bin_began_s + passed * BIN_S
    return replace(arrivals, bin_began_s=began, bin_count=0, counts_mean=mean, counts_spread=spread, bins=bins)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """How long a serving engine's answers are, in tokens: their mean, over `count` of them."""

    count: int = 0
    tokens_mean: float = 0.0

    def noted(self, token_count: int) -> Answers:
        """Add an answer that has ended."""
        gain = max(GAIN, 1 / (self.count + 1))
        return Answers(count=self.count + 1, tokens_mean=self.tokens_mean + gain * (token_count - self.tokens_mean))


def load_fraction(
    arrivals: Arrivals, answers: Answers, state: ServingState, now_s: float, model: StepModel, slo: Slo
) -> float | None:
    """Compute the load of the last second or the last half minute, the higher one, as a fraction of the device's time;
    or of the engine's KV cache, where more of that is held.

    Prompts that wait count with the time that they need, as a fraction of the objective: whatever made them wait.

    Returns:
        0 where nothing arrives; None while requests have arrived and none has ended: nobody knows how long they are.
    """
    if not arrivals.count:
        return 0.0
    if not answers.count:
        return None
    per_s = max(arrivals.rates(now_s))
    base_s = predict(model, StepWork())
    context = int(arrivals.tokens_mean + answers.tokens_mean / 2)
    token_s = predict(model, StepWork(decode_count=1, context_tokens=context)) - base_s
    prompt_s = (predict(model, StepWork(prefill_tokens=1000)) - base_s) / 1000
    steps = base_s / (1e-3 * slo.tpot_ms * PACE)
    load = per_s * (prompt_s * arrivals.tokens_mean + answers.tokens_mean * token_s) + steps * min(1.0, per_s)
    waiting_s = prompt_s * sum(each.prefill_tokens for each in state.waiting)
    held = state.kv_used_tokens / state.kv_capacity_tokens if state.kv_capacity_tokens else 0.0
    return max(load, waiting_s / (1e-3 * slo.ttft_ms), held)
