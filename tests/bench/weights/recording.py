"""Successive states of a trained model on disk: the first whole, then what every optimiser step changed.

- All tensors lie one after another in layout order, as uint16 stored bits of bfloat16; positions count through all.
- A change is every element whose stored bits differ, and its new bits: 6 bytes each, so dozens of steps fit where one
  more copy of the model would not.
- Who records imports torch, who reads does not: the processes that are measured stay clean.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollfab.fabric.format.layout import Layout, TensorSpec

Bits = NDArray[np.uint16]
BASE, INDEX = "base.bits", "index.json"


@dataclass(frozen=True, kw_only=True)
class Change:
    """One optimiser step. is_settled: the optimiser's moments are those of its learning rate. gradient_norm: before
    clipping."""

    learning_rate: float
    is_settled: bool
    changed_count: int
    gradient_norm: float
    seconds: float


class Recorder:
    """Writes a recording, state by state. Memory: one copy of the model in bfloat16."""

    def __init__(self, directory: Path, layout: Layout) -> None:
        self.layout = layout
        self._directory = directory
        self._changes: list[Change] = []
        self._state = np.empty(layout.element_count, np.uint16)

    def begin(self, named: dict[str, Bits]) -> None:
        """The first state, whole."""
        for name, place in places(self.layout).items():
            self._state[place] = named[name]
        self._state.tofile(self._directory / BASE)
        self._write_index()

    def add(self, name: str, bits: Bits) -> tuple[NDArray[np.uint32], Bits]:
        """A tensor after a step: positions and new values of what changed; the state follows."""
        place = places(self.layout)[name]
        old = self._state[place]
        positions = np.flatnonzero(old != bits)
        values = bits[positions]
        old[positions] = values
        return (positions + place.start).astype(np.uint32), values

    def end(self, parts: Sequence[tuple[NDArray[np.uint32], Bits]], change: Change) -> None:
        """The step is complete. parts: of all tensors, in layout order."""
        stem = self._directory / f"{len(self._changes)}"
        np.concatenate([positions for positions, _ in parts]).tofile(stem.with_suffix(".positions"))
        np.concatenate([values for _, values in parts]).tofile(stem.with_suffix(".values"))
        self._changes.append(change)
        self._write_index()

    def _write_index(self) -> None:
        content = {"layout": self.layout.rows(), "changes": [asdict(change) for change in self._changes]}
        (self._directory / INDEX).write_text(json.dumps(content))


class Recording:
    """Reads a recording. State k is the base after k changes."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        content: dict[str, Any] = json.loads((directory / INDEX).read_text())
        self.layout = Layout.from_rows(content["layout"])
        self.changes = [Change(**row) for row in content["changes"]]

    def base(self) -> Bits:
        """State 0, in memory of its own."""
        return np.fromfile(self.directory / BASE, np.uint16)

    def mapped_base(self) -> Bits:
        """State 0 as pages that all processes share until they write to them."""
        return np.memmap(self.directory / BASE, np.uint16, mode="c")

    def apply(self, state: Bits, index: int) -> None:
        """Bring `state` from state `index` to the next."""
        positions = np.fromfile(self.directory / f"{index}.positions", np.uint32)
        state[positions] = np.fromfile(self.directory / f"{index}.values", np.uint16)

    def at(self, index: int) -> Bits:
        """State `index`, in memory of its own."""
        state = self.base()
        for step in range(index):
            self.apply(state, step)
        return state

    def settled(self, learning_rate: float) -> list[int]:
        """Changes to be measured at this learning rate, in order."""
        rows = enumerate(self.changes)
        return [index for index, row in rows if row.is_settled and row.learning_rate == learning_rate]

    def split(self, state: Bits) -> dict[str, Bits]:
        """Flat views of a state, by tensor."""
        return {name: state[place] for name, place in places(self.layout).items()}

    def shaped(self, state: Bits) -> dict[str, Bits]:
        """Views of a state, by tensor, in their shapes: what a trainer publishes."""
        flat = self.split(state)
        return {spec.name: flat[spec.name].reshape(spec.shape) for spec in self.layout.tensors}


def places(layout: Layout) -> dict[str, slice]:
    """Where each tensor lies in a state."""
    found: dict[str, slice] = {}
    start = 0
    for spec in layout.tensors:
        found[spec.name] = slice(start, start + spec.element_count)
        start += spec.element_count
    return found


def bfloat16_layout(shapes: dict[str, tuple[int, ...]]) -> Layout:
    """The layout of tensors that are all bfloat16."""
    return Layout(tuple(TensorSpec(name, "bfloat16", shape) for name, shape in shapes.items()))
