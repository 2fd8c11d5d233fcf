"""Versions of weights as slime, miles and Stitch keep them on a shared disk: reads and writes their deltas.

- A version is a directory, `weight_v000007`. A full one is an ordinary checkpoint. A delta holds the changed tensors
  alone, and how they change from its base version; tensors are bytes to it, without shapes and dtypes.
- Its index (`model.safetensors.index.json`) has the metadata version and base_version (six digits or more),
  delta_encoding, compression_format ("zstd") and checksum_format, and a weight_map: tensor → file.
- Each tensor of its files is uint8 (N,): one zstd frame. A file's `__metadata__` has each tensor's checksum: hex, of
  all its bytes after the change.
- "xor": the frame is the new bytes xor the old ones, of the whole tensor. "overwrite": the count C of changed bytes as
  little-endian uint32, their C ascending positions in the tensor likewise, their C new values.
- Read here is only what is whole: each file that the index names and no other, each tensor where the index says. What
  a frame unpacks to is bounded by its tensor's size, and every changed tensor must have its checksum.

Sources: github.com/THUDM/slime at 624b824a898a (slime/backends/megatron_utils/update_weight/
update_weight_from_disk_delta.py and slime/utils/disk_delta.py write, docker/patch/latest/sglang-pull_weights.patch
reads); github.com/radixark/miles at 31f1ca961a94 (miles/backends/megatron_utils/update_weight/
update_weight_from_distributed/delta.py and miles/utils/disk_delta.py); github.com/modal-projects/stitch at a250dc305f69
(src/stitch/types.py).
"""

from __future__ import annotations

import importlib
import os
import zlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
import zstandard
from numpy.typing import NDArray

from ..contract.errors import ConfigError, DigestMismatch, FabricError, InputError, LayoutMismatch, VersionConflict
from ..contract.text import did_you_mean
from ..contract.wire import dump_json
from ..format.codec import Bits
from ..format.kernels.places import on_host
from ..format.kernels.protocol import Flat
from ..format.layout import Layout, TensorSpec
from ..versions.snapshot import THREAD_COUNT_MAX, Check, no_check
from .safetensors import INDEX, StoredTensor, open_file, read_index, save_bits

XOR, OVERWRITE = ENCODINGS = ("xor", "overwrite")
XXH3 = "xxh3-128"  # their default
ZSTD = "zstd"
ZSTD_LEVEL = 1  # their own: a higher one takes longer and saves little of changes
FRAME = b"\x28\xb5\x2f\xfd"  # RFC 8878, 3.1.1: every zstd frame begins so
POSITION = np.dtype("<u4")  # of a byte, and a count of them
POSITION_MAX = (1 << 32) - 1  # so a count of all bytes fits too
VERSION_DIGITS = 6
DIGITS_MAX = 16
FILE_BYTES_MAX = 4 << 30  # a file is closed when it reaches this: changes are in memory until it is written
NAMES_SHOWN = 3
VALUE_SHOWN = 40  # characters of what a file says, in an error
AGAIN = "it is damaged; have the delta written again"

Digest = Callable[[memoryview], str]
CHECKSUMS: dict[str, Digest] = {
    XXH3: xxhash.xxh3_128_hexdigest,
    "adler32": lambda data: f"{zlib.adler32(data):08x}",
    "blake3": lambda data: str(importlib.import_module("blake3").blake3(data).hexdigest()),
}


def digest_of(name: str) -> Digest:
    """Return the function of a checksum format.

    Raises:
        InputError: there is no such format. ConfigError: its package is not installed.
    """
    if name not in CHECKSUMS:
        raise InputError(f"checksum format {_shown(name)} is unknown: use one of {', '.join(CHECKSUMS)}")
    if name == "blake3":
        try:
            importlib.import_module("blake3")
        except ImportError:
            raise ConfigError("checksums of the format blake3 need its package: pip install blake3") from None
    return CHECKSUMS[name]


@dataclass(frozen=True, slots=True)
class DiskDelta:
    """A delta that was found whole. tensors: their frames, by name. checksums: of the tensors after the change."""

    path: Path
    version: int
    base_version: int
    encoding: str
    digest: Digest
    tensors: dict[str, StoredTensor]
    checksums: dict[str, str]


