"""Predicts how long an engine's next step takes: a linear model of its work, refitted with every step measured.

- Seconds = base + prompt tokens, decoding sequences and tokens attended to, each at a price; no price is below 0.
- A sample moves the model at once and is forgotten over some fifty others. One that is far from the prediction (a
  preempted step) counts only as far as steps usually scatter. When several in a row are off to the same side, the
  hardware or the model has changed: all prices move together, and the samples before count little.
- Cold, nothing is predicted below what was seen: a new engine looks slower than it is, never faster.
- Steps in whose time rollouts computed leave these prices alone: they tell a ratio, the interference, of their own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from .facts import StepSample, StepWork

Prices = tuple[float, float, float, float]  # seconds: a step, per prompt token, per sequence, per token attended to
STEP_S_MIN = 1e-9  # of a prediction: what is measured is divided by it

# How a model follows its samples; fractions are of the predicted time.
MEMORY_COUNT = 48.0  # samples until one counts 1/e: a model of four prices must see some prefills in it
COLD_COUNT = 16  # samples until the model is believed without its margin
MARGIN_KEPT = 0.9  # per sample: how the margin of the cold start fades
BAND = 3.0  # times the usual scatter: beyond it a sample is an outlier
SCATTER_MIN = 0.05
SCATTER_MAX = 0.15  # times `band` below 0.5: a step in half the time must be an outlier, else it creeps in
STREAK_COUNT = 6  # outliers to one side until it is a change; by chance: once in weeks
INTERFERENCE_GAIN = 0.05
INTERFERENCE_MAX = 4.0
PRICE_MAX: Prices = (10.0, 0.1, 1.0, 0.001)
LEAST = 1e-30  # of a sum that is divided by

# Of products of two features, relative to the step's predicted time: 00 01 02 03 11 12 13 22 23 33.
Sums = tuple[float, float, float, float, float, float, float, float, float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepModel:
    """Predicts an engine's steps, and holds what refits it. Only `predict` and `refit` need to know its parts."""

    prices: Prices
    margin: float = 1.0
    interference: float = 1.0
    sample_count: int = 0
    shared_count: int = 0
    scatter: float = 0.1
    streak: int = 0  # outliers in a row, below 0: steps that were faster
    streak_ratio: float = 1.0  # of time measured to predicted over the streak; its outermost samples count less
    products: Sums = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    targets: Prices = (0.0, 0.0, 0.0, 0.0)
    seen: tuple[StepSample, ...] = ()  # while cold


def cold(base_s: float, prefill_s_per_token: float, decode_s_per_sequence: float) -> StepModel:
    """Make the model of an engine that nothing is known of: give prices that are rather too high.

    Each price starts as if one step that it dominates had been seen, so that what no sample tells about stays put.
    """
    prices = (base_s, prefill_s_per_token, decode_s_per_sequence, 0.0)
    assert base_s > 0 and min(prices) >= 0
    one, two, three, four = [0.1 / (price * price) if price > 0 else 0.0 for price in prices]
    t0, t1, t2, t3 = [0.1 / price if price > 0 else 0.0 for price in prices]
    products = (one, 0.0, 0.0, 0.0, two, 0.0, 0.0, three, 0.0, four)
    return StepModel(prices=prices, products=products, targets=(t0, t1, t2, t3))


def predict(model: StepModel, work: StepWork, is_shared: bool = False) -> float:
    """Predict the seconds that a step takes. is_shared: rollouts compute on the device meanwhile."""
    alone = _alone(model.prices, work) * model.margin
    return alone * model.interference if is_shared else alone


