"""Turns that yield to a serving engine: which, when, and when turns are taken again. Played engine, virtual time."""

from __future__ import annotations

import asyncio

from rollfab.fabric.contract.records import Sampling
from rollfab.fabric.contract.sharing import GuardView
from rollfab.workers.rollout.turns import TurnSize
from rollfab.workers.rollout.yielding import YieldRule, overdue, too_many
from tests.sim.virtual_loop import VirtualClock
from tests.support.queue.played_worker import Stage
from tests.support.until import until
from tests.support.virtual_time import in_virtual_time

OPEN = GuardView(state="open", reason="")
NARROW = GuardView(state="narrow")
PATIENT = {"stall_s": 60.0, "poll_s": 0.25}


def size(name: str, *, made: int = 0, prompt: int = 10, most: int = 100, is_begun: bool = True) -> TurnSize:
    return TurnSize(
        request_id=name,
        context_tokens=prompt + made,
        reserve_tokens=prompt + most,
        token_count=made,
        is_begun=is_begun,
    )


# ---- the rules


def test_a_turn_waits_for_as_long_as_reading_its_context_again_takes() -> None:
    rule = YieldRule(yield_after_s=0.5, prefill_tokens_per_s=1000)
    turns = [size("short"), size("long", prompt=2000)]
    found = {shut_s: overdue(turns, shut_s, rule) for shut_s in (0.4, 0.5, 1.9, 2.0)}
    assert found == {0.4: [], 0.5: ["short"], 1.9: ["short"], 2.0: ["short", "long"]}


def test_those_with_the_least_tokens_go_first_and_of_these_the_youngest_until_the_rest_fits() -> None:
    turns = [size("much", made=40), size("old", made=5), size("young", made=5), size("some", made=20)]
    assert too_many(turns, 110) == [] == too_many([], 0)  # 50 + 15 + 15 + 30
    assert too_many(turns, 109) == ["young"]
    assert too_many(turns, 79) == ["young", "old", "some"]
    assert too_many(turns, 0) == ["young", "old", "some", "much"]


# ---- a worker


class PlayedGuard:
    """A guard that says what the test says, and counts for how long it has been shut."""

    def __init__(self) -> None:
        self.view: GuardView | None = OPEN
        self._shut_at_s = 0.0

    def shut(self) -> None:
        self.view, self._shut_at_s = GuardView(reason="a burst"), asyncio.get_running_loop().time()

    def limit(self, kv_tokens_max: int | None) -> None:
        self.view = GuardView(state="open", kv_tokens_max=kv_tokens_max)

    def __call__(self) -> GuardView | None:
        if self.view is None or self.view.state != "shut":
            return self.view
        shut_s = asyncio.get_running_loop().time() - self._shut_at_s
        return GuardView(reason=self.view.reason, shut_s=shut_s)


async def leased(guard: PlayedGuard, turn_count: int, slot_count: int = 8) -> tuple[Stage, list[str]]:
    """A stage whose turns have two tokens of prompt and make at most 16."""
    stage = Stage(clock=VirtualClock(asyncio.get_running_loop()))
    stage.guard = guard
    names = await stage.ask(turn_count, Sampling(max_tokens=16))
    await stage.lease(1, slot_count)
    return stage, sorted(names)


def kept(stage: Stage) -> dict[str, int]:
    """Tokens that are saved of each turn."""
    return {name: len(log.completion_ids) for name, log in stage.logs.items()}


@in_virtual_time
async def test_a_shut_guard_gives_all_turns_back_with_their_tokens_and_nothing_is_taken_while_it_is_shut() -> None:
    # Given two turns that have made tokens which nobody has saved
    guard = PlayedGuard()
    stage, names = await leased(guard, 3, slot_count=2)
    async with stage.worker(**{**PATIENT, "log_s": 60.0}):
        await until(lambda: len(stage.engine.turns) == 2)
        running = stage.engine.turns
        stage.engine.step()

        # When the guard shuts for a moment, then they stay
        guard.shut()
        await asyncio.sleep(YieldRule().yield_after_s - 0.1)
        assert (stage.engine.turns, stage.turns.returned) == (running, [])

        # When it stays shut, then they are back, from where they were, and have not stalled
        await asyncio.sleep(0.5)
        assert sorted(stage.turns.returned) == [(name, False) for name in running]
        assert kept(stage) == dict.fromkeys(running, 4)
        assert {record.loss for record in stage.table.records.values()} == {0}
        # and nothing is taken
        await asyncio.sleep(20.0)
        assert (stage.engine.turns, stage.ready) == ([], names)
        assert stage.info.state == "ready"

        # When it opens, then two run again, with their tokens
        guard.view = OPEN
        await asyncio.sleep(2.0)
        assert len(stage.engine.turns) == 2
        for _ in range(2):
            stage.engine.end()
            await asyncio.sleep(0.5)
        results = await stage.turns.results("a", 1.0)
    assert sorted(len(result.completion_ids) for result in results) == [3, 7, 7]


