"""Staging one rank's part of a version, and the agreement of all ranks before any of them commits.

- A rank stages off its own tensors, in its own layout; the steps of others' elements are passed over.
- Each rank carries the sums of its slices along (format/digest.py). A version is committed only when every rank has
  staged it, all that hold one region have it alike, and together the regions have the sums that the manifest promises:
  a wrong base, a codec fault or a spoiled block on one rank keeps all of them where they are.
- What is committed are absolute values (stage.py), so a rank that is told to commit twice may.
- Several versions are staged as one; they are agreed on once, by the sums of the last.
- Memory: 8 bytes and one element per change, and a decoded block; a keyframe, or a tensor mostly changed, a copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..contract.errors import DigestMismatch, WeightError, WireError
from ..format.codec import Bits, Decoded
from ..format.decoder import Decoder
from ..format.digest import sum_at, sum_range, tensor_key
from ..format.manifest import BlockRow, Sums, WeightManifest
from ..format.regions import Region
from ..rules.weights.chain import KEYFRAME
from .rank_parts import ShardMap, ShardSlice, overlaps
from .stage import INDEX_BYTES, Staged, Write, check_base

SUM_ELEMENTS = 1 << 20  # at a time, where sums are made anew: bounds what their positions take
NAMES_SHOWN_MAX = 3

Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Vote:
    """What one rank staged. regions: int64 (P, 5); sums: uint64 (P,), of their new values. error: why it failed."""

    rank: int
    version: int
    regions: NDArray[np.int64]
    sums: Sums
    error: str = ""


def vote(rank: int, shard_map: ShardMap, staged: Staged) -> Vote:
    """What a rank tells the others about what it staged."""
    return Vote(rank=rank, version=staged.version, regions=shard_map.regions, sums=staged.sums)


def failed_vote(rank: int, error: Exception) -> Vote:
    """What a rank tells the others when it could not stage."""
    regions = np.zeros((0, len(Region._fields)), dtype=np.int64)
    text = f"{type(error).__name__}: {error}"
    return Vote(rank=rank, version=-1, regions=regions, sums=np.zeros(0, dtype=np.uint64), error=text)


def agree(votes: Sequence[Vote], manifest: WeightManifest, rank_count: int) -> None:
    """Require that all ranks may commit this version.

    Args:
        votes: one of each rank, in any order.
        manifest: of the version staged last.

    Raises:
        WeightError: a rank is missing, failed, or staged another version.
        DigestMismatch: what was staged is not what was published; names tensors and, where it can, the rank.
    """
    absent = sorted(set(range(rank_count)) - {one.rank for one in votes})
    bad = sorted((one for one in votes if one.error or one.version != manifest.version), key=lambda one: one.rank)
    if absent or bad:
        parts = [f"rank {rank} gave no answer" for rank in absent]
        parts += [f"rank {one.rank} {one.error or f'staged version {one.version}'}" for one in bad]
        raise WeightError(
            f"version {manifest.version} of run {manifest.run_id!r} was not committed on any rank: {'; '.join(parts)}",
            version=manifest.version,
            ranks=[*absent, *(one.rank for one in bad)],
        )
    regions = np.concatenate([one.regions for one in votes])
    sums = np.concatenate([one.sums for one in votes])
    ranks = np.concatenate([np.full(len(one.sums), one.rank) for one in votes])
    distinct, first, group = np.unique(regions, axis=0, return_index=True, return_inverse=True)
    group = group.reshape(-1)
    differing = np.flatnonzero(sums != sums[first][group])
    if len(differing):
        _refuse(manifest, sorted(set(regions[differing, 0].tolist())), sorted(set(ranks[differing].tolist())))
    totals = np.zeros(len(manifest.sums), dtype=np.uint64)
    np.add.at(totals, distinct[:, 0], sums[first])
    wrong = np.flatnonzero(totals != manifest.sums)
    if len(wrong):
        _refuse(manifest, wrong.tolist(), [])


def _refuse(manifest: WeightManifest, tensors: Sequence[int], ranks: Sequence[int]) -> None:
    names = [manifest.tensors.tensors[tensor].name for tensor in tensors]
    some = ", ".join(names[:NAMES_SHOWN_MAX]) + (f", and {len(names) - NAMES_SHOWN_MAX} more" if names[3:] else "")
    where = f"; rank {', '.join(map(str, ranks))} differs from another that holds the same" if ranks else ""
    raise DigestMismatch(
        f"version {manifest.version} ({manifest.kind}) of run {manifest.run_id!r} was staged to other values than were"
        f" published, in {some}{where}: no rank committed. Fetch a keyframe",
        version=manifest.version,
        names=names,
        ranks=list(ranks),
    )


def part_sums(shard_map: ShardMap, live: Mapping[str, Bits]) -> Sums:
    """The sum of every slice's values, uint64 (P,). live: the rank's flat stored bits by name."""
    totals: list[int] = []
    for one in shard_map.slices:
        key = tensor_key(shard_map.layout.tensors[one.region.tensor].name)
        view, region = one.view(live[one.target]), one.region
        each, total = max(1, SUM_ELEMENTS // region.run), 0
        for run in range(0, region.run_count, each):
            count = min(each, region.run_count - run)
            part = region._replace(start=region.start + run * region.stride, run_count=count)
            total += part.sum(key, None, view[run : run + count].reshape(-1))
        totals.append(total % 2**64)
    return np.array(totals, dtype=np.uint64)


@dataclass(slots=True)
class _Cell:
    """Staged values of one of the rank's tensors. indices: flat positions, ascending, or None for all."""

    indices: Indices | None
    values: Bits


