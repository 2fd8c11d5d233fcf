"""Moves data between host memory and one rank's device, beside what the device computes, and reads live weights so.

- On a GPU: a stream of its own, and pinned memory, so that copies hold up neither the engine's stream nor its thread.
- On a CPU the same calls move nothing, or plain memory. Only there has this code been run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from .....fabric.format.kernels.places import load_torch
from .....fabric.versions.rank_parts import ShardSlice
from ...base import Bits

POSITIONS_MAX = 8 << 20  # at a time: bounds what is on the device only while they are worked with
INT32_MAX = 2**31 - 1
SUM_ELEMENTS = 4 << 20  # at a time: 200 MB of temporaries, and few launches beside the time that they take


class Lane:
    """The lane to one device. stream: by default a new one where there are streams."""

    def __init__(self, device: torch.device, stream: Any = None) -> None:
        self.device = device
        is_cuda = stream is None and device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if is_cuda else stream  # type: ignore[no-untyped-call]

    @property
    def pins(self) -> bool:
        """True if host memory is pinned."""
        return self._stream is not None

    def aside(self) -> AbstractContextManager[Any]:
        """Return a context in which whatever is asked of the device goes beside the engine's own work."""
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def wait(self) -> None:
        """Wait until all of that is done."""
        if self._stream is not None:
            self._stream.synchronize()

    def room(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return new host memory, with which copies to and from the device need no thread to wait."""
        return torch.empty(count, dtype=dtype, pin_memory=self.pins)

    def pinned(self, host: torch.Tensor) -> torch.Tensor:
        """Return the same values in such memory; the tensor itself where nothing is pinned."""
        return self.room(host.numel(), host.dtype).copy_(host.reshape(-1)) if self.pins else host

    def up(self, host: torch.Tensor) -> torch.Tensor:
        """Return the values on the device; the tensor itself where that is the host."""
        return self.pinned(host).to(self.device, non_blocking=True)

    def down(self, found: torch.Tensor) -> torch.Tensor:
        """Return values of the device in host memory, complete; the tensor itself where it is there."""
        if found.device.type == "cpu":
            return found
        host = self.room(found.numel(), found.dtype)
        host.copy_(found, non_blocking=True)
        self.wait()
        return host

    def places(self, positions: NDArray[np.int64], element_count: int) -> torch.Tensor:
        """Return positions in a tensor of `element_count` elements on the device, as narrow as they may be."""
        return self.up(torch.from_numpy(positions.astype(np.int32 if element_count <= INT32_MAX else np.int64)))


class LiveBits:
    """Stored bits of one tensor of a rank, which a stage reads (stage.Live): what it asks for comes to the host.

    Args:
        flat: the live memory, as integers.
        dtype: of the stored bits.
        go_on: called before anything is read; raises to end the reading.
    """

    def __init__(self, flat: torch.Tensor, dtype: np.dtype[Any], lane: Lane, go_on: Callable[[], None]) -> None:
        self._flat, self._dtype, self._lane, self._go_on = flat, dtype, lane, go_on

    def __getitem__(self, where: Any, /) -> Bits:
        self._go_on()
        if isinstance(where, slice):
            return self._array(self._flat[where])
        found = np.empty(len(where), dtype=self._dtype)
        for first in range(0, len(where), POSITIONS_MAX):
            part = slice(first, first + POSITIONS_MAX)
            places = self._lane.places(where[part], self._flat.numel())
            found[part] = self._array(torch.index_select(self._flat, 0, places))
        return found

    def _array(self, found: torch.Tensor) -> Bits:
        array: Bits = self._lane.down(found).numpy()
        return array.view(self._dtype)


class DeviceBits(LiveBits):
    """Stored bits of a tensor on a device: nothing of it comes to the host to be summed (stage.LiveElsewhere)."""

    def slice_sum(self, key: int, one: ShardSlice) -> int:
        total = 0
        for piece in one.pieces(SUM_ELEMENTS):
            self._go_on()
            region = piece.region
            runs = self._flat.as_strided((region.run_count, region.run), (piece.stride, piece.step), piece.offset)
            total += load_torch().sum_runs(key, region.start, region.stride, runs)
        return total
