"""Nodes for tests of relays: a run of random weights, stores that count or hang, and reader processes.

A node is a cache directory. Processes come from a fork server, so that eight of them start in no time.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from rollfab.fabric.delivery.node_cache import ChunkCache
from rollfab.fabric.delivery.node_store import PassingStore, RelayedStore
from rollfab.fabric.delivery.relay_options import RelayOptions
from rollfab.fabric.delivery.relay_parents import Parents
from rollfab.fabric.delivery.relay_server import RelayServer
from rollfab.fabric.format.codec import Bits
from rollfab.fabric.format.digest import state_sums, sums_digest
from rollfab.fabric.format.layout import Layout, TensorSpec
from rollfab.fabric.format.manifest import Holder, WeightManifest, chunk_digest
from rollfab.fabric.opened import RedisFabric
from rollfab.fabric.ports.weights import WeightStore
from rollfab.fabric.versions.reader import ChainReader
from rollfab.fabric.versions.snapshot import Identity, Prepared, Snapshot
from tests.standin.fabric import StandInFabric
from tests.support.until import wait_until

RUN, HOME = "relayed", "home"
FAST = RelayOptions(stall_s=0.6, parent_stall_s=0.3, patience_s=5.0, refresh_s=0.05, piece_bytes=1 << 20)
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.support.processes.relay_nodes"])


class StepClock:
    """Time passes only while somebody sleeps; `on_sleep` runs each time."""

    def __init__(self) -> None:
        self.time_s = 0.0
        self.on_sleep: Callable[[], None] = lambda: None

    def now_s(self) -> float:
        return self.time_s

    def wall_ms(self) -> int:
        return int(self.time_s * 1000)

    async def sleep(self, duration_s: float) -> None:
        self.time_s += duration_s
        self.on_sleep()
        await asyncio.sleep(0)


class Trainer:
    """Publishes random weights of `tensor_count` tensors of 1 MiB: one chunk each in a keyframe."""

    def __init__(self, store: WeightStore, tensor_count: int = 6) -> None:
        specs = tuple(TensorSpec(f"w{index:02}", "bfloat16", (1 << 19,)) for index in range(tensor_count))
        self.layout = Layout(specs)
        self._store = store
        self._rng = np.random.default_rng(7)
        self.bits: dict[str, Bits] = {
            spec.name: self._rng.integers(0, 1 << 16, spec.element_count, dtype=np.uint16) for spec in specs
        }
        self.has_proofs = True
        self._epoch = 0
        self._snapshot: Snapshot | None = None

    async def publish(self, version: int) -> WeightManifest:
        """The next version: a keyframe first, then deltas of one element in a hundred."""
        self._epoch = self._epoch or await self._store.open_publisher(RUN)
        identity = Identity(run_id=RUN, epoch=self._epoch, version=version)
        if self._snapshot is None:
            self._snapshot = Snapshot(self.layout, self.bits)
            prepared = self._snapshot.prepare_keyframe(identity)
        else:
            for array in self.bits.values():
                array[self._rng.integers(0, len(array), len(array) // 100)] += 1
            prepared = self._snapshot.prepare_delta(identity, self.bits)
        if not self.has_proofs:  # as older publishers did
            prepared = replace(prepared, manifest=replace(prepared.manifest, hash_name="", chunk_hashes=[]))
        await self._send(prepared)
        self._snapshot.advance(prepared)
        return prepared.manifest

    async def _send(self, prepared: Prepared) -> None:
        await self._store.put_chunks(prepared.manifest, 0, prepared.chunks)
        await self._store.put_manifest(prepared.manifest)
        await self._store.advance_head(prepared.manifest, 1)

    @property
    def digest(self) -> str:
        """Of the weights as they are now."""
        return digest_of(self.layout, self.bits)


def digest_of(layout: Layout, bits: dict[str, Bits]) -> str:
    return sums_digest(state_sums(layout, bits))


class LiveBits:
    """SnapshotSource over arrays; `on_read` runs before every block is copied, as if between two engine steps."""

    def __init__(self, layout: Layout, bits: Mapping[str, Bits], version: int) -> None:
        self.layout = layout
        self.arrays = {name: np.array(array) for name, array in bits.items()}
        self.version = version
        self.commit_count = 0
        self.is_committing = False
        self.read_count = 0
        self.on_read: Callable[[], None] = lambda: None

    def stamp(self) -> tuple[int, int] | None:
        return None if self.is_committing else (self.version, self.commit_count)

    def bits(self) -> Mapping[str, Bits]:
        self.read_count += 1
        self.on_read()
        return self.arrays

    def commit(self, bits: Mapping[str, Bits], version: int) -> None:
        self.commit_count += 1
        for name, array in bits.items():
            self.arrays[name][:] = array
        self.version = version


class CountingStore(PassingStore):
    """Counts what the broker gives out, and can be slow, or hang, or spoil chunks."""

    def __init__(self, inner: WeightStore, *, delay_s: float = 0.0) -> None:
        super().__init__(inner)
        self.delay_s = delay_s
        self.fetched: list[tuple[int, str, int]] = []
        self.chunk_bytes = 0
        self.spoil: set[int] = set()

    async def chunks(self, manifest: WeightManifest, indices: Sequence[int]) -> list[bytes | None]:
        await asyncio.sleep(self.delay_s)
        found = await super().chunks(manifest, indices)
        self.fetched += [(manifest.version, manifest.kind, index) for index in indices]
        self.chunk_bytes += sum(len(data) for data in found if data is not None)
        return [b"spoiled" if index in self.spoil else data for index, data in zip(indices, found, strict=True)]


class Site:
    """Nodes around a broker that counts what is fetched. What is opened here is closed at the end."""

    def __init__(self, directory: Path) -> None:
        self.broker = CountingStore(StandInFabric().weights)
        self.opened = AsyncExitStack()
        self.directory = directory

    def node(
        self, name: str = "node", *budget_bytes: int, broker: Any = None, options: RelayOptions = FAST, **tools: Any
    ) -> RelayedStore:
        """The store of a process of a node."""
        cache = ChunkCache(self.directory / name, *budget_bytes)
        store = RelayedStore(broker or self.broker, cache, options=options, **tools)
        self.opened.push_async_callback(store.close)
        return store

    async def relay(
        self, store: RelayedStore, name: str = "", options: RelayOptions = FAST, **settings: Any
    ) -> RelayServer:
        """A relay; one with a name is known as a holder at home."""
        server = RelayServer(store, options=options, **settings)
        await server.start()
        self.opened.push_async_callback(server.close)
        if name:
            await self.broker.hold(RUN, Holder(name, 0, server.address, name, HOME), 60)
        return server

    def parents(self, **tools: Any) -> Parents:
        """The way up of a node at home."""
        me = Holder("me", -1, "", "mine", HOME)
        parents = Parents(self.broker, me, home_region=HOME, options=FAST, **tools)
        self.opened.push_async_callback(parents.close)
        return parents


class HangingStore(CountingStore):
    """Gives out `count` chunks, says so by making a file, and never answers again."""

    def __init__(self, inner: WeightStore, count: int, file: Path) -> None:
        super().__init__(inner)
        self._count = count
        self._file = file

    async def chunks(self, manifest: WeightManifest, indices: Sequence[int]) -> list[bytes | None]:
        if len(self.fetched) >= self._count:
            self._file.touch()
            await asyncio.Event().wait()
        return await super().chunks(manifest, indices)


def read_version(url: str, directory: Path, file: Path, hang_after: int | None = None) -> None:
    """A reader process: fetch the head through the node's cache; writes the digest of what it got to `file`."""
    asyncio.run(_read_version(url, directory, file, hang_after))


