"""Writes a version of a run to disk as others read it: a checkpoint in safetensors, or a delta from another version.

- Each is a directory `weight_v000017`, the name by which slime, miles and Stitch look for a version; see
  fabric/inspect/disk_delta.py. transformers and engines load a full one by its index.
- A directory gets its name when all of it is written: until then it is `.weight_v000017.part`. None is written over.
- Memory: one state of the weights, and what differs.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ...fabric.contract.errors import InputError
from ...fabric.format.codec import Bits
from ...fabric.format.layout import Layout, TensorSpec
from ...fabric.inspect.diff import fetch_change
from ...fabric.inspect.disk_delta import Form, save_delta, save_index, version_text
from ...fabric.inspect.safetensors import save_bits
from ...fabric.ports.weights import WeightStore
from ...fabric.versions.commit import Write
from ...fabric.versions.reader import fetch_bits

FILE_BYTES_MAX = 5 << 30  # of a full version's file; a larger tensor has one for itself
WEIGHT_SUFFIXES = {".bin", ".gguf", ".h5", ".msgpack", ".pt", ".pth", ".safetensors"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What was written. tensor_count: tensors in the files. base_version: None where it is full."""

    path: str
    version: int
    base_version: int | None
    tensor_count: int
    file_bytes: int


async def export_full(
    store: WeightStore, run_id: str, version: int, directory: Path, files_from: Path | None = None
) -> Exported:
    """Write `directory/weight_v…`, a checkpoint of a version.

    Args:
        files_from: a checkpoint whose other files (config, tokenizer) are copied beside the weights.

    Raises:
        InputError: the directory is there, or cannot be written.
        VersionUnknown, ChainBroken, DigestMismatch: as fetch_bits.
    """
    with _taking_shape(directory, version) as (path, part):
        manifest, bits = await fetch_bits(store, run_id, version)
        await asyncio.to_thread(_save_full, part, version, manifest.tensors, bits, files_from)
        return _exported(path, part, version, None, len(bits))


async def export_delta(store: WeightStore, run_id: str, form: Form, directory: Path) -> Exported:
    """Write `directory/weight_v…`, the change from form.base_version to form.version.

    Raises:
        InputError: the directory is there, or cannot be written; or as save_delta. ConfigError: as save_delta.
        VersionUnknown, ChainBroken, DigestMismatch: as fetch_change.
    """
    with _taking_shape(directory, form.version) as (path, part):
        layout, bits, writes = await fetch_change(store, run_id, form.base_version, form.version)
        names = await asyncio.to_thread(save_delta, part, _changes(layout, bits, writes), form)
        return _exported(path, part, form.version, form.base_version, len(names))


@contextmanager
def _taking_shape(directory: Path, version: int) -> Iterator[tuple[Path, Path]]:
    """Give the path that a version's directory will have, and an empty directory, which then gets that name."""
    path = directory / f"weight_v{version_text(version)}"
    part = directory / f".{path.name}.part"
    if path.exists():
        raise InputError(f"{path} is there already: give another directory, or remove it", path=str(path))
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if part.exists():
            raise InputError(
                f"{part} is there already: another export writes it, or one was killed; then remove it", path=str(part)
            )
        part.mkdir()
        try:
            yield path, part
            part.rename(path)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error}", path=str(path)) from error


def _exported(path: Path, part: Path, version: int, base_version: int | None, tensor_count: int) -> Exported:
    file_bytes = sum(file.stat().st_size for file in part.iterdir())
    return Exported(
        path=str(path),
        version=version,
        base_version=base_version,
        tensor_count=tensor_count,
        file_bytes=file_bytes,
    )


def _changes(
    layout: Layout, bits: Mapping[str, Bits], writes: Mapping[str, Write]
) -> Iterator[tuple[TensorSpec, Bits, Bits]]:
    for spec in layout.tensors:
        if spec.name not in writes:
            continue
        positions, values = writes[spec.name]
        new = values
        if positions is not None:
            new = bits[spec.name].copy()
            new[positions] = values
        yield spec, bits[spec.name], new


def _save_full(part: Path, version: int, layout: Layout, bits: Mapping[str, Bits], files_from: Path | None) -> None:
    groups: list[list[TensorSpec]] = []
    room = 0
    for spec in layout.tensors:
        if not groups or spec.byte_count > room:
            groups.append([])
            room = FILE_BYTES_MAX
        groups[-1].append(spec)
        room -= spec.byte_count
    weight_map = {}
    for number, group in enumerate(groups, start=1):
        file = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        save_bits(part / file, Layout(tuple(group)), bits)
        weight_map.update({spec.name: file for spec in group})
    if files_from is not None:
        for other in files_from.iterdir():
            if other.is_file() and other.suffix not in WEIGHT_SUFFIXES and not other.name.endswith(".index.json"):
                shutil.copyfile(other, part / other.name)
    save_index(part, {"version": version_text(version), "total_size": layout.byte_count}, weight_map)
