"""The digest's loops, compiled: see digest.py for the formula, protocol.py for what each does.

- All sums wrap around at 64 bits, and no element waits for another: loops run on several elements at a time.
- Where positions are scattered, factors are made anew: reading eight of them from all over the table takes longer than
  their three multiplications (measured), and pushes out of the cache what is worked on.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .numba_intrinsics import compiled
from .protocol import AVALANCHE, GAMMA, MIX, ROW, ROW_BITS, TABLE_KEY, Bits, Indices

U0, U1, U27, U30, U31, U32 = (np.uint64(n) for n in (0, 1, 27, 30, 31, 32))
MIX_WORD, GAMMA_WORD = np.uint64(MIX), np.uint64(GAMMA)
TABLE_WORD = np.uint64(TABLE_KEY)
AVALANCHE_1, AVALANCHE_2 = np.uint64(AVALANCHE[0]), np.uint64(AVALANCHE[1])


@compiled
def row_key(key: Any, row: Any) -> Any:
    word = key + (np.uint64(row) + U1) * GAMMA_WORD
    word = (word ^ (word >> U30)) * AVALANCHE_1
    word = (word ^ (word >> U27)) * AVALANCHE_2
    return (word ^ (word >> U31)) | U1


@compiled
def factor_at(key: Any, position: Any) -> Any:
    """Return K(position)."""
    return row_key(TABLE_WORD, position & (ROW - 1)) * row_key(key, position >> ROW_BITS)


@compiled
def mixed(value: Any) -> Any:
    word = (np.uint64(value) + U1) * MIX_WORD
    word ^= word >> U32
    return word * ((word << U1) + U1)


@compiled
def sum_at(key: Any, positions: Indices, values: Bits) -> Any:
    total = U0
    for k in range(len(positions)):
        total += factor_at(key, positions[k]) * mixed(values[k])
    return total


@compiled
def change_at(key: Any, start: int, indices: Indices, olds: Bits, values: Bits) -> Any:
    total = U0
    for k in range(len(indices)):
        total += factor_at(key, start + indices[k]) * (mixed(values[k]) - mixed(olds[k]))
    return total


@compiled
def sum_range(key: Any, table: Any, start: int, values: Bits) -> Any:
    total, place = U0, np.intp(0)
    while place < len(values):
        first = (start + place) & (ROW - 1)
        length = min(ROW - first, len(values) - place)
        part, factors, row_total = values[place : place + length], table[first : first + length], U0
        for k in range(length):
            row_total += factors[k] * mixed(part[k])
        total += row_total * row_key(key, (start + place) >> ROW_BITS)
        place += length
    return total


@compiled
def change_range(key: Any, table: Any, start: int, olds: Bits, values: Bits) -> Any:
    total, place = U0, np.intp(0)
    while place < len(values):
        first = (start + place) & (ROW - 1)
        length = min(ROW - first, len(values) - place)
        before, after = olds[place : place + length], values[place : place + length]
        factors, row_total = table[first : first + length], U0
        for k in range(length):
            row_total += factors[k] * (mixed(after[k]) - mixed(before[k]))
        total += row_total * row_key(key, (start + place) >> ROW_BITS)
        place += length
    return total
