"""Reads blocks: decodes their bytes, works out the elements that they change, or writes these at once.

The format is codec.py's. A size is checked before memory of that size is made, and a position before anything is
written there. Digests are checked before all this, so a block that does not fit means a fault at the publisher.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import zstandard

from ..contract.errors import WireError
from .codec import HEADER, SPARSE, STEPS, STREAM, VALUES, Decoded
from .kernels import load
from .kernels.protocol import GAP_SHIFTS, Bits, Bytes, Indices, Kernels, Scratch, Sparse
from .streams import Stream, join_planes, rest_numbers

T = TypeVar("T")

STREAM_BYTES_MAX = 16 << 20  # of one raw stream: 4 bytes for each of a block's bytes
BYTE, GAP_DTYPE = np.dtype(np.uint8), np.dtype(np.uint32)


@dataclass(frozen=True, slots=True)
class Taken:
    """The result of a block, put on the elements that it changes.

    positions: int64 (C,), flat in the tensor, ascending, or None for all elements of the block. values: the bits there
    afterwards. change: by how much the tensor's sum moves, modulo 2^64.
    """

    positions: Indices | None
    values: Bits
    change: int


class _Block(NamedTuple):
    """An encoded block, taken apart. step_count: steps in it. streams: as stored before compression."""

    mode: int
    shift: int
    step_count: int
    streams: list[Bytes]


class Decoder:
    """Decodes blocks; holds a decompressor, so one per thread. kernels: by default the fastest that are there."""

    def __init__(self, kernels: Kernels | None = None) -> None:
        self._kernels = kernels or load()
        self._zstd = zstandard.ZstdDecompressor(max_window_size=STREAM_BYTES_MAX)
        self._scratch = Scratch()

    def decode(self, data: bytes | memoryview, *, element_count: int, dtype: np.dtype[Any]) -> Decoded:
        """Decode `data`, a block of `element_count` elements of unsigned `dtype`.

        Raises:
            WireError: not such a block. Digests are checked first, so this means a fault at the publisher.
        """
        block = self._open(data, element_count, dtype)
        if block.mode == VALUES:
            return Decoded(None, join_planes(block.streams, element_count, dtype), is_absolute=True)
        if block.mode == STEPS:
            return Decoded(None, self._steps(block, dtype), is_absolute=False)
        sparse = _sparse(block, dtype)
        indices = _fitting(self._kernels.join_gaps(sparse, element_count))
        steps = _fitting(self._kernels.join_steps(sparse.packed, sparse.step_rest, block.step_count, 1))
        return Decoded(indices, steps, is_absolute=False)

    def take(
        self,
        data: bytes | memoryview,
        current: Bits | None,
        element_count: int,
        dtype: np.dtype[Any],
        *,
        key: int | None = None,
        start: int = 0,
        out: tuple[Indices, Bits] | None = None,
    ) -> Taken:
        """Work out how `data` changes a block that holds `current`: where in the tensor, and by how much its sum moves.

        Args:
            data: the encoded block.
            current: unsigned (element_count,), the stored bits that steps add to, which are not written; None where
                there are none.
            element_count, dtype: of the block.
            key: of the tensor, for its sum (digest.tensor_key); None: leave the change out.
            start: flat position in the tensor of the block's first element.
            out: where positions and values are put if the block lists positions: int64 and `dtype`, with room for its
                changed count; by default new arrays. The result is their first C elements.

        Raises:
            WireError: not such a block, one of steps without anything to add them to, or of more positions than there
                is room for.
        """
        block = self._open(data, element_count, dtype)
        if block.mode == VALUES:
            values = join_planes(block.streams, element_count, dtype)
            return Taken(None, values, self._change(key, start, current, values))
        if current is None:
            raise WireError("a block of steps needs a base, and none is held")
        assert len(current) == element_count and current.dtype == dtype
        if block.mode == STEPS:
            values = self._steps(block, dtype)
            values += current
            return Taken(None, values, self._change(key, start, current, values))
        sparse = _sparse(block, dtype)
        positions, values = _room(out, block.step_count, dtype)
        change = self._kernels.take(current, sparse, key or 0, start, (positions, values))
        return Taken(positions, values, _fitting(change))

    def put(self, data: bytes | memoryview, bits: Bits, *, key: int | None = None, start: int = 0) -> int:
        """Write the new values of `data` into their place: for weights that nobody reads meanwhile.

        One pass over memory, where `take` reads the changed elements and a commit writes them later.

        Args:
            data: the encoded block.
            bits: unsigned (E,), the stored bits that steps add to; written.
            key, start: as in `take`.

        Returns:
            By how much the tensor's sum moves, modulo 2^64.

        Raises:
            WireError: not such a block; `bits` may hold anything then, and nobody must read them.
        """
        block = self._open(data, len(bits), bits.dtype)
        if block.mode != SPARSE:
            taken = self.take(data, bits, len(bits), bits.dtype, key=key, start=start)
            bits[... if taken.positions is None else taken.positions - start] = taken.values
            return taken.change
        return _fitting(self._kernels.put(bits, _sparse(block, bits.dtype), key or 0, start, self._scratch))

    def _steps(self, block: _Block, dtype: np.dtype[Any]) -> Bits:
        packed, rest = block.streams
        return _fitting(self._kernels.join_steps(*_packed(packed, rest, block.step_count, dtype), block.step_count, 0))

    def _change(self, key: int | None, start: int, olds: Bits | None, values: Bits) -> int:
        if key is None:
            return 0
        if olds is None:
            return self._kernels.sum_range(key, start, values)
        return self._kernels.change_range(key, start, olds, values)

    def _open(self, data: bytes | memoryview, element_count: int, dtype: np.dtype[Any]) -> _Block:
        try:
            return self._opened(memoryview(data).toreadonly(), element_count, dtype)
        except WireError:
            raise
        except (struct.error, zstandard.ZstdError, ValueError) as error:
            raise WireError(f"weight block of {len(data):,} bytes cannot be decoded: {error}") from error

    def _opened(self, view: memoryview, element_count: int, dtype: np.dtype[Any]) -> _Block:
        mode, width, shift, stream_count, changed_count = HEADER.unpack_from(view)
        expected = {SPARSE: 5, STEPS: 2, VALUES: dtype.itemsize}.get(mode)
        shifts = GAP_SHIFTS if mode == SPARSE else (0,)
        if width != dtype.itemsize or stream_count != expected or changed_count > element_count or shift not in shifts:
            raise WireError(f"weight block: mode {mode}, {width}-byte elements, {changed_count} changes do not fit")
        streams = self._streams(view, stream_count, element_count * max(width, 4) + 1)
        return _Block(mode, shift, changed_count if mode == SPARSE else element_count, streams)

    def _streams(self, view: memoryview, count: int, raw_limit: int) -> list[Bytes]:
        streams = []
        size, end = len(view), HEADER.size + count * STREAM.size
        for raw_length, stored_length in STREAM.iter_unpack(view[HEADER.size : end]):
            first, end = end, end + stored_length
            if end > size or raw_length > raw_limit:
                raise WireError("weight block is cut off, or promises more than it can hold")
            stored = view[first:end]
            raw: Stream = stored if stored_length == raw_length else self._unpacked(stored, raw_length)
            if len(raw) != raw_length:
                raise WireError("weight block: a stream has another length than promised")
            streams.append(np.frombuffer(raw, BYTE))
        if end != size:
            raise WireError(f"weight block: {size:,} bytes where its streams end at {end:,}")
        return streams

    def _unpacked(self, body: memoryview, raw_length: int) -> bytes:
        if zstandard.frame_content_size(body) > raw_length:  # the library would allocate what this header says
            raise WireError("weight block: a stream promises more than its length")
        return self._zstd.decompress(body, max_output_size=raw_length, allow_extra_data=False)


def _sparse(block: _Block, dtype: np.dtype[Any]) -> Sparse:
    _, shift, count, (symbols, lows, gap_rest, packed, step_rest) = block
    if len(symbols) != count or len(lows) != (count * shift + 7) // 8:
        raise WireError(f"weight block: {len(symbols)} gaps for {count} changes")
    rest = rest_numbers(gap_rest, count, GAP_DTYPE)
    return Sparse(shift, symbols, lows, rest, *_packed(packed, step_rest, count, dtype))


def _room(out: tuple[Indices, Bits] | None, count: int, dtype: np.dtype[Any]) -> tuple[Indices, Bits]:
    if out is None:
        return np.empty(count, dtype=np.int64), np.empty(count, dtype=dtype)
    positions, values = out
    if count > len(positions) or count > len(values):
        raise WireError(f"weight block: {count} changes, where {len(positions)} were promised")
    return positions[:count], values[:count]


def _packed(packed: Bytes, rest: Bytes, count: int, dtype: np.dtype[Any]) -> tuple[Bytes, Bits]:
    if len(packed) != (count + 1) // 2:
        raise WireError(f"weight block: {len(packed)} bytes for {count} steps")
    return packed, rest_numbers(rest, count, dtype)


def _fitting(result: T | None) -> T:
    """Return a kernel's result, or raise if it is None: the block does not fit."""
    if result is None:
        raise WireError("weight block: a position lies outside of it, or what escaped does not fit its rest")
    return result