@in_virtual_time
async def test_after_a_long_shut_nothing_is_taken_until_it_has_been_open_for_a_while() -> None:
    guard = PlayedGuard()
    stage, _ = await leased(guard, 1)
    async with stage.worker(**PATIENT):
        await until(lambda: stage.engine.turns)
        # Given a turn that yielded
        guard.shut()
        await until(lambda: stage.ready)
        await asyncio.sleep(3.0)
        # When the guard opens, also if only for a moment, then it is left to others for as long as it has waited
        guard.view = OPEN
        await asyncio.sleep(0.3)
        guard.shut()
        await asyncio.sleep(3.0)
        guard.view = OPEN
        await asyncio.sleep(0.8)
        assert stage.engine.turns == []
        await asyncio.sleep(0.4)
        assert len(stage.engine.turns) == 1


@in_virtual_time
async def test_a_guard_that_was_shut_while_nothing_ran_is_trusted_at_once() -> None:
    guard = PlayedGuard()
    guard.shut()
    stage, _ = await leased(guard, 1)
    async with stage.worker(**PATIENT):
        await asyncio.sleep(30.0)
        guard.view = OPEN
        await asyncio.sleep(0.2)
        assert len(stage.engine.turns) == 1


@in_virtual_time
async def test_a_guard_that_flickers_does_not_keep_turns_away() -> None:
    guard = PlayedGuard()
    stage, _ = await leased(guard, 4, slot_count=4)

    async def flicker() -> None:
        while True:
            guard.shut()
            await asyncio.sleep(0.4)
            guard.view = OPEN
            await asyncio.sleep(0.15)
            stage.engine.step(0)

    task = asyncio.create_task(flicker())
    async with stage.worker(**PATIENT):
        await asyncio.sleep(5.0)
        assert (len(stage.engine.turns), stage.turns.returned) == (4, [])
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@in_virtual_time
async def test_an_engine_behind_a_shut_guard_is_not_hung_though_it_does_not_say_why_it_stands() -> None:
    guard = PlayedGuard()
    stage, _ = await leased(guard, 1)
    async with stage.worker(**{**PATIENT, "stall_s": 1.0, "first_token_s": 1.0}):
        # Given a turn so long that it may wait for 3 s before it yields
        await until(lambda: stage.engine.turns)
        stage.engine.step(30_000)
        await asyncio.sleep(0.6)
        guard.shut()
        for _ in range(50):
            await asyncio.sleep(0.1)
            assert stage.info.state == "ready"
        assert stage.turns.returned == [(stage.ready[0], False)]


@in_virtual_time
async def test_a_turn_without_tokens_behind_a_narrow_guard_goes_on_elsewhere_without_blame() -> None:
    for view, is_blamed in ((NARROW, False), (OPEN, True)):
        guard = PlayedGuard()
        guard.view = view
        stage, names = await leased(guard, 1)
        async with stage.worker(**{**PATIENT, "stall_s": 1.0, "log_s": 0.05}):
            await until(lambda stage=stage: stage.engine.turns)
            stage.engine.step(1)
            for _ in range(30):
                await asyncio.sleep(0.1)
                stage.engine.step(0)
            assert stage.turns.returned[:1] == [(names[0], is_blamed)]


@in_virtual_time
async def test_a_budget_that_is_cut_gives_back_the_least_progress_and_the_others_go_on() -> None:
    # Given four turns, of which two have come far
    guard = PlayedGuard()
    stage, _ = await leased(guard, 4)
    async with stage.worker(**{**PATIENT, "log_s": 0.05}):
        await until(lambda: len(stage.engine.turns) == 4)
        counts = dict(zip(sorted(stage.engine.token_counts), (9, 4, 10, 5), strict=True))
        stage.engine.token_counts = dict(counts)
        stage.engine.step(0)
        far = [name.split("#")[0] for name, count in counts.items() if count > 5]
        await asyncio.sleep(0.3)

        # When the budget is cut to what these two hold, then the others are given back with their tokens
        guard.limit(11 + 12)
        await asyncio.sleep(0.3)
        assert stage.engine.turns == sorted(far)
        assert sorted(kept(stage)[name] for name, _ in stage.turns.returned) == [4, 5]
        # and nothing is taken that would not fit
        await asyncio.sleep(4.0)
        assert len(stage.ready) == 2

        # When it grows, as many are taken as fit once the first of those that run has ended
        guard.limit(17 + 18 + 8)
        await asyncio.sleep(0.5)
        assert (len(stage.engine.turns), len(stage.turns.returned)) == (3, 2)
        guard.limit(None)
        await asyncio.sleep(0.5)
        assert len(stage.engine.turns) == 4


