"""What the control plane promises, on Redis and in memory alike."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from rollfab.fabric.agreement import Agreement, AlarmRule, WorkerFigures
from rollfab.fabric.errors import RunMismatch, RunUnknown
from rollfab.fabric.records import Lease, WorkerInfo

from .conftest import World


def info(worker_id: str = "w1", **facts: object) -> WorkerInfo:
    return WorkerInfo(**{"worker_id": worker_id, "role": "dedicated", "pid": 1, "host": "h", **facts})  # type: ignore[arg-type]


def lease(epoch: int, slots: int = 4) -> Lease:
    return Lease(worker_id="w1", run_id="r1", lease_epoch=epoch, slot_count=slots, lease_until_ms=None)


async def test_creating_a_run_again_is_the_same_run(world: World) -> None:
    assert await world.board.create_run(world.run) == world.run
    assert list(await world.board.runs()) == ["r1"]


async def test_a_run_with_other_settings_is_refused_and_says_which(world: World) -> None:
    other = dataclasses.replace(world.run, environment="guess-the-number")
    with pytest.raises(RunMismatch, match="environment is 'frozenlake', not 'guess-the-number'"):
        await world.board.create_run(other)
    assert (await world.board.runs())["r1"].environment == "frozenlake"


async def test_settings_that_may_change_take_effect(world: World) -> None:
    await world.board.create_run(dataclasses.replace(world.run, staleness=5))
    assert (await world.board.runs())["r1"].staleness == 5


async def test_an_unknown_run_is_named(world: World) -> None:
    with pytest.raises(RunUnknown, match="'nope'"):
        await world.board.run_status("nope")
    with pytest.raises(RunUnknown, match="'nope'"):
        await world.board.delete_run("nope")


async def test_a_deleted_run_is_gone(world: World) -> None:
    await world.board.delete_run("r1")
    assert await world.board.runs() == {}
    with pytest.raises(RunUnknown):
        await world.board.run_status("r1")


async def test_the_last_agreement_of_a_run_is_kept_and_goes_with_it(world: World) -> None:
    row = WorkerFigures(worker_id="w1", policy_version=3, token_count=7)
    first = Agreement(policy_version=3, rule=AlarmRule(name="float32"), workers=(row,))
    second = dataclasses.replace(first, policy_version=4)
    assert (await world.board.run_status("r1")).agreement is None
    for agreement in (first, second):
        await world.board.set_agreement("r1", agreement)
        assert (await world.board.run_status("r1")).agreement == agreement
    await world.board.delete_run("r1")
    with pytest.raises(RunUnknown, match="'r1'"):
        await world.board.set_agreement("r1", first)
    await world.board.create_run(world.run)
    assert (await world.board.run_status("r1")).agreement is None


async def test_a_heartbeat_brings_the_lease(world: World) -> None:
    assert await world.board.heartbeat(info()) is None
    await world.board.set_lease(lease(7), None)
    held = await world.board.heartbeat(info(running_count=2))
    assert held is not None
    assert (held.run_id, held.lease_epoch, held.slot_count, held.remaining_ms) == ("r1", 7, 4, None)
    (seen, age_ms) = (await world.board.workers())["w1"]
    assert seen.running_count == 2
    assert 0 <= age_ms < 1000


async def test_a_lease_with_a_time_runs_out_by_the_broker_s_clock(world: World) -> None:
    await world.board.set_lease(lease(7), 100)
    held = await world.board.heartbeat(info())
    assert held is not None
    assert 0 < held.remaining_ms <= 100
    await asyncio.sleep(0.15)
    assert await world.board.heartbeat(info()) is None


async def test_an_ended_lease_is_not_brought(world: World) -> None:
    await world.board.set_lease(lease(7), None)
    await world.board.end_lease(lease(8))
    assert await world.board.heartbeat(info()) is None
    assert await world.board.leases("r1") == {}


async def test_one_controller_leads_and_its_successor_has_a_higher_term(world: World) -> None:
    first = await world.board.lead("c1", 100)
    assert first >= 1
    assert await world.board.lead("c2", 100) == 0
    assert await world.board.lead("c1", 100) == first
    await asyncio.sleep(0.15)
    assert await world.board.lead("c2", 100) > first
    assert await world.board.lead("c1", 100) == 0


async def test_a_forgotten_worker_is_not_listed(world: World) -> None:
    await world.board.heartbeat(info())
    await world.board.forget_worker("w1")
    assert await world.board.workers() == {}


async def test_the_serving_team_s_switch_is_kept(world: World) -> None:
    await world.board.set_lend("*", "on")
    await world.board.set_lend("w1", "3")
    assert await world.board.lends() == {"*": "on", "w1": "3"}


async def test_events_come_in_order_after_the_last_one_seen(world: World) -> None:
    await world.board.add_event("a", {"n": 1})
    await world.board.add_event("b", {"n": 2})
    first, second = await world.board.events("0-0", 10, 0.05)
    assert [first[1:], second[1:]] == [("a", {"n": 1}), ("b", {"n": 2})]
    assert await world.board.events(second[0], 10, 0.02) == []
