"""Versions for tests of the collective path, and how its members are set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import xxhash

from rollfab.fabric.format.layout import Layout, TensorSpec
from rollfab.fabric.format.manifest import WeightManifest, chunk_digest, chunk_hash
from rollfab.fabric.versions.snapshot import Identity, Snapshot
from tests.support.device import DEVICE

OPTIONS: dict[str, Any] = {"answer_s": 4.0, "stall_s": 3.0}
if DEVICE != "cpu":
    OPTIONS |= {"backend": "nccl"}
CHUNK_COUNT = 25  # about 26 MB: seven messages, so that a member can leave in the middle


class Versions:
    """Versions of random chunks: who carries them need not know what they mean."""

    def __init__(self, run_id: str, epoch: int, chunk_count: int = CHUNK_COUNT) -> None:
        self._random = np.random.default_rng(epoch)
        self._chunk_count = chunk_count
        layout = Layout((TensorSpec("weight", "uint8", (1,)),))
        snapshot = Snapshot(layout, {"weight": np.zeros(1, dtype=np.uint8)})
        identity = Identity(run_id=run_id, epoch=epoch, version=0, carrier="collective")
        self._manifest = snapshot.prepare_keyframe(identity).manifest

    def next(self, version: int) -> tuple[WeightManifest, list[bytes]]:
        """A keyframe of new chunks, of sizes that fill no message evenly; one is empty."""
        sizes = [0, *((1 << 20) + 7919 * index for index in range(1, self._chunk_count))]
        chunks = [self._random.bytes(size) for size in sizes]
        manifest = replace(
            self._manifest,
            version=version,
            chunk_bytes=np.array(sizes, dtype=np.int32),
            chunk_digests=[chunk_digest(chunk) for chunk in chunks],
            chunk_hashes=[chunk_hash(chunk) for chunk in chunks],
            payload_bytes=sum(sizes),
        )
        return manifest, chunks


def digest_of(chunks: Sequence[bytes]) -> str:
    """One text for all bytes of a version."""
    return xxhash.xxh3_128_hexdigest(b"".join(chunks))
