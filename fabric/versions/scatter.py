"""Writing values in place, by position, in several threads where there is much to write."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np

from ..format.kernels import load
from ..format.kernels.protocol import Bits, Indices, Kernels

SCATTER_COUNT_MIN = 1 << 16  # changes that are worth a thread


def scatter(
    bits: Bits, positions: Indices, values: Bits, *, thread_count: int = 1, kernels: Kernels | None = None
) -> None:
    """Write absolute values in place: bits[positions] = values.

    Args:
        bits: unsigned, flat, contiguous, writable.
        positions: int64 (C,), all different and inside; ascending is fastest.
        values: unsigned (C,).
        thread_count: threads at most, where there are enough changes for them.
    """
    assert not len(positions) or (positions[0] >= 0 and positions[-1] < len(bits))
    write = (kernels or load()).scatter
    part_count = min(thread_count, len(positions) // SCATTER_COUNT_MIN)
    if part_count <= 1:
        write(bits, positions, values)
        return
    bounds = np.linspace(0, len(positions), part_count + 1, dtype=np.int64).tolist()
    parts = [slice(first, last) for first, last in pairwise(bounds)]
    with ThreadPoolExecutor(part_count, thread_name_prefix="scatter") as pool:
        list(pool.map(lambda part: write(bits, positions[part], values[part]), parts))
