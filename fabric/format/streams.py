"""Parts of a block's streams: compressed or not, numbers as byte planes.

- A number takes as many planes as the greatest of them needs.
- The size that a stream states is checked before memory of that size is made.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import zstandard

from ..contract.errors import WireError
from .kernels.protocol import Bits, Bytes

Stream = bytes | memoryview

SAMPLE_BYTES = 1 << 16  # a stream that shrinks not at all on this much is stored raw: mantissa bytes are noise


def squeezed(compressor: zstandard.ZstdCompressor, raw: Stream) -> Stream:
    """Compress a stream; return it as it is if that is not longer."""
    if len(raw) > 4 * SAMPLE_BYTES:
        middle = len(raw) // 2
        sample = raw[middle : middle + SAMPLE_BYTES]
        if len(compressor.compress(sample)) >= 0.98 * len(sample):
            return raw
    packed = compressor.compress(raw) if len(raw) else b""
    return packed if len(packed) < len(raw) else raw


def rest_bytes(numbers: Bits) -> bytes:
    """Write how many bytes each number has, then the numbers as byte planes without empty high ones; empty for none."""
    if not len(numbers):
        return b""
    plane_count = max(1, (int(numbers.max()).bit_length() + 7) // 8)
    return b"".join((bytes((plane_count,)), *split_planes(numbers, plane_count)))


def rest_numbers(stream: Bytes, count_max: int, dtype: np.dtype[Any]) -> Bits:
    """Do the inverse of rest_bytes.

    Raises:
        WireError: no such stream, or more than count_max numbers.
    """
    if not len(stream):
        return stream.view(dtype)
    plane_count = int(stream[0])
    if not 1 <= plane_count <= dtype.itemsize or (len(stream) - 1) % plane_count:
        raise WireError(f"weight block: {len(stream)} bytes for escaped numbers of {plane_count}")
    count = (len(stream) - 1) // plane_count
    if count > count_max:
        raise WireError(f"weight block: {count} escaped numbers for {count_max} changes")
    numbers = stream[1 : 1 + count].astype(dtype)
    for k in range(1, plane_count):
        numbers |= stream[1 + k * count : 1 + (k + 1) * count].astype(dtype) << dtype.type(8 * k)
    return numbers


def split_planes(numbers: Bits, count: int | None = None) -> list[bytes]:
    """Return byte k of every element, for each k below `count` (None: all), lowest first."""
    parts = np.ascontiguousarray(numbers).view(np.uint8)
    return [parts[k :: numbers.itemsize].tobytes() for k in range(numbers.itemsize if count is None else count)]


def join_planes(planes: list[Bytes], element_count: int, dtype: np.dtype[Any]) -> Bits:
    """Join elements from their byte planes, lowest first.

    Raises:
        WireError: a plane has not a byte for each element.
    """
    parts = np.empty((element_count, dtype.itemsize), dtype=np.uint8)
    for k, plane in enumerate(planes):
        if len(plane) != element_count:
            raise WireError(f"weight block: a plane of {len(plane)} bytes for {element_count} elements")
        parts[:, k] = plane
    return parts.view(dtype).reshape(element_count)
