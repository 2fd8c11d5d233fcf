"""Which groups are kept, and what replaces the others."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from rollfab.fabric.contract.errors import InputError, QueueFull
from rollfab.fabric.contract.records import Group, RunConfig
from rollfab.trainer.aio import AsyncRun
from rollfab.trainer.checks import make_groups
from rollfab.trainer.filters import Refill, find_filter, has_varied_rewards
from rollfab.trainer.groups import Groups, Ledger, View
from rollfab.trainer.waiting import Waiting
from tests.standin.fabric import StandInFabric
from tests.support.records import rollout_of

RUN = RunConfig(run_id="r1", model="tiny", environment="frozenlake")


def group_with(*rewards: float) -> Group:
    (push,) = make_groups([{}], max(1, len(rewards)), ["g1"])
    made = [
        dataclasses.replace(rollout_of(job), reward=reward) for job, reward in zip(push.jobs, rewards, strict=False)
    ]
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
    assert len(refill.name_of("x" * 63)) == 63


async def settle(fabric: StandInFabric, rewards: dict[str, float]) -> None:
    queue = fabric.trajectories(RUN)
    for claim in await queue.claim("a1", 100):
        made = dataclasses.replace(rollout_of(claim.job), reward=rewards.get(claim.job.trajectory_id, 0.0))
        assert await queue.settle(claim, made, is_scored=True)


def groups_of(fabric: StandInFabric, ledger: Ledger, view: View, refill: Refill | None = None) -> Groups:
    return Groups(ledger, view, refill, waiting=Waiting(fabric.board, "r1"))


async def test_a_dropped_group_is_acknowledged_and_replaced_by_the_next_task() -> None:
    # Given a group whose rewards are all 0, and one whose rewards differ
    fabric = StandInFabric()
    await fabric.board.create_run(RUN)
    ledger = Ledger(fabric.rollouts(RUN))
    await ledger.push(make_groups([{}, {}], 2, ["dull", "good"]))
    await settle(fabric, {"good.0": 1.0})

    # When the trainer asks for varied groups, with tasks to refill from
    view = View(timeout=0.05, consumer="t", count=1, keep=has_varied_rewards)
    groups = groups_of(fabric, ledger, view, Refill(tasks=iter([{"task_id": "next"}])))
    (kept,) = [group async for group in groups]

    # Then it gets the good one; the other is gone, and the next task runs in its place, in a group of the same size
    assert kept.group_id == "good"
    assert groups.dropped_count == 1
    assert "dull" in fabric.tables_of("r1").consumed
    waiting = await fabric.trajectories(RUN).claim("a1", 10)
    assert [claim.job.trajectory_id for claim in waiting] == ["dull-r1.0", "dull-r1.1"]
    assert waiting[0].job.task_id == "next"


async def test_a_filter_that_fails_leaves_the_group_to_be_delivered_again() -> None:
    fabric = StandInFabric()
    await fabric.board.create_run(RUN)
    ledger = Ledger(fabric.rollouts(RUN))
    await ledger.push(make_groups([{}], 1, ["g1"]))
    await settle(fabric, {})

    def broken(group: Group) -> bool:
        raise ValueError(group.group_id)

    groups = groups_of(fabric, ledger, View(timeout=0.05, consumer="t", count=1, keep=broken))
    with pytest.raises(ValueError, match="g1"):
        await anext(groups)
    again = await ledger.receive("t", 0.01)
    assert again is not None
    assert again.group.redelivered


async def test_a_group_that_cannot_be_replaced_comes_again() -> None:
    # Given a run that is full with the group that is not wanted
    fabric = StandInFabric()
    full = dataclasses.replace(RUN, trajectory_count_max=1)
    await fabric.board.create_run(full)
    ledger = Ledger(fabric.rollouts(full))
    await ledger.push(make_groups([{}], 1, ["dull"]))
    await settle(fabric, {})
    view = View(timeout=0.05, consumer="t", count=1, keep=has_varied_rewards)

    # When its replacement is refused, Then that is said, and the group is still there
    with pytest.raises(QueueFull):
        await anext(groups_of(fabric, ledger, view, Refill(tasks=iter([{}]))))
    again = await ledger.receive("t", 0.01)
    assert again is not None
    assert again.group.group_id == "dull"


async def test_a_list_of_tasks_refills_as_an_iterator_does() -> None:
    fabric = StandInFabric()
    await fabric.board.create_run(RUN)
    run = AsyncRun(fabric, RUN)  # type: ignore[arg-type]
    await run.submit([{}, {}], group_ids=["dull", "dull-too"])
    await settle(fabric, {})

    assert [each async for each in run.groups(timeout=0.05, keep="varied", refill=[{"task_id": "next"}])] == []

    waiting = await fabric.trajectories(RUN).claim("a1", 10)
    assert [(each.job.trajectory_id, each.job.task_id) for each in waiting] == [("dull-r1.0", "next")]


async def test_a_group_comes_again_where_the_tasks_to_refill_from_fail() -> None:
    # Given a group that is not wanted, and tasks that raise
    fabric = StandInFabric()
    await fabric.board.create_run(RUN)
    ledger = Ledger(fabric.rollouts(RUN))
    await ledger.push(make_groups([{}], 1, ["dull"]))
    await settle(fabric, {})

    def broken() -> Iterator[dict[str, Any]]:
        raise OSError("the file of tasks is gone")
        yield {}

    # When it is dropped, Then that is said, and the group is still there
    view = View(timeout=0.05, consumer="t", count=1, keep=has_varied_rewards)
    with pytest.raises(OSError, match="tasks is gone"):
        await anext(groups_of(fabric, ledger, view, Refill(tasks=broken())))
    again = await ledger.receive("t", 0.01)
    assert again is not None
    assert again.group.group_id == "dull"


async def test_a_group_whose_dropping_is_interrupted_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a trainer that is interrupted while it pushes the replacement
    fabric = StandInFabric()
    await fabric.board.create_run(RUN)
    ledger = Ledger(fabric.rollouts(RUN))
    await ledger.push(make_groups([{}], 1, ["dull"]))
    await settle(fabric, {})

    async def interrupted(_: object) -> None:
        raise asyncio.CancelledError

    view = View(timeout=0.05, consumer="t", count=1, keep=has_varied_rewards)
    with monkeypatch.context() as patch:
        patch.setattr(ledger, "push", interrupted)
        with pytest.raises(asyncio.CancelledError):
            await anext(groups_of(fabric, ledger, view, Refill(tasks=iter([{}]))))

    # When it goes on, Then the group is still there
    again = await ledger.receive("t", 0.01)
    assert again is not None
    assert again.group.group_id == "dull"
