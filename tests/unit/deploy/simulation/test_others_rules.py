"""The rules of others: who goes first and where, what is put off, what is borrowed and what comes and goes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from rollfab.deploy.simulation.arms import ARMS
from rollfab.deploy.simulation.borrowing import COLD_S, LOOK_S, Elastic, Spot, spot_counts
from rollfab.deploy.simulation.cluster import Cluster
from rollfab.deploy.simulation.machine.engine import Engine
from rollfab.deploy.simulation.machine.order import SEEN_COUNT_MIN, Affine, ByLength, Forecast, Levels
from rollfab.deploy.simulation.machine.tails import TailBatches
from rollfab.deploy.simulation.machine.turns import Batch, GroupState, Trajectory, Turn
from rollfab.deploy.simulation.machine.workload import StepPlan, TrajectoryPlan, TurnPlan, draw_step
from rollfab.deploy.simulation.run import load_of, setup_of, simulate
from rollfab.deploy.simulation.scenario import Scenario
from tests.support.simulated import SMALL, run

WIDE = replace(SMALL, cluster=replace(SMALL.cluster, dedicated=4, serving=4))
GROUP = GroupState(
    batch=Batch(plan=StepPlan(groups=(), needed=1, kept=frozenset()), on_done=print, began_s=0.0, missing_groups=1),
    index=0,
    quorum=1,
    missing=1,
)


def plan(turns: int, tokens: int = 100) -> TrajectoryPlan:
    return TrajectoryPlan(100, (TurnPlan(tokens, 10, 0.1),) * turns)


def trajectory(turns: int, done: int = 0, number: int = 0) -> Trajectory:
    found = Trajectory(number, plan(turns), GROUP)
    found.index = done
    return found


def turn_of(turns: int, done: int, number: int) -> Turn:
    return Turn(trajectory(turns, done, number), done, 1000, 0, 100)


def cluster(arm: str, scenario: Scenario = WIDE, load: float = 0.0) -> Cluster:
    return Cluster(setup_of(scenario, ARMS[arm], load, 0))


# ---- who is next, and where


def test_a_turn_goes_to_its_context_else_to_a_dedicated_gpu_else_to_the_emptiest() -> None:
    router, world = Affine(), cluster("rose")
    own, lent = world.dedicated, world.lendable
    for engine in lent:
        engine.is_leased = engine.is_ready = True
    own[0].begin(turn_of(2, 0, 1))
    assert router.choose(turn_of(2, 0, 2), [*lent, *own[:1]]) is own[0], "the lent ones are empty"
    at_home = turn_of(2, 1, 3)
    at_home.home, lent[2].cache[3] = lent[2].name, 900
    assert router.choose(at_home, [*lent, *own]) is lent[2]
    lent[0].begin(turn_of(2, 0, 4))
    assert router.choose(turn_of(2, 0, 5), lent) in lent[1:]


def test_the_expected_rest_is_by_the_turns_of_those_that_went_as_far() -> None:
    forecast = Forecast()
    assert forecast.median() == math.inf
    for number in range(SEEN_COUNT_MIN):
        forecast.note(trajectory(2 if number % 4 else 10))
    assert forecast.median() == 2
    assert forecast.rest(trajectory(10)) == pytest.approx(4 * 100)  # (3 x 2 + 10) / 4 turns of 100 tokens
    assert forecast.rest(trajectory(10, done=4)) == pytest.approx(6 * 100), "only the long ones went so far"
    assert forecast.rest(trajectory(10, done=10)) == pytest.approx(11 * 100), "further than any: as far again"


def test_what_is_expected_to_take_longest_goes_first_and_where_least_is_before_it() -> None:
    router, engines = ByLength(), cluster("by-length").dedicated
    for _ in range(SEEN_COUNT_MIN):
        router.completed(trajectory(2))
        router.completed(trajectory(10))
    long, short = turn_of(10, 3, 1), turn_of(2, 0, 2)
    assert router.rank(long, 5) < router.rank(short, 0)
    for turn, engine in ((long, engines[0]), (short, engines[1])):
        router.begun(turn, engine)
    assert router.choose(turn_of(10, 3, 3), engines) in engines[2:]
    router.left(long, engines[0])
    assert router.choose(turn_of(10, 3, 3), engines[:2]) is engines[0]


def full(engines: Sequence[Engine], router: ByLength) -> list[Turn]:
    found = []
    for number, engine in enumerate(engines):
        for slot in range(engine.slot_count):
            turn = turn_of(2, 1, 100 * (number + 1) + slot)
            router.begun(turn, engine)
            engine.begin(turn)
            found.append(turn)
    return found


def test_a_long_one_takes_the_slot_of_one_that_is_short_once() -> None:
    router, world = ByLength(), cluster("by-length")
    for count in (*[2] * SEEN_COUNT_MIN, 40):
        router.completed(trajectory(count))
    assert len(full(world.dedicated, router)) == 16
    world.events.run(lambda: False, 0.0)  # until all are in a step

    def held() -> int:
        return sum(engine.turn_count - len(engine._leaving) for engine in world.dedicated)

    waiting = turn_of(40, 3, 1)
    assert router.choose(waiting, world.dedicated) is None
    assert held() == 15
    world.dedicated[0].slot_count = world.dedicated[1].slot_count = 0  # until the one that leaves has gone
    assert router.choose(waiting, world.dedicated[:2]) is None
    assert router.choose(turn_of(2, 1, 2), world.dedicated[:2]) is None
    assert held() == 15, "once, and for a short one never"


def test_what_goes_on_for_long_has_a_bucket_that_is_half_as_full() -> None:
    router, engines = Levels(), cluster("levels").dedicated
    assert router.choose(turn_of(10, 9, 1), engines) in engines[1:], "nothing is known of lengths yet"
    for _ in range(SEEN_COUNT_MIN):
        router.completed(trajectory(4))
    assert router.choose(turn_of(10, 4, 1), engines) in engines[1:]
    for number in range(2):
        assert router.choose(turn_of(10, 5, number), engines) is engines[0]
        engines[0].begin(turn_of(10, 5, number))
    assert router.choose(turn_of(10, 5, 2), engines) in engines[1:], "two of its four slots"


# ---- what is put off


def test_what_ends_in_vain_is_put_off_beside_what_counts() -> None:
    steps = {step: [(plan(step % 7 + 1, 10 + index),) * 4 for index in range(10)] for step in (0, 1, 10**6, 10**6 + 1)}
    tails = TailBatches(
        lambda step: StepPlan(groups=steps[step], needed=8, kept=frozenset(range(8))), group_count=8, group_size=4
    )
    short = tails.next(is_last=False)  # eight that teach something, two to spare, and two that teach nothing
    assert (len(short.groups), {len(each) for each in short.groups}, short.needed, short.quorum) == (12, {5}, 8, 4)
    firsts = [each[0] for each in short.groups]
    counting, vain = [firsts[index] for index in sorted(short.kept)], [steps[0][8][0], steps[0][9][0]]
    assert counting == [each[0] for each in (*steps[0][:8], *steps[10**6][:2])]
    assert sorted(set(range(12)) - short.kept) == sorted(map(firsts.index, vain))
    left = (counting[3], counting[9], vain[1])
    tails.put_off([short.groups[firsts.index(each)] for each in left])
    assert tails.put_off_count == 2
    last = tails.next(is_last=True)
    assert [last.groups[index] for index in sorted(last.kept)] == [steps[0][3], steps[10**6][1]]
    assert (len(last.groups), last.needed, last.quorum) == (3, 2, None) and steps[0][9] in last.groups
    tails.put_off([])
    assert tails.put_off_count == 0


def test_nobody_knows_in_advance_what_teaches_nothing() -> None:
    steps = [draw_step("frozenlake", seed=1, step=step, groups=8, group_size=4, oversample=6.0) for step in range(9)]
    tails = TailBatches(lambda step: steps[step % 9], group_count=8, group_size=4)
    places = []
    for _ in range(6):
        made = tails.next(is_last=False)
        places += [index / len(made.groups) for index in made.kept]
        tails.put_off([])
    assert len(places) == 6 * 10 and 0.4 < sum(places) / len(places) < 0.6, "it is not always after the others"


def test_tokens_that_nobody_is_trained_on_are_wasted_whole_turns_too() -> None:
    world = cluster("tails")
    group = (plan(2, 100), plan(2, 200), plan(50, 40), plan(20, 40))
    ended: list[object] = []
    work = StepPlan(groups=[group, (plan(50, 40), plan(2, 100))], needed=1, kept=frozenset({0, 1}), quorum=2)
    world.submit(work, ended.append)
    world.events.run(lambda: bool(ended), 1e3)
    world.events.run(lambda: False, world.events.now_s + 60)  # turns under way end or are taken back
    world.check()
    assert world.books.completed == 3
    assert world.books.kept == 2 * 100 + 2 * 200, "of the group that is complete, and of what it needed"
    assert world.books.wasted > 2 * 100 + 4 * 40, "the other group's, and the losers' turns that had ended"


def test_all_prompts_are_trained_on_and_a_part_of_a_step_counts_as_one() -> None:
    found = run("tails")
    assert [each.part for each in found.steps] == [1.0, 0.25]  # four groups of five, and the fifth
    assert found.step_s == pytest.approx(sum(each.step_s for each in found.steps) / 1.25)
    assert found.wasted > 0


# ---- what is borrowed, and what comes and goes


def test_whole_gpus_are_borrowed_while_a_step_gains_and_serving_keeps_enough() -> None:
    world = cluster("elastic", WIDE, 0.25)
    most: list[tuple[int, float]] = []

    def look() -> None:
        leased = [engine for engine in world.lendable if engine.is_leased]
        most.append((len(leased), sum(each.serving.load for each in leased if each.serving)))
        world.events.after(1.0, look)

    lender = Elastic()
    lender.start(world)
    look()
    group = (plan(10, 400),) * 16
    world.submit(StepPlan(groups=[group] * 8, needed=8, kept=frozenset(range(8))), lambda _: lender.rollouts(False))
    lender.rollouts(True)
    world.events.run(lambda: bool(most) and not world.batches and world.events.now_s > 60, 4000)

    assert 1 <= max(count for count, _ in most) <= 3, "one carries what is there"
    assert sum(load for _, load in most) == 0, "what is borrowed serves nobody"
    assert not any(engine.is_leased for engine in world.lendable), "and is given back at the end"
    assert set(world.extra_requests) <= {engine.name for engine in world.lendable}


def test_nothing_is_borrowed_for_what_ends_before_it_would_help() -> None:
    world = cluster("elastic", WIDE, 0.25)
    lender = Elastic()
    lender.start(world)
    world.submit(StepPlan(groups=[(plan(1, 20),)], needed=1, kept=frozenset({0})), lambda _: None)
    lender.rollouts(True)
    world.events.run(lambda: False, 2 * LOOK_S)
    assert not world.extra_requests


def test_spot_instances_come_cold_and_are_as_many_as_the_trace_says() -> None:
    assert load_of(WIDE, 0.25, 0)[0]
    world = cluster("spot", WIDE, 0.25)
    assert not world.setup.load, "serving is elsewhere"
    Spot().start(world)
    for at_s, part in spot_counts()[:6]:
        world.events.run(lambda: False, at_s + 1e-6)
        assert sum(engine.is_leased for engine in world.lendable) <= round(part * 4)
    (first_s, _), (second_s, part) = spot_counts()[5:7]
    world.events.run(lambda: False, min(second_s - 1.0, first_s + COLD_S + 1.0))
    assert {part for _, part in spot_counts()} <= {count / 12 for count in range(13)}


def test_a_spot_instance_that_goes_takes_no_token_with_it() -> None:
    assert simulate(WIDE, "spot", load=0.25, seed=0).wasted == 0
