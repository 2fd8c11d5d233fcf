"""The rows that each table of the broker may hold, and a look through the whole broker for those that cannot be read:
for people, not for loops.

- A table is a key by its name for people (keys.py): "runs", "r1.0:counters", "rq:queues". This file has its type and
  the check of its rows, in the order of keys.py; values that nobody reads here (chunks, offers, answers) have a type
  alone.
- A check raises ValueError (WireError is one) and says what is wrong.
- A survey looks at every key and its type, up to KEY_COUNT_MAX, and at about the first ROW_COUNT_MAX rows of each
  table. It names the tables that were read in part. Tables that a run has once come before those that it has many of.
- A row is removed only if it cannot be read at that moment, and only by its exact name.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..broker.clients.cluster_client import ClusterClient
from ..contract.agreement import Agreement, TokenDifferences
from ..contract.errors import FabricError
from ..contract.fields import WHOLE_MAX
from ..contract.ids import NAME
from ..contract.images import digest_of
from ..contract.lease_plan import LeasePlan, Sample
from ..contract.limits import MIB
from ..contract.records import DeadLetter, Rollout, TokenLog, TurnResult
from ..contract.text import one_line
from ..contract.wire import load_json
from ..format.manifest import WeightManifest
from ..ports.queue import BAD_ROW_COUNT_MAX, BadRow, RowSurvey
from ..rules.queue.timings import check_timing
from . import keys as names
from .keys import DIFFERENCES, URGENCY_COUNT
from .rows import (
    ENDINGS,
    UNREADABLE,
    WHOLE,
    damage_row,
    event_row,
    holder_row,
    is_job_name,
    job_row,
    lease_row,
    lend_word,
    reward_buckets,
    run_row,
    sending_rows,
    sharing_row,
    shown_name,
    turn_row,
    version_rows,
    worker_row,
)

# run, row's name (a string's is empty) and value: a sorted set's is the score, a stream's the fields, a set has none
Check = Callable[[str, bytes, Any], object]
KEY = re.compile(r"rf:\{(?:(?P<run>[^{}]*)\.(?P<part>w|\d+)|rf)\}:(?P<table>.+)", re.DOTALL)
RECORD = re.compile(rb"\S+ \d+ \d+ \d+ \d+ (\d+ \d+ \d+ )?\S+")  # as queue/lua/use/record.lua reads it
RECORD_LENGTH_MAX = 400
CLOCK = re.compile(rb"(?=.{1,31}\Z)\d+ \d+")
LEADER = re.compile(rb"[^\s/]+/?\S* \d+ \d+")
DIGESTS = re.compile(rb"( [0-9a-f]{32})+")
HOMED = re.compile(rb"\S+ [123] \d+ \d+ \S+")
COST = re.compile(rb"-?\d{1,15}")
LENGTHS = re.compile(rb"\d+ \d+")
OPEN = re.compile(rb"[012] -?\d+ \d+( [0-3])?")
SUMS_OF_GROUP = frozenset(
    (b"size", b"quorum", b"priority", b"completed", b"failed", b"cancelled", b"bytes", b"ended", b"order")
)
SUMS_OF_RUN = frozenset((b"head_version", b"staleness", b"depth", b"depth_max", b"bytes", b"bytes_max", b"kept_bytes"))
KEY_COUNT_MAX = 1_000_000
TABLE_COUNT_MAX = 10_000  # whose rows are read
ROW_COUNT_MAX = 1000  # of a table
BYTES_MAX = 64 << 20  # of a table
PAGE_COUNT = 100
LISTED_COUNT_MAX = 200_000  # of a table that is read at once, to remove a row: more than any of ours may hold
ENDLESS = 1 << 60


@dataclass(frozen=True, slots=True)
class Table:
    """The kind of a table. kind: as TYPE says. check: of a row; None: any value is right. run: its run, or ""."""

    kind: str
    check: Check | None
    run: str = ""


Found = tuple[bytes, Table, str]  # key, its table, and the type that it has


def table_at(key: str) -> Table | None:
    """Return the table that a key stands for, whatever lies there; None if no reader of ours looks at it."""
    if key.startswith("rq:"):
        return _named(RQ, key.removeprefix("rq:"), "")
    match = KEY.fullmatch(key)
    if match is None:
        return None
    tables = FABRIC if match["run"] is None else WEIGHTS if match["part"] == "w" else SHARD
    return _named(tables, match["table"], match["run"] or "")


def _named(tables: dict[str, tuple[str, Check | None]], name: str, run: str) -> Table | None:
    found = tables.get(name)
    if found is None:
        found = next((row for each, row in tables.items() if each.endswith("*") and name.startswith(each[:-1])), None)
    return None if found is None else Table(*found, run)


# ---- rows


def _require(holds: object, problem: str) -> None:
    if not holds:
        raise ValueError(problem)


def _matches(pattern: re.Pattern[bytes], what: str) -> Check:
    return lambda run, name, raw: _require(pattern.fullmatch(raw), f"{raw[:40]!r} is {what}")


def _finite(run: str, name: bytes, score: float) -> None:
    _require(math.isfinite(score), f"{score} is no time")


def _job_time(run: str, name: bytes, score: float) -> None:
    _require(is_job_name(name), "it is no job's name")
    _finite(run, name, score)


def _homed(run: str, name: bytes, score: float) -> None:
    _require(HOMED.fullmatch(name), f"{name[:40]!r} is no turn that waits for its home")
    _finite(run, name, score)


def _is_job(run: str, name: bytes, raw: Any) -> None:
    _require(is_job_name(name), "it is no job's name")


def _text(run: str, name: bytes, raw: bytes) -> None:
    raw.decode()


def _worker(run: str, name: bytes, raw: bytes) -> None:
    info = worker_row(name, raw)
    _require(info.role != UNREADABLE, info.error or "")


def _event(run: str, name: bytes, fields: dict[bytes, bytes]) -> None:
    _, kind, facts = event_row(name, fields)
    _require(kind != UNREADABLE, str(facts.get("error")))


def _count(run: str, name: bytes, raw: bytes) -> None:
    _require(WHOLE.fullmatch(raw) and name.isascii(), f"{raw[:40]!r} is no count")


def _reward(run: str, name: bytes, raw: bytes) -> None:
    if name == b"width":
        _require(WHOLE.fullmatch(raw) and 1 <= int(raw) <= WHOLE_MAX, f"{raw[:40]!r} is no width")
    reward_buckets(1, name, raw)


def _runs_named(raw: bytes) -> None:
    runs = raw.decode().split(" ")
    _require(all(NAME.match(each) for each in runs), f"{raw[:40]!r} names no runs")


def _run_fact(run: str, name: bytes, raw: bytes) -> None:
    if name == b"agreement":
        Agreement.decode(raw)
    elif name in SUMS_OF_RUN:
        _require(WHOLE.fullmatch(raw), f"{raw[:40]!r} is no whole number")


def _group_fact(run: str, name: bytes, raw: bytes) -> None:
    if name in SUMS_OF_GROUP:
        _require(WHOLE.fullmatch(raw), f"{raw[:40]!r} is no whole number")
    elif name == b"task":
        _require(isinstance(load_json(raw), dict), "it is no JSON object")
    elif name == b"ended_by":
        _require(raw.decode() in ENDINGS, f"{raw[:40]!r} is no way to end")
    elif name.startswith(DIFFERENCES):
        found = TokenDifferences.decode(raw)
        _require(DIFFERENCES + found.trajectory_id.encode() == name, "it is another one's")


def _rollout(run: str, name: bytes, raw: bytes) -> None:
    _require(Rollout.decode(raw).trajectory_id.encode() == name, "it is another one's")


def _result(run: str, name: bytes, fields: dict[bytes, bytes]) -> None:
    TurnResult.decode(fields.get(b"result", b""))


def _image(run: str, name: bytes, raw: bytes) -> None:
    trajectory_id, is_file, digest = name.partition(b"/")
    _require(is_job_name(trajectory_id), "it is no job's name")
    if is_file:
        _require(digest.decode() == digest_of(raw), "it is another file than its name says")
    else:
        _require(DIGESTS.fullmatch(raw), f"{raw[:40]!r} is no list of digests")


def _manifest(run: str, name: bytes, raw: bytes) -> None:
    _require(version_rows(run, [name]), "it is no version and kind")
    WeightManifest.unpack(raw)


def _head(run: str, name: bytes, raw: bytes) -> None:
    if name != b"kind":
        _require(name in (b"version", b"epoch", b"moved_by"), "it is no fact of a head")
        _require(int(raw) >= 0, f"{int(raw)} is below 0")
    raw.decode()


def _rq_field(run: str, name: bytes, raw: bytes) -> None:
    """Check a job's only field that we read (workers/rewards/jobs.py)."""
    if name == b"data":
        try:
            data = zlib.decompressobj().decompress(raw, MIB)
        except zlib.error as error:
            raise ValueError(str(error)) from error
        _require(isinstance(load_json(data), list), "it is no JSON list")


