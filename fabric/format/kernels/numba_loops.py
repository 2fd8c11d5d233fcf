"""The inner loops of codec and digest, compiled: see protocol.py for what each does.

- Public functions take the same arguments as numpy's make, and hand them to a compiled loop as read-only views: one
  compilation for each element width, whoever owns the memory.
- The loops are in numba_encode.py, numba_decode.py and numba_digest.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import numba_decode, numba_digest, numba_encode
from .numba_intrinsics import WORD
from .numpy_loops import factor_table
from .protocol import Bits, Bytes, Changes, Indices, Scratch, Sparse

POSITION, INDEX, BYTE = np.dtype(np.int64), np.dtype(np.uint32), np.dtype(np.uint8)


def changes(old: Bits, new: Bits, count_max: int, scratch: Scratch) -> tuple[int, Changes | None]:
    room = min(len(old), count_max + int(numba_encode.SLICE)) + 2
    indices = scratch.array("indices", room, INDEX)
    olds, values = scratch.array("olds", room, old.dtype), scratch.array("values", room, old.dtype)
    count = int(numba_encode.changes(_view(old), _view(new), indices, olds, values, np.uint64(count_max)))
    if count > count_max:
        return count, None
    return count, Changes(indices[:count].copy(), olds[:count].copy(), values[:count].copy())


def split(changes: Changes, scratch: Scratch) -> Sparse:
    indices, olds, values = changes  # always new arrays, so of one type to the compiler as they are
    count = len(indices)
    symbols, lows = scratch.array("symbols", count, BYTE), scratch.array("lows", count + WORD, BYTE)
    packed, gap_rest = scratch.array("packed", count, BYTE), scratch.array("gap rest", count, INDEX)
    step_rest = scratch.array("step rest", count, values.dtype)
    found = numba_encode.split(indices, olds, values, (symbols, lows, gap_rest), (packed, step_rest))
    shift, gap_count, step_count = found
    lows, packed = lows[: (count * shift + 7) // 8], packed[: (count + 1) // 2]
    return Sparse(shift, symbols[:count], lows, gap_rest[:gap_count], packed, step_rest[:step_count])


def join_gaps(sparse: Sparse, element_count: int) -> Indices | None:
    shift, symbols, lows, rest, _, _ = sparse
    indices = np.empty(len(symbols), dtype=np.int64)
    last = numba_decode.join_gaps(_view(symbols), _view(lows), _view(rest), shift, indices)
    return indices if last < element_count and (last >= 0 or not len(indices)) else None


def split_steps(olds: Bits, values: Bits, bias: int) -> tuple[Bytes, Bits]:
    packed, rest = np.zeros((len(olds) + 1) // 2, BYTE), np.empty_like(olds)
    escaped = numba_encode.split_steps(_view(olds), _view(values), bias, packed, rest)
    return packed, rest[:escaped]


def join_steps(packed: Bytes, rest: Bits, count: int, bias: int) -> Bits | None:
    steps = np.empty(count, dtype=rest.dtype)
    return steps if numba_decode.join_steps(_view(packed), _view(rest), bias, steps) else None


def take(current: Bits, sparse: Sparse, key: int, start: int, out: tuple[Indices, Bits]) -> int | None:
    return _take(current, np.empty(0, current.dtype), sparse, (key, start), out)


def put(bits: Bits, sparse: Sparse, key: int, start: int, scratch: Scratch) -> int | None:
    assert bits.flags.writeable
    count = len(sparse.symbols)
    positions, values = scratch.array("positions", count, POSITION), scratch.array("values", count, bits.dtype)
    return _take(bits, bits, sparse, (key, start), (positions[:count], values[:count]))


def _take(current: Bits, into: Bits, sparse: Sparse, at: tuple[int, int], out: tuple[Indices, Bits]) -> int | None:
    shift, symbols, lows, gap_rest, packed, step_rest = sparse
    gaps, steps = (_view(symbols), _view(lows), _view(gap_rest)), (_view(packed), _view(step_rest))
    digest = np.uint64(at[0]), at[1]
    fits, moved = numba_decode.take(_view(current), into, gaps, shift, steps, digest, *out)
    return int(moved) if fits else None


def scatter(bits: Bits, indices: Indices, values: Bits) -> None:
    assert bits.flags.writeable
    numba_decode.scatter(bits, _view(indices), _view(values))


def add_at(bits: Bits, indices: Indices, steps: Bits) -> None:
    assert bits.flags.writeable
    numba_decode.add_at(bits, _view(indices), _view(steps))


def sum_at(key: int, positions: Indices, values: Bits) -> int:
    return int(numba_digest.sum_at(np.uint64(key), _view(positions), _view(values)))


def change_at(key: int, start: int, indices: Indices, olds: Bits, values: Bits) -> int:
    parts = (_view(indices), _view(olds), _view(values))
    return int(numba_digest.change_at(np.uint64(key), start, *parts))


def sum_range(key: int, start: int, values: Bits) -> int:
    return int(numba_digest.sum_range(np.uint64(key), factor_table(), start, _view(values)))


def change_range(key: int, start: int, olds: Bits, values: Bits) -> int:
    return int(numba_digest.change_range(np.uint64(key), factor_table(), start, _view(olds), _view(values)))


def _view(array: NDArray[Any]) -> NDArray[Any]:
    """Make a read-only, contiguous view, so that every caller's arrays are of one type to the compiler."""
    flags = array.flags
    is_contiguous = flags.c_contiguous
    if is_contiguous and not flags.writeable:
        return array
    view = array.view() if is_contiguous else np.ascontiguousarray(array)
    view.setflags(write=False)
    return view
