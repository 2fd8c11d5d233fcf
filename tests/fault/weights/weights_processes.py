"""A trainer and receivers of weights as processes of their own, to be killed at any moment.

Each writes a journal, line by line, with digests of every stored bit that nothing of the product has made:

    trainer:  tried VERSION DIGEST      before it publishes
              done VERSION DIGEST       the last version is out
    receiver: begin                     a new process
              wrote VERSION DIGEST      the engine has committed
              live VERSION DIGEST       the receiver says so

A receiver's weights lie in a file, so that the next process finds them as the last one left them: in the middle of a
commit, too. A trainer goes on from its last checkpoint, which may be older than what it has published.
"""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from rollfab.fabric.contract.errors import FabricError, VersionConflict
from rollfab.fabric.delivery.node_cache import ChunkCache
from rollfab.fabric.delivery.node_store import RelayedStore
from rollfab.fabric.delivery.relay_options import RelayOptions
from rollfab.fabric.format.layout import Layout, TensorSpec
from rollfab.fabric.format.manifest import Holder
from rollfab.fabric.opened import RedisFabric
from rollfab.fabric.ports.weights import WeightStore
from rollfab.fabric.versions.commit import Staged, commit
from rollfab.trainer.publish.publisher import Publisher
from rollfab.workers.rollout.weights import ReceiverOptions, WeightReceiver

RUN = "storm"
LAYOUT = Layout(
    (
        TensorSpec("embed", "uint8", (5 << 20,)),  # above one block
        TensorSpec("norm", "float32", (1024,)),
        TensorSpec("scale", "float32", ()),
        TensorSpec("up", "bfloat16", (512, 768)),
    )
)
DENSITIES = (0.0, 0.0005, 0.0005, 0.001, 0.001, 0.01)  # of an ordinary step
DENSE_EVERY = 30  # versions; such a step changes a third, or all
PACE_S = 0.15
CHECKPOINT_EVERY = 5
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.fault.weights.weights_processes"])

Bits = dict[str, NDArray[Any]]


def digest_of(bits: Mapping[str, NDArray[Any]]) -> str:
    whole = xxhash.xxh3_128()
    for name in sorted(bits):
        whole.update(np.ascontiguousarray(bits[name]).view(np.uint8).data)
    return whole.hexdigest()


class Journal:
    """Lines that are in the kernel's hands once `write` returns: no kill takes them back."""

    def __init__(self, path: Path) -> None:
        self._handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def write(self, *words: object) -> None:
        os.write(self._handle, (" ".join(map(str, words)) + "\n").encode())


