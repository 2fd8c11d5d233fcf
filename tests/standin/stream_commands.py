"""The commands of streams: see commands.py. Those that block answer as if their time were over at once."""

from __future__ import annotations

from typing import Any

from redis.exceptions import ResponseError

from tests.standin.commands import OK, Words, command, whole
from tests.standin.keyspace import Keyspace
from tests.standin.streams import ConsumerGroup, Id, Pending, Stream, id_text, read_id


def _group(space: Keyspace, key: bytes, name: bytes) -> tuple[Stream, ConsumerGroup]:
    stream = space.get(key, Stream)
    if stream is None or name not in stream.groups:
        text = f"No such key '{key.decode()}' or consumer group '{name.decode()}'"
        raise ResponseError(f"NOGROUP {text} in XREADGROUP with GROUP option")
    return stream, stream.groups[name]


@command
def xadd(space: Keyspace, words: Words) -> Any:
    key, *rest = words
    count = None
    if rest[0] == b"MAXLEN":
        rest.pop(0)
        if rest[0] in (b"~", b"="):
            rest.pop(0)
        count = whole(rest.pop(0))
    made = rest.pop(0)  # an id of somebody's own, or * for the next one
    stream = space.make(key, Stream)
    entry = stream.add(rest, int(space.wall_ms() if made == b"*" else made.partition(b"-")[0]))
    if count is not None:
        stream.trim(count)
    space.wake(key)
    return id_text(entry)


@command
def xlen(space: Keyspace, words: Words) -> Any:
    stream = space.get(words[0], Stream)
    return 0 if stream is None else len(stream.ids)


@command
def xdel(space: Keyspace, words: Words) -> Any:
    stream = space.get(words[0], Stream)
    return 0 if stream is None else sum(stream.delete(read_id(word)) for word in words[1:])


@command
def xrange(space: Keyspace, words: Words) -> Any:
    stream = space.get(words[0], Stream)
    first, last = _edge(words[1]), _edge(words[2], is_end=True)
    found = [] if stream is None else stream.between(first, last)
    return [stream.row(entry) for entry in found[: _count(words)]] if stream is not None else []


@command
def xrevrange(space: Keyspace, words: Words) -> Any:
    stream = space.get(words[0], Stream)
    last, first = _edge(words[1], is_end=True), _edge(words[2])
    found = [] if stream is None else stream.between(first, last)[::-1]
    return [stream.row(entry) for entry in found[: _count(words)]] if stream is not None else []


def _edge(word: bytes, *, is_end: bool = False) -> Id:
    if not word.startswith(b"("):
        return read_id(word, is_end=is_end)
    milliseconds, number = read_id(word[1:], is_end=is_end)
    if not is_end:
        return milliseconds, number + 1
    return (milliseconds, number - 1) if number else (milliseconds - 1, 1 << 64)


def _count(words: Words) -> int | None:
    return whole(words[words.index(b"COUNT") + 1]) if b"COUNT" in words else None


@command
def xread(space: Keyspace, words: Words) -> Any:
    at = words.index(b"STREAMS")
    count, names = _count(words[:at]), words[at + 1 :]
    half = len(names) // 2
    answer = []
    for key, last in zip(names[:half], names[half:], strict=True):
        stream = space.get(key, Stream)
        found = [] if stream is None or last == b"$" else stream.after(read_id(last), count)
        if stream is not None and found:
            answer.append([key, [stream.row(entry) for entry in found]])
    return answer or None


@command
def xreadgroup(space: Keyspace, words: Words) -> Any:
    at = words.index(b"STREAMS")
    name, consumer = words[1:3]
    count, is_kept, names = _count(words[:at]), b"NOACK" not in words[:at], words[at + 1 :]
    half = len(names) // 2
    answer = []
    for key, last in zip(names[:half], names[half:], strict=True):
        stream, group = _group(space, key, name)
        group.seen_ms[consumer] = space.wall_ms()
        if last != b">":
            after = read_id(last)
            held = [entry for entry in group.held_by(consumer) if entry > after][:count]
            answer.append([key, [stream.row(entry) for entry in held]])
            continue
        found = stream.after(group.last, count)
        if found:
            group.last = found[-1]
            answer.append([key, [stream.row(entry) for entry in found]])
        if is_kept:
            group.pending |= {entry: Pending(consumer, space.wall_ms()) for entry in found}
    return answer or None


@command
def xack(space: Keyspace, words: Words) -> Any:
    stream = space.get(words[0], Stream)
    if stream is None or words[1] not in stream.groups:
        return 0
    pending = stream.groups[words[1]].pending
    return sum(pending.pop(read_id(word), None) is not None for word in words[2:])


@command
def xgroup(space: Keyspace, words: Words) -> Any:
    what, key, name, *rest = words
    if what == b"CREATE":
        stream = space.make(key, Stream)
        if name in stream.groups:
            raise ResponseError("BUSYGROUP Consumer Group name already exists")
        stream.groups[name] = ConsumerGroup(stream.last if rest[0] == b"$" else read_id(rest[0]))
        return {"ok": OK}
    assert what == b"DELCONSUMER", f"the stand-in has no XGROUP {what!r}"
    _, group = _group(space, key, name)
    held = group.held_by(rest[0])
    for entry in held:
        del group.pending[entry]
    group.seen_ms.pop(rest[0], None)
    return len(held)


@command
def xpending(space: Keyspace, words: Words) -> Any:
    _, group = _group(space, words[0], words[1])
    if len(words) == 2:
        ids = sorted(group.pending)
        counts: dict[bytes, int] = {}
        for each in group.pending.values():
            counts[each.consumer] = counts.get(each.consumer, 0) + 1
        rows = [[name, b"%d" % count] for name, count in sorted(counts.items())]
        return [len(ids), id_text(ids[0]), id_text(ids[-1]), rows] if ids else [0, None, None, None]
    first, last, count = read_id(words[2]), read_id(words[3], is_end=True), whole(words[4])
    now_ms, wanted = space.wall_ms(), words[5] if len(words) > 5 else None
    found = [
        [id_text(entry), each.consumer, max(0, int(now_ms - each.given_ms)), each.count]
        for entry, each in sorted(group.pending.items())
        if first <= entry <= last and wanted in (None, each.consumer)
    ]
    return found[:count]


@command
def xclaim(space: Keyspace, words: Words) -> Any:
    key, name, consumer, _, *ids = words
    assert ids.pop() == b"JUSTID", "the stand-in claims without reading"
    stream, group = _group(space, key, name)
    group.seen_ms[consumer] = space.wall_ms()
    answer = []
    for entry in map(read_id, ids):
        if entry not in group.pending:
            continue
        if entry not in stream.entries:
            del group.pending[entry]
            continue
        group.pending[entry] = Pending(consumer, space.wall_ms(), group.pending[entry].count)
        answer.append(id_text(entry))
    return answer


@command
def xinfo(space: Keyspace, words: Words) -> Any:
    what, key, *rest = words
    stream = space.get(key, Stream)
    if stream is None:
        raise ResponseError("ERR no such key")
    assert what == b"CONSUMERS", f"the stand-in has no XINFO {what!r}"
    _, group = _group(space, key, rest[0])
    now_ms = space.wall_ms()
    return [
        [b"name", consumer, b"pending", len(group.held_by(consumer)), b"idle", max(0, int(now_ms - seen_ms))]
        for consumer, seen_ms in sorted(group.seen_ms.items())
    ]
