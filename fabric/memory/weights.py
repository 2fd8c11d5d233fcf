"""WeightStore in memory: the twin of versions/store.py and versions/board.py. All roles of a process share one."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..contract.errors import BrokerFull
from ..contract.ids import check_name
from ..contract.wire import check_size
from ..format.manifest import BROKER, DAMAGE_CHUNK_COUNT_MAX, Damage, Head, Holder, WeightManifest
from ..ports.weights import (
    ANSWER_BYTES_MAX,
    ANSWER_COUNT_MAX,
    DAMAGE_COUNT_MAX,
    DAMAGE_TTL_S,
    HOLDER_COUNT_MAX,
    OFFER_BYTES_MAX,
    Range,
)
from ..rules.weights.chain import Link
from ..rules.weights.publish import (
    ALREADY,
    GRANTED,
    HeadFacts,
    chunks_lost,
    may_advance,
    may_drop,
    may_put,
    refusal,
    round_full,
)
from ..versions.held import readable
from .state import MemoryBroker

Name = tuple[int, str]


@dataclass(slots=True)
class _RunWeights:
    """A run's weights: what `rf:{run.w}:*` holds."""

    head: HeadFacts = field(default_factory=HeadFacts)
    manifests: dict[Name, bytes] = field(default_factory=dict)
    chunks: dict[tuple[int, str, int, int], bytes] = field(default_factory=dict)
    sending: dict[tuple[int, str, int], Link] = field(default_factory=dict)
    moved: asyncio.Event = field(default_factory=asyncio.Event)
    holders: dict[str, tuple[float, Holder]] = field(default_factory=dict)  # until when, in broker milliseconds
    offer: tuple[float, bytes] = (0.0, b"")
    offer_count: int = 0
    offers_seen: int = 0
    answers: dict[str, tuple[float, dict[str, bytes]]] = field(default_factory=dict)  # by round
    damages: tuple[float, dict[Name, Damage]] = field(default_factory=lambda: (0.0, {}))
    tending: tuple[float, int] = (0.0, 0)

    def announce(self) -> None:
        """Wake all who wait."""
        self.moved.set()
        self.moved = asyncio.Event()


