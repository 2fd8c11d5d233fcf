"""Engines that sleep without a lease and wake for one: the rule, and a worker with a played engine on virtual time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollfab.fabric.rules.queue.engine_sleep import ActivationFacts, ActivationRule, Move, Rest, decide
from rollfab.fabric.rules.queue.engine_watch import StallRule
from rollfab.workers.engines.base import EngineStats
from rollfab.workers.rollout.engine_sleep import CHANGE_S
from rollfab.workers.rollout.engine_watch import EngineWatch
from rollfab.workers.rollout.report import WINDOW_S, PrefixHits
from tests.sim.virtual_loop import VirtualClock, on_virtual_time
from tests.support.queue.played_worker import WORKER, PlayedEngine, Stage
from tests.support.virtual_time import in_virtual_time

RULE = ActivationRule(sleep_after_s=5.0, retry_s=1.0, retry_s_max=8.0)


def facts(**facts: Any) -> ActivationFacts:
    return ActivationFacts(**{"rest": Rest.AWAKE, "has_lease": False, "is_in_use": False, "idle_s": 0.0, **facts})


# ---- the rule


@pytest.mark.parametrize(
    ("seen", "move"),
    [
        (facts(idle_s=5.0), Move.SLEEP),
        (facts(idle_s=4.9), Move.STAY),
        (facts(idle_s=99.0, has_lease=True), Move.STAY),
        (facts(idle_s=99.0, is_in_use=True), Move.STAY),
        (facts(idle_s=99.0, can_sleep=False), Move.STAY),
        (facts(rest=Rest.ASLEEP, idle_s=99.0), Move.STAY),
        (facts(rest=Rest.ASLEEP, has_lease=True), Move.WAKE),
        (facts(rest=Rest.FAILED, failure_count=1, quiet_s=0.9, has_lease=True), Move.STAY),
        (facts(rest=Rest.FAILED, failure_count=1, quiet_s=1.0), Move.WAKE),
        (facts(rest=Rest.FAILED, failure_count=3, quiet_s=3.9), Move.STAY),
        (facts(rest=Rest.FAILED, failure_count=3, quiet_s=4.0), Move.WAKE),
        (facts(rest=Rest.FAILED, failure_count=999, quiet_s=8.0), Move.WAKE),
    ],
)
def test_what_is_done_about_an_engine(seen: ActivationFacts, move: Move) -> None:
    assert decide(seen, RULE) is move


seen = st.builds(
    ActivationFacts,
    rest=st.sampled_from(Rest),
    has_lease=st.booleans(),
    is_in_use=st.booleans(),
    idle_s=st.floats(0, 1e6),
    can_sleep=st.booleans(),
    failure_count=st.integers(1, 9),
    quiet_s=st.floats(0, 1e6),
)


@given(seen)
def test_an_engine_sleeps_only_while_nobody_needs_it_and_wakes_whenever_somebody_does(seen: ActivationFacts) -> None:
    move = decide(seen, RULE)
    if move is Move.SLEEP:
        assert seen.rest is Rest.AWAKE and not seen.has_lease and not seen.is_in_use and seen.can_sleep
    if seen.rest is Rest.ASLEEP and seen.has_lease:
        assert move is Move.WAKE
    assert decide(seen, ActivationRule()) is not Move.SLEEP


# ---- a worker


def new_stage() -> Stage:
    return Stage(clock=VirtualClock(asyncio.get_running_loop()))


@in_virtual_time
async def test_a_worker_without_a_lease_puts_its_engine_to_sleep_and_a_lease_wakes_it_before_a_turn_begins() -> None:
    # Given a worker that was never leased
    stage = new_stage()
    await stage.ask(2)
    async with stage.worker(sleep_after_s=5.0):
        await asyncio.sleep(4.5)
        assert (stage.engine.is_asleep, stage.info.state, stage.info.waits_for) == (False, "ready", "a lease")
        await asyncio.sleep(1.0)
        assert (stage.engine.is_asleep, stage.info.state) == (True, "asleep")
        assert (stage.info.sleep_ms, stage.info.wake_ms, stage.info.engine) == (250, None, "played 1")
        assert stage.info.error is None

        # When it is leased, and its engine takes its time
        stage.engine.is_deaf = True
        await stage.lease(1, 2)
        await asyncio.sleep(3.0)

        # Then nothing is fetched and nothing claimed before it is awake
        assert (stage.engine.wake_count, stage.receivers, stage.turns.exchanges) == (1, [], [])
        assert stage.info.state == "loading"
        stage.engine.is_deaf = False
        await asyncio.sleep(0.5)
        assert len(stage.engine.turns) == 2 and len(stage.receivers) == 1
        assert (stage.info.state, stage.info.wake_ms) == ("ready", 1500)

        # And it stays awake for as long as it has the lease, and sleeps again after it
        stage.engine.end()
        await asyncio.sleep(30.0)
        assert stage.engine.sleep_count == 1
        await stage.end_lease()
        await asyncio.sleep(4.5)
        assert not stage.engine.is_asleep
        await asyncio.sleep(1.5)
        assert stage.engine.is_asleep


@in_virtual_time
async def test_a_worker_that_was_not_told_to_sleep_never_does() -> None:
    stage = new_stage()
    async with stage.worker(heartbeat_s=10.0):
        await asyncio.sleep(600.0)
    assert stage.engine.sleep_count == 0


@in_virtual_time
async def test_a_lease_that_comes_while_the_engine_falls_asleep_wakes_it_at_once() -> None:
    stage = new_stage()
    await stage.ask(1)
    async with stage.worker(sleep_after_s=1.0):
        stage.engine.is_deaf = True
        await asyncio.sleep(2.0)
        assert (stage.engine.sleep_count, stage.info.state) == (1, "asleep")
        await stage.lease(1, 1)
        await asyncio.sleep(1.0)
        assert stage.engine.wake_count == 0
        stage.engine.is_deaf = False
        await asyncio.sleep(0.5)
        assert len(stage.engine.turns) == 1


def test_an_engine_that_cannot_sleep_is_asked_once_and_stays_in_use(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        stage = new_stage()
        await stage.ask(1)
        stage.engine.can_sleep = False
        async with stage.worker(sleep_after_s=1.0):
            await asyncio.sleep(60.0)
            assert stage.engine.sleep_count == 1
            assert stage.info.sleep_note == "it has no bed: use another"
            assert (stage.info.state, stage.info.error, stage.info.sleep_ms) == ("ready", None, None)
            await stage.lease(1, 1)
            await asyncio.sleep(0.5)
            assert (stage.info.state, len(stage.engine.turns), stage.engine.wake_count) == ("ready", 1, 0)

    with caplog.at_level("INFO"):
        on_virtual_time(work())
    assert [record.message for record in caplog.records].count("engine.cannot_sleep") == 1


@in_virtual_time
async def test_an_engine_that_does_not_wake_uses_no_lease_says_why_and_is_tried_again() -> None:
    # Given an engine that sleeps, and will not wake
    stage = new_stage()
    await stage.ask(1)
    async with stage.worker(sleep_after_s=1.0, heartbeat_s=0.4):
        await asyncio.sleep(2.0)
        stage.engine.wake_error = "out of memory"
        await stage.lease(1, 1)
        await asyncio.sleep(0.5)

        # Then the worker is failed, with the reason, and claims nothing
        assert stage.info.state == "failed"
        assert stage.info.error == "the engine did not wake: out of memory"
        assert (stage.receivers, stage.turns.exchanges) == ([], [])

        # And when the controller has taken the lease away, it still tries, ever more rarely, until it is well
        await stage.end_lease()
        await asyncio.sleep(300.0)
        assert 8 <= stage.engine.wake_count <= 13
        stage.engine.wake_error = ""
        await asyncio.sleep(61.0)
        assert stage.info.error is None
        await stage.lease(3, 1)
        await asyncio.sleep(0.5)
        assert (stage.info.state, len(stage.engine.turns)) == ("ready", 1)


@in_virtual_time
async def test_an_engine_that_never_answers_its_waking_is_given_up() -> None:
    stage = new_stage()
    await stage.ask(1)
    async with stage.worker(sleep_after_s=1.0):
        await asyncio.sleep(2.0)
        stage.engine.is_deaf = True
        await stage.lease(1, 1)
        await asyncio.sleep(CHANGE_S - 1.0)
        assert stage.info.state == "loading"
        await asyncio.sleep(2.0)
        assert stage.info.error == "the engine did not wake: no answer within 120 s"


@in_virtual_time
async def test_a_worker_leaves_while_its_engine_falls_asleep() -> None:
    stage = new_stage()
    async with stage.worker(sleep_after_s=1.0) as task:
        stage.engine.is_deaf = True
        await asyncio.sleep(2.0)
        assert stage.engine.sleep_count == 1
    assert task.done() and WORKER not in stage.fabric.tables.workers
    assert [each for each in asyncio.all_tasks() if each.get_name() == "engine sleep"] == []


# ---- what is said of engines


@in_virtual_time
async def test_a_sleeping_engine_is_neither_hung_nor_held() -> None:
    clock = VirtualClock(asyncio.get_running_loop())
    engine = PlayedEngine()
    watch = EngineWatch(engine, StallRule(stall_s=1.0, first_token_s=2.0), clock)  # type: ignore[arg-type]

    async def look_for(seconds: float, running_count: int) -> None:
        for _ in range(int(seconds / 0.1)):
            await clock.sleep(0.1)
            watch.look(running_count)

    watch.is_asleep = True
    for pauses in ({"asleep"}, set()):
        engine.pauses = pauses
        await look_for(60.0, 1)
        assert (watch.is_hung, watch.is_held_long, watch.trouble) == (False, False, None)
    watch.is_asleep, engine.pauses = False, set()
    await look_for(1.0, 1)
    assert watch.may_take(0) is None
    await look_for(3.0, 1)
    assert watch.is_hung


@in_virtual_time
async def test_an_engine_with_long_steps_is_taken_for_hung_once_and_a_dead_one_within_bounds() -> None:
    clock = VirtualClock(asyncio.get_running_loop())
    engine = PlayedEngine()
    watch = EngineWatch(engine, StallRule(stall_s=1.0, first_token_s=12.0), clock)  # type: ignore[arg-type]

    async def hung_s(seconds: float) -> float:
        """How long it was taken for hung until its next step."""
        looks = []
        for _ in range(int(seconds / 0.1)):
            await clock.sleep(0.1)
            watch.look(1)
            looks.append(watch.is_hung)
        engine.step_count += 1
        watch.look(1)
        return sum(looks) * 0.1

    # Given an engine that reads long prompts: each step takes three seconds
    await hung_s(3.0)
    assert await hung_s(3.0) > 1.0
    assert [await hung_s(3.0) for _ in range(20)] == [0.0] * 20
    # When it makes no step any more, then that is seen after three times as long; and what was long is forgotten
    assert await hung_s(60.0) == pytest.approx(60.0 - 9.0, abs=0.5)
    assert await hung_s(60.0) == pytest.approx(60.0 - 12.0, abs=0.5)
    for _ in range(4000):
        await hung_s(0.1)
    assert await hung_s(3.0) > 1.0


@in_virtual_time
async def test_an_engine_held_by_limits_is_not_taken_for_hung() -> None:
    stage = new_stage()
    await stage.ask(1)
    await stage.lease(1, 1)
    async with stage.worker(stall_s=1.0, first_token_s=1.0):
        await asyncio.sleep(0.3)
        assert len(stage.engine.turns) == 1
        stage.engine.pauses = {"limits"}
        await asyncio.sleep(30.0)
        assert stage.info.state == "ready"
        assert stage.turns.returned == [(stage.turns.returned[0][0], False)]  # it goes on elsewhere, and lost nothing


@in_virtual_time
async def test_the_fraction_of_prompts_found_in_the_cache_is_that_of_recent_ones() -> None:
    clock = VirtualClock(asyncio.get_running_loop())
    hits = PrefixHits(clock)

    def look(prompt_count: int, cached_count: int) -> float | None:
        return hits.look(
            EngineStats(
                running_count=0,
                waiting_count=0,
                kv_used_fraction=0.0,
                step_count=0,
                token_count=0,
                active_version=0,
                prompt_token_count=prompt_count,
                cached_token_count=cached_count,
            )
        )

    assert look(0, 0) is None
    assert look(100, 0) == 0.0
    assert look(200, 50) == 0.25
    await clock.sleep(WINDOW_S)
    assert look(200, 50) == 0.25
    await clock.sleep(WINDOW_S)
    assert look(300, 150) == 1.0
    await clock.sleep(2 * WINDOW_S)
    look(300, 150)
    await clock.sleep(WINDOW_S)
    assert look(300, 150) is None
