"""Arms differ in what they are named for; ours is what production's rules say; figures that cannot be are refused."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from lupa.lua51 import LuaRuntime

from rollfab.deploy.simulation import cluster, lending
from rollfab.deploy.simulation import run as runs
from rollfab.deploy.simulation.arms import ARMS, idle_only, rose
from rollfab.deploy.simulation.cluster import Cluster, urgency
from rollfab.deploy.simulation.machine import engine
from rollfab.deploy.simulation.machine.books import Books, Broken
from rollfab.deploy.simulation.scenario import ServingPart, WorkPart
from rollfab.fabric import queue
from rollfab.fabric.rules.lending import capacity
from rollfab.fabric.rules.lending.advice import extra_requests
from rollfab.fabric.rules.queue.placement import NO_HOME, Homes
from rollfab.fabric.rules.queue.room import KvRoom
from rollfab.fabric.rules.serving.burst import load_fraction
from rollfab.fabric.rules.serving.facts import RunningRequest, ServingState, Slo, StepWork, WaitingRequest
from rollfab.fabric.rules.serving.guard import Allowance, GuardFacts, GuardRule
from rollfab.fabric.rules.serving.step_time import cold
from rollfab.workers.rollout import yielding
from rollfab.workers.serving.device import memory
from rollfab.workers.serving.guarding import guard
from tests.bench.loads.main import write_shape
from tests.support.simulated import SMALL, arms, outcome, run
from tests.support.tried import cases

CROWDED = replace(SMALL, work=WorkPart(kind="frozenlake", groups=3, group_size=8, steps=1))
ONE_GROUP = replace(CROWDED, work=replace(CROWDED.work, groups=1))
BUSY = 0.9  # of serving's capacity: the guard is often shut
SLO = Slo(ttft_ms=500.0, tpot_ms=150.0)


TIGHT = replace(  # two engines have 8 GB of KV cache between them
    CROWDED,
    cluster=replace(SMALL.cluster, slots=8, memory_gb=48.0),
    serving=ServingPart(kv_share=0.4, capacity_per_s=7.5),  # as is found
)


# ---------------------------------------------------------------- ours is production


def lend_nothing(workers: Any, runs: Any, rule: Any) -> Any:
    grants = plan(workers, runs, rule)
    return [grant if grant.is_standing else replace(grant, slot_count=0, run_id=None) for grant in grants]


plan, decide, decide_memory = capacity.plan, guard.decide, memory.decide

PLANTS = {  # a rule of production → another in its place, and an arm in which it counts
    "the capacity plan": (capacity, "plan", lend_nothing, "ours"),
    "the guard": (guard, "decide", lambda facts, rule: Allowance(step_tokens=0, reason="planted"), "ours"),
    "the burst reserve": (guard, "reserve_s", lambda *_: 10.0, "ours"),
    "step times learned": (guard, "refit", lambda model, sample: model, "ours"),
    "memory": (memory, "decide", lambda s, f, r: replace(decide_memory(s, f, r), budget_tokens=1.0), "ours"),
    "who yields at a shut guard": (yielding, "overdue", lambda sizes, *_: [each.request_id for each in sizes], "ours"),
    "room in a KV cache": (KvRoom, "count", lambda *_: 0, "ours"),
    "homes of turns": (Homes, "leave", lambda self, name: NO_HOME, "ours"),
}


once = cache(run)  # as many tests compare with the same run, of production's rules


@pytest.mark.parametrize("name", cases(PLANTS, 3))
def test_ours_changes_with_a_rule_of_production(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, rule, planted, arm = PLANTS[name]
    scenario = TIGHT if name == "room in a KV cache" else ONE_GROUP
    before = outcome(once(arm, scenario, load=BUSY))
    assert before["harvested"] > 0

    monkeypatch.setattr(module, rule, planted)
    after = outcome(run(arm, scenario, load=BUSY))

    assert after != before
    if name in ("the capacity plan", "the guard"):
        assert after["harvested"] == 0


def test_turns_wait_for_hardware_that_suits_them_as_production_says(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = replace(SMALL.cluster, gpu="h200", dedicated=4, serving=0, slots=8, memory_gb=96.0)
    work = WorkPart(kind="mixed", groups=8, group_size=8, steps=2)
    unlike = replace(SMALL, cluster=replace(fast, other=2, other_gpu="h20"), work=work)
    suited, first_come = (run(arm, unlike).steps for arm in ("fixed", "no-hardware"))
    assert suited != first_come
    alike = replace(unlike, cluster=fast)
    assert run("fixed", alike).steps == run("no-hardware", alike).steps

    monkeypatch.setattr(cluster, "read_costs", lambda *_: {})
    assert run("fixed", unlike).steps == first_come


@pytest.mark.parametrize("arm", ["by-length", "async", "no-affinity"])
def test_arms_of_other_placement_do_their_steps_on_unlike_hardware(arm: str) -> None:
    fast = replace(SMALL.cluster, gpu="h200", dedicated=4, other=2, other_gpu="h20", slots=8, memory_gb=96.0)
    work = WorkPart(kind="mixed", groups=8, group_size=8, steps=2)
    assert len(run(arm, replace(SMALL, cluster=fast, work=work)).steps) == 2


def test_a_rollout_that_production_calls_stale_reaches_no_trainer(monkeypatch: pytest.MonkeyPatch) -> None:

    assert once("async").steps  # one version behind is what the run permits
    monkeypatch.setattr(cluster, "is_stale", lambda version, head, staleness: head - version > 0)
    with pytest.raises(Broken, match="stale"):
        run("async")


@pytest.mark.parametrize("was_held", [False, True])
@pytest.mark.parametrize("priority", [0, 1, 2])
def test_turns_wait_in_the_classes_of_the_brokers_script(was_held: bool, priority: int) -> None:
    source = (files(queue) / "lua" / "use" / "ring.lua").read_text("utf-8")
    asked = LuaRuntime().execute(source.partition("local function group_of")[0] + "return urgency")
    for quorum in (1, 4, 7, 16):
        for missing in range(1, quorum + 1):
            expected = asked(f"{priority} {missing} {quorum}", was_held)
            assert urgency(missing, quorum, was_held=was_held, priority=priority) == expected


# ---------------------------------------------------------------- what tells the arms apart


def test_arms_on_dedicated_gpus_alone_borrow_nothing_and_serving_is_as_without_them() -> None:
    for arm in ("fixed", "async"):
        found = once(arm)
        assert (found.harvested, found.harvest) == (0, 0.0)
        assert found.served is not None and found.served.attained == 1.0


def test_one_step_ahead_rollouts_run_while_a_step_is_trained() -> None:
    fixed, ahead = once("fixed"), once("async")
    assert fixed.step_s == pytest.approx(fixed.rollout_s + SMALL.trainer.train_s + SMALL.trainer.transfer_s)
    assert ahead.step_s < ahead.rollout_s + SMALL.trainer.train_s


def test_static_hands_instances_over_and_leaves_the_others_more_load() -> None:
    wide = replace(SMALL, cluster=replace(SMALL.cluster, serving=4))
    fixed, static = once("fixed", wide), once("static", wide)
    assert wide.static_count(0.25) == 2
    assert static.rollout_s < fixed.rollout_s
    assert static.spare < fixed.spare
    assert static.harvested == 0  # what it was given is not lent


def test_who_shares_all_without_a_guard_slows_serving_most() -> None:
    all_of_them, ours, alone = once("share-all", CROWDED), once("ours", CROWDED), once("fixed", CROWDED)
    assert all_of_them.served and ours.served and alone.served
    assert all_of_them.harvest > ours.harvest > 0
    assert all_of_them.served.tpot_ms_p50 > ours.served.tpot_ms_p50 > alone.served.tpot_ms_p50


@pytest.mark.slow
def test_the_guard_keeps_the_promise_that_sharing_without_one_breaks() -> None:
    # Given: nine tenths of what serving can carry, with steps that scatter
    rough = replace(CROWDED, simulation=replace(CROWDED.simulation, noise=0.1))
    unguarded, ours = run("share-all", rough, load=BUSY), run("ours", rough, load=BUSY)
    assert unguarded.served and unguarded.served.attained < 0.9
    assert ours.served and ours.served.attained >= 0.998
    assert ours.served.ttft_ms_p99 < SLO.ttft_ms and ours.served.tpot_ms_p99 < SLO.tpot_ms
    assert ours.harvest > 0.02


def test_slack_is_harvested_where_there_is_hardly_any_idle_time() -> None:
    idle, ours = run("idle-only", CROWDED, load=0.5), run("ours", CROWDED, load=0.5)
    assert idle.harvest < 0.05
    assert ours.harvest > 0.3 * ours.spare
    assert ours.served and ours.served.attained >= 0.998


SPARE = replace(  # four serving instances at light load, of which two can carry all
    CROWDED, cluster=replace(SMALL.cluster, serving=4)
)


def test_a_router_that_follows_the_advice_makes_steps_faster_and_one_that_does_not_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    followed, ignored = run("ours-advised", SPARE), run("ours", SPARE)
    assert followed.served and followed.served.attained == 1.0
    assert followed.rollout_s < 0.97 * ignored.rollout_s

    monkeypatch.setattr(lending, "advise", lambda *_: {})
    assert outcome(run("ours", SPARE)) == outcome(ignored)


def test_a_burst_reaches_the_instances_that_are_spared_and_is_late_if_it_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bursty = replace(SPARE, serving=ServingPart(trace="azure-code", capacity_per_s=1.3))
    counted = run("ours-advised", bursty, load=2.0)
    assert counted.served and counted.served.attained == 1.0

    monkeypatch.setattr(lending, "extra_requests", lambda advice: dict.fromkeys(extra_requests(advice), 1_000_000))
    shunned = run("ours-advised", bursty, load=2.0)
    assert shunned.served and shunned.served.attained < 0.99


def test_where_answers_are_long_no_more_instances_are_spared_than_their_caches_allow(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    trace = write_shape("long answers", tmp_path / "trace.csv")
    cluster = replace(SPARE.cluster, memory_gb=52.0)  # a cache holds the requests of a hundred seconds, and few of them
    tight = replace(SPARE, cluster=cluster, serving=ServingPart(trace=str(trace), kv_share=0.4))
    found = run("ours-advised", tight, load=0.75)
    assert found.served and found.served.ttft_ms_p99 < SLO.ttft_ms and found.served.attained > 0.99

    def blind(arrivals: Any, answers: Any, state: ServingState, *others: Any) -> float | None:
        return load_fraction(arrivals, answers, replace(state, kv_used_tokens=0), *others)

    monkeypatch.setattr(guard, "load_fraction", blind)
    late = run("ours-advised", tight, load=0.75)
    assert late.served and late.served.attained < 0.5


def facts(state: ServingState | None, **changes: Any) -> GuardFacts:
    model = cold(0.01, 1e-4, 1e-4)
    usual = GuardFacts(
        now_s=10.0,
        state=state,
        slo=SLO,
        serving=model,
        rollout=model,
        reserve_s=5.0,
        work=StepWork(decode_count=16, context_tokens=16_000),
    )
    return replace(usual, **changes)


def test_idle_only_is_shut_while_one_request_is_there() -> None:
    request = RunningRequest(first_token_at_s=9.0, token_count=10, context_tokens=100)
    assert idle_only(facts(ServingState(seen_at_s=10.0)), GuardRule()).step_tokens is None
    assert idle_only(facts(ServingState(seen_at_s=10.0, running=(request,))), GuardRule()).step_tokens == 0


@pytest.mark.parametrize(("age_s", "is_open"), [(0.1, True), (0.49, False)])
def test_roses_slack_is_the_objective_less_age_and_step_with_no_reserve(age_s: float, is_open: bool) -> None:
    waits = WaitingRequest(arrived_at_s=10.0 - age_s, prefill_tokens=100)
    found = rose(facts(ServingState(seen_at_s=10.0, waiting=(waits,))), GuardRule())
    assert (found.step_tokens is None) == is_open
    assert guard.decide(facts(ServingState(seen_at_s=10.0, waiting=(waits,))), GuardRule()).step_tokens == 0  # reserve


def test_rose_cuts_memory_once_and_runs_what_it_aborts_again() -> None:
    found = once("rose", TIGHT, load=0.72)
    assert found.moved > 0
    assert found.wasted > 0
    ours = once("ours", TIGHT, load=0.72)
    assert ours.wasted == 0  # its turns take their tokens along


def test_without_migration_no_turn_leaves_in_the_middle() -> None:
    assert once("no-move", CROWDED).moved == 0
    assert once("ours", CROWDED).moved > 0


def test_affinity_reads_less_again() -> None:
    assert once("ours", CROWDED).refilled < once("no-affinity", CROWDED).refilled


def test_trajectories_under_way_are_as_many_as_slots_and_fewer_where_an_arm_says_so() -> None:
    wide = replace(SMALL, cluster=replace(SMALL.cluster, dedicated=2, serving=4))  # instances of four slots
    for arm, places in (("fixed", 8), ("ours", 24), ("ours-few", 12)):
        assert Cluster(runs.setup_of(wide, ARMS[arm], 0.25, 0)).agents.place_count == places


def test_every_arm_runs_and_all_finish_the_same_work() -> None:
    same = (name for name, arm in ARMS.items() if not (arm.is_ahead or arm.puts_tails_off))
    sync = [once(name) for name in arms(same)]
    assert len({(found.tokens, found.turns) for found in sync}) == 1


# ---------------------------------------------------------------- honest or not at all


def test_a_seed_decides_everything() -> None:
    assert outcome(run("ours")) == outcome(once("ours"))
    assert outcome(once("ours")) != outcome(run("ours", seed=1))


def test_a_token_made_from_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    makes = Books.makes
    monkeypatch.setattr(Books, "makes", lambda self, tokens, *, is_lent: makes(self, tokens + 1, is_lent=is_lent))
    with pytest.raises(Broken, match="tokens made"):
        run("fixed")


def test_a_trajectory_that_ends_twice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    completes = Books.completes

    def twice(self: Books, trajectory: int, *, is_cancelled: bool = False) -> None:
        completes(self, trajectory, is_cancelled=is_cancelled)
        completes(self, trajectory, is_cancelled=is_cancelled)

    monkeypatch.setattr(Books, "completes", twice)
    with pytest.raises(Broken, match="ends twice"):
        run("fixed")


def test_steps_that_take_no_time_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = engine.Engine._seconds
    monkeypatch.setattr(engine.Engine, "_seconds", lambda self, count: 1.1 * seconds(self, count))
    with pytest.raises(Broken, match="accounts for"):
        run("fixed")


def test_more_than_the_oracle_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    found = once("ours", CROWDED)
    assert 0 < found.harvest < found.spare
    with pytest.raises(Broken, match="is all there is"):
        runs.check_bounds(replace(found, spare=found.harvest / 2), ARMS["ours"])
    with pytest.raises(Broken, match="less than the bound"):
        runs.check_bounds(replace(found, bounds_s=(2 * found.rollout_s,)), ARMS["ours"])
