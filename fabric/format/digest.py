"""One additive digest of weights: a sum per tensor that any part of a change moves by itself.

    sum(tensor) = Σ over elements of h(position, value) mod 2^64,   h(i, v) = K(i) · f(v)

    x = (v + 1) · MIX;  x ^= x >> 32;  f(v) = x · (2x + 1)           v: stored bits, unsigned, 1, 2, 4 or 8 bytes
    K(i) = T[i mod ROW] · B(i div ROW)                               i: flat position in the tensor
    T[j] = s(TABLE_KEY, j) | 1,  B(r) = s(tensor key, r) | 1         s(key, n): splitmix64 of key + (n + 1) · GAMMA

- Additive: shards, ranks and any other split of a tensor add up to it, in any order. A change moves the sum by
  Σ h(new) - Σ h(old) over the changed positions, so a version's sums cost as much as has changed, not as the model has.
- f is a bijection and K is odd: one changed element is always seen. f is not linear: a step that is added to another
  value than the publisher's moves the sum by another amount, so a wrong base is seen where elements changed.
- For several changes at once the chance of a miss is about 2^-63; it is at most 2^-32 for the worst kind, where all
  of them are sign flips of 8-byte elements.
- Guards against faults (wrong base, lost or doubled updates, corrupt bytes), not against forgery: anyone can make
  weights of a given sum.
- Only wrapping 64-bit multiplication, addition, xor and logical shifts, so that a GPU can make it in int64.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import xxhash
from numpy.typing import NDArray

from .kernels import load
from .kernels.protocol import Bits, Kernels
from .layout import Layout


def tensor_key(name: str) -> int:
    """Return the key of a tensor's positions: xxh3-64 of its name."""
    return xxhash.xxh3_64_intdigest(name.encode())


def sum_at(key: int, positions: NDArray[np.int64], values: Bits, *, kernels: Kernels | None = None) -> int:
    """Compute Σ h over some elements.

    Args:
        key: of the tensor.
        positions: int64 (C,), flat positions in the tensor; any order, ascending is fastest.
        values: unsigned (C,), the stored bits there.
        kernels: by default the fastest that are there.

    Returns:
        The sum, in [0, 2^64).
    """
    return (kernels or load()).sum_at(key, positions, values)


def change_at(
    key: int, start: int, indices: NDArray[np.int64], olds: Bits, values: Bits, *, kernels: Kernels | None = None
) -> int:
    """Compute by how much elements at flat positions start + indices move the sum when they go from olds to values.

    The same as the difference of two sums, in one go. indices: int64 (C,). olds, values: unsigned (C,).
    """
    return (kernels or load()).change_at(key, start, indices, olds, values)


def sum_range(key: int, start: int, values: Bits, *, kernels: Kernels | None = None) -> int:
    """Compute Σ h over the elements from flat position `start`; values: unsigned (C,), their stored bits."""
    return (kernels or load()).sum_range(key, start, values)


def state_sums(layout: Layout, bits: Mapping[str, Bits], *, kernels: Kernels | None = None) -> NDArray[np.uint64]:
    """Compute the sum of every tensor, uint64 (T,) in the layout's order. bits: flat stored bits by name."""
    sums = [sum_range(tensor_key(spec.name), 0, bits[spec.name], kernels=kernels) for spec in layout.tensors]
    return np.array(sums, dtype=np.uint64)


def sums_digest(sums: NDArray[np.uint64]) -> str:
    """Return sums, uint64 (T,), as one word: xxh3-128, hex."""
    return xxhash.xxh3_128_hexdigest(np.ascontiguousarray(sums, dtype="<u8").tobytes())
