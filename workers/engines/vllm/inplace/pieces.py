"""Describes where the elements of a checkpoint tensor live: in strided pieces, each a part of it and a place in memory.

- Offsets and strides count elements. The source side is the flat checkpoint tensor, the target side a flat view of
  the memory of one live parameter.
- An element of the source is in a piece at most once, so a flat index has at most one target in it.
- Torch only, on any device; the pieces of a model are found by loader_trace.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # bytes of an element → what carries its bits


def integers(array: NDArray[Any]) -> torch.Tensor:
    """Return the same memory as signed integers, which torch has every operation for."""
    return torch.from_numpy(array.view(np.dtype(f"<i{array.itemsize}")))


@dataclass(frozen=True, slots=True)
class Piece:
    """One strided copy. memory: key of the live memory; the rest in elements, outermost source stride first."""

    memory: int
    shape: tuple[int, ...]
    source_offset: int
    source_strides: tuple[int, ...]
    target_offset: int
    target_strides: tuple[int, ...]

    @property
    def element_count(self) -> int:
        """The elements that it places."""
        return math.prod(self.shape)

    def targets(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute where flat source indices go.

        Args:
            indices: int64 (N,), each at least 0.

        Returns:
            bool (N,): which of them are in this piece; int64 (N,): their targets, meaningless for the others.
        """
        rest = indices - self.source_offset
        inside = rest >= 0
        target = torch.full_like(rest, self.target_offset)
        for length, source_stride, target_stride in zip(
            self.shape, self.source_strides, self.target_strides, strict=True
        ):
            place = rest.div(source_stride, rounding_mode="floor")
            inside &= place < length
            target += place * target_stride
            rest = rest - place * source_stride
        return inside & (rest == 0), target

    def source(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the piece's part of a flat checkpoint tensor, as a view."""
        return flat.as_strided(self.shape, self.source_strides, self.source_offset)

    def target(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the piece's place in the flat view of the memory, as a view."""
        return flat.as_strided(self.shape, self.target_strides, self.target_offset)


def piece_of(memory: int, source: torch.Tensor, target: torch.Tensor) -> Piece | None:
    """Describe `target.copy_(source)` as a piece; None: it copies nothing.

    Args:
        source: a view of a contiguous checkpoint tensor that is the whole of its storage; only its form is used.
        target: a view of live memory, of the same shape.

    Raises:
        ValueError: one source element goes to several places, or the view overlaps itself.
    """
    assert source.shape == target.shape, (source.shape, target.shape)
    if source.numel() == 0:
        return None
    rows = [
        (source_stride, target_stride, length)
        for length, source_stride, target_stride in zip(source.shape, source.stride(), target.stride(), strict=True)
        if length > 1
    ]
    rows.sort(key=lambda row: row[0], reverse=True)
    merged = _merge(rows)
    reach = 0  # of the dimensions further in
    for source_stride, _, length in reversed(merged):
        if source_stride <= reach:
            raise ValueError("an element of it is used more than once")
        reach += (length - 1) * source_stride
    return Piece(
        memory=memory,
        shape=tuple(row[2] for row in merged),
        source_offset=int(source.storage_offset()),
        source_strides=tuple(row[0] for row in merged),
        target_offset=int(target.storage_offset()),
        target_strides=tuple(row[1] for row in merged),
    )


def _merge(rows: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Merge dimensions that are one stretch on both sides: most pieces end with a single one."""
    merged: list[tuple[int, int, int]] = []
    for source_stride, target_stride, length in rows:
        if merged and merged[-1][:2] == (source_stride * length, target_stride * length):
            length *= merged.pop()[2]
        merged.append((source_stride, target_stride, length))
    return merged
