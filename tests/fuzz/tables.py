"""Every table of the broker that a role may write, and rows that are none.

- Rows are written under names of their own in the run `good`, and over every row there is in the run of victims.
- A seed says what is written, not when it is read.
"""

from __future__ import annotations

import json
import random
import time
from dataclasses import dataclass
from typing import Any

import redis

from rollfab.fabric.contract.wire import HEADER
from rollfab.fabric.queue.keys import ShardKeys, WeightKeys, key_of
from tests.fuzz.targets import RECORDS

GOOD, VICTIM = "good", "victim"
HASH, ZSET, LIST, SET, STREAM, STRING = "hash", "zset", "list", "set", "stream", "string"
HUGE_BYTES = 1 << 20
WORDS = (b"", b"0", b"-1", b"nan", b"inf", b"9" * 30, b"1e999", b"\xff\xfe", b"null", b"{}", b"[[[[", b"true", b"../x")
PLACES = (None, True, -1, 0, 1 << 31, 1 << 60, 10**30, 0.5, -1e308, "", "x" * 5000, "\u0000", [], {}, [[]], "good")
SEEDS = [record.encode() for record in RECORDS] + [
    b"claimed 1 0 0 0 0 0 0 agent-1",
    b"ready 3 1 2 0 -",
    b"scoring 1 0 0 0 0 0 0 -",
    b"1 1 1",
    b"7 64 0",
    b'[3,"a","west"]',
    b'{"step":1}',
]
# Table of a shard → what kind of key it is.
SHARD_TABLES = {
    "run": HASH,
    "clock": STRING,
    "counters": HASH,
    "rewards": HASH,
    "lengths": HASH,
    "open": HASH,
    "late": ZSET,
    "completed": STREAM,
    "dead": HASH,
    "group:bad": HASH,
    "rollouts:bad": HASH,
    **{
        f"{kind}:{name}": what
        for kind in ("trajectory", "turn")
        for name, what in {
            "job": HASH,
            "record": HASH,
            "deadline": ZSET,
            "held": HASH,
            "log": HASH,
            "suspects": LIST,
            "bell": LIST,
            "ready:1": STREAM,
        }.items()
    },
    "turn:agent": HASH,
    "turn:result": HASH,
    "turn:image": HASH,
    "turn:homed": ZSET,
    "turn:hardware": HASH,
    "turn:homed_at": ZSET,
    "turn:bell:*": LIST,
    "inbox:*": STREAM,
}
FABRIC_TABLES = {"workers": HASH, "heartbeats": ZSET, "assignments": HASH, "sharing": HASH, "clock": STRING}
WEIGHT_TABLES = {"holders": HASH, "holding": ZSET, "addresses": HASH, "damage": HASH, "clock": STRING}
PUBLISHER_TABLES = {
    "head": HASH,
    "manifests": HASH,
    "sending": HASH,
    "announcements": STREAM,
    "offer": STRING,
    "tending": STRING,
}
RQ_TABLES = {
    "workers": SET,
    "worker:*": HASH,
    f"wip:rollfab.{GOOD}": ZSET,
    f"failed:rollfab.{GOOD}": ZSET,
    f"queue:rollfab.{GOOD}:intermediate": LIST,
}


@dataclass(frozen=True)
class Table:
    """A table, and the role that writes there. `key` holds {run}: in which run is chosen anew for each row."""

    role: str
    name: str
    key: str
    kind: str

    def __str__(self) -> str:
        return f"{self.role} {self.name}"


def tables() -> list[Table]:
    """All, role by role, as fabric/queue/acl.py lets them write."""
    found = [
        Table("trainer", "runs", key_of("runs"), HASH),
        Table("trainer", "events", key_of("events"), STREAM),
        Table("trainer", "group:bad", "{run}:group:bad", HASH),
        Table("trainer", "completed", "{run}:completed", STREAM),
        Table("trainer", "trajectory:record", "{run}:trajectory:record", HASH),
        Table("trainer", "trajectory:job", "{run}:trajectory:job", HASH),
        Table("trainer", "consumers", "{run}:consumers", ZSET),
        Table("trainer", "consumed", "{run}:consumed", ZSET),
        Table("trainer", "begun", "{run}:begun", ZSET),
        Table("trainer", "kept", "{run}:kept", STREAM),
        Table("trainer", "kept:row", "{run}:kept:row:bad", HASH),
        Table("trainer", "kept:rollouts", "{run}:kept:rollouts:bad", HASH),
        *(Table("trainer", f"weights {name}", f"{{weights}}:{name}", kind) for name, kind in WEIGHT_TABLES.items()),
        *(Table("trainer", f"weights {name}", f"{{weights}}:{name}", kind) for name, kind in PUBLISHER_TABLES.items()),
        Table("api-control", "lends", key_of("lends"), HASH),
        Table("agent", "rq jobs", "rq:job:*", HASH),
        Table("agent", "rq queue", f"rq:queue:rollfab.{GOOD}", LIST),
        Table("agent", "rq queues", "rq:queues", SET),
        *(Table("reward", f"rq {name.split(':')[0]}", f"rq:{name}", kind) for name, kind in RQ_TABLES.items()),
    ]
    for role in ("agent", "worker", "reward", "controller"):
        found += [Table(role, name, key_of(name), kind) for name, kind in FABRIC_TABLES.items()]
    found += [Table("controller", name, key_of(name), STRING) for name in ("leader", "lease_epoch", "plan")]
    found.append(Table("controller", "samples", key_of("samples"), STREAM))
    found.append(Table("controller", "leases", "{run}:leases", HASH))
    found.append(Table("controller", "turn:hardware", "{run}:turn:hardware", HASH))
    found.append(Table("controller", "lease_slots", "{run}:lease_slots", STRING))
    found.append(Table("controller", "lease_term", "{run}:lease_term", STRING))
    found.append(Table("worker", "lease_bell", key_of("lease_bell:*"), LIST))
    found.append(Table("worker", "weights answers", "{weights}:answers:*", HASH))
    for name, kind in SHARD_TABLES.items():
        key = f"{{run}}:{name}"
        found.append(Table("agent", name, key, kind))
        if name.startswith(("turn:", "inbox:")) or name in ("counters", "clock"):
            found.append(Table("worker", name, key, kind))
        if name in ("run", "counters", "trajectory:record", "dead", "rewards", "lengths"):
            found.append(Table("reward", name, key, kind))
    found += [Table("worker", f"weights {name}", f"{{weights}}:{name}", kind) for name, kind in WEIGHT_TABLES.items()]
    return found


