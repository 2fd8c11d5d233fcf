"""Staging: versions decoded to absolute values beside the live weights, verified, then written at once.

- Staging reads the live weights and never writes them; the engine generates meanwhile. Only the owner of the engine
  commits, so they stand still.
- The sums of the live state are carried along with every staged value, and must be those of the manifest before
  anything is handed out: a wrong base shows at every position that changes.
- Several versions are staged as one: later values win, steps add to staged values where there are some. A tensor that
  is staged whole already is brought on in place: nobody else reads it.
- Committing writes absolute values in place, so it may be repeated or resumed and keeps every address.
- Memory: 8 bytes and one element per change, and a block; a keyframe, or a tensor mostly changed, as much as it has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..contract.errors import ChainBroken, DigestMismatch, WireError
from ..format.codec import Bits
from ..format.decoder import Decoder
from ..format.digest import state_sums, tensor_key
from ..format.layout import Layout, TensorSpec
from ..format.manifest import BlockRow, Sums, WeightManifest, chunk_digest
from ..format.regions import Region
from ..rules.weights.chain import KEYFRAME
from .scatter import scatter

Indices = NDArray[np.int64]
Write = tuple[Indices | None, Bits]
INDEX_BYTES = 8
COMMIT_THREAD_COUNT_MAX = 8  # memory bandwidth is used up before
PIECE_COUNT = 1 << 18  # elements that a thread writes at a time: some tenths of a millisecond


@dataclass(slots=True)
class Staged:
    """Verified absolute values of a version. tensors: name → (flat positions, ascending, or None for all; values).

    sums: uint64 (T,), of the whole state once they are written.
    """

    version: int
    tensors: Mapping[str, Write]
    sums: Sums

    def writes(self) -> Mapping[str, Write]:
        """What to write; tensors without changes are left out."""
        return self.tensors

    @property
    def changed_count(self) -> int:
        """Elements that a commit writes."""
        return sum(len(values) for _, values in self.tensors.values())


@dataclass(slots=True)
class _Cell:
    """Staged values of one tensor. indices: flat positions, ascending, or None for all."""

    indices: Indices | None
    values: Bits


class _Growing:
    """What a version says of one tensor, block after block: in room for all positions it names, or the whole tensor.

    whole: the tensor, where versions before have staged all of it; it is written in place.
    """

    def __init__(self, room_count: int, dtype: np.dtype[Any], whole: Bits | None) -> None:
        self._positions = np.empty(room_count, dtype=np.int64)
        self._values = np.empty(room_count, dtype=dtype)
        self._count = 0
        self._stop = 0
        self._is_ordered = True
        self.whole = whole

    @property
    def room(self) -> tuple[Indices, Bits]:
        """What is left of it; a block's positions and values are put at its front, and then counted by `add`."""
        return self._positions[self._count :], self._values[self._count :]

    def add(self, region: Region, positions: Indices, values: Bits) -> None:
        """Some elements of a region; positions and values lie in `room` already, or are copied to it."""
        if self.whole is not None:
            self.whole[positions] = values
            return
        if self._count + len(values) > len(self._values):
            raise WireError("its blocks change more elements than its manifest says")
        end = self._count + len(values)
        if values.base is not self._values:
            self._positions[self._count : end], self._values[self._count : end] = positions, values
        self._count = end
        self._is_ordered &= region.start >= self._stop and region.is_contiguous
        self._stop = region.stop

    def fill(self, region: Region, values: Bits, whole: Callable[[], Bits]) -> None:
        """All elements of a region. whole: makes a copy of the tensor to put them on, when the first such comes."""
        if self.whole is None:
            self.whole = whole()
            self.whole[self._positions[: self._count]] = self._values[: self._count]
        region.write(self.whole, values)

    def cell(self) -> _Cell:
        """Everything, positions ascending."""
        if self.whole is not None:
            return _Cell(None, self.whole)
        positions, values = self._positions[: self._count], self._values[: self._count]
        if not self._is_ordered:
            order = np.argsort(positions, kind="stable")
            positions, values = positions[order], values[order]
        return _Cell(positions, values)


