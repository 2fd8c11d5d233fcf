"""What others may cost one that asks them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollfab.fabric.rules.weights.patience import FAIR_BYTES_PER_S, LOST_FRACTION, LOST_S_MAX, Patience


@given(st.lists(st.tuples(st.floats(0, 1000), st.floats(0, 1000)), max_size=60))
def test_however_long_who_is_asked_takes_only_a_share_of_the_time_is_lost(steps: list[tuple[float, float]]) -> None:
    now_s = lost_s = last_s = 0.0
    patience = Patience(0.0)
    for pause_s, wait_s in steps:
        now_s += pause_s
        if not patience.is_left(now_s):
            continue
        now_s += wait_s
        patience = patience.after(now_s, wait_s)
        lost_s, last_s = lost_s + wait_s, wait_s
        assert lost_s - last_s <= LOST_S_MAX + LOST_FRACTION * now_s + 1e-6


def test_bytes_that_come_fast_enough_cost_nothing_and_slow_ones_what_they_are_too_late() -> None:
    fair = Patience(0.0).after(1000.0, 1000.0, 1000 * FAIR_BYTES_PER_S)
    late = Patience(0.0).after(10.0, 10.0, 4 * FAIR_BYTES_PER_S)

    assert (fair.left_s, late.left_s) == (LOST_S_MAX, LOST_S_MAX - 6.0)


def test_patience_comes_back_with_time_and_not_beyond_what_there_was() -> None:
    spent = Patience(0.0).after(100.0, 100.0)

    assert not spent.is_left(100.0)
    assert spent.is_left(100.0 + 1 + (100.0 - LOST_S_MAX) / LOST_FRACTION)
    assert spent.after(1e9, 0.0).left_s == pytest.approx(LOST_S_MAX)
