"""A weight store around another one, to which it passes every call that it does not override."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..format.manifest import Damage, Head, Holder, WeightManifest
from ..ports.weights import DAMAGE_TTL_S, Range, WeightStore
from ..rules.weights.chain import Link


class PassingStore:
    """WeightStore (see ports) that hands every call to `inner`; decorators override what they do themselves."""

    def __init__(self, inner: WeightStore) -> None:
        self.inner = inner

    async def open_publisher(self, run_id: str) -> int:
        return await self.inner.open_publisher(run_id)

    async def head(self, run_id: str) -> Head:
        return await self.inner.head(run_id)

    async def wait_head(self, run_id: str, above: int, timeout_s: float) -> Head:
        return await self.inner.wait_head(run_id, above, timeout_s)

    async def put_chunks(self, manifest: WeightManifest, first_index: int, chunks: Sequence[bytes]) -> None:
        await self.inner.put_chunks(manifest, first_index, chunks)

    async def put_manifest(self, manifest: WeightManifest) -> None:
        await self.inner.put_manifest(manifest)

    async def advance_head(self, manifest: WeightManifest, shard_count: int) -> None:
        await self.inner.advance_head(manifest, shard_count)

    async def held(self, run_id: str) -> list[tuple[int, str]]:
        return await self.inner.held(run_id)

    async def manifests(self, run_id: str, names: Sequence[tuple[int, str]]) -> list[WeightManifest | None]:
        return await self.inner.manifests(run_id, names)

    async def chunks(self, manifest: WeightManifest, indices: Sequence[int]) -> list[bytes | None]:
        return await self.inner.chunks(manifest, indices)

    async def chunk_ranges(self, manifest: WeightManifest, ranges: Sequence[Range]) -> list[bytes | None]:
        return await self.inner.chunk_ranges(manifest, ranges)

    async def mend(self, manifest: WeightManifest, chunks: Mapping[int, bytes], epoch: int) -> None:
        await self.inner.mend(manifest, chunks, epoch)

    async def drop(self, run_id: str, links: Sequence[Link], epoch: int) -> None:
        await self.inner.drop(run_id, links, epoch)

    async def hold(self, run_id: str, holder: Holder, ttl_s: float) -> None:
        await self.inner.hold(run_id, holder, ttl_s)

    async def release_hold(self, run_id: str, holder_id: str) -> None:
        await self.inner.release_hold(run_id, holder_id)

    async def holders(self, run_id: str, *, addressed: bool = True) -> list[Holder]:
        return await self.inner.holders(run_id, addressed=addressed)

    async def offer(self, run_id: str, data: bytes, ttl_s: float) -> None:
        await self.inner.offer(run_id, data, ttl_s)

    async def offers(self, run_id: str) -> bytes | None:
        return await self.inner.offers(run_id)

    async def answer(self, run_id: str, round_id: str, member: str, data: bytes, ttl_s: float) -> None:
        await self.inner.answer(run_id, round_id, member, data, ttl_s)

    async def answers(self, run_id: str, round_id: str) -> dict[str, bytes]:
        return await self.inner.answers(run_id, round_id)

    async def report_damage(self, run_id: str, damage: Damage, ttl_s: float = DAMAGE_TTL_S) -> None:
        await self.inner.report_damage(run_id, damage, ttl_s)

    async def damages(self, run_id: str) -> list[Damage]:
        return await self.inner.damages(run_id)

    async def clear_damages(self, run_id: str, damages: Sequence[Damage]) -> None:
        await self.inner.clear_damages(run_id, damages)

    async def tend(self, run_id: str, epoch: int, ttl_s: float) -> None:
        await self.inner.tend(run_id, epoch, ttl_s)

    async def tended(self, run_id: str) -> int | None:
        return await self.inner.tended(run_id)

    async def room_bytes(self) -> int | None:
        return await self.inner.room_bytes()
