"""The weight store: versions of a run's weights, as manifests and chunks, and the head that names the newest.

A version is published in this order: put_chunks, put_manifest, advance_head. Each may be repeated when its answer was
lost. Readers trust the head and what leads to it, nothing else. Errors: BrokerError when the broker cannot be reached,
BrokerFull when it has no room.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from .rules.chain import Link
from .weights.manifest import Head, WeightManifest


class WeightStore(Protocol):
    """Weights of all runs on one broker."""

    async def open_publisher(self, run_id: str) -> int:
        """Take charge of a run: returns a new epoch, and from now on every older publisher is refused.

        What older publishers left above the head is deleted: it was never published.
        """
        ...

    async def head(self, run_id: str) -> Head:
        """The newest version; version -1 when there is none."""
        ...

    async def wait_head(self, run_id: str, above: int, timeout_s: float) -> Head:
        """The head as soon as its version is not `above` or lower, or as it is after `timeout_s`."""
        ...

    async def put_chunks(self, manifest: WeightManifest, first_index: int, chunks: Sequence[bytes]) -> None:
        """Write chunks `first_index`, `first_index` + 1, … of a version."""
        ...

    async def put_manifest(self, manifest: WeightManifest) -> None:
        """Write the manifest of a version whose chunks are there.

        Raises:
            VersionConflict: another publisher took over, or this version already means something else.
            BrokerError: a chunk is not there any more.
        """
        ...

    async def advance_head(self, manifest: WeightManifest, shard_count: int) -> None:
        """Make a version the head, tell every shard of the run, and wake those who wait.

        Raises:
            VersionConflict: another publisher took over, the version is not newer, or its base is not the head.
        """
        ...

    async def held(self, run_id: str) -> list[tuple[int, str]]:
        """(version, kind) of every manifest, ascending by version."""
        ...

    async def manifests(self, run_id: str, names: Sequence[tuple[int, str]]) -> list[WeightManifest | None]:
        """Manifests by (version, kind), in that order; None for those no longer held."""
        ...

    async def chunks(self, manifest: WeightManifest, indices: Sequence[int]) -> list[bytes | None]:
        """Chunks as they are stored, unchecked; None for those no longer held."""
        ...

    async def drop(self, run_id: str, links: Sequence[Link]) -> None:
        """Delete versions: chunks first, then the manifest that names them."""
        ...
