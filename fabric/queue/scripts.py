"""The Lua scripts: one file, one transition, loaded by name and called by digest.

- A script runs whole or not at all, on one slot: all its keys come in KEYS and share a hash tag.
- Time inside a script is the broker's; callers' clocks are never trusted.
- queue/lua/use/typed.lua stands before every script: keys of another type than theirs end none of them halfway.
- `-- use a b` in a script's head puts the functions of lua/use/a.lua and b.lua before it, as text.
- At the broker's memory limit a script is refused whole, before its first line, unless its head says
  `-- flags allow-oom`: nothing new is taken in, and all that was taken in can end.
- The typed caller of each script lives beside the port that it serves.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from hashlib import sha1
from importlib.resources import files
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import NoScriptError

from ..broker.clients.channel import Argument, Channel, Command, checked

__all__ = ["Argument", "Call", "Scripts", "load_script"]

USE = re.compile(r"^-- use ([a-z_ ]+)$", re.MULTILINE)
FLAGS = re.compile(r"^-- flags ([a-z-]+)$", re.MULTILINE)
Call = tuple[str, Sequence[str], Sequence[Argument]]


class Scripts:
    """Calls scripts on one broker connection pool."""

    def __init__(self, client: Redis) -> None:
        # A client of another kind of broker brings its own (broker/clients/cluster_client.py).
        self.channel = client.channel() if hasattr(client, "channel") else Channel(client)
        self._sources: dict[str, tuple[str, str]] = {}

    def apart(self, keys: Sequence[str]) -> list[Sequence[str]]:
        """Keys of several shards as one command may name them: all together, on a Redis Cluster one by one."""
        return [(key,) for key in keys] if self.channel.is_sharded else [keys]

    async def call(self, name: str, keys: Sequence[str], args: Sequence[Argument]) -> Any:
        """Run script `name`; its error is raised."""
        return checked(await self.call_many([(name, keys, args)]))[0]

    async def call_many(self, calls: Sequence[Call]) -> list[Any]:
        """Run several scripts in one round trip; answers in order, an error as an exception object in its place."""
        answers = await self.channel.ask_many(self._commands(calls))
        for index, answer in enumerate(answers):
            if isinstance(answer, NoScriptError):  # new to this broker, or forgotten in a restart: nothing ran
                name, keys, args = calls[index]
                again = ("EVAL", self._script(name)[1], len(keys), *keys, *args)
                (answers[index],) = await self.channel.ask_many([again])
        return answers

    async def call_together(self, calls: Sequence[Call], last: Command) -> list[Any]:
        """Run scripts of one slot and then a command, over one connection; answers in order, as `call_many`."""
        answers = await self.channel.ask_alone([*self._commands(calls), last])
        if any(isinstance(answer, NoScriptError) for answer in answers):  # all of them again: they bear it
            sources = [("EVAL", self._script(name)[1], len(keys), *keys, *args) for name, keys, args in calls]
            answers = await self.channel.ask_alone([*sources, last])
        return answers

    def _commands(self, calls: Sequence[Call]) -> list[Command]:
        return [("EVALSHA", self._script(name)[0], len(keys), *keys, *args) for name, keys, args in calls]

    def _script(self, name: str) -> tuple[str, str]:
        found = self._sources.get(name)
        if found is None:
            source = load_script(name)
            found = self._sources[name] = (sha1(source.encode(), usedforsecurity=False).hexdigest(), source)
        return found


@cache
def load_script(name: str) -> str:
    """The text of script `name`, with the functions it uses before it."""
    folder = files(__package__).joinpath("lua")
    source = folder.joinpath(f"{name}.lua").read_text("utf-8")
    used, flags = USE.search(source), FLAGS.search(source)
    parts = ["typed", *(used.group(1).split() if used else [])]
    head = f"#!lua flags={flags.group(1)}\n" if flags else "#!lua\n"
    return head + "".join(folder.joinpath("use", f"{part}.lua").read_text("utf-8") for part in parts) + source
