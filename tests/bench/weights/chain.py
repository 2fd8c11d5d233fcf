"""What a whole chain costs: bytes published over many versions, and bytes that a receiver far behind fetches.

- The real publisher on a real broker, with its keyframes, jumps and garbage collection by rule.
- Published is everything that was written: payloads of all kinds, and manifests.
- Those far behind stopped at a version, said that they hold it, and come back LAG versions later: one at each of the
  last versions, because where it stands against the jumps matters. What they end with is compared with the recording.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from rollfab.fabric.broker.embedded import EmbeddedBroker
from rollfab.fabric.contract.errors import FabricError
from rollfab.fabric.format.manifest import Holder, WeightManifest
from rollfab.fabric.opened import RedisFabric
from rollfab.fabric.ports.weights import WeightStore
from rollfab.fabric.versions.commit import commit
from rollfab.fabric.versions.rank_parts import whole
from rollfab.fabric.versions.reader import ChainReader
from rollfab.fabric.versions.snapshot import Identity, Snapshot
from rollfab.fabric.versions.stage import Stage
from rollfab.trainer.publish.publisher import Publisher

from .live import without_log
from .recording import Recording

RUN_ID = "chain"
LAG = 40
JOIN_COUNT = 8  # one for every place against the jumps over 8 versions
HOLD_S = 3600.0
SAY_EVERY = 32


@dataclass(frozen=True, kw_only=True)
class Join:
    """A receiver that was LAG versions behind.

    plan, fetched_bytes: kinds and bytes of what it took. deltas_bytes: of the LAG deltas. direct_bytes: of a delta made
    from its weights.
    """

    version: int
    plan: list[str]
    fetched_bytes: int
    deltas_bytes: int
    direct_bytes: int


@dataclass(frozen=True, kw_only=True)
class Chain:
    """A chain of `version_count` versions. Bytes written, by kind of version, and of manifests."""

    version_count: int
    dense_bytes: int
    payload_bytes: dict[str, int]
    manifest_bytes: int
    joins: list[Join]


class CountingStore:
    """A weight store that counts the bytes of what passes through it."""

    def __init__(self, store: WeightStore) -> None:
        self._store = store
        self.put_bytes: dict[str, int] = {}
        self.manifest_bytes = 0
        self.fetched_bytes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def put_chunks(self, manifest: WeightManifest, first_index: int, chunks: Sequence[bytes]) -> None:
        size = sum(len(chunk) for chunk in chunks)
        self.put_bytes[manifest.kind] = self.put_bytes.get(manifest.kind, 0) + size
        await self._store.put_chunks(manifest, first_index, chunks)

    async def put_manifest(self, manifest: WeightManifest) -> None:
        self.manifest_bytes += len(manifest.encode())
        await self._store.put_manifest(manifest)

    async def chunks(self, manifest: WeightManifest, indices: Sequence[int]) -> list[bytes | None]:
        found = await self._store.chunks(manifest, indices)
        self.fetched_bytes += sum(len(chunk) for chunk in found if chunk is not None)
        return found

    async def chunk_ranges(
        self, manifest: WeightManifest, ranges: Sequence[tuple[int, int, int]]
    ) -> list[bytes | None]:
        found = await self._store.chunk_ranges(manifest, ranges)
        self.fetched_bytes += sum(len(part) for part in found if part is not None)
        return found


def measure_chain(directory: Path, recording: Path, version_count: int, say: Callable[[str], None]) -> Chain:
    """Publish `version_count` states of a recording, and join near the end.

    Args:
        directory: for the broker.
        recording: of at least `version_count` states.
        version_count: more than LAG + JOIN_COUNT.

    Raises:
        FabricError: one that joined has other weights than were recorded.
    """
    assert version_count > LAG + JOIN_COUNT
    with EmbeddedBroker.start(directory / "chain-broker") as broker:
        return asyncio.run(_measure(broker.url, Recording(recording), version_count, say))


async def _measure(url: str, recording: Recording, version_count: int, say: Callable[[str], None]) -> Chain:
    async with await RedisFabric.open(url, client_name="bench-chain") as fabric:
        counting = CountingStore(fabric.weights)
        publisher = Publisher(cast(WeightStore, counting), RUN_ID)
        without_log(url)
        state, joins, delta_bytes = recording.base(), [], []
        held = range(version_count - JOIN_COUNT - LAG, version_count - LAG)
        for version in range(version_count):
            if version:
                recording.apply(state, version - 1)
            report = await publisher.publish(recording.shaped(state), version, allow_nonfinite=True)
            if version in held:
                await fabric.weights.hold(RUN_ID, Holder(f"behind-{version}", version), HOLD_S)
            delta_bytes.append(report.payload_bytes)
            if version >= version_count - JOIN_COUNT:
                joins.append(await _join(fabric.weights, recording, state, sum(delta_bytes[-LAG:])))
            if version % SAY_EVERY == SAY_EVERY - 1:
                say(f"chain: {version + 1} of {version_count} versions")
    return Chain(
        version_count=version_count,
        dense_bytes=recording.layout.byte_count,
        payload_bytes=counting.put_bytes,
        manifest_bytes=counting.manifest_bytes,
        joins=joins,
    )


async def _join(store: WeightStore, recording: Recording, state: Any, deltas_bytes: int) -> Join:
    """Bring a receiver with the weights of LAG versions ago to the head."""
    counting = CountingStore(store)
    head = await store.head(RUN_ID)
    have = head.version - LAG
    live = recording.at(have)
    bits = recording.split(live)
    direct = Snapshot(recording.layout, bits, have)
    straight = direct.prepare_delta(Identity(run_id=RUN_ID, epoch=0, version=head.version), recording.split(state))
    reader = ChainReader(cast(WeightStore, counting), RUN_ID)
    manifests = await reader.plan(have, head.version)
    commit(await reader.stage(manifests, Stage(whole(recording.layout), bits, have)), bits)
    if not np.array_equal(live, state):
        raise FabricError(f"one {LAG} versions behind version {head.version} did not end with its weights")
    return Join(
        version=head.version,
        plan=[manifest.kind for manifest in manifests],
        fetched_bytes=counting.fetched_bytes,
        deltas_bytes=deltas_bytes,
        direct_bytes=straight.manifest.payload_bytes,
    )
