"""A receiver of collectives, or a publisher, as a process of its own; the parent's side is collective_processes.py.

What it says to the parent are tuples of words: ("attending",), ("collected",) or ("idle",) after each look at the
offers, ("without", version) when chunks of the head are nowhere to be had, ("live", version, digest, how many of its
chunks the broker was asked for).
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollfab.fabric.delivery.collective.invitations import CollectiveOptions
from rollfab.fabric.delivery.collective.publisher import CollectivePublisher
from rollfab.fabric.delivery.collective.receiver import CollectiveReceiver
from rollfab.fabric.delivery.node_store import RelayedStore
from rollfab.fabric.delivery.passing import PassingStore
from rollfab.fabric.format.manifest import WeightManifest
from rollfab.fabric.opened import RedisFabric
from rollfab.fabric.ports.weights import WeightStore
from tests.support.weights.collective_versions import OPTIONS, Versions, digest_of


class CountingStore(PassingStore):
    """Counts the chunks that the broker is asked for, by version."""

    def __init__(self, inner: WeightStore) -> None:
        super().__init__(inner)
        self.asked: Counter[int] = Counter()

    async def chunks(self, manifest: WeightManifest, indices: Sequence[int]) -> list[bytes | None]:
        self.asked[manifest.version] += len(indices)
        return await super().chunks(manifest, indices)


class Misdeed:
    """What befalls this member once, as "word:count", at its count-th message: `die` (SIGKILL), `freeze` (SIGSTOP), or
    `garble` (a byte of the message arrives wrong)."""

    def __init__(self, word: str) -> None:
        self.name, _, count = word.partition(":")
        self.left = int(count or 0)

    def __call__(self, index: int, data: NDArray[np.uint8]) -> None:
        self.left -= 1
        if self.left:
            return
        if self.name == "garble":
            data[len(data) // 2] ^= 1
        elif self.name:
            os.kill(os.getpid(), signal.SIGKILL if self.name == "die" else signal.SIGSTOP)


Say = Callable[[tuple[Any, ...]], None]


async def receive(fabric: RedisFabric, run_id: str, member: str, misdeed: Misdeed, say: Say) -> None:
    broker = CountingStore(fabric.weights)
    store = RelayedStore(broker, None)
    collective = CollectiveReceiver(store, member, options=CollectiveOptions(**OPTIONS), watch=misdeed)
    version = -1
    await collective.attend(run_id)  # loads torch
    say(("attending",))
    while True:
        head = await store.wait_head(run_id, version, 5.0)
        say(("collected" if await collective.attend(run_id) else "idle",))
        if head.version <= version:
            continue
        [manifest] = await store.manifests(run_id, [(head.version, head.kind)])
        assert manifest is not None
        found = await store.chunks(manifest, range(len(manifest.chunk_bytes)))
        if None in found:
            say(("without", head.version))
            await asyncio.sleep(0.1)
            continue
        version = head.version
        chunks = [chunk for chunk in found if chunk is not None]
        say(("live", version, digest_of(chunks), broker.asked[version]))


async def publish(fabric: RedisFabric, run_id: str, misdeed: Misdeed, say: Say) -> None:
    epoch = await fabric.weights.open_publisher(run_id)
    manifest, chunks = Versions(run_id, epoch).next(0)
    collective = CollectivePublisher(fabric.weights, run_id, options=CollectiveOptions(**OPTIONS), watch=misdeed)
    say(("attending",))
    await collective.send(manifest, chunks)


def main(url: str, run_id: str, member: str, misdeed: str, pipe: Connection) -> None:
    """The whole process. A member named "publisher" sends version 0 instead of receiving."""

    async def run() -> None:
        async with await RedisFabric.open(url, client_name=member) as fabric:
            if member == "publisher":
                await publish(fabric, run_id, Misdeed(misdeed), pipe.send)
            else:
                await receive(fabric, run_id, member, Misdeed(misdeed), pipe.send)

    asyncio.run(run())