Tables = dict[str, tuple[str, Check | None]]

FABRIC: Tables = {
    "runs": ("hash", lambda run, name, raw: run_row(name, raw)),
    "deleted:*": ("string", None),
    "workers": ("hash", _worker),
    "heartbeats": ("zset", _finite),
    "lends": ("hash", lambda run, name, raw: lend_word(raw)),
    "sharing": ("hash", lambda run, name, raw: _require(sharing_row(raw), "it is no report of sharing")),
    "assignments": ("hash", lambda run, name, raw: _runs_named(raw)),
    "leader": ("string", _matches(LEADER, "no leader")),
    "lease_epoch": ("string", _matches(WHOLE, "no term")),
    "plan": ("string", lambda run, name, raw: LeasePlan.decode(raw)),
    "samples": ("stream", lambda run, name, fields: Sample.decode(fields.get(b"sample", b""))),
    "events": ("stream", _event),
    "clock": ("string", _matches(CLOCK, "no clock")),
    "lease_bell:*": ("list", None),
}
SHARD: Tables = {
    "run": ("hash", _run_fact),
    "clock": ("string", _matches(CLOCK, "no clock")),
    "counters": ("hash", _count),
    "rewards": ("hash", _reward),
    "timings": ("hash", lambda run, name, raw: check_timing(name.decode(), raw.decode())),
    "lengths": ("hash", _matches(LENGTHS, "no count and sum of lengths")),
    "told:*": ("string", None),
    "leases": ("hash", lambda run, name, raw: lease_row(name.decode(), run, raw, 0)),
    "lease_slots": ("string", _matches(WHOLE, "no number of slots")),
    "lease_term": ("string", _matches(WHOLE, "no term")),
    "group:*": ("hash", _group_fact),
    "open": ("hash", _matches(OPEN, "not priority, missing, quorum and order")),
    "late": ("zset", _finite),
    "rollouts:*": ("hash", _rollout),
    "completed": ("stream", lambda run, name, fields: _require(b"group" in fields, "it names no group")),
    "consumers": ("zset", _finite),
    "dead": ("hash", lambda run, name, raw: DeadLetter.decode(raw)),
    "consumed": ("zset", _finite),
    "begun": ("zset", _job_time),
    "kept": ("stream", lambda run, name, fields: _require(b"group" in fields, "it names no group")),
    "kept:row:*": ("hash", _group_fact),
    "kept:rollouts:*": ("hash", _rollout),
    "trajectory:job": ("hash", lambda run, name, raw: job_row(name, raw)),
    "trajectory:log": ("hash", lambda run, name, raw: load_json(raw)),
    "turn:job": ("hash", lambda run, name, raw: turn_row(name, raw)),
    "turn:log": ("hash", lambda run, name, raw: name.endswith(b"~0") or TokenLog.decode(raw)),
    "turn:agent": ("hash", _text),
    "turn:result": ("hash", lambda run, name, raw: TurnResult.decode(raw)),
    "turn:image": ("hash", _image),
    "turn:homed": ("zset", _homed),
    "turn:homed_at": ("zset", _homed),
    "turn:hardware": ("hash", _matches(COST, "no cost of reading")),
    "turn:bell:*": ("list", None),
    "inbox:*": ("stream", _result),
}
for _kind in ("trajectory", "turn"):
    for _urgency in range(URGENCY_COUNT):
        SHARD[f"{_kind}:ready:{_urgency}"] = ("stream", lambda run, name, row: _is_job(run, row.get(b"id", b""), None))
    SHARD |= {
        f"{_kind}:suspects": ("list", _is_job),
        f"{_kind}:record": (
            "hash",
            lambda run, name, raw: _require(
                len(raw) <= RECORD_LENGTH_MAX and RECORD.fullmatch(raw), f"{raw[:40]!r} is no record of a job"
            ),
        ),
        f"{_kind}:deadline": ("zset", _job_time),
        f"{_kind}:held": ("hash", _count),
        f"{_kind}:bell": ("list", None),
    }
