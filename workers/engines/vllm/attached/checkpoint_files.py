"""The checkpoint files of one model, read as stored bits of a layout."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .....fabric.contract.errors import EngineError, InputError
from .....fabric.format.layout import Layout
from .....fabric.inspect.safetensors import NAMES, StoredTensor, open_checkpoint
from ...base import Bits


class CheckpointFiles:
    """The files of one model; a context manager, because what it gives out are views of its maps."""

    def __init__(self, paths: Sequence[Path], layout: Layout) -> None:
        """Raises EngineError when a file is none of this format."""
        self._specs = {spec.name: spec for spec in layout.tensors}
        self._tensors: dict[str, StoredTensor] = {}
        try:
            for path in paths:
                self._tensors |= open_checkpoint(path)
        except InputError as error:
            raise EngineError(f"checkpoint {error.message}", **error.facts) from error

    def __enter__(self) -> CheckpointFiles:
        return self

    def __exit__(self, *exception: object) -> None:
        self._tensors.clear()  # the maps end with the last array of them

    def bits(self, name: str) -> Bits:
        """The stored bits of a tensor of the layout, flat, read only.

        Raises:
            EngineError: the files have no such tensor, or in another form.
        """
        spec, tensor = self._specs[name], self._tensors.get(name)
        if tensor is None:
            raise EngineError(f"the checkpoint files have no tensor {name!r}", name=name)
        if (tensor.dtype, tensor.shape) != (NAMES[spec.dtype], spec.shape):
            raise EngineError(
                f"{tensor.file} has {name!r} as {tensor.dtype}{list(tensor.shape)}, expected {spec}", name=name
            )
        try:
            return tensor.bits()
        except InputError as error:
            raise EngineError(error.message, name=name) from error
