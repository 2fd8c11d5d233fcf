"""Runs that take turns on too few workers: an hour of plans, simulated, comes out by weight and without flapping."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollfab.fabric.rules.lending.capacity import plan
from rollfab.fabric.rules.lending.capacity_facts import SWITCH_S_MAX, CapacityRule, Grant, RunFacts, WorkerFacts
from rollfab.fabric.rules.lending.division import Offer, settle, shares, slice_of

RULE = CapacityRule()
TICK_S = 1.0  # coarser than a controller's, and the rules know no tick
HOUR_S = 3600.0


@dataclass
class Hour:
    """What became of an hour. served: seconds of a dedicated slot. stays: how long workers served a run.

    longest_s: the longest time in which no worker served a run, by run. switching_s: of all workers, on their way.
    """

    served: dict[str, float] = field(default_factory=dict)
    stays: list[float] = field(default_factory=list)
    longest_s: dict[str, float] = field(default_factory=dict)
    idle_s: float = 0.0
    switching_s: float = 0.0


def live(
    workers: list[WorkerFacts],
    weights: Mapping[str, float],
    *,
    open_count: Callable[[str, float], int] = lambda run_id, now_s: 100,
    seconds: float = HOUR_S,
    switch_s: float = 0.0,
) -> Hour:
    """Plan again and again. switch_s: what each worker needs until it has the weights of another run."""
    hour = Hour(served=dict.fromkeys(weights, 0.0))
    grants: list[Grant] = []
    owed: dict[str, float] = {}
    since = {worker.worker_id: 0.0 for worker in workers}
    busy_at = dict.fromkeys(weights, 0.0)
    served_at, spare_at = dict.fromkeys(weights, 0.0), dict.fromkeys(weights, 0.0)
    for tick in range(int(seconds / TICK_S)):
        now_s = tick * TICK_S
        runs = []
        for run_id, weight in weights.items():
            count = open_count(run_id, now_s)
            busy_at[run_id] = now_s if count else busy_at[run_id]
            slots = [grant.slot_count for grant in grants if grant.run_id == run_id]
            is_spare = slots and count <= sum(slots) - min(slots)
            spare_at[run_id] = spare_at[run_id] if is_spare else now_s
            facts = {"model": "m", "weight": weight, "has_weights": True, "open_count": count}
            facts |= {"idle_s": now_s - busy_at[run_id], "spare_s": now_s - spare_at[run_id]}
            runs.append(RunFacts(run_id=run_id, **facts))  # type: ignore[arg-type]
        owed = settle(owed, grants, runs, TICK_S, RULE)
        ready = [now_s - since[worker.worker_id] >= switch_s for worker in workers]
        if switch_s:
            took = [switch_s if is_ready else SWITCH_S_MAX for is_ready in ready]
            workers = [dataclasses.replace(each, switch_s=s) for each, s in zip(workers, took, strict=True)]
        hour.switching_s += TICK_S * (len(ready) - sum(ready))
        grants = plan(workers, [dataclasses.replace(run, owed=owed.get(run.run_id, 0.0)) for run in runs], RULE)
        busy = {run.run_id for run in runs if run.open_count}
        at_work = {
            str(grant.run_id) for grant, is_ready in zip(grants, ready, strict=True) if grant.run_id and is_ready
        }
        served_at |= dict.fromkeys(at_work, now_s)
        for run_id in weights:
            hour.longest_s[run_id] = max(hour.longest_s.get(run_id, 0.0), now_s - served_at[run_id])
        for index, (worker, grant) in enumerate(zip(workers, grants, strict=True)):
            if worker.run_id is not None and grant.run_id != worker.run_id:
                hour.stays.append(now_s - since[worker.worker_id])
                since[worker.worker_id] = now_s
            is_lent = worker.lend is not None and grant.run_id is not None
            workers[index] = dataclasses.replace(worker, run_id=grant.run_id, is_lent=is_lent)
            if grant.run_id in busy and ready[index]:
                hour.served[str(grant.run_id)] += grant.slot_count * grant.speed * TICK_S
            elif busy:
                hour.idle_s += TICK_S
    return hour


def pool(count: int, slot_count: int = 8) -> list[WorkerFacts]:
    return [WorkerFacts(worker_id=f"d{index}", model="m", slot_count=slot_count) for index in range(count)]


def slow_pool(count: int, speed: float, slot_count: int = 8) -> list[WorkerFacts]:
    """Serving workers whose slots are slower than those of `pool`, which make 40 tokens a second."""
    lent = {"slot_count": slot_count, "lend": slot_count, "slot_tokens_per_s": 40 * speed}
    return [WorkerFacts(worker_id=f"s{index}", model="m", **lent) for index in range(count)]  # type: ignore[arg-type]


def measured(workers: list[WorkerFacts]) -> list[WorkerFacts]:
    return [dataclasses.replace(worker, slot_tokens_per_s=40.0) for worker in workers]


@pytest.mark.parametrize(
    ("worker_count", "weights"),
    [
        (1, {"a": 2.0, "b": 1.0}),
        (1, {"a": 10.0, "b": 1.0}),
        (3, {"a": 1.0, "b": 1.0}),
        (4, {"a": 3.0, "b": 2.0, "c": 1.0}),
        pytest.param(1, {"a": 1.0, "b": 1.0}, marks=pytest.mark.slow),
        pytest.param(1, {"a": 1.0, "b": 1.0, "c": 1.0, "d": 1.0, "e": 1.0}, marks=pytest.mark.slow),
        pytest.param(2, {"a": 2.0, "b": 1.0}, marks=pytest.mark.slow),
        pytest.param(3, {"a": 2.0, "b": 1.0}, marks=pytest.mark.slow),
        pytest.param(16, {"a": 3.0, "b": 2.0, "c": 1.0}, marks=pytest.mark.slow),
        pytest.param(5, dict.fromkeys("abcdefg", 1.0), marks=pytest.mark.slow),
    ],
)
def test_an_hour_is_divided_by_weight_and_no_worker_changes_hands_faster_than_a_slice(
    worker_count: int, weights: dict[str, float]
) -> None:
    hour = live(pool(worker_count), weights)
    total, parts = sum(hour.served.values()), sum(weights.values())
    for run_id, weight in weights.items():
        assert hour.served[run_id] / total == pytest.approx(weight / parts, rel=0.05), run_id
    assert hour.idle_s == 0
    assert min(hour.stays, default=RULE.slice_s) >= RULE.slice_s - TICK_S


@pytest.mark.parametrize(
    ("worker_count", "weights"),
    [
        (2, {f"r{index}": 1.0 for index in range(20)}),
        (2, {f"r{index}": 1.0 for index in range(4)} | {f"s{index}": 0.1 for index in range(4)}),
        (1, {"a": 5.0, "b": 1.0, "c": 0.1}),
        (3, {f"r{index}": [0.5, 1.0, 2.0, 5.0][index % 4] for index in range(13)}),
    ],
)
def test_no_run_waits_longer_than_three_fair_turns(worker_count: int, weights: dict[str, float]) -> None:
    # A fair turn: how long it takes until everybody has had slices by weight, and this run one of its own
    total = sum(weights.values())
    turns = {run_id: RULE.slice_s * total / (weight * worker_count) for run_id, weight in weights.items()}
    hour = live(pool(worker_count), weights, seconds=4 * max(turns.values()))
    assert {run_id: gap for run_id, gap in hour.longest_s.items() if gap > 3 * turns[run_id]} == {}
    assert min(hour.served.values()) > 0


@pytest.mark.parametrize(
    ("worker_count", "weights", "switch_s"),
    [
        (1, {"a": 1.0, "b": 1.0}, 30.0),
        (1, {"a": 1.0, "b": 1.0}, 300.0),
        (2, {"a": 3.0, "b": 2.0, "c": 1.0}, 10.0),
        pytest.param(3, dict.fromkeys("abcdefg", 1.0), 20.0, marks=pytest.mark.slow),
    ],
)
def test_however_long_a_switch_takes_workers_spend_a_fifth_of_their_time_on_it_and_all_are_served(
    worker_count: int, weights: dict[str, float], switch_s: float
) -> None:
    slice_s = slice_of(switch_s, RULE)
    fair_s = slice_s * sum(weights.values()) / (min(weights.values()) * worker_count)
    seconds = 6 * fair_s
    hour = live(pool(worker_count), weights, seconds=seconds, switch_s=switch_s)
    assert hour.switching_s <= 0.2 * seconds * worker_count + switch_s * worker_count
    assert min(hour.stays) >= slice_s - TICK_S
    assert max(hour.longest_s.values()) <= 3 * fair_s
    total, parts = sum(hour.served.values()), sum(weights.values())
    for run_id, weight in weights.items():
        assert hour.served[run_id] / total == pytest.approx(weight / parts, rel=0.35), run_id


@pytest.mark.parametrize(("switch_s", "stays"), [(30.0, []), (0.0, [100.0])])
def test_a_run_that_rests_for_less_than_a_switch_takes_finds_its_worker_again(
    switch_s: float, stays: list[float]
) -> None:
    # Given a trainer that rests for 20 s, beside one that has begun to wait for its turn
    def open_count(run_id: str, now_s: float) -> int:
        is_resting = 100 <= now_s < 120 if run_id == "a" else now_s < 95
        return 0 if is_resting else 100

    worker = dataclasses.replace(*pool(1), run_id="a")
    hour = live([worker], {"a": 1.0, "b": 1.0}, open_count=open_count, seconds=110, switch_s=switch_s)
    assert hour.stays == stays
    # Then the other one is owed that time, too
    longer = live([worker], {"a": 1.0, "b": 1.0}, open_count=open_count, seconds=600, switch_s=30.0)
    assert longer.stays[0] == pytest.approx(95 + slice_of(30.0, RULE), rel=0.1)


def test_a_run_that_has_ended_is_left_after_as_long_as_a_switch_takes() -> None:
    hour = live(
        [dataclasses.replace(*pool(1), run_id="a")],
        {"a": 1.0, "b": 1.0},
        open_count=lambda run_id, now_s: 0 if run_id == "a" and now_s >= 40 else 100,
        seconds=200,
        switch_s=30.0,
    )
    assert hour.stays == [pytest.approx(70.0, abs=2 * TICK_S)]


def test_workers_that_can_be_divided_never_change_hands() -> None:
    assert live(pool(3), {"a": 2.0, "b": 1.0}, seconds=HOUR_S / 4).stays == []
    assert live(pool(6), {"a": 3.0, "b": 2.0, "c": 1.0}, seconds=HOUR_S / 4).stays == []


@pytest.mark.parametrize("speed", [0.25, pytest.param(0.5, marks=pytest.mark.slow)])
def test_workers_of_different_speeds_come_out_by_weight_too(speed: float) -> None:
    # Given fast workers that the first run has, and more slow ones
    fast = [dataclasses.replace(worker, run_id="a") for worker in measured(pool(2))]
    hour = live([*fast, *slow_pool(6, speed)], {"a": 1.0, "b": 1.0})
    assert hour.served["a"] / hour.served["b"] == pytest.approx(1.0, rel=0.05)
    assert min(hour.stays, default=RULE.slice_s) >= RULE.slice_s - TICK_S


def test_a_run_in_its_tail_always_has_a_worker_and_keeps_the_first_it_has() -> None:
    # Given a run that has had more than its share, and comes to its last trajectories
    def open_count(run_id: str, now_s: float) -> int:
        return 3 if run_id == "a" and now_s >= 60 else 300

    workers = [*measured(pool(2)), *slow_pool(4, 0.5)]
    hour = live(list(workers), {"a": 1.0, "b": 1.0, "c": 1.0}, open_count=open_count, seconds=300)
    assert hour.longest_s["a"] <= TICK_S
    for held, kept in (("abaacc", "d0"), ("bbaacc", "s0"), ("bbbccc", "s0")):
        assert served_by(workers, held, {"a": (3, -40.0), "b": (300, 20.0), "c": (300, 20.0)})["a"] == [kept]


@pytest.mark.parametrize("seed", [3, 12, 33, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(40, 60))])
def test_whatever_workers_and_runs_there_are_nobody_waits_longer_than_three_fair_turns(seed: int) -> None:
    # Given workers of mixed sizes and speeds, and runs of which some come to their last trajectories
    dice = random.Random(seed)
    sizes = [dice.choice([8, 8, 16, 64]) for _ in range(dice.randint(1, 6))]
    workers = measured([worker for size in sizes for worker in pool(1, size)])
    for size, speed in [(dice.choice([8, 16]), dice.choice([0.1, 0.25, 0.5, 0.9])) for _ in range(dice.randint(0, 6))]:
        workers += slow_pool(1, speed, size)
    workers = [dataclasses.replace(worker, worker_id=f"w{index}") for index, worker in enumerate(workers)]
    weights = {f"r{index}": dice.choice([0.25, 0.5, 1.0, 2.0, 4.0]) for index in range(dice.randint(2, 10))}
    counts = {name: dice.choice([300, 300, 20, 3, 1]) for name in weights}
    # Then each has the largest worker by turns with the others at the latest, by weight
    power = [worker.slot_count * (worker.slot_tokens_per_s or 0.0) / 40 for worker in workers]
    parts = {name: weight * sum(power) / sum(weights.values()) for name, weight in weights.items()}
    turns = {name: RULE.slice_s * max(1.0, max(power) / part) for name, part in parts.items()}
    hour = live(
        workers, weights, open_count=lambda name, now_s: counts[name], seconds=min(1200, 4 * max(turns.values()))
    )
    assert {name: gap for name, gap in hour.longest_s.items() if gap > 3 * turns[name]} == {}


def test_a_worker_that_brings_nothing_now_does_not_move_for_nothing() -> None:
    (shut,) = slow_pool(1, 0.0)
    workers = [*measured(pool(2)), dataclasses.replace(shut, slot_tokens_per_s=None, open_fraction=0.0)]
    found = served_by(workers, "aba", {"a": (300, -1.0), "b": (300, 1.0)})
    assert found == {"a": ["d0", "s0"], "b": ["d1"]}


def served_by(workers: list[WorkerFacts], held: str, work: Mapping[str, tuple[int, float]]) -> dict[str, list[str]]:
    """Workers by run, after one plan. held: the run that each served. work: open trajectories and debt of each run."""
    runs = [
        RunFacts(run_id=name, model="m", weight=1.0, has_weights=True, open_count=count, idle_s=0.0, owed=owed)
        for name, (count, owed) in work.items()
    ]
    by_run = zip(workers, held, strict=True)
    lent = [dataclasses.replace(worker, run_id=name, is_lent=worker.lend is not None) for worker, name in by_run]
    grants = plan(lent, runs, RULE)
    return {run.run_id: [grant.worker_id for grant in grants if grant.run_id == run.run_id] for run in runs}


@given(
    weights=st.lists(st.floats(1e-300, 1e300), min_size=1, max_size=5),
    counts=st.lists(st.integers(0, 1_000_000), min_size=5, max_size=5),
    offers=st.lists(st.tuples(st.integers(0, 512), st.floats(0, 100)), max_size=5),
)
def test_however_unlike_weights_are_each_is_due_its_part_and_no_more_than_there_is(
    weights: list[float], counts: list[int], offers: list[tuple[int, float]]
) -> None:
    supply = [Offer(*each) for each in offers]
    runs = [
        RunFacts(run_id=str(index), model="m", weight=weight, has_weights=True, open_count=count, idle_s=0.0)
        for index, (weight, count) in enumerate(zip(weights, counts, strict=False))
    ]
    total = sum(offer.power for offer in supply)
    due = shares(runs, supply)
    for run in runs:
        assert total * run.weight / sum(weights) * (1 - 1e-9) <= due[run.run_id] <= total * (1 + 1e-9)


def test_workers_that_nobody_else_wants_are_no_debt() -> None:
    # Given a run that has two workers more than it needs, beside one that needs no more than it has
    run = {"model": "m", "weight": 1.0, "has_weights": True, "idle_s": 0.0}
    counts = {"a": 6, "b": 2}
    runs = [RunFacts(run_id=name, open_count=count, **run) for name, count in counts.items()]  # type: ignore[arg-type]
    grants = [
        Grant(worker_id=f"d{index}", run_id=name, slot_count=8, is_standing=True, reason="")
        for index, name in enumerate("aaab")
    ]
    assert settle({}, grants, runs, 60.0, RULE) == {"a": 0.0, "b": 0.0}
    bare = dataclasses.replace(runs[0], run_id="bare", has_weights=False, open_count=90)
    assert settle({}, grants, [*runs, bare], 60.0, RULE) == {"a": 0.0, "b": 0.0}, "nobody owes a run without weights"
    # And once another wants more, what it has beyond its share counts
    more = [runs[0], dataclasses.replace(runs[1], open_count=20)]
    assert settle({}, grants, more, 1.0, RULE) == {"a": -16.0, "b": 16.0}
    # But nobody lacks anything who has slots for all its work, however slow they are
    slow = [dataclasses.replace(grants[3], speed=0.1), *grants[:3]]
    assert settle({}, slow, [dataclasses.replace(runs[0], open_count=90), runs[1]], 1.0, RULE) == {"a": 0.0, "b": 0.0}


def test_a_run_without_work_gives_its_share_up_at_once_and_gets_it_back_within_a_few_slices() -> None:
    # Given two runs of which one has no work between the 10th and the 20th minute
    def open_count(run_id: str, now_s: float) -> int:
        return 0 if run_id == "b" and 600 <= now_s < 1200 else 100

    weights = {"a": 1.0, "b": 1.0}
    quiet = live(pool(1), weights, open_count=open_count, seconds=1200)
    after = live(pool(1), weights, open_count=open_count, seconds=1800)
    # Then the other has the worker all that time, and owes nothing for it afterwards
    assert quiet.idle_s == 0
    assert quiet.served["a"] == pytest.approx(8 * (300 + 600), rel=0.05)
    assert after.served["b"] - quiet.served["b"] == pytest.approx(8 * 300, rel=0.1)


def test_runs_whose_work_comes_and_goes_are_both_served() -> None:
    # Given a trainer that rests two seconds after every four, beside one that never does
    def open_count(run_id: str, now_s: float) -> int:
        return 0 if run_id == "b" and now_s % 6 >= 4 else 100

    hour = live(pool(1), {"a": 1.0, "b": 1.0}, open_count=open_count)
    assert min(hour.served.values()) / sum(hour.served.values()) > 0.15
    assert hour.idle_s == 0


def test_a_worker_leaves_a_run_that_has_no_use_for_it_at_once() -> None:
    # Given a run with ten times the weight, whose work comes to an end but for a few trajectories
    def open_count(run_id: str, now_s: float) -> int:
        return 5 if run_id == "a" and now_s >= 100 else 100

    workers = [dataclasses.replace(worker, run_id="a") for worker in pool(2)]
    hour = live(workers, {"a": 10.0, "b": 1.0}, open_count=open_count, seconds=200)
    before = live(list(pool(2)), {"a": 10.0, "b": 1.0}, seconds=100)
    assert hour.served["b"] - before.served["b"] >= 8 * 99


def test_a_debt_that_cannot_be_paid_stays_bounded() -> None:
    run = {"model": "m", "weight": 1.0, "has_weights": True, "open_count": 9, "idle_s": 0.0}
    runs = [RunFacts(run_id=name, **run) for name in ("a", "b")]  # type: ignore[arg-type]
    grant = Grant(worker_id="w", run_id="a", slot_count=8, is_standing=True, reason="")
    owed: dict[str, float] = {}
    for _ in range(4000):
        owed = settle(owed, [grant], runs, 1.0, RULE)
    assert owed == {"a": -2 * RULE.slice_s * 8, "b": 2 * RULE.slice_s * 8}


def test_a_run_that_no_worker_can_load_has_one_only_where_nobody_else_has_work() -> None:
    run = {"model": "m", "weight": 1.0, "has_weights": True, "idle_s": 0.0}
    bad = RunFacts(run_id="a", open_count=9, is_unfit=True, owed=900.0, **run)  # type: ignore[arg-type]
    for count, served in ((9, "b"), (0, "a")):
        good = RunFacts(run_id="b", open_count=count, owed=-900.0, **run)  # type: ignore[arg-type]
        workers = [dataclasses.replace(worker, run_id="a") for worker in pool(2)]
        assert {grant.run_id for grant in plan(workers, [bad, good], RULE)} == {served}
