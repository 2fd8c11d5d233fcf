"""Staged versions written into live weights, while the engine stands still.

- Values are absolute and written in place, so a commit may be repeated or resumed and keeps every address.
- Engines check all of a commit before they write its first byte (`check_writes`).
- Large commits are written in several threads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from ..contract.errors import LayoutMismatch
from ..format.kernels import load
from ..format.kernels.protocol import Bits, Indices, Kernels
from ..format.layout import Layout
from ..format.manifest import Sums

Write = tuple[Indices | None, Bits]  # flat positions, ascending, or None for all; values
Writes = Mapping[str, Write]
COMMIT_THREAD_COUNT_MAX = 8  # memory bandwidth is used up before
PIECE_COUNT = 1 << 18  # elements that a thread writes at a time: some tenths of a millisecond
SCATTER_COUNT_MIN = 1 << 16  # changes that are worth a thread


@dataclass(slots=True)
class Staged:
    """Absolute values of a version, by the names of the rank's tensors; those without changes are left out.

    sums: uint64 (P,), of every slice of the rank after the commit; for a whole model, of every tensor. A commit does
    not need them.
    """

    version: int
    writes: Writes
    sums: Sums = field(default_factory=lambda: np.zeros(0, dtype=np.uint64))

    @property
    def changed_count(self) -> int:
        """Count the elements that a commit writes."""
        return sum(len(values) for _, values in self.writes.values())


def check_writes(layout: Layout, writes: Writes) -> None:
    """Require that every write is for a tensor of the layout, of its dtype and within its bounds, each element once.

    Raises:
        LayoutMismatch: names the first that is not.
    """
    specs = {spec.name: spec for spec in layout.tensors}
    for name, (indices, values) in writes.items():
        spec = specs.get(name)
        if spec is None:
            raise LayoutMismatch(
                f"nothing was written: the commit has tensor {name!r}, which this model has not: publish that model",
                name=name,
            )
        problem = ""
        if values.dtype != spec.bits_dtype:
            problem = f"its values are {values.dtype}, stored bits are {spec.bits_dtype}"
        elif indices is None:
            if values.shape != (spec.element_count,):
                problem = f"it has {values.size} values for {spec.element_count} elements"
        elif indices.shape != values.shape:
            problem = f"it has {indices.size} positions for {values.size} values"
        else:
            problem = _index_problem(indices, spec.element_count)
        if problem:
            raise LayoutMismatch(f"nothing was written: tensor {spec} of the commit does not fit: {problem}", name=name)


def _index_problem(indices: Indices, element_count: int) -> str:
    if not len(indices):
        return ""
    low, high = int(indices.min()), int(indices.max())
    if low < 0 or high >= element_count:
        return f"positions {low} to {high} are not all below {element_count}"
    if not (indices[1:] > indices[:-1]).all() and len(np.unique(indices)) != len(indices):
        return "a position is there twice"
    return ""


def commit(staged: Staged, bits: Mapping[str, Bits], *, thread_count: int = 1) -> None:
    """Write staged values in place. bits: flat, writable stored bits by name. Repeating it changes nothing."""
    write(staged.writes, bits, thread_count=thread_count)


def write(writes: Writes, bits: Mapping[str, Bits], *, thread_count: int = 1) -> None:
    """Write values in place, in several threads where there is much to write: the engine stands still meanwhile.

    Raises:
        IndexError: a tensor's last position, or its first, lies outside; others may be written.
    """
    pieces = [piece for name, each in writes.items() for piece in _pieces(name, bits[name], each)]
    pieces.reverse()  # the values staged last are still in the caches
    remaining = iter(pieces)

    def work() -> None:
        for flat, indices, values in remaining:  # every thread takes the next one: an order for each costs more
            _write(flat, indices, values)

    helper_count = min(thread_count, len(pieces)) - 1
    if helper_count <= 0:
        work()
        return
    with ThreadPoolExecutor(helper_count, thread_name_prefix="commit") as pool:
        helpers = [pool.submit(work) for _ in range(helper_count)]
        work()
        for helper in helpers:
            helper.result()


def _pieces(name: str, flat: Bits, each: Write) -> Iterator[tuple[Bits, Indices | None, Bits]]:
    """Cut a tensor's write into parts of at most PIECE_COUNT elements."""
    indices, values = each
    if indices is not None and len(indices) and not (indices[0] >= 0 and indices[-1] < len(flat)):
        raise IndexError(f"tensor {name!r}: position {indices[-1]} lies outside its {len(flat)} elements")
    for first in range(0, len(values), PIECE_COUNT):
        part = slice(first, first + PIECE_COUNT)
        yield (flat[part], None, values[part]) if indices is None else (flat, indices[part], values[part])


def _write(flat: Bits, indices: Indices | None, values: Bits) -> None:
    if indices is None:
        np.copyto(flat, values)
    else:
        scatter(flat, indices, values)


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
