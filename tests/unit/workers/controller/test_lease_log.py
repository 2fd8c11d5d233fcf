"""What a controller remembers of leases for people who look later."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace

from rollfab.fabric.contract.lease_plan import LeaseSample
from rollfab.fabric.contract.records import Lease, WorkerInfo
from rollfab.fabric.ports.queue import Survey
from rollfab.workers.controller.lease_log import (
    GUARD_MS,
    ROW_COUNT_MAX,
    SAY_AGAIN_MS,
    WAITING_COUNT_MAX,
    LeaseLog,
)


def survey(now_ms: int, held: Mapping[str, tuple[str, int]], guards: Mapping[str, str] | None = None) -> Survey:
    """Workers with what they hold ("": no lease); those of `guards` are serving ones."""
    guards = guards or {}
    infos = {
        name: WorkerInfo(
            worker_id=name,
            role="serving" if name in guards else "dedicated",
            pid=1,
            host="box",
            guard_state=guards.get(name),
        )
        for name in held
    }
    leases: dict[str, dict[str, Lease]] = {}
    for name, (run_id, slots) in held.items():
        if run_id:
            lease = Lease(worker_id=name, run_id=run_id, lease_epoch=1, slot_count=slots, lease_until_ms=None)
            leases.setdefault(run_id, {})[name] = lease
    workers = {name: (info, 0) for name, info in infos.items()}
    agent = WorkerInfo(worker_id="agent-1", role="agent", pid=1, host="box")
    return Survey(
        workers={**workers, "agent-1": (agent, 0)},
        assignments={},
        wall_ms=now_ms,
        now_ms=now_ms,
        runs={},
        leases=leases,
    )


def told(rows: tuple[LeaseSample, ...]) -> list[tuple[str, int, str, int, str]]:
    return [(row.worker_id, row.since_ms, row.run_id, row.slot_count, row.guard_state) for row in rows]


def test_a_change_is_said_once_with_what_was_before() -> None:
    log = LeaseLog()
    log.look(survey(1_000, {"w1": ("r1", 8), "w2": ("", 0)}))
    log.look(survey(2_000, {"w1": ("r1", 8), "w2": ("", 0)}))
    assert told(log.rows(2_000)) == [("w1", 1_000, "r1", 8, ""), ("w2", 1_000, "", 0, "")]
    log.look(survey(3_000, {"w1": ("r2", 4), "w2": ("", 0)}))
    assert told(log.rows(4_000)) == [("w1", 1_000, "r1", 8, ""), ("w1", 3_000, "r2", 4, "")]
    assert log.rows(5_000) == ()


def test_of_runs_that_a_worker_serves_at_once_it_is_the_one_whose_weights_it_follows() -> None:
    log, seen = LeaseLog(), survey(1_000, {"w1": ("r1", 8)})
    guest = Lease(worker_id="w1", run_id="r2", lease_epoch=2, slot_count=8, lease_until_ms=None)
    log.look(replace(seen, leases={**seen.leases, "r2": {"w1": guest}}, assignments={"w1": "r1 r2"}))
    assert told(log.rows(1_000)) == [("w1", 1_000, "r1", 8, "")]


def test_a_worker_that_left_is_said_to_be_gone_once() -> None:
    log = LeaseLog()
    log.look(survey(1_000, {"w1": ("r1", 8)}))
    log.look(survey(2_000, {}))
    log.look(survey(3_000, {}))
    assert told(log.rows(3_000)) == [("w1", 1_000, "r1", 8, ""), ("w1", 2_000, "", 0, "gone")]
    assert log.rows(3_000 + 2 * SAY_AGAIN_MS) == ()


def test_a_guard_that_flaps_is_a_row_a_minute_and_a_lease_that_does_is_a_row_each_time() -> None:
    log = LeaseLog()
    states = ("open", "shut")
    for second in range(GUARD_MS // 1000):
        log.look(survey(1000 * second, {"s1": ("r1", 2)}, {"s1": states[second % 2]}))
    assert told(log.rows(GUARD_MS)) == [("s1", 0, "r1", 2, "open")]
    log.look(survey(GUARD_MS + 1, {"s1": ("r1", 2)}, {"s1": "shut"}))
    log.look(survey(GUARD_MS + 1000, {"s1": ("", 0)}, {"s1": "shut"}))
    log.look(survey(GUARD_MS + 2000, {"s1": ("r1", 1)}, {"s1": "narrow"}))
    assert told(log.rows(2 * GUARD_MS))[1:] == [
        ("s1", GUARD_MS + 1, "r1", 2, "shut"),
        ("s1", GUARD_MS + 1000, "", 0, "shut"),
        ("s1", GUARD_MS + 2000, "r1", 1, "narrow"),
    ]


def test_what_lasts_is_said_again_within_the_hour() -> None:
    log = LeaseLog()
    said = []
    for minute in range(181):
        log.look(survey(60_000 * minute, {"w1": ("r1", 8)}))
        said += [minute] * len(log.rows(60_000 * minute))
    assert said[0] == 0
    assert len(said) >= 3
    assert max(after - before for before, after in itertools.pairwise(said)) < 60


def test_a_thousand_leases_that_change_at_once_are_spread_over_samples_and_none_is_lost() -> None:
    log = LeaseLog()
    held = {f"w{index:04}": ("r1", 8) for index in range(1_000)}
    log.look(survey(0, held))
    parts = [log.rows(60_000 * minute) for minute in range(4)]
    assert [len(part) for part in parts] == [ROW_COUNT_MAX, 1_000 - ROW_COUNT_MAX, 0, 0]
    assert {row.worker_id for part in parts for row in part} == set(held)


def test_what_waits_is_bounded_and_the_newest_stays() -> None:
    log = LeaseLog()
    for second in range(2 * WAITING_COUNT_MAX):
        log.look(survey(1000 * second, {"w1": ("r1", 1 + second % 2)}))
    found: list[LeaseSample] = []
    while rows := log.rows(0):
        assert len(rows) <= ROW_COUNT_MAX
        found += rows
    assert len(found) <= WAITING_COUNT_MAX
    assert found[-1].since_ms == 1000 * (2 * WAITING_COUNT_MAX - 1)
