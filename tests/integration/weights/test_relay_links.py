"""Relays over links that are slow or cut, and among peers that take up room: what is shared stays shared."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import replace

import pytest

from rollfab.fabric.contract.errors import PeerLost
from rollfab.fabric.delivery.node_cache import ChunkName
from rollfab.fabric.delivery.node_store import PassingStore, RelayedStore
from rollfab.fabric.delivery.relay_client import RelayClient
from rollfab.fabric.delivery.relay_frames import BYTES_MAX, FRAME, Word, make_address, read_address
from rollfab.fabric.delivery.relay_options import RelayOptions
from rollfab.fabric.format.manifest import WeightManifest
from tests.support.processes.relay_nodes import FAST, CountingStore, Site, StepClock, Trainer

CHUNK_COUNT = 4
PROOF_BYTES = BYTES_MAX[Word.AUTH]


# ---------------------------------------------------------------- to the broker


class SlowLink(PassingStore):
    """All who fetch at the same time share it: one chunk alone takes `chunk_s`."""

    def __init__(self, inner: CountingStore, chunk_s: float) -> None:
        super().__init__(inner)
        self._chunk_s = chunk_s
        self._count = 0

    async def chunks(self, manifest: WeightManifest, indices: Sequence[int]) -> list[bytes | None]:
        self._count += 1
        left_s = self._chunk_s * len(indices)
        while left_s > 0:
            await asyncio.sleep(0.02)
            left_s -= 0.02 / self._count
        self._count -= 1
        return await super().chunks(manifest, indices)


async def test_a_link_on_which_a_chunk_takes_longer_than_a_stall_is_shared_all_the_same(site: Site) -> None:
    manifest = await Trainer(site.broker, CHUNK_COUNT).publish(0)
    link = SlowLink(site.broker, 2 * FAST.stall_s)

    got = await asyncio.gather(*(site.node(broker=link).chunks(manifest, [0, 1]) for _ in range(8)))

    assert sorted(index for _, _, index in site.broker.fetched) == [0, 1]
    assert None not in got[0] and got == [got[0]] * 8


async def test_an_owner_that_lives_and_gets_nothing_is_not_waited_for_for_ever(site: Site) -> None:
    manifest = await Trainer(site.broker, 1).publish(0)
    options = replace(FAST, stall_s=0.1, slow_s=0.1, slow_bytes_per_s=1e12)
    hung = site.node(broker=SlowLink(site.broker, 3600.0), options=options)
    waiting = asyncio.create_task(hung.chunks(manifest, [0]))
    await asyncio.sleep(0.05)

    assert None not in await site.node(options=options).chunks(manifest, [0])

    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)


# ---------------------------------------------------------------- to another relay


class Link:
    """A way to a relay that may be slow, and that can be cut without telling either side."""

    def __init__(self, target: str, pause_s: float) -> None:
        self._host, self._port, self._secret = read_address(target)
        self._pause_s = pause_s
        self._cut_count = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._writers: list[asyncio.StreamWriter] = []
        self.connection_count = 0
        self.address = ""

    async def open(self) -> asyncio.Server:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = make_address("127.0.0.1", server.sockets[0].getsockname()[1], self._secret)
        return server

    def cut(self) -> None:
        """Let nothing through any more, on the connections that are open now."""
        self._cut_count = self.connection_count

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for writer in self._writers:
            writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connection_count += 1
        number = self.connection_count
        above = await asyncio.open_connection(self._host, self._port)
        self._writers += [writer, above[1]]
        pumps = ((reader, above[1], 0.0), (above[0], writer, self._pause_s))
        self._tasks += [asyncio.create_task(self._pump(number, *pump)) for pump in pumps]

    async def _pump(
        self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pause_s: float
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 15):
                await asyncio.sleep(pause_s)
                if number > self._cut_count:
                    writer.write(data)
                    await writer.drain()
        writer.close()


async def linked(site: Site, options: RelayOptions = FAST, pause_s: float = 0.0) -> Link:
    """A relay that may fetch, and a link to it."""
    relay = await site.relay(site.node("relay", options=options), options=options)
    link = Link(relay.address, pause_s)
    server = await link.open()
    site.opened.push_async_callback(link.close)
    site.opened.callback(server.close)
    return link


async def ask(client: RelayClient, manifest: WeightManifest, indices: Sequence[int]) -> list[int]:
    return sorted([index async for index, data in client.chunks(manifest, indices) if data is not None])


async def test_a_chunk_may_take_longer_than_a_childs_patience_while_its_bytes_flow(site: Site) -> None:
    manifest = await Trainer(site.broker, 1).publish(0)
    link = await linked(site, pause_s=0.02)  # 32 parts: two thirds of a second
    client = RelayClient(link.address, replace(FAST, patience_s=0.4, parent_stall_s=0.3))
    assert await ask(client, manifest, [0]) == [0]
    client.close()


async def test_a_chunk_that_trickles_is_given_up(site: Site) -> None:
    manifest = await Trainer(site.broker, 1).publish(0)
    link = await linked(site, pause_s=0.05)
    client = RelayClient(link.address, replace(FAST, slow_s=0.3, slow_bytes_per_s=1e12))
    with pytest.raises(PeerLost, match="bytes"):
        await ask(client, manifest, [0])
    client.close()


async def test_a_kept_connection_that_was_cut_costs_a_fresh_one_and_not_the_relay(site: Site) -> None:
    manifest = await Trainer(site.broker, CHUNK_COUNT).publish(0)
    link = await linked(site)
    client = RelayClient(link.address, FAST)
    assert await ask(client, manifest, [0]) == [0]
    link.cut()

    assert await ask(client, manifest, [1, 2]) == [1, 2]
    assert await ask(client, manifest, [3]) == [3]

    assert link.connection_count == 2
    client.close()


async def test_who_has_not_shown_the_secret_takes_no_childs_place_and_not_for_long(site: Site) -> None:
    manifest = await Trainer(site.broker, CHUNK_COUNT).publish(0)
    link = await linked(site, replace(FAST, child_count_max=1, unproven_count_max=3, patience_s=1.0))
    host, port, _ = read_address(link.address)
    strangers = [await asyncio.open_connection(host, port) for _ in range(8)]
    child = RelayClient(link.address, FAST)
    assert await ask(child, manifest, [0]) == [0]

    # Proven children are counted; and who trickles its proof is dropped
    with pytest.raises(PeerLost, match="as many children"):
        await ask(RelayClient(link.address, FAST), manifest, [1])
    assert await trickle(*strangers[-1]) <= PROOF_BYTES // 2
    for _, writer in strangers:
        writer.transport.abort()
    child.close()


async def trickle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int:
    """Prove oneself, a byte every now and then; returns how many were sent until the other side left."""
    writer.write(FRAME.pack(Word.AUTH, PROOF_BYTES))
    for count in range(PROOF_BYTES):
        writer.write(b"x")
        with contextlib.suppress(TimeoutError, OSError):
            async with asyncio.timeout(0.2):
                while await reader.read(64):
                    pass
            return count
    return PROOF_BYTES


@pytest.mark.parametrize("word", [each for each in Word if each != Word.AUTH])
async def test_of_a_stranger_nothing_is_read_but_a_proof(site: Site, word: Word) -> None:
    host, port, _ = read_address((await linked(site)).address)
    reader, writer = await asyncio.open_connection(host, port)
    await reader.readexactly(FRAME.size + BYTES_MAX[Word.HELLO])

    writer.write(FRAME.pack(word, BYTES_MAX[word]))  # and nothing of what it announces

    assert FRAME.unpack(await reader.readexactly(FRAME.size))[0] == Word.REFUSED
    assert b"secret" in await asyncio.wait_for(reader.read(), 5)
    writer.transport.abort()


class CountedStore(RelayedStore):
    """Counts how often a child asked."""

    asked_count = 0

    async def cached(self, names: Sequence[ChunkName]) -> list[bytes | None]:
        self.asked_count += 1
        return await super().cached(names)


async def test_a_relay_without_a_cache_is_no_proxy_and_is_left_for_a_while(site: Site) -> None:
    # Given a relay without a cache above two nodes
    manifest = await Trainer(site.broker, CHUNK_COUNT).publish(0)
    store, clock = CountedStore(site.broker, None, options=FAST), StepClock()
    await site.relay(store, "bare")
    parents = site.parents(clock=clock)
    assert not store.has_cache

    # When chunks are asked for, then it fetches none, and is not asked again at once
    for _ in range(3):
        assert [index async for index, _ in parents.chunks(manifest, [0])] == []
    assert (site.broker.fetched, store.asked_count) == ([], 1)

    # But after a while: it may have got what it lacked
    clock.time_s = FAST.refresh_s
    assert [index async for index, _ in parents.chunks(manifest, [0])] == []
    assert store.asked_count == 2
