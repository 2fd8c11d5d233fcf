"""Checkpoint files in the safetensors format, read as stored bits.

Mapped, not copied; numpy has no bfloat16, so the format is read here: a length, a JSON header, the raw bytes.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from ....fabric.errors import EngineError
from ....fabric.weights.layout import Layout
from ..base import Bits
from .checkpoint import NAMES


class CheckpointFiles:
    """The files of one model; a context manager, because arrays given out are views of its maps."""

    def __init__(self, paths: Sequence[Path], layout: Layout) -> None:
        """Raises EngineError when a file is none of this format."""
        self._specs = {spec.name: spec for spec in layout.tensors}
        self._places: dict[str, tuple[Path, mmap.mmap, int, dict[str, Any]]] = {}
        for path in paths:
            self._open(path)

    def _open(self, path: Path) -> None:
        try:
            with path.open("rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            length = int.from_bytes(mapped[:8], "little")
            header = orjson.loads(mapped[8 : 8 + length])
        except (OSError, ValueError) as error:
            raise EngineError(f"checkpoint file {path} cannot be read: {error}", path=str(path)) from error
        for name, entry in header.items():
            if name != "__metadata__":
                self._places[name] = path, mapped, 8 + length, entry

    def __enter__(self) -> CheckpointFiles:
        return self

    def __exit__(self, *exception: object) -> None:
        for _, mapped, _, _ in self._places.values():
            with contextlib.suppress(BufferError):  # somebody still has an array of it: it ends with that
                mapped.close()

    def bits(self, name: str) -> Bits:
        """The stored bits of a tensor of the layout, flat, read only.

        Raises:
            EngineError: the files have no such tensor, or in another form.
        """
        spec = self._specs[name]
        if name not in self._places:
            raise EngineError(f"the checkpoint files have no tensor {name!r}", name=name)
        path, mapped, start, entry = self._places[name]
        if entry["dtype"] != NAMES[spec.dtype] or tuple(entry["shape"]) != spec.shape:
            raise EngineError(f"{path} has {name!r} as {entry['dtype']}{entry['shape']}, expected {spec}", name=name)
        return np.frombuffer(mapped, spec.bits_dtype, spec.element_count, start + entry["data_offsets"][0])
