"""The capacity plan, as a table of situations."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rollfab.fabric.rules.lending.capacity import CapacityRule, Grant, RunFacts, WorkerFacts, plan

RULE = CapacityRule()


def run(run_id: str = "r1", **facts: object) -> RunFacts:
    base = {"model": "m", "weight": 1.0, "has_weights": True, "open_count": 10, "idle_s": 0.0}
    return RunFacts(run_id=run_id, **{**base, **facts})  # type: ignore[arg-type]


def worker(worker_id: str, **facts: object) -> WorkerFacts:
    return WorkerFacts(worker_id=worker_id, **{"model": "m", "slot_count": 8, **facts})  # type: ignore[arg-type]


def one(workers: list[WorkerFacts], runs: list[RunFacts]) -> Grant:
    return plan(workers, runs, RULE)[-1]


def test_a_dedicated_worker_stands_by_even_without_demand() -> None:
    grant = one([worker("d")], [run(open_count=0)])
    assert (grant.run_id, grant.slot_count, grant.is_standing) == ("r1", 8, True)


def test_nothing_is_granted_before_there_are_weights() -> None:
    assert one([worker("d")], [run(has_weights=False)]).slot_count == 0


def test_a_run_of_another_model_is_not_served() -> None:
    assert one([worker("d")], [run(model="other")]).slot_count == 0


def test_a_serving_worker_is_lent_only_above_what_dedicated_slots_can_run() -> None:
    dedicated, serving = worker("d"), worker("s", lend=8)
    assert one([dedicated, serving], [run(open_count=8)]).slot_count == 0
    grant = one([dedicated, serving], [run(open_count=9)])
    assert (grant.slot_count, grant.is_standing) == (8, False)


def test_a_switch_that_is_off_wins_over_any_demand() -> None:
    assert one([worker("s", lend=0)], [run(open_count=10_000)]).slot_count == 0


def test_a_worker_without_slots_says_so_whatever_its_team_says() -> None:
    for lend in (0, 8):  # it only observes, or it has failed
        assert one([worker("s", slot_count=0, lend=lend)], [run()]).reason == "it has no slots"
    assert one([worker("s", lend=0, lend_reason="off, said by ann")], [run()]).reason == "off, said by ann"


def test_a_limit_of_slots_is_kept() -> None:
    assert one([worker("s", lend=3)], [run()]).slot_count == 3


def test_a_worker_without_headroom_keeps_everything_for_serving() -> None:
    assert one([worker("s", lend=8, headroom_fraction=0.05)], [run()]).slot_count == 0
    assert one([worker("s", lend=8, headroom_fraction=0.5)], [run()]).slot_count == 8


def test_a_lent_worker_is_kept_through_a_short_lull_and_taken_back_after_it() -> None:
    lent = worker("s", lend=8, is_lent=True)
    assert one([worker("d"), lent], [run(open_count=0, idle_s=1.0)]).slot_count == 8
    assert one([worker("d"), lent], [run(open_count=0, idle_s=10.0)]).slot_count == 0


def test_engines_that_sleep_are_lent_too_but_after_those_that_are_awake_and_the_quickest_first() -> None:
    slow, quick, awake = (worker(f"s{n}", lend=8, activation_ms=ms) for n, ms in enumerate((9_000, 2_000, 0)))

    def granted(open_count: int) -> list[int]:
        return [grant.slot_count for grant in plan([slow, quick, awake], [run(open_count=open_count)], RULE)]

    assert granted(8) == [0, 0, 8]
    assert granted(9) == [0, 8, 8]
    assert granted(17) == [8, 8, 8]


def test_a_dedicated_worker_that_sleeps_keeps_its_place_before_lent_ones() -> None:
    dedicated, serving = worker("d", activation_ms=60_000), worker("s", lend=8)
    assert [grant.slot_count for grant in plan([serving, dedicated], [run(open_count=8)], RULE)] == [0, 8]


def test_two_runs_share_dedicated_workers_by_weight() -> None:
    workers = [worker(f"d{index}") for index in range(4)]
    runs = [run("r1", weight=3.0, open_count=99), run("r2", weight=1.0, open_count=99)]
    served = [grant.run_id for grant in plan(workers, runs, RULE)]
    assert sorted(served) == ["r1", "r1", "r1", "r2"]


def test_no_run_is_left_without_a_worker_where_there_is_one_each() -> None:
    workers = [worker(f"d{index}", run_id="r1") for index in range(3)]
    runs = [run(name, open_count=99) for name in ("r1", "r2", "r3")]
    assert sorted(str(grant.run_id) for grant in plan(workers, runs, RULE)) == ["r1", "r2", "r3"]


def test_a_worker_keeps_its_run_while_that_has_work() -> None:
    workers = [worker("d0", run_id="r2"), worker("d1", run_id="r1")]
    runs = [run("r1", open_count=99), run("r2", open_count=99)]
    assert [grant.run_id for grant in plan(workers, runs, RULE)] == ["r2", "r1"]


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
