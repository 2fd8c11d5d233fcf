"""Staging: versions decoded to absolute values beside the live weights, and verified; commit.py writes them.

- A stage is for the part of one rank (rank_parts.py); a whole model is one slice per tensor, of one rank.
- Staging reads the live weights and never writes them; the engine generates meanwhile. Only the owner of the engine
  commits, so they stand still.
- Live weights may be on a device. Then positions and steps are decoded first, and of a tensor's live values only those
  at changed positions are fetched, all at once; the whole tensor where most of it changes.
- The sums of every slice are carried along with every staged value. A rank that holds all slices compares them with the
  manifest's before anything is handed out, version by version; several ranks do it together (vote.py). A wrong base
  shows at every position that changes.
- Several versions are staged as one: later values win, steps add to staged values where there are some. A tensor that
  is staged whole already is brought on in place: nobody else reads it.
- Memory: 8 bytes and one element per change, and a block; a keyframe, or a tensor mostly changed, as much as it has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from ..contract.errors import ChainBroken, DigestMismatch, WireError
from ..format.codec import Bits, Decoded
from ..format.decoder import Decoder
from ..format.digest import change_at, sum_at, sum_range, tensor_key
from ..format.kernels.protocol import Indices
from ..format.manifest import BlockRow, Sums, WeightManifest, chunk_digest
from ..format.regions import Region
from ..rules.weights.chain import KEYFRAME
from .commit import Staged, Write, check_writes
from .rank_parts import ShardMap, ShardSlice, overlaps

INDEX_BYTES = 8
SUM_ELEMENTS = 1 << 20  # at a time, where sums are made anew: bounds the memory of their positions and values


class Live(Protocol):
    """A tensor's flat stored bits, read by stretch or by position. An array is one; others fetch what is asked for."""

    def __getitem__(self, where: Any, /) -> Bits:
        """Return the values of a slice, or at int64 positions; nobody writes them."""
        ...


@runtime_checkable
class LiveElsewhere(Live, Protocol):
    """A tensor on a device, which sums it there."""

    def slice_sum(self, key: int, one: ShardSlice) -> int:
        """Compute the digest's sum of a slice of it, mod 2^64. key: of the checkpoint's tensor."""
        ...


class _Steps(NamedTuple):
    """Elements [first, last) of a growing tensor whose values are still steps. sources: flat in the tensor of `key`."""

    place: int
    key: int
    first: int
    last: int
    sources: Indices


class _Growing:
    """A version's values for one of the rank's tensors: in room for all positions it names, or the whole tensor.

    whole: the tensor, if earlier versions have staged all of it; it is written in place.
    """

    def __init__(self, room_count: int, dtype: np.dtype[Any], whole: Bits | None) -> None:
        self._positions = np.empty(room_count, dtype=np.int64)
        self._values = np.empty(room_count, dtype=dtype)
        self._count = 0
        self._stop = 0
        self._is_ordered = True
        self.steps: list[_Steps] = []
        self.whole = whole

    @property
    def room(self) -> tuple[Indices, Bits]:
        """Return the room that is left; a block puts positions and values at its front, and `add` then counts them."""
        return self._positions[self._count :], self._values[self._count :]

    def add(self, positions: Indices, values: Bits, *, is_ordered: bool) -> None:
        """Add elements; their positions and values lie in `room` already, or are copied to it."""
        if self.whole is not None:
            self.whole[positions] = values
            return
        if self._count + len(values) > len(self._values):
            raise WireError("its blocks change more elements than its manifest says")
        if not len(values):
            return
        end = self._count + len(values)
        if values.base is not self._values:
            self._positions[self._count : end], self._values[self._count : end] = positions, values
        self._count = end
        self._is_ordered &= is_ordered and int(positions[0]) >= self._stop
        self._stop = int(positions[-1]) + 1

    def add_steps(
        self, positions: Indices, numbers: Bits, sources: Indices, *, place: int, key: int, is_ordered: bool
    ) -> None:
        """Add elements whose values are known once `resolve` has the live ones."""
        first = self._count
        self.add(positions, numbers, is_ordered=is_ordered)
        self.steps.append(_Steps(place, key, first, self._count, sources))

    def resolve(self, current: Callable[[Indices], Bits]) -> list[tuple[int, int]]:
        """Turn all steps into values; returns by how much the sums of which places move."""
        if not self.steps:
            return []
        first, last = self.steps[0].first, self.steps[-1].last
        olds = current(self._positions[first:last])
        changes = []
        for part in self.steps:
            old, values = olds[part.first - first : part.last - first], self._values[part.first : part.last]
            values += old
            changes.append((part.place, change_at(part.key, 0, part.sources, old, values)))
        self.steps = []
        return changes

    def fill(self, whole: Callable[[], Bits]) -> Bits:
        """Return the whole tensor, to put a stretch on. whole: makes a copy of it for the first stretch."""
        if self.whole is None:
            self.whole = whole()
            self.whole[self._positions[: self._count]] = self._values[: self._count]
        return self.whole

    def write(self) -> Write:
        """Return everything as one write, positions ascending."""
        if self.whole is not None:
            return None, self.whole
        positions, values = self._positions[: self._count], self._values[: self._count]
        if not self._is_ordered:
            order = np.argsort(positions, kind="stable")
            positions, values = positions[order], values[order]
        return positions, values