def refit(model: StepModel, sample: StepSample) -> StepModel:
    """Return the model after one more step. A duration that is not positive measures nothing, and changes nothing."""
    if not 0.0 < sample.duration_s < PRICE_MAX[0]:
        return model
    if sample.is_shared:
        return _interfered(model, sample)
    expected = _alone(model.prices, sample.work)
    ratio = sample.duration_s / expected
    if model.sample_count < COLD_COUNT:
        return _warmed(_learned(model, sample.work, expected, ratio), sample)
    error = ratio - 1.0
    band = BAND * model.scatter
    scatter = model.scatter + (min(abs(error), band) * 1.5 - model.scatter) / MEMORY_COUNT
    scatter = min(max(scatter, SCATTER_MIN), SCATTER_MAX)
    margin = max(1.0, model.margin * MARGIN_KEPT)
    if abs(error) <= band:
        return _learned(model, sample.work, expected, ratio, scatter=scatter, margin=margin, streak=0, streak_ratio=1.0)
    model = _outlying(replace(model, scatter=scatter, margin=margin), ratio)
    if abs(model.streak) >= STREAK_COUNT:
        return _learned(_changed(model), sample.work, expected * model.streak_ratio, ratio / model.streak_ratio)
    return _learned(model, sample.work, expected, 1.0 + (band if error > 0 else -band))


def _alone(prices: Prices, work: StepWork) -> float:
    base, prefill, decode, context = prices
    found = base + prefill * work.prefill_tokens + decode * work.decode_count + context * work.context_tokens
    return max(found, STEP_S_MIN)


def _interfered(model: StepModel, sample: StepSample) -> StepModel:
    """Learn from a shared step how much slower it was than alone; an extreme one counts as twice the ratio so far."""
    ratio = sample.duration_s / _alone(model.prices, sample.work)
    ratio = min(max(ratio, 1.0), 2.0 * model.interference)
    count = model.shared_count + 1
    gain = max(INTERFERENCE_GAIN, 1.0 / count)
    interference = min(model.interference + gain * (ratio - model.interference), INTERFERENCE_MAX)
    return replace(model, interference=interference, shared_count=min(count, 1_000_000))


def _warmed(model: StepModel, sample: StepSample) -> StepModel:
    """Raise the margin, while the model is cold, until no step seen so far would be predicted too short."""
    seen = (*model.seen, sample)
    margin = max(1.0, *(each.duration_s / _alone(model.prices, each.work) for each in seen))
    return replace(model, seen=seen if model.sample_count < COLD_COUNT else (), margin=margin)


def _outlying(model: StepModel, ratio: float) -> StepModel:
    side = 1 if ratio > 1.0 else -1
    streak = model.streak + side if model.streak * side > 0 else side
    # Running mean over the streak, a slower sample capped at 1.5 times it: one extreme sample must not set the prices.
    kept = ratio if abs(streak) == 1 else 0.5 * (model.streak_ratio + min(ratio, 1.5 * model.streak_ratio))
    return replace(model, streak=streak, streak_ratio=kept)


def _changed(model: StepModel) -> StepModel:
    """Multiply all prices by the streak's ratio; the samples before it keep a tenth of their weight."""
    by = model.streak_ratio
    prices, targets = model.prices, model.targets
    a, b, c, d, e, f, g, h, i, j = [0.1 * each / (by * by) for each in model.products]
    # Products hold 1/predicted², targets 1/predicted: both are restated for the new prices.
    return replace(
        model,
        prices=(prices[0] * by, prices[1] * by, prices[2] * by, prices[3] * by),
        products=(a, b, c, d, e, f, g, h, i, j),
        targets=(0.1 * targets[0] / by, 0.1 * targets[1] / by, 0.1 * targets[2] / by, 0.1 * targets[3] / by),
        streak=0,
    )


