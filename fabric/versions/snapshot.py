"""The publisher's copy of what receivers hold, and versions made from it.

- `prepare_*` only reads; the snapshot moves by `advance`, which the caller calls once the head has moved. A publish
  that fails leaves it where the receivers are.
- Advancing costs as much as has changed, not as much as the model has; so do the sums of the state.
- Each region of the new weights is read once, to a copy; the version's bytes, its sums and what the snapshot becomes
  are made from that. So they agree, whatever the trainer does meanwhile, and nothing that is kept is a view of it.
- Blocks are encoded side by side in threads, and lie in the chunks in the order of the cut whatever thread was first.
- Memory: one copy of the weights, the encoded bytes of the version being prepared, and a copy of its dense blocks.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from ..format.codec import Bits, Encoded, Encoder
from ..format.digest import state_sums, tensor_key
from ..format.layout import Layout
from ..format.manifest import (
    BROKER,
    CODEC,
    HASH,
    BlockRow,
    Sums,
    WeightManifest,
    block_digest,
    chunk_digest,
    chunk_hash,
)
from ..format.regions import Region, cut, cut_digest
from ..rules.weights.chain import DELTA, KEYFRAME
from .commit import scatter
from .entropy import sampled_ratio

CHUNK_BYTES = 1 << 20  # a chunk is closed when it reaches this; brokers and clients move 1 to 4 MiB best (measured)
CHUNK_BYTES_MAX = 4 << 20  # and before a further block would bring it above this
THREAD_COUNT_MAX = 8  # memory bandwidth is used up before

log = logging.getLogger(__name__)

EncodeRegion = Callable[[Encoder, Region], Encoded | None]
Check = Callable[[], None]  # called between two regions; what it raises ends the work


def no_check() -> None:
    """The work is wanted whatever happens."""


@dataclass(frozen=True, slots=True)
class Change:
    """What a prepared version changes in one region. indices: uint32 positions in the region, None for all."""

    region: Region
    indices: NDArray[np.uint32] | None
    values: Bits


@dataclass(frozen=True, slots=True)
class Part:
    """Encoded regions: a version, or one publishing rank's part of it.

    rows: chunks are counted from 0 within the part. sums: uint64 (T,): by how much the part moves the state's sums.
    hashes: of the chunks, hex.
    """

    rows: list[BlockRow]
    digests: list[int]
    chunks: list[bytes]
    changes: list[Change]
    sums: Sums
    hashes: list[str]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A version ready to be sent. What it holds is its own, or the snapshot's."""

    manifest: WeightManifest
    chunks: list[bytes]
    changes: list[Change]


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Whose version it is, and what carries it."""

    run_id: str
    epoch: int
    version: int
    carrier: str = BROKER


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A version's place in the chain, and the sums of the state there."""

    kind: str
    base_version: int
    sums: Sums


class Snapshot:
    """Weights of one version, as stored bits.

    Args:
        bits: flat stored bits by name; copied.
        version: the version they are, -1 for none (then only a keyframe can be made).
        regions: how tensors are cut; the ordinary cut by default.
        thread_count: how many blocks are encoded at a time; by default as many as there are processors.
    """

    def __init__(
        self,
        layout: Layout,
        bits: Mapping[str, Bits],
        version: int = -1,
        *,
        regions: Sequence[Region] | None = None,
        thread_count: int | None = None,
    ) -> None:
        layout.check_bits(bits)
        self.layout = layout
        self.version = version
        self.bits = {name: np.array(array) for name, array in bits.items()}
        self.sums = state_sums(layout, self.bits)
        self._regions = cut(layout) if regions is None else list(regions)
        self._thread_count = thread_count or min(THREAD_COUNT_MAX, os.cpu_count() or 1)

    def prepare_delta(self, identity: Identity, new: Mapping[str, Bits], check: Check = no_check) -> Prepared:
        """The version `identity` as what differs between `new` and this snapshot, bit by bit."""
        assert identity.version > self.version >= 0
        self.layout.check_bits(new)
        names = [spec.name for spec in self.layout.tensors]

        def encode(encoder: Encoder, region: Region) -> Encoded | None:
            name = names[region.tensor]
            return encoder.delta(region.read(self.bits[name]), np.array(region.read(new[name])))

        part = encode_part(self.layout, self._regions, encode, self._thread_count, check=check)
        return self._assemble(identity, part, Place(kind=DELTA, base_version=self.version, sums=self.sums + part.sums))

    def prepare_keyframe(self, identity: Identity, check: Check = no_check) -> Prepared:
        """This snapshot's own weights, as version `identity`."""
        names = [spec.name for spec in self.layout.tensors]

        def encode(encoder: Encoder, region: Region) -> Encoded | None:
            return encoder.dense(region.read(self.bits[names[region.tensor]]))

        part = encode_part(self.layout, self._regions, encode, self._thread_count, check=check)
        if not np.array_equal(part.sums, self.sums):
            # A fault of this machine's memory, or tensors that changed while they were published: heal from here.
            log.error("weights.snapshot_was_torn", extra={"run_id": identity.run_id, "version": identity.version})
            self.sums = part.sums
        return self._assemble(identity, part, Place(kind=KEYFRAME, base_version=-1, sums=part.sums))

    def _assemble(self, identity: Identity, part: Part, place: Place) -> Prepared:
        manifest = make_manifest(identity, self.layout, part, place, cut=cut_digest(self._regions))
        return Prepared(manifest, part.chunks, part.changes)

    def equals(self, other: Mapping[str, Bits], check: Check = no_check) -> bool:
        """Whether `other` has the same stored bits."""
        names = [spec.name for spec in self.layout.tensors]

        def is_same(region: Region) -> bool:
            check()
            name = names[region.tensor]
            return np.array_equal(region.read(self.bits[name]), region.read(other[name]))

        return all(is_same(region) for region in self._regions)

    def advance(self, prepared: Prepared) -> None:
        """Become the version that was prepared from this snapshot; the head has moved to it."""
        if prepared.manifest.kind == DELTA:
            assert prepared.manifest.base_version == self.version
            names = [spec.name for spec in self.layout.tensors]
            for change in prepared.changes:
                apply_change(self.bits[names[change.region.tensor]], change)
        self.sums = prepared.manifest.sums
        self.version = prepared.manifest.version