class Stage:
    """Collects one or more versions, oldest first, chunk by chunk.

    Args:
        layout: of the engine.
        live: its flat stored bits by name, or None when there are none: then the first version must be a keyframe.
        have: the version that `live` is.
        sums: of `live`, as the last version's; computed here where they are not known (as long as a copy of it takes).
    """

    def __init__(
        self, layout: Layout, live: Mapping[str, Bits] | None, have: int = -1, sums: Sums | None = None
    ) -> None:
        self._layout = layout
        self._keys = [tensor_key(spec.name) for spec in layout.tensors]
        self._live = live
        self._version = have if live is not None else -1
        if live is None:
            sums = np.zeros(len(layout.tensors), dtype=np.uint64)
        elif sums is None:
            sums = state_sums(layout, live)
        self._sums: list[int] = sums.tolist()
        self._cells: dict[int, _Cell] = {}
        self._growing: dict[int, _Growing] = {}
        self._room_counts: dict[int, int] = {}
        self._decoder = Decoder()
        self._manifest: WeightManifest | None = None
        self._rows: list[list[BlockRow]] = []
        self._fed_count = 0

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
            self._cells = {}
            self._sums = [0] * len(self._layout.tensors)
        else:
            check_base(manifest, self._version)
        self._manifest = manifest
        self._rows = [[] for _ in manifest.chunk_bytes]
        self._growing, self._room_counts = {}, {}
        for row in manifest.rows:
            self._rows[row.chunk].append(row)
            self._room_counts[row.tensor] = self._room_counts.get(row.tensor, 0) + row.changed_count
        self._fed_count = 0

    def feed(self, data: bytes | memoryview) -> None:
        """The next chunk.

        Raises:
            DigestMismatch: it is not the chunk that the manifest promises; another copy of it may be.
            WireError: it cannot be decoded; the stage is useless now.
        """
        assert self._manifest is not None
        check_chunk(self._manifest, self._fed_count, data)
        view = memoryview(data)
        for row in self._rows[self._fed_count]:
            self._take(row, view[row.offset : row.offset + row.length], is_keyframe=self._manifest.kind == KEYFRAME)
        self._fed_count += 1

    def end(self) -> None:
        """The version is complete.

        Raises:
            DigestMismatch: what was staged is not what the publisher meant; the stage is useless now.
        """
        manifest = self._manifest
        assert manifest is not None
        assert self._fed_count == len(manifest.chunk_bytes)
        manifest.check_sums(self._sums_array())
        for tensor, growing in self._growing.items():
            self._cells[tensor] = _over(self._cells.get(tensor), growing.cell())
        self._growing = {}
        self._version = manifest.version
        self._manifest = None

    def finish(self) -> Staged:
        """All versions together, ready to commit. The stage is empty afterwards."""
        assert self._manifest is None, "a version has not ended"
        tensors: dict[str, Write] = {}
        for tensor in sorted(self._cells):
            spec = self._layout.tensors[tensor]
            tensors[spec.name] = self._write(spec, self._cells.pop(tensor))
        return Staged(self._version, tensors, self._sums_array())

    def _sums_array(self) -> Sums:
        return np.array([total % 2**64 for total in self._sums], dtype=np.uint64)

    def _take(self, row: BlockRow, data: memoryview, *, is_keyframe: bool) -> None:
        spec, region, key = self._layout.tensors[row.tensor], row.region, self._keys[row.tensor]
        growing = self._growing.get(row.tensor) or self._begin_tensor(row.tensor, spec, is_keyframe=is_keyframe)
        positions: Indices | None
        try:
            if region.is_contiguous and growing.whole is not None and not is_keyframe:
                part = growing.whole[region.start : region.stop]
                self._sums[row.tensor] += self._decoder.put(data, part, key=key, start=region.start)
                return
            current = None if is_keyframe else self._current(spec, region)
            if region.is_contiguous:
                taken = self._decoder.take(
                    data, current, region.element_count, spec.bits_dtype, key=key, start=region.start, out=growing.room
                )
                positions, values, moved = taken.positions, taken.values, taken.change
            else:
                indices, olds, values = self._decoder.resolve(data, current, region.element_count, spec.bits_dtype)
                moved = region.change(key, indices, current if olds is None else olds, values)
                positions = None if indices is None else region.positions(indices)
            self._sums[row.tensor] += moved
            if positions is None:
                growing.fill(region, values, lambda: self._whole(row.tensor, spec))
            else:
                growing.add(region, positions, values)
        except WireError as error:
            raise WireError(f"tensor {spec.name!r}: {error}") from error

    def _begin_tensor(self, tensor: int, spec: TensorSpec, *, is_keyframe: bool) -> _Growing:
        room_count = 0 if is_keyframe else min(self._room_counts[tensor], spec.element_count)
        cell = self._cells.get(tensor)
        whole = None if cell is None or cell.indices is not None else cell.values
        made = _Growing(0 if whole is not None else room_count, spec.bits_dtype, whole)
        self._growing[tensor] = made
        return made

    def _whole(self, tensor: int, spec: TensorSpec) -> Bits:
        """A copy of the tensor as staged so far; of a keyframe what comes is not there yet, and will be."""
        cell = self._cells.get(tensor)
        if self._live is None or self._manifest is None or self._manifest.kind == KEYFRAME:
            return np.empty(spec.element_count, dtype=spec.bits_dtype)
        whole = np.array(self._live[spec.name])
        if cell is not None and cell.indices is not None:
            whole[cell.indices] = cell.values
        return whole

    def _current(self, spec: TensorSpec, region: Region) -> Bits:
        """Values that steps add to, contiguous: staged where there are some, live elsewhere. Not to be written."""
        tensor = region.tensor
        cell = self._cells.get(tensor)
        if cell is not None and cell.indices is None:
            return region.read(cell.values)
        assert self._live is not None, "without live weights every tensor is staged whole"
        block = region.read(self._live[spec.name])
        if cell is None or cell.indices is None:
            return block
        first, last = np.searchsorted(cell.indices, (region.start, region.stop))
        if first == last:
            return block
        is_inside, indices = region.locate(cell.indices[first:last])
        block = block.copy()
        block[indices] = cell.values[first:last][is_inside]
        return block

    def _write(self, spec: TensorSpec, cell: _Cell) -> Write:
        """One write for a tensor: by position, or whole where that is fewer bytes."""
        width = spec.bits_dtype.itemsize
        if cell.indices is None or len(cell.values) * (INDEX_BYTES + width) < spec.element_count * width:
            return cell.indices, cell.values
        assert self._live is not None, "without live weights every tensor is staged whole"
        whole = np.array(self._live[spec.name])
        whole[cell.indices] = cell.values
        return None, whole


