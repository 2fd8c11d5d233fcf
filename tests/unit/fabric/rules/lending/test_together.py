"""Runs that one engine can serve at once are planned as one."""

from __future__ import annotations

import dataclasses
import math

from hypothesis import given
from hypothesis import strategies as st

from rollfab.fabric.rules.lending.capacity import plan
from rollfab.fabric.rules.lending.capacity_facts import CapacityRule, RunFacts, WorkerFacts
from rollfab.fabric.rules.lending.together import REST_S, TOGETHER_COUNT_MAX, together

RUNS = st.lists(
    st.builds(
        RunFacts,
        run_id=st.text("abcdef", min_size=1, max_size=3),
        model=st.sampled_from(["m", "n"]),
        weight=st.sampled_from([0.5, 1.0, 3.0]),
        has_weights=st.booleans(),
        open_count=st.integers(0, 9),
        idle_s=st.sampled_from([0.0, REST_S + 1]),
        is_unfit=st.booleans(),
        weights=st.sampled_from(["", "x", "y"]),
        left_tokens=st.none() | st.floats(1, 100),
    ),
    max_size=40,
    unique_by=lambda run: run.run_id,
)


def run(run_id: str, weights: str = "x", **facts: object) -> RunFacts:
    given = {"weight": 1.0, "has_weights": True, "open_count": 2, "idle_s": 0.0, **facts}
    return RunFacts(run_id=run_id, model="m", weights=weights, **given)  # type: ignore[arg-type]


@given(RUNS)
def test_each_run_is_planned_once_with_all_its_work_and_only_beside_its_like(runs: list[RunFacts]) -> None:
    by_id = {each.run_id: each for each in runs}
    found = together(runs)
    assert sorted(name for each in found for name in each.names) == sorted(by_id)
    assert sum(each.open_count for each in found) == sum(each.open_count for each in runs)
    for each in found:
        mates = [by_id[name] for name in each.names]
        assert each.run_id == each.names[0] and len(mates) <= TOGETHER_COUNT_MAX
        if len(mates) == 1:
            assert each == mates[0]
            continue
        assert {(mate.pool_key, mate.weights, mate.has_weights, mate.is_unfit) for mate in mates} == {
            (each.pool_key, each.weights, True, False)
        }
        assert each.weights
        wanting = [mate.weight for mate in mates if mate.open_count] or [mate.weight for mate in mates]
        assert math.isclose(each.weight, sum(wanting))


def test_a_run_that_rests_for_long_is_with_nobody() -> None:
    resting = run("b", open_count=0, idle_s=REST_S)
    assert together([run("a"), resting]) == [resting, run("a")]
    (both,) = together([run("a"), dataclasses.replace(resting, idle_s=1.0)])
    assert (both.names, both.open_count, both.weight, both.idle_s) == (("a", "b"), 2, 1.0, 0.0)


def test_more_than_fit_are_planned_in_parts_of_the_same_size() -> None:
    found = together([run(f"r{n:02}") for n in range(TOGETHER_COUNT_MAX + 4)])
    assert [len(each.names) for each in found] == [10, 10]


def test_runs_of_the_same_weights_take_no_turns_with_each_other_but_with_others() -> None:
    runs = [run("a", open_count=9), run("b", open_count=9), run("c", "y", open_count=9)]
    workers = [WorkerFacts(worker_id=f"w{n}", model="m", slot_count=4, run_id="c") for n in range(3)]
    grants = plan(workers, together(runs), CapacityRule())
    assert sorted(grant.run_id or "" for grant in grants) == ["a", "a", "c"]
