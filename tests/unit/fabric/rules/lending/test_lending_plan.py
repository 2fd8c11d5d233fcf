"""Which serving workers are lent, and when they are taken back: risk, probes, guards, and no flapping."""

from __future__ import annotations

import dataclasses
import math

from hypothesis import given, settings
from hypothesis import strategies as st

from rollfab.fabric.rules.lending.capacity import plan
from rollfab.fabric.rules.lending.capacity_facts import CapacityRule, Grant, RunFacts, WorkerFacts
from tests.support.tried import tried

RULE = CapacityRule()
TICK_S = 1.0


def run(open_count: int = 10, **facts: object) -> RunFacts:
    base = {"run_id": "r1", "model": "m", "weight": 1.0, "has_weights": True, "idle_s": 0.0}
    return RunFacts(open_count=open_count, **{**base, **facts})  # type: ignore[arg-type]


def serving(worker_id: str = "s", **facts: object) -> WorkerFacts:
    return WorkerFacts(worker_id=worker_id, **{"model": "m", "slot_count": 8, "lend": 8, **facts})  # type: ignore[arg-type]


def lent(workers: list[WorkerFacts], open_count: int, rule: CapacityRule = RULE) -> list[str]:
    return [grant.worker_id for grant in plan(workers, [run(open_count)], rule) if grant.slot_count]


def one(worker: WorkerFacts, open_count: int = 100, rule: CapacityRule = RULE) -> Grant:
    return plan([worker], [run(open_count)], rule)[0]


def test_the_worker_with_most_headroom_is_lent_first() -> None:
    workers = [serving(f"s{n}", headroom_fraction=headroom) for n, headroom in enumerate((0.3, 0.9, 0.6))]
    assert lent(workers, 8) == ["s1"]
    assert lent(workers, 16) == ["s1", "s2"]


def test_of_equal_headroom_the_one_whose_guard_is_open_most_and_then_the_one_that_is_ready() -> None:
    often, always = (
        serving(name, headroom_fraction=0.9, open_fraction=part) for name, part in (("a", 0.5), ("b", 1.0))
    )
    assert lent([often, always], 8) == ["b"]
    asleep, far, ready = serving("a", activation_ms=2000), serving("b", fetch_ms=1000), serving("c")
    assert lent([asleep, far, ready], 8) == ["c"]
    assert lent([asleep, far], 8) == ["b"]


def test_a_worker_whose_guard_is_shut_is_not_lent_and_one_that_is_lent_is_drained_after_a_while() -> None:
    assert one(serving(probe="vllm", guard_state="shut")).slot_count == 0
    assert one(serving(probe="vllm", guard_state="shut", is_lent=True, shut_s=1.0)).slot_count == 8
    drained = one(serving(probe="vllm", guard_state="shut", is_lent=True, shut_s=4.0))
    assert (drained.slot_count, drained.reason) == (0, "its guard has been shut for 4.0 s")
    assert drained.is_for_serving


def test_a_probe_without_a_guard_that_sees_by_it_lends_nothing() -> None:
    assert "does not see" in one(serving(probe="vllm")).reason
    assert "does not see" in one(serving(probe="vllm", is_lent=True)).reason
    assert one(serving(probe="vllm", guard_state="open")).slot_count == 8


def test_without_any_probe_a_worker_is_lent_unless_the_rule_wants_one() -> None:
    assert one(serving()).slot_count == 8
    assert "no probe" in one(serving(), rule=CapacityRule(requires_probe=True)).reason
    assert one(serving(lend=None), rule=CapacityRule(requires_probe=True)).slot_count == 8


def test_low_headroom_ends_a_lease_without_a_guard_and_says_nothing_where_a_guard_uses_it_up() -> None:
    low = {"headroom_fraction": 0.05, "is_lent": True}
    assert one(serving(**low)).slot_count == 0
    guarded = one(serving(**low, probe="vllm", guard_state="narrow"))
    assert (guarded.slot_count, guarded.is_doubted) == (8, False)


def test_a_worker_taken_back_for_serving_rests() -> None:
    assert "rests" in one(serving(withdrawn_s=5.0)).reason
    assert one(serving(withdrawn_s=10.0)).slot_count == 8


def test_a_team_that_switches_off_and_on_again_need_not_wait() -> None:
    grant = one(serving(lend=0, lend_reason="s: off, said by ann"))
    assert (grant.reason, grant.is_for_serving) == ("s: off, said by ann", False)