def check_base(manifest: WeightManifest, staged_version: int) -> None:
    """Require that a version that is no keyframe leads on from what is staged.

    Raises:
        ChainBroken: it does not.
    """
    if manifest.base_version != staged_version or staged_version < 0:
        raise ChainBroken(
            f"{manifest.kind} of version {manifest.version} has base {manifest.base_version}, staged is"
            f" {staged_version}: fetch a keyframe",
            version=manifest.version,
            base_version=manifest.base_version,
        )


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


def commit(staged: Staged, bits: Mapping[str, Bits], *, thread_count: int = 1) -> None:
    """Write staged values in place. bits: flat, writable stored bits by name. Repeating it changes nothing."""
    write(staged.writes(), bits, thread_count=thread_count)


def write(writes: Mapping[str, Write], bits: Mapping[str, Bits], *, thread_count: int = 1) -> None:
    """Write values in place, in several threads where there is much to write: the engine stands still meanwhile.

    Raises:
        IndexError: a tensor's last position, or its first, lies outside; others may be written.
    """
    pieces = [piece for name, each in writes.items() for piece in _pieces(name, bits[name], each)]
    pieces.reverse()  # what was staged last is still in the caches
    if thread_count == 1 or len(pieces) == 1:
        for flat, indices, values in pieces:
            _write(flat, indices, values)
        return
    with ThreadPoolExecutor(thread_count, thread_name_prefix="commit") as pool:
        list(pool.map(lambda piece: _write(*piece), pieces))


def _pieces(name: str, flat: Bits, each: Write) -> Iterator[tuple[Bits, Indices | None, Bits]]:
    """A tensor's write in parts of at most PIECE_COUNT elements."""
    indices, values = each
    if indices is not None and len(indices) and not (indices[0] >= 0 and indices[-1] < len(flat)):
        raise IndexError(f"tensor {name!r}: position {indices[-1]} lies outside its {len(flat)} elements")
    for first in range(0, len(values), PIECE_COUNT):
        part = slice(first, first + PIECE_COUNT)
        yield (flat[part], None, values[part]) if indices is None else (flat, indices[part], values[part])


def _write(flat: Bits, indices: Indices | None, values: Bits) -> None:
    if indices is None:
        np.copyto(flat, values)
    else:
        scatter(flat, indices, values)


def _over(cell: _Cell | None, newer: _Cell) -> _Cell:
    """`cell` with newer values over it; may reuse its arrays."""
    if cell is None or newer.indices is None:
        return newer
    if cell.indices is None:
        cell.values[newer.indices] = newer.values
        return cell
    where = np.searchsorted(cell.indices, newer.indices)
    where[where == len(cell.indices)] = 0
    found = cell.indices[where] == newer.indices if len(cell.indices) else np.zeros(len(newer.indices), dtype=np.bool_)
    cell.values[where[found]] = newer.values[found]
    if found.all():
        return cell
    indices = np.concatenate([cell.indices, newer.indices[~found]])
    order = np.argsort(indices, kind="stable")
    return _Cell(indices[order], np.concatenate([cell.values, newer.values[~found]])[order])
