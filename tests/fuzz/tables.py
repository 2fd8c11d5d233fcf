"""Every table of the broker that a role may write, given rows that are none, by that role's own user, while real
processes read it: the controller, an agent, a worker, a reward worker, the api and a trainer.

    make fuzz                       ten minutes a table       make fuzz SECONDS_A_TABLE=30 TABLES="runs counters"

- Good groups are pushed all the time, before and beside the bad rows. In the end every one of them has arrived whole,
  no process has ended, and no loop has stopped: a new group comes back, and the api and the status answer.
- Rows are written under names of their own in the run `good`, and over every row there is in the run `victim`.
- A seed says what is written, not when it is read.
"""

from __future__ import annotations

import contextlib
import json
import random
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis

import rollfab
from rollfab.commands.status import snapshot, with_ports
from rollfab.commands.supervisor import Supervisor
from rollfab.fabric.bus.keys import ShardKeys, WeightKeys, key_of
from rollfab.fabric.errors import FabricError
from rollfab.fabric.ports import BadRow
from rollfab.fabric.records import Group
from rollfab.fabric.wire import HEADER
from rollfab.trainer.client import Run
from tests.fabric_processes import PYTHONPATH, tiny_weights
from tests.fuzz.targets import RECORDS
from tests.guarded_broker import Guarded, guarded_broker
from tests.redis_server import free_port

GOOD, VICTIM = "good", "victim"
HASH, ZSET, LIST, STREAM, STRING = "hash", "zset", "list", "stream", "string"
PACE_S = 0.01  # between two bad rows: the readers must come to read them
PUSH_S = 0.5  # between two good groups
WAIT_S = 90.0  # for what was pushed to arrive, on a busy machine
HUGE_BYTES = 1 << 20
VICTIM_COUNT_MAX = 8
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
    "inbox:*": STREAM,
}
FABRIC_TABLES = {"workers": HASH, "heartbeats": ZSET, "assignments": HASH, "sharing": HASH, "clock": STRING}
WEIGHT_TABLES = {"holders": HASH, "holding": ZSET, "addresses": HASH, "damage": HASH, "clock": STRING}


@dataclass(frozen=True)
class Table:
    """A table, and the role that writes there. `key` holds {run}: in which run is chosen anew for each row."""

    role: str
    name: str
    key: str
    kind: str

    def __str__(self) -> str:
        return f"{self.role} {self.name}"


@dataclass
class Outcome:
    """What came of one table."""

    table: Table
    written: int = 0
    refused: int = 0
    good_groups: int = 0
    bad_rows_named: int = 0
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        end = "; ".join(self.problems) or "well"
        return (
            f"{self.table!s:32} {self.written:6} rows written, {self.refused:5} refused, {self.bad_rows_named:3} named,"
            f" {self.good_groups:3} good groups: {end}"
        )


def tables() -> list[Table]:
    """All, role by role, as fabric/bus/acl.py lets them write."""
    found = [
        Table("trainer", "runs", key_of("runs"), HASH),
        Table("trainer", "events", key_of("events"), STREAM),
        Table("trainer", "group:bad", "{run}:group:bad", HASH),
        Table("trainer", "completed", "{run}:completed", STREAM),
        Table("trainer", "trajectory:record", "{run}:trajectory:record", HASH),
        Table("trainer", "trajectory:job", "{run}:trajectory:job", HASH),
        *(Table("trainer", f"weights {name}", f"{{weights}}:{name}", kind) for name, kind in WEIGHT_TABLES.items()),
        *(
            Table("trainer", f"weights {name}", f"{{weights}}:{name}", kind)
            for name, kind in {"head": HASH, "manifests": HASH, "sending": HASH, "offer": STRING}.items()
        ),
        Table("api-control", "lends", key_of("lends"), HASH),
        Table("agent", "rq jobs", "rq:job:*", HASH),
        Table("agent", "rq queue", f"rq:queue:rollfab.{GOOD}", LIST),
        Table("agent", "rq queues", "rq:queues", "set"),
    ]
    for role in ("agent", "worker", "reward", "controller"):
        found += [Table(role, name, key_of(name), kind) for name, kind in FABRIC_TABLES.items()]
    found.append(Table("worker", "lease_bell", key_of("lease_bell:*"), LIST))
    for name, kind in SHARD_TABLES.items():
        key = f"{{run}}:{name}"
        found.append(Table("agent", name, key, kind))
        if name.startswith(("turn:", "inbox:")) or name in ("counters", "clock"):
            found.append(Table("worker", name, key, kind))
        if name in ("run", "counters", "trajectory:record", "dead", "rewards"):
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


