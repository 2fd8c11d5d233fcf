"""The loops that take blocks apart, compiled: see protocol.py for what each does.

- Every number that hostile bytes could make wrong is checked before it is used.
- Gaps are joined GROUP at a time and steps LANES at a time; the few that escape are mended afterwards.
- Elements are asked for AHEAD of their turn. Much more than AHEAD at a time is of no use: processors drop requests
  above their limit (measured: a thousand at once is slower than none).
- A block is worked through LANES changes at a time, each step of it on these before the next: joins and sums are made
  while memory is waited for (measured: nearly free, where one pass after another adds all of them up).
- Inner functions get arrays one by one: numba counts references to an array taken out of a tuple, and that costs more
  than joining a group.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .numba_digest import factor_at, mixed
from .numba_intrinsics import GROUP, LANES, WORD, compiled, join_group, join_lanes, lowest_one, prefetch, word_at
from .protocol import GAP_ESCAPE, STEP_ESCAPE, Bits, Bytes, Indices

U0, U1, U64 = (np.uint64(n) for n in (0, 1, 64))
LOW_BITS, HIGH_BITS = np.uint64(0x0101010101010101), np.uint64(0x8080808080808080)  # of every byte of a word
AHEAD = 192  # elements asked for before they are written: a change is far from the next one; whole LANES


@compiled
def _has_escape(symbols: Bytes, k: Any) -> Any:
    """Tell whether one of GROUP gaps is GAP_ESCAPE: a byte of the inverted word that is zero."""
    word = ~word_at(symbols, k)
    return ((word - LOW_BITS) & ~word & HIGH_BITS) != U0


@compiled
def _join_some(
    symbols: Bytes, lows: Bytes, rest: Any, shift: Any, state: Any, indices: Indices, first: Any, last: Any
) -> Any:
    """Write positions of the gaps [first, last). state: the last position and the count of escapes; updated."""
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
    """Write positions; return the last, which is the greatest: gaps cannot overflow. -1: none, or they do not fit."""
    state = np.int64(-1), np.int64(0)
    position, escaped = _join_some(symbols, lows, rest, np.int64(shift), state, indices, 0, len(symbols))
    return position if escaped == len(rest) else -1


@compiled
def _step(number: Any, bias: Any) -> Any:
    number += np.uint64(bias)
    return (number >> U1) ^ (U0 - (number & U1))


@compiled
def _wide_step(rest: Bits, escaped: Any, bias: Any, itemsize: Any) -> Any:
    """Return the step of an escape; any number if escapes outnumber the rest, which the caller finds in the end."""
    number = np.uint64(rest[escaped]) if escaped < len(rest) else U0
    mask = ~U0 >> (U64 - np.uint64(8 * itemsize))
    return _step((number + np.uint64(STEP_ESCAPE) + np.uint64(bias)) & mask, 0)


@compiled
def _join_steps(packed: Bytes, rest: Bits, bias: Any, steps: Bits, first: Any, last: Any, escaped: Any) -> Any:
    """Write steps [first, last); `first` is even. Return how many have escaped, counting `escaped` before."""
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
    return _join_steps(packed, rest, np.int64(bias), steps, 0, len(steps), np.int64(0)) == len(rest)


@compiled
def _add(current: Bits, into: Bits, start: Any, positions: Indices, values: Bits, olds: Bits, first: Any) -> Any:
    """Turn up to LANES steps from `first` on into values, and write them; olds: the bits before."""
    end = np.uint64(len(positions) - 1)
    for k in range(np.uint64(first), np.uint64(min(first + LANES, len(positions)))):
        prefetch(current, positions[min(k + np.uint64(AHEAD), end)] - start)
        place = np.uint64(positions[k] - start)
        old = current[place]
        olds[k - np.uint64(first)] = old
        values[k] += old  # modulo 2^width, unlike a sum outside an array
        if len(into):
            into[place] = values[k]


@compiled
def _moved(key: Any, positions: Indices, values: Bits, olds: Bits, first: Any) -> Any:
    """Compute by how much these changes move the digest."""
    total = U0
    for k in range(np.uint64(first), np.uint64(min(first + LANES, len(positions)))):
        total += factor_at(key, positions[k]) * (mixed(values[k]) - mixed(olds[k - np.uint64(first)]))
    return total


@compiled
def take(
    current: Bits, into: Bits, gaps: Any, shift: int, steps: Any, digest: Any, positions: Indices, values: Bits
) -> Any:
    """Join and add a block; return whether all of it fits, and by how much the digest moves.

    gaps: symbols, lows, rest. steps: packed, rest. digest: key, start of the block. into: where values are
    written too: `current` itself, or nothing. A block that does not fit may write elements, but none outside.
    """
    symbols, lows, gap_rest = gaps
    packed, step_rest = steps
    key, start = digest
    count = len(positions)
    olds = np.empty(LANES, current.dtype)
    state, escaped, total = (np.int64(start) - 1, np.int64(0)), np.int64(0), U0
    for first in range(-AHEAD, count, LANES):
        ahead = first + AHEAD
        last = min(ahead + LANES, count)
        state = _join_some(symbols, lows, gap_rest, np.int64(shift), state, positions, ahead, last)
        if first < 0:
            for k in range(ahead, last):
                prefetch(current, positions[k] - start)
            continue
        last = min(first + LANES, count)
        escaped = _join_steps(packed, step_rest, np.int64(1), values, first, last, escaped)
        if positions[last - 1] - start >= len(current):  # they ascend
            return False, U0
        _add(current, into, start, positions, values, olds, first)
        total += _moved(key, positions, values, olds, first)
    return state[1] == len(gap_rest) and escaped == len(step_rest), total


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
