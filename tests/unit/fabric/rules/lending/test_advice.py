"""The advice to serving's router: few workers carry the load, with a margin, and the others roll out alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollfab.fabric.rules.lending.advice import Advice, AdviceRule, advise, extra_requests, followed
from rollfab.fabric.rules.lending.capacity import plan
from rollfab.fabric.rules.lending.capacity_facts import CapacityRule, RunFacts, WorkerFacts

RULE = AdviceRule()
TICK_S = 0.5
RUN = RunFacts(run_id="r", model="m", weight=1.0, has_weights=True, open_count=500, idle_s=0.0)
OWN = WorkerFacts(worker_id="own", model="m", slot_count=16)
PER_WORKER = 10  # requests under way where a worker has a load of 1
Router = Callable[[list[WorkerFacts], float, Advice], list[WorkerFacts]]


def pool(count: int = 8, load: float = 0.0, **facts: object) -> list[WorkerFacts]:
    """A pool whose workers all have the same load."""
    each = WorkerFacts(
        worker_id="",
        model="m",
        slot_count=16,
        lend=16,
        pool="chat",
        load_fraction=load,
        request_count=round(load * PER_WORKER),
        probe="vllm",
        guard_state="open",
        open_fraction=1.0,
    )
    return [replace(each, worker_id=f"s{n}", **facts) for n in range(count)]  # type: ignore[arg-type]


def obeys(workers: list[WorkerFacts], load: float, advice: Advice) -> list[WorkerFacts]:
    """Divide a pool's load as a router does that sends each request where the fewest are, advice included."""
    counts = {each.worker_id: 0 for each in workers}
    for _ in range(round(load * PER_WORKER)):
        least = min(counts, key=lambda name: (counts[name] + advice.extra.get(name, 0.0), name))
        counts[least] += 1
    return [
        replace(each, request_count=counts[each.worker_id], load_fraction=counts[each.worker_id] / PER_WORKER)
        for each in workers
    ]


def ignores(workers: list[WorkerFacts], load: float, advice: Advice) -> list[WorkerFacts]:
    return obeys(workers, load, Advice())


def after(
    load: float, seconds: float = 120.0, advice: Advice | None = None, router: Router = obeys, count: int = 8
) -> Advice:
    """Let a steady load last. advice: the last one; None: a controller begins."""
    advice = advice or Advice()
    begun_s = max(advice.at_s, 0.0)
    for tick in range(1, int(seconds / TICK_S) + 1):
        facts = router(pool(count), load, advice)
        advice = advise(facts, [RUN], {"chat": advice}, begun_s + tick * TICK_S, RULE)["chat"]
    return advice


def once(workers: list[WorkerFacts], runs: list[RunFacts], before: Advice | None = None) -> dict[str, Advice]:
    before = before or Advice()
    return advise(workers, runs, {"chat": before}, max(before.at_s, 0.0) + TICK_S, RULE)


# ---------------------------------------------------------------- who is spared


def test_workers_begin_to_return_within_a_second_of_a_rise_and_stay_for_its_echo() -> None:
    calm = after(1.6)
    assert len(calm.spared) == 5
    risen = after(3.9, 2.0, calm)
    assert len(risen.spared) <= 3
    # They return by and by: a router would else send them all that arrives
    back = set(calm.spared) - set(risen.spared)
    assert all(0 < risen.extra[name] < risen.extra[risen.spared[0]] for name in back)
    late = after(3.9, 1.5 * RULE.return_s, risen)
    assert set(late.extra) == set(late.spared)
    # And the end of the burst sends none away for a while
    assert len(after(1.6, 10.0, late).spared) <= 3
    assert len(after(1.6, 120.0, late).spared) == 5


@pytest.mark.parametrize("scatter", [0.0, 0.1])
def test_a_load_that_scatters_makes_no_worker_come_and_go(scatter: float) -> None:
    advice, changes = after(1.5), 0
    for tick in range(500):
        now = after(1.5 * (1 + scatter * (1 if tick % 3 else -1)), TICK_S, advice)
        changes += now.spared != advice.spared
        advice = now
    assert changes <= 1


def test_nobody_is_spared_for_nothing() -> None:
    for other in (
        replace(RUN, model="other"),
        replace(RUN, has_weights=False),
        replace(RUN, open_count=0, idle_s=RULE.remember_s),
    ):
        assert once(pool(load=0.1), [other])["chat"].spared == ()
    assert once(pool(load=0.1), [])["chat"].spared == ()
    assert once(pool(load=0.1), [replace(RUN, open_count=0, idle_s=60.0)])["chat"].spared, "its next step will come"
    assert "" not in once(pool(load=0.1, pool=""), [RUN]), "nobody knows whether they serve the same"
    assert once([OWN], [RUN]) == {}


def test_a_worker_of_unknown_load_or_one_that_is_not_lent_keeps_its_requests() -> None:
    workers = pool()
    workers[0] = replace(workers[0], load_fraction=None)
    workers[1] = replace(workers[1], lend=0)
    workers[2] = replace(workers[2], request_count=None)
    advice = once(workers, [RUN])["chat"]
    assert advice.spared == ("s3", "s4", "s5", "s6", "s7")  # s1 carries
    # When a spared one is switched off, its probe sees nothing any more, or it leaves
    workers[3] = replace(workers[3], lend=0)
    workers[4] = replace(workers[4], load_fraction=None, request_count=None)
    del workers[5]
    found = once(workers, [RUN], advice)["chat"]
    assert found.spared == ("s6", "s7")
    # Then the first returns by and by, and nothing is said of the others
    assert 0 < found.extra["s3"] < advice.extra["s3"]
    assert not {"s4", "s5"} & set(found.extra)