class Stage:
    """Collects one or more versions, oldest first, chunk by chunk or block by block.

    Args:
        part: the rank's part of which model (rank_parts.whole: all of it).
        live: its tensors' flat stored bits by name, here or on a device, or None when there are none.
        have: the version that `live` is; -1: none, then the first version must be a keyframe, and only elements that
            are nobody's slice are taken from `live`.
        sums: of the slices of `live`, as the last commit's; computed here where they are not known (as long as a copy
            of it takes).
    """

    def __init__(
        self, part: ShardMap, live: Mapping[str, Live] | None, have: int = -1, sums: Sums | None = None
    ) -> None:
        self._part = part
        self._keys = [tensor_key(spec.name) for spec in part.layout.tensors]
        self._live = live
        self._version = have if live is not None else -1
        if live is None or self._version < 0:
            sums = np.zeros(len(part.slices), dtype=np.uint64)
        elif sums is None:
            sums = part_sums(part, live)
        self._sums: list[int] = sums.tolist()
        self._specs = {spec.name: spec for spec in part.local.tensors}
        self._written: dict[str, Write] = {}
        self._growing: dict[str, _Growing] = {}
        self._room_counts: dict[str, int] = {}
        self._decoder = Decoder()
        self._manifest: WeightManifest | None = None
        self._is_keyframe = False
        self._rows: list[list[BlockRow]] = []
        self._fed_count = 0

    def begin(self, manifest: WeightManifest) -> None:
        """Begin the next version; every chunk of it follows, in order (`feed`), or every block that is needed (`take`).

        Raises:
            LayoutMismatch: its tensors are not the model's.
            ChainBroken: its base is not what is staged or live.
            WireError: this version of the program cannot read it.
        """
        assert self._manifest is None, "the version before has not ended"
        self._part.layout.check_run(manifest.tensors)
        manifest.check()
        self._is_keyframe = manifest.kind == KEYFRAME
        if self._is_keyframe:
            self._written = {}
            self._sums = [0] * len(self._part.slices)
        elif manifest.base_version != self._version or self._version < 0:
            raise ChainBroken(
                f"{manifest.kind} of version {manifest.version} has base {manifest.base_version}, staged is"
                f" {self._version}: fetch a keyframe",
                version=manifest.version,
                base_version=manifest.base_version,
            )
        self._manifest = manifest
        self._rows = [[] for _ in manifest.chunk_bytes]
        self._growing, self._room_counts = {}, {}
        for row in manifest.rows:
            self._rows[row.chunk].append(row)
            for target in {one.target for _, one in self._part.by_tensor.get(row.tensor, ())}:
                self._room_counts[target] = self._room_counts.get(target, 0) + row.changed_count
        self._fed_count = 0

    def feed(self, data: bytes | memoryview) -> None:
        """Take the next chunk.
        Raises:
            DigestMismatch: it is not the chunk that the manifest promises; another copy of it may be.
            WireError: it cannot be decoded; the stage is useless now.
        """
        assert self._manifest is not None
        check_chunk(self._manifest, self._fed_count, data)
        view = memoryview(data)
        for row in self._rows[self._fed_count]:
            self.take(row, view[row.offset : row.offset + row.length])
        self._fed_count += 1

    def take(self, row: BlockRow, data: memoryview) -> None:
        """Take a block, whose digest was found right; ignore a block that holds nothing of the rank.

        Raises:
            WireError: it cannot be decoded; the stage is useless now.
        """
        try:
            self._take(row.region, data)
        except WireError as error:
            raise WireError(f"tensor {self._part.layout.tensors[row.tensor].name!r}: {error}") from error

    def end(self) -> None:
        """End the version: it is complete.

        Raises:
            DigestMismatch: the staged values are not the publisher's; the stage is useless now. If other ranks hold the
                rest, they find out together.
        """
        manifest = self._manifest
        assert manifest is not None
        for name, growing in self._growing.items():
            self._resolve(name, growing)
        if self._part.is_whole:
            manifest.check_sums(self._sums_array())
        for name, growing in self._growing.items():
            self._written[name] = _over(self._written.get(name), growing.write())
        self._growing, self._room_counts, self._rows = {}, {}, []
        self._version = manifest.version
        self._manifest = None

    def finish(self) -> Staged:
        """Return all versions together, ready to commit. The stage is empty afterwards."""
        assert self._manifest is None, "a version has not ended"
        names = [spec.name for spec in self._part.local.tensors if spec.name in self._written]
        tensors = {name: self._smallest(name, self._written.pop(name)) for name in names}
        return Staged(self._version, tensors, self._sums_array())

    def check_integrity(self) -> None:
        """Assert what holds between two versions, and after the commit of what `finish` returned.

        Nothing is kept of a version that ended but its values; each element is staged once, positions ascending; and
        the sums are those of the live weights, all of which are read, with the staged values in them.
        """
        assert self._manifest is None, "a version has not ended"
        assert not (self._growing or self._room_counts or self._rows), "memory of a version that ended is kept"
        check_writes(self._part.local, self._written)
        for name, (positions, _) in self._written.items():
            assert positions is None or (positions[1:] > positions[:-1]).all(), f"positions of {name!r} do not ascend"
        filled = {name: values for name, (_, values) in self._written.items()}
        if self._live is not None:
            filled = {name: _filled(flat, self._written.get(name)) for name, flat in self._live.items()}
        if self._version >= 0 and filled:
            filled |= {
                spec.name: np.zeros(0, spec.bits_dtype) for spec in self._specs.values() if not spec.element_count
            }
            assert (part_sums(self._part, filled) == self._sums_array()).all(), "the sums are not of what is staged"

    def _sums_array(self) -> Sums:
        return np.array([total % 2**64 for total in self._sums], dtype=np.uint64)

    def _take(self, region: Region, data: memoryview) -> None:
        dtype = self._part.layout.tensors[region.tensor].bits_dtype
        decoded: Decoded | None = None
        for place, one in self._part.by_tensor.get(region.tensor, ()):
            if not overlaps(region, one.region):
                continue
            if region.is_contiguous and one.holds(region) and self._is_near(one.target):
                self._take_whole(place, one, region, data)
                continue
            if decoded is None:
                decoded = self._decoder.decode(data, element_count=region.element_count, dtype=dtype)
            if self._is_keyframe and not (decoded.indices is None and decoded.is_absolute):
                raise WireError("a block of steps needs a base, and none is held")
            self._take_part(place, one, region, decoded)

    def _take_whole(self, place: int, one: ShardSlice, region: Region, data: memoryview) -> None:
        """Stage a stretch of the tensor that is a stretch of the rank's, too: decode and sum it in one go."""
        growing, spec = self._grown(one.target), self._specs[one.target]
        key, first = self._keys[region.tensor], one.offset + region.start - one.region.start
        stretch = slice(first, first + region.element_count)
        if growing.whole is not None and not self._is_keyframe:
            self._sums[place] += self._decoder.put(data, growing.whole[stretch], key=key, start=region.start)
            return
        current = None if self._is_keyframe else self._current(one.target, stretch)
        taken = self._decoder.take(
            data, current, region.element_count, spec.bits_dtype, key=key, start=region.start, out=growing.room
        )
        self._sums[place] += taken.change
        if taken.positions is None:
            self._filled_up(one.target, growing)[stretch] = taken.values
            return
        if first != region.start:
            np.add(taken.positions, first - region.start, out=taken.positions)
        growing.add(taken.positions, taken.values, is_ordered=True)

    def _is_near(self, name: str) -> bool:
        """Tell whether the values that a block's steps add to come without fetching more than the block changes."""
        if self._live is None or self._is_keyframe or isinstance(self._live[name], np.ndarray):
            return True
        return self._grown(name).whole is not None

    def _take_part(self, place: int, one: ShardSlice, region: Region, decoded: Decoded) -> None:
        """Stage the elements that a block and a slice have in common."""
        growing, key = self._grown(one.target), self._keys[region.tensor]
        where: slice | Indices
        if decoded.indices is None and region.is_contiguous and one.is_contiguous:
            start, stop = max(region.start, one.region.start), min(region.stop, one.region.stop)
            where = slice(one.offset + start - one.region.start, one.offset + stop - one.region.start)
            numbers = decoded.numbers[start - region.start : stop - region.start]
            summed: Callable[[Bits], int] = partial(sum_range, key, start)
        else:
            positions, numbers = region.positions(decoded.indices), decoded.numbers
            if one.holds(region):
                where = positions + (one.offset - one.region.start)
            else:
                first, last = np.searchsorted(positions, (one.region.start, one.region.stop))
                is_inside, indices = one.region.locate(positions[first:last])
                where = one.targets(indices)
                positions, numbers = positions[first:last][is_inside], numbers[first:last][is_inside]
            summed = partial(sum_at, key, positions)
        if decoded.indices is not None and growing.whole is None:  # never of a keyframe, which has no steps
            assert not isinstance(where, slice)
            growing.add_steps(where, numbers, positions, place=place, key=key, is_ordered=one.is_ascending)
            return
        whole = self._filled_up(one.target, growing)
        if self._is_keyframe:
            values = numbers
        else:
            olds = whole[where]
            values = numbers if decoded.is_absolute else olds + numbers
            self._sums[place] -= summed(olds)
        self._sums[place] += summed(values)
        whole[where] = values

    def _filled_up(self, name: str, growing: _Growing) -> Bits:
        """Return the whole tensor as staged so far, to be written."""
        self._resolve(name, growing)
        return growing.fill(partial(self._copy, name))

    def _resolve(self, name: str, growing: _Growing) -> None:
        for place, change in growing.resolve(partial(self._current, name)):
            self._sums[place] += change

    def _grown(self, name: str) -> _Growing:
        found = self._growing.get(name)
        if found is None:
            spec, written = self._specs[name], self._written.get(name)
            whole = written[1] if written is not None and written[0] is None else None
            is_roomless = self._is_keyframe or whole is not None
            room_count = 0 if is_roomless else min(self._room_counts[name], spec.element_count)
            found = self._growing[name] = _Growing(room_count, spec.bits_dtype, whole)
        return found

    def _copy(self, name: str) -> Bits:
        """Copy the tensor as staged so far; the elements of a keyframe that are still missing will come."""
        if self._live is None or (self._is_keyframe and self._part.is_whole):
            made = np.empty if self._part.is_whole else np.zeros
            return made(self._specs[name].element_count, dtype=self._specs[name].bits_dtype)
        return _filled(self._live[name], self._written.get(name))

    def _current(self, name: str, where: slice | Indices) -> Bits:
        """Return the values that steps add to: staged where there are some, live elsewhere. Do not write them."""
        assert self._live is not None, "without live weights every tensor is staged whole"
        block = self._live[name][where]
        indices, values = self._written.get(name, (None, block))
        if indices is None or not len(indices):
            return block
        if isinstance(where, slice):
            first, last = np.searchsorted(indices, (where.start, where.stop))
            if first < last:
                block = block.copy()
                block[indices[first:last] - where.start] = values[first:last]
            return block
        at, found = _found(indices, where)
        block[found] = values[at[found]]
        return block

    def _smallest(self, name: str, written: Write) -> Write:
        """Make one write for a tensor: by position, or whole if that is fewer bytes."""
        indices, values = written
        width, count = values.dtype.itemsize, self._specs[name].element_count
        if indices is None or len(values) * (INDEX_BYTES + width) < count * width:
            return written
        assert self._live is not None, "without live weights every tensor is staged whole"
        return None, _filled(self._live[name], written)


