"""Several runs share a cluster: by weight, nothing is lost between them, and an unfair division would be seen."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from rollfab.deploy.simulation.arms import ARMS
from rollfab.deploy.simulation.cluster import Cluster
from rollfab.deploy.simulation.lending import Planned
from rollfab.deploy.simulation.machine.books import Broken
from rollfab.deploy.simulation.machine.workload import draw_step
from rollfab.deploy.simulation.run import SEEDS_APART, setup_of
from rollfab.deploy.simulation.scenario import FailuresPart, RunsPart, Scenario
from rollfab.fabric.rules.lending import capacity, division
from tests.support.simulated import SMALL, arms, outcome, run

WEIGHTS = (2.0, 1.0)
BOTH = replace(
    SMALL,
    cluster=replace(SMALL.cluster, dedicated=2, serving=2),
    work=replace(SMALL.work, groups=6),
    runs=RunsPart(weights=WEIGHTS),
)
LITTLE = replace(BOTH, work=replace(BOTH.work, groups=2))
MORTAL = replace(LITTLE, failures=FailuresPart(hours_between=0.01, back_s=10.0))
FAIR_TURNS_MAX = 3.0  # as production promises: tests/unit/fabric/rules/lending/test_turns_taken.py

once = cache(run)


def tokens(scenario: Scenario) -> int:
    """Of all runs' work together."""
    work = scenario.work
    plans = [
        draw_step(work.kind, seed=SEEDS_APART * index, step=0, groups=work.groups, group_size=work.group_size)
        for index in range(len(scenario.runs.weights))
    ]
    return sum(each.output_tokens for plan in plans for group in plan.groups for each in group)


def test_each_run_has_its_weights_part_and_nobody_waits_for_long() -> None:
    found = once("fixed", BOTH)
    assert [each.weight for each in found.shared] == list(WEIGHTS)
    for each in found.shared:
        assert each.had == pytest.approx(1.0, abs=0.1)
        assert each.made == pytest.approx(1.0, abs=0.25)
        assert each.longest_wait <= FAIR_TURNS_MAX
    assert found.shared[0].step_s < found.shared[1].step_s
    assert found.step_s == pytest.approx(sum(each.step_s for each in found.shared) / 2)


@pytest.mark.parametrize("arm", arms(name for name, arm in ARMS.items() if arm.can_share and not arm.is_ahead))
@pytest.mark.parametrize("scenario", [LITTLE, MORTAL], ids=["calm", "mortal"])
def test_all_work_of_all_runs_is_done_once(arm: str, scenario: Scenario) -> None:
    assert once(arm, scenario).tokens == tokens(scenario)  # and the books were checked


def test_a_run_that_is_done_leaves_the_workers_to_the_others_when_it_runs_ahead_too() -> None:
    uneven = replace(BOTH, runs=RunsPart(weights=(100.0, 1.0)), work=replace(BOTH.work, groups=2))
    found = run("async", uneven)
    assert len(found.steps) == 2 * uneven.work.steps  # without those that only fill


def test_a_plan_that_gives_one_run_everything_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def to_the_first(offers: Any, own: Any, runs: Any) -> Any:
        return dict.fromkeys(offers, next((run for run in runs if run.open_count), runs[0])) if runs else {}

    monkeypatch.setattr(capacity, "divide", to_the_first)
    found = run("fixed", BOTH)
    assert found.shared[1].longest_wait > FAIR_TURNS_MAX
    assert found.shared[1].had is not None and found.shared[1].had < 0.5


def test_debts_between_runs_are_settled_by_production(monkeypatch: pytest.MonkeyPatch) -> None:
    settled = outcome(once("fixed", BOTH))
    monkeypatch.setattr(division, "settle", lambda owed, grants, runs, passed_s, rule: {})
    assert outcome(run("fixed", BOTH)) != settled


def test_a_worker_that_changes_hands_takes_the_new_runs_weights_and_no_prefix_along() -> None:
    first = Cluster(setup_of(BOTH, ARMS["fixed"], 0.0, 0), weight=2.0)
    second = Cluster(first.setup, host=first)
    engine, plan = first.dedicated[0], Planned()
    second.publish()
    engine.cache[1] = 100
    plan.start(first)
    plan._carry_out(engine, second, first)
    assert (engine.tenant, engine.is_ready, engine.version) == (1, False, -1)
    assert plan.move_count == 1
    first.publish()
    assert engine.version == -1  # those are of another run
    first.events.run(lambda: engine.is_ready, 1e3)
    assert first.events.now_s == pytest.approx(first.setup.fetch_s)  # it is awake
    assert (engine.version, dict(engine.cache)) == (1, {})


def test_a_turn_that_another_run_takes_for_its_own_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cluster, "_came_back_of_all", lambda self, engine, turns: None)
    with pytest.raises(Broken, match="tokens made"):
        run("fixed", replace(LITTLE, simulation=replace(LITTLE.simulation, hours_max=0.1)))


def test_one_run_is_as_it_was() -> None:
    alone = replace(BOTH, runs=RunsPart())
    assert outcome(run("ours", replace(alone, runs=RunsPart(weights=(7.0,))))) | {"shared": ()} == outcome(
        run("ours", alone)
    ) | {"shared": ()}
