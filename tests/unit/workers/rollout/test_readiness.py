"""KV memory that is handed over while nothing is lent: one worker with a played engine and memory, on virtual time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollfab.fabric.contract.errors import EngineError, EngineUnsupported
from rollfab.workers.rollout.engine_sleep import MEMORY_AFTER_S, Readiness
from tests.sim.virtual_loop import VirtualClock, on_virtual_time
from tests.support.queue.played_worker import WORKER, PlayedEngine, Stage
from tests.support.virtual_time import in_virtual_time

SOON_S = 0.5  # a worker looks four times a second


class PlayedMemory:
    """Memory of a played engine; writes down what it is asked, and refuses or fails as told."""

    def __init__(self, engine: PlayedEngine) -> None:
        self.calls: list[str] = []
        self.is_away = False
        self.refusal = self.error = ""
        self.take_s = 0.0
        self._engine = engine

    async def give_back(self) -> float:
        assert not self._engine.token_counts, "a turn runs"
        assert not self._engine.is_asleep, "there is nothing more to give"
        self.calls.append("give")
        if self.refusal:
            raise EngineUnsupported(self.refusal)
        self.is_away = True
        return 0.1

    async def take_again(self) -> float:
        assert not self._engine.is_asleep, "the engine wakes first"
        self.calls.append("take")
        await asyncio.sleep(self.take_s)
        if self.error:
            raise EngineError(self.error)
        self.is_away = False
        return 0.2


class EngineWithMemory(PlayedEngine):
    """Begins no turn without its memory."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = PlayedMemory(self)

    def generate(self, request: Any) -> None:
        assert not self.memory.is_away, "a turn without memory"
        super().generate(request)


def new_stage() -> tuple[Stage, EngineWithMemory, PlayedMemory]:
    engine = EngineWithMemory()
    stage = Stage(clock=VirtualClock(asyncio.get_running_loop()), engine=engine)
    stage.memory = engine.memory
    return stage, engine, engine.memory


@in_virtual_time
async def test_memory_goes_back_when_nothing_is_lent_and_is_here_before_a_turn_is_claimed() -> None:
    # Given a worker that has no lease
    stage, engine, memory = new_stage()
    await stage.ask(2)
    async with stage.worker():
        await asyncio.sleep(MEMORY_AFTER_S - 0.1)
        assert memory.calls == []
        await asyncio.sleep(SOON_S)
        assert (memory.calls, stage.info.state, stage.info.sleep_ms) == (["give"], "asleep", 100)

        # When it is leased, and its memory takes its time
        memory.take_s = 3.0
        await stage.lease(1, 2)
        await asyncio.sleep(2.5)

        # Then nothing is claimed before it is here
        assert (memory.calls, stage.turns.exchanges, stage.info.state) == (["give", "take"], [], "loading")
        await asyncio.sleep(1.0)
        assert (len(engine.turns), stage.info.wake_ms, stage.info.state) == (2, 200, "ready")

        # And it stays for as long as there is a lease
        await asyncio.sleep(60.0)
        assert memory.calls == ["give", "take"]


@in_virtual_time
async def test_a_lease_that_flickers_unmaps_nothing() -> None:
    stage, _, memory = new_stage()
    await stage.ask(1)
    async with stage.worker():
        for epoch in range(1, 21, 2):
            await stage.lease(epoch, 1)
            await asyncio.sleep(1.0)
            await stage.end_lease()
            await asyncio.sleep(1.0)
        assert memory.calls == []
        await asyncio.sleep(MEMORY_AFTER_S)
        assert memory.calls == ["give"]


@in_virtual_time
async def test_a_team_that_says_off_has_the_memory_soon_whatever_lease_there_is() -> None:
    stage, engine, memory = new_stage()
    await stage.ask(1)
    await stage.fabric.board.set_lend(WORKER, "on")
    await stage.lease(1, 1)
    async with stage.worker("serving"):
        await asyncio.sleep(5.0)
        assert (len(engine.turns), memory.calls) == (1, [])
        await stage.fabric.board.set_lend("*", "off")
        await asyncio.sleep(MEMORY_AFTER_S + SOON_S)
        assert (engine.turns, memory.calls) == ([], ["give"])


