"""Takes a version apart: its blocks by mode and by tensor, and how near it comes to the entropy floor.

Every block is fetched, checked and decoded; the weights themselves are not needed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from ..contract.errors import ChainBroken, DigestMismatch, VersionUnknown
from ..format.codec import SPARSE, STEPS, VALUES
from ..format.decoder import Decoder
from ..format.manifest import WeightManifest
from ..ports.weights import WeightStore
from ..rules.weights.chain import DELTA, KEYFRAME
from ..versions.checked import ABSENT, Chunk, checked_chunks
from ..versions.entropy import Floor, block_floor

MODES = {SPARSE: "gaps and steps", STEPS: "steps of all", VALUES: "values"}  # by a block's first byte


@dataclass(slots=True)
class Tally:
    """Some blocks in sums. element_count: of what they cover."""

    block_count: int = 0
    byte_count: int = 0
    element_count: int = 0
    changed_count: int = 0


@dataclass(slots=True)
class Inspection:
    """A version taken apart. modes: by how a block is coded. tensors: in the layout's order, those that changed."""

    manifest: WeightManifest
    modes: dict[str, Tally] = field(default_factory=dict)
    tensors: dict[str, Tally] = field(default_factory=dict)
    floor: Floor = field(default_factory=Floor)

    @property
    def of_entropy_floor(self) -> float | None:
        """The floor's bytes as a fraction of the payload's; None where nothing changed."""
        return self.floor.byte_count / self.manifest.payload_bytes if self.manifest.payload_bytes else None


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionFigures:
    """The sizes that a manifest states."""

    version: int
    kind: str
    """keyframe, delta, or jump-8 or jump-64: several deltas as one."""
    base_version: int
    """The version that a delta or a jump is applied to; -1 for a keyframe."""
    payload_bytes: int
    """The bytes that travel."""
    dense_bytes: int
    """The bytes that the full weights take."""
    chunk_count: int
    changed_count: int
    element_count: int
    density: float | None
    """Changed elements as a fraction of all; null for a keyframe."""
    bytes_per_changed: float | None
    """Bytes of the payload for each changed element; null for a keyframe, or where nothing changed."""
    dense_over_payload: float | None
    """How many times smaller than the full weights; null where nothing travels."""
    of_entropy_floor: float | None
    """The entropy floor over the payload, as its publisher saw on a few blocks; null where it did not look."""
    carrier: str
    """The way by which its chunks travelled: broker or collective."""


def version_figures(manifest: WeightManifest) -> VersionFigures:
    """Read the sizes that a manifest states."""
    is_keyframe, changed_count = manifest.kind == KEYFRAME, manifest.changed_count
    return VersionFigures(
        version=manifest.version,
        kind=manifest.kind,
        base_version=manifest.base_version,
        payload_bytes=manifest.payload_bytes,
        dense_bytes=manifest.dense_bytes,
        chunk_count=len(manifest.chunk_bytes),
        changed_count=changed_count,
        element_count=manifest.element_count,
        density=None if is_keyframe else manifest.density,
        bytes_per_changed=None if is_keyframe or not changed_count else manifest.payload_bytes / changed_count,
        dense_over_payload=manifest.dense_bytes / manifest.payload_bytes if manifest.payload_bytes else None,
        of_entropy_floor=manifest.of_entropy_floor or None,
        carrier=manifest.carrier,
    )


async def inspect_version(
    store: WeightStore,
    run_id: str,
    version: int,
    kind: str | None = None,
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Inspection:
    """Take a version apart. kind: of its manifest; None: the delta, or what there is. progress: of bytes.

    Raises:
        VersionUnknown: no such manifest is held. ChainBroken: a chunk is not there. DigestMismatch: one is corrupt.
    """
    kinds = [name[1] for name in await store.held(run_id) if name[0] == version]
    chosen = kind or (DELTA if DELTA in kinds else kinds[0] if kinds else DELTA)
    (manifest,) = await store.manifests(run_id, [(version, chosen)]) if chosen in kinds else [None]
    if manifest is None:
        there = f"held of it: {', '.join(kinds)}" if kinds else "`rollfab weights ls` shows what is held"
        raise VersionUnknown(
            f"version {version}{f' ({kind})' if kind else ''} of run {run_id!r} is not held: {there}", version=version
        )
    manifest.check()
    found = Inspection(manifest)
    done_bytes = 0
    async for chunk in checked_chunks(store, manifest):
        await asyncio.to_thread(_take, found, chunk)
        done_bytes += len(chunk.data or b"")
        progress(done_bytes, manifest.payload_bytes)
    order = {spec.name: place for place, spec in enumerate(manifest.tensors.tensors)}
    found.tensors = dict(sorted(found.tensors.items(), key=lambda item: order[item[0]]))
    return found


def _take(found: Inspection, chunk: Chunk) -> None:
    manifest = found.manifest
    if chunk.data is None:
        kind = ChainBroken if chunk.problem == ABSENT else DigestMismatch
        raise kind(
            f"chunk {chunk.index} of version {manifest.version} ({manifest.kind}) of run {manifest.run_id!r}"
            f" {chunk.problem}: `rollfab weights verify` says what else is wrong",
            version=manifest.version,
            chunk=chunk.index,
        )
    decoder, view = Decoder(), memoryview(chunk.data)
    for row, _ in chunk.rows:
        spec, count = manifest.tensors.tensors[row.tensor], row.region.element_count
        block = view[row.offset : row.offset + row.length]
        decoded = decoder.decode(block, element_count=count, dtype=spec.bits_dtype)
        found.floor += block_floor(decoded, count)
        for tally in (
            found.modes.setdefault(MODES[block[0]], Tally()),
            found.tensors.setdefault(spec.name, Tally()),
        ):
            tally.block_count += 1
            tally.byte_count += row.length
            tally.element_count += count
            tally.changed_count += row.changed_count
