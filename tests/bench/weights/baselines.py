"""How others encode the change of a block of weights: one function to encode, one to decode and apply, for each.

- A block is a flat array of stored bits; what is encoded says all that a receiver of the old bits needs.
- They find what changed as ours does without its compiled path, and cut the model into the same blocks: what differs
  is the code alone.
- Whose code each one is was read from their sources; these are not their programs.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

Bits = NDArray[np.uint16]
LENGTHS = struct.Struct("<BIII")  # bytes of a position, changed elements, stored bytes of positions, of values
ZSTD_LEVEL = 1


@dataclass(frozen=True)
class Codec:
    """A code. encode: None where nothing changed. apply: bring a block of the old bits to the new, in place."""

    name: str
    encode: Callable[[Bits, Bits], bytes | None]
    apply: Callable[[bytes, Bits], None]


def baselines() -> list[Codec]:
    """All of them; each holds compressors of its own."""
    return [_coo(), _coo_zstd(), _gap_planes(), _xor()]


def _coo() -> Codec:
    def encode(old: Bits, new: Bits) -> bytes | None:
        positions = np.flatnonzero(old != new)
        if not len(positions):
            return None
        return positions.astype(np.int32).tobytes() + new[positions].tobytes()

    def apply(data: bytes, live: Bits) -> None:
        count = len(data) // 6
        live[np.frombuffer(data, np.int32, count)] = np.frombuffer(data, np.uint16, count, offset=4 * count)

    return Codec("int32 + bf16 (TRL, vLLM, verl)", encode, apply)


def _coo_zstd() -> Codec:
    pack, unpack = _zstd()

    def encode(old: Bits, new: Bits) -> bytes | None:
        positions = np.flatnonzero(old != new)
        if not len(positions):
            return None
        return _join(4, len(positions), pack(positions.astype(np.int32)), pack(new[positions]))

    def apply(data: bytes, live: Bits) -> None:
        _, _, positions, values = _split(data)
        live[np.frombuffer(unpack(positions), np.int32)] = np.frombuffer(unpack(values), np.uint16)

    return Codec("int32 + bf16, both zstd-1", encode, apply)


def _gap_planes() -> Codec:
    pack, unpack = _zstd()

    def encode(old: Bits, new: Bits) -> bytes | None:
        positions = np.flatnonzero(old != new)
        if not len(positions):
            return None
        gaps = np.diff(positions, prepend=0)
        width = 2 if gaps.max() < 1 << 16 else 4
        planes = np.ascontiguousarray(new[positions].view(np.uint8).reshape(-1, 2).T)
        return _join(width, len(positions), pack(gaps.astype(f"u{width}")), pack(planes))

    def apply(data: bytes, live: Bits) -> None:
        width, count, gaps, values = _split(data)
        positions = np.cumsum(np.frombuffer(unpack(gaps), f"u{width}"), dtype=np.int64)
        planes = np.frombuffer(unpack(values), np.uint8).reshape(2, count)
        live[positions] = np.ascontiguousarray(planes.T).view(np.uint16).reshape(-1)

    return Codec("gap u16 + byte planes, zstd-1 (as PULSE)", encode, apply)


def _xor() -> Codec:
    pack, unpack = _zstd()

    def encode(old: Bits, new: Bits) -> bytes | None:
        different = old ^ new
        return pack(different) if different.any() else None

    def apply(data: bytes, live: Bits) -> None:
        live ^= np.frombuffer(unpack(data), np.uint16)

    return Codec("XOR + zstd-1 (slime, SkyRL)", encode, apply)


def _zstd() -> tuple[Callable[[NDArray[Any]], bytes], Callable[[bytes | memoryview], bytes]]:
    compressor, decompressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL), zstandard.ZstdDecompressor()

    def pack(array: NDArray[Any]) -> bytes:
        return compressor.compress(array.data)

    return pack, decompressor.decompress


def _join(width: int, count: int, positions: bytes, values: bytes) -> bytes:
    return LENGTHS.pack(width, count, len(positions), len(values)) + positions + values


def _split(data: bytes) -> tuple[int, int, memoryview, memoryview]:
    width, count, position_bytes, value_bytes = LENGTHS.unpack_from(data)
    view = memoryview(data)[LENGTHS.size :]
    return width, count, view[:position_bytes], view[position_bytes : position_bytes + value_bytes]
