"""The publisher's copy of the receivers' weights, of the whole model or of one rank's part, and versions made from it.

- A part is boxes of tensors, each flat and by itself; a whole model has one box for each tensor: all of it. Each part
  makes its own blocks and sums; those of all parts together are one version.
- Bits stay where they are given, on the host or on a device, and are compared there (format/kernels). Only the changes
  of a delta come to the host. Bits may be elsewhere from one version to the next.
- `prepare_*` only reads; the snapshot moves by `advance`, which the caller calls once the head has moved. A publish
  that fails leaves it where the receivers are.
- The cost of advancing grows with the changes, not with the model; so does the cost of the state's sums.
- Each region of the new weights is read once, to a copy; the version's bytes, its sums and the next snapshot are made
  from that copy. So they agree, whatever the trainer does meanwhile, and nothing that is kept is a view of its memory.
- Blocks are encoded side by side in threads, and lie in the chunks in the order of the cut whichever thread was first.
- Memory: one copy of the weights, the encoded bytes of the version being prepared, and a copy of its dense blocks.
  If a device has no room for the copy, it is on the host, with a warning.
- `prepare_*` refuses new values that are not finite where its caller says so; it looks at the changed values alone.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from ..format.codec import Bits, Encoded, Encoder
from ..format.digest import state_sums, tensor_key
from ..format.finite import FiniteCheck
from ..format.kernels.places import is_on_device, load_torch, on_host
from ..format.kernels.protocol import Flat
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
from ..format.regions import Region, cut, cut_digest, cut_region
from ..rules.weights.chain import DELTA, KEYFRAME
from .commit import scatter
from .device_changes import DeviceChanges, grouped
from .entropy import sampled_ratio

CHUNK_BYTES = 1 << 20  # a chunk is closed when it reaches this; brokers and clients move 1 to 4 MiB best (measured)
CHUNK_BYTES_MAX = 4 << 20  # and before a further block would bring it above this
NOTHING = np.empty(0, dtype=np.uint8)
THREAD_COUNT_MAX = 8  # memory bandwidth is used up before

log = logging.getLogger(__name__)

EncodeRegion = Callable[[Encoder, Region], Encoded | None]
Check = Callable[[], None]  # called between two regions; its error ends the work


def no_check() -> None:
    """Check nothing: the work is wanted whatever happens."""


@dataclass(frozen=True, slots=True)
class Change:
    """The changes of a prepared version in one region. indices: uint32 positions in the region, None for all."""

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
    """A version ready to be sent. Its memory is its own, or the snapshot's.

    chunks, changes, sums: of the part that prepared it; the manifest may be of all parts.
    """

    manifest: WeightManifest
    chunks: list[bytes]
    changes: list[Change]
    sums: Sums


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """A version's run, number and publisher, and its carrier."""

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
        boxes: regions of the tensors that `bits` hold, at most one of each; by default all of every tensor.
        regions: how whole tensors are cut; the ordinary cut by default.
        beside: bits by name where the copy is to be kept; by default where `bits` are.
        thread_count: how many blocks are encoded at a time; by default as many as there are processors.

    Attributes:
        sums: of its own part. For weights without a version, the first keyframe makes them.
    """

    def __init__(
        self,
        layout: Layout,
        bits: Mapping[str, Flat],
        version: int = -1,
        *,
        boxes: Iterable[Region] | None = None,
        regions: Iterable[Region] | None = None,
        beside: Mapping[str, Flat] | None = None,
        thread_count: int | None = None,
    ) -> None:
        self.layout = layout
        self.version = version
        self._names = [spec.name for spec in layout.tensors]
        if boxes is None:
            if not any(map(is_on_device, bits.values())):
                layout.check_bits(bits)
            self._places = {region: region for region in (cut(layout) if regions is None else regions)}
        else:
            self._places = packed(layout, boxes)
        widths = {number: spec.bits_dtype.itemsize for number, spec in enumerate(layout.tensors)}
        self._groups = grouped(self._places.values(), widths)
        self.bits = _copies(bits, bits if beside is None else beside)
        self.sums = np.zeros(len(layout.tensors), dtype=np.uint64)
        if version >= 0:
            self.sums = state_sums(layout, {name: on_host(flat) for name, flat in bits.items()})
        self._thread_count = thread_count or min(THREAD_COUNT_MAX, os.cpu_count() or 1)

    def prepare_delta(
        self, identity: Identity, new: Mapping[str, Flat], check: Check = no_check, *, finite_over: int | None = None
    ) -> Prepared:
        """Make the version `identity` from the bits that differ between `new` and this snapshot.

        finite_over: the live version (-1: none), over which only finite values may be published; None: any may.

        Raises:
            WeightsNotFinite: a changed value is NaN or infinite, and may not be.
        """
        assert identity.version > self.version >= 0

        compared = DeviceChanges(self._by_number(self.bits), self._by_number(new), self._groups)

        def encode(encoder: Encoder, region: Region) -> Encoded | None:
            place, name = self._places[region], self._names[region.tensor]
            if _are_together(self.bits[name], new[name]) and (changes := compared.of(place)) is not None:
                return encoder.few(changes)
            return encoder.delta(on_host(place.read(self.bits[name])), np.array(on_host(place.read(new[name]))))

        part = self._encoded(identity, encode, check, finite_over)
        return self._assemble(identity, part, Place(kind=DELTA, base_version=self.version, sums=self.sums + part.sums))

    def prepare_keyframe(
        self, identity: Identity, check: Check = no_check, *, finite_over: int | None = None
    ) -> Prepared:
        """Make the version `identity` from this snapshot's own weights. finite_over, Raises: as of prepare_delta."""

        def encode(encoder: Encoder, region: Region) -> Encoded | None:
            return encoder.dense(self._places[region].read(self.bits[self._names[region.tensor]]))

        part = self._encoded(identity, encode, check, finite_over)
        if self.version >= 0 and not np.array_equal(part.sums, self.sums):
            # A fault of this machine's memory, or tensors that changed while they were published: heal from here.
            log.error("weights.snapshot_was_torn", extra={"run_id": identity.run_id, "version": identity.version})
        self.sums = part.sums
        return self._assemble(identity, part, Place(kind=KEYFRAME, base_version=-1, sums=part.sums))

    def _encoded(self, identity: Identity, encode: EncodeRegion, check: Check, finite_over: int | None) -> Part:
        if finite_over is None:
            return encode_part(self.layout, self._places, encode, self._thread_count, check=check)
        finite = FiniteCheck(self.layout)

        def looked_at(encoder: Encoder, region: Region) -> Encoded | None:
            return finite.look(region, encode(encoder, region))

        part = encode_part(self.layout, self._places, looked_at, self._thread_count, check=check)
        finite.end(identity.version, finite_over)
        return part

    def _assemble(self, identity: Identity, part: Part, place: Place) -> Prepared:
        manifest = make_manifest(identity, self.layout, part, place, cut=cut_digest(self._places))
        return Prepared(manifest, part.chunks, part.changes, place.sums)

    def equals(self, other: Mapping[str, Flat], check: Check = no_check) -> bool:
        """Tell whether `other` has the same stored bits."""

        def is_same(region: Region) -> bool:
            check()
            place, name = self._places[region], self._names[region.tensor]
            old, new = place.read(self.bits[name]), place.read(other[name])
            is_together = _are_together(self.bits[name], other[name])
            return load_torch().is_same(old, new) if is_together else np.array_equal(on_host(old), on_host(new))

        return self.bits.keys() == other.keys() and all(is_same(region) for region in self._places)

    def advance(self, prepared: Prepared) -> None:
        """Become the version that was prepared from this snapshot; the head has moved to it."""
        if prepared.manifest.kind == DELTA:
            assert prepared.manifest.base_version == self.version
            for change in prepared.changes:
                own = replace(change, region=self._places[change.region])
                apply_change(self.bits[self._names[own.region.tensor]], own)
        self.sums = prepared.sums
        self.version = prepared.manifest.version

    def _by_number(self, flats: Mapping[str, Flat]) -> dict[int, Flat]:
        return {number: flats[name] for number, name in enumerate(self._names) if name in flats}


