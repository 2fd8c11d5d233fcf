"""Relays among real sockets, cache files and stores: what crosses which edge, counted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from rollfab.fabric.contract.errors import DigestMismatch, PeerLost
from rollfab.fabric.delivery import node_cache as cache_module
from rollfab.fabric.delivery.node_cache import ChunkCache, ChunkName
from rollfab.fabric.delivery.node_store import RelayedStore
from rollfab.fabric.delivery.relay_client import Connection, RelayClient
from rollfab.fabric.delivery.relay_frames import FRAME, VERSION, Word, make_address, read_address
from rollfab.fabric.delivery.relay_parents import Parents
from rollfab.fabric.delivery.relay_server import RelayServer
from rollfab.fabric.format.manifest import Holder, WeightManifest, chunk_digest
from rollfab.fabric.opened import RedisFabric
from rollfab.fabric.versions import stage as stage_module
from rollfab.fabric.versions.reader import fetch_bits
from rollfab.workers.rollout.peer_copies import PeerSource
from tests.support.brokers.redis_server import redis_server
from tests.support.processes.relay_nodes import (
    FAST,
    HOME,
    RUN,
    CountingStore,
    Processes,
    Site,
    StepClock,
    Trainer,
    digest_of,
    file_names,
    read_chunks,
)

CHUNK_COUNT = 6


async def read_through(store: RelayedStore) -> str:
    """Fetch the head; returns the digest of what came."""
    manifest, bits = await fetch_bits(store, RUN)
    return digest_of(manifest.tensors, bits)


# ---------------------------------------------------------------- one node


async def test_eight_readers_of_a_node_fetch_each_chunk_once(site: Site) -> None:
    trainer = Trainer(site.broker)
    manifest = await trainer.publish(0)
    site.broker.delay_s = 0.02

    assert await asyncio.gather(*(read_through(site.node()) for _ in range(8))) == [trainer.digest] * 8

    assert sorted(site.broker.fetched) == [(0, "keyframe", index) for index in range(CHUNK_COUNT)]
    assert site.broker.chunk_bytes == manifest.payload_bytes


async def test_a_corrupt_file_is_fetched_again(site: Site, tmp_path: Path) -> None:
    trainer = Trainer(site.broker)
    await trainer.publish(0)
    store = site.node()
    await read_through(store)
    damaged = tmp_path / "node" / file_names(tmp_path / "node")[0]
    damaged.write_bytes(b"\0" * damaged.stat().st_size)

    assert await read_through(store) == trainer.digest
    assert len(site.broker.fetched) == CHUNK_COUNT + 1


async def test_what_the_broker_holds_corrupt_is_not_kept(site: Site, tmp_path: Path) -> None:
    trainer = Trainer(site.broker)
    await trainer.publish(0)
    site.broker.spoil = {1}
    store = site.node()

    with pytest.raises(DigestMismatch, match="chunk 1"):
        await read_through(store)

    assert len(file_names(tmp_path / "node")) == CHUNK_COUNT - 1
    site.broker.spoil = set()
    assert await read_through(store) == trainer.digest


@pytest.mark.parametrize("budget_bytes", [0, 10 << 20])
async def test_a_full_cache_costs_bytes_and_nothing_else(site: Site, tmp_path: Path, budget_bytes: int) -> None:
    trainer = Trainer(site.broker)
    await trainer.publish(0)
    stores = [site.node("node", budget_bytes) for _ in range(3)]

    assert await asyncio.gather(*map(read_through, stores)) == [trainer.digest] * 3

    kept_bytes = sum(file.stat().st_size for file in (tmp_path / "node").iterdir())
    assert kept_bytes <= budget_bytes + 1024


async def test_without_a_cache_everything_passes_through(site: Site) -> None:
    trainer = Trainer(site.broker)
    await trainer.publish(0)
    assert await read_through(RelayedStore(site.broker, None)) == trainer.digest
    assert len(site.broker.fetched) == CHUNK_COUNT


async def test_deltas_are_fetched_once_too_and_what_is_gone_is_said(site: Site, tmp_path: Path) -> None:
    trainer = Trainer(site.broker)
    await trainer.publish(0)
    manifest = await trainer.publish(1)
    stores = [site.node() for _ in range(3)]

    assert await asyncio.gather(*map(read_through, stores)) == [trainer.digest] * 3
    assert len(site.broker.fetched) == len(set(site.broker.fetched))
    for file in file_names(tmp_path / "node"):
        (tmp_path / "node" / file).unlink()
    await site.broker.drop(RUN, [manifest.link], manifest.epoch)

    assert await stores[0].chunks(manifest, [0]) == [None]


@pytest.mark.timeout(40)
def test_eight_processes_of_a_node_take_from_the_broker_what_one_takes(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server:
        published = asyncio.run(_publish(server.url))
        readers = Processes(tmp_path)
        client = Redis(port=server.port)
        try:
            sent_bytes = []
            for node, count in (("alone", 1), ("shared", 8)):
                node_lives = ChunkCache(tmp_path / node)  # or a reader done before the next has begun clears it away
                before = client.info("stats")["total_net_output_bytes"]  # type: ignore[index]
                for _ in range(count):
                    readers.start(server.url, tmp_path / node)
                assert readers.results(count) == [published] * count
                sent_bytes.append(client.info("stats")["total_net_output_bytes"] - before)  # type: ignore[index]
                node_lives.close()
        finally:
            readers.close()
            client.close()

    print(f"broker egress, 1 worker: {sent_bytes[0]:,} bytes; 8: {sent_bytes[1]:,}")
    assert sent_bytes[1] <= 1.1 * sent_bytes[0]


async def _publish(url: str) -> str:
    async with await RedisFabric.open(url, client_name="trainer") as fabric:
        trainer = Trainer(fabric.weights, 12)
        await trainer.publish(0)
        await trainer.publish(1)
        return await read_chunks(fabric.weights)


# ---------------------------------------------------------------- nodes and regions


class Node:
    """A cache, a relay, and the way up."""

    def __init__(self, site: Site, name: str, region: str) -> None:
        self.me = Holder(f"relay-{name}", -1, "soon", name, region)
        self.broker = CountingStore(site.broker.inner, delay_s=0.02)  # counts what this node takes from the broker
        parents = Parents(self.broker, self.me, home_region=HOME, options=FAST)
        self.store = site.node(name, broker=self.broker, parents=parents)

    async def start(self, site: Site) -> Node:
        self.server = await site.relay(self.store)
        await self.broker.hold(RUN, replace(self.me, version=0, address=self.server.address), 60)
        return self


async def test_each_region_is_crossed_once(site: Site) -> None:
    trainer = Trainer(site.broker)
    manifest = await trainer.publish(0)
    nodes = [await Node(site, *place).start(site) for place in (("a", HOME), ("b", "east"), ("c", "east"))]

    digests = await asyncio.gather(*(read_through(node.store) for node in nodes for _ in range(3)))

    assert digests == [trainer.digest] * 9
    assert [node.broker.chunk_bytes for node in nodes] == [manifest.payload_bytes, 0, 0]
    served = sorted(node.server.served_bytes for node in nodes)
    assert served == [0, manifest.payload_bytes, manifest.payload_bytes]
    assert nodes[0].server.served_bytes == manifest.payload_bytes


async def test_a_relay_that_may_not_fetch_gives_what_it_has(site: Site) -> None:
    manifest = await Trainer(site.broker).publish(0)
    store = site.node()
    server = await site.relay(store, may_fetch=False)
    await store.chunks(manifest, [2])

    got = await ask(server.address, manifest, [1, 2])

    assert {index: data is not None for index, data in got.items()} == {1: False, 2: True}


async def ask(address: str, manifest: Any, indices: Sequence[int]) -> dict[int, bytes | None]:
    client = RelayClient(address, FAST)
    try:
        return {index: data async for index, data in client.chunks(manifest, indices)}
    finally:
        client.close()


async def test_a_wrong_secret_opens_nothing(site: Site) -> None:
    manifest = await Trainer(site.broker).publish(0)
    server = await site.relay(site.node())
    host, port, secret = read_address(server.address)

    with pytest.raises(PeerLost, match="secret"):
        await ask(make_address(host, port, secret[::-1]), manifest, [0])

    assert server.served_bytes == 0
    assert len((await ask(server.address, manifest, [0]))[0] or b"") == manifest.chunk_bytes[0]


@pytest.mark.parametrize(
    "said",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"\x01\xff\xff\xff\xff",
        b"\x01\x1f\x00\x00\x00rollfab-relay" + (VERSION + 1).to_bytes(2, "little") + b"n" * 16,
        b"",
    ],
)
async def test_whoever_is_no_relay_of_ours_is_left(said: bytes) -> None:
    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(said)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(speak, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]

    with pytest.raises(PeerLost):
        await Connection.open(make_address("127.0.0.1", port, "secret"), FAST)

    server.close()


FOLD = b'{"run_id":"relayed","base_version":0,"version":40,"epoch":1}'


@pytest.mark.parametrize(
    ("word", "request_"),
    [
        (Word.CHUNKS, b"{}"),
        (Word.CHUNKS, b"not json"),
        (Word.CHUNKS, b"[]"),
        (Word.CHUNKS, b'{"run_id":"r","version":0,"kind":"k","epoch":1,"chunks":[[0,"../x",1,""]]}'),
        (Word.CHUNKS, b'{"run_id":"r","version":0,"kind":"k","epoch":1,"chunks":[[-1,"0123456789abcdef",1,""]]}'),
        (
            Word.CHUNKS,
            b'{"run_id":"r","version":0,"kind":"k","epoch":1,"chunks":[[8589934592,"0123456789abcdef",1,""]]}',
        ),
        (Word.CHUNKS, b'{"run_id":"r","version":0,"kind":"k","epoch":1,"chunks":[[0,"0123456789abcdef",1]]}'),
        (Word.CHUNKS, b'{"run_id":"r","version":1e999,"kind":"k","epoch":1,"chunks":[]}'),
        pytest.param(5, FOLD, id="a fold, as older ones ask for it"),
    ],
)
async def test_a_child_that_asks_nonsense_is_dropped_and_the_relay_serves_on(
    site: Site, word: int, request_: bytes
) -> None:
    manifest = await Trainer(site.broker).publish(0)
    server = await site.relay(site.node())
    connection = await Connection.open(server.address, FAST)

    connection._writer.write(FRAME.pack(word, len(request_)) + request_)
    with pytest.raises(PeerLost):
        await connection.next()

    connection.close()
    assert len(await ask(server.address, manifest, [0, 1])) == 2


class LyingStore(RelayedStore):
    """Serves other bytes than it was asked for."""

    async def cached(self, names: Sequence[ChunkName]) -> list[bytes | None]:
        return [bytes(name.size) for name in names]


async def test_a_lying_parent_delays_and_corrupts_nothing(site: Site) -> None:
    trainer = Trainer(site.broker)
    await trainer.publish(0)
    liar = await site.relay(LyingStore(site.broker, None), "liar")

    assert await read_through(site.node(parents=site.parents())) == trainer.digest

    assert liar.served_bytes > 0
    assert len(site.broker.fetched) == CHUNK_COUNT


@pytest.mark.parametrize(
    "address",
    [
        "relay://secret@" + "a" * 70 + ".example:1",
        "relay://secret@no\0host:1",
        "relay://secret@" + "a" * 5000 + ":1",
        "relay://secret@a b:1",
        "relay://secret@host:99999",
        "relay://se%20cret@127.0.0.1:1",
        "relay://secret@127.0.0.1:1",
        "http://127.0.0.1:1",
        "\N{SNOWMAN}" * 100,
    ],
)
async def test_a_holder_with_an_address_that_nobody_answers_costs_time_only(site: Site, address: str) -> None:
    trainer = Trainer(site.broker, tensor_count=1)
    await trainer.publish(0)
    await site.broker.hold(RUN, Holder("bad", 0, address, "bad", HOME), 60)

    assert await read_through(site.node(parents=site.parents())) == trainer.digest

    assert await PeerSource(site.broker, "me", FAST).version_above(RUN, trainer.layout, -1) is None


FORGED = b"forged: "


class ForgingStore(RelayedStore):
    """Gives the bytes that `forging` takes for the right ones."""

    async def cached(self, names: Sequence[ChunkName]) -> list[bytes | None]:
        return [FORGED + bytes(name.size - len(FORGED)) for name in names]


@pytest.fixture
def forging(monkeypatch: pytest.MonkeyPatch) -> Callable[[WeightManifest], None]:
    """Makes forged bytes have the fast digest of a chunk, as who wants to can make them within a millisecond."""

    def forge(manifest: WeightManifest) -> None:
        digests = dict(zip(manifest.chunk_bytes.tolist(), manifest.chunk_digests, strict=True))

        def fooled(data: bytes | memoryview) -> str:
            return digests[len(data)] if bytes(data[: len(FORGED)]) == FORGED else chunk_digest(data)

        monkeypatch.setattr(cache_module, "chunk_digest", fooled)
        monkeypatch.setattr(stage_module, "chunk_digest", fooled)

    return forge


@pytest.mark.parametrize("has_proofs", [True, False], ids=["with hashes", "of an older publisher"])
async def test_a_parent_that_forges_fast_digests_corrupts_nothing(
    site: Site, forging: Callable[[WeightManifest], None], has_proofs: bool
) -> None:
    # Given a version of one chunk, and a parent with other bytes of the same fast digest
    trainer = Trainer(site.broker, tensor_count=1)
    trainer.has_proofs = has_proofs
    manifest = await trainer.publish(0)
    assert manifest.has_proofs == has_proofs and len(manifest.chunk_bytes) == 1
    forging(manifest)
    forger = await site.relay(ForgingStore(site.broker, None), "forger")
    store = site.node(parents=site.parents())

    # When the version is read, and again out of the node's cache
    assert [await read_through(store) for _ in range(2)] == [trainer.digest] * 2

    # Then it was the broker's; what could not be proven was not even asked for
    assert len(site.broker.fetched) == 1
    assert (forger.served_bytes > 0) == has_proofs


async def test_a_parent_that_failed_is_tried_again(site: Site) -> None:
    manifest = await Trainer(site.broker).publish(0)
    parent = await site.relay(site.node("parent"), "parent")
    _, port, secret = read_address(parent.address)
    await parent.close()
    clock = StepClock()
    parents = site.parents(clock=clock)
    assert [index async for index, _ in parents.chunks(manifest, [0, 1])] == []
    again = RelayServer(site.node("parent"), options=FAST, secret=secret)
    await again.start(port=port)
    site.opened.push_async_callback(again.close)

    assert [index async for index, _ in parents.chunks(manifest, [0, 1])] == []
    clock.time_s = FAST.retry_s
    assert sorted([index async for index, _ in parents.chunks(manifest, [0, 1])]) == [0, 1]
