"""How a rollout worker learns of its lease: by the doorbell at once, by the heartbeat in the end, never by spinning."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from rollfab.fabric.contract.clock import SystemClock
from rollfab.fabric.contract.errors import BrokerError, EngineError
from rollfab.fabric.contract.records import Lease, RunConfig, WorkerInfo
from rollfab.fabric.contract.sharing import LendSetting
from rollfab.fabric.queue.board import RedisLeaseBoard
from rollfab.fabric.queue.keys import lease_bell
from rollfab.fabric.rules.queue.timings import Timings
from rollfab.workers.rollout.lease import LeaseKeeper, LeaseOptions
from tests.standin.broker import Broker, DirectClient
from tests.support.leases import end_lease, set_lease
from tests.support.queue.played_worker import WORKER, PlayedEngine, Stage
from tests.support.until import until

INFO = WorkerInfo(worker_id=WORKER, role="dedicated", pid=1, host="h", model="m", slot_count=4)
SERVING = replace(INFO, role="serving", pool="chat", running_count=2)
LEASE = Lease(worker_id=WORKER, run_id="r1", lease_epoch=1, slot_count=4, lease_until_ms=None)
FRIDAY_NOON_MS = 1_700_222_400_000  # 17 November 2023, 12:00 UTC


class OddBoard(RedisLeaseBoard):
    """Counts what it is asked; its doorbell is broken, or never stops ringing; it may not say what teams said."""

    def __init__(self) -> None:
        super().__init__(DirectClient(Broker()))
        self.beat_count = 0
        self.wait_count = 0
        self.error: BrokerError | None = None
        self.shown_ms: int | None = None  # what the broker machine's clock shows, if it is not the time
        self.is_mute = False
        self.has_bell = False

    async def heartbeat(self, info: WorkerInfo) -> Lease | None:
        self.beat_count += 1
        return await super().heartbeat(info)

    def ring(self) -> None:
        self._client.broker.carry_out(["RPUSH", lease_bell(WORKER), "1"])

    async def lends_of(self, worker_id: str, pool: str) -> tuple[dict[str, LendSetting], int]:
        if self.is_mute:
            raise BrokerError("the broker does not say what was said")
        said, wall_ms = await super().lends_of(worker_id, pool)
        return said, wall_ms if self.shown_ms is None else self.shown_ms

    async def wait_lease(self, worker_id: str, timeout_s: float) -> None:
        self.wait_count += 1
        if self.error is not None:
            raise self.error
        if self.has_bell:
            await super().wait_lease(worker_id, timeout_s)


async def keeper_on(
    board: OddBoard, *, heartbeat_s: float = 30.0, duration_ms: int | None = None
) -> tuple[LeaseKeeper, list[int]]:
    """A keeper of a lease of four slots, and what it has said of them."""
    await board.create_run(RunConfig(run_id="r1", model="m", environment="e"))
    await set_lease(board, LEASE, duration_ms)
    changes: list[int] = []
    options = LeaseOptions(worker_id=WORKER, heartbeat_s=heartbeat_s, retry_s=0.1)
    tools = {"tell": lambda: INFO, "changed": lambda: changes.append(keeper.slot_count), "timings": Timings("p")}
    keeper = LeaseKeeper(board, PlayedEngine(), options, SystemClock(), **tools)  # type: ignore[arg-type]
    return keeper, changes


@asynccontextmanager
async def at_work(*works: Callable[[], Coroutine[Any, Any, None]]) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(work()) for work in works]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_revoked_lease_is_known_long_before_the_next_heartbeat() -> None:
    # Given a worker that says hardly ever that it lives
    stage = Stage()
    async with stage.at_work(1, 1, heartbeat_s=3600.0):
        # When its lease ends, then its turn is back, and a new lease brings it here again
        await stage.end_lease()
        await until(lambda: stage.ready)
        await stage.lease(2, 1)
        await until(lambda: stage.engine.turns)


async def test_a_change_whose_ring_was_lost_is_known_by_the_next_heartbeat() -> None:
    board = OddBoard()
    keeper, changes = await keeper_on(board, heartbeat_s=0.02)
    async with at_work(keeper.beat):
        await until(lambda: keeper.slot_count == 4)
        await end_lease(board, LEASE)
        await until(lambda: keeper.slot_count == 0)
    assert changes == [4, 0]


async def test_neither_a_broken_nor_a_stuck_doorbell_makes_a_worker_spin() -> None:
    for error in (BrokerError("the broker is away"), None):
        board = OddBoard()
        board.error = error
        keeper, _ = await keeper_on(board)
        async with at_work(keeper.beat, keeper.listen):
            await asyncio.sleep(0.4)
        assert 1 <= board.wait_count <= 21  # 0.4 s at one ring in 20 ms
        assert 1 <= board.beat_count <= 21


async def test_a_bell_is_not_listened_to_before_the_heartbeat_that_it_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    board, gate = OddBoard(), asyncio.Event()
    keeper, _ = await keeper_on(board)
    beat = board.heartbeat

    async def late(info: WorkerInfo) -> Any:
        await gate.wait()
        return await beat(info)

    monkeypatch.setattr(board, "heartbeat", late)
    async with at_work(keeper.beat, keeper.listen):
        await asyncio.sleep(0.2)
        assert board.wait_count == 1
        gate.set()
        await until(lambda: board.beat_count > 0)
        gate.clear()
        await asyncio.sleep(0.2)
        assert board.wait_count <= board.beat_count + 1
        gate.set()
        await until(lambda: board.beat_count > 3)


async def test_a_lease_that_runs_out_holds_the_engine_though_the_broker_says_nothing() -> None:
    # Given a keeper that hears no more from the broker
    keeper, changes = await keeper_on(OddBoard(), heartbeat_s=3600.0, duration_ms=100)
    engine = keeper._engine
    async with at_work(keeper.beat, keeper.watch):
        # When the time of its lease is over, then the engine is held until the turns are given back
        await until(lambda: changes == [4, 0])
        assert (keeper.has_run_out, engine.pauses) == (True, {"lease"})
        await keeper.let_go()
        assert (keeper.has_run_out, engine.pauses) == (False, set())


async def test_a_lease_in_doubt_gives_no_slots_until_a_heartbeat_has_said_which_is_good() -> None:
    board = OddBoard()
    keeper, _ = await keeper_on(board)
    async with at_work(keeper.beat):
        await until(lambda: keeper.slot_count == 4)
        keeper.doubt()
        assert keeper.slot_count == 0
        await until(lambda: keeper.slot_count == 4)
    assert board.beat_count == 2


# ---------------------------------------------------------------- the team's word


class WitnessEngine(PlayedEngine):
    """Writes down when it is held and let go."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []
        self.pause_error = self.resume_error = ""

    async def pause(self, reason: str) -> None:
        self.said.append(f"pause {reason}")
        if self.pause_error:
            raise EngineError(self.pause_error)
        await super().pause(reason)

    async def resume(self, reason: str) -> None:
        self.said.append(f"resume {reason}")
        if self.resume_error:
            raise EngineError(self.resume_error)
        await super().resume(reason)


