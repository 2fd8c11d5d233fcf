"""Joining from a peer's live weights: equal to what was published, or not taken."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import cast

import pytest

from rollfab.fabric.contract.errors import PeerLost
from rollfab.fabric.contract.wire import dump_json
from rollfab.fabric.delivery.node_store import RelayedStore
from rollfab.fabric.delivery.peer_copy import fetch_snapshot
from rollfab.fabric.delivery.relay_client import Connection
from rollfab.fabric.delivery.relay_frames import HELLO, MAGIC, VERSION, Word, frame, make_address
from rollfab.fabric.delivery.relay_options import RelayOptions
from rollfab.fabric.delivery.relay_server import LiveServer, RelayServer
from rollfab.fabric.versions.store import RedisWeightStore
from tests.standin.fabric import StandInFabric
from tests.support.processes.relay_nodes import FAST, RUN, LiveBits, Trainer, digest_of

BLOCK_COUNT = 4


@pytest.fixture
def store() -> RedisWeightStore:
    return StandInFabric().weights


@pytest.fixture
async def trainer(store: RedisWeightStore) -> Trainer:
    trainer = Trainer(store, BLOCK_COUNT)
    await trainer.publish(0)
    await trainer.publish(1)
    return trainer


@asynccontextmanager
async def peer(store: RedisWeightStore, source: LiveBits, options: RelayOptions = FAST) -> AsyncIterator[RelayServer]:
    server = RelayServer(RelayedStore(store, None), options=options)
    server.offer(RUN, source)
    await server.start()
    try:
        yield server
    finally:
        await server.close()


async def test_a_peers_snapshot_is_what_was_published(store: RedisWeightStore, trainer: Trainer) -> None:
    source = LiveBits(trainer.layout, trainer.bits, 1)
    async with peer(store, source) as server:
        manifest, bits = await fetch_snapshot(store, RUN, server.address, at_least_version=1, options=FAST)

    assert manifest.version == 1
    assert digest_of(trainer.layout, bits) == trainer.digest
    assert source.read_count == BLOCK_COUNT


@pytest.mark.parametrize("moves", [{3: 2}, {1: 2}, {2: 2, 3: 3}, {2: 3, 5: 4, 6: 5}])
async def test_a_peer_that_moves_meanwhile_is_copied_at_its_last_version(
    store: RedisWeightStore, trainer: Trainer, moves: dict[int, int]
) -> None:
    # Given versions to come, and a peer that commits some of them while it is read
    source = LiveBits(trainer.layout, trainer.bits, 1)
    states = {}
    for version in range(2, 6):
        await trainer.publish(version)
        states[version] = {name: array.copy() for name, array in trainer.bits.items()}

    def move() -> None:
        if source.read_count in moves:
            version = moves[source.read_count]
            source.commit(states[version], version)

    source.on_read = move
    async with peer(store, source) as server:
        manifest, bits = await fetch_snapshot(store, RUN, server.address, at_least_version=1, options=FAST)

    last = max(moves.values())
    assert manifest.version == last
    assert digest_of(trainer.layout, bits) == digest_of(trainer.layout, states[last])
    assert source.read_count == BLOCK_COUNT + len(moves)


class SlowTaker:
    """A stream whose other end takes everything, slowly."""

    def write(self, data: bytes) -> None:
        pass

    async def drain(self) -> None:
        await asyncio.sleep(0.02)


async def test_a_joiner_that_takes_too_little_is_dropped(trainer: Trainer) -> None:
    live = LiveServer(replace(FAST, slow_s=0.1, slow_bytes_per_s=1e12))
    live.offer(RUN, LiveBits(trainer.layout, trainer.bits, 1))

    with pytest.raises(PeerLost, match="took"):
        await live.serve(cast(asyncio.StreamWriter, SlowTaker()), {"run_id": RUN, "at_least_version": 1})


async def test_a_joiner_waits_while_the_peer_commits(store: RedisWeightStore, trainer: Trainer) -> None:
    source = LiveBits(trainer.layout, trainer.bits, 1)
    await trainer.publish(2)
    loop = asyncio.get_running_loop()

    def begin() -> None:
        if source.read_count == 2:
            source.is_committing = True
            loop.call_soon_threadsafe(loop.call_later, 2 * FAST.parent_stall_s, end)

    def end() -> None:
        source.commit(trainer.bits, 2)
        source.is_committing = False

    source.on_read = begin
    async with peer(store, source) as server:
        manifest, bits = await fetch_snapshot(store, RUN, server.address, at_least_version=1, options=FAST)

    assert manifest.version == 2
    assert digest_of(trainer.layout, bits) == trainer.digest


async def test_a_peer_that_never_stands_still_is_left(store: RedisWeightStore, trainer: Trainer) -> None:
    source = LiveBits(trainer.layout, trainer.bits, 1)
    source.on_read = lambda: source.commit({}, 1)
    patient = replace(FAST, stall_s=30.0, patience_s=60.0)  # it gives up by looks, of which it takes hundreds
    async with peer(store, source, patient) as server:
        with pytest.raises(PeerLost, match="not of one version"):
            await fetch_snapshot(store, RUN, server.address, at_least_version=0, options=patient)

        assert server.served_bytes < trainer.layout.byte_count / BLOCK_COUNT


async def test_a_peer_that_goes_back_is_left(store: RedisWeightStore, trainer: Trainer) -> None:
    source = LiveBits(trainer.layout, trainer.bits, 1)
    source.on_read = lambda: source.commit({}, 0) if source.read_count == 2 else None
    async with peer(store, source) as server:
        with pytest.raises(PeerLost, match="not of one version"):
            await fetch_snapshot(store, RUN, server.address, at_least_version=0, options=FAST)


async def test_a_peer_in_the_middle_of_a_commit_or_behind_serves_nothing(
    store: RedisWeightStore, trainer: Trainer
) -> None:
    source = LiveBits(trainer.layout, trainer.bits, 1)
    async with peer(store, source) as server:
        with pytest.raises(PeerLost, match="version 1"):
            await fetch_snapshot(store, RUN, server.address, at_least_version=2, options=FAST)
        with pytest.raises(PeerLost, match="other-run"):
            await fetch_snapshot(store, "other-run", server.address, at_least_version=0, options=FAST)
        source.is_committing = True
        with pytest.raises(PeerLost, match="no such version"):
            await fetch_snapshot(store, RUN, server.address, at_least_version=1, options=FAST)

    assert source.read_count == 0


async def test_a_peer_that_says_for_ever_that_it_is_busy_is_left(store: RedisWeightStore, trainer: Trainer) -> None:
    (manifest,) = await store.manifests(RUN, [(1, "delta")])
    assert manifest is not None
    facts = dump_json({"version": 1, "layout_digest": manifest.layout_digest})

    is_left = asyncio.Event()

    async def promise(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(frame(Word.HELLO, HELLO.pack(MAGIC, VERSION, bytes(16))) + frame(Word.LIVE, facts))
        while not writer.is_closing():
            writer.write(frame(Word.BUSY))
            await asyncio.sleep(0.05)
        writer.transport.abort()
        is_left.set()

    hasty = replace(FAST, patience_s=1000.0, slow_s=0.5)
    async with await asyncio.start_server(promise, "127.0.0.1", 0) as server:
        address = make_address("127.0.0.1", server.sockets[0].getsockname()[1], "secret")
        with pytest.raises(PeerLost, match="comes too slowly"):
            await fetch_snapshot(store, RUN, address, at_least_version=1, options=hasty)
        await is_left.wait()


async def test_a_peer_whose_weights_are_not_that_version_is_not_believed(
    store: RedisWeightStore, trainer: Trainer
) -> None:
    source = LiveBits(trainer.layout, trainer.bits, 1)
    source.arrays["w02"][77] ^= 1
    async with peer(store, source) as server:
        with pytest.raises(PeerLost, match="w02 differs"):
            await fetch_snapshot(store, RUN, server.address, at_least_version=1, options=FAST)
        source.version = 9
        with pytest.raises(PeerLost, match="version 9"):
            await fetch_snapshot(store, RUN, server.address, at_least_version=1, options=FAST)


async def test_a_peer_with_another_model_is_not_believed(store: RedisWeightStore, trainer: Trainer) -> None:
    other = Trainer(store, BLOCK_COUNT - 1)
    async with peer(store, LiveBits(other.layout, other.bits, 1)) as server:
        with pytest.raises(PeerLost, match="other tensors"):
            await fetch_snapshot(store, RUN, server.address, at_least_version=1, options=FAST)


async def test_only_so_many_join_at_a_time_and_the_others_are_told(store: RedisWeightStore, trainer: Trainer) -> None:
    source = LiveBits(trainer.layout, trainer.bits, 1)
    async with peer(store, source) as server:
        joins = [fetch_snapshot(store, RUN, server.address, at_least_version=1, options=FAST) for _ in range(5)]
        ends = await asyncio.gather(*joins, return_exceptions=True)

    refused = [end for end in ends if isinstance(end, PeerLost)]
    assert 1 <= len(refused) <= 5 - FAST.snapshot_count_max
    assert all("as many snapshots" in str(error) for error in refused)
    assert len(refused) + sum(isinstance(end, tuple) for end in ends) == 5


async def test_joiners_that_leave_half_way_make_room_for_others(store: RedisWeightStore, trainer: Trainer) -> None:
    source = LiveBits(trainer.layout, trainer.bits, 1)
    async with peer(store, source) as server:
        for _ in range(FAST.snapshot_count_max):
            joiner = await Connection.open(server.address, FAST)
            await joiner.ask_json(Word.SNAPSHOT, {"run_id": RUN, "at_least_version": 1})
            await joiner.answer(Word.LIVE)
            joiner.close()

        for _ in range(100):
            with contextlib.suppress(PeerLost):  # until the peer has noticed
                manifest, _ = await fetch_snapshot(store, RUN, server.address, at_least_version=1, options=FAST)
                break
            await asyncio.sleep(0.05)

    assert manifest.version == 1
