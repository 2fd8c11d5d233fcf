"""Which elements of tensors on a device changed, and those brought to the host: the same positions and bits as there.

- Only stored bits as integers are compared, gathered and copied; nothing is computed with them, so it does not matter
  that torch's are signed.
- Regions are taken in groups of at most GROUP_BYTES; what a group needs on the device besides the weights is at most
  TEMPORARY_FACTOR times that, and at most BROUGHT_FACTOR times that is copied to the host, in one transfer.
- A region with few changes is brought as these, any other whole, old and new; which is which is the codec's to say.
- Where the device has no room for that, regions are brought whole, which needs none.
- Tested on the CPU; unverified on a GPU.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ...fabric.format.codec import BLOCK_BYTES, Bits, few
from ...fabric.format.kernels.protocol import Changes
from ...fabric.format.layout import BITS_DTYPE
from ...fabric.format.regions import Region

log = logging.getLogger(__name__)

GROUP_BYTES = 8 * BLOCK_BYTES  # of stored bits: enough that a device is not kept waiting for each small tensor
BROUGHT_FACTOR = 2  # old and new; positions and bits of few changes are less
TEMPORARY_FACTOR = 8  # 1-byte elements: mask 1, positions 0.3 * 16, as uint32 1.2, bits 0.6; or what is brought, twice
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Flat = Any  # flat stored bits: unsigned numpy on the host, or a torch tensor of INTEGERS on a device


class Pair(NamedTuple):
    """One region's bits: those kept (None: there is nothing to compare with), and the new ones. Both on one side."""

    region: Region
    old: Flat
    new: Flat

    @property
    def device(self) -> torch.device | None:
        """Where they are; None: on the host, as numpy arrays."""
        return None if isinstance(self.new, np.ndarray) else self.new.device


class Whole(NamedTuple):
    """A region's bits on the host. old: None where there is nothing to compare with. is_copy: nobody else's."""

    old: Bits | None
    new: Bits
    is_copy: bool


Piece = Whole | Changes


def bring(pairs: Iterable[Pair]) -> Iterator[tuple[Region, Piece]]:
    """What of each region must be encoded, on the host and in order; regions found unchanged are left out."""
    is_short = False
    for group in grouped(pairs):
        try:
            yield from _brought(group) if group[0].device is not None else _as_they_are(group)
        except torch.OutOfMemoryError as error:
            if not is_short:
                log.warning("weights.device_is_full", extra={"error": str(error)})
            is_short = True
            yield from _one_by_one(group)


def grouped(pairs: Iterable[Pair]) -> Iterator[list[Pair]]:
    """Neighbours on one device, of at most GROUP_BYTES together unless one alone has more."""
    for _, neighbours in groupby(pairs, key=lambda pair: pair.device):
        group: list[Pair] = []
        size = 0
        for pair in neighbours:
            if group and size + pair.new.nbytes > GROUP_BYTES:
                yield group
                group, size = [], 0
            group.append(pair)
            size += pair.new.nbytes
        yield group


