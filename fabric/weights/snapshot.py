"""The publisher's copy of what receivers hold, and versions made from it.

- `prepare_*` only reads; the snapshot moves by `advance`, which the caller calls once the head has moved. A publish
  that fails leaves it where the receivers are.
- Advancing costs as much as has changed, not as much as the model has.
- Memory: one copy of the weights, and the encoded bytes of the version being prepared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from ..rules.chain import DELTA, KEYFRAME
from .codec import BLOCK_BYTES, Bits, Encoded, Encoder
from .layout import Layout, TensorSpec
from .manifest import (
    CODEC,
    BlockRow,
    StagedDigest,
    WeightManifest,
    block_count,
    block_slice,
    chunk_digest,
    state_digest,
)

CHUNK_BYTES = 1 << 20  # a chunk is closed when it reaches this; brokers and clients move 1 to 4 MiB best (measured)
CHUNK_BYTES_MAX = 4 << 20  # and before a further block would bring it above this

EncodeBlock = Callable[[Encoder, TensorSpec, slice], Encoded | None]


@dataclass(frozen=True, slots=True)
class Change:
    """What a prepared version changes in one block. indices: uint32 positions in the block, None for all."""

    name: str
    place: slice
    indices: NDArray[np.uint32] | None
    values: Bits


@dataclass(frozen=True, slots=True)
class Prepared:
    """A version ready to be sent. Arrays of dense changes are views of the weights it was made from."""

    manifest: WeightManifest
    chunks: list[bytes]
    changes: list[Change]

    def detached(self) -> Prepared:
        """The same without views of weights that may change before it is sent."""
        return replace(self, changes=[replace(change, values=np.array(change.values)) for change in self.changes])


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Whose version it is."""

    run_id: str
    epoch: int
    version: int


class Snapshot:
    """Weights of one version, as stored bits.

    Args:
        bits: flat stored bits by name; copied.
        version: the version they are, -1 for none (then only a keyframe can be made).
    """

    def __init__(self, layout: Layout, bits: Mapping[str, Bits], version: int = -1) -> None:
        layout.check_bits(bits)
        self.layout = layout
        self.version = version
        self.bits = {name: np.array(array) for name, array in bits.items()}

    def prepare_delta(self, identity: Identity, new: Mapping[str, Bits], *, has_state_digest: bool = True) -> Prepared:
        """The version `identity` as what differs between `new` and this snapshot, bit by bit."""
        assert identity.version > self.version >= 0

        def encode(encoder: Encoder, spec: TensorSpec, place: slice) -> Encoded | None:
            return encoder.delta(self.bits[spec.name][place], new[spec.name][place])

        self.layout.check_bits(new)
        state = state_digest(self.layout, new) if has_state_digest else ""
        return _prepare(identity, self.layout, encode, base_version=self.version, state=state)

    def prepare_keyframe(self, identity: Identity) -> Prepared:
        """This snapshot's own weights, as version `identity`."""

        def encode(encoder: Encoder, spec: TensorSpec, place: slice) -> Encoded | None:
            return encoder.dense(self.bits[spec.name][place])

        return _prepare(identity, self.layout, encode, base_version=-1, state=state_digest(self.layout, self.bits))

    def equals(self, other: Mapping[str, Bits]) -> bool:
        """Whether `other` has the same stored bits."""
        return all(np.array_equal(array, other[name]) for name, array in self.bits.items())

    def advance(self, prepared: Prepared) -> None:
        """Become the version that was prepared from this snapshot; the head has moved to it."""
        if prepared.manifest.kind == DELTA:
            assert prepared.manifest.base_version == self.version
            for change in prepared.changes:
                block = self.bits[change.name][change.place]
                block[... if change.indices is None else change.indices] = change.values
        self.version = prepared.manifest.version


@dataclass(slots=True)
class _Chunks:
    """Encoded blocks, gathered into chunks of whole blocks."""

    done: list[bytes] = field(default_factory=list)
    parts: list[bytes] = field(default_factory=list)
    size: int = 0

    def add(self, data: bytes) -> tuple[int, int]:
        """Take a block in; returns its chunk and where in it the block starts."""
        if self.size and (self.size >= CHUNK_BYTES or self.size + len(data) > CHUNK_BYTES_MAX):
            self.close()
        start = self.size
        self.parts.append(data)
        self.size += len(data)
        return len(self.done), start

    def close(self) -> None:
        if self.parts:
            self.done.append(b"".join(self.parts))
        self.parts, self.size = [], 0


def _prepare(identity: Identity, layout: Layout, encode: EncodeBlock, *, base_version: int, state: str) -> Prepared:
    encoder, digest, chunks = Encoder(), StagedDigest(), _Chunks()
    rows: list[BlockRow] = []
    changes: list[Change] = []
    for tensor, spec in enumerate(layout.tensors):
        for block in range(block_count(spec)):
            place = block_slice(spec, block)
            encoded = encode(encoder, spec, place)
            if encoded is None:
                continue
            chunk, start = chunks.add(encoded.data)
            rows.append(BlockRow(tensor, block, chunk, start, len(encoded.data), encoded.changed_count))
            changes.append(Change(spec.name, place, encoded.indices, encoded.values))
            digest.add(tensor, block, encoded.indices, encoded.values)
    chunks.close()
    manifest = WeightManifest(
        run_id=identity.run_id,
        epoch=identity.epoch,
        version=identity.version,
        base_version=base_version,
        kind=DELTA if base_version >= 0 else KEYFRAME,
        codec=CODEC,
        block_bytes=BLOCK_BYTES,
        layout=layout.rows(),
        layout_digest=layout.digest,
        blocks=np.array(rows, dtype=np.int32).reshape(-1),
        chunk_bytes=np.array([len(chunk) for chunk in chunks.done], dtype=np.int32),
        chunk_digests=[chunk_digest(chunk) for chunk in chunks.done],
        payload_bytes=sum(len(chunk) for chunk in chunks.done),
        staged_digest=digest.hex(),
        state_digest=state,
        changed_count=sum(row.changed_count for row in rows),
        element_count=layout.element_count,
        dense_bytes=layout.byte_count,
    )
    return Prepared(manifest, chunks.done, changes)