WEIGHTS: Tables = {
    "head": ("hash", _head),
    "manifests": ("hash", _manifest),
    "chunk:*": ("string", None),
    "sending": ("hash", lambda run, name, raw: _require(sending_rows(run, {name: raw}), "it is no version being sent")),
    "announcements": ("stream", None),
    "holders": ("hash", lambda run, name, raw: holder_row(name, raw)),
    "addresses": ("hash", _text),
    "holding": ("zset", _finite),
    "clock": ("string", _matches(CLOCK, "no clock")),
    "offer": ("string", None),
    "answers:*": ("hash", None),
    "damage": ("hash", lambda run, name, raw: damage_row(name, raw)),
    "tending": ("string", _matches(WHOLE, "no epoch")),
}
RQ: Tables = {
    "queues": ("set", lambda run, name, raw: _require(name.startswith(b"rq:queue:"), "it is no queue's name")),
    "queue:*": ("list", lambda run, name, raw: name.decode()),
    "job:*": ("hash", _rq_field),
    "workers": ("set", None),
    "workers:*": ("set", None),
    "worker:*": ("hash", None),
    **{
        f"{registry}:*": ("zset", None)
        for registry in ("wip", "failed", "finished", "deferred", "scheduled", "canceled")
    },
}


async def survey_rows(client: Any, tables: Sequence[str] = ()) -> RowSurvey:
    """List rows that cannot be read, at most BAD_ROW_COUNT_MAX; in these tables, or in all."""
    found: list[BadRow] = []
    cut: list[str] = []
    row_count = 0
    named = [names.key_of(table).encode() for table in tables]
    keys, is_whole = (await _typed(client, named), True) if named else await _keys(client)
    for number, (key, table, kind) in enumerate(keys):
        if kind == "none":
            continue
        if kind != table.kind:
            found.append(BadRow(names.table_of(key), "", wrong_type(kind, table.kind)))
        elif table.check is not None and number < TABLE_COUNT_MAX:
            count = size = 0
            async for name, value in _rows(client, key, kind, ROW_COUNT_MAX + 1):
                count, size = count + 1, size + _size(value)
                if count > ROW_COUNT_MAX or size > BYTES_MAX:
                    cut.append(names.table_of(key))
                    break
                if problem := _problem(table, name, value):
                    found.append(BadRow(names.table_of(key), shown_name(name), problem))
            row_count += count
        elif table.check is not None:
            is_whole = False
        if len(found) >= BAD_ROW_COUNT_MAX:
            is_whole = False
            break
    return RowSurvey(
        bad_rows=found[:BAD_ROW_COUNT_MAX], table_count=len(keys), row_count=row_count, cut=cut, is_whole=is_whole
    )