@in_virtual_time
async def test_an_engine_that_refuses_to_give_its_memory_is_asked_once_and_stays_in_use() -> None:
    stage, engine, memory = new_stage()
    memory.refusal = "no sleep mode: add -- --enable-sleep-mode"
    await stage.ask(1)
    async with stage.worker():
        await asyncio.sleep(60.0)
        assert (memory.calls, stage.info.sleep_note) == (["give"], memory.refusal)
        await stage.lease(1, 1)
        await asyncio.sleep(SOON_S)
        assert (len(engine.turns), stage.info.state, memory.calls) == (1, "ready", ["give"])


@in_virtual_time
async def test_without_its_memory_a_worker_claims_nothing_says_why_and_tries_ever_more_rarely() -> None:
    # Given memory that somebody else has taken
    stage, engine, memory = new_stage()
    await stage.ask(1)
    async with stage.worker():
        await asyncio.sleep(MEMORY_AFTER_S + SOON_S)
        memory.error = "out of memory"
        await stage.lease(1, 1)
        await asyncio.sleep(SOON_S)
        assert stage.info.state == "failed"
        assert stage.info.error == "the engine did not get its KV memory again: out of memory"
        await asyncio.sleep(300.0)
        assert 8 <= memory.calls.count("take") <= 13
        assert stage.turns.exchanges == []

        # When there is room again
        memory.error = ""
        for _ in range(610):
            if not engine.turns:
                await asyncio.sleep(0.1)
        await asyncio.sleep(SOON_S)
        assert len(engine.turns) == 1
        assert (stage.info.error, stage.info.state) == (None, "ready")


@pytest.mark.parametrize(("sleep_after_s", "gives"), [(10.0, ["give"]), (1.0, [])])
@in_virtual_time
async def test_a_sleeping_engine_gives_nothing_more_and_wakes_before_its_memory_is_taken(
    sleep_after_s: float, gives: list[str]
) -> None:
    stage, engine, memory = new_stage()
    await stage.ask(1)
    async with stage.worker(sleep_after_s=sleep_after_s):
        await asyncio.sleep(30.0)
        assert (engine.is_asleep, memory.calls) == (True, gives)
        await stage.lease(1, 1)
        await asyncio.sleep(1.0)
        assert (engine.is_asleep, memory.is_away, len(engine.turns)) == (False, False, 1)
        assert stage.info.wake_ms == 1500 + 200 * len(gives)


@in_virtual_time
async def test_an_engine_whose_memory_failed_does_not_fall_asleep_over_it() -> None:
    stage, engine, memory = new_stage()
    await stage.ask(1)
    async with stage.worker(sleep_after_s=10.0):
        await asyncio.sleep(MEMORY_AFTER_S + SOON_S)
        memory.error = "out of memory"
        await stage.lease(1, 1)
        await asyncio.sleep(SOON_S)
        await stage.end_lease()
        await asyncio.sleep(60.0)
        assert (engine.is_asleep, stage.info.state) == (False, "failed")
        memory.error = ""
        await asyncio.sleep(80.0)
        assert (engine.is_asleep, stage.info.state, stage.info.error) == (True, "asleep", None)


@settings(deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(1, 12)), max_size=30))
def test_memory_is_away_only_after_long_disuse_and_never_once_it_is_leased(
    history: list[tuple[bool, bool, int]],
) -> None:
    """history: whether there is a lease, whether the engine is in use, for how many looks of 0.25 s."""

    async def work() -> None:
        clock = VirtualClock(asyncio.get_running_loop())
        memory = PlayedMemory(PlayedEngine())
        readiness = Readiness(PlayedEngine(), clock, memory=memory, changed=lambda: None)
        unused_s = 0.0
        for has_lease, is_in_use, look_count in history:
            for look in range(look_count):
                is_used = is_in_use and not memory.is_away  # what has no memory is given nothing to do
                readiness.follow(has_lease=has_lease, is_in_use=is_used)
                unused_s = 0.0 if has_lease or is_used else unused_s
                await clock.sleep(0.25)
                unused_s += 0.25
                if memory.is_away:
                    assert unused_s >= MEMORY_AFTER_S and not readiness.is_awake
                assert not (has_lease and look > 0 and memory.is_away)
                assert memory.is_away or readiness.is_awake
                if unused_s > MEMORY_AFTER_S + 0.25:
                    assert memory.is_away
        await readiness.close()

    on_virtual_time(work())
