"""The rollout worker over the stand-in: claims, leases and settling, with an engine that the test plays."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import numpy as np
import pytest

from rollfab.fabric.contract.errors import EngineError
from rollfab.fabric.contract.records import Lease
from rollfab.fabric.ports.queue import Exchange
from rollfab.fabric.rules.queue.placement import US_PER_TOKEN
from tests.sim.virtual_loop import VirtualClock
from tests.support.leases import set_lease
from tests.support.queue.played_worker import RUN, WORKER, Stage
from tests.support.until import until
from tests.support.virtual_time import in_virtual_time

PROMPT_TOKENS = 20_000


async def test_slots_that_come_free_are_filled_in_the_exchange_that_hands_in() -> None:
    # Given six turns for two slots, on a broker that has run each script once
    stage = Stage()
    async with stage.at_work(6, 2):
        stage.engine.end()
        await until(lambda: sum(claimed for _, claimed in stage.turns.exchanges) == 4)
        stage.turns.exchanges.clear()

        # When two end
        stage.engine.end()
        await until(lambda: stage.engine.token_counts)

        # Then one exchange hands both in and brings the other two
        assert [each for each in stage.turns.exchanges if each != (0, 0)] == [(2, 2)]
        stage.engine.end()
        results = await stage.turns.results("a", 1.0)
        await until(lambda: stage.table.held == {})
    assert results
    assert {len(each.completion_ids) for each in results} == {3}


@in_virtual_time
async def test_a_turn_that_its_home_does_not_take_is_taken_as_soon_as_it_may_be() -> None:
    # Given a turn that waits for another worker, which does not come, and a worker that learns of it as it begins
    stage = Stage(clock=VirtualClock(asyncio.get_running_loop()))
    other = Lease(worker_id="other", run_id="r1", lease_epoch=1, slot_count=8, lease_until_ms=None)
    await stage.fabric.board.create_run(RUN)
    await set_lease(stage.fabric.board, other, None)
    await stage.lease(1, 8)
    patience_s = PROMPT_TOKENS * US_PER_TOKEN / 1e6
    names = await stage.ask(1, prompt_ids=np.arange(PROMPT_TOKENS, dtype=np.int32), home="other")
    async with stage.worker(poll_s=60.0):
        # When it has waited for half of what reading it would take, then it is still the other one's
        await asyncio.sleep(patience_s / 2)
        assert stage.engine.turns == [] and stage.table.homed == names
        # but not for longer, though nobody rings and the worker looks by itself a minute later only
        await asyncio.sleep(patience_s)
        assert stage.engine.turns == names and stage.table.homed == []


async def test_what_a_failing_shard_did_not_take_is_handed_in_again() -> None:
    # Given two turns that end, one of them on a shard that fails, and others that wait
    stage = Stage()
    names = await stage.ask(4)
    await stage.lease(1, 3)
    stage.turns.failing = {names[0]}
    async with stage.worker():
        await until(lambda: len(stage.engine.token_counts) == 3)
        stage.engine.end()
        await until(lambda: stage.engine.turns == [names[3]])
        assert sorted(each.turn_id for each in await stage.turns.results("a", 1.0)) == names[1:3]

        # When the shard is well again
        stage.turns.failing = set()

        # Then it gets the result
        (result,) = await stage.turns.results("a", 5.0)
    assert (result.turn_id, result.finish_reason) == (names[0], "length")


async def test_a_new_epoch_of_the_same_lease_interrupts_nothing() -> None:
    # Given a turn that runs, and another worker's slots that would be free
    stage = Stage()
    async with stage.at_work(3, 1, heartbeat_s=30.0) as names:
        # When the lease is replaced, and the worker learns of it by being refused
        await stage.lease(2, 3)
        stage.engine.end()
        await until(lambda: len(stage.engine.token_counts) == 2)

        # Then it goes on under the new one: no turn given back, weights not fetched again
        assert stage.engine.aborted == []
        assert len(stage.receivers) == 1
        assert stage.engine.turns == sorted(names)[1:]


async def test_a_lease_that_ends_gives_turns_back_with_their_tokens() -> None:
    stage = Stage()
    async with stage.at_work(1, 1) as (name,):
        await stage.end_lease()
        await until(lambda: stage.ready == [name])
        assert stage.engine.aborted == [name]
        assert stage.logs[name].completion_ids.tolist() == [0, 1, 2]
        assert (stage.table.records[name].attempt, stage.table.records[name].loss) == (0, 0)


async def test_a_turn_that_has_ended_by_itself_is_handed_in_once_as_its_lease_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Given a turn that has ended, on a shard that takes nothing while the worker has its lease
    stage = Stage()
    exchange = stage.turns.exchange
    async with stage.at_work(1, 1) as (name,):

        async def late(worker_id: str, **asked: Any) -> Exchange:
            stage.turns.failing = {name} if "lease_epoch" in asked else set()
            return await exchange(worker_id, **asked)

        monkeypatch.setattr(stage.turns, "exchange", late)
        stage.engine.end()
        await until(lambda: (1, 0) in stage.turns.exchanges)
        # When the lease ends, then it is handed in, and not given back
        await stage.end_lease()
        await until(lambda: stage.table.records[name].state == "settled")
        await until(lambda: not stage.turns.failing)
        # and not again
        stage.turns.exchanges.clear()
        await stage.lease(2, 1)
        await until(lambda: stage.turns.exchanges)
        assert (stage.turns.exchanges[0], stage.turns.returned) == ((0, 0), [])


async def test_a_save_goes_on_behind_what_the_broker_has() -> None:
    # Given a turn whose first tokens are saved
    stage = Stage()
    async with stage.at_work(1, 1, log_s=0.01) as (name,):
        await until(lambda: name in stage.logs)
        # When it makes more, 300 of them at once
        for token_count, count in ((2, 5), (300, 305), (1, 306)):
            stage.engine.step(token_count)
            await until(lambda count=count: len(stage.logs[name].completion_ids) == count)
        # Then no part holds what another does, and they are all there is
        parts = [None if part is None else (part.start, len(part.completion_ids)) for part in stage.parts(name)]
        assert parts == [(0, 3), (3, 302), (305, 1)]
        assert stage.logs[name].completion_ids.tolist() == list(range(306))


async def test_a_worker_that_is_stopped_gives_turns_back_with_their_tokens() -> None:
    stage = Stage()
    async with stage.at_work(2, 2) as names:
        pass
    assert stage.ready == sorted(names)
    assert {len(log.completion_ids) for log in stage.logs.values()} == {3}
    assert WORKER not in stage.fabric.tables.workers


@pytest.mark.parametrize(("prefix_cache", "salt_count"), [("run", 1), ("trajectory", 2)])
async def test_turns_share_kv_cache_within_their_run_or_their_trajectory(prefix_cache: str, salt_count: int) -> None:
    # Given turns of two trajectories
    stage = Stage(dataclasses.replace(RUN, prefix_cache=prefix_cache))
    await stage.ask(2)
    await stage.lease(1, 2)
    # When a worker begins them
    async with stage.worker():
        await until(lambda: len(stage.engine.salts) == 2)
    # Then
    assert len(set(stage.engine.salts.values())) == salt_count and all(stage.engine.salts.values())


async def test_a_turn_that_the_engine_refuses_ends_as_an_error() -> None:
    stage = Stage()
    (name,) = await stage.ask(1)
    stage.engine.refused.add(name)
    await stage.lease(1, 1)
    async with stage.worker():
        (result,) = await stage.turns.results("a", 1.0)
    assert (result.finish_reason, result.error) == ("error", "too long")


async def test_no_turn_pays_for_an_engine_that_died() -> None:
    # Given a turn whose tokens so far are saved, and others that wait
    stage = Stage()
    await stage.ask(3)
    await stage.lease(1, 1)
    async with stage.worker(log_s=0.01) as task:
        await until(lambda: stage.logs)
        (running,) = stage.engine.turns

        # When the engine dies
        stage.engine.die()
        with pytest.raises(EngineError):
            await task

    # Then the worker ends, nothing is settled as an error, and what was saved is still there
    assert await stage.turns.results("a", 0.01) == []
    assert len(stage.ready) == 3
    assert stage.logs[running].completion_ids.tolist() == [0, 1, 2]
    assert {record.attempt for record in stage.table.records.values()} == {0}