# ---- bad rows


def bad_value(dice: random.Random) -> bytes:
    """Bytes that are no row, or one that says what none should say."""
    choice = dice.randrange(7)
    if choice == 0:
        return dice.choice(WORDS)
    if choice == 1:
        return dice.randbytes(dice.randrange(200))
    if choice == 2 and dice.randrange(8) == 0:
        return dice.randbytes(16) * (HUGE_BYTES // 16)
    data = dice.choice(SEEDS)
    if choice <= 3:
        return data[: dice.randrange(len(data) + 1)]
    if choice == 4:
        place = dice.randrange(len(data))
        return data[:place] + bytes([data[place] ^ (1 << dice.randrange(8))]) + data[place + 1 :]
    return _other_values(dice, data)


def _other_values(dice: random.Random, data: bytes) -> bytes:
    """A record with another value in some fields, around which every length fits."""
    if not data.startswith(b"rf"):
        return b" ".join(dice.choice([word, *WORDS]) for word in data.split())
    magic, schema, kind, length = HEADER.unpack_from(data)
    meta = json.loads(data[HEADER.size : HEADER.size + length])
    for name in dice.sample(sorted(meta), min(len(meta), dice.randrange(1, 4))):
        meta[name] = dice.choice(PLACES)
    head = json.dumps(meta).encode()
    head += b" " * (-(HEADER.size + len(head)) % 8)
    return HEADER.pack(magic, schema, kind, len(head)) + head + data[HEADER.size + length :]


def bad_name(dice: random.Random, number: int) -> bytes:
    """A name that no good row has."""
    odd = (b"bad-%d", b"bad-%d.0", b"bad-%d.0.0", b"bad\xff%d", b"bad %d", b".bad%d", b"bad{%d}:x", b"bad-%d.-1")
    return dice.choice(odd) % number


def write_row(
    admin: redis.Redis, client: redis.Redis, table: Table, victim: str, dice: random.Random, number: int
) -> None:
    """Write a bad row into the table of the good run or of the victim, as the client's user.

    Raises:
        ResponseError: the broker refused it.
    """
    run = dice.choice((GOOD, victim))
    key = table.key.replace("{run}", ShardKeys(run, 0).base).replace("{weights}", WeightKeys(run).base)
    if "*" in key:
        pattern = key.replace("{", "?").replace("}", "?")
        own = sorted(admin.scan_iter(match=pattern, count=1000)) if victim in key else []
        key = dice.choice(own).decode() if own else key.replace("*", f"bad-{number}")
    name, value = bad_name(dice, number % 200), bad_value(dice)
    if victim in key and table.kind == HASH and dice.random() < 0.5:
        names = admin.hkeys(key)
        name = dice.choice(names) if names else name
    if victim in key and dice.randrange(500) == 0:  # rows are refused from then on
        _change_type(client, key, table.kind)
        return
    if table.kind == HASH:
        client.hset(key, name, value)  # type: ignore[arg-type]
    elif table.kind == ZSET:
        _run(client, "ZADD", key, dice.choice(("-inf", "inf", "0", "1e300", "-1", str(time.time() * 1000))), name)
    elif table.kind == LIST:
        _run(client, "RPUSH", key, name)
    elif table.kind == SET:
        _run(client, "SADD", key, dice.choice((name, value[:100])))
    elif table.kind == STREAM:
        _run(
            client,
            "XADD",
            key,
            "*",
            dice.choice((b"id", b"group", b"x", b"kind", b"facts")),
            dice.choice((name, value)),
        )
    elif victim in key or dice.randrange(2):
        _run(client, "SET", key, value[:200])


def _run(client: redis.Redis, command: str, *words: Any) -> None:
    """As a command; where the role may send it from a script alone, from one: whoever may run scripts may run any."""
    try:
        client.execute_command(command, *words)
    except redis.exceptions.NoPermissionError:
        key, *rest = words
        client.eval(f"return redis.call('{command}', KEYS[1], unpack(ARGV))", 1, key, *rest)


def _change_type(client: redis.Redis, key: str, kind: str) -> None:
    """Put another type of key in its place, where the role may."""
    if kind == HASH:
        if names := client.hkeys(key):
            client.hdel(key, *names)  # type: ignore[misc]
        _run(client, "RPUSH", key, "bad")
    else:
        _run(client, "DEL", key)
        _run(client, "HSET", key, "bad", "1")
