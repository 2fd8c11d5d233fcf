"""Encoded versions in shared memory, on their way to the ranks of a vLLM on this machine.

- One file a version: its manifest, then its chunks, one after the other. Chunks come verified; ranks verify the blocks
  that they read once more.
- Written by the process that fetches, mapped read-only by the ranks, gone when nobody has it any more.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Callable

import numpy as np

from .....fabric.contract.errors import DigestMismatch, WeightError, WireError
from .....fabric.format.layout import Layout
from .....fabric.format.manifest import WeightManifest, block_digest
from .....fabric.versions.rank_parts import ShardMap
from .....fabric.versions.stage import Stage
from ..common.shared import SharedFile, open_shared

HEAD = struct.Struct("<4sQ")  # magic, bytes of the manifest after it
MAGIC = b"RFV1"
VERSION = "rollfab-version"  # name of the files


class VersionFiles:
    """Keeps a gathering's versions, see ranks.Gathering. layout: of the engine."""

    def __init__(self, layout: Layout) -> None:
        self.manifests: list[WeightManifest] = []
        self._layout = layout
        self._files: list[SharedFile] = []
        self._place = 0

    @property
    def paths(self) -> list[str]:
        """The paths by which a rank opens them, while this process has them."""
        return [str(file.path) for file in self._files]

    def begin(self, manifest: WeightManifest) -> None:
        """Make room for a version.

        Raises:
            LayoutMismatch: its tensors are not the engine's. WireError: it cannot be read here.
            WeightError: there is no room.
        """
        self._layout.check_run(manifest.tensors)
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
        """Write the next chunk."""
        self._files[-1].write(data, self._place)
        self._place += len(data)

    def end(self) -> None:
        """Do nothing: the file is complete."""

    def finish(self) -> None:
        """Do nothing: the files are complete."""

    def close(self) -> None:
        """Let go of the files; ranks that have them mapped keep them."""
        for file in self._files:
            file.close()


class MappedVersion:
    """A file of VersionFiles, in a rank.

    Raises:
        WeightError, WireError: it is none. OSError: it is not on this machine, or gone.
    """

    def __init__(self, path: str) -> None:
        handle = open_shared(path, VERSION)
        try:
            self._view = memoryview(mmap.mmap(handle, 0, access=mmap.ACCESS_READ))
        finally:
            os.close(handle)
        magic, length = HEAD.unpack_from(self._view)
        if magic != MAGIC:
            raise WireError(f"{path} holds no version")
        self.manifest = WeightManifest.unpack(bytes(self._view[HEAD.size : HEAD.size + length]))
        ends = HEAD.size + length + np.cumsum(self.manifest.chunk_bytes, dtype=np.int64)
        self._starts: list[int] = (ends - self.manifest.chunk_bytes).tolist()

    def stage(self, stage: Stage, part: ShardMap, go_on: Callable[[], None] = lambda: None) -> int:
        """Stage the blocks that hold something of the rank; returns their bytes. go_on: called at each; may raise.

        Raises:
            LayoutMismatch, ChainBroken, DigestMismatch, WireError: as Stage, which is useless then.
        """
        manifest, read_bytes = self.manifest, 0
        stage.begin(manifest)
        for row, digest in zip(manifest.rows, manifest.block_digests.tolist(), strict=True):
            if not part.needs(row.region):
                continue
            go_on()
            start = self._starts[row.chunk] + row.offset
            data = self._view[start : start + row.length]
            if block_digest(data) != digest:
                raise DigestMismatch(
                    f"a block in chunk {row.chunk} of version {manifest.version} ({manifest.kind}) of run"
                    f" {manifest.run_id!r} is corrupt: fetch it again",
                    version=manifest.version,
                    chunk=row.chunk,
                )
            stage.take(row, data)
            read_bytes += row.length
        stage.end()
        return read_bytes
