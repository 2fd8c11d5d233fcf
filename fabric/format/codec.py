"""One block: the elements of one region of a tensor as bytes, exact, self-contained, small.

A block has at most BLOCK_BYTES of stored bits (regions.py says which elements they are) and is encoded in one of

    SPARSE   positions of changed elements as gaps, and their steps: new - old modulo 2^width, zigzag
    STEPS    the step of every element, 0 where it did not change
    VALUES   the new bits of every element, as byte planes (needs no base; what keyframes are made of)

whichever is fewest bytes; a block without any change has no bytes at all.

- Elements are unsigned integers and compared as such, never floats: NaN payloads, -0, infinities, denormals are exact.
- About nine of ten changed bf16 weights move by one unit in the last place, so the step holds 2 bits where the new
  value holds 12 (measured); that is why steps travel.
- A gap's low bits are noise and travel as they are; what is above them is a byte of few values. The block's header says
  how many low bits: so many that the middle gap has at most GAP_BITS above them.
- A step is four bits, two to a byte: an entropy coder spends at least one bit on a symbol, and most steps are worth
  less than two.
- Rests that do not fit (symbol 255, step 15) have a stream of their own: how many bytes each has, then byte planes.
- Every stream is stored compressed or raw, whichever is fewer bytes. Streams: gaps, their low bits, their rest, steps,
  their rest (SPARSE); steps, their rest (STEPS); one per byte of the element, lowest first (VALUES).
- The same block gives the same bytes whichever kernels made it.

decoder.py reads blocks; versions/snapshot.py and manifest.py make versions of them.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from .kernels import load
from .kernels.places import on_host
from .kernels.protocol import Bits as Bits
from .kernels.protocol import Changes, Flat, Indices, Kernels, Scratch
from .streams import Stream, rest_bytes, split_planes, squeezed

BLOCK_BYTES = 4 << 20  # of stored bits: a dense block is then one chunk of the size brokers move best
SPARSE, STEPS, VALUES = 1, 2, 3
SPARSE_FRACTION_MAX = 0.4  # above it gaps save half a percent at best (measured)
STEPS_FRACTION_MIN = 0.3  # below it steps of all elements have not beaten gaps (measured)
HEADER = struct.Struct("<BBBBI")  # mode, element bytes, gap shift, stream count, changed count
STREAM = struct.Struct("<II")  # raw length, stored length; equal: stored raw


@dataclass(frozen=True, slots=True)
class Encoded:
    """A block as bytes, with the changes that it says.

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
    """A decoded block. `numbers` are steps to add modulo 2^width, or new values when is_absolute.

    indices: int64 (C,), ascending, or None for all elements.
    """

    indices: Indices | None
    numbers: Bits
    is_absolute: bool


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
        """Return the smallest encoding of `new` given `old` (same shape and dtype, flat); None when nothing changed."""
        return self._delta(old, new, may_be_absolute=True)

    def few(self, changes: Changes) -> Encoded | None:
        """Do the same if the changes are known, and at most few_count of the block's elements."""
        return self._sparse(changes) if len(changes.indices) else None

    def dense(self, new: Flat) -> Encoded:
        """Encode `new` by itself, without a base."""
        new = on_host(new)
        return Encoded(self._pack_values(new, len(new)), None, None, new, len(new))

    def fold(self, decoded: Sequence[Decoded], element_count: int, dtype: np.dtype[Any]) -> Encoded | None:
        """Make the block that has the effect of these, one after another; None if they cancel out.

        No weights are needed: steps add modulo 2^width, and a block of values replaces what was before it. In the
        result `olds` is None, and `values` are steps unless it is a block of values.

        Args:
            decoded: oldest first.
            element_count, dtype: of the block.
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
        return None if folded is None else replace(folded, olds=None)

    def _delta(self, old: Bits, new: Bits, *, may_be_absolute: bool) -> Encoded | None:
        count, changes = self._kernels.changes(old, new, int(SPARSE_FRACTION_MAX * len(new)) + 1, self._scratch)
        if count == 0:
            return None
        choices: list[Encoded] = []
        if changes is not None:
            choices.append(self._sparse(changes))
        if changes is None or count > few_count(len(new)):
            packed, rest = self._kernels.split_steps(old, new, 0)
            data = self._pack(STEPS, new.itemsize, count, [packed.data, rest_bytes(rest)])
            choices.append(Encoded(data, None, old, new, count))
            if may_be_absolute and len(choices[-1].data) > 0.5 * new.nbytes:
                choices.append(Encoded(self._pack_values(new, count), None, old, new, count))
        return min(choices, key=lambda encoded: len(encoded.data))

    def _sparse(self, changes: Changes) -> Encoded:
        count = len(changes.indices)
        shift, symbols, lows, gap_rest, packed, step_rest = self._kernels.split(changes, self._scratch)
        streams: list[Stream] = [symbols.data, lows.data, rest_bytes(gap_rest), packed.data, rest_bytes(step_rest)]
        return Encoded(self._pack(SPARSE, changes.values.itemsize, count, streams, shift), *changes, count)

    def _pack_values(self, new: Bits, count: int) -> bytes:
        return self._pack(VALUES, new.itemsize, count, split_planes(new))

    def _pack(self, mode: int, width: int, count: int, streams: Sequence[Stream], shift: int = 0) -> bytes:
        compressor = self._general if mode == VALUES else self._entropy
        stored = [squeezed(compressor, stream) for stream in streams]
        lengths = map(STREAM.pack, map(len, streams), map(len, stored))
        return b"".join((HEADER.pack(mode, width, shift, len(streams), count), *lengths, *stored))


def few_count(element_count: int) -> int:
    """Return the most changes with which a block is SPARSE whatever they are: encoding it needs nothing else."""
    return math.ceil(STEPS_FRACTION_MIN * element_count) - 1
