"""The entropy floor of a version: the fewest bytes that any code of positions and steps could need for its changes.

- Model: inside a block every element changes independently with the block's own probability, and steps are drawn
  independently from the block's own histogram. The gaps between such positions have the entropy H(p) / p bits each.
- A block without a base (of a keyframe) has the entropy of its new values, or of their byte planes where an element is
  wider than two bytes: a block is too short to show more of their joint distribution.
- The floor leaves out the bits that tell a decoder the probabilities, so a few changes cannot come near it. Clustered
  changes can go below it.
- Cost: decoding, and a count of every step. A publisher looks at a few blocks of a version (`sampled_ratio`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..format.codec import SPARSE, Bits, Decoded
from ..format.decoder import Decoder
from ..format.layout import Layout

if TYPE_CHECKING:
    from ..format.manifest import BlockRow

SAMPLE_AT = (1 / 6, 1 / 2, 5 / 6)  # places of the sampled blocks, which stand for all; one takes a millisecond
COUNTED_BYTES_MAX = 2  # wider elements have more patterns than a block has elements


@dataclass(frozen=True, slots=True)
class Floor:
    """The fewest bits needed: for positions, for steps, and for values that have no base. Floors add up."""

    position_bits: float = 0.0
    step_bits: float = 0.0
    value_bits: float = 0.0

    def __add__(self, other: Floor) -> Floor:
        return Floor(
            self.position_bits + other.position_bits,
            self.step_bits + other.step_bits,
            self.value_bits + other.value_bits,
        )

    @property
    def byte_count(self) -> float:
        """Return the whole floor in bytes."""
        return (self.position_bits + self.step_bits + self.value_bits) / 8


def block_floor(decoded: Decoded, element_count: int) -> Floor:
    """Compute the floor of one decoded block of `element_count` elements."""
    if decoded.is_absolute and decoded.indices is None:
        return Floor(value_bits=_value_bits(decoded.numbers))
    changed_count = len(decoded.numbers) if decoded.indices is not None else int(np.count_nonzero(decoded.numbers))
    positions = position_bits(element_count, changed_count)
    if decoded.is_absolute:
        return Floor(position_bits=positions, value_bits=_value_bits(decoded.numbers))
    steps = decoded.numbers if decoded.indices is not None else decoded.numbers[decoded.numbers != 0]
    return Floor(position_bits=positions, step_bits=len(steps) * entropy_bits(steps))


def sampled_ratio(layout: Layout, rows: Sequence[BlockRow], chunks: Sequence[bytes]) -> float:
    """Compute the floor as a fraction of the payload, from a few sparse blocks of a version; 0 if it has none.

    Args:
        rows: of its blocks, in the order of chunks. chunks: its encoded bytes.
    """
    sparse = [row for row in rows if row.length and chunks[row.chunk][row.offset] == SPARSE]
    ends = np.cumsum([row.length for row in sparse])
    decoder, floor, byte_count = Decoder(), Floor(), 0
    for k in sorted({int(np.searchsorted(ends, ends[-1] * part)) for part in SAMPLE_AT if sparse}):
        row, spec = sparse[k], layout.tensors[sparse[k].tensor]
        data = memoryview(chunks[row.chunk])[row.offset : row.offset + row.length]
        count = row.region.element_count
        floor += block_floor(decoder.decode(data, element_count=count, dtype=spec.bits_dtype), count)
        byte_count += row.length
    return floor.byte_count / byte_count if byte_count else 0.0


def position_bits(element_count: int, changed_count: int) -> float:
    """Compute the bits that say which `changed_count` of `element_count` elements changed, independently: n H(p)."""
    unchanged_count = element_count - changed_count
    assert 0 <= changed_count <= element_count
    return sum(count * math.log2(element_count / count) for count in (changed_count, unchanged_count) if count)


def entropy_bits(symbols: NDArray[Any]) -> float:
    """Compute the Shannon entropy of `symbols` (unsigned integers), in bits per symbol; 0 for none."""
    if len(symbols) == 0:
        return 0.0
    narrow = symbols.dtype.itemsize <= COUNTED_BYTES_MAX
    counts = np.bincount(symbols) if narrow else np.unique(symbols, return_counts=True)[1]
    counts = counts[counts > 0]
    return float(np.log2(len(symbols)) - np.dot(counts, np.log2(counts)) / len(symbols))


def _value_bits(values: Bits) -> float:
    if values.dtype.itemsize <= COUNTED_BYTES_MAX:
        return len(values) * entropy_bits(values)
    planes = np.ascontiguousarray(values).view(np.uint8).reshape(len(values), values.dtype.itemsize)
    return len(values) * sum(entropy_bits(planes[:, k]) for k in range(values.dtype.itemsize))
