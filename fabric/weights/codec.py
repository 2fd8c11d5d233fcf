"""One block of one tensor, as bytes: exact, self-contained, small.

A tensor is cut on a fixed grid into blocks of at most BLOCK_BYTES of stored bits. A block is encoded in one of

    SPARSE   positions of changed elements as gaps, and their steps: new - old modulo 2^width, zigzag
    STEPS    the step of every element, as byte planes
    VALUES   the new bits of every element, as byte planes (needs no base; what keyframes are made of)

whichever is fewest bytes; a block without any change has no bytes at all.

- Elements are unsigned integers and compared as such, never floats: NaN payloads, -0, infinities, denormals are exact.
- About nine of ten changed bf16 weights move by one unit in the last place, so the step holds 2 bits where the new
  value holds 12 (measured); that is why steps travel.
- Gaps and steps are bytes; 255 marks an escape, whose rest stands in a stream of its own.
- Every stream is stored compressed or raw, whichever is fewer bytes. Streams: gaps, gap escapes, steps, step escapes
  (SPARSE); one per byte of the element, lowest first (STEPS, VALUES).

Which blocks make a version is snapshot.py's and manifest.py's.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from ..errors import WireError

Bits = NDArray[Any]  # unsigned integers of the element's width

BLOCK_BYTES = 4 << 20  # of stored bits: a dense block is then one chunk of the size brokers move best
SPARSE, STEPS, VALUES = 1, 2, 3
ESCAPE = 255
SPARSE_FRACTION_MAX = 0.5  # above it positions alone cost more than a bit per element
STEPS_FRACTION_MIN = 0.3  # below it a plane of mostly zero steps has never beaten gaps (measured)
SAMPLE_BYTES = 1 << 16  # a stream that shrinks not at all on this much is stored raw: mantissa bytes are noise
STREAM_BYTES_MAX = 16 << 20  # of one raw stream: 4 bytes for each of a block's bytes
GAP_BYTES = 4  # gaps are uint32
HEADER = struct.Struct("<BBHI")  # mode, element bytes, stream count, changed count
STREAM = struct.Struct("<II")  # raw length, stored length; equal: stored raw


@dataclass(frozen=True, slots=True)
class Encoded:
    """A block as bytes, with what it says.

    indices: uint32 (C,), changed positions inside the block, ascending, or None for all. values: unsigned, new bits at
    those positions (a view of the input where indices is None). changed_count: elements whose bits differ.
    """

    data: bytes
    indices: NDArray[np.uint32] | None
    values: Bits
    changed_count: int


@dataclass(frozen=True, slots=True)
class Decoded:
    """What a block's bytes say. `numbers` are steps to add modulo 2^width, or new values when is_absolute.

    indices: int64 (C,), ascending, or None for all elements.
    """

    indices: NDArray[np.int64] | None
    numbers: Bits
    is_absolute: bool


class Encoder:
    """Encodes blocks; holds compressors, so one per thread."""

    def __init__(self) -> None:
        self._general = zstandard.ZstdCompressor(level=1, write_checksum=False, write_content_size=False)
        # Steps have no matches worth finding: a tiny table leaves them to the entropy coder, faster and smaller.
        tuned = zstandard.ZstdCompressionParameters(
            strategy=zstandard.STRATEGY_FAST, min_match=7, hash_log=6, window_log=17, write_content_size=False
        )
        self._entropy = zstandard.ZstdCompressor(compression_params=tuned)

    def delta(self, old: Bits, new: Bits) -> Encoded | None:
        """The smallest encoding of `new` given `old` (same shape and dtype, flat); None when nothing changed."""
        mask = np.not_equal(old, new)
        count = int(np.count_nonzero(mask))
        if count == 0:
            return None
        fraction = count / len(new)
        choices: list[Encoded] = []
        if fraction <= SPARSE_FRACTION_MAX:
            choices.append(self._sparse(old, new, np.flatnonzero(mask)))
        if fraction >= STEPS_FRACTION_MIN:
            planes = _planes(_zigzag(new - old))
            choices.append(Encoded(self._pack(STEPS, new, count, planes), None, new, count))
            if len(choices[-1].data) > 0.5 * new.nbytes:
                choices.append(Encoded(self._pack(VALUES, new, count, _planes(new)), None, new, count))
        return min(choices, key=lambda encoded: len(encoded.data))

    def dense(self, new: Bits) -> Encoded:
        """`new` by itself, without a base."""
        return Encoded(self._pack(VALUES, new, len(new), _planes(new)), None, new, len(new))

    def _sparse(self, old: Bits, new: Bits, positions: NDArray[np.intp]) -> Encoded:
        indices = positions.astype(np.uint32)
        gaps = np.diff(indices, prepend=np.uint32(0))
        gaps[1:] -= 1
        values = new[positions]
        steps = _zigzag(values - old[positions])
        steps -= 1  # a changed element has no step 0
        streams = [*_escaped(gaps), *_escaped(steps)]
        return Encoded(self._pack(SPARSE, new, len(indices), streams), indices, values, len(indices))

    def _pack(self, mode: int, new: Bits, changed_count: int, streams: list[bytes]) -> bytes:
        stored = [self._squeeze(stream, is_entropy_only=mode == SPARSE and k == 2) for k, stream in enumerate(streams)]
        table = [STREAM.pack(len(raw), len(kept)) for raw, kept in zip(streams, stored, strict=True)]
        return b"".join((HEADER.pack(mode, new.itemsize, len(streams), changed_count), *table, *stored))

    def _squeeze(self, raw: bytes, *, is_entropy_only: bool) -> bytes:
        if len(raw) > 4 * SAMPLE_BYTES:
            middle = len(raw) // 2
            sample = raw[middle : middle + SAMPLE_BYTES]
            if len(self._general.compress(sample)) >= 0.98 * len(sample):
                return raw
        packed = (self._entropy if is_entropy_only else self._general).compress(raw)
        return packed if len(packed) < len(raw) else raw


class Decoder:
    """Decodes blocks; holds a decompressor, so one per thread."""

    def __init__(self) -> None:
        self._zstd = zstandard.ZstdDecompressor(max_window_size=STREAM_BYTES_MAX)

    def decode(self, data: bytes | memoryview, *, element_count: int, dtype: np.dtype[Any]) -> Decoded:
        """What `data` says about a block of `element_count` elements of unsigned `dtype`.

        Raises:
            WireError: not such a block. Digests are checked first, so this means a fault at the publisher.
        """
        try:
            return self._decode(memoryview(data), element_count, dtype)
        except (struct.error, zstandard.ZstdError, ValueError, IndexError, OverflowError) as error:
            if isinstance(error, WireError):
                raise
            raise WireError(f"weight block of {len(data):,} bytes cannot be decoded: {error}") from error

    def _decode(self, view: memoryview, element_count: int, dtype: np.dtype[Any]) -> Decoded:
        mode, width, stream_count, changed_count = HEADER.unpack_from(view)
        expected = {SPARSE: 4, STEPS: dtype.itemsize, VALUES: dtype.itemsize}.get(mode)
        if width != dtype.itemsize or stream_count != expected or changed_count > element_count:
            raise WireError(f"weight block: mode {mode}, {width}-byte elements, {changed_count} changes do not fit")
        streams = self._streams(view, stream_count, element_count * max(width, 4))
        if mode == SPARSE:
            return _positions_and_steps(streams, changed_count, element_count, dtype)
        numbers = _join_planes(streams, element_count, dtype)
        return Decoded(None, numbers if mode == VALUES else _unzigzag(numbers), is_absolute=mode == VALUES)

    def _streams(self, view: memoryview, count: int, raw_limit: int) -> list[NDArray[np.uint8]]:
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


def _positions_and_steps(
    streams: list[NDArray[np.uint8]], changed_count: int, element_count: int, dtype: np.dtype[Any]
) -> Decoded:
    indices = _unescaped(streams[0], streams[1], np.dtype(np.int64), changed_count, plane_count_max=GAP_BYTES)
    indices[1:] += 1
    np.cumsum(indices, out=indices)
    if changed_count and not 0 <= indices[-1] < element_count:
        raise WireError(f"weight block: position {indices[-1]} lies outside its {element_count} elements")
    steps = _unescaped(streams[2], streams[3], dtype, changed_count, plane_count_max=dtype.itemsize)
    steps += 1
    return Decoded(indices, _unzigzag(steps), is_absolute=False)


def _zigzag(steps: Bits) -> Bits:
    """Small steps of either sign as small unsigned numbers: 0, -1, 1, -2, … become 0, 1, 2, 3, …"""
    signed = steps.view(f"i{steps.itemsize}")
    return ((signed << 1) ^ (signed >> (8 * steps.itemsize - 1))).view(steps.dtype)


def _unzigzag(numbers: Bits) -> Bits:
    restored: Bits = (numbers >> 1) ^ (0 - (numbers & 1)).astype(numbers.dtype)
    return restored


def _escaped(numbers: Bits) -> list[bytes]:
    """One byte per number, and the rest of those that do not fit, as byte planes without empty high ones."""
    small = np.minimum(numbers, ESCAPE).astype(np.uint8)
    rest = numbers[small == ESCAPE] - numbers.dtype.type(ESCAPE)
    plane_count = (int(rest.max()).bit_length() + 7) // 8 if len(rest) else 0
    return [small.tobytes(), b"".join(_planes(rest)[:plane_count])]


def _unescaped(
    small: NDArray[np.uint8], rest: NDArray[np.uint8], dtype: np.dtype[Any], count: int, *, plane_count_max: int
) -> Bits:
    if len(small) != count:
        raise WireError(f"weight block: {len(small)} numbers for {count} changes")
    numbers = small.astype(dtype)
    if len(rest):
        places = np.flatnonzero(small == ESCAPE)
        if len(rest) > len(places) * plane_count_max:
            raise WireError(f"weight block: {len(rest)} bytes for {len(places)} escaped numbers")
        for plane, part in enumerate(rest.reshape(-1, len(places))):
            numbers[places] += part.astype(dtype) << dtype.type(8 * plane)
    return numbers


def _planes(numbers: Bits) -> list[bytes]:
    """Byte k of every element, for each k, lowest first."""
    parts = numbers.view(np.uint8).reshape(len(numbers), numbers.itemsize)
    return [np.ascontiguousarray(parts[:, k]).tobytes() for k in range(numbers.itemsize)]


def _join_planes(planes: list[NDArray[np.uint8]], element_count: int, dtype: np.dtype[Any]) -> Bits:
    parts = np.empty((element_count, dtype.itemsize), dtype=np.uint8)
    for k, plane in enumerate(planes):
        if len(plane) != element_count:
            raise WireError(f"weight block: a plane of {len(plane)} bytes for {element_count} elements")
        parts[:, k] = plane
    return parts.view(dtype).reshape(element_count)
