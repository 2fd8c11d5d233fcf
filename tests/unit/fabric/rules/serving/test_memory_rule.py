"""The KV budget of rollouts beside a serving engine: what it does under pressure, between the marks, and after it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from rollfab.fabric.rules.serving.memory import MemoryFacts, MemoryRule, MemoryState, decide

RULE = MemoryRule(cut_again_s=0.25, quiet_s=1.0, thaw_fraction_per_s=0.2)
FACTS = MemoryFacts(now_s=0.0, serving_used=0, serving_capacity=1000, rollout_capacity_tokens=8000)
STEP_S = 1 / 16  # a sum of these is exact


def after(state: MemoryState, uses: Iterable[float], rule: MemoryRule = RULE, **facts: Any) -> list[MemoryState]:
    """What becomes of it at one use of the serving engine's cache after the other, STEP_S apart."""
    found = []
    for use in uses:
        now_s = STEP_S if state.looked_at_s is None else state.looked_at_s + STEP_S
        state = decide(state, replace(FACTS, now_s=now_s, serving_used=1000 * use, **facts), rule)
        found.append(state)
    return found


def at(uses: Iterable[float], **facts: Any) -> MemoryState:
    return after(MemoryState(), uses, **facts)[-1]


def test_pressure_halves_what_rollouts_hold_at_once_and_again_while_it_goes_on() -> None:
    # Given rollouts that hold little of what they may
    quiet = at([0.3], rollout_tokens=2000)
    # When the use passes the mark, then the first look cuts what is held, not what is allowed
    (cut,) = after(quiet, [0.86], rollout_tokens=2000)
    assert cut.kv_tokens_max == 1000
    assert cut.reason == "serving holds 86% of its KV cache, cut at 85%"
    # and the next one comes when turns have had the time to go
    budgets = [state.kv_tokens_max for state in after(cut, [0.86] * 11, rollout_tokens=1000)]
    assert budgets == [1000] * 3 + [500] * 4 + [250] * 4


def test_a_cache_that_is_nearly_full_takes_all_at_once_but_the_floor() -> None:
    assert after(at([0.3]), [0.96])[-1].kv_tokens_max == 0
    floored = replace(RULE, floor_fraction=0.1)
    assert after(at([0.3]), [0.96], floored)[-1].kv_tokens_max == 800


def test_a_hard_cap_that_is_lowered_holds_at_once() -> None:
    capped = after(at([0.3]), [0.3], memory_fraction_max=0.25)[-1]
    assert (capped.kv_tokens_max, capped.reason) == (2000, "the serving team allows 2,000 tokens of KV cache")


def test_the_budget_grows_back_evenly_once_slack_has_lasted() -> None:
    cut = after(at([0.3]), [0.96])[-1]
    states = after(cut, [0.5] * 140)
    budgets = [state.kv_tokens_max for state in states]
    assert budgets[:16] == [0] * 16  # one second, from the first quiet look on
    assert budgets[16:96] == list(range(100, 8100, 100))  # 20 % of 8,000 a second
    assert "grows back after pressure: 50% of 8,000 tokens" in [state.reason for state in states]
    assert (budgets[-1], states[-1].reason) == (8000, "")


def test_a_process_that_froze_has_seen_no_slack() -> None:
    quiet = after(after(at([0.3]), [0.96])[-1], [0.5] * 25)[-1]
    assert quiet.looked_at_s is not None
    late = decide(quiet, replace(FACTS, now_s=quiet.looked_at_s + 60.0, serving_used=500), RULE)
    assert late.kv_tokens_max - quiet.kv_tokens_max <= 0.2 * 8000 * 0.5


def test_beside_an_engine_whose_use_is_not_known_all_is_lent() -> None:
    assert at([0.0], serving_capacity=0).kv_tokens_max == 8000


uses = st.floats(0, 1)
histories = st.lists(uses, min_size=1, max_size=80)
holdings = st.none() | st.integers(0, 10_000)


@given(histories, holdings, st.none() | st.floats(-0.5, 1.5))
def test_the_budget_is_never_above_the_cap_nor_below_nothing(
    history: list[float], held: int | None, fraction: float | None
) -> None:
    cap = 8000 if fraction is None else int(8000 * min(1.0, max(0.0, fraction)))
    for state in after(MemoryState(), history, rollout_tokens=held, memory_fraction_max=fraction):
        assert 0 <= state.kv_tokens_max <= cap
        assert state.reason or state.kv_tokens_max == 8000


@given(st.lists(st.tuples(uses, st.floats(0, 1)), max_size=60))
def test_a_cap_that_changes_holds_at_every_look(history: list[tuple[float, float]]) -> None:
    state = MemoryState()
    for use, fraction in history:
        (state,) = after(state, [use], memory_fraction_max=fraction)
        assert state.kv_tokens_max <= 8000 * fraction


@given(histories, st.lists(st.tuples(st.floats(0.85, 1), holdings), min_size=1, max_size=40))
def test_under_pressure_the_budget_only_falls(history: list[float], pressed: list[tuple[float, int | None]]) -> None:
    state = after(MemoryState(), history)[-1]
    for use, held in pressed:
        (later,) = after(state, [use], rollout_tokens=held)
        assert later.kv_tokens_max <= state.kv_tokens_max
        state = later


@given(histories, st.floats(0.7, 0.8499))
def test_constant_use_between_the_marks_moves_nothing(history: list[float], use: float) -> None:
    state = after(MemoryState(), history)[-1]
    assert {later.kv_tokens_max for later in after(state, [use] * 60)} == {state.kv_tokens_max}


@given(histories, st.floats(0.7, 0.8499), st.floats(0.1, 1))
def test_whatever_came_first_between_the_marks_something_is_lent_until_it_is_cut(
    history: list[float], use: float, fraction: float
) -> None:
    quiet = [min(later, 0.8499) for later in history]
    for state in after(MemoryState(), [use, *quiet], memory_fraction_max=fraction):
        assert state.kv_tokens_max == int(8000 * fraction) > 0


@given(histories, uses)
def test_constant_use_never_cuts_what_it_let_grow(history: list[float], use: float) -> None:
    budgets = [state.kv_tokens_max for state in after(after(MemoryState(), history)[-1], [use] * 150)]
    assert budgets in (sorted(budgets), sorted(budgets, reverse=True))


@given(histories, st.floats(0, 0.6999))
def test_long_quiet_gives_all_of_it_back(history: list[float], use: float) -> None:
    long = int((RULE.quiet_s + 1 / RULE.thaw_fraction_per_s) / STEP_S) + 2
    assert after(after(MemoryState(), history)[-1], [use] * long)[-1].kv_tokens_max == 8000
