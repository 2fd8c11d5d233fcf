"""The elements of a model that one tensor-parallel rank holds, and their places.

- A map lists the stretches of checkpoint tensors that the rank holds, each with its place in the rank's own flat
  tensors: split by rows or columns, fused with others, padded, or whole.
- Stretches of different ranks are equal (replicas) or have nothing in common; so sums over them add up to the model's.
- A process that holds the whole model is a group of one rank, whose map is the identity (`whole`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..contract.errors import LayoutMismatch
from ..format.codec import Bits
from ..format.layout import Layout, TensorSpec
from ..format.regions import Region


class ShardSlice(NamedTuple):
    """A region of a checkpoint tensor, and its place in one of the rank's own.

    Run k of the region begins at `offset` + k * `stride` of the flat tensor `target`; its elements are `step` apart.
    """

    region: Region
    target: str
    offset: int
    stride: int
    step: int = 1

    @property
    def is_contiguous(self) -> bool:
        """True if it is one stretch of both tensors."""
        is_one = self.region.run_count == 1 or self.stride == self.region.run
        return is_one and self.step == 1 and self.region.is_contiguous

    @property
    def is_ascending(self) -> bool:
        """True if its elements have the same order in both tensors."""
        return self.step > 0 and self.stride > (self.region.run - 1) * self.step

    def holds(self, region: Region) -> bool:
        """Tell whether this slice is one stretch, and a region of the same tensor lies in it."""
        return self.is_contiguous and self.region.start <= region.start and region.stop <= self.region.stop

    def targets(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Turn indices in the region into flat positions in `target`. int64 (C,) both."""
        run, within = np.divmod(indices, self.region.run)
        places: NDArray[np.int64] = self.offset + run * self.stride + within * self.step
        return places

    def pieces(self, element_count_max: int) -> Iterator[ShardSlice]:
        """Cut it into slices of at most so many elements, or one run."""
        tensor, start, run, stride, run_count = self.region
        if self.is_contiguous:
            for first in range(0, run * run_count, element_count_max):
                last = min(first + element_count_max, run * run_count)
                region = Region.span(tensor, start + first, start + last)
                yield ShardSlice(region, self.target, self.offset + first, last - first)
            return
        each = max(1, element_count_max // run)
        for first in range(0, run_count, each):
            count = min(each, run_count - first)
            region = Region(tensor, start + first * stride, run, stride, count)
            yield self._replace(region=region, offset=self.offset + first * self.stride)

    def view(self, flat: Bits) -> Bits:
        """Return its elements in the flat tensor `target`, as a view (run_count, run)."""
        width = flat.strides[0]
        shape = (self.region.run_count, self.region.run)
        strides = (self.stride * width, self.step * width)
        part = flat[self.offset :]
        return np.lib.stride_tricks.as_strided(part, shape, strides, writeable=part.flags.writeable)


@dataclass(frozen=True)
class ShardMap:
    """The part of a model that one rank holds. layout: the checkpoint's. local: its own tensors, with padding."""

    layout: Layout
    local: Layout
    slices: tuple[ShardSlice, ...]

    @cached_property
    def by_tensor(self) -> dict[int, list[tuple[int, ShardSlice]]]:
        """Return the slices of each tensor, with their places among all slices."""
        found: dict[int, list[tuple[int, ShardSlice]]] = {}
        for place, one in enumerate(self.slices):
            found.setdefault(one.region.tensor, []).append((place, one))
        return found

    @cached_property
    def is_whole(self) -> bool:
        """Tell whether the map is the identity: this rank holds the model as it is."""
        return self.local == self.layout and self.slices == whole(self.layout).slices

    def needs(self, region: Region) -> bool:
        """Tell whether a region of the checkpoint holds something of the rank."""
        return any(overlaps(region, one.region) for _, one in self.by_tensor.get(region.tensor, ()))

    @property
    def regions(self) -> NDArray[np.int64]:
        """Return int64 (P, 5): the region of each slice."""
        return np.array([one.region for one in self.slices], dtype=np.int64).reshape(-1, len(Region._fields))

    def check(self) -> None:
        """Require slices that lie in their tensors, of equal dtype, and no element of the rank in two of them.

        Raises:
            LayoutMismatch: names the tensor.
        """
        held: dict[str, list[ShardSlice]] = {spec.name: [] for spec in self.local.tensors}
        for one in self.slices:
            held[one.target].append(one)
        for target in self.local.tensors:  # one at a time: marks for all elements would take half the part's memory
            self._check_target(target, held[target.name])

    def _check_target(self, target: TensorSpec, slices: Iterable[ShardSlice]) -> None:
        written = np.zeros(target.element_count, dtype=np.bool_)
        for one in slices:
            spec = self.layout.tensors[one.region.tensor]
            last = one.offset + (one.region.run_count - 1) * one.stride + (one.region.run - 1) * one.step
            if not 0 <= one.region.start < one.region.stop <= spec.element_count or last >= target.element_count:
                raise LayoutMismatch(f"tensor {spec} has a part outside itself or outside {target}", tensor=spec.name)
            if spec.dtype != target.dtype:
                raise LayoutMismatch(f"tensor {spec} is kept as {target}: bits are not converted", tensor=spec.name)
            place = one.view(written)
            if place.any():
                raise LayoutMismatch(f"tensor {spec.name!r} shares its place in {target} with another")
            place[...] = True


def whole(layout: Layout) -> ShardMap:
    """Make the map of the only rank of a model: one slice for each tensor."""
    regions = [Region.span(tensor, 0, spec.element_count) for tensor, spec in enumerate(layout.tensors)]
    slices = [ShardSlice(region, layout.tensors[region.tensor].name, 0, region.run) for region in regions]
    return ShardMap(layout, layout, tuple(slices))


def check_regions(layout: Layout, regions: Iterable[Region]) -> None:
    """Require that regions together are every tensor of the layout, and have nothing in common.

    Raises:
        LayoutMismatch: names the first tensor that they do not cover so.
    """
    found: dict[int, list[Region]] = {}
    for region in regions:
        found.setdefault(region.tensor, []).append(region)
    for tensor, spec in enumerate(layout.tensors):
        parts = sorted(map(_joined, found.get(tensor, [])))
        count = sum(region.element_count for region in parts)
        is_outside = any(region.start < 0 or region.stop > spec.element_count for region in parts)
        if count != spec.element_count or is_outside or not _are_apart(parts):
            raise LayoutMismatch(
                f"the parts of tensor {spec} that the ranks hold have {count:,} elements, of {spec.element_count:,}, or"
                " overlap: every element must be in one part",
                tensor=spec.name,
            )


def _are_apart(parts: Sequence[Region]) -> bool:
    """Tell whether regions of one tensor, ascending, have nothing in common."""
    if all(region.run_count == 1 for region in parts):
        return all(left.stop <= right.start for left, right in pairwise(parts))
    is_alike = len({(region.stride, region.run_count) for region in parts}) == 1
    if is_alike and parts[-1].start + parts[-1].run <= parts[0].start + parts[0].stride:  # side by side in each row
        return all(left.start + left.run <= right.start for left, right in pairwise(parts))
    return not any(overlaps(left, right) for left, right in combinations(parts, 2))


def overlaps(left: Region, right: Region) -> bool:
    """Tell whether two regions of one tensor have an element in common."""
    if left.stop <= right.start or right.stop <= left.start:
        return False
    if left.run_count == right.run_count == 1:
        return True
    left, right = sorted((_joined(left), _joined(right)), key=lambda region: region.run_count)
    starts = left.start + np.arange(left.run_count) * left.stride
    # Of the runs of `right` that begin before a run of `left` ends, only the last can reach into it.
    last = np.minimum((starts + left.run - 1 - right.start) // right.stride, right.run_count - 1)
    return bool(((last >= 0) & (right.start + last * right.stride + right.run > starts)).any())


def _joined(region: Region) -> Region:
    return Region.span(region.tensor, region.start, region.stop) if region.is_contiguous else region
