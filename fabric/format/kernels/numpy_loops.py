"""The inner loops of codec and digest in numpy: see protocol.py for what each does."""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

from .protocol import (
    AVALANCHE,
    GAMMA,
    GAP_BITS,
    GAP_ESCAPE,
    GAP_SAMPLE_COUNT,
    GAP_SHIFTS,
    MASK,
    MIX,
    ROW,
    ROW_BITS,
    STEP_ESCAPE,
    TABLE_KEY,
    Bits,
    Bytes,
    Changes,
    Indices,
    Scratch,
    Sparse,
)

Words = NDArray[np.uint64]


def changes(old: Bits, new: Bits, count_max: int, scratch: Scratch) -> tuple[int, Changes | None]:
    mask = np.not_equal(old, new)
    count = int(np.count_nonzero(mask))
    if count > count_max:
        return count, None
    positions = np.flatnonzero(mask)
    return count, Changes(positions.astype(np.uint32), old[positions], new[positions])


def split(changes: Changes, scratch: Scratch) -> Sparse:
    shift = gap_shift(changes.indices)
    return Sparse(shift, *_split_gaps(changes.indices, shift), *split_steps(changes.olds, changes.values, 1))


def gap_shift(indices: NDArray[np.uint32]) -> int:
    """Return how many low bits of a gap are noise: all but GAP_BITS of a middle one (a mean fails: changes cluster)."""
    apart = len(indices) // GAP_SAMPLE_COUNT + 1
    gaps = indices[1::apart] - indices[:-1:apart] - np.uint32(1)
    for shift in GAP_SHIFTS:
        if 2 * np.count_nonzero(gaps >> np.uint32(shift + GAP_BITS)) < max(len(gaps), 1):
            return shift
    return GAP_SHIFTS[-1]


def _split_gaps(indices: NDArray[np.uint32], shift: int) -> tuple[Bytes, Bytes, NDArray[np.uint32]]:
    gaps = np.diff(indices, prepend=np.uint32(0))
    gaps[1:] -= 1
    lows = (gaps[:, None] >> np.arange(shift, dtype=np.uint32)) & np.uint32(1)
    gaps >>= np.uint32(shift)
    symbols = np.minimum(gaps, GAP_ESCAPE).astype(np.uint8)
    rest = gaps[symbols == GAP_ESCAPE] - np.uint32(GAP_ESCAPE)
    return symbols, np.packbits(lows.astype(np.uint8).reshape(-1), bitorder="little"), rest


def join_gaps(sparse: Sparse, element_count: int) -> Indices | None:
    shift, indices = sparse.shift, sparse.symbols.astype(np.int64)
    places = np.flatnonzero(sparse.symbols == GAP_ESCAPE)
    if len(places) != len(sparse.gap_rest):
        return None
    indices[places] += sparse.gap_rest
    indices <<= shift
    if shift:
        bits = np.unpackbits(sparse.lows, count=len(indices) * shift, bitorder="little").reshape(-1, shift)
        indices += bits @ (1 << np.arange(shift, dtype=np.int64))
    indices[1:] += 1
    np.cumsum(indices, out=indices)
    return None if len(indices) and indices[-1] >= element_count else indices


def split_steps(olds: Bits, values: Bits, bias: int) -> tuple[Bytes, Bits]:
    steps = values - olds
    signed = steps.view(f"i{steps.itemsize}")
    numbers = ((signed << 1) ^ (signed >> (8 * steps.itemsize - 1))).view(steps.dtype)
    numbers -= numbers.dtype.type(bias)
    small = np.zeros(len(numbers) + len(numbers) % 2, dtype=np.uint8)
    np.minimum(numbers, STEP_ESCAPE, out=small[: len(numbers)], casting="unsafe")
    rest = numbers[numbers >= STEP_ESCAPE] - numbers.dtype.type(STEP_ESCAPE)
    return small[0::2] | (small[1::2] << np.uint8(4)), rest


