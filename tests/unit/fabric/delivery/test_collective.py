"""Parts of the collective path that need neither torch nor another process."""

from __future__ import annotations

import asyncio
import dataclasses
import struct
from pathlib import Path

import pytest

from rollfab.fabric.contract.clock import SystemClock
from rollfab.fabric.delivery.collective.addresses import LOOPBACK, host_towards, node
from rollfab.fabric.delivery.collective.invitations import (
    CLOSED,
    PUBLISHER,
    Answer,
    CollectiveFailed,
    CollectiveOptions,
    Offer,
)
from rollfab.fabric.delivery.collective.meeting import Meeting
from rollfab.fabric.delivery.collective.round import Room
from rollfab.fabric.delivery.node_cache import ChunkCache
from rollfab.fabric.delivery.node_store import RelayedStore, default_capacity_bytes
from rollfab.fabric.format.manifest import WeightManifest
from rollfab.fabric.ports.weights import WeightStore
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


def a_meeting(broker: WeightStore, *, stall_s: float) -> Meeting:
    """The publisher's, of a round with members "first" and "second"."""
    facts = {"run_id": "run", "round_id": "round", "kind": "keyframe", "backend": "gloo", "host": "", "node": "here"}
    numbers = {"epoch": 1, "version": 0, "payload_bytes": 1, "answer_s": 1.0, "stall_s": stall_s}
    members = ["first", "second"]
    offer = Offer(**facts, **numbers, manifest_digest="", state=CLOSED, members=members, is_local=True)  # type: ignore[arg-type]
    room = Room(broker, CollectiveOptions(), SystemClock())
    return Meeting(room, offer, Answer(member=PUBLISHER, host="", node="here", keys={}))


def gloo_key(rank: int) -> bytes:
    return struct.pack("<Q", 4) + b"here" + struct.pack("<QH", 136, 2) + bytes([rank] * 134)


async def test_a_meeting_waits_for_what_others_say_and_no_longer_than_it_may() -> None:
    # Given a member that has told its key and waits for another's
    broker = StandInFabric().weights
    meeting = a_meeting(broker, stall_s=30.0)
    await meeting.set("0/0", gloo_key(0))
    waiting = asyncio.create_task(meeting.get(["0/1"]))

    # When that one answers with it, and a stranger with one of its own, then the member goes on
    for member, rank in (("stranger", 2), ("first", 1)):
        answer = Answer(member=member, host="", node="", keys={f"0/{rank}": gloo_key(rank).hex()})
        await broker.answer("run", "round", member, answer.encode(), 30.0)
    assert await waiting == {"0/1": gloo_key(1)}

    # And its own key is there for the others
    said = Answer.decode((await broker.answers("run", "round"))[PUBLISHER])
    assert said.keys == {"0/0": gloo_key(0).hex()}

    # And who says nothing is waited for as long as may be, and is named
    hasty = a_meeting(broker, stall_s=0.01)
    await hasty.set("0/0", gloo_key(0))
    with pytest.raises(CollectiveFailed, match=r"did not come within 0\.01 s: second$"):
        await hasty.get(["0/1", "0/2"])


def test_processes_of_one_machine_share_a_node_and_meet_by_loopback() -> None:
    assert node() == node() != ""
    assert host_towards("127.0.0.1") == LOOPBACK