def _are_together(old: Flat, new: Flat) -> bool:
    """Tell whether both are on one device, where they can be compared."""
    return is_on_device(old) and is_on_device(new) and bool(old.device == new.device)


def packed(layout: Layout, boxes: Iterable[Region]) -> dict[Region, Region]:
    """Map each block of the boxes to its place in a flat array that holds its box alone. One box for a tensor."""
    places: dict[Region, Region] = {}
    for box in boxes:
        first = 0
        for region in cut_region(box, layout.tensors[box.tensor]):
            places[region] = Region.span(box.tensor, first, first + region.element_count)
            first += region.element_count
    return places


def _copies(bits: Mapping[str, Flat], beside: Mapping[str, Flat]) -> dict[str, Flat]:
    """Copy bits, each to where `beside` has that of its name, or all to the host."""
    if any(map(is_on_device, beside.values())):
        return load_torch().copies(bits, beside)
    return {name: np.array(on_host(flat)) for name, flat in bits.items()}


def apply_change(flat: Flat, change: Change) -> None:
    """Write a version's changes in one region of a flat tensor."""
    if is_on_device(flat):
        load_torch().write(change.region.read(flat), change.indices, change.values)
    elif change.indices is None:
        change.region.write(flat, change.values)
    else:
        scatter(flat, change.region.positions(change.indices), change.values)


