"""Comparing weights on a device: many blocks in one call, since there a call costs more than comparing one block.

- A group is neighbouring blocks of one tensor. The changes of a group come to the host together, and are handed out
  block by block.
- One group is compared at a time: what that takes on the device does not grow with the threads that encode.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping

import numpy as np

from ..format.codec import few_count
from ..format.kernels.places import load_torch
from ..format.kernels.protocol import Changes, Flat, Scratch
from ..format.regions import Region

# 7 B parameters in bf16 are 3,800 blocks, and 340 tensors: a group of this size is most often a whole tensor.
GROUP_BYTES = 256 << 20
KEPT_COUNT = 2  # groups: while one thread begins the next, another may not have asked for its block of the last


class DeviceChanges:
    """The changes of one version, for threads that ask in about the order of the blocks.

    Args:
        old, new: flat bits by tensor number; of a tensor that is asked for, both on one device.
        groups: the group of each block, as places in these; see `grouped`.
    """

    def __init__(self, old: Mapping[int, Flat], new: Mapping[int, Flat], groups: Mapping[Region, Region]) -> None:
        self._old, self._new = old, new
        self._groups = groups
        self._lock = threading.Lock()
        self._found: dict[Region, Changes | None] = {}
        self._scratch = Scratch()

    def of(self, place: Region) -> Changes | None:
        """Return the changes of a block; None if they are too many, so that both states must be looked at."""
        group = self._groups[place]
        with self._lock:
            if group not in self._found:
                while len(self._found) >= KEPT_COUNT:
                    del self._found[next(iter(self._found))]
                self._found[group] = self._compare(group)
            found = self._found[group]
        if found is None:
            return None
        first, last = np.searchsorted(found.indices, (place.start - group.start, place.stop - group.start))
        if last - first > few_count(place.element_count):
            return None
        own = Changes(*(array[first:last] for array in found))
        return own._replace(indices=own.indices - np.uint32(place.start - group.start))

    def _compare(self, group: Region) -> Changes | None:
        old, new = group.read(self._old[group.tensor]), group.read(self._new[group.tensor])
        return load_torch().changes(old, new, few_count(group.element_count), self._scratch)[1]


def grouped(
    places: Iterable[Region], element_bytes: Mapping[int, int], limit: int = GROUP_BYTES
) -> dict[Region, Region]:
    """Join neighbouring blocks of a tensor to groups of at most `limit` bytes; a block in several runs is a group.

    Args:
        places: of the blocks in flat tensors, in order.
        element_bytes: by tensor number.
    """
    groups: list[list[Region]] = []
    for place in places:
        first = groups[-1][0] if groups and _is_next(groups[-1][-1], place) else None
        if first is not None and (place.stop - first.start) * element_bytes[place.tensor] <= limit:
            groups[-1].append(place)
        else:
            groups.append([place])
    found: dict[Region, Region] = {}
    for each in groups:
        first, last = each[0], each[-1]
        whole = first if first is last else Region.span(first.tensor, first.start, last.stop)
        found.update(dict.fromkeys(each, whole))
    return found


def _is_next(last: Region, place: Region) -> bool:
    is_stretch = last.is_contiguous and place.is_contiguous
    return is_stretch and (last.tensor, last.stop) == (place.tensor, place.start)