class MemoryWeightStore:
    """WeightStore (see ports).

    Args:
        bytes_max: of all chunks; None for no limit.
    """

    def __init__(self, broker: MemoryBroker, *, bytes_max: int | None = None) -> None:
        self._broker = broker
        self._bytes_max = bytes_max
        self._runs: dict[str, _RunWeights] = {}

    async def open_publisher(self, run_id: str) -> int:
        run = self._run(run_id)
        head = run.head
        epoch = head.epoch + 1
        run.head = HeadFacts(version=head.version, epoch=epoch, kind=head.kind, moved_by=head.moved_by)
        held = await readable(self, run_id, await self.held(run_id))
        lost = [each.link for each in held.values() if each.version > head.version or not self._is_kept(run, each)]
        await self.drop(run_id, lost, epoch)
        for key in [key for key in run.sending if key[2] < epoch]:
            link = run.sending.pop(key)
            if (link.version, link.kind) not in run.manifests:
                await self.drop(run_id, [link], epoch)
        return epoch

    async def head(self, run_id: str) -> Head:
        head = self._run(run_id).head
        return Head(head.version, head.epoch, head.kind, head.moved_by)

    async def wait_head(self, run_id: str, above: int, timeout_s: float) -> Head:
        run = self._run(run_id)
        clock = asyncio.get_running_loop().time
        until_s = clock() + timeout_s
        seen = run.offers_seen  # as it is now: an offer wakes everyone who waits, not only the first
        while run.head.version <= above and run.offer_count == seen and (remaining_s := until_s - clock()) > 0:
            try:
                async with asyncio.timeout(remaining_s):  # wait_for loses a cancelling on Python 3.11
                    await run.moved.wait()
            except TimeoutError:
                break
        if run.head.version <= above:
            run.offers_seen = run.offer_count
        return await self.head(run_id)

    async def put_chunks(self, manifest: WeightManifest, first_index: int, chunks: Sequence[bytes]) -> None:
        run = self._run(manifest.run_id)
        room_bytes = await self.room_bytes()
        if room_bytes is not None and sum(map(len, chunks)) > room_bytes:
            raise BrokerFull(f"the broker in memory has room for {room_bytes:,} bytes: raise its bytes_max")
        link = manifest.link
        run.sending[(link.version, link.kind, link.epoch)] = link
        for index, chunk in enumerate(chunks, start=first_index):
            run.chunks[_chunk_name(manifest, index)] = bytes(chunk)

    async def put_manifest(self, manifest: WeightManifest) -> None:
        run, link, raw = self._run(manifest.run_id), manifest.link, manifest.pack()
        known = run.manifests.get((link.version, link.kind))
        code = may_put(run.head, link, is_known=known is not None, is_same=known == raw)
        self._require(code, manifest)
        lost_count = self._lost_count(run, manifest)
        if lost_count and manifest.carrier == BROKER:
            raise chunks_lost(manifest.run_id, link, lost_count)
        run.manifests[(link.version, link.kind)] = raw
        run.sending.pop((link.version, link.kind, link.epoch), None)

    async def advance_head(self, manifest: WeightManifest, shard_count: int) -> None:
        run, link = self._run(manifest.run_id), manifest.link
        code = may_advance(run.head, link, is_known=(link.version, link.kind) in run.manifests)
        self._require(code, manifest)
        if code == GRANTED:
            run.head = HeadFacts(version=link.version, epoch=link.epoch, kind=link.kind, moved_by=link.epoch)
            run.announce()
        state = self._broker.runs.get(manifest.run_id)
        if state is not None:
            state.head_version = max(state.head_version, link.version)

    async def held(self, run_id: str) -> list[Name]:
        return sorted(self._run(run_id).manifests)

    async def manifests(self, run_id: str, names: Sequence[Name]) -> list[WeightManifest | None]:
        found = [self._run(run_id).manifests.get(name) for name in names]
        return [None if raw is None else WeightManifest.unpack(raw) for raw in found]

    async def chunks(self, manifest: WeightManifest, indices: Sequence[int]) -> list[bytes | None]:
        run = self._run(manifest.run_id)
        return [run.chunks.get(_chunk_name(manifest, index)) for index in indices]

    async def chunk_ranges(self, manifest: WeightManifest, ranges: Sequence[Range]) -> list[bytes | None]:
        assert all(length > 0 for _, _, length in ranges)
        found = await self.chunks(manifest, [chunk for chunk, _, _ in ranges])
        return [
            None if data is None else data[start : start + length] or None
            for data, (_, start, length) in zip(found, ranges, strict=True)
        ]

    async def room_bytes(self) -> int | None:
        if self._bytes_max is None:
            return None
        return max(0, self._bytes_max - sum(len(chunk) for run in self._runs.values() for chunk in run.chunks.values()))

    async def mend(self, manifest: WeightManifest, chunks: Mapping[int, bytes], epoch: int) -> None:
        run = self._run(manifest.run_id)
        self._require_charge(run, manifest.link, manifest.run_id, epoch)
        run.manifests[(manifest.version, manifest.kind)] = manifest.pack()
        for index, data in chunks.items():
            run.chunks[_chunk_name(manifest, index)] = bytes(data)

    async def drop(self, run_id: str, links: Sequence[Link], epoch: int) -> None:
        run = self._run(run_id)
        for link in links:
            self._require_charge(run, link, run_id, epoch)
            for index in range(link.chunk_count):
                run.chunks.pop((link.version, link.kind, link.epoch, index), None)
            run.manifests.pop((link.version, link.kind), None)

    async def hold(self, run_id: str, holder: Holder, ttl_s: float) -> None:
        run, now_ms = self._run(run_id), self._broker.now_ms()
        run.holders[holder.holder_id] = (now_ms + int(ttl_s * 1000), holder)
        live = sorted((row for row in run.holders.values() if row[0] > now_ms), key=lambda row: row[0])
        run.holders = {row[1].holder_id: row for row in live[-HOLDER_COUNT_MAX:]}

    async def release_hold(self, run_id: str, holder_id: str) -> None:
        self._run(run_id).holders.pop(holder_id, None)

    async def holders(self, run_id: str, *, addressed: bool = True) -> list[Holder]:
        now_ms = self._broker.now_ms()
        live = (holder for until_ms, holder in self._run(run_id).holders.values() if until_ms > now_ms)
        found = sorted(live, key=lambda holder: holder.holder_id)
        return found if addressed else [replace(holder, address="") for holder in found]

    async def offer(self, run_id: str, data: bytes, ttl_s: float) -> None:
        check_size(f"an offer of run {run_id}", data, OFFER_BYTES_MAX)
        run = self._run(run_id)
        run.offer = (self._broker.now_ms() + int(ttl_s * 1000), bytes(data))
        run.offer_count += 1
        run.announce()

    async def offers(self, run_id: str) -> bytes | None:
        until_ms, data = self._run(run_id).offer
        return data if until_ms > self._broker.now_ms() else None

    async def answer(self, run_id: str, round_id: str, member: str, data: bytes, ttl_s: float) -> None:
        check_size(f"an answer in round {round_id} of run {run_id}", data, ANSWER_BYTES_MAX)
        found = await self.answers(run_id, round_id)
        if member not in found and len(found) >= ANSWER_COUNT_MAX:
            raise round_full(run_id, round_id)
        until_ms = self._broker.now_ms() + int(ttl_s * 1000)
        self._run(run_id).answers[round_id] = (until_ms, {**found, member: bytes(data)})

    async def answers(self, run_id: str, round_id: str) -> dict[str, bytes]:
        run, now_ms = self._run(run_id), self._broker.now_ms()
        run.answers = {name: row for name, row in run.answers.items() if row[0] > now_ms}
        return dict(run.answers.get(check_name("round", round_id), (0.0, {}))[1])

    async def report_damage(self, run_id: str, damage: Damage, ttl_s: float = DAMAGE_TTL_S) -> None:
        rows = {each.name: each for each in await self.damages(run_id)}
        if damage.name in rows or len(rows) < DAMAGE_COUNT_MAX:
            rows[damage.name] = replace(damage, chunks=damage.chunks[:DAMAGE_CHUNK_COUNT_MAX])
            self._run(run_id).damages = (self._broker.now_ms() + ttl_s * 1000, rows)

    async def damages(self, run_id: str) -> list[Damage]:
        until_ms, rows = self._run(run_id).damages
        return [rows[name] for name in sorted(rows)] if until_ms > self._broker.now_ms() else []

    async def clear_damages(self, run_id: str, damages: Sequence[Damage]) -> None:
        for damage in damages:
            self._run(run_id).damages[1].pop(damage.name, None)

    async def tend(self, run_id: str, epoch: int, ttl_s: float) -> None:
        self._run(run_id).tending = (self._broker.now_ms() + ttl_s * 1000, epoch)

    async def tended(self, run_id: str) -> int | None:
        until_ms, epoch = self._run(run_id).tending
        return epoch if until_ms > self._broker.now_ms() else None

    def _require_charge(self, run: _RunWeights, link: Link, run_id: str, epoch: int) -> None:
        if (code := may_drop(run.head, epoch)) != GRANTED:
            head = run.head
            raise refusal(code, run_id, replace(link, epoch=epoch), head_version=head.version, epoch=head.epoch)

    def _run(self, run_id: str) -> _RunWeights:
        return self._runs.setdefault(run_id, _RunWeights())

    def _is_kept(self, run: _RunWeights, manifest: WeightManifest) -> bool:
        return manifest.carrier != BROKER or not self._lost_count(run, manifest)

    def _lost_count(self, run: _RunWeights, manifest: WeightManifest) -> int:
        return sum(_chunk_name(manifest, i) not in run.chunks for i in range(manifest.link.chunk_count))

    def _require(self, code: int, manifest: WeightManifest) -> None:
        if code not in (GRANTED, ALREADY):
            head = self._run(manifest.run_id).head
            raise refusal(code, manifest.run_id, manifest.link, head_version=head.version, epoch=head.epoch)


def _chunk_name(manifest: WeightManifest, index: int) -> tuple[int, str, int, int]:
    return manifest.version, manifest.kind, manifest.epoch, index
