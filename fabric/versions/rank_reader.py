"""Reading one rank's part of versions from a store: only the blocks that hold something of it, by byte range.

- A block reaches a stage only with the digest its manifest promises; after FETCH_COUNT_MAX tries the reader gives up.
- The next ranges are fetched while the last are decoded, as in reader.py, which plans the versions for all ranks alike.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Protocol

from ..contract.errors import ChainBroken, DigestMismatch, WeightError
from ..format.manifest import BlockRow, WeightManifest, block_digest
from ..ports.weights import Range
from .rank_parts import GAP_BYTES, Fetch, ShardMap, fetches, needed
from .rank_stage import ShardStage
from .reader import FETCH_BYTES_MAX, FETCH_COUNT_MAX, fetch_ahead
from .stage import Staged

Blocks = list[tuple[BlockRow, memoryview]]


class RangeSource(Protocol):
    """Where a rank gets its bytes: a WeightStore of its own, or what another process of its node has fetched."""

    async def chunk_ranges(self, manifest: WeightManifest, ranges: Sequence[Range]) -> list[bytes | None]:
        """As WeightStore.chunk_ranges."""
        ...


class ShardReader:
    """Fetches for one rank.

    Args:
        gap_bytes: ranges with at most this between them are fetched as one.

    Attributes:
        fetched_bytes: all that the source gave so far.
    """

    def __init__(self, source: RangeSource, shard_map: ShardMap, *, gap_bytes: int = GAP_BYTES) -> None:
        self.fetched_bytes = 0
        self._source = source
        self._map = shard_map
        self._gap_bytes = gap_bytes

    async def stage(self, manifests: Sequence[WeightManifest], stage: ShardStage) -> Staged:
        """Fetch, check and stage versions; before any rank commits, all must agree (shard_stage.agree).

        Raises:
            LayoutMismatch, ChainBroken, DigestMismatch, WireError: nothing was written.
        """
        for manifest in manifests:
            await asyncio.to_thread(stage.begin, manifest)
            batches = await asyncio.to_thread(self._batches, manifest)
            await fetch_ahead(batches, partial(self._fetch, manifest), partial(_feed, stage))
            await asyncio.to_thread(stage.end)
        return await asyncio.to_thread(stage.finish)

    def _batches(self, manifest: WeightManifest) -> list[list[Fetch]]:
        """What the rank needs of a version, in batches of at most FETCH_BYTES_MAX (or one range); at least one."""
        batches: list[list[Fetch]] = [[]]
        room = FETCH_BYTES_MAX
        for item in fetches(manifest.rows, needed(manifest.rows, self._map), gap_bytes=self._gap_bytes):
            if item.length > room and batches[-1]:
                batches.append([])
                room = FETCH_BYTES_MAX
            batches[-1].append(item)
            room -= item.length
        return batches

    async def _fetch(self, manifest: WeightManifest, wanted: Sequence[Fetch]) -> Blocks:
        """Blocks with the right digests.

        Raises:
            ChainBroken: one is gone. DigestMismatch: one stays corrupt.
        """
        blocks: Blocks = []
        failure: WeightError | None = None
        for _ in range(FETCH_COUNT_MAX):
            if not wanted:
                return blocks
            ranges = [(item.chunk, item.offset, item.length) for item in wanted]
            found = await self._source.chunk_ranges(manifest, ranges)
            self.fetched_bytes += sum(len(data) for data in found if data is not None)
            again: list[Fetch] = []
            for item, data in zip(wanted, found, strict=True):
                problem = _check(manifest, item, data)
                if data is None or problem is not None:
                    failure = problem
                    again.append(item)
                else:
                    blocks += _blocks(manifest, item, data)
            wanted = again
        if wanted and failure is not None:
            raise failure
        return blocks


def _blocks(manifest: WeightManifest, item: Fetch, data: bytes) -> Blocks:
    view, rows = memoryview(data), manifest.rows
    starts = [(rows[place], rows[place].offset - item.offset) for place in item.places]
    return [(row, view[start : start + row.length]) for row, start in starts]


def _check(manifest: WeightManifest, item: Fetch, data: bytes | None) -> WeightError | None:
    """What is wrong with a range; None when nothing is."""
    what = f"version {manifest.version} ({manifest.kind}) of run {manifest.run_id!r}"
    facts = {"version": manifest.version, "kind": manifest.kind, "chunk": item.chunk}
    if data is None:
        return ChainBroken(f"chunk {item.chunk} of {what} is not held any more: plan again from the head", **facts)
    for place, (_, block) in zip(item.places, _blocks(manifest, item, data), strict=True):
        if len(data) != item.length or block_digest(block) != int(manifest.block_digests[place]):
            return DigestMismatch(f"a block in chunk {item.chunk} of {what} is corrupt: fetch it again", **facts)
    return None


def _feed(stage: ShardStage, blocks: Blocks) -> None:
    for row, data in blocks:
        stage.feed(row, data)
