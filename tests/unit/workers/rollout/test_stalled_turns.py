"""A rollout worker whose engine hangs, crawls, answers late or is held: its turns go on elsewhere, with tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace

from rollfab.fabric.rules.queue.engine_watch import StallRule
from rollfab.workers.rollout.engine_watch import EngineWatch
from tests.sim.virtual_loop import VirtualClock
from tests.support.queue.played_worker import PlayedEngine, Stage
from tests.support.until import until
from tests.support.virtual_time import in_virtual_time

FAST = {"stall_s": 0.3, "log_s": 0.05}


def new_stage() -> Stage:
    return Stage(clock=VirtualClock(asyncio.get_running_loop()))


@asynccontextmanager
async def stepping(engine: PlayedEngine, step: Callable[[], None]) -> AsyncIterator[None]:
    """The engine makes steps by itself."""

    async def work() -> None:
        while True:
            step()
            await asyncio.sleep(0.01)

    task = asyncio.create_task(work())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@in_virtual_time
async def test_an_engine_that_hangs_loses_its_turns_with_their_tokens_and_says_so() -> None:
    # Given two turns with tokens that were never saved
    stage = new_stage()
    async with stage.at_work(2, 2, **{**FAST, "log_s": 60.0}) as names:
        stage.engine.step()

        # When the engine makes no step any more, and answers nothing
        stage.engine.is_deaf = True
        await until(lambda: stage.turns.returned)

        # Then both wait again, from where they were
        assert sorted(stage.turns.returned) == [(name, True) for name in names]
        assert {name: len(stage.logs[name].completion_ids) for name in names} == dict.fromkeys(names, 4)
        assert {record.loss for record in stage.table.records.values()} == {1}
        # and the worker says what is wrong, and takes nothing
        await until(lambda: stage.info.state == "failed")
        assert str(stage.info.error).startswith("engine made no step for")
        assert stage.ready == names


@in_virtual_time
async def test_an_engine_with_nothing_left_to_do_is_not_blamed_for_a_broker_that_is_away() -> None:
    # Given a turn that has ended, and cannot be handed in
    stage = new_stage()
    async with stage.at_work(1, 2, **FAST) as names:
        stage.turns.failing = set(names)
        stage.engine.step()
        stage.engine.end()
        # When that lasts for much longer than an engine may stand
        await asyncio.sleep(1.5)
        # Then the engine is well, and the turn is handed in once it can be
        assert (stage.info.state, stage.info.error, stage.turns.returned) == ("ready", None, [])
        stage.turns.failing = set()
        await until(lambda: stage.table.records[names[0]].state == "settled")


@in_virtual_time
async def test_an_engine_that_answers_again_is_tried_with_one_turn_until_it_steps() -> None:
    # Given an engine that hung with two turns
    stage = new_stage()
    async with stage.at_work(3, 2, **FAST):
        stage.engine.step()
        stage.engine.is_deaf = True
        await until(lambda: stage.info.state == "failed" and len(stage.ready) == 3)

        # When it answers again, then it gets one turn
        stage.engine.is_deaf = False
        await until(lambda: len(stage.engine.aborted) == 2)
        await until(lambda: stage.engine.turns)
        await until(lambda: stage.info.state == "ready")
        for _ in range(4):
            await asyncio.sleep(0.02)
            assert len(stage.engine.turns) == 1
        # and all that it has room for once it makes a step
        async with stepping(stage.engine, stage.engine.step):
            await until(lambda: len(stage.engine.turns) == 2)


async def test_an_engine_that_hangs_is_tried_once_it_has_stood_for_as_long_again_and_owes_no_answer() -> None:
    clock = SimpleNamespace(now_s=lambda: tick / 16)
    tick, engine = 0, PlayedEngine()
    watch = EngineWatch(engine, StallRule(stall_s=1.0), clock)  # type: ignore[arg-type]
    while not watch.is_hung:
        tick += 1
        watch.look(1)
    hung_at = tick

    # When its trial comes, then one turn may run, and none before
    tick = hung_at + 15
    assert watch.may_take(0) == 0 and watch.trouble is not None
    tick = hung_at + 16
    assert (watch.may_take(0), watch.may_take(1), watch.trouble) == (1, 0, None)
    # and none while it owes an answer, for which nobody waits
    engine.is_deaf = True
    assert await watch.abort(["r"]) == [] and watch.is_owing
    assert watch.may_take(0) == 0 and watch.trouble is not None
    engine.is_deaf = False
    await until(lambda: watch.may_take(0) == 1)


@in_virtual_time
async def test_an_engine_that_hung_only_for_a_while_goes_on_by_itself() -> None:
    stage = new_stage()
    async with stage.at_work(2, 2, **FAST) as names:
        stage.engine.step()
        stage.engine.is_deaf = True
        await until(lambda: stage.ready == names)
        stage.engine.is_deaf = False
        await until(lambda: len(stage.engine.aborted) == 2)
        async with stepping(stage.engine, stage.engine.step):
            await until(lambda: len(stage.engine.turns) == 2)
            # from the tokens that were made before
            assert stage.engine.prior_counts == dict.fromkeys(names, 4)
            stage.engine.end()
            results = await stage.turns.results("a", 1.0)
    assert {result.finish_reason for result in results} == {"length"}
    assert all(result.resumed for result in results)


@in_virtual_time
async def test_a_turn_that_crawls_goes_on_elsewhere_and_the_others_stay() -> None:
    # Given two turns of which one makes no tokens
    stage = new_stage()
    async with stage.at_work(2, 2, **FAST):
        lame, _ = list(stage.engine.token_counts)
        lame_turn = lame.split("#")[0]

        def step() -> None:
            count = stage.engine.token_counts.get(lame)
            stage.engine.step()
            if count is not None:
                stage.engine.token_counts[lame] = count

        async with stepping(stage.engine, step):
            await until(lambda: stage.turns.returned)

            # Then only that one is given back, as stalled
            assert stage.turns.returned == [(lame_turn, True)]
            assert stage.engine.aborted == [lame_turn]
            assert stage.table.records[lame_turn].loss == 1


def step_all_but(stage: Stage, still: Callable[[], set[str]]) -> Callable[[], None]:
    """Make steps in which some requests make no token, those of the turns that `still` returns."""

    def step() -> None:
        counts = dict(stage.engine.token_counts)
        stage.engine.step()
        for name in counts:
            if name.split("#")[0] in still():
                stage.engine.token_counts[name] = counts[name]

    return step


@in_virtual_time
async def test_turns_that_wait_in_line_for_their_prompt_have_not_stalled_until_one_passes_them() -> None:
    # Given three turns of which the first makes tokens, as the prompts of the others are not read yet
    stage = new_stage()
    stage.engine.first_count = 0
    still: set[str] = set()
    async with stage.at_work(3, 3, **{**FAST, "first_token_s": 0.3}) as names:
        still.update(names[1:])
        async with stepping(stage.engine, step_all_but(stage, lambda: still)):
            # When many times as long passes as a first token may take, then they still run
            await asyncio.sleep(3.0)
            assert stage.turns.returned == []
            # But not the second once the third has a token
            still.discard(names[2])
            await until(lambda: stage.turns.returned == [(names[1], True)])
            await asyncio.sleep(1.0)
            assert len(stage.turns.returned) == 1


@in_virtual_time
async def test_turns_that_were_put_back_for_want_of_room_have_not_stalled() -> None:
    # Given three turns with tokens, of which the engine puts the last one back
    stage = new_stage()
    still: set[str] = set()
    async with (
        stage.at_work(3, 3, **FAST) as names,
        stepping(stage.engine, step_all_but(stage, lambda: still)),
    ):
        await asyncio.sleep(0.2)
        still.add(names[2])
        stage.engine.waiting_count = 1
        await asyncio.sleep(3.0)
        assert stage.turns.returned == []
        # Where nobody waits, it is silent for no reason
        stage.engine.waiting_count = 0
        await until(lambda: stage.turns.returned == [(names[2], True)])


@in_virtual_time
async def test_a_turn_that_was_given_back_as_stalled_is_left_to_others_first() -> None:
    stage = new_stage()
    async with (
        stage.at_work(1, 1, **{**FAST, "poll_s": 0.4}) as (name,),
        stepping(stage.engine, lambda: stage.engine.step(0)),
    ):
        await until(lambda: stage.turns.returned)
        assert stage.ready == [name]
        others = await stage.turns.exchange("w", want=1, lease_epoch=1, active_version=0)
        assert [claim.job.turn_id for claim in others.claims] == [name]


@in_virtual_time
async def test_a_prompt_may_take_longer_to_read_than_a_token_to_make() -> None:
    # Given a turn that has no token yet, in an engine that steps
    stage = new_stage()
    stage.engine.first_count = 0
    async with (
        stage.at_work(1, 1, **{**FAST, "stall_s": 0.1, "first_token_s": 60.0}) as (name,),
        stepping(stage.engine, lambda: stage.engine.step(0)),
    ):
        # When many times the stall timeout has passed, then it still runs
        await asyncio.sleep(0.8)
        assert (stage.engine.turns, stage.turns.returned) == ([name], [])
        # but not after its first token
        stage.engine.step(1)
        await until(lambda: stage.turns.returned == [(name, True)])


@in_virtual_time
async def test_turns_of_an_engine_that_is_held_for_long_go_on_elsewhere_and_have_not_stalled() -> None:
    stage = new_stage()
    async with stage.at_work(2, 2, **FAST) as names:
        stage.engine.step()
        stage.engine.pauses = {"guard"}
        await until(lambda: stage.ready == names)
        assert sorted(stage.turns.returned) == [(name, False) for name in names]
        assert {record.loss for record in stage.table.records.values()} == {0}
        # Nothing is taken while it is held, and everything after it
        await asyncio.sleep(0.2)
        assert stage.ready == names
        assert stage.info.state == "ready"
        stage.engine.pauses = set()
        await until(lambda: len(stage.engine.turns) == 2)


@in_virtual_time
async def test_an_engine_that_answers_late_holds_up_neither_lease_nor_heartbeat() -> None:
    # Given an engine that hears nothing
    stage = new_stage()
    async with stage.at_work(1, 1, log_s=60.0) as (name,):
        stage.engine.is_deaf = True

        # When the lease ends, then the turn is given back all the same, with tokens that were never saved
        await stage.end_lease()
        await until(lambda: stage.ready == [name])
        assert len(stage.logs[name].completion_ids) == 3
        heard_ms = stage.fabric.tables.heard_ms["w"]
        await until(lambda: stage.fabric.tables.heard_ms["w"] > heard_ms)


@in_virtual_time
async def test_what_an_engine_makes_of_an_earlier_claim_is_never_handed_in_for_a_later_one() -> None:
    # Given a turn that was taken from a deaf engine, which still runs it, and claimed here again
    stage = new_stage()
    async with stage.at_work(1, 1, log_s=60.0) as (name,):
        stage.engine.is_deaf = True
        await stage.end_lease()
        await until(lambda: stage.ready == [name])
        stage.engine.step()
        await stage.lease(2, 1)
        await until(lambda: len(stage.engine.token_counts) == 2)

        # When both requests end
        stage.engine.end()
        (result,) = await stage.turns.results("a", 1.0)

    # Then the one of the later claim counts: three tokens from before, three of its own
    assert (len(result.completion_ids), result.resumed) == (6, True)
    assert stage.fabric.tables_of("r1").counters.get("refused", 0) == 0


@in_virtual_time
async def test_turns_that_could_not_be_given_back_are_given_back_when_the_broker_is_there_again() -> None:
    stage = new_stage()
    async with stage.at_work(2, 2) as names:
        stage.turns.refusal_count = 3
        await stage.end_lease()
        await until(lambda: stage.ready == names)
    assert {len(stage.logs[name].completion_ids) for name in names} == {3}
    assert sorted(stage.turns.returned) == [(name, False) for name in names]
