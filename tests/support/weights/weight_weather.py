"""Bad weather for weights: a store that works bit by bit and forgets, connections that spoil, an engine that tears.

- The store writes chunks one by one and deletes link by link, as a broker does; it can fall back to what a replica had.
- What a connection brings is flipped, cut off, lengthened, swapped, doubled or missing; manifests too. Which calls are
  lost, repeated or late is tests/sim/link.py's.
- The engine commits with pauses in the middle, and sometimes breaks off there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from rollfab.fabric.contract.errors import BrokerFull, EngineError
from rollfab.fabric.format.digest import state_sums
from rollfab.fabric.format.layout import Layout
from rollfab.fabric.format.manifest import WeightManifest
from rollfab.fabric.rules.weights.chain import Link as ChainLink
from rollfab.fabric.versions.commit import Staged, commit
from rollfab.fabric.versions.store import RedisWeightStore
from rollfab.workers.engines.base import TurnsAtCommit
from tests.sim.link import Link, Network
from tests.sim.virtual_loop import Process, VirtualClock, VirtualLoop
from tests.standin.broker import Broker, DirectClient
from tests.standin.weight_tables import WeightTables

RUN = "storm"
Bits = dict[str, NDArray[Any]]


def digest_of(bits: Mapping[str, NDArray[Any]]) -> str:
    """Of every stored bit, by nothing of the product."""
    whole = xxhash.xxh3_128()
    for name in sorted(bits):
        whole.update(f"{name}:{len(bits[name])};".encode())
        whole.update(np.ascontiguousarray(bits[name]).view(np.uint8).data)
    return whole.hexdigest()


class ThreadedLoop(VirtualLoop):
    """Virtual time in which work handed to a thread takes a while, so that a kill can come meanwhile.

    As a thread it is not stopped by that: it ends what it does, and nobody hears of it.
    """

    def __init__(self, random: Random) -> None:
        super().__init__(random)
        self._threads = random

    def run_in_executor(self, executor: Any, function: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        future = self.create_future()

        def work() -> None:
            try:
                result = function(*args)
            except Exception as error:  # noqa: BLE001 - handed to whoever awaits it, as from a thread
                if not future.done():
                    future.set_exception(error)
            else:
                if not future.done():
                    future.set_result(result)

        self.call_later(self._threads.uniform(0.0, 0.002), work)
        return future


class StormStore(RedisWeightStore):
    """The broker's side. room: bytes of all chunks that it takes, None without a limit."""

    def __init__(self, loop: asyncio.AbstractEventLoop, random: Random) -> None:
        broker = Broker(VirtualClock(loop))
        super().__init__(DirectClient(broker))
        self.tables = WeightTables(broker, RUN)
        self._random = random
        self.room: int | None = None

    async def put_chunks(self, manifest: WeightManifest, first_index: int, chunks: Sequence[bytes]) -> None:
        for index, chunk in enumerate(chunks, start=first_index):
            room = await self.room_bytes()
            if room is not None and len(chunk) > room:
                raise BrokerFull(f"room for {room} bytes")
            await super().put_chunks(manifest, index, [chunk])
            await self._pause()

    async def put_manifest(self, manifest: WeightManifest) -> None:
        if self.room == 0:
            raise BrokerFull("not even for a manifest")
        await super().put_manifest(manifest)

    async def room_bytes(self) -> int | None:
        return None if self.room is None else max(0, self.room - sum(map(len, self.tables.chunks.values())))

    async def drop(self, run_id: str, links: Sequence[ChainLink], epoch: int) -> None:
        for link in links:
            await super().drop(run_id, [link], epoch)
            await self._pause()

    def spoil(self) -> bool:
        """Damage something that the broker holds, for good; False: it holds nothing yet.

        Chunks vanish, are cut off, flipped, or become another's; manifests vanish or are cut off.
        """
        run, random = self.tables, self._random
        names = sorted(name for name in run.manifests if name[0] <= run.head_version)
        if not names:
            return False
        name = random.choice(names)
        chunks = sorted(key for key in run.chunks if key[:2] == name)
        how = random.randrange(6)
        if how == 0 or not chunks:
            run.manifests.pop(name)
        elif how == 1:
            run.manifests[name] = run.manifests[name][: random.randrange(len(run.manifests[name]))]
        elif how == 2:
            run.chunks.pop(random.choice(chunks))
        else:
            key = random.choice(chunks)
            spoilt = spoilt_chunks([run.chunks[key], run.chunks[random.choice(sorted(run.chunks))]], random)
            run.chunks[key] = spoilt[0] or b""
        return True

    async def _pause(self) -> None:
        if self._random.random() < 0.3:
            await asyncio.sleep(self._random.uniform(0.0, 0.01))