# ---- the fabric


class World:
    """Real processes with their own users, and a trainer."""

    def __init__(self, broker: Guarded, supervisor: Supervisor, trainer: Any, api_url: str) -> None:
        self.broker, self.supervisor, self.api_url = broker, supervisor, api_url
        self.runs: dict[str, Run] = {}
        for name in (GOOD, VICTIM):
            run = trainer.run(name, model="tiny", environment="walk", reward="steady", attempt_count_max=2)
            run.publish(tiny_weights(), version=0)
            self.runs[name] = run
        self.pushed: list[str] = []
        self.arrived: dict[str, Group] = {}
        self._victims: list[str] = []
        self.clients = {role: broker.client(role) for role in ("trainer", "agent", "worker", "reward", "controller")}
        self.clients["api-control"] = broker.client("api-control")
        self._pids = {name: child.pid for name, child in supervisor.children.items()}

    def close(self) -> None:
        for client in self.clients.values():
            client.close()

    def push(self, run: str = GOOD) -> None:
        names = self.runs[run].submit([{"seed": 1}], group_size=2)
        if run == GOOD:
            self.pushed += names
            return
        self._victims += names
        while len(self._victims) > VICTIM_COUNT_MAX:  # what nobody can end any more would fill the agent's places
            self.runs[VICTIM].cancel(self._victims.pop(0))

    def take(self) -> None:
        for group in self.runs[GOOD].groups(timeout=0.01):
            self.arrived[group.group_id] = group

    def wait_for_all(self, limit_s: float) -> list[str]:
        """Names of good groups that have not arrived by then."""
        until_s = time.monotonic() + limit_s
        while missing := [name for name in self.pushed if name not in self.arrived]:
            if time.monotonic() > until_s:
                break
            self.take()
        return missing

    def problems(self, limit_s: float = WAIT_S) -> list[str]:
        """What does not hold any more."""
        found = []
        for name, child in self.supervisor.children.items():
            if child.pid != self._pids[name]:
                found.append(f"{name} has ended:\n{child.tail(30)}")
        if missing := self.wait_for_all(limit_s):
            found.append(f"{len(missing)} good groups did not arrive, {missing[0]} first")
        harmed = [name for name, group in self.arrived.items() if group.failures or len(group.rollouts) != 2]
        if harmed:
            found.append(f"{len(harmed)} good groups lost rollouts: {self.arrived[harmed[0]].failures}")
        try:
            self.named()
            self.ask_api()
        except Exception as error:  # noqa: BLE001 - whatever it is, somebody cannot look any more
            found.append(f"looking failed: {type(error).__name__}: {error}")
        return found

    def named(self) -> list[dict[str, Any]]:
        """Rows that the status names."""
        rows: list[dict[str, Any]] = with_ports(self.broker.url("operator"), snapshot)["bad_rows"]
        return rows

    def ask_api(self) -> None:
        for path in ("v1/status", "v1/workers", "v1/runs", "metrics"):
            with urllib.request.urlopen(f"{self.api_url}/{path}", timeout=30) as answer:
                assert answer.status == 200

    def tidy(self) -> None:
        """Remove bad rows as an operator does, and the rest of what was written under bad names."""
        for row in self.named():
            bad = BadRow(row["table"], row["row"], row["problem"])
            with_ports(self.broker.url("operator"), lambda ports, bad=bad: ports.board.remove_row(bad))
        admin = self.broker.admin
        for key in admin.scan_iter(count=1000):
            with contextlib.suppress(redis.ResponseError):
                if admin.type(key) == b"hash":
                    names = [name for name in admin.hkeys(key) if b"bad" in name[:6]]
                    if names:
                        admin.hdel(key, *names)


