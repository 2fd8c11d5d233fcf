"""The desk: whether there is a run is said only after the runs were read."""

from __future__ import annotations

import asyncio

import pytest

from rollfab.fabric.contract.errors import BrokerError, QueueFull, RunUnknown
from rollfab.workers.agent import desk as desks
from rollfab.workers.agent.desk import Desk


async def test_a_run_that_was_just_made_is_waited_for_even_by_who_does_not_wait() -> None:
    desk = Desk()
    opening = asyncio.ensure_future(desk.open("new", wait_s=0.0))
    await asyncio.sleep(0)
    desk.follow(set())  # this reading began before the run was made
    await asyncio.sleep(0.01)
    assert not opening.done()
    desk.follow({"new"})
    await asyncio.sleep(0.01)
    desk.follow({"new"})
    with pytest.raises(QueueFull, match="no trajectory of run new"):
        await opening


async def test_a_run_that_two_readings_did_not_find_is_refused() -> None:
    desk = Desk()
    opening = asyncio.ensure_future(desk.open("mistyped", wait_s=60.0))
    for _ in range(2):
        await asyncio.sleep(0.01)
        desk.follow({"typed"})
    with pytest.raises(RunUnknown, match="no run 'mistyped'"):
        await opening


async def test_a_broker_that_is_away_is_not_taken_for_a_missing_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(desks, "RUNS_READ_S", 0.05)
    desk = Desk()
    with pytest.raises(BrokerError, match="could not be read"):
        await desk.open("there", wait_s=60.0)


async def test_a_broker_that_is_away_is_not_taken_for_a_run_without_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(desks, "ANSWER_S", 0.05)
    desk = Desk()
    desk.follow({"there"})
    with pytest.raises(BrokerError, match=r"no trajectory of run there came .* the broker has not answered"):
        await desk.open("there", wait_s=0.0)