@dataclass
class Lent:
    """A serving worker's keeper, and the board that it listens to. Nobody leads: there is no controller."""

    board: OddBoard
    engine: WitnessEngine
    keeper: LeaseKeeper
    changes: list[int] = field(default_factory=list)

    async def say(self, word: str, subject: str = "*") -> None:
        """What its team says; wait until that is so."""
        await self.board.set_lend(subject, word)
        await until(lambda: self.keeper.slot_count == 4 if word == "on" else self.engine.pauses == {"switch"})


@asynccontextmanager
async def lent(info: WorkerInfo = SERVING, *, heartbeat_s: float = 3600.0) -> AsyncIterator[Lent]:
    """One that holds a lease of 4 slots, if its team lets it; heartbeats are rare: what it learns, a ring told it."""
    board, engine = OddBoard(), WitnessEngine()
    board.has_bell = True
    await board.create_run(RunConfig(run_id="r1", model="m", environment="e"))
    await board.heartbeat(info)
    await set_lease(board, LEASE, None)
    board.beat_count = 0
    options = LeaseOptions(worker_id=WORKER, heartbeat_s=heartbeat_s, retry_s=0.1)
    stage: Lent
    keeper = LeaseKeeper(
        board,
        engine,  # type: ignore[arg-type]
        options,
        SystemClock(),
        tell=lambda: info,
        changed=lambda: stage.changes.append(keeper.slot_count),
        timings=Timings("p"),
    )
    stage = Lent(board, engine, keeper)
    async with at_work(keeper.beat, keeper.listen, keeper.watch):
        await until(lambda: keeper.terms is not None or board.beat_count)
        yield stage


