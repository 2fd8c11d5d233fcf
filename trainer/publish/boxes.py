"""Boxes of sharded tensors (torch's DTensor): the region that one rank holds, and which rank publishes it.

- Ranks that hold equal parts take turns by tensor, so that replicas share the work.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch.distributed.tensor import DTensor, Replicate, Shard

from ...fabric.contract.errors import InputError
from ...fabric.format.layout import TensorSpec
from ...fabric.format.regions import Region


def box_of(spec: TensorSpec, tensor: DTensor, number: int) -> tuple[Region, bool]:
    """Return the region that this rank holds, and whether this rank publishes it.

    Args:
        number: of the tensor in its layout.

    Raises:
        InputError: it is placed so that the part is no box, or not the one that its placements say.
    """
    mesh, placed = tensor.device_mesh, tuple(tensor.placements)
    place = mesh.get_coordinate()
    if place is None:
        return Region.span(number, 0, 0), False
    ranges = [(0, length) for length in spec.shape]
    is_mine = True
    for dim_size, coordinate, placement in zip(mesh.shape, place, tensor.placements, strict=True):
        if type(placement) is Shard and 0 <= placement.dim < len(ranges):
            first, count = ranges[placement.dim]
            each = -(-count // dim_size)
            begin = min(coordinate * each, count)
            ranges[placement.dim] = (first + begin, min(each, count - begin))
        elif type(placement) is Replicate:
            is_mine = is_mine and number % dim_size == coordinate
        else:
            raise InputError(
                f"tensor {spec.name!r} is placed as {placed}: {placement} cannot be published by shards, only Shard and"
                " Replicate can. Gather it first with .full_tensor()",
                name=spec.name,
            )
    box, count = _region(number, spec, ranges), tensor.to_local().numel()
    if box.element_count != count:
        raise InputError(
            f"tensor {spec} has {count:,} elements on this rank, its placements {placed} say {box.element_count:,}: it"
            " cannot be published by shards",
            name=spec.name,
        )
    return box, is_mine


def _region(number: int, spec: TensorSpec, ranges: Sequence[tuple[int, int]]) -> Region:
    """Return the part [first, first + count) in every dimension, as equal runs."""
    shape = spec.shape
    if any(count == 0 for _, count in ranges):
        return Region.span(number, 0, 0)
    cut = [dim for dim, (_, count) in enumerate(ranges) if count < shape[dim]]
    if not cut:
        return Region.span(number, 0, spec.element_count)
    last, first = cut[-1], cut[0]
    inner = math.prod(shape[last + 1 :])
    start = sum(ranges[dim][0] * math.prod(shape[dim + 1 :]) for dim in cut)
    run_count = math.prod(count for _, count in ranges[:last])
    if len(cut) > 2 or (len(cut) == 2 and math.prod(shape[:first]) > 1):
        raise InputError(f"tensor {spec} is split in several inner dimensions, which is not supported", name=spec.name)
    run = ranges[last][1] * inner
    return (
        Region.span(number, start, start + run)
        if run_count == 1
        else Region(number, start, run, shape[last] * inner, run_count)
    )