def integers(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's stored bits, flat; no copy where it is contiguous. On the CPU if a copy has no room on its device."""
    try:
        tensor = tensor.contiguous()
    except torch.OutOfMemoryError:
        tensor = tensor.cpu().contiguous()
    return tensor.reshape(-1).view(INTEGERS[tensor.element_size()])


def on_host(flat: Flat) -> Bits:
    """Its bits as numpy's; no copy where it is on the CPU."""
    if isinstance(flat, np.ndarray):
        return flat
    array: Bits = flat.cpu().numpy()
    return array.view(BITS_DTYPE[flat.element_size()])


def as_tensor(array: Bits) -> torch.Tensor:
    """Bits of the host as torch's integers, in the same memory; a copy where that may not be written."""
    signed = array.view(np.uint8 if array.itemsize == 1 else f"<i{array.itemsize}")
    return torch.from_numpy(signed if signed.flags.writeable else signed.copy())


def _as_they_are(group: Sequence[Pair]) -> list[tuple[Region, Piece]]:
    return [(pair.region, Whole(pair.old, pair.new, is_copy=False)) for pair in group]


def _one_by_one(group: Sequence[Pair]) -> Iterator[tuple[Region, Piece]]:
    for pair in group:
        old = None if pair.old is None else np.array(on_host(pair.old))
        yield pair.region, Whole(old, np.array(on_host(pair.new)), is_copy=True)


def _brought(group: Sequence[Pair]) -> list[tuple[Region, Piece]]:
    """A group that is on a device: compared there, what is needed of it packed, and copied in one go."""
    chosen = [(pair, _segments(pair, indices)) for pair, indices in _compared(group)]
    arrays = iter(transfer([segment for _, segments in chosen for segment in segments]))
    pieces: list[tuple[Region, Piece]] = []
    for pair, segments in chosen:
        parts = [next(arrays) for _ in segments]
        piece = Changes(*parts) if len(parts) == 3 else Whole(parts[0] if parts[1:] else None, parts[-1], is_copy=True)
        pieces.append((pair.region, piece))
    return pieces


def _compared(group: Sequence[Pair]) -> Iterator[tuple[Pair, torch.Tensor | None]]:
    """Regions to be encoded; with the indices that changed, int64 (C,) ascending, or None for those to bring whole."""
    if group[0].old is None:
        yield from ((pair, None) for pair in group)
        return
    sizes = [len(pair.new) for pair in group]
    mask = torch.empty(sum(sizes), dtype=torch.bool, device=group[0].device)
    masks = mask.split_with_sizes(sizes)
    for pair, part in zip(group, masks, strict=True):
        torch.ne(pair.old, pair.new, out=part)
    counts = torch.stack([part.count_nonzero() for part in masks]).tolist()
    few_counts = [count if few(count, size) else 0 for count, size in zip(counts, sizes, strict=True)]
    for part, few_count in zip(masks, few_counts, strict=True):
        if not few_count:
            part.zero_()  # its positions are not wanted: so they take no room
    places = mask.nonzero().reshape(-1).split_with_sizes(few_counts)
    first = 0
    for pair, count, found in zip(group, counts, places, strict=True):
        if count:
            yield pair, found - first if len(found) else None
        first += len(pair.new)


def _segments(pair: Pair, indices: torch.Tensor | None) -> list[torch.Tensor]:
    if indices is None:
        return [pair.new] if pair.old is None else [pair.old, pair.new]
    assert pair.old is not None
    return [indices.int(), pair.old[indices], pair.new[indices]]


def transfer(segments: Sequence[torch.Tensor]) -> list[Bits]:
    """Copies of flat tensors of INTEGERS of one device, on the host as unsigned; all in one transfer."""
    if not segments:
        return []
    # The widest first, so that each is aligned.
    order = sorted(range(len(segments)), key=lambda place: -segments[place].element_size())
    packed = _copied(torch.cat([segments[place].view(torch.uint8) for place in order]))
    arrays: dict[int, Bits] = {}
    offset = 0
    for place in order:
        size = segments[place].nbytes
        arrays[place] = packed[offset : offset + size].view(BITS_DTYPE[segments[place].element_size()])
        offset += size
    return [arrays[place] for place in range(len(segments))]


def _copied(packed: torch.Tensor) -> NDArray[np.uint8]:
    """Bytes that torch.cat has just made, on the host."""
    if packed.device.type != "cuda":
        array: NDArray[np.uint8] = packed.cpu().numpy()
        return array
    # Torch keeps pinned memory that it is given back, so the next group has it again; hence the copy out of it.
    pinned = torch.empty(len(packed), dtype=torch.uint8, pin_memory=True)
    pinned.copy_(packed, non_blocking=True)
    torch.cuda.current_stream(packed.device).synchronize()  # lets the threads that encode go on
    return np.array(pinned.numpy())