def open_delta(path: Path) -> DiskDelta | None:
    """Open the delta in a directory; None if there is none, or it is an ordinary checkpoint. No frame is unpacked.

    Raises:
        InputError: it is not whole, or of another form than this reads. ConfigError: as `digest_of`.
    """
    index = read_index(path)
    if index is None or "delta_encoding" not in index.metadata:
        return None
    facts = index.metadata
    for key, readable in (("delta_encoding", ENCODINGS), ("compression_format", (ZSTD,))):
        if facts.get(key) not in readable:
            known = " or ".join(map(repr, readable))
            raise InputError(
                f"{path / INDEX}: {key} is {_shown(facts.get(key))}, and {known} is read: have the trainer write that",
                path=str(path),
            )
    version, base = (_number(path, facts, key) for key in ("version", "base_version"))
    if base >= version:
        raise InputError(f"{path / INDEX}: version {version} does not come after its base_version {base}: {AGAIN}")
    tensors, checksums = _tensors(path, index.weight_map)
    try:
        digest = digest_of(str(facts.get("checksum_format")))
    except FabricError as error:
        raise type(error)(f"{path / INDEX}: {error.message}", path=str(path)) from None
    return DiskDelta(path, version, base, str(facts["delta_encoding"]), digest, tensors, checksums)


def holds_changes(tensors: Mapping[str, StoredTensor]) -> bool:
    """Whether files are those of a delta: every tensor is a frame, which no model's are."""
    return bool(tensors) and all(_is_frame(tensor) for tensor in tensors.values())


def _is_frame(tensor: StoredTensor) -> bool:
    return tensor.dtype == "U8" and len(tensor.shape) == 1 and tensor.bits()[: len(FRAME)].tobytes() == FRAME


def _shown(value: object) -> str:
    return repr(value)[:VALUE_SHOWN]


def _number(path: Path, facts: Mapping[str, Any], key: str) -> int:
    text = str(facts.get(key))
    if not (text.isascii() and text.isdigit() and len(text) <= DIGITS_MAX):
        raise InputError(
            f"{path / INDEX}: {key} is {_shown(facts.get(key))}, and not a whole number: {AGAIN}", path=str(path)
        )
    return int(text)


