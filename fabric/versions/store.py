"""WeightStore on Redis; its board is board.py's.

- A chunk carries a time to live until its manifest is written, and a row says which versions have chunks and no
  manifest yet. So the next publisher that opens the run deletes the chunks that a dead one left behind, and manifests
  that never became the head; if none does, the chunks expire by themselves.
- A chunk's key holds its publisher's epoch: a replaced publisher cannot overwrite the chunks of its successor.
- A manifest is written only if its chunks were there a moment ago, then their time to live is taken off: at or below
  the head readers see it at once, and a manifest without chunks would lead them astray.
- The announcement is a hint: waiting reads the head itself, at least every BLOCK_MS_MAX.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from redis.asyncio import Redis

from ..broker.clients.channel import Argument
from ..broker.clients.cluster_client import ClusterClient
from ..broker.clients.translate import answers_of, translate
from ..broker.clients.typed import is_wrong_type
from ..contract.errors import BrokerError
from ..format.manifest import BROKER, Head, WeightManifest
from ..ports.weights import Range
from ..queue.keys import ShardKeys, WeightKeys
from ..queue.rows import head_row, sending_rows, version_rows
from ..queue.scripts import Owner
from ..rules.weights.chain import Link
from ..rules.weights.publish import ALREADY, GRANTED, chunks_lost, refusal
from .board import ANNOUNCEMENT_COUNT_MAX, RedisWeightBoard
from .held import readable

PENDING_TTL_MS = 3_600_000  # longer than any publish takes, also one that waits for a broker's restart
BATCH_BYTES = 8 << 20  # per round trip; the client library copies each batch once
BATCH_COUNT = 512  # keys per UNLINK, EXISTS or PERSIST round trip
BLOCK_MS_MAX = 1000


class RedisWeightStore(RedisWeightBoard):
    """WeightStore (see ports)."""

    def __init__(self, client: Redis) -> None:
        super().__init__(client)
        self._offers_seen: dict[str, bytes | None] = {}  # run → announcement of the last offer that ended a wait

    async def open_publisher(self, run_id: str) -> int:
        with translate(self._client):
            epoch, version = await self._scripts.call("open_publisher", [WeightKeys(run_id)], [])
        names = await self.held(run_id)
        held = await readable(self, run_id, names)
        lost = [
            manifest for manifest in held.values() if manifest.version > version or not await self._is_kept(manifest)
        ]
        await self.drop(run_id, [manifest.link for manifest in lost], int(epoch))
        await self._drop_unfinished(run_id, int(epoch), set(names) - {(each.version, each.kind) for each in lost})
        return int(epoch)

    async def _drop_unfinished(self, run_id: str, epoch: int, kept: set[tuple[int, str]]) -> None:
        """Delete chunks of earlier publishers that have no manifest. kept: the versions with a manifest."""
        sending = WeightKeys(run_id).sending
        with translate(self._client):
            rows = sending_rows(run_id, await self._client.hgetall(sending))
        for link, field in rows:
            if link.epoch < epoch:
                is_kept = (link.version, link.kind) in kept
                await self._drop(run_id, replace(link, chunk_count=0) if is_kept else link, epoch, sending, field)

    async def _is_kept(self, manifest: WeightManifest) -> bool:
        """Whether the chunks are there; keep them for good, as the manifest's writer may have died before doing so."""
        return manifest.carrier != BROKER or not await self._keep(_chunk_keys(manifest.run_id, manifest.link))

    async def head(self, run_id: str) -> Head:
        with translate(self._client):
            values = await self._client.hmget(WeightKeys(run_id).head, ["version", "epoch", "kind", "moved_by"])
        return head_row(run_id, values)

    async def wait_head(self, run_id: str, above: int, timeout_s: float) -> Head:
        stream = WeightKeys(run_id).announcements
        clock = asyncio.get_running_loop().time
        until_s = clock() + timeout_s
        seen = self._offers_seen.get(run_id)  # as it is now: an offer wakes all waiting tasks, not only the first
        while True:
            with translate(self._client):
                last = await self._client.xrevrange(stream, count=ANNOUNCEMENT_COUNT_MAX)
            offer = next((entry_id for entry_id, fields in last if b"offer" in fields), None)
            # The stream's end is read before the head, so a move between the two wakes us.
            head = await self.head(run_id)
            remaining_ms = int((until_s - clock()) * 1000)
            if head.version > above:
                return head
            if remaining_ms <= 0 or offer not in (None, seen):
                self._offers_seen[run_id] = offer
                return head
            after = last[0][0] if last else "0-0"
            with translate(self._client):
                await self._client.xread({stream: after}, count=1, block=min(remaining_ms, BLOCK_MS_MAX))

    async def put_chunks(self, manifest: WeightManifest, first_index: int, chunks: Sequence[bytes]) -> None:
        keys = _chunk_keys(manifest.run_id, manifest.link)[first_index : first_index + len(chunks)]
        batch = self._client.pipeline(transaction=False)
        batch.hset(WeightKeys(manifest.run_id).sending, _field(manifest.link), manifest.link.chunk_count)
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
        chunk_keys = _chunk_keys(manifest.run_id, link)
        needs_chunks = manifest.carrier == BROKER
        lost_count = await self._lost_count(chunk_keys) if needs_chunks else 0
        args: list[Argument] = [link.epoch, link.version, link.kind, link.base_version, manifest.pack()]
        with translate(self._client):
            answer = await self._scripts.call("put_manifest", [keys], [*args, int(not lost_count)])
        _require(answer, manifest)
        lost_count = lost_count or await self._keep(chunk_keys)
        if lost_count and needs_chunks:
            raise chunks_lost(manifest.run_id, link, lost_count)

    async def advance_head(self, manifest: WeightManifest, shard_count: int) -> None:
        keys, link = WeightKeys(manifest.run_id), manifest.link
        args: list[Argument] = [link.epoch, link.version, link.kind, link.base_version, ANNOUNCEMENT_COUNT_MAX]
        with translate(self._client):
            answer = await self._scripts.call("advance_head", [keys], args)
            _require(answer, manifest)
            for shard in range(shard_count):
                told: list[Argument] = [link.version, manifest.state_digest, link.epoch]
                await self._scripts.call("set_head", [ShardKeys(manifest.run_id, shard)], told)

    async def held(self, run_id: str) -> list[tuple[int, str]]:
        with translate(self._client):
            fields: list[bytes] = await self._client.hkeys(WeightKeys(run_id).manifests)
        return version_rows(run_id, fields)

    async def manifests(self, run_id: str, names: Sequence[tuple[int, str]]) -> list[WeightManifest | None]:
        if not names:
            return []
        fields = [f"{version}:{kind}" for version, kind in names]
        with translate(self._client):
            found: list[bytes | None] = await self._client.hmget(WeightKeys(run_id).manifests, fields)
        return [None if raw is None else WeightManifest.unpack(raw) for raw in found]

    async def chunks(self, manifest: WeightManifest, indices: Sequence[int]) -> list[bytes | None]:
        keys = _chunk_keys(manifest.run_id, manifest.link)
        with translate(self._client):
            return list(await self._client.mget([keys[index] for index in indices])) if indices else []

    async def chunk_ranges(self, manifest: WeightManifest, ranges: Sequence[Range]) -> list[bytes | None]:
        keys = _chunk_keys(manifest.run_id, manifest.link)
        found: list[bytes] = []
        for part in _batches(ranges):
            batch = self._client.pipeline(transaction=False)
            for chunk, start, length in part:
                assert length > 0
                batch.getrange(keys[chunk], start, start + length - 1)
            with translate(self._client):
                found += [_text(answer) for answer in await answers_of(batch)]
        return [data or None for data in found]  # Redis answers an empty text for a missing key

    async def room_bytes(self) -> int | None:
        client = self._client
        try:
            with translate(client):
                nodes = client.primaries() if isinstance(client, ClusterClient) else [client]
                rooms = [_room_bytes(await node.info("memory")) for node in nodes]
        except BrokerError as error:
            if error.facts.get("reason") in ("permission", "refused"):  # users that are not ours, hosted brokers
                return None
            raise
        return min((room for room in rooms if room is not None), default=None)

    async def mend(self, manifest: WeightManifest, chunks: Mapping[int, bytes], epoch: int) -> None:
        link, packed = manifest.link, manifest.pack()
        keys, chunk_keys = WeightKeys(manifest.run_id), _chunk_keys(manifest.run_id, link)
        wholes: list[Range] = [(index, 0, len(data)) for index, data in sorted(chunks.items())]
        for part in list(_batches(wholes)) or [[]]:
            indices = [index for index, _, _ in part]
            owners: list[Owner] = [keys, *(chunk_keys[index] for index in indices)]
            args: list[Argument] = [epoch, manifest.field, packed, *(chunks[index] for index in indices)]
            with translate(self._client):
                code, head_version, head_epoch = map(int, await self._scripts.call("mend", owners, args))
            if code != GRANTED:
                mine = replace(link, epoch=epoch)
                raise refusal(code, manifest.run_id, mine, head_version=head_version, epoch=head_epoch)

    async def drop(self, run_id: str, links: Sequence[Link], epoch: int) -> None:
        for link in links:
            await self._drop(run_id, link, epoch, WeightKeys(run_id).manifests, f"{link.version}:{link.kind}")

    async def _drop(self, run_id: str, link: Link, epoch: int, table: str, field: str) -> None:
        """Delete a version's chunks, and with the last of them its field of a hash."""
        keys, chunk_keys = WeightKeys(run_id), _chunk_keys(run_id, link)
        last = max(0, len(chunk_keys) - 1) // BATCH_COUNT * BATCH_COUNT
        for start in range(0, last + 1, BATCH_COUNT):
            owners: list[Owner] = [keys, table, *chunk_keys[start : start + BATCH_COUNT]]
            with translate(self._client):
                answer = await self._scripts.call("drop_version", owners, [epoch, field if start == last else ""])
            code, head_version, head_epoch = (int(number) for number in answer)
            if code != GRANTED:
                raise refusal(code, run_id, replace(link, epoch=epoch), head_version=head_version, epoch=head_epoch)

    async def _lost_count(self, keys: Sequence[str]) -> int:
        """Count the chunks that are not there."""
        found_count = 0
        for start in range(0, len(keys), BATCH_COUNT):
            with translate(self._client):
                found_count += int(await self._client.exists(*keys[start : start + BATCH_COUNT]))
        return len(keys) - found_count

    async def _keep(self, keys: Sequence[str]) -> int:
        """Take the time to live off chunks; return how many are not there."""
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