class ShardStage:
    """Collects one or more versions, oldest first, block by block; only blocks that hold something of the rank.

    Args:
        shard_map: of the rank.
        live: its tensors' flat stored bits by name; zeros where there are no weights yet. Only read.
        have: the version that `live` is; -1: none, then the first version must be a keyframe.
        sums: of the slices of `live`, as the last commit's; made here where they are not known.
    """

    def __init__(self, shard_map: ShardMap, live: Mapping[str, Bits], have: int = -1, sums: Sums | None = None) -> None:
        shard_map.local.check_bits(live)
        self._map = shard_map
        self._live = live
        self._version = have
        if sums is None:
            sums = part_sums(shard_map, live) if have >= 0 else np.zeros(len(shard_map.slices), dtype=np.uint64)
        self._sums: list[int] = sums.tolist()
        self._keys = [tensor_key(spec.name) for spec in shard_map.layout.tensors]
        self._cells: dict[str, _Cell] = {}
        self._fresh: dict[str, list[tuple[Indices, Bits]]] = {}
        self._decoder = Decoder()
        self._manifest: WeightManifest | None = None

    def begin(self, manifest: WeightManifest) -> None:
        """The next version; every block that the rank needs of it follows, in any order, then `end`.

        Raises:
            LayoutMismatch: it is not of the checkpoint that the map is for.
            ChainBroken: its base is not what is staged or live.
            WireError: this version of the program cannot read it.
        """
        assert self._manifest is None, "the version before has not ended"
        self._map.layout.check(manifest.tensors)
        manifest.check()
        if manifest.kind == KEYFRAME:
            self._cells = {}
            self._sums = [0] * len(self._map.slices)
        else:
            check_base(manifest, self._version)
        self._manifest = manifest

    def feed(self, row: BlockRow, data: bytes | memoryview) -> None:
        """A block, whose digest was found right.

        Raises:
            WireError: it cannot be decoded.
        """
        assert self._manifest is not None
        spec, region = self._map.layout.tensors[row.tensor], row.region
        decoded = self._decoder.decode(data, element_count=region.element_count, dtype=spec.bits_dtype)
        if self._manifest.kind == KEYFRAME and (decoded.indices is not None or not decoded.is_absolute):
            raise WireError(f"tensor {spec.name!r}: a keyframe holds a block that needs a base")
        positions: Indices | None = None
        for place, one in self._map.by_tensor.get(row.tensor, []):
            if not overlaps(region, one.region):
                continue
            if decoded.indices is None and region.is_contiguous and one.is_contiguous:
                self._take_stretch(place, one, region, decoded)
                continue
            if positions is None:
                positions = region.positions(decoded.indices)
            self._take(place, one, positions, decoded)

    def end(self) -> None:
        """The version is complete; whether it is right, the ranks find out together (`agree`)."""
        assert self._manifest is not None
        fresh, self._fresh = self._fresh, {}
        for name, parts in fresh.items():
            self._cells[name] = self._merged(name, parts)
        self._version = self._manifest.version
        self._manifest = None

    def finish(self) -> Staged:
        """All versions together, by the names of the rank's tensors; `sums` are those of its slices, uint64 (P,)."""
        assert self._manifest is None, "a version has not ended"
        writes: dict[str, Write] = {name: (cell.indices, cell.values) for name, cell in sorted(self._cells.items())}
        self._cells = {}
        return Staged(self._version, writes, np.array([total % 2**64 for total in self._sums], dtype=np.uint64))

    def _take_stretch(self, place: int, one: ShardSlice, region: Region, decoded: Decoded) -> None:
        """All that a whole block and a slice have in common, where both are one stretch: no positions are needed."""
        start, stop = max(region.start, one.region.start), min(region.stop, one.region.stop)
        numbers, key = decoded.numbers[start - region.start : stop - region.start], self._keys[region.tensor]
        first = one.offset + start - one.region.start
        room = self._whole(one.target).values[first : first + len(numbers)]  # as staged so far, or live
        values = numbers if decoded.is_absolute else room + numbers
        if self._manifest is not None and self._manifest.kind != KEYFRAME:
            self._sums[place] -= sum_range(key, start, room)
        self._sums[place] += sum_range(key, start, values)
        room[:] = values

    def _take(self, place: int, one: ShardSlice, positions: Indices, decoded: Decoded) -> None:
        first, last = np.searchsorted(positions, (one.region.start, one.region.stop))
        is_inside, indices = one.region.locate(positions[first:last])
        if not len(indices):
            return
        own, numbers = positions[first:last][is_inside], decoded.numbers[first:last][is_inside]
        targets, key = one.targets(indices), self._keys[one.region.tensor]
        if self._manifest is not None and self._manifest.kind == KEYFRAME:
            values = numbers
        else:
            olds = self._current(one.target, targets)
            values = numbers if decoded.is_absolute else olds + numbers
            self._sums[place] -= sum_at(key, own, olds)
        self._sums[place] += sum_at(key, own, values)
        if decoded.indices is None:
            self._whole(one.target).values[targets] = values
        else:
            self._keep(one.target, targets, values)

    def _keep(self, name: str, targets: Indices, values: Bits) -> None:
        cell = self._cells.get(name)
        if cell is not None and cell.indices is None:
            cell.values[targets] = values  # blocks of a version have nothing in common, so nobody reads these again
        else:
            self._fresh.setdefault(name, []).append((targets, values))

    def _current(self, name: str, targets: Indices) -> Bits:
        """Values that steps add to: staged where there are some, live elsewhere."""
        cell = self._cells.get(name)
        if cell is not None and cell.indices is None:
            return cell.values[targets]
        current: Bits = self._live[name][targets]
        if cell is not None and cell.indices is not None and len(cell.indices):
            where = np.searchsorted(cell.indices, targets)
            where[where == len(cell.indices)] = 0
            found = cell.indices[where] == targets
            current[found] = cell.values[where[found]]
        return current

    def _whole(self, name: str) -> _Cell:
        """The tensor as staged so far, all of it: its padding is as it is live."""
        cell = self._cells.get(name)
        if cell is None or cell.indices is not None:
            whole = np.array(self._live[name])
            if cell is not None:
                whole[cell.indices] = cell.values
            for targets, values in self._fresh.pop(name, []):
                whole[targets] = values
            cell = self._cells[name] = _Cell(None, whole)
        return cell

    def _merged(self, name: str, parts: list[tuple[Indices, Bits]]) -> _Cell:
        """The tensor's cell with a version's changes over it, in ascending order; whole where that is fewer bytes."""
        cell = self._cells.get(name)
        older = [] if cell is None or cell.indices is None else [(cell.indices, cell.values)]
        indices = np.concatenate([targets for targets, _ in older + parts])
        values = np.concatenate([values for _, values in older + parts])
        if len(indices) * (INDEX_BYTES + values.itemsize) >= self._live[name].nbytes:
            whole = self._whole(name)
            for targets, changed in parts:
                whole.values[targets] = changed
            return whole
        order = np.argsort(indices, kind="stable")
        indices, values = indices[order], values[order]
        is_last = np.append(indices[1:] != indices[:-1], True)
        return _Cell(indices[is_last], values[is_last])
