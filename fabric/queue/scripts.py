"""The Lua scripts: one file, one transition, loaded by name and called by digest.

- A script runs whole or not at all, on one slot: all its keys come in KEYS and share a hash tag.
- `-- keys shard.run jobs.ready inbox chunks...` in a head says which keys a script touches, by their names in keys.py.
  The loader puts them before the script as locals (`shard.run`, `jobs.ready[1]`, `inbox`, `chunks[1]`). A caller hands
  over owners of keys, in any order, and then keys that have no owner (`inbox`, `chunks...`); the loader builds KEYS.
- Time inside a script is the broker's; callers' clocks are never trusted.
- queue/lua/use/typed.lua stands before every script: keys of another type than theirs end none of them halfway.
- `-- use a b` in a script's head puts the functions of a.lua and b.lua, in a folder `use`, before it, as text.
- At the broker's memory limit a script is refused whole, before its first line, unless its head says
  `-- flags allow-oom`: the broker takes in no new work, and all accepted work can end.
- The typed caller of each script lives beside the port that it serves.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from hashlib import sha1
from importlib.resources import files
from itertools import groupby
from operator import attrgetter
from types import ModuleType
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import NoScriptError

from ..broker.clients.channel import Argument, Channel, Command, checked
from ..broker.clients.url import Durability
from ..broker.server_facts import BrokerFacts
from ..contract.errors import BrokerError, ConfigError
from . import keys as key_names
from .keys import GroupKeys, JobKeys, ShardKeys, WeightKeys

USE = re.compile(r"^-- use ([a-z_ ]+)$", re.MULTILINE)
FLAGS = re.compile(r"^-- flags ([a-z-]+)$", re.MULTILINE)
KEYS = re.compile(r"^-- keys (.+)$", re.MULTILINE)
FUNCTION = re.compile(r"^local function (\w+)\((?:[^\n]*\bend|.*?^end)\n", re.MULTILINE | re.DOTALL)
WORD = re.compile(r"\w+")
COMMENT = re.compile(r"--.*$", re.MULTILINE)
REMARK = re.compile(r"^[ \t]*--.*\n", re.MULTILINE)  # a third of what a broker is sent when it does not know a script

Owner = ShardKeys | JobKeys | GroupKeys | WeightKeys | str  # a str is a key that has no owner
Call = tuple[str, Sequence[Owner], Sequence[Argument]]

SHARD = ShardKeys("r", 0)
# A head may name the attributes of these.
OWNERS: dict[str, Any] = {
    "fabric": key_names,
    "weights": WeightKeys("r"),
    "shard": SHARD,
    "group": SHARD.of_group("g"),
    "trajectory": SHARD.trajectory,
    "turn": SHARD.turn,
    "jobs": SHARD.turn,
}
KEY = re.compile(rf"(?<![\w.'])({'|'.join(OWNERS)})\.(\w+)")


class Scripts:
    """Calls scripts on one broker connection pool."""

    def __init__(self, client: Redis) -> None:
        # A client of another kind of broker brings its own (broker/clients/cluster_client.py).
        self.channel = client.channel() if hasattr(client, "channel") else Channel(client)
        self._sources: dict[str, tuple[str, str]] = {}

    def apart(self, keys: Sequence[str]) -> list[Sequence[str]]:
        """Part the keys of several shards as one command may name them: all together, on a Redis Cluster one by one."""
        return [(key,) for key in keys] if self.channel.is_sharded else [keys]

    async def call(self, name: str, owners: Sequence[Owner], args: Sequence[Argument]) -> Any:
        """Run script `name`; raise its error."""
        return checked(await self.call_many([(name, owners, args)]))[0]

    async def call_many(self, calls: Sequence[Call]) -> list[Any]:
        """Run several scripts in one round trip; answers in order, an error as an exception object in its place."""
        answers = await self.channel.ask_many(self._commands(calls))
        for index, answer in enumerate(answers):
            if isinstance(answer, NoScriptError):  # new to this broker, or forgotten in a restart: nothing ran
                (answers[index],) = await self.channel.ask_many([self._with_source(calls[index])])
        return answers

    async def call_together(self, calls: Sequence[Call], last: Command) -> list[Any]:
        """Run scripts of one slot and then a command, over one connection; answer in order, like `call_many`."""
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

    counts: Mapping[str, int | None]  # "shard.run" → how many keys it lists; None: it is one. In the order of KEYS
    readers: tuple[tuple[type, Callable[[Any], tuple[str, ...]]], ...]  # an owner's type, and how to read its keys
    extras: tuple[str, ...]  # keys after them that have no owner; the last may be a list, "chunks..."
    extra_count: int  # without that list
    has_list: bool

    def keys(self, owners: Sequence[Owner]) -> list[str]:
        """Build the KEYS of a call from the owners that a caller hands over."""
        handed: dict[type, Any] = {type(owner): owner for owner in owners}
        handed[ModuleType] = key_names
        extras = [owner for owner in owners if type(owner) is str] if str in handed else []
        found: list[str] = []
        firsts = extras[:]  # keys of one owner share its tag
        for kind, read in self.readers:
            part = read(handed[kind])
            firsts.append(part[0])
            found += part
        assert len(extras) == self.extra_count or (len(extras) > self.extra_count and self.has_list), extras
        assert _share_a_tag(firsts), f"keys in several slots: {firsts}"
        return found + extras if extras else found


def keys_of(name: str, owners: Sequence[Owner]) -> list[str]:
    """Build the KEYS of a call of script `name`."""
    return _head(name).keys(owners)


def script_names() -> list[str]:
    """List the names of all scripts, sorted."""
    return sorted(name for name, (folder, _) in _files().items() if folder != "use")


@cache
def load_script(name: str) -> str:
    """Return the text of script `name`, with its keys and the functions it uses before it."""
    return script_text(name, _texts())


def script_text(name: str, texts: Mapping[str, str]) -> str:
    """Build the text that `load_script` returns. texts: the text of each file, by its name.

    Raises:
        ValueError: it, or a function it uses, declares a key that does not exist, or names a key that it does not
            declare.
    """
    head, source = head_of(name, texts), texts[name]
    parts = _needed("".join(texts[part] for part in _used(source)), source)
    undeclared = {".".join(found) for found in KEY.findall(COMMENT.sub("", parts + source))} - set(head.counts)
    if undeclared:
        raise ValueError(f"script {name} does not declare {', '.join(sorted(undeclared))}")
    flags = FLAGS.search(source)
    first = f"#!lua flags={flags.group(1)}\n" if flags else "#!lua\n"
    return first + REMARK.sub("", texts["typed"] + _locals(head) + parts + source)


def _needed(parts: str, source: str) -> str:
    """Leave functions out that nothing calls: a script defines all of its own anew each time that it runs."""
    bodies = {found.group(1): found.group() for found in FUNCTION.finditer(parts)}
    words = set(WORD.findall(COMMENT.sub("", FUNCTION.sub("", parts) + source)))
    while more := {word for name in words & bodies.keys() for word in WORD.findall(bodies.pop(name))}:
        words |= more
    return FUNCTION.sub(lambda found: "" if found.group(1) in bodies else found.group(), parts)


@cache
def _head(name: str) -> Head:
    return head_of(name, _texts())


def head_of(name: str, texts: Mapping[str, str]) -> Head:
    """Read what a script declares.

    Raises:
        ValueError: a key that does not exist, or keys of several slots.
    """
    sources = [texts[part] for part in (*_used(texts[name]), name)]
    words = dict.fromkeys(word for source in sources for line in KEYS.findall(source) for word in line.split())
    found: dict[str, tuple[type, str, Any]] = {}  # name → its owner's type, how it is called there, an example
    for word in words:
        owner, dot, key = word.removesuffix("...").partition(".")
        if dot:
            held, path = (SHARD, word) if owner in ("trajectory", "turn") else (OWNERS.get(owner), key)
            path = path.upper() if owner == "fabric" else path
            try:
                found[word] = type(held), path, attrgetter(path)(held)
            except AttributeError:
                raise ValueError(f"script {name} declares {word}, and there is no such key in keys.py") from None
    examples = [value for *_, value in found.values()]
    if not _share_a_tag([key for value in examples for key in ((value,) if isinstance(value, str) else value)]):
        raise ValueError(f"script {name} declares keys of several slots: {', '.join(found)}")
    extras = tuple(word for word in words if word not in found)
    has_list = any(word.endswith("...") for word in extras)
    return Head(
        counts={word: None if isinstance(value, str) else len(value) for word, (*_, value) in found.items()},
        readers=tuple(_readers(found.values())),
        extras=extras,
        extra_count=len(extras) - has_list,
        has_list=has_list,
    )


def _readers(found: Iterable[tuple[type, str, Any]]) -> Iterator[tuple[type, Callable[[Any], tuple[str, ...]]]]:
    """Make as few readers as possible: each reads all keys of an owner that stand together."""
    for (kind, is_one), part in groupby(found, key=lambda each: (each[0], isinstance(each[2], str))):
        paths = [path for _, path, _ in part]
        if not is_one:
            yield from ((kind, attrgetter(path)) for path in paths)
        elif len(paths) > 1:
            yield kind, attrgetter(*paths)
        else:
            yield kind, partial(_only, paths[0])


def _only(path: str, owner: Any) -> tuple[str]:
    """Return a tuple, as attrgetter does for two paths or more."""
    return (attrgetter(path)(owner),)


def _locals(head: Head) -> str:
    """Write the Lua that gives the keys their names."""
    tables: dict[str, list[str]] = {}
    place = 1
    for word, count in head.counts.items():
        owner, _, key = word.partition(".")
        places = [f"KEYS[{place + n}]" for n in range(count or 1)]
        place += len(places)
        text = places[0] if count is None else f"{{{', '.join(places)}}}"
        tables.setdefault(owner, []).append(f"{key} = {text}")
    lines = [f"local {owner} = {{{', '.join(fields)}}}\n" for owner, fields in tables.items()]
    for n, extra in enumerate(head.extras, start=place):
        name = extra.removesuffix("...")
        rest = f"local {name} = {{}}\nfor n = {n}, #KEYS do {name}[n - {n - 1}] = KEYS[n] end\n"
        lines.append(rest if extra != name else f"local {name} = KEYS[{n}]\n")
    return "".join(lines)


def _share_a_tag(keys: Sequence[str]) -> bool:
    tag = keys[0][: keys[0].index("}") + 1] if keys else ""
    return all(key.startswith(tag) for key in keys)


def _used(source: str) -> list[str]:
    used = USE.search(source)
    return used.group(1).split() if used else []


@cache
def _texts() -> dict[str, str]:
    return {name: text for name, (_, text) in _files().items()}


@cache
def _files() -> dict[str, tuple[str, str]]:
    """Return each file's folder and text, by the file's name."""
    found: dict[str, tuple[str, str]] = {}
    folders = [files(__package__).joinpath("lua")]
    for folder in folders:
        for each in folder.iterdir():
            name = each.name.removesuffix(".lua")
            if each.is_dir():
                folders.append(each)  # the loop goes on to it
            elif name != each.name:
                assert name not in found, f"two scripts are called {name}"
                found[name] = (folder.name, each.read_text("utf-8"))
    return found


# ---------------------------------------------------------------- durability
#
# How safe a push must be before it counts as acknowledged: in the broker's memory, on its disk, or on a replica.
#
# - memory: the broker has it. It survives whatever happens to other processes, and the broker as far as its own
#   persistence goes (docs/guarantees.md).
# - disk: the broker's append-only file is synced past it (WAITAOF). A power cut does not take it back.
# - replica: a replica has it, too (WAIT). A fail-over to that replica does not take it back.
# - A push travels with its barrier over one connection, and both are repeated together: the barrier confirms the write
#   just before it, and push_group writes something even for a group that it knows already.


BARRIER_MS_MAX = 4_000  # less than the silence that a connection bears; everysec needs 1 s, 2 s on a busy disk
BARRIERS: dict[Durability, Command] = {
    "disk": ("WAITAOF", 1, 0, BARRIER_MS_MAX),
    "replica": ("WAIT", 1, BARRIER_MS_MAX),
}
NEXT_STEPS = {
    "disk": "look at its disk and at appendfsync",
    "replica": "see that a replica is connected (INFO replication)",
}


def check_durability(facts: BrokerFacts, durability: Durability) -> None:
    """Refuse at the start a durability that the broker could never confirm.

    Raises:
        ConfigError: durability "disk" on a broker that has no append-only file, or cannot tell of it.
    """
    if durability == "disk" and not facts.can_confirm_disk:
        raise ConfigError(
            f"durability=disk needs a broker that writes an append-only file and can say so (WAITAOF): this one is "
            f"{facts.version_text}, appendonly {'yes' if facts.is_aof_on else 'no'}; "
            "set appendonly yes on Redis >= 7.2 or Valkey >= 8"
        )


async def call_durably(scripts: Scripts, calls: Sequence[Call], durability: Durability) -> list[Any]:
    """Run scripts of one slot, and wait until their writes are safe.

    Returns:
        Answers in order, an error as an exception object in its place.

    Raises:
        BrokerError: written, but not confirmed in time; facts["reason"] is "durability". Repeating it is safe.
    """
    assert durability != "memory"
    *answers, safe = await scripts.call_together(calls, BARRIERS[durability])
    if isinstance(safe, Exception):
        raise safe
    if (safe[0] if isinstance(safe, list) else safe) < 1:
        raise BrokerError(
            f"the broker took the push, but did not confirm within {BARRIER_MS_MAX / 1000:g} s that it is safe "
            f"(durability={durability}): {NEXT_STEPS[durability]}, then push the same group ids again",
            reason="durability",
        )
    return answers
