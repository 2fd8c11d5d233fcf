"""The Lua scripts: one file, one transition, loaded by name and called by digest.

- A script runs whole or not at all, on one slot: all its keys come in KEYS and share a hash tag.
- Time inside a script is the broker's; callers' clocks are never trusted.
- `-- use a b` in a script's head puts the functions of lua/use/a.lua and b.lua before it, as text.
- The typed caller of each script lives beside the port that it serves.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from hashlib import sha1
from importlib.resources import files
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import NoScriptError

USE = re.compile(r"^-- use ([a-z_ ]+)$", re.MULTILINE)
Argument = str | bytes | int | float


class Scripts:
    """Calls scripts on one broker connection pool."""

    def __init__(self, client: Redis) -> None:
        self._client = client
        self._sources: dict[str, tuple[str, str]] = {}

    async def call(self, name: str, keys: Sequence[str], args: Sequence[Argument]) -> Any:
        """Run script `name`; loads it first where the broker has not seen it (or forgot it in a restart)."""
        digest, source = self._script(name)
        try:
            return await self._client.evalsha(digest, len(keys), *keys, *args)
        except NoScriptError:
            return await self._client.eval(source, len(keys), *keys, *args)

    async def call_many(self, calls: Sequence[tuple[str, Sequence[str], Sequence[Argument]]]) -> list[Any]:
        """Run several scripts in one round trip; answers in order, an error as an exception object in its place."""
        answers = await self._pipeline(calls)
        if any(isinstance(answer, NoScriptError) for answer in answers):
            # Nothing ran for those calls, so repeating just them is safe.
            for index, answer in enumerate(answers):
                if isinstance(answer, NoScriptError):
                    answers[index] = await self.call(*calls[index])
        return answers

    async def _pipeline(self, calls: Sequence[tuple[str, Sequence[str], Sequence[Argument]]]) -> list[Any]:
        pipeline = self._client.pipeline(transaction=False)
        for name, keys, args in calls:
            pipeline.evalsha(self._script(name)[0], len(keys), *keys, *args)
        return list(await pipeline.execute(raise_on_error=False))

    def _script(self, name: str) -> tuple[str, str]:
        found = self._sources.get(name)
        if found is None:
            source = load_script(name)
            found = self._sources[name] = (sha1(source.encode(), usedforsecurity=False).hexdigest(), source)
        return found


def load_script(name: str) -> str:
    """The text of script `name`, with the functions it uses before it."""
    folder = files(__package__).joinpath("lua")
    source = folder.joinpath(f"{name}.lua").read_text("utf-8")
    used = USE.search(source)
    parts = used.group(1).split() if used else []
    return "".join(folder.joinpath("use", f"{part}.lua").read_text("utf-8") for part in parts) + source