def read_journal(path: Path) -> list[list[str]]:
    """Whole lines, as words."""
    return [line.split() for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def train(url: str, directory: Path, seed: int, last_version: int) -> None:
    """The trainer process."""
    asyncio.run(_train(url, directory, np.random.default_rng(seed), last_version))


async def _train(url: str, directory: Path, rng: np.random.Generator, last_version: int) -> None:
    journal, bits = Journal(directory / "trainer"), _load(directory, rng)
    fabric = await _connect(url, "trainer")
    publisher, version = Publisher(fabric.weights, RUN), -1
    while True:
        try:
            head = await fabric.weights.head(RUN)
            if head.version >= last_version:
                break
            if version <= head.version:
                version = head.version + 1
                _step(bits, rng, version)
            journal.write("tried", version, digest_of(bits))
            await publisher.publish(_tensors(bits), version, allow_nonfinite=True)
            if version % CHECKPOINT_EVERY == 0:
                _save(directory, bits)
            await asyncio.sleep(rng.random() * 2 * PACE_S)
        except VersionConflict:
            publisher, version = Publisher(fabric.weights, RUN), -1
        except FabricError:
            await asyncio.sleep(PACE_S)
    # What is out may be a predecessor's: one more of our own, so that there is one truth at the end.
    while True:
        try:
            version = (await fabric.weights.head(RUN)).version + 1
            journal.write("tried", version, digest_of(bits))
            await publisher.publish(_tensors(bits), version, allow_nonfinite=True)
            break
        except FabricError:
            await asyncio.sleep(PACE_S)
    journal.write("done", version, digest_of(bits))


def receive(url: str, directory: Path, name: str, cache: Path | None) -> None:
    """A receiver process. cache: of its node; None: it fetches for itself."""
    asyncio.run(_receive(url, directory, name, cache))


async def _receive(url: str, directory: Path, name: str, cache: Path | None) -> None:
    journal = Journal(directory / name)
    journal.write("begin")
    engine: Any = FileEngine(directory / f"{name}.weights", journal)
    fabric = await _connect(url, name)
    store: WeightStore = fabric.weights
    if cache is not None:
        store = RelayedStore(store, ChunkCache(cache), options=RelayOptions(stall_s=0.5))
    options = ReceiverOptions(poll_s=0.5, retry_s=0.05, retry_s_max=0.5, audit_every=10)
    receiver = WeightReceiver(store, RUN, engine, options=options, holder=Holder(name, -1))
    receiver.start()
    for _ in itertools.count():
        before = receiver.stamp()
        while receiver.stamp() in (None, before):
            error = receiver.error
            if error is not None and not isinstance(error, FabricError):
                raise error
            await asyncio.sleep(0.005)
        journal.write("live", receiver.version, digest_of(engine.live))  # no await: nothing is committed meanwhile


class FileEngine:
    """The part of an engine that holds weights: arrays in a file."""

    layout = LAYOUT

    def __init__(self, path: Path, journal: Journal) -> None:
        if not path.exists() or path.stat().st_size != LAYOUT.byte_count:
            path.write_bytes(np.random.default_rng(5).bytes(LAYOUT.byte_count))
        whole = np.memmap(path, np.uint8, "r+")
        self.live: Bits = {}
        start = 0
        for spec in LAYOUT.tensors:
            self.live[spec.name] = whole[start : start + spec.byte_count].view(spec.bits_dtype)
            start += spec.byte_count
        self._journal = journal

    def weight_bits(self) -> Mapping[str, NDArray[Any]]:
        return self.live

    async def read_weights(self) -> Mapping[str, NDArray[Any]]:
        return self.live

    async def apply(self, staged: Staged, *, turns: str = "keep", may_reuse_prefix: bool = False) -> float:
        for name, write in staged.writes.items():  # one by one, so that a kill comes between them, too
            commit(Staged(staged.version, {name: write}, staged.sums), self.live)
            await asyncio.sleep(0.01)
        self._journal.write("wrote", staged.version, digest_of(self.live))
        return 0.0


async def _connect(url: str, name: str) -> RedisFabric:
    while True:
        try:
            return await RedisFabric.open(url, client_name=name, patience_s=2.0)
        except FabricError:
            await asyncio.sleep(0.05)


def _step(bits: Bits, rng: np.random.Generator, version: int) -> None:
    density = float(rng.choice(DENSITIES))
    if version % DENSE_EVERY == DENSE_EVERY - 1:
        density = float(rng.choice([0.3, 1.0]))
    for array in bits.values():
        where = rng.random(array.size) < density
        array[where] += rng.integers(1, 4, int(where.sum())).astype(array.dtype)


def _tensors(bits: Bits) -> dict[str, NDArray[Any]]:
    """As numpy has them; uint16 is taken for bfloat16."""
    types = {"float32": np.float32}
    return {
        spec.name: bits[spec.name].view(types.get(spec.dtype, spec.bits_dtype)).reshape(spec.shape)
        for spec in LAYOUT.tensors
    }


def _save(directory: Path, bits: Bits) -> None:
    unfinished = directory / "checkpoint.part.npz"
    np.savez(unfinished, **bits)  # type: ignore[arg-type]
    unfinished.rename(directory / "checkpoint.npz")


def _load(directory: Path, rng: np.random.Generator) -> Bits:
    path = directory / "checkpoint.npz"
    if path.exists():
        with np.load(path) as saved:
            return {name: np.array(saved[name]) for name in saved}
    return {spec.name: np.frombuffer(rng.bytes(spec.byte_count), spec.bits_dtype).copy() for spec in LAYOUT.tensors}
