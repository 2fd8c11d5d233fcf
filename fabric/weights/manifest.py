"""What a published version is: the manifest that names, sizes and digests everything in it.

- A manifest is written after its chunks and before the head names it; from then on it never changes.
- Digests: every chunk (xxh3-64) against loss on the way; what is staged (xxh3-128 over positions and new values, in
  block order) against a wrong base or a codec fault, before anything is written; the whole state (xxh3-128 over all
  tensors in layout order) against drift. They guard against faults, not against forgery.
- A block that has not changed is not listed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from ..errors import LayoutMismatch, WireError
from ..records import Int32
from ..rules.chain import DELTA, KEYFRAME, Link
from ..wire import Record
from .codec import BLOCK_BYTES
from .layout import Layout, TensorSpec

CODEC = "step-zstd-1"


class BlockRow(NamedTuple):
    """Where a block lies: bytes [start, start + length) of a chunk. tensor: place in the layout's order."""

    tensor: int
    block: int
    chunk: int
    start: int
    length: int
    changed_count: int


@dataclass(frozen=True, slots=True)
class Head:
    """The newest published version of a run. version -1: none yet. epoch: of the publisher in charge, 0: none ever.

    moved_by: epoch of the publisher that made it the head. A version that a fail-over lost may be published again, by
    another one and with other weights.
    """

    version: int = -1
    epoch: int = 0
    kind: str = ""
    moved_by: int = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class WeightManifest(Record):
    """One version, as a keyframe or as a delta to `base_version`.

    blocks: int32 (6 B,), rows of BlockRow, ordered by chunk and start. chunk_bytes: int32 (N,).
    """

    KIND: ClassVar[int] = 20
    ARRAYS: ClassVar[dict[str, str]] = {"blocks": "i4", "chunk_bytes": "i4"}

    run_id: str
    epoch: int
    version: int
    base_version: int  # -1 for a keyframe
    kind: str
    codec: str
    block_bytes: int
    layout: list[Any]  # rows [name, dtype, shape]
    layout_digest: str
    blocks: Int32
    chunk_bytes: Int32
    chunk_digests: list[str]  # xxh3-64, hex
    payload_bytes: int
    staged_digest: str  # xxh3-128, hex
    state_digest: str  # xxh3-128, hex; empty where not computed
    changed_count: int
    element_count: int
    dense_bytes: int

    @cached_property
    def tensors(self) -> Layout:
        """The layout as an object.

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

    def rows(self) -> list[BlockRow]:
        """The blocks, in the order of chunks and of the staged digest."""
        return [BlockRow(*row) for row in self.blocks.reshape(-1, len(BlockRow._fields)).tolist()]

    def check(self) -> None:
        """Require a codec and grid that this version reads, and a keyframe that is whole.

        Raises:
            WireError: names what does not fit.
        """
        name = f"manifest of version {self.version} ({self.kind})"
        if self.codec != CODEC or self.block_bytes != BLOCK_BYTES:
            raise WireError(
                f"{name}: codec {self.codec!r} with blocks of {self.block_bytes} bytes, this version reads"
                f" {CODEC!r} with {BLOCK_BYTES}: upgrade the older side"
            )
        if self.kind not in (KEYFRAME, DELTA) or not -1 <= self.base_version < self.version:
            raise WireError(f"{name}: it cannot have the base {self.base_version}")
        if len(self.chunk_bytes) != len(self.chunk_digests) or len(self.blocks) % len(BlockRow._fields):
            raise WireError(f"{name}: chunks or blocks are cut off")
        if len(self.chunk_bytes) and self.chunk_bytes.min() < 0:
            raise WireError(f"{name}: a chunk has fewer than no bytes")
        rows, layout = self.rows(), self.tensors
        for row in rows:
            self._check_row(name, row, layout)
        blocks = {(row.tensor, row.block) for row in rows}
        if len(blocks) != len(rows):
            raise WireError(f"{name}: it holds a block twice")
        block_total = sum(block_count(spec) for spec in layout.tensors)
        if self.kind == KEYFRAME and len(blocks) != block_total:
            raise WireError(f"{name}: {len(rows)} blocks, a keyframe of this layout has {block_total}")

    def _check_row(self, name: str, row: BlockRow, layout: Layout) -> None:
        if min(row) < 0 or row.chunk >= len(self.chunk_bytes) or row.tensor >= len(layout.tensors):
            raise WireError(f"{name}: a block lies in a chunk or tensor that does not exist")
        if row.start + row.length > self.chunk_bytes[row.chunk]:
            raise WireError(f"{name}: a block ends behind its chunk")
        spec = layout.tensors[row.tensor]
        if row.block >= block_count(spec) or row.changed_count > block_elements(spec):
            raise WireError(f"{name}: block {row.block} of tensor {spec.name!r} is not one of its {block_count(spec)}")


class StagedDigest:
    """The running digest of what a version writes, block by block."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_128()

    def add(self, tensor: int, block: int, indices: NDArray[Any] | None, values: NDArray[Any]) -> None:
        """Add one block: positions inside it (None: all) and new values."""
        self._hash.update(np.array([tensor, block, indices is None], dtype="<i4").tobytes())
        if indices is not None:
            self._hash.update(np.ascontiguousarray(indices, dtype="<u4").data)
        self._hash.update(np.ascontiguousarray(values).data)

    def hex(self) -> str:
        """The digest so far."""
        return self._hash.hexdigest()


def state_digest(layout: Layout, bits: Mapping[str, NDArray[Any]]) -> str:
    """xxh3-128, hex, over all tensors in layout order. bits: flat stored bits by name."""
    digest = xxhash.xxh3_128()
    for spec in layout.tensors:
        digest.update(np.ascontiguousarray(bits[spec.name]).data)
    return digest.hexdigest()


def chunk_digest(data: bytes | memoryview) -> str:
    """xxh3-64, hex."""
    return xxhash.xxh3_64_hexdigest(data)


def block_elements(spec: TensorSpec) -> int:
    """Elements of a whole block of this tensor."""
    return BLOCK_BYTES // spec.bits_dtype.itemsize


def block_count(spec: TensorSpec) -> int:
    """Blocks of this tensor; 0 for an empty one."""
    return -(-spec.element_count // block_elements(spec))


def block_slice(spec: TensorSpec, block: int) -> slice:
    """Elements of block `block` in the flat tensor."""
    size = block_elements(spec)
    return slice(block * size, min((block + 1) * size, spec.element_count))