@dataclass(slots=True)
class _Chunks:
    """Gathers encoded blocks into chunks of whole blocks, and hashes a chunk while the next blocks are encoded."""

    hashing: ThreadPoolExecutor
    done: list[bytes] = field(default_factory=list)
    hashes: list[Future[str]] = field(default_factory=list)
    parts: list[bytes] = field(default_factory=list)
    size: int = 0

    def add(self, data: bytes) -> tuple[int, int]:
        """Take a block in; return its chunk and where in it the block starts."""
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
    check: Check = no_check,
) -> Part:
    """Encode regions, in order. Keep the changes where there is a base to change.

    has_sums False: leave the sums at 0, as the caller knows those of the state. check: called before each region.
    """
    keys = [tensor_key(spec.name) for spec in layout.tensors]
    own = threading.local()

    def work(region: Region) -> tuple[Region, Encoded | None, Change | None, int]:
        if not hasattr(own, "encoder"):
            own.encoder = Encoder()
        check()
        encoded = encode(own.encoder, region)
        moved = 0
        if encoded is not None and has_sums:
            moved = region.change(keys[region.tensor], encoded.indices, encoded.olds, encoded.values)
        change = None
        if encoded is not None and encoded.olds is not None:
            change = Change(region, encoded.indices, encoded.values)
        # Release unneeded memory before the block waits for its turn.
        return region, encoded and replace(encoded, indices=None, olds=None, values=NOTHING), change, moved

    part = Part([], [], [], [], np.zeros(len(layout.tensors), dtype=np.uint64), [])
    totals = [0] * len(layout.tensors)
    with (
        ThreadPoolExecutor(thread_count, thread_name_prefix="hash") as hashing,
        ThreadPoolExecutor(thread_count, thread_name_prefix="encode") as pool,
    ):
        chunks = _Chunks(hashing)
        for region, encoded, change, moved in pool.map(work, regions):
            if encoded is None:
                continue
            chunk, offset = chunks.add(encoded.data)
            part.rows.append(BlockRow(*region, chunk, offset, len(encoded.data), encoded.changed_count))
            part.digests.append(block_digest(encoded.data))
            if change is not None:
                part.changes.append(change)
            totals[region.tensor] += moved
        chunks.close()
    part.chunks.extend(chunks.done)
    part.hashes.extend(future.result() for future in chunks.hashes)
    part.sums[:] = [total % 2**64 for total in totals]
    return part


def make_manifest(identity: Identity, layout: Layout, part: Part, place: Place, *, cut: str) -> WeightManifest:
    """Make the manifest of a version whose blocks are `part`. cut: digest of the publisher's regions."""
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
