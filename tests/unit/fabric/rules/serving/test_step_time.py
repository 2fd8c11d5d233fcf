"""The step-time model: bounds, cold start, convergence, outliers, lasting changes, shared steps."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rollfab.deploy.simulation.machine.cost import StepCost
from rollfab.fabric.rules.serving.facts import StepSample, StepWork
from rollfab.fabric.rules.serving.step_time import (
    COLD_COUNT,
    INTERFERENCE_MAX,
    PRICE_MAX,
    StepErrors,
    StepModel,
    cold,
    predict,
    refit,
)
from tests.support.simulated import SERVING_COST

CAUTIOUS = cold(0.05, 2e-4, 2e-3)
WORKS = st.builds(
    StepWork,
    prefill_tokens=st.integers(0, 8192),
    decode_count=st.integers(0, 512),
    context_tokens=st.integers(0, 1_000_000),
)
SAMPLES = st.builds(StepSample, work=WORKS, duration_s=st.floats(-1.0, 100.0, allow_nan=False), is_shared=st.booleans())


def steps(seed: int, count: int) -> Iterator[StepWork]:
    """What a serving engine computes: mostly decodes, now and then a prompt, the batch drifting."""
    dice, decodes = Random(seed), 10
    for _ in range(count):
        decodes = min(128, max(1, decodes + dice.randint(-2, 2)))
        prefill = dice.choice([0, 0, 0, 0, 0, 0, dice.randint(50, 2048), 2048])
        yield StepWork(prefill_tokens=prefill, decode_count=decodes, context_tokens=decodes * dice.randint(900, 1100))


def seconds(cost: StepCost, work: StepWork) -> float:
    return cost.seconds(work, work.prefill_tokens**2 / 2)


def followed(
    model: StepModel,
    seed: int,
    count: int,
    *,
    cost: StepCost = SERVING_COST,
    slower: float = 1.0,
    outliers: float = 0.0,
) -> tuple[StepModel, list[float]]:
    """Refit over steps that scatter by 5 %; returns the errors against the true, noiseless times too."""
    dice, errors = Random(seed), []
    for work in steps(seed, count):
        true_s = slower * seconds(cost, work)
        errors.append(abs(predict(model, work) / true_s - 1))
        took_s = true_s * dice.lognormvariate(0.0, 0.05) * (5.0 if dice.random() < outliers else 1.0)
        model = refit(model, StepSample(work=work, duration_s=took_s))
    return model, errors


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


@pytest.mark.parametrize("seed", range(4))
def test_a_cold_model_learns_an_engine_within_fifty_steps(seed: int) -> None:
    # When
    _, errors = followed(CAUTIOUS, seed, 400)
    # Then
    assert median(errors[50:]) < 0.05
    assert sorted(errors[50:])[int(0.95 * 350)] < 0.2


def shortest(decode_count: int, duration_s: float) -> StepSample:
    work = StepWork(prefill_tokens=0, decode_count=decode_count, context_tokens=0)
    return StepSample(work=work, duration_s=duration_s, is_shared=False)


@given(st.lists(SAMPLES, min_size=1, max_size=COLD_COUNT))
@example([shortest(0, 0.0), shortest(0, 1.2e-38), shortest(6, 0.0078125)])  # prices of nearly 0 were predicted by
def test_a_cold_model_predicts_nothing_below_what_it_saw(samples: list[StepSample]) -> None:
    # Given
    model, seen = CAUTIOUS, []
    # When
    for sample in samples:
        model = refit(model, sample)
        if not sample.is_shared and 0 < sample.duration_s < 10:
            seen.append(sample)
    # Then
    assert all(predict(model, each.work) >= each.duration_s * (1 - 1e-6) for each in seen)


@given(st.lists(SAMPLES, max_size=60), WORKS, WORKS)
def test_whatever_was_measured_prices_stay_within_their_bounds_and_more_work_takes_longer(
    samples: list[StepSample], work: StepWork, more: StepWork
) -> None:
    # Given
    model = CAUTIOUS
    # When
    for sample in samples:
        model = refit(model, sample)
    # Then
    assert all(0 <= price <= bound for price, bound in zip(model.prices, PRICE_MAX, strict=True))
    assert 1 <= model.interference <= INTERFERENCE_MAX
    both = StepWork(
        prefill_tokens=work.prefill_tokens + more.prefill_tokens,
        decode_count=work.decode_count + more.decode_count,
        context_tokens=work.context_tokens + more.context_tokens,
    )
    assert 0 <= predict(model, work) <= predict(model, both) < float("inf")


@pytest.mark.parametrize("seed", range(3))
def test_steps_that_were_preempted_are_damped(seed: int) -> None:
    # Given
    model, _ = followed(CAUTIOUS, seed, 200)
    # When: one step in twenty takes five times as long
    _, errors = followed(model, seed + 100, 400, outliers=0.05)
    # Then
    assert median(errors) < 0.06


def test_a_single_preempted_step_moves_the_prediction_by_a_few_percent_at_most() -> None:
    # Given
    model, _ = followed(CAUTIOUS, 1, 200)
    work = StepWork(decode_count=20, context_tokens=20_000)
    before = predict(model, work)
    # When
    after = predict(refit(model, StepSample(work=work, duration_s=5 * before)), work)
    # Then
    assert before <= after < 1.1 * before


@pytest.mark.parametrize("slower", [0.5, 2.0, 4.0])
def test_a_lasting_change_of_speed_is_followed_within_fifty_steps(slower: float) -> None:
    # Given
    model, _ = followed(CAUTIOUS, 1, 300)
    # When
    _, errors = followed(model, 2, 200, slower=slower)
    # Then
    assert median(errors[:5]) > 0.3  # it had to be learned
    assert median(errors[50:]) < 0.05


def test_steps_beside_rollouts_tell_the_interference_and_leave_the_model_alone() -> None:
    # Given
    model, _ = followed(CAUTIOUS, 1, 200)
    prices = model.prices
    # When: every step takes 1.6 times as long
    for work in steps(7, 200):
        model = refit(model, StepSample(work=work, duration_s=1.6 * seconds(SERVING_COST, work), is_shared=True))
    # Then
    work = StepWork(decode_count=20, context_tokens=20_000)
    assert model.prices == prices
    assert model.interference == pytest.approx(1.6, rel=0.08)
    assert predict(model, work, is_shared=True) == pytest.approx(model.interference * predict(model, work))


def test_errors_are_those_of_the_last_predictions() -> None:
    # Given
    errors = StepErrors()
    assert errors.p50 is None and errors.p95 is None
    # When
    for percent in range(100):
        errors = errors.noted(1.0, 1.0 + percent / 100)
    # Then
    assert errors.p50 == pytest.approx(0.5)
    assert errors.p95 == pytest.approx(0.95)
    for _ in range(256):
        errors = errors.noted(1.0, 1.0)
    assert (errors.p95, len(errors.errors)) == (0.0, 256)
