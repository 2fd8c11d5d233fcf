"""Staging: versions decoded to absolute values beside the live weights, verified, then written at once.

- Staging reads the live weights and never writes them; the engine generates meanwhile. Only the owner of the engine
  commits, so they stand still.
- Nothing is handed out before the staged digest of every version in it was found right.
- Several versions are staged as one: later values win, steps add to staged values where there are some.
- Committing writes absolute values in place, so it may be repeated or resumed and keeps every address.
- Memory: 8 bytes and one element per change; a keyframe, or a tensor mostly changed, as much as it has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..errors import ChainBroken, DigestMismatch, WireError
from ..rules.chain import KEYFRAME
from .codec import Bits, Decoded, Decoder
from .layout import Layout, TensorSpec
from .manifest import BlockRow, StagedDigest, WeightManifest, block_count, block_slice, chunk_digest, state_digest

Indices = NDArray[np.int64]
Write = tuple[Indices | None, Bits]
INDEX_BYTES = 8


@dataclass(slots=True)
class Staged:
    """Verified absolute values of a version. tensors: name → (flat positions, ascending, or None for all; values)."""

    version: int
    tensors: Mapping[str, Write]

    def writes(self) -> Mapping[str, Write]:
        """What to write; tensors without changes are left out."""
        return self.tensors

    @property
    def changed_count(self) -> int:
        """Elements that a commit writes."""
        return sum(len(values) for _, values in self.tensors.values())


@dataclass(slots=True)
class _Cell:
    """Staged values of one block. indices: positions in the block, None for all."""

    indices: Indices | None
    values: Bits


class Stage:
    """Collects one or more versions, oldest first, chunk by chunk.

    Args:
        layout: of the engine.
        live: its flat stored bits by name, or None when there are none: then the first version must be a keyframe.
        have: the version that `live` is.
    """

    def __init__(self, layout: Layout, live: Mapping[str, Bits] | None, have: int = -1) -> None:
        self._layout = layout
        self._live = live
        self._version = have if live is not None else -1
        self._cells: dict[tuple[int, int], _Cell] = {}
        self._decoder = Decoder()
        self._manifest: WeightManifest | None = None
        self._rows: list[list[BlockRow]] = []
        self._fed_count = 0
        self._digest = StagedDigest()

    def begin(self, manifest: WeightManifest) -> None:
        """The next version; every chunk of it follows, in order, then `end`.

        Raises:
            LayoutMismatch: its tensors are not the engine's.
            ChainBroken: its base is not what is staged or live.
            WireError: this version of the program cannot read it.
        """
        assert self._manifest is None, "the version before has not ended"
        self._layout.check(manifest.tensors)
        manifest.check()
        if manifest.kind == KEYFRAME:
            self._cells.clear()
        elif manifest.base_version != self._version or self._version < 0:
            raise ChainBroken(
                f"delta of version {manifest.version} has base {manifest.base_version}, staged is {self._version}:"
                " fetch a keyframe",
                version=manifest.version,
                base_version=manifest.base_version,
            )
        self._manifest = manifest
        self._rows = [[] for _ in manifest.chunk_bytes]
        for row in manifest.rows():
            self._rows[row.chunk].append(row)
        self._fed_count = 0
        self._digest = StagedDigest()

    def feed(self, data: bytes | memoryview) -> None:
        """The next chunk.

        Raises:
            DigestMismatch: it is not the chunk that the manifest promises.
            WireError: it cannot be decoded.
        """
        assert self._manifest is not None
        check_chunk(self._manifest, self._fed_count, data)
        view = memoryview(data)
        for row in self._rows[self._fed_count]:
            self._take(row, view[row.start : row.start + row.length])
        self._fed_count += 1

    def end(self) -> None:
        """The version is complete.

        Raises:
            DigestMismatch: what was staged is not what the publisher meant; the stage is useless now.
        """
        manifest = self._manifest
        assert manifest is not None
        assert self._fed_count == len(manifest.chunk_bytes)
        if self._digest.hex() != manifest.staged_digest:
            raise DigestMismatch(
                f"version {manifest.version} ({manifest.kind}) staged to other values than were published: the weights"
                f" held are not version {manifest.base_version}; nothing was written. Fetch a keyframe",
                version=manifest.version,
                kind=manifest.kind,
            )
        self._version = manifest.version
        self._manifest = None

    def finish(self) -> Staged:
        """All versions together, ready to commit. The stage is empty afterwards."""
        assert self._manifest is None, "a version has not ended"
        tensors: dict[str, Write] = {}
        for tensor, spec in enumerate(self._layout.tensors):
            cells = [(block, self._cells.pop((tensor, block), None)) for block in range(block_count(spec))]
            held = [(block, cell) for block, cell in cells if cell is not None]
            if held:
                tensors[spec.name] = self._write(spec, held)
        return Staged(self._version, tensors)

    def _take(self, row: BlockRow, data: memoryview) -> None:
        spec = self._layout.tensors[row.tensor]
        place = block_slice(spec, row.block)
        decoded = self._decoder.decode(data, element_count=place.stop - place.start, dtype=spec.bits_dtype)
        values = decoded.numbers
        if not decoded.is_absolute:
            if self._manifest is not None and self._manifest.kind == KEYFRAME:
                raise WireError(f"tensor {spec.name!r}: a keyframe holds a block that needs a base")
            values += self._current(spec, row, decoded.indices)
        self._digest.add(row.tensor, row.block, decoded.indices, values)
        key = (row.tensor, row.block)
        self._cells[key] = _merge(self._cells.get(key), decoded, values)

    def _current(self, spec: TensorSpec, row: BlockRow, indices: Indices | None) -> Bits:
        """Values that steps add to: staged where there are some, live elsewhere."""
        cell = self._cells.get((row.tensor, row.block))
        if cell is not None and cell.indices is None:
            return cell.values if indices is None else cell.values[indices]
        assert self._live is not None, "without live weights every block is staged whole"
        block = self._live[spec.name][block_slice(spec, row.block)]
        if cell is None or cell.indices is None:
            return block if indices is None else block[indices]
        if indices is None:
            whole = np.array(block)
            whole[cell.indices] = cell.values
            return whole
        current = block[indices]
        found, where = _find(cell.indices, indices)
        current[found] = cell.values[where]
        return current

    def _write(self, spec: TensorSpec, held: list[tuple[int, _Cell]]) -> Write:
        """One write for a tensor's cells: by position, or whole where that is fewer bytes."""
        width = spec.bits_dtype.itemsize
        changed_count = sum(len(cell.values) for _, cell in held)
        if changed_count * (INDEX_BYTES + width) < spec.element_count * width:
            starts = [block_slice(spec, block).start for block, _ in held]
            parts = [_positions(cell) + start for start, (_, cell) in zip(starts, held, strict=True)]
            return np.concatenate(parts), np.concatenate([cell.values for _, cell in held])
        whole = np.empty(spec.element_count, dtype=spec.bits_dtype)
        if changed_count < spec.element_count:
            assert self._live is not None, "without live weights every block is staged whole"
            np.copyto(whole, self._live[spec.name])
        for block, cell in held:
            whole[block_slice(spec, block)][... if cell.indices is None else cell.indices] = cell.values
        return None, whole


