"""A receiver of collectives, or a publisher, as a process of its own; the parent's side is collective_processes.py.

What it says to the parent are tuples of words: ("attending",), ("collected",) or ("idle",) after each look at the
offers, ("without", version) when chunks of the head are nowhere to be had, ("live", version, digest, how many of its
chunks the broker was asked for).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollfab.fabric.delivery.collective import process
from rollfab.fabric.delivery.collective.group import Nursery
from rollfab.fabric.delivery.collective.group import _end as end_nursery
from rollfab.fabric.delivery.collective.invitations import Answer, CollectiveOptions
from rollfab.fabric.delivery.collective.publisher import CollectivePublisher
from rollfab.fabric.delivery.collective.receiver import CollectiveReceiver
from rollfab.fabric.delivery.node_store import PassingStore, RelayedStore
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


class FreezingStore(PassingStore):
    """Freezes this process (SIGSTOP), once, when it has told the others of a group where it is."""

    has_frozen = False

    async def answer(self, run_id: str, round_id: str, member: str, data: bytes, ttl_s: float) -> None:
        await super().answer(run_id, round_id, member, data, ttl_s)
        if Answer.decode(data).keys and not self.has_frozen:
            self.has_frozen = True
            os.kill(os.getpid(), signal.SIGSTOP)


class Misdeed:
    """What befalls this member once, as "word:count", at its count-th message: `die` (SIGKILL), `freeze` (SIGSTOP), or
    `garble` (a byte of the message arrives wrong); or `freeze-as-it-meets`: see FreezingStore."""

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


class ForkedNursery(Nursery):
    """One that is forked from this process, which has torch loaded: loading it takes seconds."""

    def _start(self) -> None:
        control, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            os.setpgid(0, 0)
            kept = theirs.detach()
            os.closerange(3, kept)
            os.closerange(kept + 1, 1 << 16)
            with contextlib.suppress(BaseException):
                process.main(socket.socket(fileno=kept))
            os._exit(0)
        os.setpgid(pid, pid)  # here too: its group is there before anybody ends it
        theirs.close()
        control.setblocking(False)
        self._control = control
        self._end = weakref.finalize(self, end_nursery, Forked(pid), control, os.getpid())  # type: ignore[arg-type]


class Forked:
    """The part of a Popen that the end of a nursery needs."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def wait(self, timeout: float) -> None:
        until_s = time.monotonic() + timeout
        while os.waitpid(self.pid, os.WNOHANG) == (0, 0):
            if time.monotonic() > until_s:
                raise subprocess.TimeoutExpired("nursery", timeout)
            time.sleep(0.01)


Say = Callable[[tuple[Any, ...]], None]


async def receive(fabric: RedisFabric, run_id: str, member: str, misdeed: Misdeed, say: Say) -> None:
    as_it_meets = misdeed.name == "freeze-as-it-meets"
    broker = CountingStore(FreezingStore(fabric.weights) if as_it_meets else fabric.weights)
    store = RelayedStore(broker, None)
    options = CollectiveOptions(**OPTIONS)
    collective = CollectiveReceiver(store, member, options=options, watch=misdeed, nursery=ForkedNursery())
    version = -1
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
    options, nursery = CollectiveOptions(**OPTIONS), ForkedNursery()
    collective = CollectivePublisher(fabric.weights, run_id, options=options, watch=misdeed, nursery=nursery)
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
