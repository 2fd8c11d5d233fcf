"""Which groups are kept, and what replaces the others."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from rollfab.fabric.contract.errors import InputError
from rollfab.fabric.contract.ids import shard_of
from rollfab.fabric.contract.records import Group, RunConfig
from rollfab.fabric.ports.queue import Delivery, GroupPush
from rollfab.fabric.rules.filters import Refill, find_filter, has_varied_rewards
from rollfab.trainer import waiting as module
from rollfab.trainer.aio import AsyncRun
from rollfab.trainer.checks import make_groups
from rollfab.trainer.groups import Groups, Ledger, View
from rollfab.trainer.waiting import Waiting
from tests.standin.fabric import StandInFabric
from tests.support.records import rollout_of

RUN = RunConfig(run_id="r1", model="tiny", environment="frozenlake")
FULL = dataclasses.replace(RUN, trajectory_count_max=1)  # with one group


def group_with(*rewards: float) -> Group:
    (push,) = make_groups([{}], max(1, len(rewards)), ["g1"])
    made = [rollout_of(job, reward) for job, reward in zip(push.jobs, rewards, strict=False)]
    return Group(group_id="g1", task_id="t", rollouts=tuple(made))


def test_a_group_whose_rewards_are_all_equal_teaches_nothing() -> None:
    assert has_varied_rewards(group_with(0.0, 1.0))
    assert not has_varied_rewards(group_with(1.0, 1.0))
    assert not has_varied_rewards(group_with(1.0))
    assert not has_varied_rewards(group_with())


def test_an_unknown_filter_is_named_with_those_there_are() -> None:
    with pytest.raises(InputError, match=r"no group filter 'best': there are varied\. Or give"):
        find_filter("best")


def test_a_replacement_has_the_same_name_whenever_the_same_group_is_dropped() -> None:
    refill = Refill(tasks=iter(()))
    assert refill.name_of("g1") == "g1-r1"
    assert refill.name_of("g1-r1") == "g1-r2"
    long = [refill.name_of("x" * 62 + end) for end in "ab"]
    assert [len(name) for name in long] == [63, 63] and long[0] != long[1]
    assert refill.name_of(long[0])[:-1] == long[0][:-1]


@pytest.mark.parametrize("name", ["g1", "g1-r1", "a" * 63])
def test_a_replacement_is_in_the_shard_of_the_dropped_group(name: str) -> None:
    replacement = Refill(tasks=iter(()), shard_count=8).name_of(name)
    assert (shard_of(replacement, 8), len(replacement) < 64) == (shard_of(name, 8), True)


async def ended(*names: str, size: int = 1, run: RunConfig = RUN, **rewards: float) -> tuple[StandInFabric, Ledger]:
    """Groups whose trajectories have ended: all of a group with its reward, else 0, and the first with twice that."""
    fabric = StandInFabric()
    await fabric.board.create_run(run)
    ledger = Ledger(fabric.rollouts(run))
    await ledger.push(make_groups([{}] * len(names), size, list(names)))
    queue = fabric.trajectories(run)
    for claim in await queue.claim("a1", 100):
        reward = rewards.get(claim.job.group_id, 0.0) * (2 - min(claim.job.index, 1))
        assert await queue.settle(claim, rollout_of(claim.job, reward), is_scored=True)
    return fabric, ledger


def groups_of(fabric: StandInFabric, ledger: Ledger, keep: Any, tasks: Iterator[dict[str, Any]]) -> Groups:
    view = View(timeout=0.05, consumer="t", count=1, keep=keep)
    return Groups(ledger, view, Refill(tasks=tasks), waiting=Waiting(fabric.board, "r1"))


async def test_a_dropped_group_is_acknowledged_and_replaced_by_the_next_task() -> None:
    # Given a group whose rewards are all 0, and one whose rewards differ
    fabric, ledger = await ended("dull", "good", size=2, good=1.0)

    # When the trainer asks for varied groups, with tasks to refill from
    groups = groups_of(fabric, ledger, has_varied_rewards, iter([{"task_id": "next"}]))
    (kept,) = [group async for group in groups]

    # Then it gets the good one; the other is gone, and the next task runs in its place, in a group of the same size
    assert kept.group_id == "good"
    assert groups.dropped_count == 1
    assert "dull" in fabric.tables_of("r1").consumed
    waiting = await fabric.trajectories(RUN).claim("a1", 10)
    assert [claim.job.trajectory_id for claim in waiting] == ["dull-r1.0", "dull-r1.1"]
    assert waiting[0].job.task_id == "next"


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_group_is_replaced_once_by_one_task_also_where_dropping_it_is_interrupted(when: str) -> None:
    # Given a loop that is interrupted before the broker has swapped a group, or after it
    fabric, ledger = await ended("dull", "dull-too")
    tasks = iter([{"task_id": "first"}, {"task_id": "second"}])
    groups, swap = groups_of(fabric, ledger, has_varied_rewards, tasks), ledger.swap

    async def swap_and_stop(delivery: Delivery, push: GroupPush) -> bool:
        assert when == "before" or await swap(delivery, push)
        raise asyncio.CancelledError

    ledger.swap = swap_and_stop  # type: ignore[method-assign]
    with pytest.raises(asyncio.CancelledError):
        await anext(groups)
    ledger.swap = swap  # type: ignore[method-assign]

    # When the loop goes on
    with pytest.raises(StopAsyncIteration):
        await anext(groups)

    # Then each is replaced, by one task
    waiting = await fabric.trajectories(RUN).claim("a1", 10)
    found = {claim.job.group_id: claim.job.task_id for claim in waiting}
    assert found == {"dull-r1": "first", "dull-too-r1": "second"}


async def test_a_group_that_another_process_has_replaced_costs_no_task() -> None:
    """As where this one was taken for dead, and goes on with what it has received."""
    fabric, ledger = await ended("dull", "dull-too")
    await ledger.push(make_groups([{"task_id": "of another"}], 1, ["dull-r1"]))
    with pytest.raises(StopAsyncIteration):
        await anext(groups_of(fabric, ledger, has_varied_rewards, iter([{"task_id": "first"}])))
    waiting = await fabric.trajectories(RUN).claim("a1", 10)
    found = {claim.job.group_id: claim.job.task_id for claim in waiting}
    assert found == {"dull-r1": "of another", "dull-too-r1": "first"}


async def test_a_group_makes_room_for_what_replaces_it_where_the_run_is_full() -> None:
    fabric, ledger = await ended("dull", run=FULL)
    with pytest.raises(StopAsyncIteration):
        await anext(groups_of(fabric, ledger, has_varied_rewards, iter([{"task_id": "next"}])))
    waiting = await fabric.trajectories(FULL).claim("a1", 10)
    assert [(claim.job.group_id, claim.job.task_id) for claim in waiting] == [("dull-r1", "next")]
    assert "dull" in fabric.tables_of("r1").consumed


def broken_filter(group: Group) -> bool:
    raise ValueError(group.group_id)


def broken_tasks() -> Iterator[dict[str, Any]]:
    raise OSError("the file of tasks is gone")
    yield {}


async def interrupted(*_: object) -> None:
    raise asyncio.CancelledError


@pytest.mark.parametrize(
    ("error", "text", "run", "keep", "tasks", "swap"),
    [
        pytest.param(ValueError, "dull", RUN, broken_filter, lambda: iter(()), None, id="the filter fails"),
        pytest.param(OSError, "tasks is gone", RUN, has_varied_rewards, broken_tasks, None, id="the tasks fail"),
        pytest.param(
            asyncio.CancelledError, "", RUN, has_varied_rewards, lambda: iter([{}]), interrupted, id="it is interrupted"
        ),
    ],
)
async def test_a_group_whose_dropping_fails_comes_again(
    monkeypatch: pytest.MonkeyPatch, error: type, text: str, run: RunConfig, keep: Any, tasks: Any, swap: Any
) -> None:
    fabric, ledger = await ended("dull", run=run)
    with monkeypatch.context() as patch:
        if swap is not None:
            patch.setattr(ledger, "swap", swap)
        with pytest.raises(error, match=text or None):
            await anext(groups_of(fabric, ledger, keep, tasks()))

    again = await ledger.receive("t", 0.01)
    assert again is not None and (again.group.group_id, again.group.redelivered) == ("dull", True)


async def test_a_list_of_tasks_refills_as_an_iterator_does() -> None:
    fabric, _ = await ended("dull", "dull-too")
    run = AsyncRun(fabric, RUN)  # type: ignore[arg-type]

    assert [each async for each in run.groups(timeout=0.05, keep="varied", refill=[{"task_id": "next"}])] == []

    waiting = await fabric.trajectories(RUN).claim("a1", 10)
    assert [(each.job.trajectory_id, each.job.task_id) for each in waiting] == [("dull-r1.0", "next")]


async def test_a_loop_that_waits_for_its_refill_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "SAY_AFTER_S", 0.01)
    monkeypatch.setattr(module, "SAY_AGAIN_S", 0.01)

    # Given tasks whose next one is there only once the wait for it was told, and told again
    def slow() -> Iterator[dict[str, Any]]:
        while len(caplog.messages) < 2:
            time.sleep(0.001)
        yield {"task_id": "next"}

    fabric, ledger = await ended("dull", "good", size=2, good=1.0)
    assert (await anext(groups_of(fabric, ledger, has_varied_rewards, slow()))).group_id == "good"

    # Then the loop went on with that task, and is silent again
    claims = await fabric.trajectories(RUN).claim("a1", 10)
    assert {claim.job.task_id for claim in claims} == {"next"}
    told = [each for each in caplog.messages if "for the next task of the iterator" in each]
    assert len(told) >= 2 and told[0].startswith("run 'r1': the loop has waited for ")
    assert all(thread.name != "rollfab-refill" or not thread.join() for thread in threading.enumerate())
