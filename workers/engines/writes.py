"""What every engine requires of a commit before its first byte is written."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ...fabric.contract.errors import LayoutMismatch
from ...fabric.format.layout import Layout
from .base import Writes


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


def _index_problem(indices: NDArray[np.int64], element_count: int) -> str:
    if not len(indices):
        return ""
    low, high = int(indices.min()), int(indices.max())
    if low < 0 or high >= element_count:
        return f"positions {low} to {high} are not all below {element_count}"
    if not (indices[1:] > indices[:-1]).all() and len(np.unique(indices)) != len(indices):
        return "a position is there twice"
    return ""
