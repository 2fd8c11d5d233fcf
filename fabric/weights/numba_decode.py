"""The loops that take blocks apart, compiled: see kernels.py for what each does.

- What hostile bytes could break is checked before it is used.
- Gaps are joined GROUP at a time and steps LANES at a time; the few that escape are mended afterwards.
- Elements are asked for AHEAD of their turn. Much more than AHEAD at a time is of no use: processors drop what they
  cannot ask for (measured: a tile's at once is slower than none).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .kernels import GAP_ESCAPE, ROW, ROW_BITS, STEP_ESCAPE, Bits, Bytes, Indices
from .numba_digest import change_at, mixed, row_key
from .numba_intrinsics import GROUP, LANES, WORD, compiled, join_group, join_lanes, lowest_one, prefetch, word_at

U0, U1, U64 = (np.uint64(n) for n in (0, 1, 64))
LOW_BITS, HIGH_BITS = np.uint64(0x0101010101010101), np.uint64(0x8080808080808080)  # of every byte of a word
TILE = 1024  # steps worked on at a time: what a tile takes stays in the first-level cache
AHEAD = 128  # elements asked for before they are written: a change is far from the next one


@compiled
def _has_escape(symbols: Bytes, k: Any) -> Any:
    """Whether one of GROUP gaps is GAP_ESCAPE: a byte of the inverted word that is zero."""
    word = ~word_at(symbols, k)
    return ((word - LOW_BITS) & ~word & HIGH_BITS) != U0


@compiled
def _join_some(gaps: Any, shift: Any, state: Any, indices: Indices, first: Any, last: Any) -> Any:
    """Positions of the gaps [first, last). state: the last position and the number of escapes before, and after."""
    symbols, lows, rest = gaps
    position, escaped = state
    k = first
    while k < last:
        at = (k * shift) >> 3
        if k + GROUP <= last and (shift == 0 or at + WORD <= len(lows)) and not _has_escape(symbols, k):
            word = word_at(lows, at) if shift else U0
            position = join_group(symbols, k, word, shift, position, indices)
        else:
            for j in range(k, min(k + GROUP, last)):
                gap = np.int64(symbols[j])
                if gap == GAP_ESCAPE:
                    gap += np.int64(rest[escaped]) if escaped < len(rest) else 0
                    escaped += 1
                gap <<= shift
                if shift:
                    gap |= (np.int64(lows[(j * shift) >> 3]) >> ((j * shift) & 7)) & ((1 << shift) - 1)
                position += gap + 1
                indices[j] = position
        k += GROUP
    return position, escaped


@compiled
def join_gaps(symbols: Bytes, lows: Bytes, rest: NDArray[np.uint32], shift: int, indices: Indices) -> Any:
    """The last position, which is the greatest: a block's gaps cannot overflow. -1 without any, or if no fit."""
    state = np.int64(-1), np.int64(0)
    position, escaped = _join_some((symbols, lows, rest), np.int64(shift), state, indices, 0, len(symbols))
    return position if escaped == len(rest) else -1


@compiled
def _step(number: Any, bias: Any) -> Any:
    number += np.uint64(bias)
    return (number >> U1) ^ (U0 - (number & U1))


@compiled
def _wide_step(rest: Bits, escaped: Any, bias: Any, itemsize: Any) -> Any:
    """The step of an escape; anything where there are more escapes than rest, which is found in the end."""
    number = np.uint64(rest[escaped]) if escaped < len(rest) else U0
    mask = ~U0 >> (U64 - np.uint64(8 * itemsize))
    return _step((number + np.uint64(STEP_ESCAPE) + np.uint64(bias)) & mask, 0)


@compiled
def _join_steps(stream: Any, bias: Any, steps: Bits, first: Any, last: Any, escaped: Any) -> Any:
    """Steps [first, last); `first` is even. How many have escaped, with `escaped` before."""
    packed, rest = stream
    k = first
    while k + LANES <= last:
        escapes = join_lanes(packed, k >> 1, bias, steps, k)
        while escapes:
            steps[k + np.int64(lowest_one(escapes))] = _wide_step(rest, escaped, bias, steps.itemsize)
            escapes &= escapes - U1
            escaped += 1
        k += LANES
    for j in range(k, last):
        number = np.uint64((packed[j >> 1] >> ((j & 1) << 2)) & STEP_ESCAPE)
        if number == np.uint64(STEP_ESCAPE):
            steps[j] = _wide_step(rest, escaped, bias, steps.itemsize)
            escaped += 1
        else:
            steps[j] = _step(number, bias)
    return escaped


@compiled
def join_steps(packed: Bytes, rest: Bits, bias: int, steps: Bits) -> Any:
    return _join_steps((packed, rest), np.int64(bias), steps, 0, len(steps), np.int64(0)) == len(rest)


@compiled
def take(current: Bits, gaps: Any, shift: int, steps: Any, digest: Any, positions: Indices, values: Bits) -> Any:
    """gaps: symbols, lows, rest. steps: packed, rest. digest: key, table, start of the block.

    Whether all of it fits, and by how much the digest moves.
    """
    key, table, start = digest
    count = len(positions)
    state = np.int64(start) - 1, np.int64(0)
    state = _join_some(gaps, np.int64(shift), state, positions, 0, count)
    if state[0] >= start + len(current):
        return False, U0
    olds = np.empty(TILE, current.dtype)
    escaped, total = np.int64(0), U0
    for first in range(0, count, TILE):
        last = min(first + TILE, count)
        escaped = _join_steps(steps, np.int64(1), values, first, last, escaped)
        for k in range(first, last):
            prefetch(current, positions[min(k + AHEAD, count - 1)] - start)
            old = current[positions[k] - start]
            olds[k - first] = old
            values[k] += old
        total += change_at(key, table, 0, positions[first:last], olds, values[first:last])
    return state[1] == len(gaps[2]) and escaped == len(steps[1]), total


@compiled
def put(bits: Bits, gaps: Any, shift: int, packed: Any, digest: Any, positions: Indices, steps: Bits) -> Any:
    """As `take`, with the new values written to `bits`, unless anything does not fit.

    The digest is moved one by one, as memory is waited for. positions, steps: room for them.
    """
    key, table, start = digest
    count = len(positions)
    state = np.int64(-1), np.int64(0)
    state = _join_some(gaps, np.int64(shift), state, positions, 0, count)
    escaped = _join_steps(packed, np.int64(1), steps, 0, count, np.int64(0))
    if state[0] >= len(bits) or state[1] != len(gaps[2]) or escaped != len(packed[1]):
        return False, U0
    total, row, factor = U0, np.int64(-1), U0
    for k in range(count):
        prefetch(bits, positions[min(k + AHEAD, count - 1)])
        place, position = np.uint64(positions[k]), start + positions[k]
        old = bits[place]
        steps[k] += old  # modulo 2^width, which a sum outside of an array is not
        bits[place] = steps[k]
        if position >> ROW_BITS != row:
            row = position >> ROW_BITS
            factor = row_key(key, row)
        total += table[position & (ROW - 1)] * factor * (mixed(steps[k]) - mixed(old))
    return True, total


@compiled
def scatter(bits: Bits, indices: Indices, values: Bits) -> None:
    last = len(indices) - 1
    for k in range(len(indices)):
        prefetch(bits, indices[min(k + AHEAD, last)])
        bits[np.uint64(indices[k])] = values[k]


@compiled
def add_at(bits: Bits, indices: Indices, steps: Bits) -> None:
    for k in range(len(indices)):
        bits[np.uint64(indices[k])] += steps[k]
