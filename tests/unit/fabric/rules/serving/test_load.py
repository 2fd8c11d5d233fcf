"""How much of a device serving needs: what arrives counts, and not how busy the engine looks."""

from __future__ import annotations

import pytest

from rollfab.fabric.rules.serving.burst import Answers, Arrivals, arrived, load_fraction
from rollfab.fabric.rules.serving.facts import ServingState, Slo, WaitingRequest
from rollfab.fabric.rules.serving.step_time import cold

SLO = Slo(ttft_ms=500.0, tpot_ms=100.0)
MODEL = cold(0.009, 20e-6, 50e-6)  # 9 ms a step, 20 µs a prompt token, 50 µs a sequence
IDLE = ServingState(seen_at_s=0.0)


def steady(per_s: float, seconds: float = 120.0) -> Arrivals:
    found = Arrivals()
    for n in range(int(per_s * seconds)):
        found = arrived(found, n / per_s, 1000)
    return found


def load(per_s: float, state: ServingState = IDLE, now_s: float = 120.0) -> float | None:
    return load_fraction(steady(per_s), Answers().noted(200), state, now_s, MODEL, SLO)


@pytest.mark.parametrize("per_s", [2.0, 5.0, 10.0])
def test_a_load_is_what_prompts_tokens_and_the_promised_pace_take(per_s: float) -> None:
    # A request: 20 ms of prompt and 200 tokens of 50 µs; the pace: 9 ms of each 90
    assert load(per_s) == pytest.approx(0.1 + per_s * (0.020 + 0.010), rel=0.3)


def test_nothing_that_arrives_is_no_load_and_an_answer_of_unknown_length_is_unknown() -> None:
    assert load_fraction(Arrivals(), Answers(), IDLE, 0.0, MODEL, SLO) == 0.0
    assert load_fraction(steady(1.0), Answers(), IDLE, 120.0, MODEL, SLO) is None


def test_a_load_that_ends_is_forgotten_in_a_minute_or_two() -> None:
    assert (load(10.0, now_s=240.0) or 0.0) < 0.05  # of a load of 0.4


def test_prompts_that_wait_count_with_the_time_they_have() -> None:
    # Given forty prompts: 0.8 s of work where each may wait 0.5 s
    piled = ServingState(
        seen_at_s=0.0, waiting=tuple(WaitingRequest(arrived_at_s=0.0, prefill_tokens=1000) for _ in range(40))
    )
    assert load(1.0, piled) == pytest.approx(1.6)


def test_what_is_held_of_the_cache_is_a_load_where_answers_are_long() -> None:
    held = ServingState(seen_at_s=0.0, kv_used_tokens=60_000, kv_capacity_tokens=100_000)
    assert load(1.0, held) == pytest.approx(0.6)
    assert load(10.0, ServingState(seen_at_s=0.0, kv_used_tokens=10, kv_capacity_tokens=1000)) == load(10.0)


def test_answers_are_known_from_the_first_and_follow_a_change() -> None:
    answers = Answers().noted(100)
    assert answers.tokens_mean == 100
    for _ in range(500):
        answers = answers.noted(300)
    assert answers.tokens_mean == pytest.approx(300, rel=0.01)
