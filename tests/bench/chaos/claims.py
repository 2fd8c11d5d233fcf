"""How long a fault keeps work waiting, read from the broker's own records while it happens.

- A claim counts as *over its fault* once its job was claimed anew, was settled or is gone, or once its holder, who
  came back in time, has renewed it. Waiting to be claimed is not over.
- Only reads: nothing here changes what it looks at.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from rollfab.fabric.queue.keys import JobKeys, ShardKeys

LOOK_S = 0.02


@dataclass(frozen=True, slots=True)
class HeldClaim:
    """One claim as it was at the moment of a fault. deadline_ms: until when it held, by the broker's clock."""

    job_id: str
    state: str
    fence: int
    deadline_ms: float


@dataclass(frozen=True, slots=True)
class Held:
    """The claims of one kind that one process held."""

    keys: JobKeys
    claims: tuple[HeldClaim, ...]


class ClaimWatch:
    """Looks at the jobs of one run with one shard."""

    def __init__(self, url: str, run_id: str) -> None:
        self._redis: Any = Redis.from_url(  # its stubs do not know that replies are bytes
            url, socket_timeout=1.0, socket_connect_timeout=1.0
        )
        self._keys = ShardKeys(run_id, 0)

    async def close(self) -> None:
        """Close the connection."""
        await self._redis.aclose()

    async def held_by(self, worker_id: str) -> list[Held]:
        """Trajectories and turns that a process holds now."""
        return [await self._held(keys, "claimed", worker_id) for keys in (self._keys.trajectory, self._keys.turn)]

    async def scoring(self) -> list[Held]:
        """Trajectories that wait for their reward now, whichever reward worker has been asked."""
        return [await self._held(self._keys.trajectory, "scoring", None)]

    async def _held(self, keys: JobKeys, state: str, worker_id: str | None) -> Held:
        found: dict[str, int] = {}
        for name, record in (await self._redis.hgetall(keys.record)).items():
            its_state, fence, *_, worker = record.decode().split()
            if its_state == state and worker_id in (None, worker):
                found[name.decode()] = int(fence)
        deadlines = await self._redis.zmscore(keys.deadline, list(found)) if found else []
        claims = [
            HeldClaim(name, state, found[name], until_ms or 0.0)
            for name, until_ms in zip(found, deadlines, strict=True)
        ]
        return Held(keys, tuple(claims))

    async def wait(self, held: Sequence[Held], timeout_s: float) -> bool:
        """Return once all these claims are over their fault; False when some are not after `timeout_s`."""
        until_s = time.monotonic() + timeout_s
        left = [each for each in held if each.claims]
        while left and time.monotonic() < until_s:
            await asyncio.sleep(LOOK_S)
            try:
                left = [each for each in [await self._left(each) for each in left] if each.claims]
            except (RedisError, OSError):  # the broker is away, so nothing goes on
                continue
        return not left

    async def _left(self, held: Held) -> Held:
        names = [claim.job_id for claim in held.claims]
        records = await self._redis.hmget(held.keys.record, names)
        deadlines = await self._redis.zmscore(held.keys.deadline, names)
        rows = zip(held.claims, records, deadlines, strict=True)
        return Held(held.keys, tuple(claim for claim, record, until_ms in rows if not is_over(claim, record, until_ms)))

    async def settled_count(self) -> int:
        """Turns settled since the run began. Raises RedisError, OSError."""
        return int(await self._redis.hget(self._keys.counters, "turns_settled") or 0)

    async def wait_settled(self, timeout_s: float) -> bool:
        """Return once the broker answers and a turn was settled after its first answer; False after `timeout_s`."""
        until_s = time.monotonic() + timeout_s
        before: int | None = None
        while time.monotonic() < until_s:
            try:
                now = await self.settled_count()
            except (RedisError, OSError):
                now = None
            if now is not None and before is not None and now > before:
                return True
            before = now if before is None else before
            await asyncio.sleep(LOOK_S)
        return False


def is_over(claim: HeldClaim, record: bytes | None, deadline_ms: float | None) -> bool:
    """Whether a claim's job goes on, or has ended."""
    if record is None:
        return True
    state, fence = record.decode().split()[:2]
    if state == "ready":
        return False
    if state != claim.state or int(fence) != claim.fence:
        return True
    # A reward that is asked for again gets a new deadline, too, and waits on.
    return state == "claimed" and deadline_ms is not None and deadline_ms > claim.deadline_ms
