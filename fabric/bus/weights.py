"""WeightStore on Redis.

- A chunk carries a time to live until its manifest is written, so what a publisher that dies leaves behind goes away by
  itself; a manifest that never became the head is deleted when the next publisher opens the run.
- A chunk's key holds its publisher's epoch: one that was replaced can not overwrite the chunks of its successor.
- The announcement is a hint: waiting reads the head itself, at least every BLOCK_MS_MAX.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from redis.asyncio import Redis

from ..rules.chain import Link
from ..rules.publish import ALREADY, GRANTED, chunks_lost, refusal
from ..weights.manifest import Head, WeightManifest
from .keys import ShardKeys, WeightKeys
from .rows import head_row, version_rows
from .scripts import Argument, Scripts
from .translate import translate

PENDING_TTL_MS = 3_600_000  # longer than any publish takes, also one that waits for a broker's restart
BATCH_BYTES = 8 << 20  # per round trip; the client library copies each batch once
BATCH_COUNT = 512  # keys per UNLINK, EXISTS or PERSIST round trip
ANNOUNCEMENT_COUNT_MAX = 16
BLOCK_MS_MAX = 1000


class RedisWeightStore:
    """WeightStore (see ports)."""

    def __init__(self, client: Redis) -> None:
        self._client: Any = client  # its stubs know neither that replies are bytes nor what pipelines return
        self._scripts = Scripts(client)

    async def open_publisher(self, run_id: str) -> int:
        with translate(self._client):
            epoch, version = await self._scripts.call("open_publisher", [WeightKeys(run_id).head], [])
        above = [name for name in await self.held(run_id) if name[0] > version]
        found = await self.manifests(run_id, above)
        await self.drop(run_id, [manifest.link for manifest in found if manifest is not None])
        return int(epoch)

    async def head(self, run_id: str) -> Head:
        with translate(self._client):
            values = await self._client.hmget(WeightKeys(run_id).head, ["version", "epoch", "kind", "moved_by"])
        return head_row(run_id, values)

    async def wait_head(self, run_id: str, above: int, timeout_s: float) -> Head:
        stream = WeightKeys(run_id).announcements
        clock = asyncio.get_running_loop().time
        until_s = clock() + timeout_s
        while True:
            with translate(self._client):
                last = await self._client.xrevrange(stream, count=1)
            # The stream's end is read before the head, so a move between the two wakes us.
            head = await self.head(run_id)
            remaining_ms = int((until_s - clock()) * 1000)
            if head.version > above or remaining_ms <= 0:
                return head
            after = last[0][0] if last else "0-0"
            with translate(self._client):
                await self._client.xread({stream: after}, count=1, block=min(remaining_ms, BLOCK_MS_MAX))

    async def put_chunks(self, manifest: WeightManifest, first_index: int, chunks: Sequence[bytes]) -> None:
        keys = _chunk_keys(manifest.run_id, manifest.link)[first_index : first_index + len(chunks)]
        batch = self._client.pipeline(transaction=False)
        waiting_bytes = 0
        for key, chunk in zip(keys, chunks, strict=True):
            batch.set(key, chunk, px=PENDING_TTL_MS)
            waiting_bytes += len(chunk)
            if waiting_bytes >= BATCH_BYTES:
                await self._execute(batch)
                waiting_bytes = 0
        await self._execute(batch)

    async def put_manifest(self, manifest: WeightManifest) -> None:
        keys, link = WeightKeys(manifest.run_id), manifest.link
        args: list[Argument] = [link.epoch, link.version, link.kind, manifest.encode()]
        with translate(self._client):
            answer = await self._scripts.call("put_manifest", [keys.head, keys.manifests], args)
        _require(answer, manifest)
        lost_count = await self._keep(_chunk_keys(manifest.run_id, link))
        if lost_count:
            raise chunks_lost(manifest.run_id, link, lost_count)

    async def advance_head(self, manifest: WeightManifest, shard_count: int) -> None:
        keys, link = WeightKeys(manifest.run_id), manifest.link
        args: list[Argument] = [link.epoch, link.version, link.kind, link.base_version, ANNOUNCEMENT_COUNT_MAX]
        with translate(self._client):
            answer = await self._scripts.call("advance_head", [keys.head, keys.manifests, keys.announcements], args)
            _require(answer, manifest)
            for shard in range(shard_count):
                await self._scripts.call("set_head", [ShardKeys(manifest.run_id, shard).run], [link.version])

    async def held(self, run_id: str) -> list[tuple[int, str]]:
        with translate(self._client):
            fields = await self._client.hkeys(WeightKeys(run_id).manifests)
        return version_rows(run_id, fields)

    async def manifests(self, run_id: str, names: Sequence[tuple[int, str]]) -> list[WeightManifest | None]:
        if not names:
            return []
        fields = [f"{version}:{kind}" for version, kind in names]
        with translate(self._client):
            found = await self._client.hmget(WeightKeys(run_id).manifests, fields)
        return [None if raw is None else WeightManifest.decode(raw) for raw in found]

    async def chunks(self, manifest: WeightManifest, indices: Sequence[int]) -> list[bytes | None]:
        keys = _chunk_keys(manifest.run_id, manifest.link)
        with translate(self._client):
            return list(await self._client.mget([keys[index] for index in indices])) if indices else []

    async def drop(self, run_id: str, links: Sequence[Link]) -> None:
        for link in links:
            keys = _chunk_keys(run_id, link)
            with translate(self._client):
                for start in range(0, len(keys), BATCH_COUNT):
                    await self._client.unlink(*keys[start : start + BATCH_COUNT])
                await self._client.hdel(WeightKeys(run_id).manifests, f"{link.version}:{link.kind}")

    async def _keep(self, keys: Sequence[str]) -> int:
        """Take the time to live off chunks; returns how many are not there."""
        lost_count = 0
        for start in range(0, len(keys), BATCH_COUNT):
            part = keys[start : start + BATCH_COUNT]
            batch = self._client.pipeline(transaction=False)
            for key in part:
                batch.persist(key)
            batch.exists(*part)
            lost_count += len(part) - int((await self._execute(batch))[-1])
        return lost_count

    async def _execute(self, batch: Any) -> list[Any]:
        with translate(self._client):
            return list(await batch.execute())


def _chunk_keys(run_id: str, link: Link) -> list[str]:
    keys = WeightKeys(run_id)
    return [keys.chunk(link.version, f"{link.kind}.{link.epoch}", index) for index in range(link.chunk_count)]


def _require(answer: Sequence[int], manifest: WeightManifest) -> None:
    code, head_version, epoch = (int(number) for number in answer)
    if code not in (GRANTED, ALREADY):
        raise refusal(code, manifest.run_id, manifest.link, head_version=head_version, epoch=epoch)
