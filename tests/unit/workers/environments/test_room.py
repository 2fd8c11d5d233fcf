"""Is the memory for snapshots bounded in its sum, and does what finds no room cost nothing but itself?"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from rollfab.workers.environments import room as rooms
from rollfab.workers.environments.isolated import IsolatedEnvironment
from rollfab.workers.environments.registry import Registry
from rollfab.workers.environments.room import HELD_PER_BYTE, Room
from tests.unit.workers.agent.test_episode import Broker, run_through

ROOT = Path(__file__).parents[4]


async def test_never_is_more_held_than_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    # Given room for ten, and a hundred that want it at once
    room, held, most = Room(10 * HELD_PER_BYTE), 0, 0

    async def save() -> bool:
        nonlocal held, most
        with room.share() as share:
            if not await share.take(3):
                return False
            held, most = held + 3, max(most, held + 3)
            await asyncio.sleep(0)
            held -= 3
            return True

    assert all(await asyncio.gather(*(save() for _ in range(100))))
    assert most == 9


async def test_one_that_finds_no_room_for_a_while_is_refused_counted_and_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rooms, "WAIT_S", 0.01)
    room = Room(10 * HELD_PER_BYTE)
    with room.share() as first, room.share() as second:
        assert await first.take(8)
        with caplog.at_level(logging.WARNING):
            assert [await second.take(8) for _ in range(3)] == [False] * 3
        assert second.is_refused and room.refused_count == 3
    assert caplog.messages == ["snapshots.no_room"] * 2  # the first, the second, the fourth …
    with room.share() as third:
        assert await third.take(10**9), "one alone has all of it"


async def test_a_snapshot_without_room_is_read_past_and_its_world_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a world in a process, and no room
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(rooms, "WAIT_S", 0.01)
    async with Registry(["captive=tests.support.worlds.isolated_worlds:Captive"]) as registry:
        world = await registry.open("captive", {"turns": 3})
        assert isinstance(world, IsolatedEnvironment)
        await world.reset({}, 0)
        room = Room(HELD_PER_BYTE)
        with room.share() as all_of_it, room.share() as share:
            assert await all_of_it.take(1)
            # When it is asked for its snapshot, then there is none, and it answers the next call
            assert await world.snapshot_within(share) is None
            assert (await world.step("")).text == "."
        with room.share() as share:
            kept = await world.snapshot_within(share)
            assert kept is not None and kept["turn"] == 1
        await world.close()


def test_a_trajectory_whose_snapshots_find_no_room_goes_on_by_its_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    # Given an agent without room; when its lives end one after the other
    options = {"script": [["a", 0.0], ["b", 0.5], ["c", 1.0]]}
    whole = run_through("snapshot", options, Broker())
    monkeypatch.setattr(rooms, "WAIT_S", 0.001)
    monkeypatch.setattr(Room, "take", _refuse)
    broker = Broker(kills={5, 12})
    rollout = run_through("snapshot", options, broker)
    # Then the rollout is the same
    assert rollout.completion_ids.tolist() == whole.completion_ids.tolist()


async def _refuse(self: Room, size_bytes: int) -> bool:
    return False
