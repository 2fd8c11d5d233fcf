"""Regions: the elements of a tensor that one encoded block holds.

- A region is a number of equal runs of elements, equally far apart. One run is the ordinary case; several are a tile:
  some columns of a matrix, as a row-parallel shard or a second-dimension shard of a trainer holds them.
- The publisher decides how tensors are cut; readers take the regions as the manifest names them.
- A region has at most BLOCK_BYTES of stored bits, which bounds the memory of decoding a block.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from ..contract.errors import InputError
from .codec import BLOCK_BYTES, Bits
from .digest import change_at, sum_at, sum_range
from .layout import Layout, TensorSpec


class Region(NamedTuple):
    """`run_count` runs of `run` elements, `stride` apart, from flat position `start` of tensor number `tensor`."""

    tensor: int
    start: int
    run: int
    stride: int
    run_count: int

    @classmethod
    def span(cls, tensor: int, start: int, stop: int) -> Region:
        """Make the region of elements [start, stop) of the flat tensor."""
        return cls(tensor, start, stop - start, stop - start, 1)

    @classmethod
    def box(cls, tensor: int, spec: TensorSpec, ranges: Sequence[tuple[int, int]]) -> Region:
        """Make the region of the elements [first, first + count) in every dimension.

        Raises:
            InputError: these are no equal runs, equally far apart: the tensor is split in several inner dimensions.
        """
        shape = spec.shape
        if any(count == 0 for _, count in ranges):
            return cls.span(tensor, 0, 0)
        cut = [dim for dim, (_, count) in enumerate(ranges) if count < shape[dim]]
        if not cut:
            return cls.span(tensor, 0, spec.element_count)
        last, first = cut[-1], cut[0]
        inner = math.prod(shape[last + 1 :])
        start = sum(ranges[dim][0] * math.prod(shape[dim + 1 :]) for dim in cut)
        run_count = math.prod(count for _, count in ranges[:last])
        if len(cut) > 2 or (len(cut) == 2 and math.prod(shape[:first]) > 1):
            raise InputError(
                f"tensor {spec} is split in several inner dimensions, which is not supported", name=spec.name
            )
        run = ranges[last][1] * inner
        if run_count == 1:
            return cls.span(tensor, start, start + run)
        return cls(tensor, start, run, shape[last] * inner, run_count)

    @property
    def element_count(self) -> int:
        return self.run * self.run_count

    @property
    def stop(self) -> int:
        """The flat position behind its last element."""
        return self.start + (self.run_count - 1) * self.stride + self.run

    @property
    def is_contiguous(self) -> bool:
        """Whether it is one stretch of the flat tensor."""
        return self.run_count == 1 or self.stride == self.run

    def read(self, flat: Bits) -> Bits:
        """Read its elements of a flat tensor, in order; a view if it is contiguous, else a copy."""
        if self.is_contiguous:
            return flat[self.start : self.stop]
        return np.ascontiguousarray(self._tile(flat)).reshape(-1)

    def write(self, flat: Bits, values: Bits) -> None:
        """Set its elements of a flat, writable tensor."""
        if self.is_contiguous:
            flat[self.start : self.stop] = values
        else:
            self._tile(flat)[...] = values.reshape(self.run_count, self.run)

    def positions(self, indices: NDArray[Any] | None) -> NDArray[np.int64]:
        """Turn ascending indices in the region (None: all) into flat positions in the tensor, ascending. int64 (C,)."""
        if indices is None:
            indices = np.arange(self.element_count, dtype=np.int64)
        wide = indices.astype(np.int64, copy=False)
        if self.is_contiguous:
            return wide + self.start
        run, within = np.divmod(wide, self.run)
        positions: NDArray[np.int64] = self.start + run * self.stride + within
        return positions

    def locate(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
        """Tell which of the flat positions in [start, stop) are in the region, and return the indices of these."""
        run, within = np.divmod(positions - self.start, self.stride)
        is_inside = within < self.run
        return is_inside, (run * self.run + within)[is_inside]

    def sum(self, key: int, indices: NDArray[Any] | None, values: Bits) -> int:
        """Compute the share of `values` at `indices` (None: all) in the tensor's digest; see digest.py."""
        if indices is None and self.is_contiguous:
            return sum_range(key, self.start, values)
        return sum_at(key, self.positions(indices), values)

    def change(self, key: int, indices: NDArray[Any] | None, olds: Bits | None, values: Bits) -> int:
        """Compute how the tensor's digest moves when `olds` (None: nothing yet) at `indices` become `values`."""
        if olds is None:
            return self.sum(key, indices, values)
        if indices is not None and self.is_contiguous:
            return change_at(key, self.start, indices.astype(np.int64, copy=False), olds, values)
        return self.sum(key, indices, values) - self.sum(key, indices, olds)

    def fits(self, spec: TensorSpec) -> bool:
        """Whether it is a possible region of that tensor."""
        is_shape = self.start >= 0 and self.run >= 1 and self.run_count >= 1
        is_shape &= self.stride == self.run if self.run_count == 1 else self.stride >= self.run
        is_small = self.element_count * spec.bits_dtype.itemsize <= BLOCK_BYTES
        return is_shape and is_small and self.stop <= spec.element_count

    def _tile(self, flat: Bits) -> Bits:
        step = flat.strides[0]
        part = flat[self.start : self.stop]
        shape, strides = (self.run_count, self.run), (self.stride * step, step)
        return np.lib.stride_tricks.as_strided(part, shape, strides, writeable=part.flags.writeable)


def cut(layout: Layout) -> list[Region]:
    """Make the ordinary cut: every tensor in contiguous regions of BLOCK_BYTES, in the layout's order."""
    wholes = [(Region.span(tensor, 0, spec.element_count), spec) for tensor, spec in enumerate(layout.tensors)]
    return [region for whole, spec in wholes for region in cut_region(whole, spec)]


def cut_region(region: Region, spec: TensorSpec) -> list[Region]:
    """Cut a region into parts of at most BLOCK_BYTES, in order: whole runs, or parts of runs that are longer."""
    size = BLOCK_BYTES // spec.bits_dtype.itemsize
    if region.is_contiguous:
        return [
            Region.span(region.tensor, first, min(first + size, region.stop))
            for first in range(region.start, region.stop, size)
        ]
    starts = range(region.start, region.stop, region.stride)
    if region.run > size:
        runs = [Region.span(region.tensor, start, start + region.run) for start in starts]
        return [part for run in runs for part in cut_region(run, spec)]
    each = size // region.run
    return [
        region._replace(start=starts[k], run_count=min(each, region.run_count - k))
        for k in range(0, region.run_count, each)
    ]


def cut_digest(regions: Iterable[Region]) -> str:
    """Return xxh3-64, hex, of a cut: versions of one cut can be folded block by block."""
    return xxhash.xxh3_64_hexdigest(np.array([*regions], dtype="<i8").tobytes())
