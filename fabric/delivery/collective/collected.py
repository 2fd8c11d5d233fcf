"""A weight store that answers with what came by the collective path before it asks the store it stands before.

- Only verified chunks are kept, and whoever reads them verifies them again.
- Bounded: at most `capacity_bytes` of chunks; the versions that came first make room. A version that is dropped is only
  a cache miss: its chunks come from wherever `inner` has them. Where a version is larger than that, the collective path
  is of no use: its offers are not answered (receiver.py says so once), and the publisher finds nobody.
- A version is known by its content: one that was never published may come again, under its number, with other weights.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from ...format.manifest import WeightManifest, chunk_hash
from ...ports.weights import WeightStore
from ..passing import PassingStore

Name = tuple[str, str, int, str]  # run, content, version, kind

CAPACITY_BYTES_MIN = 8 << 30
MEMORY_SHARE = 16  # of the machine's memory; it is filled only between a version's coming and its being live


def default_capacity_bytes() -> int:
    """A sixteenth of the machine's memory, at least 8 GiB: a bound, not what is taken."""
    return max(CAPACITY_BYTES_MIN, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // MEMORY_SHARE)


class CollectedStore(PassingStore):
    """WeightStore (see ports) around `inner`.

    Attributes:
        capacity_bytes: the most bytes of chunks that it keeps; by default `default_capacity_bytes`.
    """

    def __init__(self, inner: WeightStore, *, capacity_bytes: int | None = None) -> None:
        super().__init__(inner)
        self.capacity_bytes = default_capacity_bytes() if capacity_bytes is None else capacity_bytes
        self._versions: dict[Name, dict[int, bytes]] = {}  # oldest first

    @property
    def held_bytes(self) -> int:
        """Bytes of the chunks kept now."""
        return sum(_size(chunks) for chunks in self._versions.values())

    def add(self, manifest: WeightManifest, chunks: Mapping[int, bytes]) -> bool:
        """Keep verified chunks by index, beside those of the same version kept before; returns whether all are there.

        A version that is larger than the whole capacity is not kept.
        """
        name = _name(manifest)
        merged = {**self._versions.pop(name, {}), **chunks}
        if _size(merged) > self.capacity_bytes:
            return False
        while self._versions and self.held_bytes + _size(merged) > self.capacity_bytes:
            self._versions.pop(next(iter(self._versions)))
        self._versions[name] = merged
        return len(merged) == len(manifest.chunk_bytes)

    def forget(self, run_id: str, up_to_version: int) -> None:
        """Drop what is of no use any more, at the latest once those versions are live and nobody asks for them."""
        self._versions = {
            name: chunks for name, chunks in self._versions.items() if name[0] != run_id or name[2] > up_to_version
        }

    def forget_others(self, run_id: str) -> None:
        """Drop what belongs to other runs, when a worker takes up this one."""
        self._versions = {name: chunks for name, chunks in self._versions.items() if name[0] == run_id}

    async def chunks(self, manifest: WeightManifest, indices: Sequence[int]) -> list[bytes | None]:
        kept = self._versions.get(_name(manifest), {})
        missing = [index for index in indices if index not in kept]
        found = dict(zip(missing, await self.inner.chunks(manifest, missing), strict=True)) if missing else {}
        return [kept[index] if index in kept else found[index] for index in indices]


def _name(manifest: WeightManifest) -> Name:
    content = chunk_hash("".join(manifest.chunk_hashes).encode())  # members pass chunks and manifests on to one another
    return manifest.run_id, content, manifest.version, manifest.kind


def _size(chunks: Mapping[int, bytes]) -> int:
    return sum(map(len, chunks.values()))
