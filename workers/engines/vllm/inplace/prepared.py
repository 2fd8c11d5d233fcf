"""A commit in the form in which it is written: values and positions where they are used, and all memory that it takes.

- Making one may fail at any point, for want of memory, say: nothing live was written. Writing it allocates nothing, and
  waits for nothing but one synchronisation, which is the caller's.
- Positions and their values lie on the device. Values of whole tensors stay on the host, pinned: on the device they
  would take as much room as the weights.
- Layers whose weights a CPU's kernels compute with in packed form are packed here (packing.py), beside the live ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from .....fabric.format.manifest import Sums
from .....fabric.versions.commit import Write, Writes
from .lane import POSITIONS_MAX, Lane
from .pieces import Piece, integers
from .placement import Memory, Placement, memory_key, whole_memory


@dataclass(frozen=True, slots=True)
class Put:
    """New values of one live memory. target: a view of its flat integers. positions: in the target; None: all."""

    memory: int
    target: torch.Tensor
    positions: torch.Tensor | None
    values: torch.Tensor

    def write(self, target: torch.Tensor, scratch: torch.Tensor) -> None:
        """Write into `target`, which has the form of our own. scratch: int64, on the device."""
        if self.positions is None:
            target.copy_(self.values, non_blocking=True)
            return
        for first in range(0, len(self.positions), len(scratch)):
            positions = self.positions[first : first + len(scratch)]
            places = scratch[: len(positions)]
            places.copy_(positions)
            target.index_copy_(0, places, self.values[first : first + len(scratch)])


GoOn = Callable[[], None]  # called between pieces of work; may rest, or raise to end it
Layers = Callable[["Prepared", GoOn], Callable[[], None]]  # packs what computes with copies of its weights; see packing


@dataclass(slots=True)
class Prepared:
    """All of one commit. sums: of the rank's slices afterwards; None: not known. switch: called after the writes."""

    version: int
    puts: Sequence[Put]
    scratch: torch.Tensor
    sums: Sums | None = None
    switch: Callable[[], None] = lambda: None

    def write(self) -> None:
        """Write the commit in place; may be repeated."""
        for put in self.puts:
            put.write(put.target, self.scratch)
        self.switch()

    def applied(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return a copy of a live tensor as it will be; None: nothing of its memory changes."""
        key = memory_key(tensor)
        puts = [put for put in self.puts if put.memory == key]
        if not puts:
            return None
        copy = whole_memory(tensor).clone()
        for put in puts:
            form = put.target
            put.write(copy.as_strided(form.shape, form.stride(), form.storage_offset()), self.scratch)
        return copy.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def prepare(
    version: int,
    puts: Sequence[Put],
    lane: Lane,
    layers: Layers,
    sums: Sums | None = None,
    go_on: GoOn = lambda: None,
) -> Prepared:
    """Make a commit of these writes; returns once all of it is where it is used."""
    longest = max((len(put.positions) for put in puts if put.positions is not None), default=0)
    scratch = torch.empty(max(1, min(longest, POSITIONS_MAX)), dtype=torch.int64, device=lane.device)
    made = Prepared(version, puts, scratch, sums)
    made.switch = layers(made, go_on)
    lane.wait()
    return made


def local_puts(memories: Mapping[str, tuple[int, Memory]], writes: Writes, lane: Lane) -> Iterator[Put]:
    """Turn what a rank has staged, by its own tensors, into puts. memories: key and memory by name."""
    for name, (indices, values) in writes.items():
        key, memory = memories[name]
        positions = None if indices is None else lane.places(indices, memory.flat.numel())
        bits = integers(values)
        yield Put(key, memory.flat, positions, lane.pinned(bits) if indices is None else lane.up(bits))


def checkpoint_puts(placement: Placement, writes: Writes, lane: Lane) -> Iterator[Put]:
    """Turn writes by the checkpoint's names, which were checked, into puts of this rank."""
    for name, write in writes.items():
        for piece in placement.pieces[name]:
            flat = placement.memories[piece.memory].flat
            yield from _piece_puts(piece, flat, write, lane)


def _piece_puts(piece: Piece, flat: torch.Tensor, write: Write, lane: Lane) -> Iterator[Put]:
    indices, values = write
    bits = integers(values)
    if indices is None:
        target = piece.target(flat)
        source = piece.source(bits)
        host = lane.room(source.numel(), source.dtype).view(source.shape).copy_(source)
        # from the host into a view with gaps, torch would take memory on the device at the time of the write
        yield Put(piece.memory, target, None, host if target.is_contiguous() else host.to(lane.device))
        return
    for first in range(0, len(values), POSITIONS_MAX):
        part = slice(first, first + POSITIONS_MAX)
        inside, targets = piece.targets(torch.from_numpy(indices[part]))
        if bool(inside.any()):
            places = lane.places(targets[inside].numpy(), flat.numel())
            yield Put(piece.memory, flat, places, lane.up(bits[part][inside]))
