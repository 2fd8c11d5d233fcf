"""Folding: several versions, one after another, become one jump that has their effect.

- Steps add modulo the element's width, so no weights are needed: any reader of the store can fold.
- Blocks are folded one by one, some at a time, so memory does not grow with the model or the number of versions.
- The sums of the last version hold for the jump: it leads to the same state.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import groupby, pairwise

import numpy as np

from ..contract.errors import ChainBroken, DigestMismatch
from ..format.codec import Decoded, Encoded, Encoder
from ..format.decoder import Decoder
from ..format.manifest import BlockRow, WeightManifest, block_digest
from ..format.regions import Region
from ..ports.weights import WeightStore
from .snapshot import Identity, Part, Place, Prepared, encode_part, make_manifest

WINDOW_BYTES = 16 << 20  # encoded blocks in memory at a time

Rows = dict[Region, list[tuple[int, BlockRow, int]]]  # region → (source, row, digest), oldest source first


def may_fold(sources: Sequence[WeightManifest]) -> bool:
    """Tell whether the sources follow one another and are cut alike."""
    is_chain = all(left.version == right.base_version for left, right in pairwise(sources))
    return is_chain and len({(item.layout_digest, item.cut_digest) for item in sources}) == 1


async def fold(store: WeightStore, identity: Identity, kind: str, sources: Sequence[WeightManifest]) -> Prepared:
    """Make the jump of `kind` that leads from the first source's base to the last source's version.

    Raises:
        ChainBroken: a source's block is gone. DigestMismatch: one is corrupt. WireError: one cannot be decoded.
    """
    assert may_fold(sources)
    for source in sources:
        source.check()
    rows = _by_region(sources)
    part = Part([], [], [], [], np.zeros(len(sources[-1].sums), dtype=np.uint64), [])
    for window in _windows(sorted(rows), rows):
        blocks = await _fetch(store, sources, [item for region in window for item in rows[region]])
        part = _added(part, await asyncio.to_thread(_fold_window, sources[-1], window, rows, blocks))
    place = Place(kind=kind, base_version=sources[0].base_version, sums=sources[-1].sums)
    manifest = make_manifest(identity, sources[-1].tensors, part, place, cut=sources[-1].cut_digest)
    return Prepared(manifest, part.chunks, [], place.sums)


def _by_region(sources: Sequence[WeightManifest]) -> Rows:
    rows: Rows = {}
    for source, manifest in enumerate(sources):
        for row, digest in zip(manifest.rows, manifest.block_digests.tolist(), strict=True):
            rows.setdefault(row.region, []).append((source, row, digest))
    return rows


def _windows(regions: Sequence[Region], rows: Rows) -> list[list[Region]]:
    """Group regions into windows whose encoded blocks have about WINDOW_BYTES."""
    windows: list[list[Region]] = []
    room = 0
    for region in regions:
        size = sum(row.length for _, row, _ in rows[region])
        if size > room or not windows:
            windows.append([])
            room = WINDOW_BYTES
        windows[-1].append(region)
        room -= size
    return windows


async def _fetch(
    store: WeightStore, sources: Sequence[WeightManifest], items: Sequence[tuple[int, BlockRow, int]]
) -> dict[tuple[int, Region], bytes]:
    """Fetch the encoded blocks, checked."""
    blocks: dict[tuple[int, Region], bytes] = {}
    for source, group in groupby(sorted(items, key=lambda item: item[0]), key=lambda item: item[0]):
        wanted = list(group)
        manifest = sources[source]
        ranges = [(row.chunk, row.offset, row.length) for _, row, _ in wanted]
        found = await store.chunk_ranges(manifest, ranges)
        for (_, row, digest), data in zip(wanted, found, strict=True):
            what = f"block {row.region} of version {manifest.version} ({manifest.kind}) of run {manifest.run_id!r}"
            if data is None:
                raise ChainBroken(f"{what} is not held any more: nothing was folded", version=manifest.version)
            if len(data) != row.length or block_digest(data) != digest:
                raise DigestMismatch(f"{what} is corrupt: nothing was folded", version=manifest.version)
            blocks[(source, row.region)] = data
    return blocks


def _fold_window(
    manifest: WeightManifest,
    window: Sequence[Region],
    rows: Rows,
    blocks: dict[tuple[int, Region], bytes],
) -> Part:
    layout, decoder = manifest.tensors, Decoder()

    def encode(encoder: Encoder, region: Region) -> Encoded | None:
        spec = layout.tensors[region.tensor]
        decoded: list[Decoded] = [
            decoder.decode(blocks[(source, region)], element_count=region.element_count, dtype=spec.bits_dtype)
            for source, _, _ in rows[region]
        ]
        return encoder.fold(decoded, region.element_count, spec.bits_dtype)

    return encode_part(layout, window, encode, has_sums=False)


def _added(part: Part, more: Part) -> Part:
    """Join two parts, without changes: changes of folded blocks would be steps."""
    shift = len(part.chunks)
    rows = [row._replace(chunk=row.chunk + shift) for row in more.rows]
    chunks, hashes = part.chunks + more.chunks, part.hashes + more.hashes
    return Part(part.rows + rows, part.digests + more.digests, chunks, [], part.sums, hashes)
