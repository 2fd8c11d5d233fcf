"""The loops that make blocks, compiled: see protocol.py for what each does.

- Counts and places are uint64: numba tests a signed index for counting from the end.
- Differences are found LANES elements at a time as a word of bits, and its ones are taken two by two without a test
  whether there are any: a branch that is right nine times of ten costs more than writing twice (measured).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .numba_intrinsics import (
    GROUP,
    LANES,
    LINE,
    WORD,
    compiled,
    count_ones,
    difference_bits,
    lowest_one,
    prefetch,
    split_group,
    split_lanes,
)
from .numpy_loops import gap_shift
from .protocol import GAP_ESCAPE, STEP_ESCAPE, Bits, Bytes

U0, U1, U2, U64 = (np.uint64(n) for n in (0, 1, 2, 64))
ONE, ESCAPE, WIDE = np.uint32(1), np.uint32(GAP_ESCAPE), np.uint64(STEP_ESCAPE)
STEP = np.uint64(LANES)
FAR = np.uint64(1 << 12)  # bytes asked for before they are compared: processors' own asking ends with a page
SLICE = np.uint64(1 << 10)  # elements looked through before their differences are gathered: both are still near

_gap_shift: Any = compiled(gap_shift)  # kept on disk: when you change it, touch this file too


@compiled
def _find(old: Bits, new: Bits, start: Any, stop: Any, indices: NDArray[np.uint32], count: Any) -> Any:
    """Write the differences in [start, stop) behind the first `count`, with room for two more; return the new count."""
    far, line = FAR // np.uint64(old.itemsize), np.uint64(LINE) // np.uint64(old.itemsize)  # divisions are dear
    while start + STEP <= stop:
        for k in range(start + far, start + far + STEP, line):
            prefetch(old, k)
            prefetch(new, k)
        bits = difference_bits(old, new, start)
        place = count
        count += count_ones(bits)
        while True:
            indices[place] = start + lowest_one(bits)
            bits &= bits - U1
            indices[place + U1] = start + lowest_one(bits)
            bits &= bits - U1
            place += U2
            if place >= count:
                break
        start += STEP
    while start < stop:
        indices[count] = start
        count += np.uint64(old[start] != new[start])
        start += U1
    return count


@compiled
def changes(old: Bits, new: Bits, indices: NDArray[np.uint32], olds: Bits, values: Bits, count_max: Any) -> Any:
    """Count the differences; write them while they are at most count_max. The arrays have room for a slice more."""
    count, start, length = U0, U0, np.uint64(len(old))
    while start < length and count <= count_max:
        stop = min(start + SLICE, length)
        last = _find(old, new, start, stop, indices, count)
        for k in range(count, last):
            place = np.uint64(indices[k])
            olds[k] = old[place]
            values[k] = new[place]
        start, count = stop, last
    for k in range(start, length):
        count += np.uint64(old[k] != new[k])
    return count


@compiled
def _split_gaps(indices: NDArray[np.uint32], shift: Any, symbols: Bytes, lows: Bytes, rest: NDArray[np.uint32]) -> Any:
    """Split gaps; return how many escaped. lows: zeros, with room for WORD bytes more."""
    escaped, count, k = np.int64(0), len(indices), 0
    while k < count:
        if 0 < k <= count - GROUP:
            escapes = split_group(indices, k, np.int64(shift), symbols, lows, (k * shift) >> 3)
            while escapes:
                at = k + np.int64(lowest_one(escapes))
                rest[escaped] = (np.uint32(indices[at] - indices[at - 1] - ONE) >> np.uint32(shift)) - ESCAPE
                escapes &= escapes - U1
                escaped += 1
        else:
            for j in range(k, min(k + GROUP, count)):
                gap = np.uint32(indices[j] - indices[j - 1] - ONE) if j else indices[j]
                if shift:
                    low = gap & np.uint32((1 << shift) - 1)
                    lows[(j * shift) >> 3] |= np.uint8(low << np.uint32((j * shift) & 7))
                high = np.uint32(gap >> np.uint32(shift))
                symbols[j] = np.uint8(min(high, ESCAPE))
                if high >= ESCAPE:
                    rest[escaped] = high - ESCAPE
                    escaped += 1
        k += GROUP
    return escaped


@compiled
def _number(old: Any, value: Any, bias: Any, itemsize: Any) -> Any:
    """Return a step as an unsigned number, small for a small step: zigzag."""
    width = np.uint64(8 * itemsize)
    step = np.uint64(value) - np.uint64(old)
    zigzag = (step << U1) ^ (U0 - ((step >> (width - U1)) & U1))
    return (zigzag - np.uint64(bias)) & (~U0 >> (U64 - width))


@compiled
def split_steps(olds: Bits, values: Bits, bias: int, packed: Bytes, rest: Bits) -> Any:
    """Split steps; return how many escaped. packed: zeros."""
    escaped, count, k = np.int64(0), len(olds), 0
    while k + LANES <= count:
        escapes = split_lanes(olds, values, k, np.int64(bias), packed, k >> 1)
        while escapes:
            at = k + np.int64(lowest_one(escapes))
            rest[escaped] = _number(olds[at], values[at], bias, olds.itemsize) - WIDE
            escapes &= escapes - U1
            escaped += 1
        k += LANES
    for j in range(k, count):
        number = _number(olds[j], values[j], bias, olds.itemsize)
        packed[j >> 1] |= np.uint8(min(number, WIDE) << np.uint64((j & 1) << 2))
        if number >= WIDE:
            rest[escaped] = number - WIDE
            escaped += 1
    return escaped


@compiled
def split(indices: NDArray[np.uint32], olds: Bits, values: Bits, gaps: Any, steps: Any) -> Any:
    """Split a block's changes; return the gaps' shift, and how many gaps and steps escaped.

    gaps: symbols, lows, rest. steps: packed, rest. All have room for as many changes; lows for WORD bytes more.
    """
    symbols, lows, gap_rest = gaps
    packed, step_rest = steps
    shift = np.int64(_gap_shift(indices))
    lows[: ((len(indices) * shift + 7) >> 3) + WORD] = 0
    packed[: (len(indices) + 1) >> 1] = 0
    escaped = _split_gaps(indices, shift, symbols, lows, gap_rest)
    return shift, escaped, split_steps(olds, values, 1, packed, step_rest)
