"""What a submit says that does not get through: exactly what was taken in, whatever stopped it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from redis.exceptions import OutOfMemoryError

from rollfab.fabric.contract.errors import BrokerError, BrokerFull, FabricError, InputError, QueueFull, RunUnknown
from rollfab.fabric.contract.records import RunConfig
from rollfab.fabric.ports.queue import GroupPush
from rollfab.fabric.queue import rollouts
from rollfab.fabric.queue.rollouts import RedisRolloutStream
from rollfab.trainer import groups as module
from rollfab.trainer.aio import AsyncRun
from tests.standin.fabric import StandInFabric

RUN = RunConfig(run_id="r1", model="tiny", environment="none", trajectory_count_max=1000)
PUSH_COUNT = 4  # groups a call of the port
NAMES = [f"g{index}" for index in range(10)]  # more than two calls


@pytest.fixture(autouse=True)
def few_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PUSH_COUNT", PUSH_COUNT)


async def open_run(config: RunConfig = RUN) -> tuple[StandInFabric, AsyncRun]:
    fabric = StandInFabric()
    await fabric.board.create_run(config)
    return fabric, AsyncRun(fabric, config)  # type: ignore[arg-type]


async def submit(run: AsyncRun, names: Sequence[str] = NAMES, size: int = 1, **wishes: Any) -> list[str]:
    return await run.submit([{}] * len(names), group_size=size, group_ids=names, timeout=0.05, **wishes)


def held(fabric: StandInFabric) -> list[str]:
    return list(fabric.tables_of("r1").groups)


async def refused(fabric: StandInFabric, run: AsyncRun, kind: type[FabricError], **wishes: Any) -> FabricError:
    """The error of a submit, whose text and facts say what the broker holds."""
    with pytest.raises(kind) as caught:
        await submit(run, **wishes)
    error = caught.value
    taken = held(fabric)
    assert error.facts["taken"] == taken
    assert error.facts["group_ids"] == wishes.get("names", NAMES)
    assert error.facts["doubtful"] == []
    assert sorted([*taken, *error.facts["refused"]]) == sorted(error.facts["group_ids"])
    count = len(error.facts["group_ids"])
    words = f"{len(taken)} of {count} groups of this submit were taken in" if taken else "nothing of this submit was"
    assert words in error.message
    return error


async def repeat(fabric: StandInFabric, run: AsyncRun) -> None:
    """The same again changes nothing twice, and takes the rest in."""
    assert await submit(run) == NAMES
    assert sorted(held(fabric)) == sorted(NAMES)
    assert fabric.tables_of("r1").depth == len(NAMES)
    assert fabric.tables_of("r1").counters["groups_submitted"] == len(NAMES)


async def test_a_run_that_is_full_says_what_is_in(monkeypatch: pytest.MonkeyPatch) -> None:
    fabric, run = await open_run(replace(RUN, trajectory_count_max=7))
    error = await refused(fabric, run, QueueFull)
    assert len(error.facts["taken"]) == 7
    await fabric.board.create_run(RUN)
    await repeat(fabric, run)


async def test_a_run_that_answers_requests_takes_no_tasks() -> None:
    """Its gateway would take them for requests, and nothing would be left of them."""
    _, run = await open_run(replace(RUN, environment="inference"))
    with pytest.raises(InputError, match="answers requests at `rollfab gateway --inference`, and plays no tasks"):
        await submit(run)


async def test_a_run_with_no_memory_left_says_what_is_in() -> None:
    fabric, run = await open_run(replace(RUN, memory_bytes_max=1_000))
    error = await refused(fabric, run, QueueFull)
    assert 0 < len(error.facts["taken"]) < len(NAMES)
    await fabric.board.create_run(RUN)
    await repeat(fabric, run)


async def test_a_run_with_too_many_dead_letters_says_that_nothing_is_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollouts, "DEAD_COUNT_MAX", 0)
    fabric, run = await open_run()
    assert "dead letters" in (await refused(fabric, run, QueueFull)).message


@pytest.mark.usefixtures("nobody_is_waited_for")
async def test_a_run_that_is_gone_says_that_nothing_is_in() -> None:
    fabric, run = await open_run()
    await fabric.board.delete_run("r1")
    await refused(fabric, run, RunUnknown)


async def test_a_group_that_can_never_fit_is_refused_before_anything_is_taken_in() -> None:
    fabric, run = await open_run(replace(RUN, trajectory_count_max=4))
    error = await refused(fabric, run, QueueFull, names=["a", "b"], size=5)
    assert held(fabric) == []
    assert error.facts["need"] == 5
    assert "may hold 4 trajectories, and the group has 5" in str(error) and "consume" not in str(error)


async def test_a_group_of_too_many_bytes_is_refused_without_waiting() -> None:
    fabric, run = await open_run(replace(RUN, memory_bytes_max=1_000))
    async with asyncio.timeout(5):
        with pytest.raises(QueueFull, match="1 of 2 groups of this submit were taken in"):
            await run.submit([{}, {"text": "x" * 2_000}], group_ids=["a", "b"], timeout=60.0)
    assert held(fabric) == ["a"]


async def test_a_broker_that_fills_up_in_the_middle_says_what_is_in(monkeypatch: pytest.MonkeyPatch) -> None:
    fabric, run = await open_run()
    carry_out = fabric.broker.carry_out

    def full(command: Sequence[Any]) -> Any:
        if len(held(fabric)) >= 5:
            raise OutOfMemoryError("command not allowed when used memory > 'maxmemory'.")
        return carry_out(command)

    with monkeypatch.context() as patch:
        patch.setattr(fabric.broker, "carry_out", full)
        error = await refused(fabric, run, BrokerFull)
    assert len(error.facts["taken"]) == 5
    await repeat(fabric, run)


@pytest.mark.parametrize("is_carried_out", [False, True])
async def test_a_broker_that_goes_away_in_the_middle_says_what_is_in_and_what_may_be(
    monkeypatch: pytest.MonkeyPatch, is_carried_out: bool
) -> None:
    # Given a broker that is gone with the second call, before or after it was carried out
    push, calls = RedisRolloutStream.push, []

    async def lost(self: Any, groups: Sequence[GroupPush]) -> list[bool]:
        calls.append(len(groups))
        if len(calls) == 2:
            if is_carried_out:
                await push(self, groups)
            raise BrokerError("the broker does not answer", reason="timeout")
        return await push(self, groups)

    fabric, run = await open_run()
    with monkeypatch.context() as patch:
        patch.setattr(RedisRolloutStream, "push", lost)
        with pytest.raises(BrokerError, match="4 of 10 groups of this submit were taken in, 4 more may") as caught:
            await submit(run)
    facts = caught.value.facts
    assert (facts["taken"], facts["doubtful"], facts["refused"]) == (NAMES[:4], NAMES[4:8], NAMES[8:])
    await repeat(fabric, run)


async def test_wherever_a_submit_is_cancelled_its_note_says_what_is_in(monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a broker that takes its time before and after it takes groups in
    push = RedisRolloutStream.push

    async def slow(self: Any, groups: Sequence[GroupPush]) -> list[bool]:
        for _ in range(3):
            await asyncio.sleep(0)
        taken = await push(self, groups)
        for _ in range(3):
            await asyncio.sleep(0)
        return taken

    monkeypatch.setattr(RedisRolloutStream, "push", slow)
    counts: set[int] = set()
    is_over = False
    for turns in range(100):
        # When it is cancelled after so many turns of the event loop
        fabric, run = await open_run()
        task = asyncio.create_task(submit(run))
        for _ in range(turns):
            await asyncio.sleep(0)
        is_over = task.done()
        if is_over:
            break
        task.cancel()
        with pytest.raises(asyncio.CancelledError) as caught:
            await task

        # Then its note says what is in, and nothing of it arrives later
        (note,) = getattr(caught.value, "__notes__", None) or ["nothing of this submit was taken in"]
        found = re.match(r"(\d+) of 10 groups of this submit were taken in", note)
        assert (int(found.group(1)) if found else 0) == len(held(fabric)), note
        assert "may have been" not in note
        counts.add(len(held(fabric)))
        await repeat(fabric, run)
    assert is_over
    assert counts == {0, 4, 8, 10}


async def test_what_was_refused_is_not_pushed_later_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PUSH_AGAIN_S", 0.0)
    fabric, run = await open_run(replace(RUN, trajectory_count_max=7))
    await refused(fabric, run, QueueFull)
    await fabric.board.create_run(RUN)
    for _ in range(3):
        assert [each async for each in run.groups(timeout=0.01)] == []
    assert len(held(fabric)) == 7


@pytest.mark.parametrize(
    "wishes", [{"consumer": ""}, {"consumer": 3}, {"consumer": "a\n"}, {"takeover": 0}, {"takeover": float("nan")}]
)
async def test_a_consumer_that_makes_no_sense_is_refused(wishes: dict[str, Any]) -> None:
    _, run = await open_run()
    (name,) = wishes
    with pytest.raises(InputError, match=f"groups: {name} is .*expected"):
        run.groups(**wishes)
