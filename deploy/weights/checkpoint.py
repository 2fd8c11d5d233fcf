"""Published weights compared with a checkpoint on disk, bit by bit."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from ...fabric.contract.errors import InputError
from ...fabric.format.codec import Bits
from ...fabric.format.layout import Layout
from ...fabric.inspect.diff import TensorDiff, diff_tensor
from ...fabric.inspect.safetensors import NAMES, open_checkpoint
from ...fabric.ports.weights import WeightStore
from ...fabric.versions.reader import fetch_bits


@dataclass(frozen=True, slots=True)
class CheckpointDiff:
    """tensors: those on both sides. missing: names that only the run has. unknown: names that only the files have."""

    tensors: list[TensorDiff]
    missing: list[str]
    unknown: list[str]


async def diff_checkpoint(store: WeightStore, run_id: str, version: int, path: Path) -> CheckpointDiff:
    """Compare a version with a checkpoint on disk, bit by bit.

    Raises:
        InputError: as read_checkpoint, or no tensor is on both sides.
        VersionUnknown, ChainBroken, DigestMismatch: as fetch_bits.
    """
    manifest, bits = await fetch_bits(store, run_id, version)
    specs = manifest.tensors.tensors
    there, unknown = await asyncio.to_thread(read_checkpoint, path, manifest.tensors)
    both = [spec for spec in specs if spec.name in there]
    if not both:
        has = ", ".join(unknown[:3]) or "nothing"
        raise InputError(
            f"{path} has none of the tensors of run {run_id!r}: it has {has}, published is {specs[0].name}, …; give a"
            " checkpoint of that model",
            path=str(path),
        )
    rows = [await asyncio.to_thread(diff_tensor, spec, bits[spec.name], there[spec.name]) for spec in both]
    return CheckpointDiff(rows, [spec.name for spec in specs if spec.name not in there], unknown)


def read_checkpoint(path: Path, layout: Layout) -> tuple[dict[str, Bits], list[str]]:
    """The tensors of `layout` in a .safetensors file, or in a directory of them, and the names of others there.

    Returns:
        name → flat stored bits, read only; tensors that are not there are left out.

    Raises:
        InputError: as open_checkpoint, or a tensor has another dtype or shape.
    """
    specs = {spec.name: spec for spec in layout.tensors}
    found: dict[str, Bits] = {}
    others: list[str] = []
    for name, tensor in open_checkpoint(path).items():
        spec = specs.get(name)
        if spec is None:
            others.append(name)
        elif (tensor.dtype, tensor.shape) != (NAMES[spec.dtype], spec.shape):
            raise InputError(
                f"{tensor.file} has {name!r} as {tensor.dtype}{list(tensor.shape)}, published is {spec}: only stored"
                " bits of one form can be compared; save the checkpoint in the published dtype",
                name=name,
            )
        else:
            found[name] = tensor.bits()
    return found, sorted(others)
