"""How slime, miles and Stitch write deltas, and how engines apply them: made from the format, with none of our code.

See rollfab/fabric/inspect/disk_delta.py for the format's sources. Tensors are their bytes, by name.
"""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
import zstandard
from safetensors.numpy import save_file

INDEX = "model.safetensors.index.json"


def checksum(name: str, data: bytes) -> str:
    return f"{zlib.adler32(data):08x}" if name == "adler32" else xxhash.xxh3_128(data).hexdigest()


def trainer_writes(
    directory: Path,
    old: dict[str, bytes],
    new: dict[str, bytes],
    version: int,
    *,
    encoding: str = "xor",
    sums: str = "xxh3-128",
    file_count: int = 2,
) -> Path:
    """What a trainer of several ranks leaves in `directory`, each rank's tensors in a file of its own."""
    path = directory / f"weight_v{version:06d}"
    path.mkdir(parents=True)
    changed = [name for name in new if new[name] != old[name]]
    weight_map = {}
    for rank in range(file_count):
        names = changed[rank::file_count]
        frames, checksums = {}, {}
        for name in names:
            packed = zstandard.ZstdCompressor(level=1).compress(difference(encoding, old[name], new[name]))
            frames[name] = np.frombuffer(packed, np.uint8)
            checksums[name] = checksum(sums, new[name])
        if names:
            file = f"model-{rank:05d}-of-{file_count:05d}.safetensors"
            save_file(frames, path / file, metadata=checksums)
            weight_map |= dict.fromkeys(names, file)
    facts = {
        "version": f"{version:06d}",
        "base_version": f"{version - 1:06d}",
        "delta_encoding": encoding,
        "compression_format": "zstd",
        "checksum_format": sums,
    }
    (path / INDEX).write_text(json.dumps({"metadata": facts, "weight_map": weight_map}))
    return path


def difference(encoding: str, old: bytes, new: bytes) -> bytes:
    if encoding == "xor":
        return bytes(left ^ right for left, right in zip(old, new, strict=True))
    places = [place for place, (left, right) in enumerate(zip(old, new, strict=True)) if left != right]
    return struct.pack(f"<I{len(places)}I", len(places), *places) + bytes(new[place] for place in places)


class Engine:
    """An engine's own copy of a checkpoint: one file, changed in place. applied: its version."""

    def __init__(self, checkpoint: Path, applied: int) -> None:
        self.blob, self.applied = bytearray(checkpoint.read_bytes()), applied

    def tensors(self) -> dict[str, bytes]:
        places = _places(self.blob)
        return {name: bytes(self.blob[begin:end]) for name, (begin, end) in places.items()}

    def pull(self, directory: Path) -> None:
        """Apply a delta. Raises AssertionError: it is of another base, or a checksum is wrong."""
        facts = json.loads((directory / INDEX).read_text())["metadata"]
        assert self.applied == int(facts["base_version"]), "out of order"
        assert facts["compression_format"] == "zstd"
        places = _places(self.blob)
        for file in sorted(directory.glob("*.safetensors")):
            delta = file.read_bytes()
            checksums = _header(delta)["__metadata__"]
            for name, (begin, end) in _places(delta).items():
                first, last = places[name]
                region = np.frombuffer(self.blob, np.uint8)[first:last]
                change = np.frombuffer(zstandard.ZstdDecompressor().decompress(delta[begin:end]), np.uint8)
                if facts["delta_encoding"] == "xor":
                    region ^= change
                else:
                    count = int(change[:4].view("<u4")[0])
                    region[change[4 : 4 + 4 * count].view("<u4")] = change[4 + 4 * count :]
                assert checksum(facts["checksum_format"], region.tobytes()) == checksums[name], name
        self.applied = int(facts["version"])


def _header(blob: bytes | bytearray) -> Any:
    (length,) = struct.unpack("<Q", blob[:8])
    return json.loads(bytes(blob[8 : 8 + length]))


def _places(blob: bytes | bytearray) -> dict[str, tuple[int, int]]:
    (length,) = struct.unpack("<Q", blob[:8])
    found = {}
    for name, entry in _header(blob).items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            found[name] = (8 + length + begin, 8 + length + end)
    return found
