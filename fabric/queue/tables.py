"""The rows that each table of the broker may hold, so that a survey can name those that cannot be read.

- A table is a key by its name for people (keys.py): "runs", "r1.0:counters", "rq:queues". This file has its type and
  the check of its rows, in the order of keys.py; values that nobody reads here (chunks, offers, answers) have a type
  alone.
- A check raises ValueError (WireError is one) and says what is wrong.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..contract.agreement import Agreement, TokenDifferences
from ..contract.fields import WHOLE_MAX
from ..contract.ids import NAME
from ..contract.images import digest_of
from ..contract.lease_plan import LeasePlan, Sample
from ..contract.limits import MIB
from ..contract.records import DeadLetter, Rollout, TokenLog, TurnResult
from ..contract.wire import load_json
from ..format.manifest import WeightManifest
from ..rules.queue.timings import check_timing
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


@dataclass(frozen=True, slots=True)
class Table:
    """The kind of a table. kind: as TYPE says. check: of a row; None: any value is right. run: its run, or ""."""

    kind: str
    check: Check | None
    run: str = ""


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