class StormLink(Link):
    """A process' connection; while the network is rough, what it brings may be spoilt."""

    def __init__(self, process: Process, broker: Process, fabric: Any, network: Network, observe: Any) -> None:
        super().__init__(process, broker, fabric, network, observe, None)
        self._weather = network

    async def call(
        self, name: str, function: Callable[..., Awaitable[Any]], args: Any, kwargs: Any, run_id: str = ""
    ) -> Any:
        result = await super().call(name, function, args, kwargs, run_id)
        random = self._weather.random
        if not self._weather.is_rough or random.random() >= self._weather.trouble_fraction:
            return result
        if name in ("weights.chunks", "weights.chunk_ranges"):
            return spoilt_chunks(list(result), random)
        if name == "weights.manifests":
            return spoilt_manifests(list(result), random)
        return result


class CalmNetwork(Network):
    """Spoils nothing by itself: StormLink does."""

    def spoilt(self, name: str, result: Any) -> Any:
        return result


def spoilt_chunks(chunks: list[bytes | None], random: Random) -> list[bytes | None]:
    """Some of them wrong, in one of seven ways."""
    if not chunks:
        return chunks
    place, other = random.randrange(len(chunks)), random.randrange(len(chunks))
    data = chunks[place] or b"\0"
    at = random.randrange(len(data))
    flipped = data[:at] + bytes((data[at] ^ (1 << random.randrange(8)),)) + data[at + 1 :]
    kind = random.randrange(7)
    if kind == 0:
        chunks[place], chunks[other] = chunks[other], chunks[place]
    elif kind == 1:
        chunks[place] = chunks[other]
    elif kind == 2:
        chunks.reverse()
    else:
        chunks[place] = (flipped, data[:at], data + data[:1], None)[kind - 3]
    return chunks


def spoilt_manifests(manifests: list[WeightManifest | None], random: Random) -> list[WeightManifest | None]:
    """In another order, or one is missing, of another version, or has a wrong byte.

    Raises:
        WireError: it shows at once.
    """
    if not manifests:
        return manifests
    place = random.randrange(len(manifests))
    manifest, kind = manifests[place], random.randrange(4)
    if manifest is None or kind == 0:
        manifests[place] = None
    elif kind == 1 and len(manifests) > 1:
        manifests.reverse()
    elif kind <= 2:
        manifests[place] = replace(manifest, version=manifest.version ^ (1 << random.randrange(3)))
    else:
        raw = bytearray(manifest.encode())
        raw[random.randrange(len(raw))] ^= 1 << random.randrange(8)
        manifests[place] = WeightManifest.decode(bytes(raw))
    return manifests


class TornEngine:
    """The part of an engine that holds weights; its commits take time, and may break off or be broken off.

    tears: share of commits that do not run through in one go. on_commit: called before the first write, and after
    the last with what was written.
    """

    def __init__(self, layout: Layout, bits: Bits, random: Random, on_commit: Callable[[Staged | None], None]):
        self.layout = layout
        self.live = bits
        self.tears = 0.0
        self.on_commit = on_commit
        self._random = random

    def weight_bits(self) -> Mapping[str, NDArray[Any]]:
        return self.live

    async def read_weights(self) -> Mapping[str, NDArray[Any]]:
        await asyncio.sleep(self._random.uniform(0.0, 0.002))
        return {name: array.copy() for name, array in self.live.items()}

    async def apply(self, staged: Staged, *, turns: TurnsAtCommit = "keep", may_reuse_prefix: bool = False) -> float:
        self.on_commit(None)
        await asyncio.sleep(self._random.uniform(0.0, 0.005))
        if self._random.random() < self.tears:
            await self._tear(staged)
        assert isinstance(staged, Staged)
        commit(staged, self.live)
        assert (state_sums(self.layout, self.live) == staged.sums).all(), (
            "the sums of what is live are not the staged ones"
        )
        self.on_commit(staged)
        return 0.0

    async def _tear(self, staged: Staged) -> None:
        """Write a part, in no order, and wait in the middle of it: killed there, broken off there, or going on."""
        writes = list(staged.writes.items())
        self._random.shuffle(writes)
        for name, (indices, values) in writes[: self._random.randrange(len(writes) + 1)]:
            count = self._random.randrange(len(values) + 1)
            places = slice(0, count) if indices is None else indices[:count]
            self.live[name][places] = values[:count]
            await asyncio.sleep(self._random.uniform(0.0, 0.02))
        if self._random.random() < 0.5:
            raise EngineError("the device was lost in the middle of a commit")