def test_pools_do_not_carry_for_each_other() -> None:
    other = [replace(each, worker_id=f"o{each.worker_id}", pool="code") for each in pool(load=0.9)]
    advice: dict[str, Advice] = {}
    for tick in range(240):
        advice = advise([*pool(load=0.1), *other], [RUN], advice, tick * TICK_S, RULE)
    assert len(advice["chat"].spared) == 6
    assert advice["code"].spared == ()
    assert extra_requests(advice) == dict.fromkeys(advice["chat"].spared, 9)  # 4, twice its root, and one


def test_a_burst_reaches_spared_workers_by_the_advice_as_it_is() -> None:
    advice = after(1.8)
    usual = obeys(pool(), 1.8, advice)
    burst = obeys(pool(), 6.0, advice)
    assert all(each.request_count == 0 for each in usual if each.worker_id in advice.spared)
    counts = [each.request_count or 0 for each in burst]
    assert max(counts) - min(counts) <= max(advice.extra.values()) + 1 <= 14
    assert min(counts) > 0


# ---------------------------------------------------------------- whether it is followed


def test_a_router_that_does_not_follow_is_seen_and_changes_nothing_in_the_plan() -> None:
    advice = after(1.8, router=ignores)
    assert advice.spared
    assert not advice.is_followed
    workers = ignores(pool(), 1.8, advice)
    assert followed(workers, {"chat": advice}) == workers


@pytest.mark.parametrize("mean", [0.1, 0.4, 1.0, 4.0])
def test_few_requests_that_fall_anywhere_are_not_taken_for_a_router_that_follows(mean: float) -> None:
    dice, advice, believed = Random(7), Advice(), 0
    left = {each.worker_id: 0 for each in pool()}
    for tick in range(1000):
        for name in left:
            left[name] = sum(dice.random() > TICK_S for _ in range(left[name])) + (dice.random() < mean * TICK_S)
        facts = [replace(each, request_count=left[each.worker_id], load_fraction=0.05) for each in pool()]
        advice = advise(facts, [RUN], {"chat": advice}, tick * TICK_S, RULE)["chat"]
        believed += advice.is_followed
    assert believed / 1000 < 0.1


def test_whom_a_router_spares_is_lent_alone_and_whoever_carries_is_not() -> None:
    advice = after(1.8)
    assert advice.is_followed
    facts = followed([OWN, *obeys(pool(), 1.8, advice)], {"chat": advice})
    grants = {each.worker_id: each for each in plan(facts, [RUN], CapacityRule(requires_probe=True))}
    assert {name for name, each in grants.items() if each.slot_count} == {"own", *advice.spared}
    # One that returns is neither: its guard decides, as ever
    risen = after(4.5, 2.0, advice)
    found = {each.worker_id: each.is_spared for each in followed(obeys(pool(), 4.5, risen), {"chat": risen})}
    assert {found[name] for name in set(risen.extra) - set(risen.spared)} == {None}


@pytest.mark.parametrize("open_count", [1, 0])
def test_a_worker_that_is_spared_stays_lent_to_the_end_of_a_step_and_beyond(open_count: int) -> None:
    worker = pool(1, is_lent=True, is_spared=True, run_id="r")[0]
    run = replace(RUN, open_count=open_count, idle_s=0.0 if open_count else 60.0)
    assert plan([OWN, worker], [run], CapacityRule())[1].slot_count == 16
    assert plan([OWN, replace(worker, is_spared=None)], [run], CapacityRule())[1].is_doubted or not open_count
    for reason in ({"guard_state": "shut", "shut_s": 9.0}, {"lend": 0}, {"guard_state": None}):
        assert plan([OWN, replace(worker, **reason)], [run], CapacityRule())[1].slot_count == 0  # type: ignore[arg-type]


# ---------------------------------------------------------------- whatever comes

WORKER = st.fixed_dictionaries(
    {
        "load_fraction": st.none() | st.floats(0, 3),
        "request_count": st.none() | st.integers(0, 300),
        "lend": st.sampled_from([0, 16]),
        "is_lent": st.booleans(),
        "model": st.sampled_from(["m", "other"]),
    }
)


@given(readings=st.lists(st.tuples(st.floats(0, 100), st.lists(WORKER, max_size=8)), min_size=1, max_size=12))
def test_somebody_carries_and_advice_is_finite_and_names_only_workers_that_are_known(
    readings: list[tuple[float, list[dict[str, object]]]],
) -> None:
    advice, now_s = Advice(), 0.0
    for passed_s, facts in readings:
        now_s += passed_s
        workers = [replace(each, **its) for each, its in zip(pool(8), facts, strict=False)]  # type: ignore[arg-type]
        advice = advise(workers, [RUN], {"chat": advice}, now_s, RULE).get("chat", Advice())
        known = {w.worker_id for w in workers if w.load_fraction is not None and w.request_count is not None}
        assert set(advice.extra) <= known
        assert not advice.spared or set(advice.spared) < known
        assert set(advice.spared) <= {w.worker_id for w in workers if w.lend and w.model == "m"}
        assert len(advice.spared) == len(set(advice.spared))
        assert all(1 <= extra <= 2 + 2 * 2400 for extra in (advice.extra[name] for name in advice.spared))
        assert not advice.is_followed or advice.spared
        carried = len(known) - len(advice.spared)
        assert not advice.spared or advice.load <= carried * RULE.load_max_fraction


@given(load=st.floats(0, 8), count=st.integers(1, 12))
def test_whoever_carries_a_steady_load_has_less_than_it_can_serve(load: float, count: int) -> None:
    advice = after(load, 20.0, count=count)
    shares = [each.load_fraction or 0.0 for each in obeys(pool(count), load, advice)]
    assert not advice.spared or max(shares) <= RULE.load_max_fraction + 1 / PER_WORKER
