"""Checkpoint files in the safetensors format as stored bits, to compare published weights with.

The format is a length, a JSON header and the raw bytes. It is read here, mapped and not copied, because its own library
gives numpy no bfloat16.
"""

from __future__ import annotations

import asyncio
import math
import mmap
import operator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..fabric.errors import InputError
from ..fabric.ports_weights import WeightStore
from ..fabric.weights.chain import fetch_bits
from ..fabric.weights.codec import Bits
from ..fabric.weights.diff import TensorDiff, diff_tensor
from ..fabric.weights.layout import Layout, TensorSpec
from ..fabric.wire import load_json
from ..workers.engines.vllm.checkpoint import NAMES

LENGTH_BYTES = 8
HEADER_BYTES_MAX = 100 << 20  # the format's own limit


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
    """The tensors of `layout` in a .safetensors file, or in all those of a directory, and the names of others there.

    Returns:
        name → flat stored bits, read only; tensors that are not there are left out.

    Raises:
        InputError: there is no such file, it is of another format, or a tensor has another dtype or shape.
    """
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files:
        raise InputError(f"no *.safetensors in {path}: give a checkpoint's directory, or one file of it")
    specs = {spec.name: spec for spec in layout.tensors}
    found: dict[str, Bits] = {}
    others: list[str] = []
    for file in files:
        mapped, entries, start = _open(file)
        others += [name for name in entries if name not in specs]
        for name in entries.keys() & specs.keys():
            found[name] = _bits(file, mapped, start, specs[name], entries[name])
    return found, sorted(others)


def _open(file: Path) -> tuple[mmap.mmap, dict[str, Any], int]:
    """The file's bytes, its entries, and where the tensors begin."""
    try:
        with file.open("rb") as opened:
            mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        length = int.from_bytes(mapped[:LENGTH_BYTES], "little")
        if length > min(len(mapped), HEADER_BYTES_MAX):
            raise ValueError("its header is longer than the file")
        header = load_json(mapped[LENGTH_BYTES : LENGTH_BYTES + length])
        if not isinstance(header, dict):
            raise ValueError("its header is no JSON object")
    except (OSError, ValueError) as error:
        raise InputError(f"{file} cannot be read as safetensors: {error}", path=str(file)) from error
    return mapped, {name: entry for name, entry in header.items() if name != "__metadata__"}, LENGTH_BYTES + length


def _bits(file: Path, mapped: mmap.mmap, start: int, spec: TensorSpec, entry: Any) -> Bits:
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        is_whole = 0 <= operator.index(begin) <= operator.index(end) <= len(mapped) - start
    except (TypeError, KeyError, ValueError) as error:
        raise InputError(f"{file}: the entry of tensor {spec.name!r} cannot be read", path=str(file)) from error
    if dtype != NAMES[spec.dtype] or shape != spec.shape:
        raise InputError(
            f"{file} has {spec.name!r} as {dtype}{list(shape)}, published is {spec}: only stored bits of one form can"
            " be compared; save the checkpoint in the published dtype",
            name=spec.name,
        )
    if not is_whole or end - begin != math.prod(shape) * spec.bits_dtype.itemsize:
        raise InputError(f"{file}: tensor {spec.name!r} is cut off", path=str(file))
    return np.frombuffer(mapped, spec.bits_dtype, spec.element_count, start + begin)
