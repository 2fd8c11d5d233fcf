"""Processes killed or frozen in the middle of a transfer: nobody hangs, and nothing is fetched twice."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from redis import Redis

from rollfab.fabric.delivery.node_cache import ChunkCache
from rollfab.fabric.delivery.node_store import RelayedStore
from rollfab.fabric.delivery.relay_parents import Parents
from rollfab.fabric.format.manifest import Holder
from rollfab.fabric.opened import RedisFabric
from tests.support.brokers.redis_server import RedisServer, redis_server
from tests.support.processes.relay_nodes import FAST, RUN, CountingStore, Processes, Trainer, file_names, read_chunks

pytestmark = [pytest.mark.fault, pytest.mark.timeout(40)]

CHUNK_COUNT = 6
HUNG_AFTER = 2  # chunks that the process that will fail has fetched before


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with redis_server(tmp_path) as running:
        yield running


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    started = Processes(tmp_path)
    yield started
    started.close()


@pytest.fixture
async def fabric(server: RedisServer) -> AsyncIterator[RedisFabric]:
    async with await RedisFabric.open(server.url, client_name="test") as opened:
        yield opened


def egress_bytes(server: RedisServer) -> int:
    with Redis(port=server.port) as client:
        return int(client.info("stats")["total_net_output_bytes"])  # type: ignore[index]


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
async def test_the_node_goes_on_when_the_one_that_fetches_is_killed_or_frozen(
    server: RedisServer, fabric: RedisFabric, processes: Processes, tmp_path: Path, sent: signal.Signals
) -> None:
    # Given a process that has fetched some of the chunks, and others that wait for it, on a node that is never empty
    node_lives = ChunkCache(tmp_path / "node")
    manifest = await Trainer(fabric.weights).publish(0)
    published = await read_chunks(fabric.weights)
    before = egress_bytes(server)
    owner = processes.start(server.url, tmp_path / "node", hang_after=HUNG_AFTER)
    await asyncio.to_thread(processes.wait_until_hanging, 0)
    assert len(file_names(tmp_path / "node")) == HUNG_AFTER
    for _ in range(3):
        processes.start(server.url, tmp_path / "node")

    # When it fails
    os.kill(owner, sent)

    # Then they all have everything, and each chunk left the broker once
    assert await asyncio.to_thread(processes.results, 3) == [published] * 3
    sent_bytes = egress_bytes(server) - before
    print(f"{sent.name}: {sent_bytes:,} bytes left the broker for a payload of {manifest.payload_bytes:,}")
    assert sent_bytes < manifest.payload_bytes + manifest.chunk_bytes[0] // 2
    node_lives.close()


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP, None])
async def test_a_parent_killed_frozen_or_stuck_is_left_for_the_broker(
    server: RedisServer, fabric: RedisFabric, processes: Processes, tmp_path: Path, sent: signal.Signals | None
) -> None:
    # Given a relay above that gives some chunks and is then stuck itself, but says it is busy
    manifest = await Trainer(fabric.weights).publish(0)
    published = await read_chunks(fabric.weights)
    relay = processes.start_relay(server.url, tmp_path / "above", hang_after=HUNG_AFTER)
    (address,) = await asyncio.to_thread(processes.results, 1)
    broker = CountingStore(fabric.weights)
    await broker.hold(RUN, Holder("above", 0, address, "above", "home"), 60)
    store = _child(broker, tmp_path, patience_s=300.0 if sent else 1.0)

    # When it fails in the middle of a request
    reading = asyncio.create_task(read_chunks(store, CHUNK_COUNT))
    await asyncio.to_thread(processes.wait_until_hanging, 0)
    if sent is not None:
        os.kill(relay, sent)

    # Then what it gave is kept, and the rest comes from the broker
    assert await reading == published
    assert [index for _, _, index in broker.fetched] == list(range(HUNG_AFTER, CHUNK_COUNT))
    assert broker.chunk_bytes == manifest.payload_bytes - manifest.chunk_bytes[:HUNG_AFTER].sum()
    await store.close()


async def test_the_grandparent_is_asked_before_the_broker(
    server: RedisServer, fabric: RedisFabric, processes: Processes, tmp_path: Path
) -> None:
    await Trainer(fabric.weights).publish(0)
    published = await read_chunks(fabric.weights)
    broker = CountingStore(fabric.weights)
    frozen = processes.start_relay(server.url, tmp_path / "frozen", hang_after=0)
    (frozen_address,) = await asyncio.to_thread(processes.results, 1)
    processes.start_relay(server.url, tmp_path / "healthy", hang_after=CHUNK_COUNT)
    (healthy_address,) = await asyncio.to_thread(processes.results, 1)
    os.kill(frozen, signal.SIGSTOP)
    await broker.hold(RUN, Holder("near", 0, frozen_address, "near", "east"), 60)
    await broker.hold(RUN, Holder("far", 0, healthy_address, "far", "home"), 60)
    store = _child(broker, tmp_path, patience_s=300.0, region="east")

    assert await read_chunks(store) == published

    assert broker.fetched == []
    await store.close()


def _child(broker: CountingStore, directory: Path, *, patience_s: float, region: str = "home") -> RelayedStore:
    options = dataclasses.replace(FAST, patience_s=patience_s)
    me = Holder("me", -1, "", "mine", region)  # serves nobody: it stands last, under the others
    parents = Parents(broker, me, home_region="home", options=options)
    return RelayedStore(broker, ChunkCache(directory / "node"), parents=parents, options=options)
