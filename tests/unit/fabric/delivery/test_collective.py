"""Parts of the collective path that need neither torch nor another process."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from pathlib import Path

import pytest

from rollfab.fabric.delivery.collective.addresses import LOOPBACK, host_towards, node
from rollfab.fabric.delivery.collective.invitations import CollectiveFailed
from rollfab.fabric.delivery.collective.meeting import Meeting
from rollfab.fabric.delivery.collective.side_thread import Progress, SideThread
from rollfab.fabric.delivery.node_cache import ChunkCache
from rollfab.fabric.delivery.node_store import RelayedStore, default_capacity_bytes
from rollfab.fabric.format.manifest import WeightManifest
from tests.standin.fabric import StandInFabric
from tests.support.weights.collective_versions import Versions


def a_version(version: int, chunk_count: int = 4) -> tuple[WeightManifest, list[bytes]]:
    return Versions("run", 1, chunk_count).next(version)


async def test_what_was_collected_is_asked_of_nobody_else_and_the_rest_is(tmp_path: Path) -> None:
    # Given a version of which the broker has all and the collective brought half
    manifest, chunks = a_version(0)
    broker = StandInFabric().weights
    await broker.put_chunks(manifest, 0, [chunks[0], chunks[1], b"of the broker", b"of the broker"])
    store, beside = (RelayedStore(broker, ChunkCache(tmp_path)) for _ in range(2))
    assert not await store.keep(manifest, {2: chunks[2]})
    assert not await store.keep(manifest, {3: chunks[3]})
    assert await store.keep(manifest, dict(enumerate(chunks[:2])))
    store.forget("run", 0)
    assert not await store.keep(manifest, {2: chunks[2], 3: chunks[3]})

    # When chunks are read, then each comes from where it is, in the order asked for
    assert await store.chunks(manifest, [3, 0, 2, 1]) == [chunks[3], chunks[0], chunks[2], chunks[1]]

    # And others of the node find them in its cache, also when they are live here
    store.forget("run", 0)
    assert (store.kept_bytes, await beside.chunks(manifest, [2, 3])) == (0, chunks[2:])


async def test_chunks_of_a_version_that_never_came_out_are_not_taken_for_those_of_its_successor() -> None:
    manifest, chunks = a_version(0)
    store = RelayedStore(StandInFabric().weights, None)
    assert await store.keep(manifest, dict(enumerate(chunks)))

    again = dataclasses.replace(manifest, chunk_hashes=["0" * 64, *manifest.chunk_hashes[1:]])

    assert await store.chunks(again, [0]) == [None]
    assert await store.chunks(manifest, [0, 1]) == chunks[:2]


async def test_the_collected_versions_stay_within_their_bytes_and_the_oldest_make_room() -> None:
    # Given room for two versions
    manifests = [dataclasses.replace(a_version(0)[0], version=version) for version in range(3)]
    chunks = dict(enumerate(a_version(0)[1]))
    size = sum(map(len, chunks.values()))
    store = RelayedStore(StandInFabric().weights, None, capacity_bytes=2 * size)

    # When a third comes
    assert all([await store.keep(manifest, chunks) for manifest in manifests])

    # Then the first has gone; one that could never fit is not kept; and what is live may be forgotten
    assert store.kept_bytes == 2 * size
    assert await store.chunks(manifests[0], [1]) == [None]
    assert await store.chunks(manifests[2], [1]) == [chunks[1]]
    tight = RelayedStore(StandInFabric().weights, None, capacity_bytes=size - 1)
    assert not await tight.keep(manifests[0], chunks)
    store.forget("run", 1)
    assert await store.chunks(manifests[1], [1]) == [None]
    assert store.kept_bytes == size
    store.forget("another", 2)
    assert store.kept_bytes == size


def test_the_bytes_kept_are_bounded_by_the_machine_unless_said_otherwise() -> None:
    assert RelayedStore(StandInFabric().weights, None).capacity_bytes == default_capacity_bytes() >= 8 << 30


def test_a_meeting_waits_for_what_others_say_and_no_longer_than_it_may() -> None:
    # Given a member that waits for another's key
    meeting = Meeting(lambda: None, patience_s=30.0)
    found: list[bytes] = []
    waiting = threading.Thread(target=lambda: found.append(meeting.get("0/1")))
    waiting.start()

    # When it is learned, then it goes on; its own keys are for the others
    meeting.set("0/0", b"mine")
    meeting.learn({"0/1": b"yours"})
    waiting.join()
    assert found == [b"yours"]
    assert meeting.own() == {"0/0": b"mine"}

    # And what nobody says is not waited for when the time is over, or the meeting is
    with pytest.raises(CollectiveFailed, match="0/2"):
        Meeting(lambda: None, patience_s=0.01).get("0/2")
    meeting.close("the board is gone")
    with pytest.raises(CollectiveFailed, match="the board is gone"):
        meeting.get("0/2")


async def test_work_that_is_stuck_is_left_behind_and_nothing_else_is_begun_until_it_is_through() -> None:
    # Given work that goes on for a while and then gets stuck
    thread, gate, steps = SideThread("stuck"), threading.Event(), list[int]()

    def work(progress: Progress) -> None:
        for _ in range(3):
            progress.step()
        gate.wait()
        progress.step()
        steps.append(1)

    # When nothing moves for longer than it may, then whoever waits goes on without it
    with pytest.raises(CollectiveFailed, match="nothing moved"):
        await thread.run(work, 0.05)
    assert thread.is_busy
    with pytest.raises(CollectiveFailed, match="earlier"):
        await thread.run(lambda progress: None, 1.0)

    # And once it gets loose, it ends at its next step
    gate.set()
    await thread.close(5.0)
    assert not thread.is_busy and steps == []
    assert await thread.run(lambda progress: "done", 1.0) == "done"


@pytest.mark.parametrize("error", [MemoryError("of the host"), RuntimeError("of the device"), SystemExit(1)])
async def test_whatever_goes_wrong_in_a_group_is_a_round_that_failed(error: BaseException) -> None:
    def work(progress: Progress) -> None:
        raise error

    with pytest.raises(CollectiveFailed, match=f"{type(error).__name__}: {error}") as caught:
        await SideThread("wild").run(work, 1.0)
    assert caught.value.__cause__ is error


async def test_a_machine_without_another_thread_fails_the_round_and_not_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    thread = SideThread("one too many")
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        with pytest.raises(CollectiveFailed, match="thread"):
            await thread.run(lambda progress: None, 1.0)

    assert await thread.run(lambda progress: "done", 1.0) == "done"
    await thread.close(1.0)


async def test_work_that_is_cancelled_ends_too() -> None:
    thread, gate, steps = SideThread("cancelled"), threading.Event(), list[int]()

    def work(progress: Progress) -> None:
        gate.wait()
        progress.step()
        steps.append(1)

    task = asyncio.create_task(thread.run(work, 30.0))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    gate.set()
    await thread.close(5.0)
    assert not thread.is_busy and steps == []


def test_processes_of_one_machine_share_a_node_and_meet_by_loopback() -> None:
    assert node() == node() != ""
    assert host_towards("127.0.0.1") == LOOPBACK
