"""Ranked blocks: elements in the order of their old magnitude, in parts that are coded for themselves.

- A small weight is stored finely, so over many versions it almost surely changes, by many units in the last place; a
  great one seldom, and by one. Parts of about one magnitude so have positions and steps that are much more alike than
  those of a whole block: over 40 versions they take 0.76 of its bytes (measured).
- The rank is the eight bits below the sign: of bfloat16 and float32 the exponent, of float16 and float64 nearly that.
  Of integers it says little, and then the plain block is smaller and chosen.
- Both sides order by the old values, so a block read on others gives wrong values, which the tensor's sum shows.
- Ordering is stable and takes either side some 10 ns per element: for folds, not for what is published at every step.
- Layout: RANKED, part count; per part its elements and its bytes; the parts, each a block of steps, or nothing where
  nothing changed. Parts are of whole ranks, and each has its share of the changes, so that there are few headers.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import WireError
from .kernels import Bits, Bytes

RANKED = 4  # a block's first byte; the other modes are the codec's
STEP_MODES = (1, 2)  # what a part may be: SPARSE, STEPS
HEADER = struct.Struct("<BB")  # RANKED, part count
PART = struct.Struct("<II")  # elements, bytes
PART_CHANGES_MIN = 1024  # more in a part lose context, fewer do not pay for its tables of some 60 bytes (measured)
PART_COUNT_MAX = 64
RANK_COUNT = 256


def is_ranked(data: bytes | memoryview) -> bool:
    """Whether these are the bytes of a ranked block."""
    return len(data) > 0 and data[0] == RANKED


def encode_ranked(olds: Bits, news: Bits, encode: Callable[[Bits, Bits], bytes]) -> bytes:
    """A block that leads from `olds` to `news`.

    Args:
        olds, news: unsigned (N,), N > 0; not written.
        encode: makes a part, a block of steps, of its olds and news; nothing where they are equal.
    """
    ranks = _ranks(olds)
    order = np.argsort(ranks, kind="stable")
    befores, afters = olds[order], news[order]
    ends = np.searchsorted(ranks[order], np.arange(RANK_COUNT), side="right")
    parts = [slice(first, last) for first, last in pairwise(_cuts(ends.tolist(), befores != afters))]
    blocks = [encode(befores[part], afters[part]) for part in parts]
    table = [PART.pack(part.stop - part.start, len(block)) for part, block in zip(parts, blocks, strict=True)]
    return b"".join((HEADER.pack(RANKED, len(parts)), *table, *blocks))


def put_ranked(data: memoryview, current: Bits, put: Callable[[memoryview, Bits], Any]) -> Bits:
    """What a ranked block makes of `current`, in a new array.

    Args:
        put: puts a part on the elements that it is for, in place.

    Raises:
        WireError: not such a block.
    """
    parts = [*_opened(data, len(current))]
    order = np.argsort(_ranks(current), kind="stable")
    ranked = current[order]
    for place, block in parts:
        put(block, ranked[place])
    values = np.empty_like(current)
    values[order] = ranked
    return values


def _ranks(olds: Bits) -> Bytes:
    """Uint8 (N,): what magnitude each element has, from its stored bits."""
    return ((olds << 1) >> (8 * (olds.itemsize - 1))).astype(np.uint8)


def _cuts(ends: Sequence[int], is_changed: NDArray[np.bool_]) -> list[int]:
    """Where parts begin and end: after whole ranks, with a share of the changes in each."""
    share = max(PART_CHANGES_MIN, int(np.count_nonzero(is_changed)) // PART_COUNT_MAX + 1)
    cuts = [0]
    for end in ends:
        if int(np.count_nonzero(is_changed[cuts[-1] : end])) >= share:
            cuts.append(end)
    return [*cuts[:-1], ends[-1]] if len(cuts) > 1 else [0, ends[-1]]  # what is left is with the last one


def _opened(data: memoryview, element_count: int) -> Iterator[tuple[slice, memoryview]]:
    """The parts that have changes: which elements, in order of rank, and their block."""
    first, offset = 0, HEADER.size
    part_count = data[1] if len(data) > 1 else 0
    offset += part_count * PART.size
    if not 1 <= part_count <= PART_COUNT_MAX or len(data) < offset:
        raise WireError(f"weight block of {len(data):,} bytes with {part_count} ranked parts: it is cut off")
    for count, length in PART.iter_unpack(data[HEADER.size : offset]):
        block = data[offset : offset + length]
        if len(block) != length or (length and (not count or block[0] not in STEP_MODES)):
            raise WireError(f"weight block: a ranked part of {count} elements and {length} bytes cannot be")
        if length:
            yield slice(first, first + count), block
        first, offset = first + count, offset + length
    if first != element_count or offset != len(data):
        raise WireError(f"weight block: ranked parts of {first} elements and {offset} bytes do not fit")
