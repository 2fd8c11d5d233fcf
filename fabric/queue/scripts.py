"""The Lua scripts: one file, one transition, loaded by name and called by digest.

- A script runs whole or not at all, on one slot: all its keys come in KEYS and share a hash tag.
- `-- keys shard.run jobs.ready inbox chunks...` in a head says which keys a script touches, by their names in keys.py.
  The loader puts them before the script as locals (`shard.run`, `jobs.ready[1]`, `inbox`, `chunks[1]`), and builds KEYS
  from what a caller hands over: owners of keys, in any order, and then keys that have no owner (`inbox`, `chunks...`).
- Time inside a script is the broker's; callers' clocks are never trusted.
- queue/lua/use/typed.lua stands before every script: keys of another type than theirs end none of them halfway.
- `-- use a b` in a script's head puts the functions of a.lua and b.lua, in a folder `use`, before it, as text.
- At the broker's memory limit a script is refused whole, before its first line, unless its head says
  `-- flags allow-oom`: nothing new is taken in, and all that was taken in can end.
- The typed caller of each script lives beside the port that it serves.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha1
from importlib.resources import files
from importlib.resources.abc import Traversable
from itertools import repeat
from operator import attrgetter
from types import ModuleType
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import NoScriptError

from ..broker.clients.channel import Argument, Channel, Command, checked
from . import keys as key_names
from .keys import GroupKeys, JobKeys, ShardKeys, WeightKeys

__all__ = ["Argument", "Call", "Owner", "Scripts", "keys_of", "load_script", "script_names"]

USE = re.compile(r"^-- use ([a-z_ ]+)$", re.MULTILINE)
FLAGS = re.compile(r"^-- flags ([a-z-]+)$", re.MULTILINE)
KEYS = re.compile(r"^-- keys (.+)$", re.MULTILINE)
COMMENT = re.compile(r"--.*$", re.MULTILINE)

Owner = ShardKeys | JobKeys | GroupKeys | WeightKeys | str  # a str is a key that has no owner
Call = tuple[str, Sequence[Owner], Sequence[Argument]]

SHARD = ShardKeys("r", 0)
# What a head may name: the attributes of these.
OWNERS: dict[str, Any] = {
    "fabric": key_names,
    "weights": WeightKeys("r"),
    "shard": SHARD,
    "group": SHARD.of_group("g"),
    "trajectory": SHARD.trajectory,
    "turn": SHARD.turn,
    "jobs": SHARD.turn,
}
SAMPLES: dict[type, Any] = {type(owner): owner for owner in OWNERS.values()}
KEY = re.compile(rf"(?<![\w.'])({'|'.join(OWNERS)})\.(\w+)")


class Scripts:
    """Calls scripts on one broker connection pool."""

    def __init__(self, client: Redis) -> None:
        # A client of another kind of broker brings its own (broker/clients/cluster_client.py).
        self.channel = client.channel() if hasattr(client, "channel") else Channel(client)
        self._sources: dict[str, tuple[str, str]] = {}

    def apart(self, keys: Sequence[str]) -> list[Sequence[str]]:
        """Keys of several shards as one command may name them: all together, on a Redis Cluster one by one."""
        return [(key,) for key in keys] if self.channel.is_sharded else [keys]

    async def call(self, name: str, owners: Sequence[Owner], args: Sequence[Argument]) -> Any:
        """Run script `name`; its error is raised."""
        return checked(await self.call_many([(name, owners, args)]))[0]

    async def call_many(self, calls: Sequence[Call]) -> list[Any]:
        """Run several scripts in one round trip; answers in order, an error as an exception object in its place."""
        answers = await self.channel.ask_many(self._commands(calls))
        for index, answer in enumerate(answers):
            if isinstance(answer, NoScriptError):  # new to this broker, or forgotten in a restart: nothing ran
                (answers[index],) = await self.channel.ask_many([self._with_source(calls[index])])
        return answers

    async def call_together(self, calls: Sequence[Call], last: Command) -> list[Any]:
        """Run scripts of one slot and then a command, over one connection; answers in order, as `call_many`."""
        answers = await self.channel.ask_alone([*self._commands(calls), last])
        if any(isinstance(answer, NoScriptError) for answer in answers):  # all of them again: they bear it
            answers = await self.channel.ask_alone([*map(self._with_source, calls), last])
        return answers

    def _commands(self, calls: Sequence[Call]) -> list[Command]:
        found: list[Command] = []
        for name, owners, args in calls:
            keys = keys_of(name, owners)
            found.append(("EVALSHA", self._script(name)[0], len(keys), *keys, *args))
        return found

    def _with_source(self, call: Call) -> Command:
        name, owners, args = call
        keys = keys_of(name, owners)
        return ("EVAL", self._script(name)[1], len(keys), *keys, *args)

    def _script(self, name: str) -> tuple[str, str]:
        found = self._sources.get(name)
        if found is None:
            source = load_script(name)
            found = self._sources[name] = (sha1(source.encode(), usedforsecurity=False).hexdigest(), source)
        return found


@dataclass(frozen=True, kw_only=True)
class Head:
    """The keys that a script declares, those of the functions that it uses included."""

    names: tuple[str, ...]  # "shard.run", in the order of KEYS
    extras: tuple[str, ...]  # keys after them that have no owner; the last may be a list, "chunks..."
    readers: tuple[tuple[type, Callable[[Any], str | tuple[str, ...]]], ...]  # owner and how to read it, one each name


def keys_of(name: str, owners: Sequence[Owner]) -> list[str]:
    """KEYS of a call of script `name`."""
    head = _head(name)
    handed: dict[type, Any] = {ModuleType: key_names}
    extras: list[str] = []
    for owner in owners:
        if isinstance(owner, str):
            extras.append(owner)
        else:
            handed[type(owner)] = owner
    found: list[str] = []
    for kind, read in head.readers:
        value = read(handed[kind])
        if type(value) is tuple:
            found += value
        else:
            found.append(value)  # type: ignore[arg-type]
    found += extras
    is_list = bool(head.extras) and head.extras[-1].endswith("...")
    assert len(extras) >= len(head.extras) - 1 if is_list else len(extras) == len(head.extras), name
    assert _share_a_tag(found), f"keys of {name} in several slots: {found}"
    return found


def script_names() -> list[str]:
    """All scripts, sorted."""
    return sorted(name for name, (folder, _) in _texts().items() if folder != "use")


@cache
def load_script(name: str) -> str:
    """The text of script `name`, with its keys and the functions it uses before it.

    Raises:
        ValueError: it, or what it uses, declares a key that does not exist, or names one that it does not declare.
    """
    texts, head = _texts(), _head(name)
    source = texts[name][1]
    flags = FLAGS.search(source)
    first = f"#!lua flags={flags.group(1)}\n" if flags else "#!lua\n"
    parts = "".join(texts[part][1] for part in _used(source))
    undeclared = {".".join(found) for found in KEY.findall(COMMENT.sub("", parts + source))} - set(head.names)
    if undeclared:
        raise ValueError(f"script {name} does not declare {sorted(undeclared)}")
    return first + texts["typed"][1] + _locals(head) + parts + source


@cache
def _head(name: str) -> Head:
    texts = _texts()
    heads = [texts[part][1] for part in (*_used(texts[name][1]), name)]
    words = dict.fromkeys(word for text in heads for line in KEYS.findall(text) for word in line.split())
    names = tuple(word for word in words if "." in word.removesuffix("..."))
    readers = []
    for word in names:
        owner, _, key = word.partition(".")
        held, where = (SHARD, word) if owner in ("trajectory", "turn") else (OWNERS.get(owner), key)
        read = attrgetter(where.upper() if owner == "fabric" else where)
        try:
            read(held)
        except AttributeError:
            raise ValueError(f"script {name} declares {word}, and there is no such key in keys.py") from None
        readers.append((type(held), read))
    samples = [key for kind, read in readers for key in _listed(read(SAMPLES[kind]))]
    if not _share_a_tag(samples):
        raise ValueError(f"script {name} declares keys of several slots: {samples}")
    return Head(names=names, extras=tuple(word for word in words if word not in names), readers=tuple(readers))


def _locals(head: Head) -> str:
    """Lua that gives the keys their names."""
    tables: dict[str, list[str]] = {}
    count = 0
    for word, (kind, read) in zip(head.names, head.readers, strict=True):
        owner, _, key = word.partition(".")
        value = read(SAMPLES[kind])
        places = [f"KEYS[{count + n}]" for n in range(1, len(_listed(value)) + 1)]
        count += len(places)
        text = f"{{{', '.join(places)}}}" if isinstance(value, tuple) else places[0]
        tables.setdefault(owner, []).append(f"{key} = {text}")
    lines = [f"local {owner} = {{{', '.join(fields)}}}\n" for owner, fields in tables.items()]
    for n, extra in enumerate(head.extras, start=count + 1):
        name = extra.removesuffix("...")
        rest = f"local {name} = {{}}\nfor n = {n}, #KEYS do {name}[n - {n - 1}] = KEYS[n] end\n"
        lines.append(rest if extra != name else f"local {name} = KEYS[{n}]\n")
    return "".join(lines)


def _listed(value: str | tuple[str, ...]) -> tuple[str, ...]:
    return value if isinstance(value, tuple) else (value,)


def _share_a_tag(keys: Sequence[str]) -> bool:
    tag = keys[0][: keys[0].index("}") + 1] if keys else ""
    return all(map(str.startswith, keys, repeat(tag)))


def _used(source: str) -> list[str]:
    used = USE.search(source)
    return used.group(1).split() if used else []


@cache
def _texts() -> dict[str, tuple[str, str]]:
    """The folder and the text of each file, by its name."""
    found: dict[str, tuple[str, str]] = {}
    for folder, file in _files(files(__package__).joinpath("lua")):
        name = file.name.removesuffix(".lua")
        assert name not in found, f"two scripts are called {name}"
        found[name] = (folder.name, file.read_text("utf-8"))
    return found


def _files(folder: Traversable) -> Iterator[tuple[Traversable, Traversable]]:
    """The scripts in a folder and in those below it, each with the folder that it is in."""
    for each in folder.iterdir():
        if each.is_dir():
            yield from _files(each)
        elif each.name.endswith(".lua"):
            yield folder, each
