"""WeightStore in memory: the twin of bus/weights.py. All roles of a process share one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..rules.chain import Link
from ..rules.publish import ALREADY, GRANTED, HeadFacts, chunks_lost, may_advance, may_put, refusal
from ..weights.manifest import Head, WeightManifest
from .state import MemoryBroker

Name = tuple[int, str]


@dataclass(slots=True)
class _RunWeights:
    """A run's weights: what `rf:{run.w}:*` holds."""

    head: HeadFacts = field(default_factory=HeadFacts)
    manifests: dict[Name, bytes] = field(default_factory=dict)
    chunks: dict[tuple[int, str, int, int], bytes] = field(default_factory=dict)
    moved: asyncio.Event = field(default_factory=asyncio.Event)


class MemoryWeightStore:
    """WeightStore (see ports)."""

    def __init__(self, broker: MemoryBroker) -> None:
        self._broker = broker
        self._runs: dict[str, _RunWeights] = {}

    async def open_publisher(self, run_id: str) -> int:
        run = self._run(run_id)
        head = run.head
        run.head = HeadFacts(version=head.version, epoch=head.epoch + 1, kind=head.kind, moved_by=head.moved_by)
        above = [WeightManifest.decode(raw).link for name, raw in run.manifests.items() if name[0] > head.version]
        await self.drop(run_id, above)
        return run.head.epoch

    async def head(self, run_id: str) -> Head:
        head = self._run(run_id).head
        return Head(head.version, head.epoch, head.kind, head.moved_by)

    async def wait_head(self, run_id: str, above: int, timeout_s: float) -> Head:
        run = self._run(run_id)
        clock = asyncio.get_running_loop().time
        until_s = clock() + timeout_s
        while run.head.version <= above and (remaining_s := until_s - clock()) > 0:
            try:
                async with asyncio.timeout(remaining_s):  # wait_for loses a cancelling on Python 3.11
                    await run.moved.wait()
            except TimeoutError:
                break
        return await self.head(run_id)

    async def put_chunks(self, manifest: WeightManifest, first_index: int, chunks: Sequence[bytes]) -> None:
        run = self._run(manifest.run_id)
        for index, chunk in enumerate(chunks, start=first_index):
            run.chunks[_chunk_name(manifest, index)] = bytes(chunk)

    async def put_manifest(self, manifest: WeightManifest) -> None:
        run, link, raw = self._run(manifest.run_id), manifest.link, manifest.encode()
        known = run.manifests.get((link.version, link.kind))
        code = may_put(run.head, link, is_known=known is not None, is_same=known == raw)
        self._require(code, manifest)
        lost = [i for i in range(link.chunk_count) if _chunk_name(manifest, i) not in run.chunks]
        if lost:
            raise chunks_lost(manifest.run_id, link, len(lost))
        run.manifests[(link.version, link.kind)] = raw

    async def advance_head(self, manifest: WeightManifest, shard_count: int) -> None:
        run, link = self._run(manifest.run_id), manifest.link
        code = may_advance(run.head, link, is_known=(link.version, link.kind) in run.manifests)
        self._require(code, manifest)
        if code == GRANTED:
            run.head = HeadFacts(version=link.version, epoch=link.epoch, kind=link.kind, moved_by=link.epoch)
            run.moved.set()
            run.moved = asyncio.Event()
        state = self._broker.runs.get(manifest.run_id)
        if state is not None:
            state.head_version = max(state.head_version, link.version)

    async def held(self, run_id: str) -> list[Name]:
        return sorted(self._run(run_id).manifests)

    async def manifests(self, run_id: str, names: Sequence[Name]) -> list[WeightManifest | None]:
        found = [self._run(run_id).manifests.get(name) for name in names]
        return [None if raw is None else WeightManifest.decode(raw) for raw in found]

    async def chunks(self, manifest: WeightManifest, indices: Sequence[int]) -> list[bytes | None]:
        run = self._run(manifest.run_id)
        return [run.chunks.get(_chunk_name(manifest, index)) for index in indices]

    async def drop(self, run_id: str, links: Sequence[Link]) -> None:
        run = self._run(run_id)
        for link in links:
            for index in range(link.chunk_count):
                run.chunks.pop((link.version, link.kind, link.epoch, index), None)
            run.manifests.pop((link.version, link.kind), None)

    def _run(self, run_id: str) -> _RunWeights:
        return self._runs.setdefault(run_id, _RunWeights())

    def _require(self, code: int, manifest: WeightManifest) -> None:
        if code not in (GRANTED, ALREADY):
            head = self._run(manifest.run_id).head
            raise refusal(code, manifest.run_id, manifest.link, head_version=head.version, epoch=head.epoch)


def _chunk_name(manifest: WeightManifest, index: int) -> tuple[int, str, int, int]:
    return manifest.version, manifest.kind, manifest.epoch, index
