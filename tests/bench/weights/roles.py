"""The processes of the live arm: a trainer that publishes recorded states, and receivers that bring them live.

- Ours: the publisher that trainers use; and what receivers do: read the chain, stage beside the live weights, verify,
  commit in place. The engine is plain arrays: there is no generation whose steps the commit would wait for.
- Dense: the same weights through the same broker by the same client, in the same publish order, as raw chunks of 1 MiB
  that are copied straight into place while the next ones come. No digests, no staging: the least that dense can cost.
- Times are of the monotonic clock, which processes of one machine share.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from rollfab.fabric.contract.errors import FabricError
from rollfab.fabric.format.digest import state_sums
from rollfab.fabric.format.layout import Layout
from rollfab.fabric.format.manifest import WeightManifest
from rollfab.fabric.opened import RedisFabric
from rollfab.fabric.ports.weights import WeightStore
from rollfab.fabric.rules.weights.chain import KEYFRAME
from rollfab.fabric.versions.commit import COMMIT_THREAD_COUNT_MAX, commit, write
from rollfab.fabric.versions.rank_parts import whole
from rollfab.fabric.versions.reader import FETCH_BYTES_MAX, ChainReader
from rollfab.fabric.versions.stage import Stage
from rollfab.trainer.publish.publisher import Publisher

from .recording import Recording

T = TypeVar("T")
OURS, DENSE = "ours", "dense"  # run ids
DENSE_CHUNK_BYTES = 1 << 20
PUT_COUNT = 8  # dense chunks per call
WAIT_S = 120.0


class Role:
    """A process that holds a recording's state and a connection. version: of what `state` holds."""

    def __init__(self, url: str, directory: Path, version: int) -> None:
        self._url = url
        self._runner = asyncio.Runner()
        self.recording = Recording(directory)
        self.layout = self.recording.layout
        self.version = version

    def __enter__(self) -> Self:
        self._fabric = self.run(RedisFabric.open(self._url, client_name=f"bench-{type(self).__name__.lower()}"))
        return self

    def __exit__(self, *_: object) -> None:
        self.run(self._fabric.close())
        self._runner.close()

    @property
    def store(self) -> WeightStore:
        return self._fabric.weights

    async def head_above(self, run_id: str, version: int) -> int:
        """The head's version once it is above `version`.

        Raises:
            FabricError: nothing was published for WAIT_S.
        """
        until_s = time.monotonic() + WAIT_S
        while (remaining_s := until_s - time.monotonic()) > 0:
            head = await self.store.wait_head(run_id, version, remaining_s)
            if head.version > version:
                return head.version
        raise FabricError(f"nothing above version {version} of {run_id!r} was published for {WAIT_S:.0f} s")

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run it to its end in this process' loop."""
        return self._runner.run(work)


class LiveTrainer(Role):
    """Publishes the states of a recording, one after another, each in both ways."""

    def __enter__(self) -> Self:
        super().__enter__()
        self._state = self.recording.at(self.version)
        self._publisher = Publisher(self.store, OURS)
        self._epoch = self.run(self.store.open_publisher(DENSE))
        self._dense: WeightManifest | None = None
        return self

    def publish_first(self) -> int:
        """The state as it is, as a keyframe; returns its payload's bytes."""
        report = self.run(
            self._publisher.publish(self.recording.shaped(self._state), self.version, allow_nonfinite=True)
        )
        return report.payload_bytes

    def train(self) -> int:
        """Move to the next state, as an optimiser step would; returns its version."""
        self.recording.apply(self._state, self.version)
        self.version += 1
        return self.version

    def publish(self) -> dict[str, float]:
        """The state through our publisher: when it was begun, and how long encoding took."""
        started_s = time.monotonic()
        report = self.run(
            self._publisher.publish(self.recording.shaped(self._state), self.version, allow_nonfinite=True)
        )
        return {"started_s": started_s, "encode_s": report.encode_s, "payload_bytes": float(report.payload_bytes)}

    def publish_dense(self) -> float:
        """The state as raw bytes; returns when it was begun. The version before is deleted, outside of this time."""
        if self._dense is not None:
            self.run(self.store.drop(DENSE, [self._dense.link], self._epoch))
        self._dense = dense_manifest(self.layout, self._epoch, self.version)
        started_s = time.monotonic()
        self.run(self._send_dense(self._dense))
        return started_s

    async def _send_dense(self, manifest: WeightManifest) -> None:
        view = self._state.data.cast("B")
        chunks = [view[start : start + DENSE_CHUNK_BYTES] for start in range(0, len(view), DENSE_CHUNK_BYTES)]
        for first in range(0, len(chunks), PUT_COUNT):
            await self.store.put_chunks(manifest, first, cast(Sequence[bytes], chunks[first : first + PUT_COUNT]))
        await self.store.put_manifest(manifest)
        await self.store.advance_head(manifest, 0)