def _tensors(path: Path, weight_map: Mapping[str, str]) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Open all files of a delta, which must be those of its index."""
    named, there = set(weight_map.values()), {file.name for file in path.glob("*.safetensors")}
    for file in sorted(named - there):
        raise InputError(
            f"{path} has no {file!r}, which its {INDEX} names: the delta is not complete; wait until its trainer has"
            " written all of it, or have it written again",
            path=str(path),
        )
    for file in sorted(there - named):
        raise InputError(
            f"{path} has {file!r}, which its {INDEX} does not name, so it may be of another delta: remove one of them",
            path=str(path),
        )
    tensors: dict[str, StoredTensor] = {}
    checksums: dict[str, str] = {}
    for file in sorted(named):
        found, facts = open_file(path / file)
        for tensor in found:
            if weight_map.get(tensor.name) != file:
                raise InputError(f"{path / file} has tensor {tensor.name!r}, and the {INDEX} says otherwise: {AGAIN}")
            if not _is_frame(tensor):
                raise InputError(f"{path / file}: tensor {tensor.name!r} is not a zstd frame in uint8 [N]: {AGAIN}")
            if not isinstance(facts.get(tensor.name), str):
                raise InputError(f"{path / file} has no checksum of tensor {tensor.name!r}: {AGAIN}")
            tensors[tensor.name], checksums[tensor.name] = tensor, facts[tensor.name].lower()
    for name in sorted(weight_map.keys() - tensors.keys()):
        raise InputError(f"{path / weight_map[name]} has no tensor {name!r}, and the {INDEX} says so: {AGAIN}")
    return tensors, checksums


# ---------------------------------------------------------------- applying


def check_base(delta: DiskDelta, run_id: str, version: int, held: int) -> None:
    """Require that a delta is `version`, and changes the version that a run holds.

    Raises:
        InputError: it is another version. VersionConflict: the run holds another one (-1: none).
    """
    if version != delta.version:
        raise InputError(
            f"{delta.path} is version {delta.version}, and was to be published as {version}: give version="
            f"{delta.version}, for the trainer's next delta is a change of that",
            version=delta.version,
        )
    if held == delta.base_version:
        return
    if held < delta.base_version:
        first = "the checkpoint that its trainer began with, or a full version," if held < 0 else "those in between"
        step = f"publish {first} first, up to version {delta.base_version}"
    else:
        step = f"publish those whose base_version is {held} or above"
    has = f"holds version {held}" if held >= 0 else "has no weights yet"
    raise VersionConflict(
        f"{delta.path} is a change of version {delta.base_version}, and run {run_id!r} {has}: {step}",
        run_id=run_id,
        version=version,
        head_version=held,
    )


def new_bits(delta: DiskDelta, layout: Layout, base: Mapping[str, Flat], check: Check = no_check) -> dict[str, Bits]:
    """Return the changed tensors, as flat stored bits by name, all with their checksums; `base` is only read.

    Args:
        layout, base: the weights of the delta's base version.
        check: called between two tensors; its error ends the work.

    Raises:
        LayoutMismatch: it changes tensors that the layout lacks, or that are of another size there.
        InputError: a frame is damaged. DigestMismatch: a tensor's checksum is another one; the text says what to do.
    """
    specs = {spec.name: spec for spec in layout.tensors}
    unknown = sorted(delta.tensors.keys() - specs.keys())
    if unknown:
        raise LayoutMismatch(
            f"{delta.path} changes {len(unknown)} tensors that the run does not have"
            f" ({', '.join(unknown[:NAMES_SHOWN])}): its base is of another model; publish the checkpoint that its"
            f" trainer began with as version {delta.base_version}",
            unknown=unknown,
        )

    def work(name: str) -> tuple[str, Bits]:
        check()
        return name, _new(delta, specs[name], on_host(base[name]))

    pool = ThreadPoolExecutor(min(THREAD_COUNT_MAX, os.cpu_count() or 1))
    try:
        return dict(pool.map(work, delta.tensors))
    finally:
        pool.shutdown(cancel_futures=True)


def _new(delta: DiskDelta, spec: TensorSpec, old: Bits) -> Bits:
    before = old.view(np.uint8)
    change = _Change(delta.tensors[spec.name], spec)
    after = change.xored(before) if delta.encoding == XOR else change.overwritten(before)
    found, promised = delta.digest(after.data), delta.checksums[spec.name]
    if found != promised:
        raise DigestMismatch(
            f"{change.where} has checksum {found} after the change, and {promised} is promised: the file is damaged, or"
            f" the run's version {delta.base_version} is not the trainer's. Compare it with the trainer's checkpoint"
            f" (`rollfab weights diff {delta.base_version} --checkpoint DIRECTORY`), or have the delta written"
            " again",
            name=spec.name,
        )
    return after.view(spec.bits_dtype)


@dataclass(frozen=True, slots=True)
class _Change:
    """The change of one tensor."""

    frame: StoredTensor
    spec: TensorSpec

    @property
    def where(self) -> str:
        return f"{self.frame.file}: tensor {self.spec.name!r}"

    def xored(self, before: NDArray[np.uint8]) -> NDArray[np.uint8]:
        change = self._unpacked(len(before))
        if len(change) != len(before):
            raise self._other_size(f"is of {len(change):,} bytes")
        return np.bitwise_xor(before, change)

    def overwritten(self, before: NDArray[np.uint8]) -> NDArray[np.uint8]:
        width = POSITION.itemsize
        change = self._unpacked(width + (width + 1) * len(before))
        count = int(change[:width].view(POSITION)[0]) if len(change) >= width else -1
        if len(change) != width + (width + 1) * count:
            raise InputError(f"{self.where}: {len(change):,} bytes are no {count:,} positions and values: {AGAIN}")
        end = width * (1 + count)
        positions = change[width:end].view(POSITION)
        if count and int(positions.max()) >= len(before):
            raise self._other_size(f"reaches byte {int(positions.max()):,}")
        after = before.copy()
        after[positions] = change[end:]
        return after

    def _unpacked(self, limit: int) -> NDArray[np.uint8]:
        """Unpack the frame to at most `limit` bytes."""
        data = self.frame.bits().data
        try:
            promised = zstandard.frame_content_size(data)  # the library would allocate that; -1: the frame is silent
            if promised > limit or limit == 0:
                raise self._other_size(f"promises {promised:,} bytes")
            unpacked = zstandard.ZstdDecompressor().decompress(data, max_output_size=limit, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise InputError(
                f"{self.where} cannot be unpacked to the {limit:,} bytes that {self.spec} allows: {error}: {AGAIN}",
                name=self.spec.name,
            ) from error
        return np.frombuffer(unpacked, np.uint8)

    def _other_size(self, found: str) -> LayoutMismatch:
        return LayoutMismatch(
            f"{self.where}: the change {found}, and the run's {self.spec} has {self.spec.byte_count:,}: it has another"
            " shape or dtype in the trainer; create the run with the dtype of the trainer's checkpoint, and publish"
            " that first",
            name=self.spec.name,
        )


# ---------------------------------------------------------------- writing


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """How a delta is written.

    Raises:
        ConfigError: there is no such encoding or checksum, or the base is not below the version.
    """

    version: int
    base_version: int
    encoding: str = XOR
    checksum: str = XXH3

    def __post_init__(self) -> None:
        for what, given, known in (("encoding", self.encoding, ENCODINGS), ("checksum", self.checksum, CHECKSUMS)):
            if given not in known:
                raise ConfigError(f"there is no {what} {given!r} of deltas: {did_you_mean(given, known)}")
        if not 0 <= self.base_version < self.version:
            raise ConfigError(
                f"a delta to version {self.version} cannot begin at {self.base_version}: give an older version"
            )


def version_text(version: int) -> str:
    """The version as the format writes it: 000007."""
    return f"{version:0{VERSION_DIGITS}d}"


def save_index(directory: Path, facts: Mapping[str, Any], weight_map: Mapping[str, str]) -> None:
    """Write the index of a directory; last, for it says that the rest is there."""
    (directory / INDEX).write_bytes(dump_json({"metadata": dict(facts), "weight_map": dict(weight_map)}))


def save_delta(directory: Path, changes: Iterable[tuple[TensorSpec, Bits, Bits]], form: Form) -> list[str]:
    """Write a delta into an empty directory; return the names of the tensors that differ, which alone are in it.

    Args:
        changes: each tensor with its old and new flat stored bits, once.

    Raises:
        InputError: "overwrite" cannot count the bytes of a tensor. ConfigError: as `digest_of`.
    """
    digest, pack = digest_of(form.checksum), zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress
    weight_map: dict[str, str] = {}
    frames: dict[str, Bits] = {}
    checksums: dict[str, str] = {}
    file_count = byte_count = 0

    def close() -> None:
        nonlocal file_count, byte_count
        if frames:
            file_count, byte_count = file_count + 1, 0
            file = f"model-{file_count:05d}.safetensors"
            layout = Layout(tuple(TensorSpec(name, "uint8", (len(frame),)) for name, frame in frames.items()))
            save_bits(directory / file, layout, frames, facts=checksums)
            weight_map.update(dict.fromkeys(frames, file))
            frames.clear()
            checksums.clear()

    for spec, old, new in changes:
        before, after = old.view(np.uint8), new.view(np.uint8)
        if not np.array_equal(before, after):
            frames[spec.name] = np.frombuffer(pack(_change(spec, before, after, form.encoding).data), np.uint8)
            checksums[spec.name] = digest(after.data)
            byte_count += len(frames[spec.name])
        if byte_count >= FILE_BYTES_MAX:
            close()
    close()
    facts = {
        "version": version_text(form.version),
        "base_version": version_text(form.base_version),
        "delta_encoding": form.encoding,
        "compression_format": ZSTD,
        "checksum_format": form.checksum,
    }
    save_index(directory, facts, weight_map)
    return sorted(weight_map)


def _change(spec: TensorSpec, before: NDArray[np.uint8], after: NDArray[np.uint8], encoding: str) -> NDArray[np.uint8]:
    if encoding == XOR:
        return np.bitwise_xor(before, after)
    if len(after) > POSITION_MAX:
        raise InputError(
            f"tensor {spec} has {len(after):,} bytes, and 'overwrite' counts to {POSITION_MAX:,}: write it with 'xor'",
            name=spec.name,
        )
    changed = np.flatnonzero(before != after)
    head = np.array([len(changed)], POSITION)
    return np.concatenate([head.view(np.uint8), changed.astype(POSITION).view(np.uint8), after[changed]])
