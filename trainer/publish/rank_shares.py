"""What one rank of a sharded trainer holds of each tensor, and its share of a version made from that.

- Sharded tensors are torch's DTensors; any other tensor is the same on every rank. Of equal parts one rank's is
  published, by turns, so that replicas share the work.
- The rank's copy of what receivers hold is of its own part only, and moves like a snapshot. What it prepares is made
  from one reading of each region, and holds nothing of the trainer's memory.
- Parts on a GPU are copied to the host as a whole, and unverified there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from ...fabric.contract.errors import InputError, LayoutMismatch
from ...fabric.format.codec import Bits, Encoded, Encoder
from ...fabric.format.layout import Layout, TensorSpec
from ...fabric.format.regions import Region, cut_region
from ...fabric.versions.snapshot import Check, Part, encode_part, no_check
from .tensors import Named, pairs_of


@dataclass(frozen=True, slots=True)
class LocalShards:
    """A rank's parts. boxes: where they lie in tensors of the layout; bits: by name, flat, in the boxes' order.

    Only what this rank publishes.
    """

    layout: Layout
    boxes: Sequence[Region]
    bits: dict[str, Bits]


def collect_shards(named: Named, rank: int, size: int) -> LocalShards:
    """The parts that rank `rank` of `size` publishes.

    Raises:
        InputError: no tensors, or one that cannot be published by shards. LayoutMismatch: a name twice, odd dtypes.
    """
    pairs = pairs_of(named)
    specs = [_spec(name, tensor) for name, tensor in pairs]
    layout = Layout(tuple(specs))
    tensors = dict(pairs)
    boxes: list[Region] = []
    bits: dict[str, Bits] = {}
    owners: dict[tuple[str, int], str] = {}
    for number, spec in enumerate(layout.tensors):
        tensor = tensors[spec.name]
        box, is_mine = _box(number, spec, tensor, rank, size)
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if box.element_count != local.numel():
            raise InputError(
                f"tensor {spec} has {local.numel():,} elements on rank {rank}, its placements {_placed(tensor)} say"
                f" {box.element_count:,}: it cannot be published by shards",
                name=spec.name,
            )
        if not box.element_count:
            continue
        other = owners.setdefault((str(local.device), local.data_ptr()), spec.name)
        if other != spec.name:
            raise LayoutMismatch(
                f"tensors {other!r} and {spec.name!r} are tied (one storage): publish tied parameters once, as"
                " model.named_parameters() does and state_dict() does not",
                names=[other, spec.name],
            )
        if is_mine:
            flat = local.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            boxes.append(box)
            bits[spec.name] = flat.numpy().view(spec.bits_dtype)
    return LocalShards(layout, boxes, bits)


def _spec(name: str, tensor: Any) -> TensorSpec:
    is_flat = type(tensor).__name__ == "FlatParameter" or getattr(tensor, "_is_flat_param", False)
    if not isinstance(tensor, torch.Tensor) or tensor.is_meta or tensor.layout != torch.strided or is_flat:
        raise InputError(
            f"tensor {name!r} ({type(tensor).__name__}) cannot be published by shards: give plain torch tensors, or"
            " DTensors as fully_shard (FSDP2) makes them",
            name=name,
        )
    return TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def _placed(tensor: Any) -> str:
    return str(tuple(tensor.placements)) if isinstance(tensor, DTensor) else "(plain)"


def _box(number: int, spec: TensorSpec, tensor: Any, rank: int, size: int) -> tuple[Region, bool]:
    """What of a tensor this rank holds, and whether it is the one to publish it."""
    if not isinstance(tensor, DTensor):
        return Region.span(number, 0, spec.element_count), number % size == rank
    mesh = tensor.device_mesh
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
                f"tensor {spec.name!r} is placed as {_placed(tensor)}: {placement} cannot be published by shards, only"
                " Shard and Replicate can. Gather it first with .full_tensor()",
                name=spec.name,
            )
    return _region(number, spec, ranges), is_mine


def _region(number: int, spec: TensorSpec, ranges: Sequence[tuple[int, int]]) -> Region:
    """The part [first, first + count) in every dimension, as equal runs."""
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


class LocalSnapshot:
    """A rank's own part of what receivers hold, and its share of versions made from it.

    Args:
        thread_count: how many blocks are encoded at a time.
    """

    def __init__(self, shards: LocalShards, *, thread_count: int = 1) -> None:
        self.version = -1
        self._layout = shards.layout
        self._names = [spec.name for spec in shards.layout.tensors]
        self._bits = {name: np.array(array) for name, array in shards.bits.items()}
        self._thread_count = thread_count
        self._places: dict[Region, slice] = {}
        for box in shards.boxes:
            first = 0
            for region in cut_region(box, shards.layout.tensors[box.tensor]):
                self._places[region] = slice(first, first + region.element_count)
                first += region.element_count
        self._prepared: tuple[int, Part] | None = None

    @property
    def part(self) -> Part:
        """This rank's share of the version prepared last."""
        assert self._prepared is not None
        return self._prepared[1]

    def encode(
        self, version: int, shards: LocalShards | None, *, has_sums: bool = True, check: Check = no_check
    ) -> Part:
        """This rank's share of a version: what differs between `shards` and this copy; None: all of this copy."""

        def delta(encoder: Encoder, region: Region) -> Encoded | None:
            assert shards is not None
            return encoder.delta(self._at(self._bits, region), np.array(self._at(shards.bits, region)))

        def dense(encoder: Encoder, region: Region) -> Encoded | None:
            return encoder.dense(self._at(self._bits, region))

        encode = dense if shards is None else delta
        regions = list(self._places)
        part = encode_part(self._layout, regions, encode, self._thread_count, has_sums=has_sums, check=check)
        self._prepared = (version, part)
        return part

    def equals(self, shards: LocalShards, check: Check = no_check) -> bool:
        """Whether `shards` has the same stored bits."""

        def is_same(region: Region) -> bool:
            check()
            return np.array_equal(self._at(self._bits, region), self._at(shards.bits, region))

        return self._bits.keys() == shards.bits.keys() and all(is_same(region) for region in self._places)

    def follow(self, version: int) -> None:
        """Be at `version`, which is either that of this copy, or the one prepared last, whose head has moved."""
        if version == self.version or self._prepared is None or version != self._prepared[0]:
            return
        for change in self._prepared[1].changes:
            block = self._at(self._bits, change.region)
            block[... if change.indices is None else change.indices] = change.values
        self.version = version

    def _at(self, bits: dict[str, Bits], region: Region) -> Bits:
        return bits[self._names[region.tensor]][self._places[region]]
