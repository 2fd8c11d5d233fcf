"""The guard's rule: what may run in the next rollout step."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from rollfab.fabric.rules.serving.facts import RunningRequest, ServingState, Slo, StepWork, WaitingRequest
from rollfab.fabric.rules.serving.guard import Allowance, GuardFacts, GuardRule, decide
from rollfab.fabric.rules.serving.step_time import cold, predict

RULE = GuardRule(ttft_margin=1.0, tpot_margin=1.0)
SERVING = cold(0.005, 0.0001, 0.0002)  # 5 ms a step, 10 ms for a prompt of 100 more
ROLLOUT = cold(0.004, 0.0001, 0.00025)  # 12 ms for 32 sequences
WORK = StepWork(decode_count=32, context_tokens=4000)
SLO = Slo(ttft_ms=100.0, tpot_ms=10.0)
NOW = 1000.0


def facts(state: ServingState | None, **changes: object) -> GuardFacts:
    base = GuardFacts(now_s=NOW, state=state, slo=SLO, serving=SERVING, rollout=ROLLOUT, reserve_s=0.0, work=WORK)
    return replace(base, **changes)  # type: ignore[arg-type]


def serving(**fields: object) -> ServingState:
    return ServingState(seen_at_s=NOW, **fields)  # type: ignore[arg-type]


def running(token_count: int, behind_s: float) -> RunningRequest:
    """A request of `token_count` tokens, whose last pace left it `behind_s` after its first token."""
    return RunningRequest(first_token_at_s=NOW - behind_s, token_count=token_count, context_tokens=100)


def test_nothing_runs_without_a_probe_or_with_one_that_shows_no_life() -> None:
    silent = replace(serving(), seen_at_s=NOW - 0.3)

    assert decide(facts(None), RULE).step_tokens == 0
    assert "no sign" in decide(facts(silent), RULE).reason
    assert decide(facts(silent), RULE).step_tokens == 0


def test_a_waiting_request_that_has_time_lets_rollouts_run_and_one_that_has_none_does_not() -> None:
    fresh = WaitingRequest(arrived_at_s=NOW, prefill_tokens=100)
    late = WaitingRequest(arrived_at_s=NOW - 0.080, prefill_tokens=100)

    assert decide(facts(serving(waiting=(fresh,))), RULE).step_tokens is None
    verdict = decide(facts(serving(waiting=(late,))), RULE)
    assert verdict.step_tokens == 0
    assert "waiting" in verdict.reason


def test_prompts_ahead_in_the_queue_count_for_those_behind() -> None:
    crowd = tuple(WaitingRequest(arrived_at_s=NOW, prefill_tokens=100) for _ in range(9))

    assert decide(facts(serving(waiting=crowd[:3])), RULE).step_tokens is None
    assert decide(facts(serving(waiting=crowd)), RULE).step_tokens == 0


def test_pace_that_a_request_has_gained_can_be_spent_and_pace_it_might_gain_can_not() -> None:
    gained = running(token_count=20, behind_s=0.100)  # 200 ms of pace were due
    new = running(token_count=1, behind_s=0.0)

    assert decide(facts(serving(running=(gained,))), RULE).step_tokens is None
    assert decide(facts(serving(running=(gained, new))), RULE).step_tokens == 0


def test_less_of_the_pace_can_be_spent_as_serving_s_cache_fills_and_its_growth_beside_rollouts_counts() -> None:
    gained = running(token_count=20, behind_s=0.100)
    filling = facts(serving(running=(gained,), kv_used_tokens=400, kv_capacity_tokens=1000))

    assert decide(filling, RULE).step_tokens == 0
    assert decide(filling, replace(RULE, kv_growth=1.0)).step_tokens is None


def test_the_step_under_way_counts_by_what_is_left_of_it() -> None:
    request = running(token_count=3, behind_s=0.011)  # 30 ms due, 19 left, 5.2 of them for its next token
    step = StepWork(prefill_tokens=100, decode_count=1)  # 15 ms

    begun = serving(running=(request,), step=step, step_began_at_s=NOW)
    nearly_done = serving(running=(request,), step=step, step_began_at_s=NOW - 0.014)

    assert decide(facts(begun), RULE).step_tokens == 0
    assert decide(facts(nearly_done), RULE).step_tokens is None


def test_a_reserve_for_arrivals_is_kept_free() -> None:
    assert decide(facts(serving(), reserve_s=0.095), RULE).step_tokens == 0
    assert decide(facts(serving(), reserve_s=0.02), RULE).step_tokens is None


def test_a_step_is_cut_to_the_room_there_is_prompts_first() -> None:
    reading = StepWork(prefill_tokens=1000, decode_count=32, context_tokens=4000)

    cut = decide(facts(serving(), reserve_s=0.08, work=reading), RULE).step_tokens
    narrow = decide(facts(serving(), reserve_s=0.091, work=reading), RULE).step_tokens

    assert cut is not None
    assert 32 < cut < 150  # 12 ms for the sequences, 8 for about 80 tokens of prompts
    assert narrow is not None
    assert 8 <= narrow < 32


@given(
    ages=st.lists(st.floats(0, 0.2), max_size=5),
    paces=st.lists(st.tuples(st.integers(1, 50), st.floats(0, 0.4)), max_size=5),
    reserve_s=st.floats(0, 0.2),
    decode_count=st.integers(0, 64),
    prefill_tokens=st.integers(0, 2000),
)
def test_what_is_let_run_is_never_predicted_to_take_longer_than_the_room(
    ages: list[float],
    paces: list[tuple[int, float]],
    reserve_s: float,
    decode_count: int,
    prefill_tokens: int,
) -> None:
    state = serving(
        waiting=tuple(WaitingRequest(arrived_at_s=NOW - age, prefill_tokens=50) for age in ages),
        running=tuple(running(count, behind) for count, behind in paces),
    )
    work = StepWork(prefill_tokens=prefill_tokens, decode_count=decode_count, context_tokens=100 * decode_count)

    verdict = decide(facts(state, reserve_s=reserve_s, work=work), RULE)

    tokens = decode_count + prefill_tokens if verdict.step_tokens is None else verdict.step_tokens
    decoded = min(tokens, decode_count)
    ran = StepWork(prefill_tokens=tokens - decoded, decode_count=decoded)
    assert tokens == 0 or predict(ROLLOUT, ran) <= min(verdict.room_s, RULE.step_s_max) + 1e-9


@given(delay_s=st.floats(0, 0.1), age_s=st.floats(0, 0.1), count=st.integers(1, 30), behind_s=st.floats(0, 0.3))
def test_room_only_shrinks_as_time_goes_by_without_a_token(
    delay_s: float, age_s: float, count: int, behind_s: float
) -> None:
    state = serving(
        waiting=(WaitingRequest(arrived_at_s=NOW - age_s, prefill_tokens=50),), running=(running(count, behind_s),)
    )
    later = replace(state, seen_at_s=NOW + delay_s)

    assert decide(facts(later, now_s=NOW + delay_s), RULE).room_s <= decide(facts(state), RULE).room_s + 1e-9


def test_a_small_step_may_be_tried_where_nothing_fits_and_nobody_is_near_the_slo() -> None:
    slow = cold(5.0, 0.0, 0.0)  # what it once measured keeps every step out
    easy = facts(serving(running=(running(20, 0.05),)), rollout=slow)
    tight = facts(serving(running=(running(20, 0.19),)), rollout=slow)

    assert (decide(easy, RULE).step_tokens, decide(easy, RULE).may_try) == (0, True)
    assert (decide(tight, RULE).step_tokens, decide(tight, RULE).may_try) == (0, False)


def test_nothing_is_tried_while_a_request_waits_or_the_probe_is_silent() -> None:
    slow = cold(5.0, 0.0, 0.0)
    waited_for = facts(serving(waiting=(WaitingRequest(arrived_at_s=NOW, prefill_tokens=10),)), rollout=slow)

    for case in (waited_for, facts(None, rollout=slow)):
        verdict: Allowance = decide(case, RULE)
        assert (verdict.step_tokens, verdict.may_try) == (0, False)
