"""The manifest of a published version: names, sizes and digests of everything in it.

- A manifest is written after its chunks and before the head names it; from then on it never changes.
- Digests: every chunk and every block (xxh3-64) against loss on the way; the sums of the whole state (digest.py), which
  every receiver carries along, against a wrong base, a codec fault and drift, before anything is written. They guard
  against faults, not against forgery. Against forgery every chunk has a hash (SHA-256): a chunk from any source but the
  broker is taken by its hash alone.
- A block that has not changed is not listed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import numpy as np
import xxhash
import zstandard
from numpy.typing import NDArray

from ..contract.errors import DigestMismatch, LayoutMismatch, WireError
from ..contract.records import Int32
from ..contract.wire import Record
from ..rules.weights.chain import DELTA, JUMPS, KEYFRAME, Link
from .digest import state_sums, sums_digest
from .layout import Layout
from .regions import Region

CODEC = "step-zstd-2"
HASH = "sha256"  # 1.5 GB/s a core with SHA-NI, blake2b 1.1 (measured); both are in the standard library
BROKER, COLLECTIVE = "broker", "collective"  # the carriers of a version's chunks
NAMES_SHOWN_MAX = 3
DAMAGE_CHUNK_COUNT_MAX = 64  # the publisher looks at the others of that version itself

Sums = NDArray[np.uint64]


class BlockRow(NamedTuple):
    """A block: its region, and where its bytes lie: [offset, offset + length) of a chunk."""

    tensor: int
    start: int
    run: int
    stride: int
    run_count: int
    chunk: int
    offset: int
    length: int
    changed_count: int

    @property
    def region(self) -> Region:
        return Region(*self[:5])


@dataclass(frozen=True, slots=True)
class Head:
    """The newest published version of a run. version -1: none yet. epoch: of the publisher in charge, 0: none ever.

    moved_by: epoch of the publisher that made it the head. A version that a fail-over lost may be published again, by
    another publisher and with other weights.
    """

    version: int = -1
    epoch: int = 0
    kind: str = ""
    moved_by: int = 0


@dataclass(frozen=True, slots=True)
class Holder:
    """A holder of weights of a run. version -1: none yet. address: where it serves bytes to others, empty: nowhere."""

    holder_id: str
    version: int
    address: str = field(default="", repr=False)  # it holds the secret that opens it
    node: str = ""
    region: str = ""


@dataclass(frozen=True, slots=True)
class Damage:
    """A report of a version that a reader could not read: a hint, which the publisher proves by reading it itself.

    epoch: of its publisher, 0 if the manifest itself could not be read. chunks: the first DAMAGE_CHUNK_COUNT_MAX
    indices; none: its manifest, or the content of chunks. problem: "missing", "corrupt" or "undecodable".
    """

    version: int
    kind: str
    epoch: int = 0
    chunks: tuple[int, ...] = ()
    problem: str = "missing"
    reporter: str = ""

    @property
    def name(self) -> tuple[int, str]:
        """Return the name under which its manifest is held."""
        return self.version, self.kind


@dataclass(frozen=True, kw_only=True, eq=False)
class WeightManifest(Record):
    """One version: as a keyframe, as a delta to the version before, or as a jump over several.

    blocks: int64 (9 B,), rows of BlockRow, ordered by chunk and offset. block_digests: uint64 (B,), xxh3-64 of each
    block's bytes. chunk_bytes: int32 (N,). sums: uint64 (T,), of the whole state at this version, tensor by tensor.
    """

    KIND: ClassVar[int] = 20
    ARRAYS: ClassVar[dict[str, str]] = {"blocks": "i8", "block_digests": "u8", "chunk_bytes": "i4", "sums": "u8"}

    run_id: str
    epoch: int
    version: int
    base_version: int  # -1 for a keyframe
    kind: str
    codec: str
    layout: list[Any]  # rows [name, dtype, shape]
    layout_digest: str
    cut_digest: str  # of the regions the publisher cuts tensors into
    blocks: NDArray[np.int64]
    block_digests: Sums
    chunk_bytes: Int32
    chunk_digests: list[str]  # xxh3-64, hex
    payload_bytes: int
    sums: Sums
    changed_count: int
    element_count: int
    dense_bytes: int
    carrier: str = BROKER
    of_entropy_floor: float = 0.0  # the floor over the payload, as the publisher saw on a few blocks; 0: not known
    hash_name: str = ""  # the function of chunk_hashes; any but HASH proves nothing here. Empty: an older publisher's
    chunk_hashes: list[str] = field(default_factory=list)  # hex

    def pack(self) -> bytes:
        """Encode and compress the record, to a third or a tenth as names and rows repeat: every receiver fetches it."""
        return zstandard.ZstdCompressor(level=3).compress(self.encode())

    @classmethod
    def unpack(cls, data: bytes) -> WeightManifest:
        """Do the inverse. Raises WireError: not such a record, or more bytes than one may have."""
        try:
            size = zstandard.frame_content_size(data)
            if not 0 <= size <= cls.bytes_max():
                raise WireError(f"WeightManifest: a frame of {size:,} bytes, one has at most {cls.bytes_max():,}")
            return cls.decode(zstandard.ZstdDecompressor().decompress(data, max_output_size=size or 1))
        except zstandard.ZstdError as error:
            raise WireError(f"WeightManifest: cannot be unpacked: {error}") from error

    @cached_property
    def tensors(self) -> Layout:
        """Return the layout as an object.

        Raises:
            WireError: the rows are not the layout that the digest names.
        """
        try:
            layout = Layout.from_rows(self.layout)
        except (TypeError, ValueError, LayoutMismatch) as error:
            raise WireError(f"manifest of version {self.version}: its layout cannot be read: {error}") from error
        if layout.digest != self.layout_digest:
            raise WireError(f"manifest of version {self.version}: its layout has another digest than it says")
        return layout

    @property
    def link(self) -> Link:
        """The manifest's place in the chain."""
        return Link(
            version=self.version,
            base_version=self.base_version,
            kind=self.kind,
            epoch=self.epoch,
            payload_bytes=self.payload_bytes,
            chunk_count=len(self.chunk_bytes),
        )

    @property
    def field(self) -> str:
        """The manifest's name among those of its run."""
        return f"{self.version}:{self.kind}"

    @property
    def state_digest(self) -> str:
        """One text for the whole state at this version: equal exactly when all sums and the layout are."""
        return f"{self.layout_digest[:16]}{sums_digest(self.sums)}"

    @property
    def has_proofs(self) -> bool:
        """Whether its chunks can be told from forged ones."""
        return self.hash_name == HASH and len(self.chunk_hashes) == len(self.chunk_bytes)

    def proves(self, index: int, data: bytes | memoryview) -> bool:
        """Whether `data` is chunk `index`, whoever sent it; never without proofs."""
        is_known = self.has_proofs and len(data) == self.chunk_bytes[index]
        return is_known and chunk_hash(data) == self.chunk_hashes[index]

    @property
    def density(self) -> float:
        """Changed elements as a fraction of all."""
        return self.changed_count / max(1, self.element_count)

    @cached_property
    def rows(self) -> list[BlockRow]:
        """The blocks, in the order of chunks."""
        return [BlockRow(*row) for row in self.blocks.reshape(-1, len(BlockRow._fields)).tolist()]

    def check(self) -> None:
        """Require a codec that this version reads, blocks that lie in chunks and tensors, and a keyframe that is whole.

        Raises:
            WireError: names what does not fit.
        """
        name = f"manifest of version {self.version} ({self.kind})"
        if self.codec != CODEC:
            raise WireError(f"{name}: codec {self.codec!r}, this version reads {CODEC!r}: upgrade the older side")
        if self.kind not in (KEYFRAME, DELTA, *JUMPS) or not -1 <= self.base_version < self.version:
            raise WireError(f"{name}: it cannot have the base {self.base_version}")
        if len(self.chunk_bytes) != len(self.chunk_digests) or len(self.blocks) % len(BlockRow._fields):
            raise WireError(f"{name}: chunks or blocks are cut off")
        if self.hash_name == HASH and not self.has_proofs:
            raise WireError(f"{name}: it has not one hash for each chunk")
        if len(self.block_digests) * len(BlockRow._fields) != len(self.blocks):
            raise WireError(f"{name}: it has not one digest for each block")
        layout = self.tensors
        if len(self.sums) != len(layout.tensors):
            raise WireError(f"{name}: {len(self.sums)} sums for {len(layout.tensors)} tensors")
        if len(self.chunk_bytes) and self.chunk_bytes.min() < 0:
            raise WireError(f"{name}: a chunk has fewer than no bytes")
        self._check_rows(name, layout)

    def _check_rows(self, name: str, layout: Layout) -> None:
        for row in self.rows:
            if not (0 <= row.chunk < len(self.chunk_bytes) and 0 <= row.tensor < len(layout.tensors)):
                raise WireError(f"{name}: a block lies in a chunk or tensor that does not exist")
            if row.offset < 0 or row.length <= 0 or row.offset + row.length > self.chunk_bytes[row.chunk]:
                raise WireError(f"{name}: a block ends behind its chunk")
            spec = layout.tensors[row.tensor]
            if not row.region.fits(spec) or not 0 <= row.changed_count <= row.region.element_count:
                raise WireError(f"{name}: a block of tensor {spec.name!r} is not a part of it: {row.region}")
        if len({row.region for row in self.rows}) != len(self.rows):
            raise WireError(f"{name}: it holds a block twice")
        covered = [0] * len(layout.tensors)
        for row in self.rows:
            covered[row.tensor] += row.region.element_count
        for count, spec in zip(covered, layout.tensors, strict=True):
            if count > spec.element_count or (self.kind == KEYFRAME and count < spec.element_count):
                raise WireError(f"{name}: {count:,} elements of tensor {spec.name!r}, which has {spec.element_count:,}")

    def check_sums(self, sums: Sums) -> None:
        """Require that `sums` are those of this version's state.

        Raises:
            DigestMismatch: names the tensors that differ.
        """
        wrong = np.flatnonzero(sums != self.sums)
        if not len(wrong):
            return
        names = [self.tensors.tensors[index].name for index in wrong.tolist()]
        more = f" and {len(names) - NAMES_SHOWN_MAX} more" if len(names) > NAMES_SHOWN_MAX else ""
        raise DigestMismatch(
            f"these are not the weights of version {self.version} ({self.kind}) of run {self.run_id!r}: tensor"
            f" {', '.join(names[:NAMES_SHOWN_MAX])}{more} differs; nothing of it may be used. Fetch a keyframe",
            version=self.version,
            kind=self.kind,
            names=names,
        )


def check_state(manifest: WeightManifest, bits: Mapping[str, NDArray[Any]]) -> Sums:
    """Require that `bits` (flat, all tensors) is the whole state that the manifest names; returns its sums.

    Raises:
        DigestMismatch: names the tensors that differ.
    """
    sums = state_sums(manifest.tensors, bits)
    manifest.check_sums(sums)
    return sums


def pieces(sizes: Iterable[tuple[int, int]], bytes_max: int) -> list[list[int]]:
    """Cut indices, in their order, into pieces of at most `bytes_max`, or of one index. sizes: rows (index, bytes)."""
    found: list[list[int]] = []
    room = 0
    for index, size in sizes:
        if size > room or not found:
            found.append([])
            room = bytes_max
        found[-1].append(index)
        room -= size
    return found


def chunk_digest(data: bytes | memoryview) -> str:
    """Return xxh3-64, hex."""
    return xxhash.xxh3_64_hexdigest(data)


def chunk_hash(data: bytes | memoryview) -> str:
    """Return SHA-256, hex."""
    return hashlib.sha256(data).hexdigest()


def block_digest(data: bytes | memoryview) -> int:
    """Return xxh3-64 as a number."""
    return xxhash.xxh3_64_intdigest(data)