@in_virtual_time
async def test_turns_yield_without_waiting_for_the_next_round() -> None:
    guard = PlayedGuard()
    stage, _ = await leased(guard, 1)
    async with stage.worker(**{**PATIENT, "poll_s": 60.0}):
        await until(lambda: stage.engine.turns)
        guard.limit(0)
        await asyncio.sleep(0.2)
        assert len(stage.turns.returned) == 1


@in_virtual_time
async def test_room_in_a_budget_that_comes_free_is_filled_in_the_exchange_that_hands_in() -> None:
    guard = PlayedGuard()
    guard.limit(2 * 18)
    stage, _ = await leased(guard, 4)
    async with stage.worker(**PATIENT):
        await until(lambda: len(stage.engine.turns) == 2)
        await asyncio.sleep(1.0)
        stage.turns.exchanges.clear()
        stage.engine.end()
        await until(lambda: stage.engine.turns)
        assert [each for each in stage.turns.exchanges if each != (0, 0)] == [(2, 2)]


@in_virtual_time
async def test_a_budget_too_small_for_any_turn_is_tried_rarely_and_loses_nothing() -> None:
    guard = PlayedGuard()
    guard.limit(1)
    stage, names = await leased(guard, 3)
    stage.engine.first_count = 0  # not let in
    async with stage.worker(**PATIENT):
        await asyncio.sleep(14.0)
        assert 2 <= len(stage.turns.returned) <= 4
        assert {record.loss for record in stage.table.records.values()} == {0}
        guard.limit(0)
        await asyncio.sleep(20.0)
        assert (stage.ready, stage.engine.turns) == (names, [])


@in_virtual_time
async def test_a_budget_takes_turns_by_what_they_are_likely_to_make_and_gives_back_what_they_make_beyond() -> None:
    # Given turns that may make 16 tokens, in a budget for three of 10, of which the first ones made 8
    guard = PlayedGuard()
    guard.limit(3 * 10)
    stage, _ = await leased(guard, 12)
    async with stage.worker(**PATIENT):
        await until(lambda: len(stage.engine.turns) == 1)
        for _ in range(2):
            stage.engine.step(8 - stage.engine.first_count)
            stage.engine.end()
            await asyncio.sleep(0.5)
        # Then as many run as the budget has room for, and none has yielded
        assert (len(stage.engine.turns), stage.turns.returned) == (3, [])

        # When they make more, then as many yield as must, and go on elsewhere without blame
        stage.engine.step(10)
        await asyncio.sleep(0.5)
        assert len(stage.turns.returned) == 1
        assert {record.loss for record in stage.table.records.values()} == {0}


@in_virtual_time
async def test_a_worker_takes_no_more_turns_than_its_cache_has_room_for() -> None:
    # Given an engine with slots for 8, whose cache has room for three turns of 10
    stage, _ = await leased(PlayedGuard(), 12)
    stage.guard = None
    stage.engine.kv_capacity_tokens = 30
    async with stage.worker(**{**PATIENT, "log_s": 0.05}):
        # When nothing is known of their size, then it takes as before; the engine lets them wait
        await until(lambda: len(stage.engine.turns) == 8)
        stage.engine.step(8 - stage.engine.first_count)
        stage.engine.end()
        # When it has seen what they make, then it leaves the others to others
        await until(lambda: stage.engine.turns)
        await asyncio.sleep(2.0)
        assert len(stage.engine.turns) == 3
        # When they share most of what they hold, then it takes more
        stage.engine.step(2)
        stage.engine.kv_used_fraction = 3 / 30
        await asyncio.sleep(1.0)
        assert len(stage.engine.turns) == 4


@in_virtual_time
async def test_a_guard_that_is_not_up_yet_lets_nothing_be_taken() -> None:
    guard = PlayedGuard()
    guard.view = None
    stage, names = await leased(guard, 2)
    async with stage.worker(**PATIENT):
        await asyncio.sleep(5.0)
        assert stage.ready == names
        guard.view = OPEN
        await asyncio.sleep(1.0)
        assert stage.engine.turns == names