def test_a_slow_worker_gives_its_stragglers_back_when_others_have_room() -> None:
    dedicated = WorkerFacts(worker_id="d", model="m", slot_count=8)
    slow = serving(is_lent=True, open_fraction=0.3)
    assert not plan([dedicated, slow], [run(100)], RULE)[-1].is_doubted
    assert plan([dedicated, slow], [run(13)], RULE)[-1].is_doubted
    assert plan([dedicated, dataclasses.replace(slow, doubt_s=3.0)], [run(13)], RULE)[-1].slot_count == 0


# ---- properties

fractions = st.none() | st.floats(0, 1)
workers = st.builds(
    WorkerFacts,
    worker_id=st.uuids().map(str),
    model=st.just("m"),
    slot_count=st.integers(0, 16),
    lend=st.none() | st.integers(0, 16),
    headroom_fraction=fractions,
    activation_ms=st.sampled_from([0, 0, 2000, 60_000]),
    probe=st.sampled_from([None, "vllm"]),
    guard_state=st.sampled_from([None, "open", "narrow", "shut"]),
    open_fraction=fractions,
    slot_tokens_per_s=st.none() | st.floats(1, 100),
)
pools = st.lists(workers, max_size=8)
demands = st.builds(run, st.integers(0, 100), left_tokens=st.none() | st.floats(1, 1000))


@given(pools, demands)
def test_borrowed_slots_stop_where_all_trajectories_have_one(pool: list[WorkerFacts], demand: RunFacts) -> None:
    grants = plan(pool, [demand], RULE)
    dedicated = sum(grant.slot_count for grant in grants if grant.is_standing)
    borrowed = [grant.slot_count for grant in grants if not grant.is_standing and grant.slot_count]
    assert dedicated == sum(each.slot_count for each in pool if each.lend is None)
    # The last worker that is lent may have more slots than are needed; without it there were too few
    assert not borrowed or dedicated + sum(borrowed) - max(borrowed) < demand.open_count


@given(pools, demands, st.integers(0, 7), st.floats(0, 1))
def test_more_headroom_never_costs_a_worker_its_lease(
    pool: list[WorkerFacts], demand: RunFacts, which: int, more: float
) -> None:
    if which >= len(pool) or pool[which].headroom_fraction is None:
        return
    before = plan(pool, [demand], RULE)[which]
    raised = dataclasses.replace(pool[which], headroom_fraction=max(more, pool[which].headroom_fraction))
    after = plan([*pool[:which], raised, *pool[which + 1 :]], [demand], RULE)[which]
    assert after.slot_count >= before.slot_count


@settings(max_examples=tried(60))
@given(pools, demands, st.data())
def test_under_facts_that_do_not_change_no_worker_is_lent_and_taken_back_in_turn(
    pool: list[WorkerFacts], demand: RunFacts, data: st.DataObject
) -> None:
    # Given any workers, some of them lent, and demand that stays as it is
    pool = [dataclasses.replace(each, is_lent=data.draw(st.booleans())) for each in pool]
    changes = [0] * len(pool)
    doubt_at: dict[str, float] = {}
    withdrawn_at: dict[str, float] = {}
    # When forty seconds pass
    for tick in range(40):
        now_s = tick * TICK_S
        facts = [
            dataclasses.replace(
                each,
                activation_ms=0 if each.is_lent else each.activation_ms,
                shut_s=now_s if each.guard_state == "shut" else 0.0,
                doubt_s=now_s - doubt_at.get(each.worker_id, now_s),
                withdrawn_s=now_s - withdrawn_at.get(each.worker_id, -math.inf),
            )
            for each in pool
        ]
        for index, (each, grant) in enumerate(zip(facts, plan(facts, [demand], RULE), strict=True)):
            if grant.is_doubted:
                doubt_at.setdefault(each.worker_id, now_s)
            else:
                doubt_at.pop(each.worker_id, None)
            if each.is_lent and not grant.slot_count and grant.is_for_serving:
                withdrawn_at[each.worker_id] = now_s
            changes[index] += each.is_lent != bool(grant.slot_count)
            pool[index] = dataclasses.replace(pool[index], is_lent=bool(grant.slot_count))
    # Then each changed at most from one to the other and, once others had gone, back
    assert max(changes, default=0) <= 2
    assert all(not grant.is_doubted for grant in plan(facts, [demand], RULE))
