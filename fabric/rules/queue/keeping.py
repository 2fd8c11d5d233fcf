"""Which consumed groups are kept for people to look at: the newest, and older ones spread evenly over the time before.

Where more is kept than may be, groups of the older half go, first those whose neighbours in time are nearest for their
size. So the night before is there in the morning, at a bounded size, and nothing has to be known of the run's speed.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

KEPT_COUNT_MAX = 2_000  # groups of a shard, however small they are
KEPT_MS_MAX = 7 * 86_400_000  # what is older is of no use to anybody
REST = 7 / 8  # of the bounds, is left when groups are dropped, so that it is done seldom


@dataclass(frozen=True, slots=True)
class KeptGroup:
    """A group that is kept. ended_ms: when its trainer acknowledged it, by the broker's wall clock."""

    entry_id: str
    group_id: str
    ended_ms: int
    size_bytes: int


def to_drop(kept: Sequence[KeptGroup], bytes_max: int, now_ms: int) -> list[int]:
    """Choose what goes, as indices in order. The newest goes last.

    Args:
        kept: all groups, the oldest first.
        bytes_max: that may be kept in all.
        now_ms: the time of the newest.
    """
    first = next((index for index, each in enumerate(kept) if each.ended_ms > now_ms - KEPT_MS_MAX), len(kept))
    size, count = sum(each.size_bytes for each in kept[first:]), len(kept) - first
    dropped: set[int] = set()
    for index in _thinned(kept, first):
        if size <= bytes_max * REST and count <= KEPT_COUNT_MAX * REST:
            break
        dropped.add(index)
        size, count = size - kept[index].size_bytes, count - 1
    return [index for index in range(len(kept)) if index < first or index in dropped]


def _thinned(kept: Sequence[KeptGroup], first: int) -> list[int]:
    """Return all groups from `first` on in the order in which they would go."""
    middle = (first + len(kept)) // 2
    before, after = {n: n - 1 for n in range(first, middle)}, {n: n + 1 for n in range(first, middle)}

    def weight(index: int) -> float:
        gap_ms = kept[after[index]].ended_ms - kept[before[index]].ended_ms
        return (gap_ms + 1) / (kept[index].size_bytes + 1)

    heap = [(weight(index), index) for index in range(first + 1, middle)]
    heapq.heapify(heap)
    order: list[int] = []
    gone: set[int] = set()
    while heap:
        said, index = heapq.heappop(heap)
        if index in gone or said != weight(index):
            continue  # its neighbours have changed since
        gone.add(index)
        order.append(index)
        low, high = before[index], after[index]
        after[low] = high
        if low > first:
            heapq.heappush(heap, (weight(low), low))
        if high < middle:
            before[high] = low
            heapq.heappush(heap, (weight(high), high))
    return [*order, *(index for index in range(first, len(kept)) if index not in gone)]
