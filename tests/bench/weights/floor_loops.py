"""The machine's own floors, compiled: what any code that finds, applies or writes these changes has to do at least.

- The loops know nothing of blocks' bytes: positions and values are there already. One call does a whole model.
- Each is told how far ahead to ask for memory; floors.py tries distances and takes the fastest.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray as array_at  # type: ignore[attr-defined]  # its stub does not export it
from numba import types
from numba.extending import intrinsic

from rollfab.fabric.format.kernels.numba_intrinsics import (
    LANES,
    LINE,
    compiled,
    count_ones,
    difference_bits,
    lowest_one,
    prefetch,
)

U0, U1, U2 = (np.uint64(n) for n in (0, 1, 2))
STEP = np.uint64(LANES)
POSITION, BITS = np.int64, np.uint16
SLICE_COUNT = 1 << 10  # elements compared before their differences are gathered: both are still near


def _as_pointer(context: Any, address: Any) -> Any:
    """Turn a number into a pointer."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.uint64), generate


_pointer: Any = intrinsic(_as_pointer)
_array_at: Any = array_at  # its stub wants pointers of ctypes


@compiled
def compare_and_gather(old: Any, new: Any, starts: Any, room: Any, far: Any) -> Any:
    """Find the differences of two states, block by block, and gather them; return how many there are.

    starts: of the blocks, and the end of the last. room: indices, olds and values of one block, written over by the
    next, with room for a slice more. far: elements asked for before they are compared.
    """
    indices, olds, values = room
    total = U0
    for block in range(len(starts) - 1):
        count, start, end = U0, np.uint64(starts[block]), np.uint64(starts[block + 1])
        base = start
        while start < end:
            stop = min(start + np.uint64(SLICE_COUNT), end)
            first = count
            while start + STEP <= stop:
                for k in range(start + far, start + far + STEP, np.uint64(LINE // 2)):  # two bytes an element
                    prefetch(old, k)
                    prefetch(new, k)
                bits = difference_bits(old, new, start)
                place = count
                count += count_ones(bits)
                while True:  # two by two without a test whether there are any, as ours
                    indices[place] = start - base + lowest_one(bits)
                    bits &= bits - U1
                    indices[place + U1] = start - base + lowest_one(bits)
                    bits &= bits - U1
                    place += U2
                    if place >= count:
                        break
                start += STEP
            while start < stop:
                indices[count] = start - base
                count += np.uint64(old[start] != new[start])
                start += U1
            for k in range(first, count):
                at = base + np.uint64(indices[k])
                olds[k] = old[at]
                values[k] = new[at]
        total += count
    return total


@compiled
def read_and_write(bits: Any, positions: Any, steps: Any, ahead: Any) -> None:
    """Add a step at each position: the least that makes new bits of old ones in place."""
    last = np.uint64(len(positions) - 1)
    for k in range(np.uint64(len(positions))):
        prefetch(bits, positions[min(k + np.uint64(ahead), last)])
        bits[positions[k]] += steps[k]


@compiled
def write_pieces(pieces: Any, ahead: Any) -> None:
    """Write each piece: rows of the addresses of target, positions (0: all elements) and values, and their count."""
    for row in range(len(pieces)):
        count = np.int64(pieces[row, 3])
        values = _array_at(_pointer(pieces[row, 2]), count, BITS)
        if pieces[row, 1] == U0:
            target = _array_at(_pointer(pieces[row, 0]), count, BITS)
            for k in range(count):
                target[k] = values[k]
            continue
        positions = _array_at(_pointer(pieces[row, 1]), count, POSITION)
        scattered = _array_at(_pointer(pieces[row, 0]), positions[count - 1] + 1, BITS)
        for k in range(count):
            prefetch(scattered, positions[min(k + ahead, count - 1)])
            scattered[np.uint64(positions[k])] = values[k]
