"""Boxes of sharded tensors (torch's DTensor): the region that one rank holds."""

from __future__ import annotations

from torch.distributed.tensor import DTensor, Replicate, Shard

from ...fabric.contract.errors import InputError
from ...fabric.format.layout import TensorSpec
from ...fabric.format.regions import Region


def box_of(spec: TensorSpec, tensor: DTensor, number: int) -> Region:
    """Return the region that this rank holds.

    Args:
        number: of the tensor in its layout.

    Raises:
        InputError: it is placed so that the part is no box, or not the one that its placements say.
    """
    mesh, placed = tensor.device_mesh, tuple(tensor.placements)
    place = mesh.get_coordinate()
    if place is None:
        return Region.span(number, 0, 0)
    ranges = [(0, length) for length in spec.shape]
    for dim_size, coordinate, placement in zip(mesh.shape, place, tensor.placements, strict=True):
        if type(placement) is Shard and 0 <= placement.dim < len(ranges):
            first, count = ranges[placement.dim]
            each = -(-count // dim_size)
            begin = min(coordinate * each, count)
            ranges[placement.dim] = (first + begin, min(each, count - begin))
        elif type(placement) is not Replicate:
            raise InputError(
                f"tensor {spec.name!r} is placed as {placed}: {placement} cannot be published by shards, only Shard and"
                " Replicate can. Gather it first with .full_tensor()",
                name=spec.name,
            )
    box, count = Region.box(number, spec, ranges), tensor.to_local().numel()
    if box.element_count != count:
        raise InputError(
            f"tensor {spec} has {count:,} elements on this rank, its placements {placed} say {box.element_count:,}: it"
            " cannot be published by shards",
            name=spec.name,
        )
    return box
