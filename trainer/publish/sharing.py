"""Which rank publishes what, decided by rank 0 from what every rank holds: pure functions over plain records.

- Ranks may name different tensors (stages of a pipeline, experts). Together they must hold every element.
- What several ranks hold alike is published by one of them, by turns, so that replicas share the work.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...fabric.contract.errors import LayoutMismatch
from ...fabric.format.layout import Layout, TensorSpec
from ...fabric.format.regions import Region

WIDTH = len(Region._fields)


class Sharing(NamedTuple):
    """What every rank publishes. layout: of all ranks. boxes: by rank, numbered in it, in its order."""

    layout: Layout
    boxes: list[list[Region]]


def share(held: Sequence[tuple[Layout, Sequence[Region]]]) -> Sharing:
    """Join what the ranks hold, each by its own layout.

    Raises:
        LayoutMismatch: two ranks hold a tensor in different shapes or dtypes; names both.
    """
    first: dict[str, tuple[int, TensorSpec]] = {}
    for rank, (layout, _) in enumerate(held):
        for spec in layout.tensors:
            other, known = first.setdefault(spec.name, (rank, spec))
            if known != spec:
                raise LayoutMismatch(
                    f"rank {rank} publishes tensor {spec}, rank {other} {known}: all must publish the same model",
                    ranks=[rank],
                )
    joined = Layout(tuple(spec for _, spec in first.values()))
    numbers = {spec.name: number for number, spec in enumerate(joined.tensors)}
    holders: dict[Region, list[int]] = {}
    for rank, (layout, boxes) in enumerate(held):
        for box in boxes:
            own = box._replace(tensor=numbers[layout.tensors[box.tensor].name])
            holders.setdefault(own, []).append(rank)
    mine: list[list[Region]] = [[] for _ in held]
    for box in sorted(holders):
        ranks = holders[box]
        mine[ranks[box.tensor % len(ranks)]].append(box)
    return Sharing(joined, mine)


def rows_of(boxes: Sequence[Region]) -> NDArray[np.int64]:
    """Return boxes as int64 (P * 5,), to be sent."""
    return np.array(boxes, dtype=np.int64).reshape(-1)


def boxes_of(rows: NDArray[np.int64]) -> list[Region]:
    """Read boxes out of `rows_of`."""
    return [Region(*row) for row in rows.reshape(-1, WIDTH).tolist()]