class LiveReceiver(Role):
    """Holds the weights twice: as ours brought them, and as dense did."""

    def __enter__(self) -> Self:
        super().__enter__()
        self._live = self.recording.at(self.version)
        self._bits = self.recording.split(self._live)
        self._sums = state_sums(self.layout, self._bits)
        self._dense_live = self._live.copy()
        self._reader = ChainReader(self.store, OURS)
        self._thread_count = min(COMMIT_THREAD_COUNT_MAX, os.cpu_count() or 1)  # as engines commit
        return self

    def follow(self) -> dict[str, float]:
        """Wait for the next version and bring it live: when it was, how long staging took, and the pause."""
        return self.run(self._follow())

    async def _follow(self) -> dict[str, float]:
        head = await self.head_above(OURS, self.version)
        seen_s = time.monotonic()
        manifests = await self._reader.plan(self.version, head)
        stage = Stage(whole(self.layout), self._bits, self.version, self._sums)
        staged = await self._reader.stage(manifests, stage)
        staged_s = time.monotonic()
        commit(staged, self._bits, thread_count=self._thread_count)
        live_s = time.monotonic()
        self._sums, self.version = staged.sums, head
        return {"live_s": live_s, "stage_s": staged_s - seen_s, "pause_s": live_s - staged_s}

    def follow_dense(self) -> float:
        """Wait for the version that ours has and bring it live from raw bytes; returns when it was."""
        return self.run(self._follow_dense())

    async def _follow_dense(self) -> float:
        head = await self.head_above(DENSE, self.version - 1)
        (manifest,) = await self.store.manifests(DENSE, [(head, KEYFRAME)])
        if manifest is None:
            raise FabricError("the dense version is gone")
        size = FETCH_BYTES_MAX // DENSE_CHUNK_BYTES
        count = len(manifest.chunk_bytes)
        batches = [range(first, min(first + size, count)) for first in range(0, count, size)]
        live = self._dense_live.view(np.uint8)
        fetch = asyncio.create_task(self.store.chunks(manifest, batches[0]))
        for indices, following in zip(batches, [*batches[1:], range(0)], strict=True):
            chunks = await fetch
            fetch = asyncio.create_task(self.store.chunks(manifest, following))
            await asyncio.to_thread(_place, live, indices[0] * DENSE_CHUNK_BYTES, chunks)
        await fetch
        return time.monotonic()

    def copy_dense(self) -> float:
        """Seconds that a dense copy of the model takes, in as many threads: the least that a dense commit pauses."""
        started_s = time.monotonic()
        write({"all": (None, self._live)}, {"all": self._dense_live}, thread_count=self._thread_count)
        return time.monotonic() - started_s

    def agrees(self) -> bool:
        """Whether both ways brought the same bits."""
        return bool(np.array_equal(self._live, self._dense_live))


def dense_manifest(layout: Layout, epoch: int, version: int) -> WeightManifest:
    """A version that is raw chunks and nothing else. No stage would take it."""
    lengths = [DENSE_CHUNK_BYTES] * (layout.byte_count // DENSE_CHUNK_BYTES)
    if rest := layout.byte_count % DENSE_CHUNK_BYTES:
        lengths.append(rest)
    return WeightManifest(
        run_id=DENSE,
        epoch=epoch,
        version=version,
        base_version=-1,
        kind=KEYFRAME,
        codec="raw",
        layout=layout.rows(),
        layout_digest=layout.digest,
        cut_digest="",
        blocks=np.zeros(0, np.int64),
        block_digests=np.zeros(0, np.uint64),
        chunk_bytes=np.array(lengths, np.int32),
        chunk_digests=[],
        payload_bytes=layout.byte_count,
        sums=np.zeros(len(layout.tensors), np.uint64),
        changed_count=layout.element_count,
        element_count=layout.element_count,
        dense_bytes=layout.byte_count,
    )


def _place(live: NDArray[np.uint8], start: int, chunks: Sequence[bytes | None]) -> None:
    for chunk in chunks:
        if chunk is None:
            raise FabricError("a dense chunk is gone")
        live[start : start + len(chunk)] = np.frombuffer(chunk, np.uint8)
        start += len(chunk)