@contextlib.contextmanager
def world(directory: Path) -> Iterator[World]:
    """A fabric at work, for the length of a block."""
    port = free_port()
    words = {
        "controller": ["controller", "--name", "controller"],
        "agent": ["agent", "--environment", "walk=tests.worlds:Walk"],
        "worker": ["worker"],
        "reward": ["reward", "--reward", "steady=tests.worlds:broken_reward"],
        "api": ["api", "--port", str(port)],
    }
    with guarded_broker(directory) as broker, Supervisor(directory / "logs") as supervisor:
        for name, arguments in words.items():
            role = "api-read" if name == "api" else name
            environment = {"ROLLFAB_URL": broker.url(role), "PYTHONPATH": PYTHONPATH}
            supervisor.add(name, arguments, environment=environment)
        _wait_for_roles(broker, supervisor)
        with rollfab.connect(broker.url("trainer")) as trainer:
            made = World(broker, supervisor, trainer, f"http://127.0.0.1:{port}")
            try:
                made.push()
                if problems := made.problems(2 * WAIT_S):
                    logs = [f"== {name}\n{child.tail(20)}" for name, child in supervisor.children.items()]
                    raise AssertionError("\n".join([*problems, *logs]))
                yield made
            finally:
                made.close()


def _wait_for_roles(broker: Guarded, supervisor: Supervisor) -> None:
    until_s = time.monotonic() + 2 * WAIT_S
    while True:
        seen = with_ports(broker.url("operator"), snapshot)["workers"]
        if {"agent", "controller", "dedicated", "reward"} <= {row["role"] for row in seen}:
            return
        logs = [f"== {name}\n{child.tail(20)}" for name, child in supervisor.children.items()]
        assert time.monotonic() < until_s, "\n".join(logs)
        time.sleep(0.2)


# ---- one table


def fuzz_table(at: World, table: Table, seconds: float, seed: int, *, wait_s: float = WAIT_S) -> Outcome:
    """Write bad rows for so long, then look."""
    dice, outcome = random.Random(f"{seed} {table}"), Outcome(table)
    client, begun_s, before = at.clients[table.role], time.monotonic(), len(at.pushed)
    pushed_at_s = -PUSH_S
    for number in range(10**9):
        now_s = time.monotonic() - begun_s
        if now_s >= seconds:
            break
        if now_s - pushed_at_s >= PUSH_S:
            pushed_at_s = now_s
            with contextlib.suppress(FabricError):
                at.push(VICTIM)
            at.push()
            at.take()
        try:
            _write(at, client, table, dice, number)
            outcome.written += 1
        except redis.exceptions.ResponseError:
            outcome.refused += 1
        time.sleep(PACE_S)
    with contextlib.suppress(FabricError):
        at.push(VICTIM)
    at.push()
    outcome.problems = at.problems(wait_s)
    with contextlib.suppress(Exception):
        outcome.bad_rows_named = len(at.named())
        at.tidy()
    outcome.good_groups = len(at.pushed) - before
    return outcome


def _write(at: World, client: redis.Redis, table: Table, dice: random.Random, number: int) -> None:
    run = dice.choice((GOOD, VICTIM))
    key = table.key.replace("{run}", ShardKeys(run, 0).base).replace("{weights}", WeightKeys(run).base)
    if "*" in key:
        there = list(at.broker.admin.scan_iter(match=key.replace("{", "?").replace("}", "?"), count=1000))
        own = [each for each in there if VICTIM.encode() in each]
        key = dice.choice(own).decode() if own and run == VICTIM else key.replace("*", f"bad-{number}")
    name, value = bad_name(dice, number % 200), bad_value(dice)
    if run == VICTIM and "victim" in key and table.kind == HASH and dice.random() < 0.5:
        names = at.broker.admin.hkeys(key)
        name = dice.choice(names) if names else name
    if run == VICTIM and "victim" in key and dice.randrange(50) == 0:
        _change_type(client, key, table.kind)
        return
    if table.kind == HASH:
        client.hset(key, name, value)  # type: ignore[arg-type]
    elif table.kind == ZSET:
        _run(client, "ZADD", key, dice.choice(("-inf", "inf", "0", "1e300", "-1", str(time.time() * 1000))), name)
    elif table.kind == LIST:
        _run(client, "RPUSH", key, name)
    elif table.kind == "set":
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
    elif "victim" in key or dice.randrange(2):
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
