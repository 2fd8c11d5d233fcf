"""What `rollfab bench placement` finds wrong: jobs given out wrongly, and a cost that grows with trajectories."""

from __future__ import annotations

from typing import Any

from rollfab.deploy.replay.figures import Report
from tests.bench.placement.main import COLUMNS, FLOOR, FULL, LIVE_FEW, LIVE_MANY, TURNS, faults, growth


def row(worker_count: int, live_count: int, **p50_us: float) -> dict[str, Any]:
    us = {name: {"p50": p50_us.get(name.replace(" ", "_"), 100.0)} for name in COLUMNS}
    return {"worker_count": worker_count, "live_count": live_count, "us": us}


def told(*rows: dict[str, Any], wrong_count: int = 0) -> list[str]:
    results = {"wrong_count": wrong_count}
    return faults(Report(name="placement", params={}, results=results, baselines={}, ratio={"growth": growth(rows)}))


def test_a_cost_that_grows_with_trajectories_is_named_and_one_that_grows_with_workers_is_not() -> None:
    few = row(10, LIVE_FEW)
    assert told(few, row(10, LIVE_MANY, next_turn=140.0)) == []
    assert told(few, row(1_000, LIVE_MANY, next_turn=900.0)) == []
    (text,) = told(few, row(10, LIVE_MANY, next_turn=160.0))
    assert text.startswith(f"10 workers: {TURNS} takes 1.60 times as long")


def test_a_machine_that_was_busier_is_no_growth() -> None:
    assert told(row(10, LIVE_FEW), row(10, LIVE_MANY, next_turn=190.0, nothing=150.0)) == []
    assert len(told(row(10, LIVE_FEW), row(10, LIVE_MANY, next_turn=260.0, nothing=150.0))) == 1


def test_what_was_given_out_wrongly_is_named() -> None:
    assert told(wrong_count=2) == ["2 claims brought no job, or one that somebody had"]


def test_every_count_of_workers_is_measured_with_few_and_with_many_trajectories() -> None:
    cases = {(case.worker_count, case.live_count) for case in FULL.cases}
    for worker_count in {count for count, _ in cases}:
        assert {(worker_count, LIVE_FEW), (worker_count, LIVE_MANY)} <= cases
    assert FLOOR in COLUMNS
