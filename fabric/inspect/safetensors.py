"""Reads and writes checkpoint files in the safetensors format as stored bits.

The format is a length, a JSON header and the raw bytes (github.com/huggingface/safetensors, "Format"). Files are read
here, mapped and not copied, and written, because its own library gives numpy no bfloat16.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import operator
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from ..contract.errors import FabricError, InputError, LayoutMismatch
from ..contract.text import DAMAGED
from ..contract.wire import dump_json, json_fault
from ..format.codec import Bits
from ..format.layout import Layout, TensorSpec

INDEX = "model.safetensors.index.json"  # which file has which tensor, where there are several
FACTS = "__metadata__"  # of a file's header: texts by name, which are no tensors
LENGTH_BYTES = 8
HEADER_BYTES_MAX = 100 << 20  # the format's own limit
NAMES = {
    "float64": "F64",
    "float32": "F32",
    "bfloat16": "BF16",
    "float16": "F16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
DTYPES = {theirs: ours for ours, theirs in NAMES.items()}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a file. dtype: the format's name."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    _bytes: mmap.mmap
    _begin: int
    _length: int

    @property
    def spec(self) -> TensorSpec:
        """Its name, dtype and shape.

        Raises:
            LayoutMismatch: it is of a dtype that is not published.
        """
        return TensorSpec(self.name, DTYPES.get(self.dtype, self.dtype), self.shape)

    def bits(self) -> Bits:
        """Return the tensor's stored bits, flat, read only, mapped.

        Raises:
            InputError: it has not as many bytes as its shape says. LayoutMismatch: as `spec`.
        """
        spec = self.spec
        if self._length != spec.byte_count or self._begin + self._length > len(self._bytes):
            raise InputError(f"{self.file}: tensor {self.name!r} is cut off. {DAMAGED}", path=str(self.file))
        return np.frombuffer(self._bytes, spec.bits_dtype, spec.element_count, self._begin)


@dataclass(frozen=True, slots=True)
class Index:
    """The index of a directory. metadata: what it says of all files, plain values. weight_map: tensor → file's name."""

    metadata: dict[str, Any]
    weight_map: dict[str, str]


def open_checkpoint(path: Path) -> dict[str, StoredTensor]:
    """Open the tensors of a .safetensors file, or of a directory of them (those its index names, if it has one).

    Raises:
        InputError: there is no such file, it is of another format, an index names what lies elsewhere, or a tensor is
            in two of them.
    """
    found: dict[str, StoredTensor] = {}
    for file in _files(path):
        for tensor in open_file(file)[0]:
            other = found.setdefault(tensor.name, tensor)
            if other is not tensor:
                raise InputError(f"tensor {tensor.name!r} is in {other.file} and in {file}: leave one of them out")
    return found


def read_index(directory: Path) -> Index | None:
    """Read the index of a directory; None if it has none.

    Raises:
        InputError: it is no index, or larger than a file's header may be.
    """
    path = directory / INDEX
    if not path.is_file():
        return None
    try:
        if path.stat().st_size > HEADER_BYTES_MAX:
            raise ValueError(f"it is larger than {HEADER_BYTES_MAX:,} bytes")
        found = _json_of(path.read_bytes())
        if not isinstance(found, dict) or not isinstance(found.get("weight_map"), dict):
            raise ValueError("it has no weight_map, which says where each tensor is")
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}", path=str(path)) from error
    except ValueError as error:
        raise InputError(f"{path} cannot be read: {error}. {DAMAGED}", path=str(path)) from error
    facts = found.get("metadata")
    files = {str(name): str(file) for name, file in found["weight_map"].items()}
    return Index(facts if isinstance(facts, dict) else {}, files)


def _json_of(data: bytes) -> Any:
    """Raises ValueError: it is no JSON; says where."""
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"not JSON: {json_fault(error)}") from error


def damage_in(path: Path) -> str:
    """Say which file of a checkpoint is damaged, and how; empty: none is found to be. For what a library refuses."""
    try:
        for tensor in open_checkpoint(path).values():
            with contextlib.suppress(LayoutMismatch):  # of a dtype that is not published
                tensor.bits()
    except FabricError as error:
        return error.message
    return ""


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    index = read_index(path)
    if index is not None:
        names = sorted(set(index.weight_map.values()))
        for name in names:
            if Path(name).name != name:
                raise InputError(f"{path}: its {INDEX} names {name!r:.120}, which is no file of that directory")
            if not (path / name).is_file():
                raise InputError(f"{path} has no {name}, which its {INDEX} names: the checkpoint is not complete")
        return [path / name for name in names]
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise InputError(f"no *.safetensors in {path}: give a checkpoint's directory, or one file of it")
    return files


def open_file(file: Path) -> tuple[list[StoredTensor], dict[str, Any]]:
    """Open one file: its tensors, and what its header says besides (`__metadata__`).

    Raises:
        InputError: there is no such file, or it is of another format.
    """
    try:
        with file.open("rb") as opened:
            if not os.fstat(opened.fileno()).st_size:
                raise ValueError("it is empty")
            mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        length = int.from_bytes(mapped[:LENGTH_BYTES], "little")
        if length > min(len(mapped), HEADER_BYTES_MAX):
            raise ValueError("its header is longer than the file")
        if not isinstance(header := _json_of(mapped[LENGTH_BYTES : LENGTH_BYTES + length]), dict):
            raise ValueError("its header is no JSON object")
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror}", path=str(file)) from error
    except ValueError as error:
        raise InputError(f"{file} cannot be read as safetensors: {error}. {DAMAGED}", path=str(file)) from error
    start = LENGTH_BYTES + length
    facts = header.pop(FACTS, None)
    return [_tensor(file, mapped, start, *item) for item in header.items()], facts if isinstance(facts, dict) else {}


def _tensor(file: Path, mapped: mmap.mmap, start: int, name: str, entry: Any) -> StoredTensor:
    try:
        dtype, shape = str(entry["dtype"]), tuple(map(operator.index, entry["shape"]))
        begin, end = map(operator.index, entry["data_offsets"])
        if not 0 <= begin <= end or math.prod(shape) < 0:
            raise ValueError("it lies nowhere")
    except (TypeError, KeyError, ValueError) as error:
        raise InputError(f"{file}: the entry of tensor {name!r} cannot be read. {DAMAGED}", path=str(file)) from error
    return StoredTensor(name, dtype, shape, file, mapped, start + begin, end - begin)


def save_bits(path: Path, layout: Layout, bits: Mapping[str, Bits], *, facts: Mapping[str, str] | None = None) -> None:
    """Write a file of every tensor of `layout`. bits: flat arrays of stored bits by name. facts: texts beside them."""
    header: dict[str, Any] = {FACTS: {"format": "pt"} if facts is None else dict(facts)}
    end = 0
    for spec in layout.tensors:
        begin, end = end, end + spec.byte_count
        header[spec.name] = {"dtype": NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": [begin, end]}
    text = dump_json(header)
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for spec in layout.tensors:
            file.write(bits[spec.name].data)
