"""Weights in shared memory, on their way into vLLM's processes and back.

- A mirror holds a whole model, one flat array of stored bits a tensor; every tensor-parallel rank reads or fills its
  part of it.
- A parcel holds one commit: for every tensor it changes, positions and values, or all values.
- Both are files that other processes of this machine map; a parcel may also travel as bytes to another machine.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from .....fabric.contract.errors import WeightError, WireError
from .....fabric.format.layout import Layout
from ...base import Bits, Writes
from .shared import SharedFile, aside, open_shared

ALIGNMENT = 64
HEAD = struct.Struct("<4sI")  # magic, bytes of the JSON after it
MAGIC = b"RFP1"
MIRROR, PARCEL = "rollfab-weights", "rollfab-parcel"  # names of their files


class Mirror:
    """Stored bits of a model in a mapped file.

    Attributes:
        bits: name → flat array of stored bits, writable.
    """

    def __init__(self, layout: Layout, path: Path, file: SharedFile | None = None) -> None:
        """Open the file of another process. Raises WeightError: it is no mirror's; OSError, ValueError: see mmap."""
        offsets, size = _offsets(layout)
        handle = open_shared(path, MIRROR, is_written=True)
        try:
            self._map = mmap.mmap(handle, max(size, 1))
        finally:
            os.close(handle)
        self._file = file
        self.path = path
        self.bits: dict[str, Bits] = {
            spec.name: np.frombuffer(self._map, spec.bits_dtype, spec.element_count, offsets[spec.name])
            for spec in layout.tensors
        }

    @classmethod
    def create(cls, layout: Layout) -> Mirror:
        """Make a new file of zeros.

        Raises:
            OSError: there is no room for it.
        """
        file = SharedFile(MIRROR, _offsets(layout)[1])
        return cls(layout, file.path, file)

    def take(self, writes: Writes) -> None:
        """Write a commit that was checked."""
        for name, (indices, values) in writes.items():
            self.bits[name][slice(None) if indices is None else indices] = values

    def close(self) -> None:
        """Let go of the file that `create` made; the arrays stay as long as somebody has them."""
        if self._file is not None:
            self._file.close()


def _offsets(layout: Layout) -> tuple[dict[str, int], int]:
    offsets, end = {}, 0
    for spec in layout.tensors:
        offsets[spec.name] = end
        end += -(-spec.byte_count // ALIGNMENT) * ALIGNMENT
    return offsets, end


def pack(writes: Writes) -> memoryview:
    """Pack the writes into a parcel. Its large copies leave other threads alone."""
    rows: list[list[Any]] = []
    parts: list[NDArray[Any]] = []
    end = 0
    for name, (indices, values) in writes.items():
        starts: list[int | None] = []
        for array in (indices, values):
            if array is None:
                starts.append(None)
                continue
            starts.append(end)
            parts.append(np.ascontiguousarray(array))
            end += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
        rows.append([name, values.dtype.str, len(values), *starts])
    head = orjson.dumps(rows)
    body_start = -(-(HEAD.size + len(head)) // ALIGNMENT) * ALIGNMENT
    parcel = np.zeros(body_start + end, dtype=np.uint8)
    HEAD.pack_into(parcel.data, 0, MAGIC, len(head))
    parcel[HEAD.size : HEAD.size + len(head)] = np.frombuffer(head, np.uint8)
    place = body_start
    for array in parts:
        parcel[place : place + array.nbytes] = array.view(np.uint8)
        place += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
    return parcel.data


@asynccontextmanager
async def posted(parcel: memoryview) -> AsyncIterator[str]:
    """Put a parcel into a file, and yield its path; the file is closed with the block.

    Raises:
        WeightError: there is no room for it.
    """
    size = len(parcel)
    try:
        file = await aside(size, SharedFile, PARCEL, size)
    except OSError as error:
        raise WeightError(f"no room in shared memory for {size:,} bytes of weights: {error}") from error
    try:
        await aside(size, file.write, parcel)
        yield str(file.path)
    finally:
        file.close()


def unpack(parcel: bytes | memoryview | mmap.mmap) -> dict[str, tuple[NDArray[np.int64] | None, Bits]]:
    """Read the writes of a parcel; arrays are views of it.

    Raises:
        WireError: it is none.
    """
    view = memoryview(parcel)
    try:
        magic, length = HEAD.unpack_from(view)
        if magic != MAGIC:
            raise WireError("these bytes are no parcel of weights")
        body_start = -(-(HEAD.size + length) // ALIGNMENT) * ALIGNMENT
        found = {}
        for name, dtype, count, indices_at, values_at in orjson.loads(view[HEAD.size : HEAD.size + length]):
            indices = None
            if indices_at is not None:
                indices = np.frombuffer(view, np.int64, count, body_start + indices_at)
            found[name] = indices, np.frombuffer(view, np.dtype(dtype), count, body_start + values_at)
        return found
    except (struct.error, ValueError, TypeError) as error:
        raise WireError(f"these bytes are no parcel of weights: {error}") from error
