"""Keys of another type than the command that reads or writes them: they hold nothing of ours.

- A reading command finds nothing there, and goes on; a blocking one waits first. A writing command puts our table in
  the key's place, if the URL's user may. So no reader has to check types; queue/lua/use/typed.lua does it for scripts.
- Pipelines and channels answer as the broker does, so a survey of tables can name such keys.
"""

from __future__ import annotations

import asyncio
from typing import Any

import redis.asyncio
from redis.exceptions import NoPermissionError, ResponseError

WRITES = frozenset("HSET HSETNX ZADD LPUSH RPUSH XADD XGROUP".split())
LISTS = frozenset("HKEYS HVALS LRANGE SMEMBERS XRANGE XREAD XREADGROUP XREVRANGE ZRANGE".split())
ZEROS = frozenset("HDEL HEXISTS HLEN HSTRLEN LLEN LREM SCARD SREM XACK XDEL XLEN ZCARD ZREM".split())
SILENCE_S = 1.0  # longest wait at a key that cannot be waited at


def is_wrong_type(error: object) -> bool:
    """Tell whether a broker refused a command because the key is of another type than ours."""
    return isinstance(error, Exception) and "WRONGTYPE" in str(error)


class TypedClient(redis.asyncio.Redis):
    """A client whose single commands get along with keys of another type."""

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        """Do the same as the library, except at a key of another type."""
        try:
            return await self._ask(*args, **options)
        except ResponseError as error:
            if not is_wrong_type(error):
                raise
            name, *_ = words = str(args[0]).split() + list(args[1:])
            if name not in WRITES:
                return await _nothing(name, words)
            try:
                await self._ask("DEL", words[2] if name == "XGROUP" else words[1])
            except NoPermissionError:
                raise error from None
            return await self._ask(*args, **options)

    async def _ask(self, *args: Any, **options: Any) -> Any:
        return await super().execute_command(*args, **options)  # type: ignore[no-untyped-call]


async def _nothing(name: str, words: list[Any]) -> Any:
    """Return a command's answer for a key that does not exist, as the client library shapes it."""
    if name == "BLPOP":
        await asyncio.sleep(min(float(words[-1]) or SILENCE_S, SILENCE_S))
    elif name == "XREAD" and "BLOCK" in words:
        await asyncio.sleep(min(int(words[words.index("BLOCK") + 1]) / 1000, SILENCE_S))
    if name == "HMGET":
        return [None] * (len(words) - 2)
    if name == "HSCAN":
        return 0, {}
    if name == "HGETALL":
        return {}
    if name in LISTS:
        return []
    return 0 if name in ZEROS else None
