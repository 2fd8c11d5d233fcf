"""Chunks of a version as they lie in a store, each checked against everything its manifest says of it.

To apply weights, use ChainReader; this is for looking: faults are returned, not raised.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from ..format.manifest import BlockRow, WeightManifest, block_digest, chunk_digest, pieces
from ..ports.weights import WeightStore

FETCH_BYTES_MAX = 16 << 20
FETCH_COUNT_MAX = 2  # a chunk damaged on the way is right the second time
ABSENT = "is not there"


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk. data: None when it is not right. problem: why; it follows "chunk 3 …". rows: the blocks in it."""

    index: int
    data: bytes | None
    problem: str
    rows: Sequence[tuple[BlockRow, int]]


async def checked_chunks(store: WeightStore, manifest: WeightManifest) -> AsyncIterator[Chunk]:
    """Yield all chunks of a version, in order. `rows` come with the digests of their blocks."""
    rows: list[list[tuple[BlockRow, int]]] = [[] for _ in manifest.chunk_bytes]
    for row, digest in zip(manifest.rows, manifest.block_digests.tolist(), strict=True):
        rows[row.chunk].append((row, digest))
    for batch in pieces(enumerate(manifest.chunk_bytes.tolist()), FETCH_BYTES_MAX):
        found: dict[int, Chunk] = {}
        for _ in range(FETCH_COUNT_MAX):
            wanted = [index for index in batch if index not in found or found[index].problem]
            if not wanted:
                break
            chunks = zip(wanted, await store.chunks(manifest, wanted), strict=True)
            found |= {
                index: await asyncio.to_thread(_look, manifest, index, data, rows[index]) for index, data in chunks
            }
        for index in batch:
            yield found[index]


def _look(manifest: WeightManifest, index: int, data: bytes | None, rows: Sequence[tuple[BlockRow, int]]) -> Chunk:
    if data is None:
        return Chunk(index, None, ABSENT, rows)
    if len(data) != manifest.chunk_bytes[index]:
        return Chunk(index, None, f"has {len(data):,} bytes instead of {manifest.chunk_bytes[index]:,}", rows)
    if chunk_digest(data) != manifest.chunk_digests[index]:
        return Chunk(index, None, "is corrupt: its digest is not the manifest's", rows)
    view = memoryview(data)
    for row, digest in rows:
        if block_digest(view[row.offset : row.offset + row.length]) != digest:
            return Chunk(index, None, f"has a block at byte {row.offset:,} that is not the manifest's", rows)
    return Chunk(index, data, "", rows)