def join_steps(packed: Bytes, rest: Bits, count: int, bias: int) -> Bits | None:
    numbers = np.empty(2 * len(packed), dtype=rest.dtype)
    numbers[0::2] = packed & np.uint8(STEP_ESCAPE)
    numbers[1::2] = packed >> np.uint8(4)
    numbers = numbers[:count]
    places = np.flatnonzero(numbers == STEP_ESCAPE)
    if len(places) != len(rest):
        return None
    numbers[places] += rest
    numbers += numbers.dtype.type(bias)
    steps: Bits = (numbers >> 1) ^ (0 - (numbers & 1)).astype(numbers.dtype)
    return steps


def take(current: Bits, sparse: Sparse, key: int, start: int, out: tuple[Indices, Bits]) -> int | None:
    positions, values = out
    indices = join_gaps(sparse, len(current))
    steps = join_steps(sparse.packed, sparse.step_rest, len(positions), 1)
    if indices is None or steps is None:
        return None
    olds = current[indices]
    np.add(indices, start, out=positions)
    np.add(olds, steps, out=values)
    return change_at(key, start, indices, olds, values)


def put(bits: Bits, sparse: Sparse, key: int, start: int, scratch: Scratch) -> int | None:
    indices = join_gaps(sparse, len(bits))
    steps = join_steps(sparse.packed, sparse.step_rest, len(sparse.symbols), 1)
    if indices is None or steps is None:
        return None
    olds = bits[indices]
    steps += olds
    bits[indices] = steps
    return change_at(key, start, indices, olds, steps)


def scatter(bits: Bits, indices: Indices, values: Bits) -> None:
    bits[indices] = values


def add_at(bits: Bits, indices: Indices, steps: Bits) -> None:
    bits[indices] += steps


def sum_at(key: int, positions: Indices, values: Bits) -> int:
    factors = factor_table()[positions & (ROW - 1)]
    factors *= odd_keys(key, (positions >> ROW_BITS).astype(np.uint64))
    factors *= mixed(values)
    return int(factors.sum(dtype=np.uint64))


def change_at(key: int, start: int, indices: Indices, olds: Bits, values: Bits) -> int:
    positions = indices + start
    return (sum_at(key, positions, values) - sum_at(key, positions, olds)) & MASK


def change_range(key: int, start: int, olds: Bits, values: Bits) -> int:
    return (sum_range(key, start, values) - sum_range(key, start, olds)) & MASK


def sum_range(key: int, start: int, values: Bits) -> int:
    if not len(values):
        return 0
    table = factor_table()
    rows = np.arange(start // ROW, (start + len(values) - 1) // ROW + 1)
    total = 0
    for row, row_key in zip(rows.tolist(), odd_keys(key, rows.astype(np.uint64)).tolist(), strict=True):
        offset = row * ROW - start
        products = mixed(values[max(offset, 0) : offset + ROW])
        first = max(-offset, 0)
        products *= table[first : first + len(products)]
        total += int(products.sum(dtype=np.uint64)) * row_key
    return total & MASK


@cache
def factor_table() -> Words:
    """Return T of the digest, uint64 (ROW,), read only."""
    table = odd_keys(TABLE_KEY, np.arange(ROW, dtype=np.uint64))
    table.flags.writeable = False
    return table


def odd_keys(key: int, numbers: Words) -> Words:
    """Compute s(key, n) | 1 for each n, uint64: splitmix64, the n-th word of the stream that `key` seeds."""
    words = (numbers + np.uint64(1)) * np.uint64(GAMMA)
    words += np.uint64(key)
    words ^= words >> np.uint64(30)
    words *= np.uint64(AVALANCHE[0])
    words ^= words >> np.uint64(27)
    words *= np.uint64(AVALANCHE[1])
    words ^= words >> np.uint64(31)
    words |= np.uint64(1)
    return words


def mixed(values: Bits) -> Words:
    """Compute f of the digest for each value, uint64."""
    words = values.astype(np.uint64)
    words += np.uint64(1)
    words *= np.uint64(MIX)
    words ^= words >> np.uint64(32)
    doubled = words << np.uint64(1)
    doubled += np.uint64(1)
    words *= doubled
    return words