async def test_a_serving_worker_has_no_lease_before_its_team_has_spoken() -> None:
    async with lent() as stage:
        await until(lambda: stage.board.beat_count >= 1)
        assert (stage.keeper.lease, stage.keeper.slot_count) == (None, 0)
        assert stage.keeper.terms is not None and stage.keeper.terms.mode == "observe"
        await stage.say("on")
        assert stage.engine.said == ["pause switch", "resume switch"]  # it had turns that nobody had leave for


async def test_dedicated_workers_have_no_terms_and_no_switch_moves_them() -> None:
    async with lent(INFO) as stage:
        await until(lambda: stage.keeper.slot_count == 4)
        await stage.board.set_lend("*", "off")
        stage.board.ring()
        await until(lambda: stage.board.beat_count >= 2)
        assert (stage.keeper.terms, stage.keeper.slot_count, stage.engine.said) == (None, 4, [])


async def test_the_switch_holds_the_engine_and_takes_the_lease_though_the_broker_still_has_it() -> None:
    for word in ("off", "observe"):
        async with lent() as stage:
            await stage.say("on")
            stage.engine.said.clear()
            # When its pool is taken back
            await stage.say(word, "pool:chat")
            # Then it has no lease and does not get one, however often it asks, and is held once
            assert (stage.keeper.lease, stage.changes[-1]) == (None, 0)
            assert (await stage.board.leases("r1"))[WORKER].slot_count == 4
            stage.board.ring()
            count = stage.board.beat_count
            await until(lambda count=count: stage.board.beat_count > count)
            assert (stage.keeper.lease, stage.engine.said) == (None, ["pause switch"])
            # When it may lend again, then it is let go, once, and the lease is good again
            await stage.board.set_lend("pool:chat", "clear")
            await until(lambda: stage.keeper.slot_count == 4)
            assert stage.engine.said == ["pause switch", "resume switch"]


async def test_an_engine_that_has_nothing_to_do_is_not_held() -> None:
    async with lent(replace(SERVING, running_count=0)) as stage:
        await stage.board.set_lend("*", "observe")
        await until(lambda: stage.board.beat_count >= 3)
        assert stage.engine.said == []


async def test_a_cap_lowers_the_slots_at_once_and_no_cap_raises_them() -> None:
    async with lent() as stage:
        await stage.say("on")
        await stage.board.set_lend(WORKER, "3")
        await until(lambda: stage.keeper.slot_count == 3)
        assert stage.changes[-1] == 3
        await stage.board.set_lend("pool:chat", "9")
        await until(lambda: stage.board.beat_count >= 4)
        assert stage.keeper.slot_count == 3
        await stage.board.set_lend(WORKER, LendSetting(mode="on", compute_fraction_max=0.25, memory_fraction_max=0.1))
        await until(lambda: stage.keeper.slot_count == 4)
        assert stage.keeper.terms is not None
        assert (stage.keeper.terms.compute_fraction_max, stage.keeper.terms.memory_fraction_max) == (0.25, 0.1)


async def test_hours_end_by_the_broker_machine_s_time_though_it_says_no_more() -> None:
    async with lent(heartbeat_s=0.02) as stage:
        # Given that it is a moment before noon, when the hours end, by the broker machine's clock alone
        stage.board.shown_ms = FRIDAY_NOON_MS - 300
        await stage.board.set_lend("*", LendSetting(mode="on", hours=["fri 11:00-12:00"]))
        await until(lambda: stage.keeper.slot_count == 4)
        stage.board.is_mute = True
        # When noon has come, then it only observes
        await until(lambda: stage.engine.pauses == {"switch"})
        assert stage.keeper.terms is not None and "outside of its hours" in stage.keeper.terms.reason
        assert stage.keeper.slot_count == 0


