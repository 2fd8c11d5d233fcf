"""Encoded versions in shared memory, on their way to the ranks of a vLLM on this machine.

- One file a version: its manifest, then its chunks, one after the other. Chunks come verified; ranks verify the blocks
  that they read once more.
- Written by the process that fetches, mapped read-only by the ranks, gone when nobody has it any more.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Sequence

import numpy as np

from .....fabric.contract.errors import WeightError, WireError
from .....fabric.format.layout import Layout
from .....fabric.format.manifest import WeightManifest
from .....fabric.ports.weights import Range
from ..common.shared import SharedFile, open_shared

HEAD = struct.Struct("<4sQ")  # magic, bytes of the manifest after it
MAGIC = b"RFV1"
VERSION = "rollfab-version"  # name of the files


class VersionFiles:
    """See ranks.Gathering. layout: of the engine."""

    def __init__(self, layout: Layout) -> None:
        self.manifests: list[WeightManifest] = []
        self._layout = layout
        self._files: list[SharedFile] = []
        self._place = 0

    @property
    def paths(self) -> list[str]:
        """How a rank opens them, while this process has them."""
        return [str(file.path) for file in self._files]

    def begin(self, manifest: WeightManifest) -> None:
        """Make room for a version.

        Raises:
            LayoutMismatch: its tensors are not the engine's. WireError: it cannot be read here.
            WeightError: there is no room.
        """
        self._layout.check(manifest.tensors)
        manifest.check()
        packed = manifest.pack()
        size = HEAD.size + len(packed) + int(manifest.chunk_bytes.sum(dtype=np.int64))
        try:
            file = SharedFile(VERSION, size)
        except OSError as error:
            raise WeightError(
                f"no room in shared memory for version {manifest.version} ({size:,} bytes): {error}",
                version=manifest.version,
            ) from error
        self._files.append(file)
        self.manifests.append(manifest)
        file.write(HEAD.pack(MAGIC, len(packed)) + packed)
        self._place = HEAD.size + len(packed)

    def feed(self, data: bytes) -> None:
        """The next chunk."""
        self._files[-1].write(data, self._place)
        self._place += len(data)

    def end(self) -> None:
        """Nothing more to do."""

    def finish(self) -> None:
        """Nothing more to do."""

    def close(self) -> None:
        """Let go; ranks that have them mapped keep them."""
        for file in self._files:
            file.close()


class MappedVersions:
    """The files of VersionFiles, in a rank: a RangeSource of their manifests.

    Raises:
        WeightError, WireError: a file is not one. OSError: it is not on this machine, or gone.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self.manifests: list[WeightManifest] = []
        self._chunks: dict[int, tuple[memoryview, list[int]]] = {}  # by version: all of the file, where chunks begin
        for path in paths:
            handle = open_shared(path, VERSION)
            try:
                view = memoryview(mmap.mmap(handle, 0, access=mmap.ACCESS_READ))
            finally:
                os.close(handle)
            magic, length = HEAD.unpack_from(view)
            if magic != MAGIC:
                raise WireError(f"{path} holds no version")
            manifest = WeightManifest.unpack(bytes(view[HEAD.size : HEAD.size + length]))
            ends = HEAD.size + length + np.cumsum(manifest.chunk_bytes, dtype=np.int64)
            starts: list[int] = (ends - manifest.chunk_bytes).tolist()
            self.manifests.append(manifest)
            self._chunks[manifest.version] = view, starts

    async def chunk_ranges(self, manifest: WeightManifest, ranges: Sequence[Range]) -> list[bytes | None]:
        """Bytes of chunks; no file lacks one."""
        view, starts = self._chunks[manifest.version]
        return [bytes(view[starts[chunk] + start : starts[chunk] + start + length]) for chunk, start, length in ranges]
