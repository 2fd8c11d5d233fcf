"""Parts of tensors that a trainer holds in a layout of its own: tensor parallel ones, fused ones, those of a stage.

- Every rank names the parts as they lie in the checkpoint (Hugging Face's names and shapes), wherever they lie in its
  memory. Ranks that hold the same part take turns; a rank need not know of tensors that others hold.
- megatron.py makes them for models of Megatron-Core.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...fabric.contract.errors import InputError
from ...fabric.format.layout import TensorSpec
from ...fabric.format.regions import Region


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