def check_chunk(manifest: WeightManifest, index: int, data: bytes | memoryview) -> None:
    """Require that `data` is chunk `index` of the version.

    Raises:
        DigestMismatch: it is not.
    """
    if len(data) != manifest.chunk_bytes[index] or chunk_digest(data) != manifest.chunk_digests[index]:
        raise DigestMismatch(
            f"chunk {index} of version {manifest.version} ({manifest.kind}) of run {manifest.run_id!r} is corrupt"
            f" ({len(data):,} bytes): fetch it again",
            version=manifest.version,
            kind=manifest.kind,
            chunk=index,
        )


def check_state(manifest: WeightManifest, bits: Mapping[str, Bits]) -> None:
    """Require that `bits` (flat, all tensors) is the whole state the manifest names; nothing to do where it names none.

    Raises:
        DigestMismatch: it is not.
    """
    if manifest.state_digest and state_digest(manifest.tensors, bits) != manifest.state_digest:
        raise DigestMismatch(
            f"the weights held are not version {manifest.version} of run {manifest.run_id!r}: fetch a keyframe",
            version=manifest.version,
        )


def commit(staged: Staged, bits: Mapping[str, Bits]) -> None:
    """Write staged values in place. bits: flat, writable stored bits by name. Repeating it changes nothing."""
    for name, (indices, values) in staged.writes().items():
        if indices is None:
            np.copyto(bits[name], values)
        else:
            bits[name][indices] = values


def _positions(cell: _Cell) -> Indices:
    return np.arange(len(cell.values), dtype=np.int64) if cell.indices is None else cell.indices


def _find(sorted_indices: Indices, wanted: Indices) -> tuple[NDArray[np.bool_], Indices]:
    """Which of `wanted` are in `sorted_indices`, and where those are."""
    where = np.searchsorted(sorted_indices, wanted)
    where[where == len(sorted_indices)] = 0
    found = sorted_indices[where] == wanted if len(sorted_indices) else np.zeros(len(wanted), dtype=np.bool_)
    return found, where[found]


def _merge(cell: _Cell | None, decoded: Decoded, values: Bits) -> _Cell:
    """`cell` with the newer values over it; may reuse its arrays."""
    if cell is None or decoded.indices is None:
        return _Cell(decoded.indices, values)
    if cell.indices is None:
        cell.values[decoded.indices] = values
        return cell
    found, where = _find(cell.indices, decoded.indices)
    cell.values[where] = values[found]
    if found.all():
        return cell
    indices = np.concatenate([cell.indices, decoded.indices[~found]])
    order = np.argsort(indices, kind="stable")
    return _Cell(indices[order], np.concatenate([cell.values, values[~found]])[order])
