"""WeightBoard on Redis: who holds which weights of a run, offers of other paths, and the answers to them.

- Holders end by the clock of the weights' tag (queue/lua/use/look.lua): no step of the machine's time ends one early.
  Offers and answers are keys with a time to live.
- A holder's row that cannot be read is left out: whoever may write there may have written anything, and no weights
  depend on it.
- Reports of damage are answers in a round that has no end: bounded and forgotten as answers are
  (queue/lua/weights/answer.lua).
- A holder's address opens its weights to anybody who knows it, so it has a key of its own, which fewer roles may read.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from redis.asyncio import Redis

from ..broker.clients.channel import Argument
from ..broker.clients.translate import translate
from ..contract.errors import WireError
from ..contract.ids import check_name
from ..contract.wire import check_size, dump_json
from ..format.manifest import DAMAGE_CHUNK_COUNT_MAX, Damage, Holder
from ..ports.weights import (
    ANSWER_BYTES_MAX,
    ANSWER_COUNT_MAX,
    DAMAGE_COUNT_MAX,
    DAMAGE_TTL_S,
    HOLDER_COUNT_MAX,
    OFFER_BYTES_MAX,
)
from ..queue.keys import WeightKeys
from ..queue.rows import damage_row, holder_row
from ..queue.scripts import Scripts
from ..rules.weights.publish import round_full

ANNOUNCEMENT_COUNT_MAX = 16

log = logging.getLogger(__name__)


class RedisWeightBoard:
    """WeightBoard (see ports)."""

    def __init__(self, client: Redis) -> None:
        self._client: Any = client  # its stubs know neither that replies are bytes nor what pipelines return
        self._scripts = Scripts(client)

    async def hold(self, run_id: str, holder: Holder, ttl_s: float) -> None:
        row = dump_json([holder.version, holder.node, holder.region])
        await self._hold(run_id, [holder.holder_id, int(ttl_s * 1000), row, holder.address, HOLDER_COUNT_MAX])

    async def release_hold(self, run_id: str, holder_id: str) -> None:
        await self._hold(run_id, [holder_id, 0, b"", "", HOLDER_COUNT_MAX])

    async def _hold(self, run_id: str, args: list[Argument]) -> None:
        with translate(self._client):
            await self._scripts.call("hold", [WeightKeys(run_id)], args)

    async def holders(self, run_id: str, *, addressed: bool = True) -> list[Holder]:
        with translate(self._client):
            ids, rows, addresses = await self._scripts.call("holders", [WeightKeys(run_id)], [int(addressed)])
        found = []
        for holder_id, row, address in zip(ids, rows, addresses or [None] * len(ids), strict=True):
            try:
                found.append(holder_row(holder_id, row, address))
            except WireError as error:
                log.warning(
                    "weights.holder_unreadable", extra={"run_id": run_id, "holder_id": holder_id, "error": str(error)}
                )
        return sorted(found, key=lambda holder: holder.holder_id)

    async def offer(self, run_id: str, data: bytes, ttl_s: float) -> None:
        check_size(f"an offer of run {run_id}", data, OFFER_BYTES_MAX)
        with translate(self._client):
            args: list[Argument] = [data, int(ttl_s * 1000), ANNOUNCEMENT_COUNT_MAX]
            await self._scripts.call("offer", [WeightKeys(run_id)], args)

    async def offers(self, run_id: str) -> bytes | None:
        with translate(self._client):
            found: bytes | None = await self._client.get(WeightKeys(run_id).offer)
        return found

    async def answer(self, run_id: str, round_id: str, member: str, data: bytes, ttl_s: float) -> None:
        check_size(f"an answer in round {round_id} of run {run_id}", data, ANSWER_BYTES_MAX)
        key = WeightKeys(run_id).answers(check_name("round", round_id))
        with translate(self._client):
            args: list[Argument] = [member, data, int(ttl_s * 1000), ANSWER_COUNT_MAX]
            is_taken = await self._scripts.call("answer", [key], args)
        if not is_taken:
            raise round_full(run_id, round_id)

    async def answers(self, run_id: str, round_id: str) -> dict[str, bytes]:
        with translate(self._client):
            found = await self._client.hgetall(WeightKeys(run_id).answers(check_name("round", round_id)))
        return {member.decode("utf-8", "replace"): data for member, data in found.items()}

    async def report_damage(self, run_id: str, damage: Damage, ttl_s: float = DAMAGE_TTL_S) -> None:
        row = dump_json([damage.epoch, damage.chunks[:DAMAGE_CHUNK_COUNT_MAX], damage.problem, damage.reporter])
        with translate(self._client):
            args: list[Argument] = [_field(damage), row, int(ttl_s * 1000), DAMAGE_COUNT_MAX]
            await self._scripts.call("answer", [WeightKeys(run_id).damage], args)

    async def damages(self, run_id: str) -> list[Damage]:
        key = WeightKeys(run_id).damage
        with translate(self._client):
            rows = await self._client.hgetall(key)
        found, unreadable = [], []
        for field, raw in rows.items():
            try:
                found.append(damage_row(field, raw))
            except WireError as error:
                unreadable.append(field)
                log.warning("weights.report_unreadable", extra={"run_id": run_id, "error": str(error)})
        if unreadable:  # nobody can remove it by its name
            await self._forget(run_id, unreadable)
        return sorted(found, key=lambda damage: damage.name)

    async def clear_damages(self, run_id: str, damages: Sequence[Damage]) -> None:
        if damages:
            await self._forget(run_id, [_field(damage) for damage in damages])

    async def _forget(self, run_id: str, fields: Sequence[bytes | str]) -> None:
        with translate(self._client):
            await self._client.hdel(WeightKeys(run_id).damage, *fields)

    async def tend(self, run_id: str, epoch: int, ttl_s: float) -> None:
        with translate(self._client):
            await self._client.set(WeightKeys(run_id).tending, epoch, px=int(ttl_s * 1000))

    async def tended(self, run_id: str) -> int | None:
        with translate(self._client):
            found: bytes | None = await self._client.get(WeightKeys(run_id).tending)
        return int(found) if found is not None and found.isdigit() else None


def _field(damage: Damage) -> str:
    return f"{damage.version}:{damage.kind}"