def apply_change(flat: Bits, change: Change) -> None:
    """Write what a version changes in one region of a flat tensor."""
    if change.indices is None:
        change.region.write(flat, change.values)
    else:
        scatter(flat, change.region.positions(change.indices), change.values)


@dataclass(slots=True)
class _Chunks:
    """Encoded blocks, gathered into chunks of whole blocks, which are hashed while the next ones are encoded."""

    hashing: ThreadPoolExecutor
    done: list[bytes] = field(default_factory=list)
    hashes: list[Future[str]] = field(default_factory=list)
    parts: list[bytes] = field(default_factory=list)
    size: int = 0

    def add(self, data: bytes) -> tuple[int, int]:
        """Take a block in; returns its chunk and where in it the block starts."""
        if self.size and (self.size >= CHUNK_BYTES or self.size + len(data) > CHUNK_BYTES_MAX):
            self.close()
        offset = self.size
        self.parts.append(data)
        self.size += len(data)
        return len(self.done), offset

    def close(self) -> None:
        if self.parts:
            self.done.append(b"".join(self.parts))
            self.hashes.append(self.hashing.submit(chunk_hash, self.done[-1]))
        self.parts, self.size = [], 0


def encode_part(
    layout: Layout,
    regions: Iterable[Region],
    encode: EncodeRegion,
    thread_count: int = 1,
    *,
    has_sums: bool = True,
    has_changes: bool = True,
    check: Check = no_check,
) -> Part:
    """Encode regions, in order; threads begin on the first while the later ones are still being iterated.

    has_sums False: leave the sums at 0, where the caller knows those of the state. has_changes False: keep none.
    check: called before each region.
    """
    keys = [tensor_key(spec.name) for spec in layout.tensors]
    own = threading.local()

    def work(region: Region) -> tuple[Region, Encoded | None, int]:
        if not hasattr(own, "encoder"):
            own.encoder = Encoder()
        check()
        encoded = encode(own.encoder, region)
        moved = 0
        if encoded is not None and has_sums:
            moved = region.change(keys[region.tensor], encoded.indices, encoded.olds, encoded.values)
        if encoded is not None and not has_changes:
            encoded = replace(encoded, indices=None, olds=None, values=np.empty(0, dtype=encoded.values.dtype))
        return region, encoded and replace(encoded, olds=None), moved  # olds are let go before it waits for its turn

    part = Part([], [], [], [], np.zeros(len(layout.tensors), dtype=np.uint64), [])
    totals = [0] * len(layout.tensors)
    with (
        ThreadPoolExecutor(thread_count, thread_name_prefix="hash") as hashing,
        ThreadPoolExecutor(thread_count, thread_name_prefix="encode") as pool,
    ):
        chunks = _Chunks(hashing)
        for region, encoded, moved in pool.map(work, regions):
            if encoded is None:
                continue
            chunk, offset = chunks.add(encoded.data)
            part.rows.append(BlockRow(*region, chunk, offset, len(encoded.data), encoded.changed_count))
            part.digests.append(block_digest(encoded.data))
            if has_changes:
                part.changes.append(Change(region, encoded.indices, encoded.values))
            totals[region.tensor] += moved
        chunks.close()
    part.chunks.extend(chunks.done)
    part.hashes.extend(future.result() for future in chunks.hashes)
    part.sums[:] = [total % 2**64 for total in totals]
    return part


def make_manifest(identity: Identity, layout: Layout, part: Part, place: Place, *, cut: str) -> WeightManifest:
    """The manifest of a version whose blocks are `part`. cut: digest of the regions that the publisher cuts into."""
    return WeightManifest(
        run_id=identity.run_id,
        epoch=identity.epoch,
        version=identity.version,
        base_version=place.base_version,
        kind=place.kind,
        codec=CODEC,
        layout=layout.rows(),
        layout_digest=layout.digest,
        cut_digest=cut,
        blocks=np.array(part.rows, dtype=np.int64).reshape(-1),
        block_digests=np.array(part.digests, dtype=np.uint64),
        chunk_bytes=np.array([len(chunk) for chunk in part.chunks], dtype=np.int32),
        chunk_digests=[chunk_digest(chunk) for chunk in part.chunks],
        payload_bytes=sum(len(chunk) for chunk in part.chunks),
        sums=place.sums,
        changed_count=sum(row.changed_count for row in part.rows),
        element_count=layout.element_count,
        dense_bytes=layout.byte_count,
        carrier=identity.carrier,
        of_entropy_floor=sampled_ratio(layout, part.rows, part.chunks),
        hash_name=HASH,
        chunk_hashes=part.hashes,
    )
