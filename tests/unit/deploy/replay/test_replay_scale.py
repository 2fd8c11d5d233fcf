"""Scaling of load: rates to the request, order and window kept, the same for the same seed, bursts as wanted."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollfab.deploy.replay.records import Arrival
from rollfab.deploy.replay.scale import Load, at_rate, bursty, faster, fitted, placed, window, with_lengths
from rollfab.deploy.replay.traces import read_trace

SPAN_S = 50.0


@st.composite
def loads(draw: st.DrawFn) -> list[Arrival]:
    times = draw(st.lists(st.floats(0, SPAN_S, exclude_max=True), min_size=1, max_size=60))
    return [Arrival(at_s, index + 1, 2 * index + 1) for index, at_s in enumerate(sorted(times))]


def lengths(arrivals: list[Arrival]) -> Counter[tuple[int, int]]:
    return Counter((each.prompt_tokens, each.completion_tokens) for each in arrivals)


@given(loads(), st.floats(0.01, 1), st.integers(0, 9))
def test_thinning_keeps_order_and_times_and_gives_the_rate(arrivals: list[Arrival], share: float, seed: int) -> None:
    rate_per_s = share * len(arrivals) / SPAN_S

    thinned = at_rate(arrivals, rate_per_s, span_s=SPAN_S, seed=seed)

    assert len(thinned) == round(rate_per_s * SPAN_S)
    rest = iter(arrivals)
    assert all(each in rest for each in thinned)  # a subsequence: none twice, none moved
    assert thinned == at_rate(arrivals, rate_per_s, span_s=SPAN_S, seed=seed)


@given(loads(), st.floats(1, 8), st.integers(0, 9))
def test_superposing_stays_within_and_takes_every_request_as_often(
    arrivals: list[Arrival], times: float, seed: int
) -> None:
    rate_per_s = times * len(arrivals) / SPAN_S

    found = at_rate(arrivals, rate_per_s, span_s=SPAN_S, seed=seed)

    assert len(found) == round(rate_per_s * SPAN_S)
    assert all(0 <= each.at_s < SPAN_S for each in found)
    assert [each.at_s for each in found] == sorted(each.at_s for each in found)
    counts = lengths(found)
    whole = len(found) // len(arrivals)
    assert set(counts) == set(lengths(arrivals)) and set(counts.values()) <= {whole, whole + 1}
    assert not Counter(arrivals) - Counter(found)  # the first copy is not shifted
    assert found == at_rate(arrivals, rate_per_s, span_s=SPAN_S, seed=seed)


def test_copies_are_shifted_by_times_of_their_own() -> None:
    arrivals = [Arrival(10.0, 1, 1)]
    found = at_rate(arrivals, 4 / SPAN_S, span_s=SPAN_S, seed=0)
    other = at_rate(arrivals, 4 / SPAN_S, span_s=SPAN_S, seed=1)
    assert len({each.at_s for each in found}) == 4
    assert found != other


def test_a_copy_is_shifted_in_a_circle_as_a_whole() -> None:
    arrivals = [Arrival(float(at_s), 100 + at_s, 1) for at_s in range(0, 50, 5)]
    copy = sorted(set(at_rate(arrivals, 20 / SPAN_S, span_s=SPAN_S, seed=0)) - set(arrivals), key=lambda a: a.at_s)
    shifts = [(each.at_s - (each.prompt_tokens - 100)) % SPAN_S for each in copy]
    assert len(copy) == 10 and shifts == pytest.approx([shifts[0]] * 10)
    assert copy[0].prompt_tokens != 100  # some have gone round


@given(loads(), st.floats(0, SPAN_S), st.floats(0.1, SPAN_S))
def test_a_window_holds_what_arrives_in_it_from_zero_on(arrivals: list[Arrival], start: float, length: float) -> None:
    found = window(arrivals, start, length)
    assert lengths(found) == lengths([each for each in arrivals if start <= each.at_s < start + length])
    assert all(0 <= each.at_s <= length for each in found)


def test_speed_compresses_time_and_nothing_else() -> None:
    assert faster([Arrival(3.0, 5, 7)], 1.5) == [Arrival(2.0, 5, 7)]


@given(loads(), st.floats(0.001, 3), st.integers(2, 100))
def test_lengths_are_scaled_and_cut_to_the_context(arrivals: list[Arrival], factor: float, context: int) -> None:
    scaled = with_lengths(arrivals, factor)
    cut, cut_count = fitted(scaled, context)

    assert [each.at_s for each in cut] == [each.at_s for each in arrivals]
    for before, after in zip(scaled, cut, strict=True):
        assert after.prompt_tokens >= 1 and after.completion_tokens >= 1
        assert after.prompt_tokens + after.completion_tokens <= context
        if before.prompt_tokens + before.completion_tokens <= context:
            assert after == before
        else:  # nothing is given away: the context is full
            assert after.prompt_tokens + after.completion_tokens == context
    assert cut_count == sum(before != after for before, after in zip(scaled, cut, strict=True))


@pytest.mark.parametrize(("rate_per_s", "seed"), [(2.0, 1), (4.0, 2), (10.0, 3)])
def test_bursts_peak_as_wanted_and_keep_requests_rate_and_envelope(rate_per_s: float, seed: int) -> None:
    trace = read_trace("azure-conv")
    arrivals = at_rate(trace.arrivals, rate_per_s, span_s=trace.span_s, seed=seed)

    found = bursty(arrivals, 4.22, span_s=trace.span_s, seed=seed)

    load = Load.of(found, trace.span_s)
    assert load.max_over_mean == pytest.approx(4.22, rel=0.1)
    assert load.count == len(arrivals)
    assert [(a.prompt_tokens, a.completion_tokens) for a in found] == [
        (b.prompt_tokens, b.completion_tokens) for b in arrivals
    ]
    assert all(0 <= each.at_s < trace.span_s for each in found)
    assert found == bursty(arrivals, 4.22, span_s=trace.span_s, seed=seed)


def test_bursts_lie_on_the_slow_rate_of_the_trace() -> None:
    # Given ten minutes of which the second five have nine times the requests
    times = np.concatenate((np.linspace(0, 299, 300), np.linspace(300, 599, 2700)))
    arrivals = [Arrival(float(at_s), 1, 1) for at_s in times]

    found = bursty(arrivals, 8.0, span_s=600, seed=4)

    late = sum(each.at_s >= 300 for each in found)
    assert late / len(found) == pytest.approx(0.9, abs=0.04)


@given(st.lists(st.floats(0, 5), min_size=1, max_size=9), st.floats(0.01, 1), st.integers(0, 20))
def test_placed_times_fall_where_the_rate_is(rates: list[float], last_s: float, count: int) -> None:
    span_s = len(rates) - 1 + last_s
    times = placed(np.array(rates), count, span_s, np.random.default_rng(0))
    assert len(times) == count and (np.diff(times) >= 0).all() and ((times >= 0) & (times < span_s)).all()
    if sum(rates[:-1]) + rates[-1] * last_s > 1e-6:
        seconds = times.astype(int)
        assert all(rates[second] > 0 or times[index] == second for index, second in enumerate(seconds))


def test_the_load_of_known_counts() -> None:
    # seconds hold 4, 0, 0, 0 requests
    load = Load.of([Arrival(0.2, 1, 1)] * 4, 4.0)
    assert (load.count, load.mean_per_s, load.max_over_mean, load.idc) == (4, 1.0, 4.0, 3.0)
    assert Load.of([], 4.0).mean_per_s == 0
