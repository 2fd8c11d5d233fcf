"""What lay between samples of the fabric, and what lending did to serving users meanwhile."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollfab.fabric.contract.lease_plan import RunSample, Sample, ServingSample
from rollfab.fabric.contract.records import WorkerInfo
from rollfab.fabric.inspect.history import HistoryPoint, lending_verdicts, points, sample_of
from rollfab.fabric.ports.queue import Survey

RUN = RunSample(
    run_id="r1", token_count=0, rollout_count=0, groups_waiting=1, dead_count=0, head_version=3, cause="moves"
)
WORKER = ServingSample(
    worker_id="s1",
    guard_state="open",
    slot_count=4,
    token_count=0,
    request_count=0,
    violation_count=0,
    request_count_alone=0,
    violation_count_alone=0,
    ttft_ms_p99=80,
    tpot_ms_p99=9,
    ttft_ms_p99_alone=70,
    tpot_ms_p99_alone=8,
    ttft_slo_ms=200,
    tpot_slo_ms=20,
)
EMPTY = Sample(
    time_ms=0,
    token_count=0,
    rollout_count=0,
    groups_waiting=0,
    dead_count=0,
    worker_count=3,
    running_count=2,
    slot_count=8,
)


def sample(minute: int, tokens: int, **serving: int) -> Sample:
    """One minute's sample, in which the run and its serving worker have made so many tokens in all."""
    runs = (replace(RUN, token_count=tokens),)
    worker = replace(WORKER, token_count=tokens, **serving)
    return replace(EMPTY, time_ms=minute * 60_000, token_count=tokens, runs=runs, serving=(worker,))


def test_rates_are_of_what_was_added_and_levels_are_the_last() -> None:
    (first, second) = points([sample(0, 100), sample(1, 700), sample(3, 1900)], 10)
    assert (first.time_ms, first.span_ms, first.tokens_per_s) == (60_000, 60_000, 10.0)
    assert (second.time_ms, second.span_ms, second.tokens_per_s) == (180_000, 120_000, 10.0)
    assert second.runs["r1"].tokens_per_s == 10.0
    assert second.lent_tokens_per_s == 10.0
    assert (second.running_count, second.slot_count, second.runs["r1"].cause) == (2, 8, "moves")


def test_a_worker_that_began_anew_and_one_that_is_new_count_from_0() -> None:
    (point,) = points([sample(0, 5000), sample(1, 600)], 10)
    assert point.serving["s1"].tokens_per_s == 10.0
    (point,) = points([EMPTY, sample(1, 600)], 10)
    assert point.serving["s1"].tokens_per_s == 10.0


@pytest.mark.parametrize("guard_state", [None, "shut"])
def test_a_serving_worker_without_a_guard_is_told_without_one(guard_state: str | None) -> None:
    info = WorkerInfo(worker_id="s1", role="serving", pid=1, host="h", guard_state=guard_state)
    samples = [
        sample_of(
            Survey(runs={}, workers={"s1": (info, 0)}, leases={}, assignments={}, wall_ms=60_000 * minute), {}, {}
        )
        for minute in (1, 2)
    ]
    (point,) = points(samples, 10)
    assert point.serving["s1"].guard_state == guard_state


def test_a_clock_that_was_set_back_makes_no_point() -> None:
    assert points([sample(5, 100), sample(4, 200)], 10) == []
    assert points([sample(5, 100)], 10) == []
    assert points([], 10) == []


@given(st.lists(st.integers(0, 10_000), min_size=2, max_size=60), st.integers(1, 20))
def test_fewer_points_tell_of_the_same_tokens(added: list[int], count_max: int) -> None:
    totals = [sum(added[: index + 1]) for index in range(len(added))]
    found = points([sample(index, total) for index, total in enumerate(totals)], count_max)
    assert 1 <= len(found) <= count_max
    assert found[-1].time_ms == (len(added) - 1) * 60_000
    told = sum(point.tokens_per_s * point.span_ms / 1000 for point in found)
    first_ms = found[0].time_ms - found[0].span_ms
    assert told == pytest.approx(totals[-1] - totals[first_ms // 60_000], abs=0.1 * len(added))


def history(
    *, tokens: int = 600, shared: tuple[int, int] = (0, 0), alone: tuple[int, int] = (0, 0)
) -> list[HistoryPoint]:
    """One minute with so many requests beyond an objective, of so many, beside rollouts and without."""
    facts = {
        "violation_count": shared[0],
        "request_count": shared[1],
        "violation_count_alone": alone[0],
        "request_count_alone": alone[1],
    }
    return points([sample(0, 0), sample(1, tokens, **facts)], 10)


@pytest.mark.parametrize(
    ("shared", "alone", "answer"),
    [
        ((0, 500), (0, 500), "no"),
        ((0, 500), (9, 500), "no"),
        ((5, 500), (5, 500), "no"),
        ((5, 500), (50, 500), "no"),
        ((50, 500), (5, 500), "yes"),
        ((500, 500), (0, 500), "yes"),
        ((2, 100), (1, 100), "unclear"),
        ((3, 100), (0, 0), "unclear"),
        ((0, 0), (3, 100), "no"),
    ],
)
def test_lending_hurt_if_more_requests_beside_rollouts_were_late_than_chance_explains(
    shared: tuple[int, int], alone: tuple[int, int], answer: str
) -> None:
    (found,) = lending_verdicts(history(shared=shared, alone=alone))
    assert found.answer == answer
    assert found.words.startswith(f"{answer}:")
    assert found.hurt_at_ms == ([60_000] if shared[0] else [])
    assert (found.token_count, found.lent_ms) == (600, 60_000)


def test_what_lent_nothing_is_idle_and_who_hurt_most_comes_first() -> None:
    (found,) = lending_verdicts(history(tokens=0))
    assert (found.answer, found.words) == ("idle", "nothing was lent")
    both = replace(
        history()[0],
        serving={
            "a": history(shared=(1, 90))[0].serving["s1"],
            "b": history(shared=(7, 90))[0].serving["s1"],
        },
    )
    assert [each.worker_id for each in lending_verdicts([both])] == ["b", "a"]
    assert lending_verdicts([]) == []
