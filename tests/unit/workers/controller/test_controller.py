"""The controller over the board: leases follow demand, and an old leader changes nothing."""

from __future__ import annotations

import dataclasses
from typing import Any

from rollfab.fabric.contract.clock import Clock, SystemClock
from rollfab.fabric.contract.lease_plan import EPOCHS_PER_TERM, LeaseChange
from rollfab.fabric.contract.records import Lease, RunConfig, WorkerInfo
from rollfab.fabric.contract.sharing import LendSetting
from rollfab.workers.controller.controller import COSTS_S, Controller, ControllerConfig
from rollfab.workers.controller.demand import Census
from tests.standin.fabric import StandInFabric


class HandClock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def now_s(self) -> float:
        return self.now

    def wall_ms(self) -> int:
        return int(self.now * 1000)

    async def sleep(self, duration_s: float) -> None:
        self.now += duration_s


class FridayClock(SystemClock):
    """It is always noon."""

    def wall_ms(self) -> int:
        return 1_700_222_400_000  # 17 November 2023, 12:00 UTC


class Setting:
    """A board with one run, a dedicated and a serving worker."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.fabric = StandInFabric(clock)
        self.board = self.fabric.board
        self.tables = self.fabric.tables

    async def begin(self, open_count: int = 0, lend: str = "") -> Setting:
        """open_count: trajectories that wait. lend: what was said of all serving workers."""
        await self.board.create_run(RunConfig(run_id="r1", model="m", environment="e"))
        self.fabric.tables_of("r1").head_version = 0
        for role in ("dedicated", "serving"):
            await self.beat(role)
        if open_count:
            self.demand(open_count)
        if lend:
            await self.board.set_lend("*", lend)
        return self

    async def beat(self, worker_id: str, role: str = "", **facts: Any) -> WorkerInfo:
        """A worker says that it lives."""
        said = {"role": role or worker_id, "pid": 1, "host": "h", "model": "m", "slot_count": 4, **facts}
        info = WorkerInfo(worker_id=worker_id, **said)
        await self.board.heartbeat(info)
        return info

    def demand(self, count: int, run_id: str = "r1") -> None:
        """Trajectories that wait, and a turn that is asked for."""
        run = self.fabric.tables_of(run_id)
        run.depth = count
        run.trajectories.set_ready(f"g.{index}" for index in range(count))
        run.turns.set_ready(["g.99.0"] if count else [])

    def controller(self, name: str = "c1", clock: Clock | None = None) -> Controller:
        return Controller(self.board, ControllerConfig(worker_id=name), clock or SystemClock())

    async def held(self) -> dict[str, int]:
        return {name: lease.slot_count for name, lease in (await self.board.leases("r1")).items()}


async def test_a_dedicated_worker_gets_a_standing_lease() -> None:
    setting = await Setting().begin()
    await setting.controller().tick(1)
    (lease,) = (await setting.board.leases("r1")).values()
    assert (lease.worker_id, lease.slot_count, lease.lease_until_ms) == ("dedicated", 4, None)


async def test_an_unchanged_lease_keeps_its_epoch_and_a_changed_one_gets_a_higher() -> None:
    setting = await Setting().begin(20)
    await setting.board.set_lend("serving", "2")
    controller = setting.controller()
    await controller.tick(1)
    first = (await setting.board.leases("r1"))["serving"]
    await controller.tick(1)
    assert (await setting.board.leases("r1"))["serving"].lease_epoch == first.lease_epoch
    await setting.board.set_lend("serving", "3")
    await controller.tick(1)
    second = (await setting.board.leases("r1"))["serving"]
    assert (second.slot_count, second.lease_epoch > first.lease_epoch) == (3, True)


async def test_a_new_leader_takes_standing_leases_over() -> None:
    setting = await Setting().begin()
    await setting.controller("old").tick(1)
    await setting.controller("new").tick(2)
    assert (await setting.board.leases("r1"))["dedicated"].lease_epoch >> 20 == 2


async def test_a_silent_worker_is_forgotten_with_its_lease() -> None:
    setting = await Setting().begin()
    controller = setting.controller()
    await controller.tick(1)
    setting.tables.silence("dedicated", 60_000)
    await controller.tick(1)
    assert await setting.held() == {}
    assert "dedicated" not in await setting.board.workers()
    assert "worker.gone" in [kind for kind, _ in setting.tables.events]


async def test_the_end_of_a_lease_is_an_event_though_its_worker_has_left() -> None:
    setting = await Setting().begin()
    controller = setting.controller()
    await controller.tick(1)
    epoch = (await setting.board.leases("r1"))["dedicated"].lease_epoch
    await setting.board.forget_worker("dedicated")
    await controller.tick(1)
    (facts,) = [facts for kind, facts in setting.tables.events if kind == "lease.ended"]
    assert (facts["worker_id"], facts["lease_epoch"], facts["slot_count"]) == ("dedicated", epoch, 0)
    assert facts["reason"] == "its worker left, died or was silent for too long"


async def test_hours_pass_by_the_broker_machine_s_time_and_not_by_the_controller_s() -> None:
    # Given a broker on a Friday noon, and a controller whose clock shows 1970
    setting = await Setting(FridayClock()).begin(20)
    await setting.board.set_lend("*", LendSetting(mode="on", hours=["fri 11:00-13:00"]))
    await setting.controller(clock=HandClock()).tick(1)
    assert "serving" in await setting.held()


async def test_a_row_of_the_plan_is_short_whatever_a_team_has_said() -> None:
    setting = await Setting().begin(20)
    await setting.board.set_lend("*", LendSetting(mode="off", reason="because " * 60))
    await setting.controller().tick(1)
    reason = next(row.reason for row in (await setting.board.plan()).rows if row.worker_id == "serving")
    assert len(reason) == 200 and reason.endswith("…")


async def test_after_a_gap_nobody_is_taken_for_dead_at_once() -> None:
    # Given a controller that could not reach the broker for a minute, like everyone else
    clock = HandClock()
    setting = await Setting().begin()
    controller = setting.controller(clock=clock)
    await controller.tick(1)
    setting.tables.silence("dedicated", 60_000)
    # When it ticks again, then workers have time to be heard before any is forgotten
    clock.now += 60.0
    await controller.tick(1)
    assert "dedicated" in await setting.held()
    for _ in range(6):
        clock.now += 1.0
        await controller.tick(1)
    assert "dedicated" not in await setting.held()


async def two_busy_runs() -> Setting:
    """One worker, which says that it serves r1."""
    setting = await Setting().begin()
    await setting.board.create_run(RunConfig(run_id="r2", model="m", environment="e", weight=1.0))
    await setting.board.forget_worker("serving")
    await setting.beat("dedicated", run_id="r1", active_version=0)
    for run_id in ("r1", "r2"):
        setting.fabric.tables_of(run_id).head_version = 0
        setting.demand(20, run_id)
    return setting


async def served(
    setting: Setting, controller: Controller, clock: HandClock, ticks: int, *, says: bool = True
) -> list[str]:
    """Return the run of the worker after each tick. says: whether the worker tells that it is there."""
    found = []
    for _ in range(ticks):
        clock.now += 0.25
        await controller.tick(1)
        (run_id,) = [name for name in ("r1", "r2") if await setting.board.leases(name)]
        if says:
            await setting.beat("dedicated", run_id=run_id, active_version=0)
        found.append(run_id)
    return found


async def test_two_runs_take_turns_on_one_worker() -> None:
    setting, clock = await two_busy_runs(), HandClock()
    controller = setting.controller(clock=clock)
    found = await served(setting, controller, clock, 4 * 120)
    assert 0.4 < found.count("r1") / len(found) < 0.6
    changes = [index for index in range(1, len(found)) if found[index] != found[index - 1]]
    assert len(changes) >= 4
    assert min(after - before for before, after in zip([0, *changes], changes, strict=False)) >= 4 * 10


async def test_a_run_that_asks_for_no_turn_takes_nobodys_worker_for_long() -> None:
    # Given two runs, of which one has trajectories open that never ask for a turn
    setting, clock = await two_busy_runs(), HandClock()
    setting.fabric.tables_of("r1").turns.set_ready([])
    controller = setting.controller(clock=clock)
    # Then after a while the worker is the other's alone
    await served(setting, controller, clock, 200)
    assert set(await served(setting, controller, clock, 400)) == {"r2"}
    # And when it asks for one, they take turns at once
    setting.demand(20)
    assert set(await served(setting, controller, clock, 200)) == {"r1", "r2"}


async def test_a_controller_that_is_started_again_moves_no_worker_before_its_time() -> None:
    # Given a worker that was given to another run a moment ago, and does not say so yet
    setting, clock = await two_busy_runs(), HandClock()
    first = setting.controller(clock=clock)
    while await setting.board.leases("r1") or not await setting.board.leases("r2"):
        await served(setting, first, clock, 1, says=False)
    # When a new controller takes over, then the worker stays for at least a slice
    second = setting.controller("c2", clock)
    assert set(await served(setting, second, clock, 4 * 9)) == {"r2"}


async def test_a_worker_whose_engine_sleeps_is_leased_and_one_that_failed_is_not() -> None:
    setting = await Setting().begin(20, "on")
    for role, state in (("dedicated", "asleep"), ("serving", "failed")):
        await setting.beat(role, state=state)
    await setting.controller().tick(1)
    assert await setting.held() == {"dedicated": 4}


async def test_demand_goes_to_an_engine_that_is_awake_and_stays_where_one_is_being_woken() -> None:
    # Given demand for one of two serving workers, of which the first sleeps
    setting = await Setting().begin(6)
    for name in ("a", "b"):
        await setting.board.set_lend(name, "on")
    await setting.board.forget_worker("serving")

    async def beat(**states: str) -> None:
        for name, state in states.items():
            await setting.beat(name, "serving", wake_ms=1500, state=state)

    controller = setting.controller()
    await beat(a="asleep", b="ready")
    await controller.tick(1)
    assert set(await setting.held()) == {"dedicated", "b"}

    # When that one is gone, the sleeper is leased, and stays so while it still says that it sleeps
    await setting.board.forget_worker("b")
    await controller.tick(1)
    assert set(await setting.held()) == {"dedicated", "a"}
    epoch = (await setting.board.leases("r1"))["a"].lease_epoch
    await beat(a="asleep", b="ready")
    await controller.tick(1)
    assert set(await setting.held()) == {"dedicated", "a"}
    assert (await setting.board.leases("r1"))["a"].lease_epoch == epoch


async def test_a_worker_is_lent_as_far_as_its_team_s_strictest_word_allows() -> None:
    setting = await Setting().begin(20)
    controller = setting.controller()
    for said, slots in (
        ({}, None),
        ({"*": "on"}, 4),
        ({"*": "on", "serving": "3"}, 3),
        ({"serving": "off"}, None),
        ({"serving": "on"}, 4),
        ({"*": "observe"}, None),
    ):
        for subject, word in said.items():
            await setting.board.set_lend(subject, word)
        await controller.tick(1)
        assert (await setting.held()).get("serving") == slots, said


async def test_the_plan_is_kept_with_its_reasons_and_changes_at_most_once_a_second() -> None:
    # Given a serving worker that its team does not lend
    clock, setting = HandClock(), await Setting().begin(20)
    await setting.board.set_lend("*", LendSetting(mode="off", said_by="ann", reason="incident 7"))
    controller = setting.controller(clock=clock)
    await controller.tick(1)
    first = await setting.board.plan()
    assert (first.controller_id, first.term) == ("c1", 1)
    assert {row.worker_id: (row.slot_count, row.run_id) for row in first.rows} == {
        "dedicated": (4, "r1"),
        "serving": (0, None),
    }
    assert "incident 7" in next(row.reason for row in first.rows if row.worker_id == "serving")
    assert [(run.open_count, run.dedicated_count, run.borrowed_count) for run in first.runs] == [(20, 4, 0)]
    # When that changes
    await setting.board.set_lend("*", "on")
    clock.now += 0.25
    await controller.tick(1)
    assert await setting.board.plan() == first
    # Then the plan says so within a second, and a plan that does not change is not written again
    clock.now += 1.0
    await controller.tick(1)
    second = await setting.board.plan()
    assert second.runs[0].borrowed_count == 4
    clock.now += 5.0
    await controller.tick(1)
    assert await setting.board.plan() == second


async def test_a_leader_that_was_replaced_writes_nothing_at_all() -> None:
    # Given a leader, and a successor that has ended the lease which it had granted
    setting = await Setting().begin(20, "on")
    old, new = setting.controller("old"), setting.controller("new")
    first = await setting.board.lead("old", 10)
    await old.tick(first)
    setting.tables.end_term()
    second = await setting.board.lead("new", 10_000)
    await setting.board.set_lend("*", "off")
    await new.tick(second)
    assert await setting.held() == {"dedicated": 4}
    before = (await setting.board.leases("r1"), setting.tables.assignments, await setting.board.plan())
    said = len(setting.tables.events)
    # When the old one goes on, of another opinion, and takes everyone for dead
    await setting.board.set_lend("*", "on")
    said += 1
    for name in setting.tables.workers:
        setting.tables.silence(name, 60_000)
    await old.tick(first)
    # Then nothing has changed, and nothing was written down
    assert before == (await setting.board.leases("r1"), setting.tables.assignments, await setting.board.plan())
    assert len(setting.tables.workers) == 2
    assert len(setting.tables.events) == said


async def test_a_new_leader_shuts_the_old_one_out_also_where_it_has_nothing_to_write() -> None:
    setting = await Setting().begin()
    await setting.board.create_run(RunConfig(run_id="r2", model="nobody's", environment="e"))
    first = await setting.board.lead("old", 10)
    setting.tables.end_term()
    await setting.controller("new").tick(await setting.board.lead("new", 10_000))

    epoch = first * EPOCHS_PER_TERM + 1
    late = Lease(worker_id="serving", run_id="r2", lease_epoch=epoch, slot_count=4, lease_until_ms=None)
    assert await setting.board.change_leases(first, [LeaseChange(lease=late)], {}) == [False]


async def test_a_worker_that_looks_at_another_run_is_told_again() -> None:
    # Given a standing lease whose worker was pointed elsewhere
    setting = await Setting().begin()
    controller = setting.controller()
    await controller.tick(1)
    setting.tables.assign("dedicated", "other")
    # When the next plan is carried out
    await controller.tick(1)
    # Then it finds its lease again
    assert setting.tables.assignments["dedicated"] == "r1"


async def test_runs_of_the_same_weights_have_leases_on_the_same_worker() -> None:
    # Given a worker that serves a run
    clock, setting = HandClock(), await Setting().begin(4)
    controller = setting.controller(clock=clock)
    await controller.tick(1)
    first = (await setting.board.leases("r1"))["dedicated"]
    # When another run has work, whose weights are the same
    await setting.board.create_run(RunConfig(run_id="a", model="m", environment="e"))
    for run_id in ("r1", "a"):
        setting.fabric.tables_of(run_id).head = (0, "0123")
    setting.demand(4, "a")
    clock.now += 1.0
    await controller.tick(1)
    # Then both have all its slots, the first one's lease is as before, and the worker goes on following its weights
    assert await setting.held() == {"dedicated": 4}
    assert (await setting.board.leases("a"))["dedicated"].slot_count == 4
    assert (await setting.board.leases("r1"))["dedicated"].lease_epoch == first.lease_epoch
    assert setting.tables.assignments["dedicated"] == "r1 a"
    assert {row.run_id: (row.open_count, row.dedicated_count) for row in (await setting.board.plan()).runs} == {
        "r1": (4, 4),
        "a": (4, 4),
    }
    # When its weights change, then one of them has the worker
    setting.fabric.tables_of("a").head = (1, "4567")
    await controller.tick(1)
    assert setting.tables.assignments["dedicated"] in ("r1", "a")
    held = {**await setting.held(), **await setting.board.leases("a")}
    assert set(held) == {"dedicated"}


async def test_a_guard_that_stays_shut_gives_the_worker_back_and_it_rests_afterwards() -> None:
    # Given a lent worker
    clock, setting = HandClock(), await Setting().begin(20, "on")
    controller = setting.controller(clock=clock)

    async def lent(guard_state: str, seconds: float) -> list[bool]:
        await setting.beat("serving", probe="vllm", guard_state=guard_state)
        found = []
        for _ in range(int(seconds / 0.25)):
            clock.now += 0.25
            await controller.tick(1)
            found.append("serving" in await setting.held())
        return found

    assert all(await lent("open", 1.0))
    # When its guard shuts, then a short while changes nothing, and a long one ends the lease
    assert all(await lent("shut", 2.0))
    assert all(await lent("open", 1.0))
    assert not (await lent("shut", 5.0))[-1]
    # And when it opens again, the worker is lent once it has rested
    after = await lent("open", 12.0)
    assert not any(after[: 4 * 6])
    assert after[-1]


# ---------------------------------------------------------------- what it tells of runs


def told(setting: Setting) -> list[tuple[str, str, str]]:
    return [(kind, facts["run_id"], facts["code"]) for kind, facts in setting.tables.events if kind.startswith("run.")]


async def test_a_run_that_stands_and_moves_again_is_told_once_each() -> None:
    # Given a run with work, a controller and no agent
    setting = await Setting().begin(3)
    setting.fabric.tables_of("r1").depth = 3
    await setting.beat("c1", "controller")
    clock = HandClock()
    controller = setting.controller(clock=clock)

    async def look(count: int) -> None:
        for _ in range(count):
            clock.now += 1.0
            await controller.tick(1)

    # When it is looked at again and again, then what keeps it is told once, and not at the first look
    await look(1)
    assert told(setting) == []
    await look(5)
    assert told(setting) == [("run.stands", "r1", "no_agent")]
    # And when an agent comes, that it moves
    await setting.beat("a", "agent", environments=["e"])
    await setting.beat("dedicated", run_id="r1", active_version=0)
    await look(3)
    assert told(setting)[1:] == [("run.moves", "r1", "moves")]


async def test_a_successor_tells_again_what_stands() -> None:
    setting = await Setting().begin()  # there is no agent
    setting.demand(3)
    setting.fabric.tables_of("r1").depth = 3
    for term in (1, 2):
        clock = HandClock()
        controller = setting.controller(f"c{term}", clock)
        for _ in range(3):
            clock.now += 1.0
            await controller.tick(term)
    assert [kind for kind, _, _ in told(setting)] == ["run.stands", "run.stands"]


async def test_the_plan_says_when_something_last_came_of_a_run() -> None:
    setting = await Setting().begin()
    controller = setting.controller()
    await controller.tick(1)
    (first,) = (await setting.board.plan()).runs  # type: ignore[union-attr]
    assert first.moved_at_ms > 0
    await setting.beat("d", "dedicated", run_id="r1", token_count=7)
    survey = await setting.board.survey()
    census = Census()
    begun = census.progress(survey)["r1"].moved_at_ms
    still = census.progress(dataclasses.replace(survey, now_ms=survey.now_ms + 500))
    assert still["r1"].moved_at_ms == begun, "nothing came"
    setting.fabric.tables_of("r1").count("turns_settled")
    later = dataclasses.replace(await setting.board.survey(), now_ms=survey.now_ms + 900)
    assert census.progress(later)["r1"].moved_at_ms == survey.now_ms + 900


async def test_whom_serving_s_router_should_spare_is_written_down_and_ends_with_demand() -> None:
    # Given four workers of a pool that two could carry
    clock = HandClock()
    setting = await Setting().begin(20)
    await setting.board.forget_worker("serving")
    seen = {"probe": "vllm", "guard_state": "open", "open_fraction": 1.0, "pool": "chat", "request_count": 2}
    for n in range(4):
        await setting.beat(f"s{n}", "serving", load_fraction=0.25, **seen)
    await setting.board.set_lend("*", "on")
    controller = setting.controller(clock=clock)
    # When some seconds pass
    for _ in range(40):
        clock.now += 0.25
        await controller.tick(1)
    # Then the advice to their router is in the plan: four requests each for two, and some for chance
    assert await advised(setting) == {"s0": 9, "s1": 9}
    # And one that is taken back returns by and by
    await setting.board.set_lend("s0", "off")
    for _ in range(16):
        clock.now += 0.25
        await controller.tick(1)
    assert 0 < (await advised(setting))["s0"] < 9
    # A successor begins from what it sees: nothing of an earlier term counts
    later = setting.controller("c2", clock)
    await later.tick(2)
    assert "s0" not in await advised(setting)
    # And nobody is spared, once the run has had no work for long
    setting.demand(0)
    for _ in range(31):
        clock.now += 10.0
        await later.tick(2)
    assert await advised(setting) == {}


async def advised(setting: Setting) -> dict[str, int]:
    plan = await setting.board.plan()
    assert plan is not None
    return plan.extra_requests


async def test_the_queue_is_told_of_unlike_hardware_and_of_a_run_that_was_made_again() -> None:
    clock = HandClock()
    setting = await Setting().begin(8)
    controller, told = setting.controller(clock=clock), setting.fabric.tables_of("r1")
    for name, prefill_us in (("dedicated", 40), ("d2", 280)):
        await setting.beat(name, "dedicated", hardware=name, prefill_us=prefill_us, decode_us=10_000)
    await controller.tick(1)  # leases
    assert told.read_costs == {}
    await controller.tick(1)
    assert told.read_costs == {"dedicated": -120, "d2": 120}
    told.read_costs = None  # the run was deleted, and made again
    clock.now += COSTS_S
    for name in ("dedicated", "d2"):
        await setting.beat(name, "dedicated", hardware=name, prefill_us=280 if name == "d2" else 40, decode_us=10_000)
    await controller.tick(1)
    assert told.read_costs
    await setting.beat("d2", "dedicated", hardware="dedicated", prefill_us=40, decode_us=10_000)
    await controller.tick(1)
    assert told.read_costs == {}
