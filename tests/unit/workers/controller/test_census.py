"""What the census knows of a worker's speed, of leases that have ended, and of runs that are gone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rollfab.fabric.contract.clock import SystemClock
from rollfab.fabric.contract.records import Lease, RunConfig, WorkerInfo
from rollfab.fabric.ports.queue import RunStatus, Survey
from rollfab.fabric.rules.lending.capacity_facts import SWITCH_S_MAX, Grant, WorkerFacts
from rollfab.workers.controller.controller import Controller, ControllerConfig
from rollfab.workers.controller.demand import FAILS_S, LATELY_S, REST_S, SAMPLE_COUNT_MIN, SPEED_S, Census
from tests.standin.fabric import StandInFabric

WORKER = WorkerInfo(worker_id="w", role="dedicated", pid=1, host="h", model="m", slot_count=4)
NOTHING = Survey(workers={}, assignments={}, runs={}, leases={})


class Seen:
    """One worker, heartbeat after heartbeat."""

    def __init__(self) -> None:
        self.census = Census()
        self.now_s = 0.0
        self.info = WORKER

    def beat(self, count: int, *, running: int, pace: float | None = None) -> WorkerFacts:
        for _ in range(count):
            self.now_s += 1
            tokens = self.info.token_count + bool(running)
            self.info = replace(WORKER, running_count=running, tokens_per_s=pace, token_count=tokens)
            (found,) = self.census.workers([self.info], NOTHING, {}, now_s=self.now_s, wall_ms=0)
        return found


def test_a_speed_is_believed_after_several_heartbeats_under_load_and_not_because_the_worker_stopped() -> None:
    seen = Seen()
    seen.beat(2, running=4, pace=1.0)
    assert seen.beat(1, running=0).slot_tokens_per_s is None
    assert seen.beat(SAMPLE_COUNT_MIN, running=4, pace=400.0).slot_tokens_per_s is None  # the first one only begins
    assert seen.beat(1, running=4, pace=400.0).slot_tokens_per_s == 100.0


def test_a_speed_that_was_known_outlives_a_stop_for_a_while_whatever_begins_after_it() -> None:
    seen = Seen()
    seen.beat(SAMPLE_COUNT_MIN + 1, running=4, pace=400.0)
    assert seen.beat(1, running=0).slot_tokens_per_s == 100.0
    assert seen.beat(3, running=4, pace=4.0).slot_tokens_per_s == 100.0
    assert seen.beat(int(SPEED_S), running=0).slot_tokens_per_s is None


def test_a_switch_is_waited_for_while_it_is_under_way_and_takes_as_long_as_the_last_one() -> None:
    census, lease = Census(), Lease(worker_id="w", run_id="r1", lease_epoch=1, slot_count=4, lease_until_ms=None)
    survey = replace(NOTHING, leases={"r1": {"w": lease}})

    def look(now_s: float, **said: Any) -> float:
        (found,) = census.workers([replace(WORKER, **said)], survey, {}, now_s=now_s, wall_ms=0)
        return found.switch_s

    assert look(1.0, run_id="r2", active_version=3) == SWITCH_S_MAX
    assert look(500.0, run_id="r1") == SWITCH_S_MAX
    # But not for ever, nor for a worker that says what keeps it
    assert look(1.0 + SWITCH_S_MAX, run_id="r1", switch_ms=20_000) == 20.0
    assert look(610.0, run_id="r1", weights_note="no chain leads to the head") == 0.0
    assert look(611.0, run_id="r1", active_version=0, switch_ms=30_000) == 30.0
    assert look(612.0, run_id="r2", active_version=0, switch_ms=30_000) == SWITCH_S_MAX


async def test_the_tokens_of_a_worker_that_serves_several_are_progress_of_those_with_turns_alone() -> None:
    census, status = Census(), replace(await status_of(24), head_version=0)

    def moved(now_ms: int, token_count: int, **claimed: int) -> dict[str, int]:
        info = replace(WORKER, run_id="a", guest_versions={"b": 0}, token_count=token_count)
        runs = {
            name: replace(status, config=replace(status.config, run_id=name), turns={"ready": 0, "claimed": count})
            for name, count in claimed.items()
        }
        survey = replace(NOTHING, workers={"w": (info, 0)}, runs=runs, now_ms=now_ms)
        return {name: each.moved_at_ms for name, each in census.progress(survey).items()}

    assert moved(1, 10, a=1, b=0) == {"a": 1, "b": 1}
    assert moved(2, 20, a=1, b=0) == {"a": 2, "b": 1}
    assert moved(3, 30, a=1, b=2) == {"a": 3, "b": 3}


async def test_trajectories_that_end_too_stale_count_until_more_are_completed_than_ever_were() -> None:
    census, status = Census(), await status_of(24)

    def stale_count(completed: int, reruns: int, consumed: int = 0) -> int:
        counters = {"trajectories_completed": completed, "reruns": reruns, "groups_consumed": consumed}
        run = replace(status, counters=counters)
        return census.progress(replace(NOTHING, runs={"a": run}))["a"].stale_count

    # Given a run that had reruns before anybody looked, Then those that come count
    assert [stale_count(8, 30), stale_count(8, 33)] == [0, 3]
    # And a group that is complete, and too stale when it is asked for, is no gain
    assert [stale_count(4, 37), stale_count(8, 37), stale_count(4, 41)] == [7, 7, 11]
    # But one more than ever is, a group that is consumed, and counters that begin anew
    assert [stale_count(9, 41), stale_count(9, 44)] == [0, 3]
    assert [stale_count(8, 45, consumed=1), stale_count(8, 46, consumed=1)] == [0, 1]
    assert [stale_count(0, 1), stale_count(0, 5)] == [0, 4]


async def test_beside_a_run_that_asks_for_turns_a_run_wants_slots_for_those_that_it_had_lately_alone() -> None:
    census, status = Census(), replace(await status_of(24), head_version=0)

    def wants(now_s: float, **turns: int) -> list[int]:
        made = [
            replace(
                status,
                config=replace(
                    status.config, run_id=name, model="other" if name == "elsewhere" else status.config.model
                ),
                turns={"ready": count, "claimed": 0},
            )
            for name, count in turns.items()
        ]
        return [run.open_count for run in census.runs(made, now_s)]

    # Given a run that thinks beside nobody who asks for turns of its model, Then it wants a slot for each trajectory
    assert wants(0.0, slow=0, sound=0, elsewhere=9) == [24, 24, 24]
    # But beside one that does it wants what it asked for lately, and the other what it wants alone
    assert wants(1.0, slow=0, sound=5, elsewhere=9) == [0, 24, 24]
    assert wants(2.0, slow=3, sound=5, elsewhere=9) == [3, 5, 24]
    assert wants(2.0 + LATELY_S / 2, slow=1, sound=0, elsewhere=9) == [3, 5, 24]
    assert wants(2.0 + LATELY_S, slow=0, sound=30, elsewhere=9) == [1, 24, 24]
    assert wants(3.0 + LATELY_S, slow=0, sound=30, elsewhere=9) == [0, 24, 24]
    # And whoever has no weights yet cannot ask for them
    status = replace(status, head_version=-1)
    assert wants(9.0, slow=1, sound=5) == [24, 24]


async def test_a_worker_of_a_run_that_thinks_beside_others_is_spare_since_its_last_turn() -> None:
    census, status = Census(), replace(await status_of(24), head_version=0)
    other = replace(status, config=replace(status.config, run_id="r2"), turns={"ready": 9, "claimed": 0})
    census.learn(
        [WorkerFacts(worker_id="w", model="m", slot_count=8)],
        [Grant(worker_id="w", run_id="r1", slot_count=8, is_standing=True, reason="")],
        0.0,
    )

    def spare_s(now_s: float, turn_count: int) -> float:
        (found, _) = census.runs([replace(status, turns={"ready": turn_count, "claimed": 0}), other], now_s)
        return found.spare_s

    assert spare_s(1.0, 3) == 0.0
    assert spare_s(1.0 + LATELY_S - 0.1, 0) == 0.0, "it may be back in a moment"
    assert spare_s(1.0 + LATELY_S, 0) == LATELY_S
    assert spare_s(2.0, 1) == 0.0


async def test_a_run_whose_weights_no_worker_can_get_is_unfit_until_it_is_tried_again() -> None:
    census, status = Census(), replace(await status_of(9), head_version=0)
    survey = replace(NOTHING, runs={"r1": status})

    def is_unfit(now_s: float, **said: Any) -> bool:
        census.workers([replace(WORKER, **said)], survey, {}, now_s=now_s, wall_ms=0)
        found = census.run(status, now_s)
        census.learn([], [], now_s)
        return found.is_unfit

    wrong = {"run_id": "r1", "head_version": 0, "state": "failed", "error": "the run's weights are float64"}
    assert not is_unfit(0.0, **wrong)  # a chain may just be mended
    assert is_unfit(FAILS_S, **wrong)
    assert not is_unfit(FAILS_S + REST_S, run_id=None)
    assert is_unfit(FAILS_S + REST_S + 1, **wrong)
    # But another version is another chance, and one that is live is well
    assert not census.run(replace(status, head_version=1), FAILS_S + REST_S + 1).is_unfit
    assert not is_unfit(FAILS_S + REST_S + 2, run_id="r1", head_version=0, active_version=0)
    assert not is_unfit(201.0, **wrong)


async def test_a_worker_more_than_a_run_has_work_for_is_spare() -> None:
    census, status = Census(), await status_of(9)
    grants = [Grant(worker_id=name, run_id="r1", slot_count=8, is_standing=True, reason="") for name in "ab"]
    workers = [WorkerFacts(worker_id=name, model="m", slot_count=8) for name in "ab"]
    census.learn(workers, grants, 0.0)
    assert census.run(status, 1.0).spare_s == 0.0
    fewer = await status_of(8)
    assert [census.run(fewer, now_s).spare_s for now_s in (2.0, 3.0)] == [0.0, 1.0]
    census.learn(workers[:1], grants[:1], 3.0)
    assert census.run(fewer, 3.5).spare_s == 0.0


async def status_of(open_count: int) -> RunStatus:
    fabric = StandInFabric()
    board, run = fabric.board, fabric.tables_of("r1")
    await board.create_run(RunConfig(run_id="r1", model="m", environment="e"))
    run.trajectories.set_ready(f"g.{index}" for index in range(open_count))
    run.depth = open_count
    return await board.run_status("r1")


async def test_a_run_that_was_deleted_and_begins_again_is_a_new_one() -> None:
    census, status = Census(), await status_of(0)
    there = replace(NOTHING, runs={"r1": status})
    for now_s in (0.0, 50.0):
        census.workers([], there, {}, now_s=now_s, wall_ms=0)
        idle_s = census.run(status, now_s).idle_s
    assert idle_s == 50.0
    census.workers([], NOTHING, {}, now_s=60.0, wall_ms=0)
    census.workers([], there, {}, now_s=70.0, wall_ms=0)
    assert census.run(status, 70.0).idle_s == 0.0


async def test_who_begins_to_lead_takes_no_run_that_is_through_for_one_that_works() -> None:
    """Runs of the same weights share workers for as long as they work, and a while longer."""
    over = replace(await status_of(0), head_version=0, weights="same")
    held = replace(over, config=replace(over.config, run_id="between-steps"))
    at_work = replace(await status_of(9), head_version=0, weights="same")
    at_work = replace(at_work, config=replace(at_work.config, run_id="works"))
    lease = Lease(worker_id="w", run_id="between-steps", lease_epoch=1, slot_count=4, lease_until_ms=None)
    found = Census().runs([over, held, at_work], 5.0, {"between-steps": {"w": lease}, "r1": {}, "works": {}})
    assert sorted(run.names for run in found) == [("between-steps", "works"), ("r1",)]


def test_a_lease_whose_time_is_over_is_none() -> None:
    lease = Lease(worker_id="w", run_id="r1", lease_epoch=1, slot_count=4, lease_until_ms=5_000)
    for left_ms, is_lent in ((1, True), (0, False)):
        survey = replace(NOTHING, leases={"r1": {"w": replace(lease, remaining_ms=left_ms)}})
        (found,) = Census().workers([WORKER], survey, {}, now_s=1.0, wall_ms=0)
        assert found.is_lent is is_lent


async def test_a_lease_that_ran_out_is_granted_anew_under_another_epoch() -> None:
    # Given a lent worker whose controller was away for longer than its lease
    fabric = StandInFabric()
    board, run = fabric.board, fabric.tables_of("r1")
    await board.create_run(RunConfig(run_id="r1", model="m", environment="e"))
    run.head_version, run.depth = 0, 20
    run.trajectories.set_ready(f"g.{index}" for index in range(20))
    await board.heartbeat(replace(WORKER, role="serving"))
    await board.set_lend("*", "on")
    controller = Controller(board, ControllerConfig(worker_id="c1"), SystemClock())
    await controller.tick(1)
    before = (await board.leases("r1"))["w"]
    run.end_lease("w")
    # When it plans again
    await controller.tick(1)
    # Then the worker is not told that its old lease goes on
    found = (await board.leases("r1"))["w"]
    assert (found.slot_count, found.lease_epoch > before.lease_epoch) == (before.slot_count, True)
