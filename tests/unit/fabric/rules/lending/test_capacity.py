"""The capacity plan, as a table of situations."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollfab.fabric.rules.lending.capacity import plan
from rollfab.fabric.rules.lending.capacity_facts import CapacityRule, RunFacts, WorkerFacts

RULE = CapacityRule()


def run(run_id: str = "r1", **facts: object) -> RunFacts:
    base = {"model": "m", "weight": 1.0, "has_weights": True, "open_count": 10, "idle_s": 0.0}
    return RunFacts(run_id=run_id, **{**base, **facts})  # type: ignore[arg-type]


def worker(worker_id: str, **facts: object) -> WorkerFacts:
    return WorkerFacts(worker_id=worker_id, **{"model": "m", "slot_count": 8, **facts})  # type: ignore[arg-type]


DEDICATED, SERVING = worker("d"), worker("s", lend=8)
LENT = worker("s", lend=8, is_lent=True)
SLOW, QUICK, AWAKE = (worker(f"s{n}", lend=8, activation_ms=ms) for n, ms in enumerate((9_000, 2_000, 0)))


@pytest.mark.parametrize(
    ("workers", "demand", "slots"),
    [
        pytest.param([DEDICATED], run(open_count=0), [8], id="a dedicated worker stands by even without demand"),
        pytest.param([DEDICATED], run(has_weights=False), [0], id="nothing before there are weights"),
        pytest.param([DEDICATED], run(model="other"), [0], id="nothing for another model"),
        pytest.param([DEDICATED, SERVING], run(open_count=8), [8, 0], id="nothing lent that dedicated slots can run"),
        pytest.param([DEDICATED, SERVING], run(open_count=9), [8, 8], id="lent above what dedicated slots can run"),
        pytest.param(
            [worker("s", lend=0)], run(open_count=10_000), [0], id="a switch that is off wins over any demand"
        ),
        pytest.param([worker("s", lend=3)], run(), [3], id="a limit of slots is kept"),
        pytest.param([worker("s", lend=8, headroom_fraction=0.05)], run(), [0], id="no headroom: all is for serving"),
        pytest.param([worker("s", lend=8, headroom_fraction=0.5)], run(), [8], id="headroom"),
        pytest.param([DEDICATED, LENT], run(open_count=0, idle_s=1.0), [8, 8], id="kept through a short lull"),
        pytest.param([DEDICATED, LENT], run(open_count=0, idle_s=10.0), [8, 0], id="taken back after it"),
        pytest.param([SLOW, QUICK, AWAKE], run(open_count=8), [0, 0, 8], id="those that are awake first"),
        pytest.param([SLOW, QUICK, AWAKE], run(open_count=9), [0, 8, 8], id="then the quickest to wake"),
        pytest.param([SLOW, QUICK, AWAKE], run(open_count=17), [8, 8, 8], id="then the others"),
        pytest.param(
            [SERVING, worker("d", activation_ms=60_000)], run(open_count=8), [0, 8], id="dedicated ones, though asleep"
        ),
    ],
)
def test_a_situation(workers: list[WorkerFacts], demand: RunFacts, slots: list[int]) -> None:
    grants = plan(workers, [demand], RULE)
    assert [grant.slot_count for grant in grants] == slots
    for each, grant in zip(workers, grants, strict=True):
        if grant.slot_count:
            assert (grant.run_id, grant.is_standing) == ("r1", each.lend is None)


def test_a_worker_without_slots_says_so_whatever_its_team_says() -> None:
    for lend in (0, 8):  # it only observes, or it has failed
        assert plan([worker("s", slot_count=0, lend=lend)], [run()], RULE)[0].reason == "it has no slots"
    off = worker("s", lend=0, lend_reason="off, said by ann")
    assert plan([off], [run()], RULE)[0].reason == "off, said by ann"


FAST, TIRED = worker("d", slot_tokens_per_s=100.0), worker("s", lend=8, slot_tokens_per_s=1.0)


@pytest.mark.parametrize(
    ("workers", "reason"),
    [
        ([DEDICATED, SERVING], "9 trajectories open, 8 slots given"),
        ([DEDICATED, worker("e"), SERVING], "the slots given are enough"),
        ([worker("d", slot_count=9), SERVING], "the slots given are enough"),
        (
            [FAST, TIRED],
            "9 trajectories open, 8 slots given: too few more for a worker at 1% of a dedicated one's speed",
        ),
        (
            [FAST, replace(TIRED, activation_ms=60_000, fetch_ms=500)],
            "at 1% of a dedicated one's speed after 60.5 s to get ready",
        ),
        ([FAST, replace(TIRED, activation_ms=60_000, is_lent=True, doubt_s=99.0)], "at 1% of a dedicated one's speed"),
    ],
)
def test_a_serving_worker_is_told_of_the_demand_or_why_there_is_none_for_it(
    workers: list[WorkerFacts], reason: str
) -> None:
    assert plan(workers, [run(open_count=9)], RULE)[-1].reason.endswith(reason)


facts = st.builds(
    WorkerFacts,
    worker_id=st.uuids().map(str),
    model=st.sampled_from(["m", "n"]),
    slot_count=st.integers(0, 64),
    lend=st.none() | st.integers(0, 99),
    headroom_fraction=st.none() | st.floats(0, 1),
    run_id=st.none() | st.sampled_from(["r1", "r2", "gone"]),
    is_lent=st.booleans(),
    activation_ms=st.integers(0, 60_000),
)
demands = st.builds(
    RunFacts,
    run_id=st.sampled_from(["r1", "r2"]),
    model=st.sampled_from(["m", "n"]),
    weight=st.floats(0.1, 10),
    has_weights=st.booleans(),
    open_count=st.integers(0, 200),
    idle_s=st.floats(0, 100),
)


@given(st.lists(facts, max_size=8), st.lists(demands, max_size=2, unique_by=lambda each: each.run_id))
def test_no_plan_grants_more_than_is_offered(workers: list[WorkerFacts], runs: list[RunFacts]) -> None:
    grants = plan(workers, runs, RULE)
    assert [grant.worker_id for grant in grants] == [each.worker_id for each in workers]
    for each, grant in zip(workers, grants, strict=True):
        offered = each.slot_count if each.lend is None else min(each.lend, each.slot_count)
        assert 0 <= grant.slot_count <= offered
        assert (grant.run_id is None) == (grant.slot_count == 0)
        served = next((demand for demand in runs if demand.run_id == grant.run_id), None)
        assert served is None or (served.model == each.model and served.has_weights)
