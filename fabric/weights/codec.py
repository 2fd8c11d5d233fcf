"""One block: the elements of one region of a tensor as bytes, exact, self-contained, small.

A block has at most BLOCK_BYTES of stored bits (regions.py says which elements they are) and is encoded in one of

    SPARSE   positions of changed elements as gaps, and their steps: new - old modulo 2^width, zigzag
    STEPS    the step of every element, 0 where it did not change
    VALUES   the new bits of every element, as byte planes (needs no base; what keyframes are made of)
    RANKED   parts of elements of about one old magnitude (ranked.py), each as SPARSE or STEPS; only in folds

whichever is fewest bytes; a block without any change has no bytes at all.

- Elements are unsigned integers and compared as such, never floats: NaN payloads, -0, infinities, denormals are exact.
- About nine of ten changed bf16 weights move by one unit in the last place, so the step holds 2 bits where the new
  value holds 12 (measured); that is why steps travel.
- A gap's low bits are noise and travel as they are; what is above them is a byte of few values. The block's header says
  how many low bits: so many that the middle gap has at most GAP_BITS above them.
- A step is four bits, two to a byte: an entropy coder spends at least one bit on a symbol, and most steps are worth
  less than two.
- What does not fit (symbol 255, step 15) stands in a stream of its own: how many bytes each rest has, then byte planes.
- Every stream is stored compressed or raw, whichever is fewer bytes. Streams: gaps, their low bits, their rest, steps,
  their rest (SPARSE); steps, their rest (STEPS); one per byte of the element, lowest first (VALUES).
- Who is to read or write a RANKED block must have the old values; of the others only the effect of steps needs them.
- The same block gives the same bytes whichever kernels made it.

Which blocks make a version is snapshot.py's and manifest.py's.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import zstandard
from numpy.typing import NDArray

from ..errors import WireError
from .kernels import Bits as Bits
from .kernels import Bytes, Changes, Gaps, Indices, Kernels, Scratch, Sparse, load
from .ranked import encode_ranked, is_ranked, put_ranked
from .streams import GAP_SHIFTS, gap_shift, join_planes, rest_bytes, rest_numbers, split_planes, squeezed

T = TypeVar("T")

BLOCK_BYTES = 4 << 20  # of stored bits: a dense block is then one chunk of the size brokers move best
SPARSE, STEPS, VALUES = 1, 2, 3  # 4: ranked.py
SPARSE_FRACTION_MAX = 0.4  # above it gaps save half a percent at best (measured)
STEPS_FRACTION_MIN = 0.3  # below it steps of all elements have not beaten gaps (measured)
STREAM_BYTES_MAX = 16 << 20  # of one raw stream: 4 bytes for each of a block's bytes
HEADER = struct.Struct("<BBBBI")  # mode, element bytes, gap shift, stream count, changed count
STREAM = struct.Struct("<II")  # raw length, stored length; equal: stored raw
GAP_DTYPE = np.dtype(np.uint32)


@dataclass(frozen=True, slots=True)
class Encoded:
    """A block as bytes, with what it says.

    indices: uint32 (C,), changed positions inside the block, ascending, or None for all. values: unsigned, new bits at
    those positions; olds: the bits before, None where there is no base (both views of the input where indices is None).
    changed_count: elements whose bits differ.
    """

    data: bytes
    indices: NDArray[np.uint32] | None
    olds: Bits | None
    values: Bits
    changed_count: int


@dataclass(frozen=True, slots=True)
class Decoded:
    """What a block's bytes say. `numbers` are steps to add modulo 2^width, or new values when is_absolute.

    indices: int64 (C,), ascending, or None for all elements.
    """

    indices: Indices | None
    numbers: Bits
    is_absolute: bool


@dataclass(frozen=True, slots=True)
class Taken:
    """What a block makes of the elements that it is put on.

    positions: int64 (C,), flat in the tensor, ascending, or None for all elements of the block. values: the bits there
    afterwards. change: by how much the tensor's sum moves, modulo 2^64. is_absolute: no base was needed.
    """

    positions: Indices | None
    values: Bits
    change: int
    is_absolute: bool


class _Block(NamedTuple):
    """An encoded block, taken apart. step_count: steps in it. streams: as stored before compression."""

    mode: int
    shift: int
    step_count: int
    streams: list[Bytes]


class Encoder:
    """Encodes blocks; holds compressors and memory: one per thread. kernels: by default the fastest that are there."""

    def __init__(self, kernels: Kernels | None = None) -> None:
        self._kernels = kernels or load()
        self._scratch = Scratch()
        self._general = zstandard.ZstdCompressor(level=1, write_checksum=False, write_content_size=False)
        # Gaps and steps have no matches worth finding: a tiny table leaves them to the entropy coder, which is faster.
        tuned = zstandard.ZstdCompressionParameters(
            strategy=zstandard.STRATEGY_FAST, min_match=7, hash_log=6, window_log=17, write_content_size=False
        )
        self._entropy = zstandard.ZstdCompressor(compression_params=tuned)

    def delta(self, old: Bits, new: Bits) -> Encoded | None:
        """The smallest encoding of `new` given `old` (same shape and dtype, flat); None when nothing changed."""
        return self._delta(old, new, may_be_absolute=True)

    def sparse(self, changes: Changes) -> Encoded:
        """What `delta` gives for two states that differ by `changes`, which are some, and `few`."""
        return Encoded(self._pack_sparse(changes), *changes, len(changes.indices))

    def dense(self, new: Bits) -> Encoded:
        """`new` by itself, without a base."""
        return Encoded(self._pack_values(new, len(new)), None, None, new, len(new))

    def fold(
        self, decoded: Sequence[Decoded], element_count: int, dtype: np.dtype[Any], news: Bits | None = None
    ) -> Encoded | None:
        """The block that has the effect of these, one after another; None where they cancel out.

        No weights are needed: steps add modulo 2^width, and a block of values replaces what was before it. In the
        result `olds` is None, and `values` are steps unless it is a block of values.

        Args:
            decoded: oldest first.
            element_count, dtype: of the block.
            news: the bits after the last of them, where they are known: then it may be RANKED, which is smaller.
        """
        total = np.zeros(element_count, dtype=dtype)
        is_absolute = False
        for block in decoded:
            if block.is_absolute:
                assert block.indices is None, "values without a base are of whole blocks"
                total[:] = block.numbers
                is_absolute = True
            elif block.indices is None:
                total += block.numbers
            else:
                self._kernels.add_at(total, block.indices, block.numbers)
        if is_absolute:
            return self.dense(total)
        folded = self._delta(np.zeros_like(total), total, may_be_absolute=False)
        if folded is None:
            return None
        data = folded.data
        if news is not None:
            data = min(data, encode_ranked(news - total, news, self._part), key=len)
        return Encoded(data, folded.indices, None, folded.values, folded.changed_count)

    def _part(self, olds: Bits, news: Bits) -> bytes:
        encoded = self._delta(olds, news, may_be_absolute=False)
        return b"" if encoded is None else encoded.data

    def _delta(self, old: Bits, new: Bits, *, may_be_absolute: bool) -> Encoded | None:
        count, changes = self._kernels.changes(old, new, int(SPARSE_FRACTION_MAX * len(new)) + 1, self._scratch)
        if count == 0:
            return None
        choices: list[Encoded] = []
        if changes is not None:
            choices.append(self.sparse(changes))
        if changes is None or not few(count, len(new)):
            streams = self._step_streams(old, new, bias=0)
            choices.append(Encoded(self._pack(STEPS, new.itemsize, count, streams), None, old, new, count))
            if may_be_absolute and len(choices[-1].data) > 0.5 * new.nbytes:
                choices.append(Encoded(self._pack_values(new, count), None, old, new, count))
        return min(choices, key=lambda encoded: len(encoded.data))

    def _pack_sparse(self, changes: Changes) -> bytes:
        shift = gap_shift(changes.indices)
        gaps = self._kernels.split_gaps(changes.indices, shift)
        streams = [gaps.symbols.tobytes(), gaps.lows.tobytes(), rest_bytes(gaps.rest)]
        streams += self._step_streams(changes.olds, changes.values, bias=1)  # a changed element has no step 0
        return self._pack(SPARSE, changes.values.itemsize, len(changes.indices), streams, shift)

    def _pack_values(self, new: Bits, count: int) -> bytes:
        return self._pack(VALUES, new.itemsize, count, split_planes(new))

    def _step_streams(self, old: Bits, new: Bits, *, bias: int) -> list[bytes]:
        packed, rest = self._kernels.split_steps(old, new, bias)
        return [packed.tobytes(), rest_bytes(rest)]

    def _pack(self, mode: int, width: int, count: int, streams: list[bytes], shift: int = 0) -> bytes:
        compressor = self._general if mode == VALUES else self._entropy
        stored = [squeezed(compressor, stream) for stream in streams]
        table = [STREAM.pack(len(raw), len(kept)) for raw, kept in zip(streams, stored, strict=True)]
        return b"".join((HEADER.pack(mode, width, shift, len(streams), count), *table, *stored))


class Decoder:
    """Decodes blocks; holds a decompressor, so one per thread. kernels: by default the fastest that are there."""

    def __init__(self, kernels: Kernels | None = None) -> None:
        self._kernels = kernels or load()
        self._zstd = zstandard.ZstdDecompressor(max_window_size=STREAM_BYTES_MAX)

    def decode(self, data: bytes | memoryview, *, element_count: int, dtype: np.dtype[Any]) -> Decoded:
        """What `data` says about a block of `element_count` elements of unsigned `dtype`.

        Raises:
            WireError: not such a block, or a RANKED one. Digests are checked first, so this means a fault at the
                publisher.
        """
        if is_ranked(data):
            raise WireError("a ranked weight block is read only on the weights before it: take another way")
        block = self._open(data, element_count, dtype)
        if block.mode == VALUES:
            return Decoded(None, join_planes(block.streams, element_count, dtype), is_absolute=True)
        is_sparse = block.mode == SPARSE
        packed, rest = _packed_steps(block, dtype)
        indices = None
        if is_sparse:
            indices = _fitting(self._kernels.join_gaps(_gaps(block), block.shift, element_count))
        steps = self._kernels.join_steps(packed, rest, block.step_count, int(is_sparse))
        return Decoded(indices, _fitting(steps), is_absolute=False)

    def resolve(
        self, data: bytes | memoryview, current: Bits | None, element_count: int, dtype: np.dtype[Any]
    ) -> tuple[Indices | None, Bits | None, Bits]:
        """What `data` makes of a block that holds `current`, which is not written.

        Args:
            data: the encoded block.
            current: unsigned (element_count,), the stored bits that steps add to; None where there are none.
            element_count, dtype: of the block.

        Returns:
            indices: int64 (C,), ascending, in the block, or None for all. olds: the bits there before, None for a block
            of values. values: the bits there after.

        Raises:
            WireError: not such a block, or one of steps where there is nothing to add them to.
        """
        taken = self.take(data, current, element_count, dtype)
        if taken.positions is None or current is None:
            return None, None if taken.is_absolute else current, taken.values
        return taken.positions, current[taken.positions], taken.values

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
        """The same in one go with what staging needs: where in the tensor, and by how much its sum moves.

        Args:
            data, current, element_count, dtype: as of `resolve`.
            key: of the tensor, for its sum (digest.tensor_key); None: the change is not asked for.
            start: flat position in the tensor of the block's first element.
            out: where positions and values are put if the block lists positions: int64 and `dtype`, with room for its
                changed count; by default new arrays. What is returned are their first C elements.

        Raises:
            WireError: as `resolve`, or more positions than `out` has room for.
        """
        if is_ranked(data):
            return self._take_ranked(memoryview(data), current, key, start, out)
        block = self._open(data, element_count, dtype)
        if block.mode == VALUES:
            values = join_planes(block.streams, element_count, dtype)
            return Taken(None, values, self._change(key, start, current, values), is_absolute=True)
        if current is None:
            raise WireError("a block of steps needs a base, and none is held")
        assert len(current) == element_count and current.dtype == dtype
        packed, rest = _packed_steps(block, dtype)
        if block.mode == STEPS:
            values = _fitting(self._kernels.join_steps(packed, rest, element_count, 0))
            values += current
            return Taken(None, values, self._change(key, start, current, values), is_absolute=False)
        sparse = Sparse(_gaps(block), block.shift, packed, rest)
        positions, values = _room(out, block.step_count, dtype)
        change = self._kernels.take(current, sparse, key or 0, start, (positions, values))
        return Taken(positions, values, _fitting(change), is_absolute=False)

    def _take_ranked(
        self, data: memoryview, current: Bits | None, key: int | None, start: int, out: tuple[Indices, Bits] | None
    ) -> Taken:
        if current is None:
            raise WireError("a ranked weight block needs a base, and none is held")
        values = put_ranked(data, current, self._put)
        moved = self._change(key, start, current, values)
        changed = np.flatnonzero(values != current)
        if not few(len(changed), len(current)):
            return Taken(None, values, moved, is_absolute=False)
        positions, room = _room(out, len(changed), current.dtype)
        np.add(changed, start, out=positions)
        np.take(values, changed, out=room)
        return Taken(positions, room, moved, is_absolute=False)

    def _put(self, data: memoryview, bits: Bits) -> None:
        taken = self.take(data, bits, len(bits), bits.dtype)
        bits[... if taken.positions is None else taken.positions] = taken.values

    def _change(self, key: int | None, start: int, olds: Bits | None, values: Bits) -> int:
        if key is None:
            return 0
        if olds is None:
            return self._kernels.sum_range(key, start, values)
        return self._kernels.change_range(key, start, olds, values)

    def _open(self, data: bytes | memoryview, element_count: int, dtype: np.dtype[Any]) -> _Block:
        try:
            return self._opened(memoryview(data), element_count, dtype)
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
        offset = HEADER.size + count * STREAM.size
        for index in range(count):
            raw_length, stored_length = STREAM.unpack_from(view, HEADER.size + index * STREAM.size)
            body = view[offset : offset + stored_length]
            offset += stored_length
            if len(body) != stored_length or raw_length > raw_limit:
                raise WireError("weight block is cut off, or promises more than it can hold")
            raw: bytes | memoryview = body
            if stored_length != raw_length:
                raw = self._unpacked(body, raw_length)
            if len(raw) != raw_length:
                raise WireError("weight block: a stream has another length than promised")
            streams.append(np.frombuffer(raw, dtype=np.uint8))
        if offset != len(view):
            raise WireError(f"weight block: {len(view) - offset} bytes too many")
        return streams

    def _unpacked(self, body: memoryview, raw_length: int) -> bytes:
        if zstandard.frame_content_size(body) > raw_length:  # the library would allocate what this header says
            raise WireError("weight block: a stream promises more than its length")
        return self._zstd.decompress(body, max_output_size=raw_length, allow_extra_data=False)


def few(changed_count: int, element_count: int) -> bool:
    """Whether a block with so many changes is SPARSE whatever they are, so that nothing but they is needed for it."""
    return changed_count < STEPS_FRACTION_MIN * element_count


def _gaps(block: _Block) -> Gaps:
    symbols, lows, rest = block.streams[:3]
    if len(symbols) != block.step_count or len(lows) != (block.step_count * block.shift + 7) // 8:
        raise WireError(f"weight block: {len(symbols)} gaps for {block.step_count} changes")
    return Gaps(symbols, lows, rest_numbers(rest, block.step_count, GAP_DTYPE))


def _room(out: tuple[Indices, Bits] | None, count: int, dtype: np.dtype[Any]) -> tuple[Indices, Bits]:
    if out is None:
        return np.empty(count, dtype=np.int64), np.empty(count, dtype=dtype)
    positions, values = out
    if count > len(positions) or count > len(values):
        raise WireError(f"weight block: {count} changes, where {len(positions)} were promised")
    return positions[:count], values[:count]


def _packed_steps(block: _Block, dtype: np.dtype[Any]) -> tuple[Bytes, Bits]:
    packed, rest = block.streams[-2:]
    if len(packed) != (block.step_count + 1) // 2:
        raise WireError(f"weight block: {len(packed)} bytes for {block.step_count} steps")
    return packed, rest_numbers(rest, block.step_count, dtype)


def _fitting(result: T | None) -> T:
    """What a kernel joined, unless it found that it cannot be."""
    if result is None:
        raise WireError("weight block: a position lies outside of it, or what escaped does not fit its rest")
    return result
