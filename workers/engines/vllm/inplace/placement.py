"""A model's tensors in the live memory of one rank: where they are, element by element, and read as stored bits.

- Addresses never change; bits are moved as integers, so NaN payloads, signed zeros and denormals are exact.
- Nothing is checked here but what `check_covered` says; prepared.py writes.
- The code is the same for every device; only on a CPU has it been run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from .....fabric.contract.errors import LayoutMismatch
from .....fabric.format.layout import Layout, TensorSpec
from .pieces import INTEGER, Piece

Coverage = Mapping[str, Sequence[Piece] | None]  # pieces of a tensor on one rank; None: that rank has all of it


def memory_key(tensor: torch.Tensor) -> int:
    """Return a key that all views of one memory share, with content or without, and no other memory while one lives."""
    return int(tensor.untyped_storage()._cdata)


def whole_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return all of the memory that a tensor is a view of, as integers as wide as its elements."""
    storage = tensor.untyped_storage()
    flat = torch.empty(0, dtype=INTEGER[tensor.dtype.itemsize], device=tensor.device)
    return flat.set_(storage, 0, (storage.nbytes() // tensor.dtype.itemsize,), (1,))


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of a parameter or buffer. flat: all of it, as integers as wide as its elements. name: of the parameter."""

    name: str
    flat: torch.Tensor
    tensor: torch.Tensor
    is_parameter: bool


@dataclass(frozen=True, slots=True)
class Padding:
    """Elements that no tensor has, and the constant that vLLM's loader gives them. positions: int64, in `flat`."""

    memory: int
    positions: torch.Tensor
    value: float


@dataclass(frozen=True, slots=True)
class Placement:
    """The place of each tensor of the layout on this rank: its pieces, by name; none if other ranks have it."""

    layout: Layout
    memories: Mapping[int, Memory]
    pieces: Mapping[str, Sequence[Piece]]
    padding: Sequence[Padding] = ()

    def read(self, name: str, into: torch.Tensor) -> None:
        """Fill the flat integers `into` with what this rank has of a tensor; the rest stays as it is."""
        for piece in self.pieces[name]:
            piece.source(into).copy_(piece.target(self.memories[piece.memory].flat))

    def fill_padding(self) -> None:
        """Give padding the loader's constant: a model that began with random weights has others there."""
        for row in self.padding:
            memory = self.memories[row.memory]
            bits = torch.tensor([row.value], dtype=memory.tensor.dtype).view(memory.flat.dtype)
            memory.flat.index_fill_(0, row.positions.to(memory.flat.device), int(bits))

    def coverage(self) -> Coverage:
        """Return what this rank has, small enough to be told to the others."""
        return {spec.name: self._part(spec) for spec in self.layout.tensors}

    def _part(self, spec: TensorSpec) -> Sequence[Piece] | None:
        pieces = self.pieces[spec.name]
        return None if any(piece.element_count == spec.element_count for piece in pieces) else pieces


def check_covered(layout: Layout, ranks: Sequence[Coverage]) -> None:
    """Require that every element of every tensor has a place on some rank.

    Raises:
        LayoutMismatch: names the first tensor that has not.
    """
    for spec in layout.tensors:
        parts = [rank[spec.name] for rank in ranks]
        if None in parts:
            continue
        seen = torch.zeros(spec.element_count, dtype=torch.bool)
        for part in parts:
            for piece in part or ():
                piece.source(seen).fill_(True)
        count = int(seen.sum())
        if count < spec.element_count:
            lack = "no place" if count == 0 else f"a place for {count} of its {spec.element_count} elements only"
            raise LayoutMismatch(
                f"tensor {spec} has {lack} in vLLM's model: it is tied to another tensor there, or not used. Publish"
                " the layout of the model that vLLM serves",
                tensor=spec.name,
            )
