"""The commands that the fabric's scripts and ports use, as Redis carries them out; tests/contracts compares the two.

Answers are as RESP2 sends them: bytes, whole numbers, lists, None. What the fabric begins to use is added here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from itertools import islice
from math import isinf
from typing import Any

from redis.exceptions import ResponseError

from tests.standin.keyspace import Hash, Keyspace, List, SortedSet, Text

Words = Sequence[bytes]
Command = Callable[[Keyspace, Words], Any]
COMMANDS: dict[bytes, Command] = {}
OK = b"OK"
NO_NUMBER = "ERR value is not an integer or out of range"


def command(carry_out: Command) -> Command:
    """Register a command under its function's name."""
    COMMANDS[carry_out.__name__.rstrip("_").upper().encode()] = carry_out
    return carry_out


def whole(word: bytes) -> int:
    """A number. Raises ResponseError: it is none."""
    try:
        return int(word)
    except ValueError:
        raise ResponseError(NO_NUMBER) from None


def pairs(words: Words) -> list[tuple[bytes, bytes]]:
    """Words two by two."""
    return list(zip(words[::2], words[1::2], strict=True))


# ---- keys


@command
def time(space: Keyspace, words: Words) -> Any:
    now_ms = space.wall_ms()
    return [b"%d" % (now_ms // 1000), b"%d" % (now_ms % 1000 * 1000)]


@command
def ping(space: Keyspace, words: Words) -> Any:
    return b"PONG"


@command
def info(space: Keyspace, words: Words) -> Any:
    used = sum(len(key) for key in space.held)
    return b"# Memory\r\nused_memory:%d\r\nmaxmemory:0\r\nmaxmemory_policy:noeviction\r\n" % used


@command
def exists(space: Keyspace, words: Words) -> Any:
    return sum(space.is_there(key) for key in words)


@command
def del_(space: Keyspace, words: Words) -> Any:
    return sum(space.delete(key) for key in words)


COMMANDS[b"UNLINK"] = COMMANDS[b"DEL"]


@command
def rename(space: Keyspace, words: Words) -> Any:
    if not space.is_there(words[0]):
        raise ResponseError("ERR no such key")
    value, ends_ms = space.held[words[0]], space.ends_ms.get(words[0])
    space.delete(words[0])
    space.held[words[1]] = value
    space.ends_ms.pop(words[1], None)
    if ends_ms is not None:
        space.ends_ms[words[1]] = ends_ms
    space.wake(words[1])
    return OK


@command
def flushall(space: Keyspace, words: Words) -> Any:
    for key in space.names():
        space.delete(key)
    return OK


@command
def type_(space: Keyspace, words: Words) -> Any:
    kind = type(space.held[words[0]]).type_name if space.is_there(words[0]) else "none"
    return {"ok": kind.encode()}


@command
def scan(space: Keyspace, words: Words) -> Any:
    options = dict(pairs([*words[1:]]))
    pattern = options.get(b"MATCH", b"*").decode()
    names = space.names()
    return [b"0", [name for name in names if fnmatchcase(name.decode(), pattern.replace("\\?", "[?]"))]]


@command
def pexpire(space: Keyspace, words: Words) -> Any:
    if not space.is_there(words[0]):
        return 0
    space.ends_ms[words[0]] = space.wall_ms() + whole(words[1])
    return 1


@command
def persist(space: Keyspace, words: Words) -> Any:
    return int(space.is_there(words[0]) and space.ends_ms.pop(words[0], None) is not None)


@command
def pttl(space: Keyspace, words: Words) -> Any:
    if not space.is_there(words[0]):
        return -2
    ends_ms = space.ends_ms.get(words[0])
    return -1 if ends_ms is None else int(ends_ms - space.wall_ms())


# ---- strings


@command
def get(space: Keyspace, words: Words) -> Any:
    found = space.get(words[0], Text)
    return None if found is None else bytes(found)


@command
def set_(space: Keyspace, words: Words) -> Any:
    key, value, *options = words
    if options == [b"XX"] and not space.is_there(key):
        return None
    ends_ms = space.wall_ms() + whole(options[1]) if len(options) == 2 else None
    space.put(key, value, ends_ms)
    return {"ok": OK}


@command
def mget(space: Keyspace, words: Words) -> Any:
    found = [space.held.get(key) if space.is_there(key) else None for key in words]
    return [bytes(each) if type(each) is Text else None for each in found]


@command
def getrange(space: Keyspace, words: Words) -> Any:
    found = space.get(words[0], Text) or b""
    start, end = whole(words[1]), whole(words[2])
    assert start >= 0, "the stand-in counts from the beginning"
    return bytes(found[start : len(found) if end == -1 else end + 1])


# ---- hashes


@command
def hget(space: Keyspace, words: Words) -> Any:
    found = space.get(words[0], Hash)
    return None if found is None else found.get(words[1])


@command
def hmget(space: Keyspace, words: Words) -> Any:
    found = space.get(words[0], Hash)
    return [None] * (len(words) - 1) if found is None else [found.get(word) for word in words[1:]]


@command
def hgetall(space: Keyspace, words: Words) -> Any:
    found = space.get(words[0], Hash)
    return [] if found is None else [word for row in found.items() for word in row]


@command
def hvals(space: Keyspace, words: Words) -> Any:
    return list((space.get(words[0], Hash) or {}).values())


@command
def hkeys(space: Keyspace, words: Words) -> Any:
    return list(space.get(words[0], Hash) or ())


@command
def hset(space: Keyspace, words: Words) -> Any:
    table = space.make(words[0], Hash)
    before = len(table)
    table.update(pairs(words[1:]))
    return len(table) - before


@command
def hsetnx(space: Keyspace, words: Words) -> Any:
    key, field, value = words
    table = space.make(key, Hash)
    if field in table:
        return 0
    table[field] = value
    return 1


@command
def hdel(space: Keyspace, words: Words) -> Any:
    table = space.get(words[0], Hash)
    if table is None:
        return 0
    count = sum(table.pop(field, None) is not None for field in words[1:])
    space.drop_empty(words[0], table)
    return count


@command
def hexists(space: Keyspace, words: Words) -> Any:
    return int(words[1] in (space.get(words[0], Hash) or ()))


@command
def hlen(space: Keyspace, words: Words) -> Any:
    return len(space.get(words[0], Hash) or ())


@command
def hstrlen(space: Keyspace, words: Words) -> Any:
    return len((space.get(words[0], Hash) or {}).get(words[1], b""))


@command
def hincrby(space: Keyspace, words: Words) -> Any:
    key, field, by = words
    table = space.make(key, Hash)
    try:
        total = int(table.get(field, b"0")) + whole(by)
    except ValueError:
        raise ResponseError("ERR hash value is not an integer") from None
    table[field] = b"%d" % total
    return total


@command
def hscan(space: Keyspace, words: Words) -> Any:
    return [b"0", hgetall(space, words[:1])]


# ---- sorted sets


def _score(number: float) -> bytes:
    if isinf(number):
        return b"inf" if number > 0 else b"-inf"
    return b"%d" % number if number == int(number) else repr(number).encode()


def _with_scores(rows: Sequence[tuple[float, bytes]], words: Words) -> Any:
    if b"WITHSCORES" in words:
        return [word for score, member in rows for word in (member, _score(score))]
    return [member for _, member in rows]


@command
def zadd(space: Keyspace, words: Words) -> Any:
    key, *rest = words
    is_new_only = rest[0] == b"NX"
    table = space.make(key, SortedSet)
    before = len(table)
    for score, member in pairs(rest[is_new_only:]):
        if not is_new_only or member not in table:
            try:
                table[member] = float(score)
            except ValueError:
                raise ResponseError("ERR value is not a valid float") from None
    return len(table) - before


@command
def zrem(space: Keyspace, words: Words) -> Any:
    table = space.get(words[0], SortedSet)
    if table is None:
        return 0
    count = sum(table.pop(member, None) is not None for member in words[1:])
    space.drop_empty(words[0], table)
    return count


@command
def zscore(space: Keyspace, words: Words) -> Any:
    score = (space.get(words[0], SortedSet) or {}).get(words[1])
    return None if score is None else _score(score)


@command
def zcard(space: Keyspace, words: Words) -> Any:
    return len(space.get(words[0], SortedSet) or ())


@command
def zrange(space: Keyspace, words: Words) -> Any:
    rows = (space.get(words[0], SortedSet) or SortedSet()).rows()
    start, end = (each + len(rows) if each < 0 else each for each in map(whole, words[1:3]))
    return _with_scores(rows[max(0, start) : end + 1], words[3:])


@command
def zrangebyscore(space: Keyspace, words: Words) -> Any:
    table = space.get(words[0], SortedSet)
    if table is None:
        return []
    (least, is_above), (most, is_below) = map(_bound, words[1:3])
    rows = [
        (score, member)
        for score, member in table.rows()
        if (score > least if is_above else score >= least) and (score < most if is_below else score <= most)
    ]
    if b"LIMIT" in words[3:]:
        first, count = map(whole, words[words.index(b"LIMIT") + 1 :][:2])
        rows = list(islice(rows, first, first + count))
    return _with_scores(rows, words[3:])


@command
def zrangebylex(space: Keyspace, words: Words) -> Any:
    key, least, most, *rest = words
    members = sorted(space.get(key, SortedSet) or ())
    found = [each for each in members if _is_above(each, least) and _is_below(each, most)]
    first, count = map(whole, rest[1:]) if rest else (0, len(found))
    return found[first : first + count]


def _is_above(member: bytes, bound: bytes) -> bool:
    return member >= bound[1:] if bound.startswith(b"[") else member > bound[1:]


def _is_below(member: bytes, bound: bytes) -> bool:
    return member <= bound[1:] if bound.startswith(b"[") else member < bound[1:]


def _bound(word: bytes) -> tuple[float, bool]:
    return float(word.removeprefix(b"(")), word.startswith(b"(")


@command
def zremrangebyrank(space: Keyspace, words: Words) -> Any:
    table = space.get(words[0], SortedSet)
    if table is None:
        return 0
    start, end = (each + len(table) if each < 0 else each for each in map(whole, words[1:3]))
    if end < max(0, start):
        return 0
    gone = table.rows()[max(0, start) : end + 1]
    for _, member in gone:
        del table[member]
    space.drop_empty(words[0], table)
    return len(gone)


# ---- lists


@command
def lpush(space: Keyspace, words: Words) -> Any:
    found = space.make(words[0], List)
    found[:0] = reversed(words[1:])
    space.wake(words[0])
    return len(found)


@command
def rpush(space: Keyspace, words: Words) -> Any:
    found = space.make(words[0], List)
    found += words[1:]
    space.wake(words[0])
    return len(found)


@command
def lpop(space: Keyspace, words: Words) -> Any:
    found = space.get(words[0], List)
    if not found:
        return None
    value = found.pop(0)
    space.drop_empty(words[0], found)
    return value


@command
def llen(space: Keyspace, words: Words) -> Any:
    return len(space.get(words[0], List) or ())


@command
def lrange(space: Keyspace, words: Words) -> Any:
    found = space.get(words[0], List) or List()
    start, end = (each + len(found) if each < 0 else each for each in map(whole, words[1:3]))
    return found[max(0, start) : end + 1]


@command
def ltrim(space: Keyspace, words: Words) -> Any:
    found = space.get(words[0], List)
    if found is not None:
        found[:] = lrange(space, words)
        space.drop_empty(words[0], found)
    return {"ok": OK}


@command
def blpop(space: Keyspace, words: Words) -> Any:
    """As if its time were over at once: see Broker.ask for the waiting."""
    for key in words[:-1]:
        value = lpop(space, [key])
        if value is not None:
            return [key, value]
    return None