def part_sums(part: ShardMap, live: Mapping[str, Live]) -> Sums:
    """Compute the sum of every slice's values, uint64 (P,). live: the rank's flat stored bits by name."""
    return np.array([_slice_sum(part, one, live[one.target]) % 2**64 for one in part.slices], dtype=np.uint64)


def _slice_sum(part: ShardMap, one: ShardSlice, flat: Live) -> int:
    key, total = tensor_key(part.layout.tensors[one.region.tensor].name), 0
    if isinstance(flat, LiveElsewhere):
        return flat.slice_sum(key, one)
    for piece in one.pieces(SUM_ELEMENTS):
        reach = (piece.region.run_count - 1) * piece.stride + (piece.region.run - 1) * piece.step + 1
        values = piece._replace(offset=0).view(flat[piece.offset : piece.offset + reach])
        total += piece.region.sum(key, None, values.reshape(-1))
    return total


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


def _over(older: Write | None, newer: Write) -> Write:
    """Lay newer values over `older`; may reuse its arrays."""
    fresh, changed = newer
    if older is None or fresh is None:
        return newer
    indices, values = older
    if indices is None:
        values[fresh] = changed
        return older
    at, found = _found(indices, fresh)
    values[at[found]] = changed[found]
    if found.all():
        return older
    indices = np.concatenate([indices, fresh[~found]])
    order = np.argsort(indices, kind="stable")
    return indices[order], np.concatenate([values, changed[~found]])[order]


def _found(indices: Indices, wanted: Indices) -> tuple[Indices, NDArray[np.bool_]]:
    """Return where each of `wanted` is in ascending `indices`, and whether it is there at all."""
    if not len(indices):
        return np.zeros(len(wanted), dtype=np.int64), np.zeros(len(wanted), dtype=np.bool_)
    at = np.searchsorted(indices, wanted)
    at[at == len(indices)] = 0
    return at, indices[at] == wanted


def _filled(live: Live, written: Write | None) -> Bits:
    """Copy a tensor with staged values in it."""
    whole = np.array(live[:])
    if written is not None:
        whole[... if written[0] is None else written[0]] = written[1]
    return whole
