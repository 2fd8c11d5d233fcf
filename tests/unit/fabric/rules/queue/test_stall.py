"""When a turn has stalled, as a fold over looks."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollfab.fabric.rules.queue.engine_watch import WAITING_FRACTION, Line, Pulse, StallRule, feel, is_stalled

RULE = StallRule(stall_s=2.0, first_token_s=20.0)


def after(looks: list[tuple[float, int]], *, gap_s_max: float = 0.5, excused: tuple[float, ...] = ()) -> Pulse:
    """The pulse after looks at (time, count), beginning at time 0 with nothing made."""
    pulse = Pulse(0, 0.0)
    for now_s, count in looks:
        pulse = feel(pulse, count, now_s, gap_s_max=gap_s_max, is_excused=now_s in excused)
    return pulse


def every(step_s: float, until_s: float, count: int) -> list[tuple[float, int]]:
    return [(n * step_s, count) for n in range(1, int(until_s / step_s) + 1)]


def test_a_turn_without_a_token_for_the_stall_timeout_has_stalled() -> None:
    assert not is_stalled(after([(0.25, 1), *every(0.25, 2.0, 1)]), RULE)
    assert is_stalled(after([(0.25, 1), *every(0.25, 2.25, 1)]), RULE)


def test_before_its_first_token_a_turn_has_longer() -> None:
    assert not is_stalled(after(every(0.25, 19.75, 0)), RULE)
    assert is_stalled(after(every(0.25, 20.0, 0)), RULE)


def test_every_token_starts_the_silence_anew() -> None:
    assert not is_stalled(after([(n * 1.9, n) for n in range(1, 50)], gap_s_max=9.0), RULE)


def test_a_watcher_that_slept_an_hour_takes_nobody_for_stalled() -> None:
    assert not is_stalled(after([(0.1, 1), (3600.0, 1)]), RULE)


def test_what_is_held_does_not_stall_and_has_its_whole_time_again_afterwards() -> None:
    looks = [(0.25, 1), *every(0.25, 2.0, 1)]
    assert not is_stalled(after([*looks, (2.25, 1)], excused=(2.25,)), RULE)
    assert not is_stalled(after([*looks, (2.25, 1), (2.5, 1), (4.0, 1)], excused=(2.25,)), RULE)


@given(st.lists(st.tuples(st.floats(0.0, 5.0), st.integers(0, 2), st.booleans()), max_size=40))
def test_silence_is_never_counted_longer_than_it_was(rows: list[tuple[float, int, bool]]) -> None:
    pulse, now_s, count, moved_at_s = Pulse(0, 0.0), 0.0, 0, 0.0
    for passed_s, grown, is_excused in rows:
        now_s, count = now_s + passed_s, count + grown
        pulse = feel(pulse, count, now_s, gap_s_max=0.5, is_excused=is_excused)
        if grown or is_excused:
            moved_at_s = now_s
        assert pulse.quiet_s <= now_s - moved_at_s + 1e-6
        assert is_stalled(pulse, RULE) <= (now_s - moved_at_s >= RULE.stall_s - 1e-6)


def test_a_turn_has_time_to_read_its_context_and_counts_less_while_it_waits_in_line() -> None:
    silent = after([(0.25, 1), *every(0.25, 5.0, 1)])
    assert is_stalled(silent, RULE, 2_000) and not is_stalled(silent, RULE, 4_000)
    pulse = Pulse(1, 0.0)
    for look in range(1, 31):
        pulse = feel(pulse, 1, look * 0.25, gap_s_max=0.5, fraction=WAITING_FRACTION)
    assert pulse.quiet_s == pytest.approx(0.25)


@given(moves=st.lists(st.integers(0, 9), max_size=40), number=st.integers(0, 9))
def test_a_line_knows_when_one_that_came_later_moved_last(moves: list[int], number: int) -> None:
    line = Line()
    for at_s, mover in enumerate(moves):
        line.note(mover, float(at_s))
    later = [float(at_s) for at_s, mover in enumerate(moves) if mover > number]
    assert line.passed_at_s(number) == max(later, default=-math.inf)