def _field(link: Link) -> str:
    """Return a version's field in the sending hash."""
    return f"{link.version}:{link.kind}.{link.epoch}"


def _text(answer: Any) -> bytes:
    """Return a key's bytes; empty if a key of another type replaced it, as in MGET's answer."""
    if is_wrong_type(answer):
        return b""
    if isinstance(answer, Exception):
        raise answer
    return bytes(answer)


def _batches(ranges: Sequence[Range]) -> Iterator[Sequence[Range]]:
    """Cut ranges, in their order, into batches: each is one round trip of at most BATCH_BYTES (or one range)."""
    start = size = 0
    for index, (_, _, length) in enumerate(ranges):
        if index > start and (size + length > BATCH_BYTES or index - start >= BATCH_COUNT):
            yield ranges[start:index]
            start, size = index, 0
        size += length
    if start < len(ranges):
        yield ranges[start:]


def _room_bytes(memory: Mapping[str, Any]) -> int | None:
    """Return a server's free bytes below its limit, from INFO memory; replicas' buffers do not count against it."""
    limit = int(memory.get("maxmemory", 0))
    used = int(memory.get("used_memory", 0)) - int(memory.get("mem_not_counted_for_evict", 0))
    return max(0, limit - used) if limit else None


def _require(answer: Sequence[int], manifest: WeightManifest) -> None:
    code, head_version, epoch = (int(number) for number in answer)
    if code not in (GRANTED, ALREADY):
        raise refusal(code, manifest.run_id, manifest.link, head_version=head_version, epoch=epoch)