async def _read_version(url: str, directory: Path, file: Path, hang_after: int | None) -> None:
    async with await RedisFabric.open(url, client_name="reader") as fabric:
        inner: WeightStore = fabric.weights
        if hang_after is not None:
            inner = HangingStore(inner, hang_after, file.with_suffix(".hangs"))
        store = RelayedStore(inner, ChunkCache(directory), options=FAST)
        found = await read_chunks(store)
        unfinished = file.with_suffix(".part")
        unfinished.write_text(found)
        unfinished.rename(file)
        await store.close()


def serve_relay(url: str, directory: Path, file: Path, hang_after: int) -> None:
    """A relay process of region "home"; writes its address to `file`, serves until it is killed."""
    asyncio.run(_serve_relay(url, directory, file, hang_after))


async def _serve_relay(url: str, directory: Path, file: Path, hang_after: int) -> None:
    async with await RedisFabric.open(url, client_name="relay") as fabric:
        inner = HangingStore(fabric.weights, hang_after, file.with_suffix(".hangs"))
        server = RelayServer(RelayedStore(inner, ChunkCache(directory), options=FAST), options=FAST)
        await server.start()
        unfinished = file.with_suffix(".part")
        unfinished.write_text(server.address)
        unfinished.rename(file)
        await asyncio.Event().wait()


async def read_chunks(store: WeightStore, batch_count: int = 4) -> str:
    """All chunks that lead to the head, as a reader asks for them; returns what they are, in order.

    Nothing is decoded: that is another test's matter, and processes that do it take seconds to start.
    """
    head = await store.head(RUN)
    names = []
    for manifest in await ChainReader(store, RUN).plan(None, head.version):
        for first in range(0, len(manifest.chunk_bytes), batch_count):
            indices = list(range(first, min(first + batch_count, len(manifest.chunk_bytes))))
            for data in await store.chunks(manifest, indices):
                assert data is not None
                names.append(chunk_digest(data))
    return " ".join(names)


class Processes:
    """Readers and relays; those that still run at the end are killed."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.files: list[Path] = []
        self._processes: list[Any] = []

    def start(self, url: str, cache: Path, *, hang_after: int | None = None) -> int:
        """Start one; returns its process id."""
        return self._start(read_version, url, cache, hang_after)

    def start_relay(self, url: str, cache: Path, *, hang_after: int) -> int:
        """Start a relay that hangs after so many chunks; returns its process id."""
        return self._start(serve_relay, url, cache, hang_after)

    def _start(self, role: Callable[..., None], url: str, cache: Path, hang_after: int | None) -> int:
        file = self.directory / f"process-{len(self.files)}"
        process = FORKS.Process(target=role, args=(url, cache, file, hang_after), daemon=True)
        process.start()
        self.files.append(file)
        self._processes.append(process)
        assert process.pid is not None
        return int(process.pid)

    def wait_until_hanging(self, place: int) -> None:
        """Until the process started as number `place` waits for a broker that does not answer."""
        wait_until(self.files[place].with_suffix(".hangs").exists)

    def results(self, count: int) -> list[str]:
        """What the last `count` of them wrote, once they all have."""
        files = self.files[-count:]
        wait_until(lambda: all(file.exists() for file in files))
        return [file.read_text() for file in files]

    def close(self) -> None:
        """End them all, whatever they do."""
        for process in self._processes:
            process.kill()
            process.join()
            process.close()


def file_names(directory: Path) -> list[str]:
    """Chunk files of a cache."""
    return sorted(name for name in os.listdir(directory) if name[0] in "0123456789abcdef" and "-" in name)