async def remove_row(client: Any, row: BadRow) -> bool:
    """Remove a row that cannot be read; return False if it is gone already, or can be read."""
    key = names.key_of(row.table).encode()
    found = [each for each in (await _typed(client, [key])) if each[2] != "none"]
    if not found:  # a key whose stored name differs from the shown one
        found = [each for each in (await _keys(client))[0] if names.table_of(each[0]) == row.table]
    for key, table, kind in found:
        if kind != table.kind:
            return not row.row and bool(await client.unlink(key))
        async for name, value in _rows(client, key, kind, ENDLESS):
            if shown_name(name) == row.row and _problem(table, name, value):
                return bool(await _remove(client, key, kind, name))
    return False


async def _remove(client: Any, key: bytes, kind: str, name: bytes) -> int:
    removing = {"hash": client.hdel, "zset": client.zrem, "stream": client.xdel, "set": client.srem}
    if kind == "string":
        return int(await client.unlink(key))
    return int(await (client.lrem(key, 0, name) if kind == "list" else removing[kind](key, name)))


def wrong_type(kind: str, wanted: str) -> str:
    """Say what is wrong with a table of another type."""
    return f"it is a {kind}, and should be a {wanted}"


def _problem(table: Table, name: bytes, value: Any) -> str:
    """Say why a row cannot be read; empty if it can."""
    try:
        if table.check is not None:
            table.check(table.run, name, value)
    except (FabricError, ValueError, OverflowError) as error:
        return one_line(str(error))
    return ""


