"""Maps of tensor-parallel ranks, made by hand, and cuts of a model along their borders."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rollfab.fabric.format.layout import Layout, TensorSpec
from rollfab.fabric.format.regions import Region, cut_region
from rollfab.fabric.versions.rank_parts import ShardMap, ShardSlice

Part = tuple[str, int, int, int]  # places [first, first + count) along a dimension of a checkpoint tensor


def rank_map(layout: Layout, tensors: Mapping[str, tuple[tuple[int, ...], Sequence[Part]]]) -> ShardMap:
    """A map of one rank; checked. tensors: own name → shape and the parts in it, one behind the other from its front.

    A part whose name begins with "turned" lies there transposed.
    """
    numbers = {spec.name: number for number, spec in enumerate(layout.tensors)}
    own, slices = [], []
    for target, (shape, parts) in tensors.items():
        own.append(TensorSpec(target, layout.tensors[numbers[parts[0][0]]].dtype, shape))
        offset = 0
        for name, dim, first, count in parts:
            region = part_of(numbers[name], layout.tensors[numbers[name]], dim, first, count)
            stride, step = region.run, 1
            if name.startswith("turned"):
                columns = layout.tensors[numbers[name]].shape[1]
                region = Region(region.tensor, region.start, columns, columns, count)
                stride, step = 1, count
            if region.element_count:
                slices.append(ShardSlice(region, target, offset, stride, step))
            offset += region.element_count
    made = ShardMap(layout, Layout(tuple(own)), tuple(sorted(slices)))
    made.check()
    return made


def part_of(tensor: int, spec: TensorSpec, dim: int, first: int, count: int) -> Region:
    """Places [first, first + count) along a dimension of a tensor (a scalar: dimension 0 of one element)."""
    shape = spec.shape or (1,)
    inner, outer = math.prod(shape[dim + 1 :]), math.prod(shape[:dim])
    if outer == 1 or count == shape[dim]:
        return Region.span(tensor, first * inner, (first + (outer - 1) * shape[dim] + count) * inner)
    return Region(tensor, first * inner, count * inner, shape[dim] * inner, outer)


def cut_for_ranks(layout: Layout, *, row_parts: Mapping[str, int], column_parts: Mapping[str, int]) -> list[Region]:
    """The layout cut so that ranks find their parts in blocks of their own. Both: name → into how many parts."""
    parts = {name: (0, count) for name, count in row_parts.items()}
    parts |= {name: (1, count) for name, count in column_parts.items()}
    regions: list[Region] = []
    for tensor, spec in enumerate(layout.tensors):
        dim, count = parts.get(spec.name, (0, 1))
        each = (spec.shape or (1,))[dim] // count
        for part in range(count if spec.element_count else 0):
            regions += cut_region(part_of(tensor, spec, dim, part * each, each), spec)
    return regions
