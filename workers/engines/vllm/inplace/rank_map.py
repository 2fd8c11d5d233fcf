"""What a rank of vLLM holds, as a map by which it can fetch and stage its own part (fabric/versions/rank_parts.py).

- Made from the recorded placement, so it is what vLLM's own loader does, whatever the architecture.
- The rank's own tensors have the names of its parameters; padding is part of them, and nobody's slice.
- The same on every device; unverified on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from .....fabric.format.layout import Layout, TensorSpec
from .....fabric.format.regions import Region
from .....fabric.versions.rank_parts import ShardMap, ShardSlice
from .pieces import Piece
from .placement import Placement


def shard_map(placement: Placement) -> ShardMap:
    """The map of one rank; checked.

    Raises:
        LayoutMismatch: two tensors share a place.
    """
    specs: dict[int, TensorSpec] = {}
    slices: list[ShardSlice] = []
    for number, spec in enumerate(placement.layout.tensors):
        for piece in placement.pieces[spec.name]:
            memory = placement.memories[piece.memory]
            dtype = str(memory.tensor.dtype).removeprefix("torch.")
            specs[piece.memory] = TensorSpec(memory.name, dtype, (memory.flat.numel(),))
            slices += _slices(number, piece, memory.name)
    made = ShardMap(placement.layout, Layout(tuple(specs.values())), tuple(sorted(slices)))
    made.check()
    return made


def _slices(number: int, piece: Piece, target: str) -> Iterator[ShardSlice]:
    """A piece as equal runs; one slice for each place in the dimensions further out than those."""
    dims = list(zip(piece.shape, piece.source_strides, piece.target_strides, strict=True))
    run, _, step = dims.pop() if dims and dims[-1][1] == 1 else (1, 1, 1)
    count, stride, target_stride = dims.pop() if dims else (1, run, run)
    for place in product(*(range(length) for length, _, _ in dims)):
        first = sum(index * dim[1] for index, dim in zip(place, dims, strict=True))
        offset = sum(index * dim[2] for index, dim in zip(place, dims, strict=True))
        region = Region(number, piece.source_offset + first, run, stride, count)
        yield ShardSlice(region, target, piece.target_offset + offset, target_stride, step)