async def test_a_team_that_cannot_be_heard_has_not_said_yes() -> None:
    async with lent(heartbeat_s=0.02) as stage:
        stage.board.is_mute = True
        await stage.board.set_lend("*", "on")
        await asyncio.sleep(0.1)
        assert stage.keeper.slot_count == 0


@pytest.mark.parametrize(
    ("error", "word", "said", "pauses"),
    [("pause_error", "off", "pause switch", {"switch"}), ("resume_error", "on", "resume switch", set())],
)
async def test_a_hold_is_asked_for_and_released_until_that_is_answered(
    error: str, word: str, said: str, pauses: set[str]
) -> None:
    async with lent(heartbeat_s=0.02) as stage:
        await stage.say("on")
        if word == "on":
            await stage.say("off")
        stage.engine.said.clear()
        setattr(stage.engine, error, "it is busy")
        await stage.board.set_lend("*", word)
        await until(lambda: stage.engine.said.count(said) >= 3)
        setattr(stage.engine, error, "")
        await until(lambda: stage.engine.pauses == pauses)
        count = len(stage.engine.said)
        await asyncio.sleep(0.1)
        assert len(stage.engine.said) == count


async def test_what_is_taken_back_again_is_held_again_though_it_never_said_that_it_was_let_go() -> None:
    async with lent(heartbeat_s=0.02) as stage:
        # Given an engine that was let go, and whose answer to that is still missing
        await stage.say("on")
        await stage.say("off")
        stage.engine.resume_error = "it is busy"
        await stage.board.set_lend("*", "on")
        await until(lambda: stage.engine.said[-1] == "resume switch")
        stage.engine.pauses.clear()  # late, but it was let go
        # When its team wants it back
        await stage.board.set_lend("*", "off")
        # Then it is held, and not only believed to be
        await until(lambda: stage.engine.pauses == {"switch"})


async def test_turns_of_a_worker_that_is_taken_back_return_with_their_tokens_and_none_is_begun() -> None:
    # Given a serving worker at work, and nobody who leads
    stage = Stage()
    await stage.ask(3)
    await stage.fabric.board.set_lend(WORKER, "on")
    await stage.lease(1, 2)
    async with stage.worker(role="serving", heartbeat_s=3600.0):
        await until(lambda: len(stage.engine.turns) == 2)
        stage.engine.step(4)
        # When its team wants it back
        await stage.fabric.board.set_lend(WORKER, "off")
        await until(lambda: len(stage.ready) == 3)
        # Then what it made is kept for whoever goes on, and it takes nothing though its lease stands
        assert {len(log.completion_ids) for log in stage.logs.values()} == {7}
        assert [stalled for _, stalled in stage.turns.returned] == [False, False]
        await asyncio.sleep(0.2)
        assert (stage.engine.turns, len(stage.ready), stage.engine.pauses) == ([], 3, {"switch"})
        # Until it lends again
        await stage.fabric.board.set_lend(WORKER, "on")
        await until(lambda: len(stage.engine.turns) == 2)
        assert stage.engine.pauses == set()


async def test_a_cap_on_slots_gives_back_the_youngest_turns_beyond_it_and_no_others() -> None:
    # Given a serving worker with four turns at work, and nobody who leads
    stage = Stage()
    names = sorted(await stage.ask(4))
    await stage.fabric.board.set_lend(WORKER, "on")
    await stage.lease(1, 4)
    async with stage.worker(role="serving", heartbeat_s=3600.0):
        await until(lambda: stage.engine.turns == names)
        # When its team says something that bounds no slots, then all go on
        await stage.fabric.board.set_lend(WORKER, LendSetting(mode="on", compute_fraction_max=0.5))
        await asyncio.sleep(0.2)
        assert (stage.engine.turns, stage.turns.returned) == (names, [])
        # When it bounds them, then those that began last go back, have not stalled, and are not taken again
        await stage.fabric.board.set_lend(WORKER, "2")
        await until(lambda: stage.engine.turns == names[:2])
        await asyncio.sleep(0.2)
        assert sorted(stage.turns.returned) == [(name, False) for name in names[2:]]
        assert (stage.engine.turns, stage.ready) == (names[:2], names[2:])
        # When it lifts the bound, then they are taken again
        await stage.fabric.board.set_lend(WORKER, LendSetting(mode="on"))
        await until(lambda: sorted(stage.engine.turns) == names)