def _learned(
    model: StepModel,
    work: StepWork,
    expected: float,
    ratio: float,
    *,
    scatter: float | None = None,
    margin: float | None = None,
    streak: int | None = None,
    streak_ratio: float | None = None,
) -> StepModel:
    """Add one row to the sums, and go towards the prices that fit them best, one price at a time, none below 0.

    Rows are divided by the step's predicted time, so a short step counts as much as a long one. Along what the samples
    do not tell apart, prices stay where they are. Written out, as it is done for every step of a serving engine.
    """
    keep = 1.0 - 1.0 / MEMORY_COUNT
    r0, r1 = 1.0 / expected, work.prefill_tokens / expected
    r2, r3 = work.decode_count / expected, work.context_tokens / expected
    q00, q01, q02, q03, q11, q12, q13, q22, q23, q33 = model.products
    q00, q01, q02, q03 = keep * q00 + r0 * r0, keep * q01 + r0 * r1, keep * q02 + r0 * r2, keep * q03 + r0 * r3
    q11, q12, q13 = keep * q11 + r1 * r1, keep * q12 + r1 * r2, keep * q13 + r1 * r3
    q22, q23, q33 = keep * q22 + r2 * r2, keep * q23 + r2 * r3, keep * q33 + r3 * r3
    t0, t1, t2, t3 = model.targets
    t0, t1, t2, t3 = keep * t0 + r0 * ratio, keep * t1 + r1 * ratio, keep * t2 + r2 * ratio, keep * t3 + r3 * ratio
    p0, p1, p2, p3 = model.prices
    most0, most1, most2, most3 = PRICE_MAX
    for _ in range(2):
        if q00 > LEAST:
            p0 += (t0 - (q00 * p0 + q01 * p1 + q02 * p2 + q03 * p3)) / q00
            p0 = 0.0 if p0 < 0.0 else most0 if p0 > most0 else p0
        if q11 > LEAST:
            p1 += (t1 - (q01 * p0 + q11 * p1 + q12 * p2 + q13 * p3)) / q11
            p1 = 0.0 if p1 < 0.0 else most1 if p1 > most1 else p1
        if q22 > LEAST:
            p2 += (t2 - (q02 * p0 + q12 * p1 + q22 * p2 + q23 * p3)) / q22
            p2 = 0.0 if p2 < 0.0 else most2 if p2 > most2 else p2
        if q33 > LEAST:
            p3 += (t3 - (q03 * p0 + q13 * p1 + q23 * p2 + q33 * p3)) / q33
            p3 = 0.0 if p3 < 0.0 else most3 if p3 > most3 else p3
    return StepModel(
        prices=(p0, p1, p2, p3),
        margin=model.margin if margin is None else margin,
        interference=model.interference,
        sample_count=min(model.sample_count + 1, 1_000_000),
        shared_count=model.shared_count,
        scatter=model.scatter if scatter is None else scatter,
        streak=model.streak if streak is None else streak,
        streak_ratio=model.streak_ratio if streak_ratio is None else streak_ratio,
        products=(q00, q01, q02, q03, q11, q12, q13, q22, q23, q33),
        targets=(t0, t1, t2, t3),
        seen=model.seen,
    )


@dataclass(frozen=True)
class StepErrors:
    """Relative errors of the last predictions, newest last."""

    errors: tuple[float, ...] = ()

    COUNT_MAX = 256

    def noted(self, predicted_s: float, measured_s: float) -> StepErrors:
        """Add an error, |measured / predicted - 1|, and drop the oldest beyond COUNT_MAX."""
        kept = self.errors[1 - self.COUNT_MAX :]
        return StepErrors((*kept, abs(measured_s / max(predicted_s, 1e-9) - 1.0)))

    @property
    def p50(self) -> float | None:
        """Half of the errors are at most this; None: there are none."""
        return self._at(0.5)

    @property
    def p95(self) -> float | None:
        """95 of 100 errors are at most this; None: there are none."""
        return self._at(0.95)

    @cached_property
    def _ordered(self) -> list[float]:
        return sorted(self.errors)

    def _at(self, fraction: float) -> float | None:
        ordered = self._ordered
        return ordered[min(len(ordered) - 1, int(len(ordered) * fraction))] if ordered else None
