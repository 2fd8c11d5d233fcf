"""How layers are split over tensor-parallel ranks, and cuts of a model along those borders.

- A plan makes the map of one rank (rank_parts.py): columns, rows, fused attention and gate-up, padded vocabulary,
  copies.
- A publisher that cuts tensors along the ranks' borders lets each rank fetch its own part and little more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ..contract.errors import LayoutMismatch
from ..format.layout import Layout, TensorSpec
from ..format.regions import Region, cut_region
from .rank_parts import ShardMap, ShardSlice


class ShardPlan:
    """Makes the map of one rank of a model whose layers are split in the usual ways.

    Args:
        layout: of the checkpoint.
        rank: of `rank_count`.
    """

    def __init__(self, layout: Layout, *, rank: int, rank_count: int) -> None:
        assert 0 <= rank < rank_count
        self._layout = layout
        self._rank = rank
        self._rank_count = rank_count
        self._numbers = {spec.name: number for number, spec in enumerate(layout.tensors)}
        self._slices: list[ShardSlice] = []
        self._local: list[TensorSpec] = []

    def build(self) -> ShardMap:
        """The map; checked."""
        ordered = sorted(self._slices, key=lambda one: one.region)
        made = ShardMap(self._layout, Layout(tuple(self._local)), tuple(ordered))
        made.check()
        return made

    def column(self, name: str, *, into: str = "") -> None:
        """Split along dimension 0: outputs of a linear layer, or its bias."""
        self._split(name, 0, into or name)

    def row(self, name: str, *, into: str = "") -> None:
        """Split along dimension 1: inputs of a linear layer."""
        self._split(name, 1, into or name)

    def replicated(self, name: str, *, into: str = "") -> None:
        """Whole on every rank."""
        spec = self._spec(name)
        self._fuse(into or name, [(name, 0, spec.shape[0])] if spec.shape else [(name, 0, 1)])

    def gate_up(self, gate: str, up: str, *, into: str) -> None:
        """Two column-parallel tensors, one above the other."""
        self._fuse(into, [(name, self._rank, self._share(name, 0)) for name in (gate, up)])

    def qkv(self, q: str, k: str, v: str, *, into: str, head_count: int, kv_head_count: int) -> None:
        """Attention heads split over the ranks; key and value heads too, or copied where they are fewer than ranks."""
        ranks = self._rank_count
        kv_size = self._spec(k).shape[0] // kv_head_count
        if head_count % ranks or max(kv_head_count, ranks) % min(kv_head_count, ranks):
            raise LayoutMismatch(
                f"{head_count} heads and {kv_head_count} key-value heads of {q!r} do not divide into {ranks} ranks"
            )
        each = max(1, kv_head_count // ranks) * kv_size
        group = self._rank * kv_head_count // ranks if kv_head_count < ranks else self._rank
        self._fuse(into, [(q, self._rank, self._share(q, 0)), (k, group, each), (v, group, each)])

    def vocabulary(self, name: str, *, multiple: int, into: str = "") -> None:
        """Split along dimension 0 after padding it to a multiple; the last ranks hold padding, or nothing else."""
        spec = self._spec(name)
        padded = -(-spec.shape[0] // multiple) * multiple
        if padded % self._rank_count:
            raise LayoutMismatch(f"{padded} padded rows of {name!r} do not divide into {self._rank_count} ranks")
        each = padded // self._rank_count
        first = min(self._rank * each, spec.shape[0])
        own = TensorSpec(into or name, spec.dtype, (each, *spec.shape[1:]))
        self._local.append(own)
        self._add(part_of(self._numbers[name], spec, 0, first, min(each, spec.shape[0] - first)), own.name, 0)

    def _split(self, name: str, dim: int, into: str) -> None:
        spec, each = self._spec(name), self._share(name, dim)
        shape = (*spec.shape[:dim], each, *spec.shape[dim + 1 :])
        self._local.append(TensorSpec(into, spec.dtype, shape))
        self._add(part_of(self._numbers[name], spec, dim, self._rank * each, each), into, 0)

    def _fuse(self, into: str, parts: Sequence[tuple[str, int, int]]) -> None:
        """parts: (name, number of the part, rows of a part), one above the other in `into`."""
        specs = [self._spec(name) for name, _, _ in parts]
        rest = specs[0].shape[1:]
        row_count, offset = sum(each for _, _, each in parts), 0
        self._local.append(TensorSpec(into, specs[0].dtype, (row_count, *rest) if specs[0].shape else ()))
        for spec, (name, number, each) in zip(specs, parts, strict=True):
            if spec.shape[1:] != rest:
                raise LayoutMismatch(f"{specs[0]} and {spec} can not be fused", tensor=name)
            self._add(part_of(self._numbers[name], spec, 0, number * each, each), into, offset)
            offset += each * math.prod(rest)

    def _add(self, region: Region, into: str, offset: int) -> None:
        if region.element_count:
            self._slices.append(ShardSlice(region, into, offset, region.run))

    def _spec(self, name: str) -> TensorSpec:
        if name not in self._numbers:
            raise LayoutMismatch(f"the layout has no tensor {name!r}", tensor=name)
        return self._layout.tensors[self._numbers[name]]

    def _share(self, name: str, dim: int) -> int:
        spec = self._spec(name)
        if len(spec.shape) <= dim or spec.shape[dim] % self._rank_count:
            raise LayoutMismatch(f"dimension {dim} of {spec} does not divide into {self._rank_count} ranks")
        return spec.shape[dim] // self._rank_count


def part_of(tensor: int, spec: TensorSpec, dim: int, first: int, count: int) -> Region:
    """Places [first, first + count) along a dimension of a tensor (a scalar: dimension 0 of one element)."""
    shape = spec.shape or (1,)
    inner, outer = math.prod(shape[dim + 1 :]), math.prod(shape[:dim])
    if outer == 1 or count == shape[dim]:
        return Region.span(tensor, first * inner, (first + (outer - 1) * shape[dim] + count) * inner)
    return Region(tensor, first * inner, count * inner, shape[dim] * inner, outer)


def cut_for_ranks(
    layout: Layout, *, row_parts: Mapping[str, int] | None = None, column_parts: Mapping[str, int] | None = None
) -> list[Region]:
    """The layout cut so that ranks which hold parts of tensors find them in blocks of their own.

    Args:
        row_parts: name → into how many parts dimension 0 is split (column-parallel layers).
        column_parts: name → into how many parts dimension 1 is split (row-parallel layers).

    Returns:
        Regions that cover every tensor, in the layout's order; all others are cut as usual.

    Raises:
        LayoutMismatch: a dimension does not divide into so many parts.
    """
    wanted = {name: (0, parts) for name, parts in (row_parts or {}).items()}
    wanted |= {name: (1, parts) for name, parts in (column_parts or {}).items()}
    regions: list[Region] = []
    for tensor, spec in enumerate(layout.tensors):
        dim, parts = wanted.get(spec.name, (0, 1))
        if spec.element_count == 0:
            continue
        if parts > 1 and (len(spec.shape) <= dim or spec.shape[dim] % parts):
            raise LayoutMismatch(f"dimension {dim} of {spec} does not divide into {parts} parts", tensor=spec.name)
        each = (spec.shape or (1,))[dim] // parts
        for part in range(parts):
            regions += cut_region(part_of(tensor, spec, dim, part * each, each), spec)
    return regions
