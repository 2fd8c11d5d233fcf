"""What a trainer is told while it waits: soon, once, and never to end a loop that polls."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from rollfab.fabric.contract.errors import BrokerError, NothingMoves
from rollfab.fabric.contract.records import RunConfig, WorkerInfo
from rollfab.fabric.rules.filters import find_filter
from rollfab.trainer.checks import make_groups
from rollfab.trainer.groups import Groups, Ledger, View
from rollfab.trainer.waiting import SAY_AGAIN_S, Waiting
from tests.sim.virtual_loop import VirtualClock, on_virtual_time
from tests.standin.fabric import StandInFabric
from tests.support.virtual_time import in_virtual_time

RUN = RunConfig(run_id="r1", model="tiny", environment="frozenlake")


class Stage:
    """A run in memory, in virtual time; nobody works for it."""

    def __init__(self) -> None:
        self.fabric = StandInFabric(VirtualClock(asyncio.get_running_loop()))
        self.waiting = Waiting(self.fabric.board, "r1")

    async def begin(self, *, is_pushed: bool = True) -> Stage:
        await self.fabric.board.create_run(RUN)
        if is_pushed:
            await self.fabric.rollouts(RUN).push(make_groups([{"seed": 1}], 2))
        return self

    def groups(self, timeout: float | None) -> Groups:
        ledger = Ledger(self.fabric.rollouts(RUN))
        view = View(timeout=timeout, consumer="trainer", count=None, keep=find_filter(None))
        return Groups(ledger, view, waiting=self.waiting)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [row.getMessage() for row in caplog.records if row.name == "rollfab.trainer.waiting"]


def on_time(caplog: pytest.LogCaptureFixture, work: Coroutine[Any, Any, None]) -> list[str]:
    with caplog.at_level(logging.WARNING, "rollfab.trainer.waiting"):
        on_virtual_time(work)
    return said(caplog)


def test_a_loop_without_a_timeout_is_told_within_6_s_again_every_minute_and_when_the_cause_changes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def work() -> None:
        stage = await Stage().begin()
        waiting = asyncio.create_task(anext(stage.groups(None)))
        await asyncio.sleep(4.9)
        assert said(caplog) == []
        await asyncio.sleep(1.0)
        assert len(said(caplog)) == 1
        await asyncio.sleep(SAY_AGAIN_S - 5)
        assert len(said(caplog)) == 1
        await asyncio.sleep(10)
        assert len(said(caplog)) == 2
        stage.fabric.tables_of("r1").head_version = 0
        await asyncio.sleep(6)
        assert len(said(caplog)) == 3
        waiting.cancel()

    first, again, other = on_time(caplog, work())
    assert first.startswith("groups() has waited for 5 s: no weights of run 'r1' are published yet")
    assert "no weights" in again and "nothing works for run 'r1'" in other


@in_virtual_time
async def test_a_timeout_with_nothing_running_is_an_error_that_carries_every_cause() -> None:
    stage = await Stage().begin()
    with pytest.raises(NothingMoves, match="no group came within 6 s: no weights") as raised:
        await anext(stage.groups(6.0))
    assert raised.value.cause == "no_weights"
    assert [row["code"] for row in raised.value.facts["causes"]][:2] == ["no_weights", "nothing_started"]
    assert "run.publish" in raised.value.facts["step"]


@pytest.mark.parametrize("timeout", [0.05, 0.5, 3.0])
def test_a_loop_that_polls_is_never_ended_by_an_error_and_told_all_the_same(
    timeout: float, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        stage = await Stage().begin()
        for _ in range(int(7 / timeout)):
            groups = stage.groups(timeout)
            assert [each async for each in groups] == []
            assert groups.ended_why.startswith(f"no group came within {timeout:g} s")
        assert "no weights of run 'r1'" in groups.ended_why

    assert len(on_time(caplog, work())) == 1


@in_virtual_time
async def test_a_wait_in_which_something_ran_ends_quietly_though_it_stands_now() -> None:
    stage = await Stage().begin()
    groups = stage.groups(12.0)
    ending = asyncio.create_task(anext(groups, None))
    await asyncio.sleep(7.0)
    stage.fabric.tables_of("r1").count("tokens", 5)
    assert await ending is None
    assert "no weights of run 'r1'" in groups.ended_why
    with pytest.raises(NothingMoves):  # the next wait sees nothing come
        await anext(stage.groups(12.0))


@in_virtual_time
async def test_who_fell_silent_a_moment_ago_may_come_back_before_the_loop_is_ended_by_an_error() -> None:
    # Given a run whose trainer saw all workers at its last look, and then none
    stage = await Stage().begin()
    stage.fabric.tables_of("r1").head_version = 0
    for role in ("controller", "agent", "dedicated"):
        named = {"environments": ["frozenlake"]} if role == "agent" else {"model": "tiny"}
        info = WorkerInfo(worker_id=role, role=role, pid=1, host="h", slot_count=4, **named)  # type: ignore[arg-type]
        await stage.fabric.board.heartbeat(info)
    groups = stage.groups(5.0)
    assert [each async for each in groups] == []
    # When they are silent, Then its loop is told, and ended only half a minute later
    for _ in range(4):
        groups = stage.groups(6.0)
        assert [each async for each in groups] == []
        assert "nothing works for run 'r1'" in groups.ended_why
    with pytest.raises(NothingMoves, match="nothing works for run 'r1'"):
        await anext(stage.groups(6.0))


@in_virtual_time
async def test_a_run_with_nothing_to_do_ends_its_loop_quietly_and_says_why() -> None:
    groups = (await Stage().begin(is_pushed=False)).groups(8.0)
    assert [each async for each in groups] == []
    assert "nothing was submitted to run 'r1' yet" in groups.ended_why


@in_virtual_time
async def test_a_broker_that_cannot_be_asked_why_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = await Stage().begin()

    async def refuse(*, has_rewards: bool) -> None:
        raise BrokerError("no right to read this")

    monkeypatch.setattr(stage.fabric.board, "survey", refuse)
    groups = stage.groups(8.0)
    assert [each async for each in groups] == []
    assert groups.ended_why == "no group came within 8 s"


@in_virtual_time
async def test_a_wait_that_was_frozen_looks_once_more_before_it_ends() -> None:
    # Given a process that is frozen in its last wait, while a group comes
    stage, came = await Stage().begin(), SimpleNamespace(group=None)

    class Frozen(Ledger):
        asked_s: ClassVar[list[float]] = []

        async def receive(self, consumer: str, timeout_s: float, *, takeover_s: float) -> Any:
            self.asked_s.append(timeout_s)
            if len(self.asked_s) > 1:
                return came
            await asyncio.sleep(timeout_s + 12.0)
            return None

    view = View(timeout=1.0, consumer="trainer", count=None, keep=find_filter(None))
    found = await Groups(Frozen(stage.fabric.rollouts(RUN)), view, waiting=stage.waiting).receive()
    assert found is came and Frozen.asked_s[1] < 0.1