def _size(value: Any) -> int:
    if isinstance(value, dict):
        return sum(map(len, value.values()))
    return len(value) if isinstance(value, bytes) else 0


async def _keys(client: Any) -> tuple[list[Found], bool]:
    """List every key that is a table of ours, and say whether these are all."""
    servers = client.primaries() if isinstance(client, ClusterClient) else [client]
    seen: set[bytes] = set()
    for server in servers:
        async for key in server.scan_iter(count=1000):
            if len(seen) >= KEY_COUNT_MAX:
                break
            if key.startswith((b"rf:{", b"rq:")):
                seen.add(key)
    ordered = sorted(seen)
    found = [each for at in range(0, len(ordered), 1000) for each in await _typed(client, ordered[at : at + 1000])]
    found.sort(key=lambda each: each[0].count(b":"))  # "rf:{r.0}:counters" before "rf:{r.0}:group:g1"
    return found, len(seen) < KEY_COUNT_MAX


async def _typed(client: Any, keys: list[bytes]) -> list[Found]:
    tables = [(key, table) for key in keys if (table := table_at(key.decode("utf-8", "backslashreplace"))) is not None]
    pipeline = client.pipeline(transaction=False)
    for key, _ in tables:
        pipeline.type(key)
    kinds = await pipeline.execute() if tables else []
    return [(key, table, kind.decode()) for (key, table), kind in zip(tables, kinds, strict=True)]


async def _rows(client: Any, key: bytes, kind: str, count: int) -> AsyncIterator[tuple[bytes, Any]]:
    """Yield a table's rows as name and value."""
    if kind not in ("hash", "set"):
        for row in await _listed(client, key, kind, min(count, LISTED_COUNT_MAX)):
            yield row
        return
    scan, cursor = (client.hscan if kind == "hash" else client.sscan), -1
    while cursor:
        cursor, page = await scan(key, max(0, cursor), count=PAGE_COUNT)
        for name in page:
            yield name, page[name] if kind == "hash" else None


async def _listed(client: Any, key: bytes, kind: str, count: int) -> list[tuple[bytes, Any]]:
    if kind == "string":
        raw = await client.get(key)
        return [] if raw is None else [(b"", raw)]
    if kind == "stream":
        return [(entry_id, fields or {}) for entry_id, fields in await client.xrevrange(key, count=count)]
    if kind == "zset":
        return list(await client.zrange(key, 0, count - 1, withscores=True))
    return [(name, None) for name in await client.lrange(key, 0, count - 1)]
