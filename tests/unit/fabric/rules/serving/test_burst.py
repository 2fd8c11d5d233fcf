"""The burst reserve: it follows the load up at once and down soon, within its bounds."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from statistics import NormalDist

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollfab.fabric.rules.serving.burst import Arrivals, BurstRule, arrived, deviations, reserve_s
from rollfab.fabric.rules.serving.step_time import cold

MODEL = cold(0.008, 2e-5, 1e-4)
RULE = BurstRule()
GAPS = st.lists(st.tuples(st.floats(-1.0, 500.0), st.integers(1, 100_000)), max_size=80)


def poisson(arrivals: Arrivals, *, since_s: float, rate: float, duration_s: float, tokens: int = 1000) -> Arrivals:
    dice, at_s = Random(1), since_s
    while (at_s := at_s + dice.expovariate(rate)) < since_s + duration_s:
        arrivals = arrived(arrivals, at_s, tokens)
    return arrivals


def test_nothing_seen_reserves_nothing() -> None:
    assert reserve_s(Arrivals(), 5.0, MODEL, RULE) == 0.0


def test_the_rates_are_those_of_the_load() -> None:
    # When
    arrivals = poisson(Arrivals(), since_s=0.0, rate=20.0, duration_s=120.0)
    # Then
    fast, slow = arrivals.rates(120.0)
    assert slow == pytest.approx(20.0, rel=0.15)
    assert fast == pytest.approx(20.0, rel=0.7)
    assert 1.0 <= arrivals.dispersion < 1.6


def test_a_short_history_is_no_low_rate() -> None:
    # When
    arrivals = poisson(Arrivals(), since_s=0.0, rate=20.0, duration_s=5.0)
    # Then
    assert arrivals.rates(5.0)[1] == pytest.approx(20.0, rel=0.4)


def test_a_burst_raises_the_reserve_at_once_and_its_end_lowers_it_within_seconds() -> None:
    # Given
    calm = poisson(Arrivals(), since_s=0.0, rate=5.0, duration_s=120.0)
    before = reserve_s(calm, 120.0, MODEL, RULE)
    # When
    burst = poisson(calm, since_s=120.0, rate=50.0, duration_s=1.0)
    # Then
    fast, slow = burst.rates(121.0)
    assert fast / slow > 3
    assert reserve_s(burst, 121.0, MODEL, RULE) > 2 * before
    assert reserve_s(burst, 126.0, MODEL, RULE) < 1.7 * before


def test_arrivals_in_clumps_reserve_more_than_even_ones() -> None:
    # Given: the same hundred requests in every ten seconds
    even, clumped = Arrivals(), Arrivals()
    # When
    for index in range(1200):
        even = arrived(even, index / 10, 1000)
        clumped = arrived(clumped, index // 100 * 10 + index % 100 / 100, 1000)
    # Then
    assert clumped.dispersion > 4 > even.dispersion
    quiet = replace(clumped, fast_per_s=0.0)  # as it is long after a clump
    assert reserve_s(quiet, 120.0, MODEL, RULE) > 1.2 * reserve_s(replace(even, fast_per_s=0.0), 120.0, MODEL, RULE)


@given(GAPS, st.floats(0.0, 1000.0), st.floats(0.001, 10.0), st.floats(0.01, 0.999))
def test_the_reserve_is_bounded_and_grows_with_horizon_and_quantile(
    gaps: list[tuple[float, int]], passed_s: float, horizon_s: float, quantile: float
) -> None:
    # Given
    arrivals, at_s = Arrivals(), 0.0
    for gap, tokens in gaps:
        at_s += gap
        arrivals = arrived(arrivals, at_s, tokens)
    now_s = at_s + passed_s
    rule = BurstRule(horizon_s=horizon_s, quantile=quantile)
    # When
    found = reserve_s(arrivals, now_s, MODEL, rule)
    # Then
    assert 0.0 <= found <= rule.reserve_max_s
    assert found <= reserve_s(arrivals, now_s, MODEL, replace(rule, horizon_s=2 * horizon_s)) + 1e-9
    assert found <= reserve_s(arrivals, now_s, MODEL, replace(rule, quantile=(1 + quantile) / 2)) + 1e-9
    assert arrivals.tokens_spread >= 0 and arrivals.counts_spread >= 0


@given(st.floats(0.0005, 0.9995))
def test_deviations_are_those_of_a_normal_distribution(quantile: float) -> None:
    assert deviations(quantile) == pytest.approx(NormalDist().inv_cdf(quantile), abs=1e-3)
