"""Parts of tensors that a rank holds: of torch's DTensor, or in a layout of the trainer's own (`Slice`).

- Such a layout has tensor parallel tensors, fused ones, or those of a stage.
- Every rank names the parts as they lie in the checkpoint (Hugging Face's names and shapes), wherever they lie in its
  memory. Ranks that hold the same part take turns; a rank need not know of tensors that others hold.
- megatron.py makes them for models of Megatron-Core.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...fabric.contract.errors import InputError
from ...fabric.format.layout import TensorSpec
from ...fabric.format.regions import Region

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Slice:
    """A part of a tensor: give it to `publish` in the tensor's place, on every rank of a group that holds one.

    tensor: the elements [start, start + its own shape) in every dimension, as a torch tensor or numpy array.
    shape: of the whole tensor. start: by default 0 in every dimension.
    """

    tensor: Any
    shape: tuple[int, ...]
    start: tuple[int, ...] = ()

    def box(self, spec: TensorSpec, number: int) -> Region:
        """Return its region. spec: of the whole tensor. number: of that in its layout.

        Raises:
            InputError: it does not lie in the tensor, or is no region.
        """
        own = tuple(self.tensor.shape)
        start = self.start or (0,) * len(spec.shape)
        ends = [first + count for first, count in zip(start, own, strict=False)]
        is_inside = len(start) == len(own) == len(spec.shape) and min(start, default=0) >= 0
        if not is_inside or any(end > length for end, length in zip(ends, spec.shape, strict=True)):
            raise InputError(
                f"a slice of tensor {spec} has shape {list(own)} and starts at {list(start)}: it does not lie in it",
                name=spec.name,
            )
        return Region.box(number, spec, list(zip(start, own, strict=True)))


def box_of(spec: TensorSpec, tensor: DTensor, number: int) -> Region:
    """Return the region of a DTensor that this rank holds.

    Args:
        number: of the tensor in its layout.

    Raises:
        InputError: it is placed so that the part is no box, or not the one that its placements say.
    """
    from torch.distributed.tensor import Replicate, Shard  # slow to load, and needed by few

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
