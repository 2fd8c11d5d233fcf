"""Finds damage in the store by reading again what is held, and undoes it where the right bytes are to be had.

- A version is damaged when the store does not give its manifest as it was published, or a chunk that is not what the
  manifest names: gone, cut off, changed, another's, or a key of another type.
- Only bytes that have the manifest's digests are ever written in a chunk's place.

Who knows the right bytes, and what becomes of a version that nobody can make whole, is upkeep's
(trainer/publish/upkeep.py) and the operator's who repairs (deploy/weights/repair.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..contract.errors import WireError
from ..format.manifest import BROKER, WeightManifest, chunk_digest
from ..ports.weights import WeightStore


@dataclass(frozen=True, slots=True)
class Wound:
    """The damage to a version in the store. is_listed: its manifest is there and right. chunks: wrong ones."""

    manifest: WeightManifest
    is_listed: bool
    chunks: tuple[int, ...]

    def __str__(self) -> str:
        manifest = self.manifest
        parts = [] if self.is_listed else ["its manifest"]
        if self.chunks:
            more = f" and {len(self.chunks) - 8} more" if len(self.chunks) > 8 else ""
            parts.append(f"chunk {', '.join(map(str, self.chunks[:8]))}{more} of {len(manifest.chunk_bytes)}")
        return f"version {manifest.version} ({manifest.kind}): {' and '.join(parts)}"


async def is_listed(store: WeightStore, manifest: WeightManifest) -> bool:
    """Tell whether the store names the version as it was published."""
    try:
        (found,) = await store.manifests(manifest.run_id, [(manifest.version, manifest.kind)])
    except WireError:
        return False
    return found is not None and found.encode() == manifest.encode()


async def is_wrong(store: WeightStore, manifest: WeightManifest, index: int) -> bool:
    """Tell whether the store does not hold a chunk as it was published."""
    [data] = await store.chunks(manifest, [index])
    return not is_chunk(manifest, index, data)


def is_chunk(manifest: WeightManifest, index: int, data: bytes | None) -> bool:
    """Tell whether `data` is chunk `index` of the version."""
    if data is None or len(data) != manifest.chunk_bytes[index]:
        return False
    return chunk_digest(data) == manifest.chunk_digests[index]


async def examine(store: WeightStore, manifest: WeightManifest) -> Wound | None:
    """Read a version whole, or its manifest alone if a collective carried it; None: nothing is wrong with it."""
    wrong: list[int] = []
    if manifest.carrier == BROKER:
        indices = range(len(manifest.chunk_bytes))  # one by one: a few MiB, between which others have the loop
        wrong = [index for index in indices if await is_wrong(store, manifest, index)]
    is_there = await is_listed(store, manifest)
    return None if is_there and not wrong else Wound(manifest, is_there, tuple(wrong))


async def mend(store: WeightStore, wound: Wound, chunks: Sequence[bytes] | None, epoch: int) -> bool:
    """Write what is wrong again. chunks: all of the version, as somebody has them or made them again; None: nobody.

    Returns:
        Whether the version is whole again; if not, nothing was written.

    Raises:
        VersionConflict: another publisher is in charge. BrokerFull: there is no room.
    """
    manifest, data = wound.manifest, chunks or ()
    right = {index: data[index] for index in wound.chunks if index < len(data)}
    if len(right) < len(wound.chunks) or not all(is_chunk(manifest, index, each) for index, each in right.items()):
        return False
    await store.mend(manifest, right, epoch)
    return True
