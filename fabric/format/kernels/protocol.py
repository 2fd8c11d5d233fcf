"""The inner loops of codec and digest, in makes of one meaning: numba where it is installed, numpy elsewhere, and torch
for bits on a device.

- All give the same arrays, so an encoding does not depend on its maker. Numba's take a tenth to a quarter of numpy's
  time, and let other threads run.
- `load` alone makes the choice. A caller that wants a certain make (tests, bench) passes it to the codec explicitly.
- Nothing is compiled at import. A loop is compiled when it first runs on an element width, and kept on disk.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Bits = NDArray[Any]  # unsigned integers of the element's width
Flat = Any  # flat stored bits: Bits on the host, or a tensor of integers of that width on a device
Bytes = NDArray[np.uint8]
Indices = NDArray[np.int64]

NUMBA, NUMPY = "numba", "numpy"
GAP_ESCAPE = 255  # a gap's byte that says: more in the rest
STEP_ESCAPE = 15  # likewise of a step's four bits
GAP_BITS = 5  # of a middle gap: then its byte escapes once in thousands
GAP_SHIFTS = (0, 1, 2, 4, 8)  # low bits of a gap that travel as they are: none of them crosses a byte
GAP_SAMPLE_COUNT = 256  # gaps looked at to find the middle one

# The digest's formula: see digest.py.
ROW_BITS = 13  # a row of factors is 64 KiB: it stays in the second-level cache beside the values it is used on
ROW = 1 << ROW_BITS
MASK = (1 << 64) - 1
MIX = 0x9FB21C651E98DF25
TABLE_KEY = 0x243F6A8885A308D3  # pi's first digits
GAMMA, AVALANCHE = 0x9E3779B97F4A7C15, (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # splitmix64's


class Changes(NamedTuple):
    """The differences of two arrays. indices: uint32 (C,), ascending. olds, values: unsigned (C,)."""

    indices: NDArray[np.uint32]
    olds: Bits
    values: Bits


class Sparse(NamedTuple):
    """Some elements and their steps, as they travel.

    A gap is the number of elements between two changes. symbols: uint8 (C,), its bits above `shift`, or GAP_ESCAPE and
    gap_rest. lows: those below; bit k of number n is bit n * shift + k of the stream, lowest first. packed, step_rest:
    of steps by split_steps, with bias 1, as a changed element has no step 0.
    """

    shift: int
    symbols: Bytes
    lows: Bytes
    gap_rest: NDArray[np.uint32]
    packed: Bytes
    step_rest: Bits


class Scratch:
    """Memory that the calls of one thread write over: new pages cost more than writing to them.

    Attributes:
        is_warned: whether one of the calls has said already that a device is full.
    """

    def __init__(self) -> None:
        self.is_warned = False
        self._arrays: dict[tuple[str, np.dtype[Any]], NDArray[Any]] = {}

    def array(self, name: str, count: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return at least `count` elements of any content; the same ones at each call with this name."""
        found = self._arrays.get((name, dtype))
        if found is None or len(found) < count:
            found = self._arrays[(name, dtype)] = np.empty(count, dtype=dtype)
        return found


class Comparing(Protocol):
    """The functions of every make, for bits in the make's own place."""

    def changes(self, old: Flat, new: Flat, count_max: int, scratch: Scratch) -> tuple[int, Changes | None]:
        """Count the elements that differ; if at most `count_max`, also return them, in new arrays of the host."""
        ...


class DeviceKernels(Comparing, Protocol):
    """The functions of torch's make, for bits on a device; all else is done on the host."""

    def is_same(self, old: Flat, new: Flat) -> bool:
        """Tell whether all bits are equal."""
        ...

    def write(self, bits: Flat, indices: NDArray[np.uint32] | None, values: Bits) -> None:
        """bits[indices] = values (None: of all), written in place."""
        ...

    def copies(self, bits: Mapping[str, Flat], beside: Mapping[str, Flat]) -> dict[str, Flat]:
        """Copy bits, each to where `beside` has that of its name; all to the host if a device has no room."""
        ...

    def integers(self, tensor: Any, dtype: str) -> Flat:
        """Return a tensor's stored bits in `dtype`, rounded to nearest even if that is not its own.

        No copy if it is contiguous and of that dtype. On the host if a copy has no room on its device.
        """
        ...

    def on_host(self, flat: Flat) -> Bits:
        """The bits as numpy's; no copy where they are in the host's memory."""
        ...

    def sum_runs(self, key: int, start: int, stride: int, runs: Flat) -> int:
        """The digest's sum of elements [k, j] at flat positions start + k * stride + j; see digest.sum_at.

        Takes about 6 times 8 bytes an element on the device.
        """
        ...


class Kernels(Comparing, Protocol):
    """The functions of the host's makes. Arrays are flat and contiguous; none is written unless its text says so."""

    def split(self, changes: Changes, scratch: Scratch) -> Sparse:
        """Split changes into what travels. It may lie in `scratch`, where the next call writes over it."""
        ...

    def join_gaps(self, sparse: Sparse, element_count: int) -> Indices | None:
        """Join positions, int64; None if the rest does not fit the escapes or one lies outside the block."""
        ...

    def split_steps(self, olds: Bits, values: Bits, bias: int) -> tuple[Bytes, Bits]:
        """Pack zigzag(values - olds) - bias as four bits each, two to a byte, low ones first; the escapes' rest too."""
        ...

    def join_steps(self, packed: Bytes, rest: Bits, count: int, bias: int) -> Bits | None:
        """Do the inverse: steps of the dtype of `rest`; None if the rest does not fit the escapes."""
        ...

    def take(self, current: Bits, sparse: Sparse, key: int, start: int, out: tuple[Indices, Bits]) -> int | None:
        """Join gaps and steps and add them to `current`, which is at flat position `start` of its tensor.

        out: written; flat positions, int64 (C,), and the new bits there, unsigned (C,).

        Returns:
            By how much the tensor's sum moves (key: see digest.py), modulo 2^64; None where join_gaps or join_steps
            would give None, and `out` holds anything then.
        """
        ...

    def put(self, bits: Bits, sparse: Sparse, key: int, start: int, scratch: Scratch) -> int | None:
        """Join gaps and steps and add them to `bits`, which are at flat position `start` of their tensor, in place.

        Returns:
            The same as `take`; if None, `bits` hold anything, and nothing outside them was written.
        """
        ...

    def scatter(self, bits: Bits, indices: Indices, values: Bits) -> None:
        """bits[indices] = values, written in place; every index is inside."""
        ...

    def add_at(self, bits: Bits, indices: Indices, steps: Bits) -> None:
        """bits[indices] += steps modulo 2^width, written in place; indices differ and are inside."""
        ...

    def sum_at(self, key: int, positions: Indices, values: Bits) -> int:
        """See digest.sum_at."""
        ...

    def change_at(self, key: int, start: int, indices: Indices, olds: Bits, values: Bits) -> int:
        """See digest.change_at."""
        ...

    def change_range(self, key: int, start: int, olds: Bits, values: Bits) -> int:
        """Do the same as change_at, for all elements from flat position `start` on."""
        ...

    def sum_range(self, key: int, start: int, values: Bits) -> int:
        """See digest.sum_range."""
        ...
