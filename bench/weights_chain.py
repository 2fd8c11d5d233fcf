"""What a whole chain costs: bytes published over many versions, and bytes that a receiver far behind fetches.

- The real publisher on a real broker, with its keyframes, jumps and garbage collection by rule.
- Published is everything that was written: payloads of all kinds, and manifests.
- Those far behind stopped at a version, said that they hold it, and come back LAG versions later: one at each of the
  last versions, because where it stands against the jumps matters. A relay that holds the head, as a worker's does,
  folds what they are missing; its bytes are counted as they leave it. What they end with is compared with the
  recording. A relay without weights folds the same for comparison.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from ..fabric.bus.embedded import EmbeddedBroker
from ..fabric.bus.fabric import RedisFabric
from ..fabric.errors import FabricError
from ..fabric.ports_weights import WeightStore
from ..fabric.relay.catching_up import CatchUp, CatchUpOptions
from ..fabric.relay.folding import Folder, FoldRequest
from ..fabric.relay.server import RelayServer
from ..fabric.relay.store import RelayedStore
from ..fabric.weights.chain import ChainReader
from ..fabric.weights.manifest import Holder, WeightManifest
from ..fabric.weights.snapshot import Identity, Snapshot
from ..fabric.weights.stage import Stage, commit
from ..trainer.publish import Publisher
from .weights_live import without_log
from .weights_recording import Bits, Recording

RUN_ID = "chain"
LAG = 40
JOIN_COUNT = 8  # one for every place against the jumps over 8 versions
HOLD_S = 3600.0
FOLD_ALWAYS = CatchUpOptions(saved_bytes_min=1)  # a small model spares little, the share is what is measured
SAY_EVERY = 32


@dataclass(frozen=True, kw_only=True)
class Join:
    """One that was LAG versions behind. fetched_bytes: what it took, as a relay that holds the head folded it.

    plain_bytes: of the fold that a relay without weights makes. deltas_bytes: of the LAG deltas. plan, way_bytes: kinds
    and bytes of what the broker alone had for it. direct_bytes: of a delta that was made from its weights.
    """

    version: int
    plan: list[str]
    way_bytes: int
    fetched_bytes: int
    plain_bytes: int
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


class AtHead:
    """Live weights of a relay (relay.live.SnapshotSource) that are always at the version published last."""

    def __init__(self, recording: Recording, state: Bits) -> None:
        self.layout = recording.layout
        self.version = -1
        self._bits = recording.split(state)

    def stamp(self) -> tuple[int, int]:
        """The version, which is also how many there were."""
        return self.version, self.version

    def bits(self) -> Mapping[str, Bits]:
        """Flat stored bits by name."""
        return self._bits


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
        server = RelayServer(RelayedStore(fabric.weights, None), folder=Folder(RelayedStore(fabric.weights, None)))
        await server.start()
        await fabric.weights.hold(RUN_ID, Holder("relay", version_count, server.address, node="another"), HOLD_S)
        state, joins, delta_bytes = recording.base(), [], []
        live = AtHead(recording, state)
        server.offer(RUN_ID, live)
        held = range(version_count - JOIN_COUNT - LAG, version_count - LAG)
        for version in range(version_count):
            if version:
                recording.apply(state, version - 1)
            report = await publisher.publish(recording.shaped(state), version)
            if version in held:
                await fabric.weights.hold(RUN_ID, Holder(f"behind-{version}", version), HOLD_S)
            delta_bytes.append(report.payload_bytes)
            live.version = version
            if version >= version_count - JOIN_COUNT:
                joins.append(await _join(fabric.weights, server, recording, state, sum(delta_bytes[-LAG:])))
            if version % SAY_EVERY == SAY_EVERY - 1:
                say(f"chain: {version + 1} of {version_count} versions")
        await server.close()
    return Chain(
        version_count=version_count,
        dense_bytes=recording.layout.byte_count,
        payload_bytes=counting.put_bytes,
        manifest_bytes=counting.manifest_bytes,
        joins=joins,
    )


async def _join(store: WeightStore, server: RelayServer, recording: Recording, state: Any, deltas_bytes: int) -> Join:
    """One with the weights of LAG versions ago comes to the head: a relay folds what it is missing, if that spares."""
    counting = CountingStore(store)
    head = await store.head(RUN_ID)
    have = head.version - LAG
    live = recording.at(have)
    bits = recording.split(live)
    direct = Snapshot(recording.layout, bits, have)
    straight = direct.prepare_delta(Identity(run_id=RUN_ID, epoch=0, version=head.version), recording.split(state))
    manifests = await ChainReader(cast(WeightStore, counting), RUN_ID).plan(have, head.version)
    catch_up = CatchUp(cast(WeightStore, counting), Holder(f"behind-{have}", have), options=FOLD_ALWAYS)
    served_bytes = server.served_bytes
    folded = await catch_up.stage(manifests, lambda: Stage(recording.layout, bits, have))
    if folded is None:
        raise FabricError(f"no relay folded what one {LAG} versions behind version {head.version} was missing")
    commit(folded[1], bits)
    if not np.array_equal(live, state):
        raise FabricError(f"one {LAG} versions behind version {head.version} did not end with its weights")
    plain = Folder(RelayedStore(store, None))
    wanted = FoldRequest(RUN_ID, have, head.version, head.epoch)
    plain_bytes = WeightManifest.decode(await plain.manifest(wanted)).payload_bytes
    await plain.close()
    return Join(
        version=head.version,
        plan=[manifest.kind for manifest in manifests],
        way_bytes=sum(manifest.payload_bytes for manifest in manifests),
        fetched_bytes=counting.fetched_bytes + server.served_bytes - served_bytes,
        plain_bytes=plain_bytes,
        deltas_bytes=deltas_bytes,
        direct_bytes=straight.manifest.payload_bytes,
    )
