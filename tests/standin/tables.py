"""What a stand-in broker holds, as tests look at it and change it, by the names of fabric/queue/keys.py."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import redis

from rollfab.fabric.contract.records import WorkerInfo
from rollfab.fabric.queue import keys as names
from rollfab.fabric.queue.keys import JobKeys, ShardKeys
from tests.standin.broker import Broker
from tests.standin.keyspace import Hash, Held, List, SortedSet, Text
from tests.standin.streams import Stream


@dataclass(frozen=True, slots=True)
class Record:
    """A job's record: see fabric/queue/lua/use/record.lua."""

    state: str
    fence: int
    attempt: int
    loss: int
    rerun: int
    blame: int
    seen: int
    inside: int
    worker: str

    @classmethod
    def read(cls, row: bytes) -> Record:
        state, *numbers, worker = row.decode().split()
        return cls(state, *map(int, numbers), worker)


def copied(urls: Iterable[str]) -> Broker:
    """Copy all keys of real servers into a stand-in, so that its tables show what they hold."""
    broker = Broker()
    for url in urls:
        with redis.Redis.from_url(url, protocol=2) as server:
            broker.keys.held.update({key: _read(server, key) for key in server.keys("*")})
    return broker


def _read(server: Any, key: bytes) -> Held:
    kind = server.type(key)
    if kind == b"hash":
        return Hash(server.hgetall(key))
    if kind == b"zset":
        return SortedSet(server.zrange(key, 0, -1, withscores=True))
    if kind == b"list":
        return List(server.lrange(key, 0, -1))
    if kind == b"string":
        return Text(server.get(key))
    assert kind == b"stream", f"{key!r} is a {kind!r}, which the stand-in does not have"
    stream = Stream()
    for _, fields in server.xrange(key):
        stream.add(list(chain.from_iterable(fields.items())), 0)
    return stream


class _Tables:
    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    def _hash(self, key: str) -> dict[str, bytes]:
        return {name.decode(): value for name, value in (self._broker.keys.get(key.encode(), Hash) or {}).items()}

    def _scores(self, key: str) -> dict[str, float]:
        return {name.decode(): score for name, score in (self._broker.keys.get(key.encode(), SortedSet) or {}).items()}

    def _entries(self, key: str) -> list[list[bytes]]:
        stream = self._broker.keys.get(key.encode(), Stream)
        return [stream.entries[entry] for entry in stream.ids] if stream is not None else []

    def _do(self, *command: Any) -> Any:
        return self._broker.carry_out(command)


class JobTables(_Tables):
    """One kind of job on one shard."""

    def __init__(self, broker: Broker, keys: JobKeys, *, homed: str = "", homed_at: str = "") -> None:
        super().__init__(broker)
        self._keys = keys
        self._homed, self._homed_at = homed, homed_at

    @property
    def records(self) -> dict[str, Record]:
        return {name: Record.read(row) for name, row in self._hash(self._keys.record).items()}

    @property
    def held(self) -> dict[str, int]:
        """Claims that each worker has."""
        return {name: int(count) for name, count in self._hash(self._keys.held).items() if name != "-"}

    @property
    def deadlines(self) -> dict[str, float]:
        return self._scores(self._keys.deadline)

    @property
    def logs(self) -> dict[str, list[bytes | None]]:
        """Parts of what is saved, by job."""
        rows = self._hash(self._keys.log)
        return {
            name: [rows.get(f"{name}{ending}") for ending in names.PART_ENDINGS]
            for name in {field.partition("~")[0] for field in rows}
        }

    @property
    def ready(self) -> list[str]:
        """Jobs that wait for anybody, the most urgent first, and then those that wait for their homes."""
        return [fields[1].decode() for key in self._keys.ready for fields in self._entries(key)] + self.homed

    @property
    def homed(self) -> list[str]:
        """Turns that wait for the worker that made the one before."""
        return [member.split()[-1] for member in self._scores(self._homed)]

    def check_integrity(self) -> None:
        """Assert what holds between any two scripts: no job is lost, counted twice, or remembered after its end."""
        states: dict[str, set[str]] = {}
        for name, record in self.records.items():
            states.setdefault(record.state, set()).add(name)
        ready, claimed = states.get("ready", set()), states.get("claimed", set())
        waiting = {*self.ready, *(name.decode() for name in self._do("LRANGE", self._keys.suspects, 0, -1))}
        assert self._scores(self._homed).keys() == self._scores(self._homed_at).keys(), "homed, and not since"
        assert ready <= waiting, f"ready, and in no queue: {ready - waiting}"
        watched = claimed | states.get("scoring", set())
        assert self.deadlines.keys() == watched, f"with a deadline or a claim alone: {self.deadlines.keys() ^ watched}"
        held = Counter(record.worker for record in self.records.values() if record.state == "claimed")
        assert self.held == held, f"claims are counted as {self.held}, and are {dict(held)}"
        unfinished = ready | claimed
        assert unfinished <= self._hash(self._keys.job).keys(), "a job that is not over has no text"
        assert self.logs.keys() <= unfinished, f"logs of what is over: {self.logs.keys() - unfinished}"

    def expire(self, name: str) -> None:
        """Its claim ends now."""
        self._do("ZADD", self._keys.deadline, 0, name)

    def blame(self, name: str, loss: int) -> None:
        """It is said to have cost so much."""
        row = dataclasses.replace(self.records[name], loss=loss)
        self._do("HSET", self._keys.record, name, " ".join(map(str, dataclasses.astuple(row))))

    def set_ready(self, waiting: Iterable[str]) -> None:
        """These wait, and no others; that nobody knows them shows when they are claimed."""
        for key in self._keys.ready:
            self._broker.keys.make(key.encode(), Stream).trim(0)
        for key in filter(None, (self._homed, self._homed_at)):
            self._do("DEL", key)
        for name in waiting:
            self._do("XADD", self._keys.ready[0], "*", "id", name)


class RunTables(_Tables):
    """A run of one shard, or one of its shards."""

    def __init__(self, broker: Broker, run_id: str, shard: int = 0) -> None:
        super().__init__(broker)
        self.keys = ShardKeys(run_id, shard)
        self.trajectories = JobTables(broker, self.keys.trajectory)
        self.turns = JobTables(broker, self.keys.turn, homed=self.keys.turn_homed, homed_at=self.keys.turn_homed_at)

    @property
    def head_version(self) -> int:
        return int(self._do("HGET", self.keys.run, "head_version"))

    @head_version.setter
    def head_version(self, version: int) -> None:
        self._do("HSET", self.keys.run, "head_version", version)

    @property
    def head(self) -> tuple[int, str]:
        """The head's version, and what its weights are."""
        return self.head_version, (self._do("HGET", self.keys.run, "weights") or b"").decode()

    @head.setter
    def head(self, told: tuple[int, str]) -> None:
        self._do("HSET", self.keys.run, "head_version", told[0], "weights", told[1])

    @property
    def read_costs(self) -> dict[str, int]:
        """What reading costs more, by kind of hardware; none: it is alike."""
        return {name: int(cost) for name, cost in self._hash(self.keys.turn_hardware).items()}

    @read_costs.setter
    def read_costs(self, _: None) -> None:
        self._do("DEL", self.keys.turn_hardware)

    @property
    def depth(self) -> int:
        return int(self._do("HGET", self.keys.run, "depth"))

    @depth.setter
    def depth(self, depth: int) -> None:
        self._do("HSET", self.keys.run, "depth", depth)

    @property
    def counters(self) -> dict[str, int]:
        return {name: int(count) for name, count in self._hash(self.keys.counters).items()}

    def count(self, name: str, by: int = 1) -> None:
        """Add to a total."""
        self._do("HINCRBY", self.keys.counters, name, by)

    @property
    def groups(self) -> list[str]:
        """Groups that are held, in the order in which they came."""
        prefix = self.keys.group("")
        return [
            key.decode().removeprefix(prefix) for key in self._broker.keys.names() if key.startswith(prefix.encode())
        ]

    @property
    def consumed(self) -> set[str]:
        return set(self._scores(self.keys.consumed))

    @property
    def kept(self) -> list[str]:
        """Consumed groups that are kept for people to look at, the oldest first."""
        return [fields[1].decode() for fields in self._entries(self.keys.kept)]

    def check_integrity(self) -> None:
        """Assert what holds between any two scripts: see `JobTables`; and the totals are those of the groups."""
        self.trajectories.check_integrity()
        self.turns.check_integrity()
        groups = {name: self._hash(self.keys.group(name)) for name in self.groups}
        for total in ("depth", "bytes"):
            counted = int(self._do("HGET", self.keys.run, total) or 0)
            sums = sum(int(group["size" if total == "depth" else total]) for group in groups.values())
            assert counted == sums, f"{total} is counted as {counted}, and is {sums}"
        is_open = {name for name, group in groups.items() if group["state"] == b"open"}
        assert self._hash(self.keys.open).keys() == is_open, "groups are open that are not"
        known = {name.rpartition(".")[0] for name in self.trajectories.records}
        assert known <= groups.keys(), f"trajectories of no group: {known - groups.keys()}"
        asked = {name.rpartition(".")[0] for name in self.turns.records}
        ended = {name for name, each in self.trajectories.records.items() if each.state in ("completed", "failed")}
        left = asked - (self.trajectories.records.keys() - ended)
        assert not left, f"turns of trajectories that are over: {left}"
        begun = self._scores(self.keys.begun).keys()
        under_way = {name for name, each in self.trajectories.records.items() if each.state in ("claimed", "scoring")}
        assert under_way <= begun, f"under way, and agents have not begun them: {under_way - begun}"
        left = begun - (self.trajectories.records.keys() - ended)
        assert not left, f"begun, and over: {left}"
        counted = int(self._do("HGET", self.keys.run, "kept_bytes") or 0)
        sums = sum(int(fields[3]) for fields in self._entries(self.keys.kept))
        assert counted == sums, f"kept_bytes is counted as {counted}, and is {sums}"
        shown = {name.partition("/")[0] for name in self._hash(self.keys.turn_image)}
        left = shown - (self.trajectories.records.keys() - ended)
        assert not left, f"images of trajectories that are over: {left}"

    def end_lease(self, worker_id: str) -> None:
        """Its time is over; the row is still there."""
        epoch, slot_count, _ = self._hash(self.keys.leases)[worker_id].decode().split()
        self._do("HSET", self.keys.leases, worker_id, f"{epoch} {slot_count} 1")

    @property
    def now_ms(self) -> float:
        """What the shard's clock shows."""
        return self._broker.now_ms(self.keys.clock)


class FabricTables(_Tables):
    """What is of no run."""

    @property
    def workers(self) -> dict[str, WorkerInfo]:
        return {name: WorkerInfo.decode(row) for name, row in self._hash(names.WORKERS).items()}

    @property
    def heard_ms(self) -> dict[str, float]:
        """When each worker said last that it lives."""
        return self._scores(names.HEARTBEATS)

    @property
    def assignments(self) -> dict[str, str]:
        return {name: run_id.decode() for name, run_id in self._hash(names.ASSIGNMENTS).items()}

    @property
    def events(self) -> list[tuple[str, dict[str, Any]]]:
        """Kind and facts of each."""
        return [(row[1].decode(), json.loads(row[3])) for row in self._entries(names.EVENTS)]

    @property
    def term(self) -> int:
        """Of whoever led last; 0: nobody has."""
        return int(self._do("GET", names.LEASE_EPOCH) or 0)

    def assign(self, worker_id: str, run_id: str) -> None:
        """Point a worker elsewhere."""
        self._do("HSET", names.ASSIGNMENTS, worker_id, run_id)

    def silence(self, worker_id: str, for_ms: int) -> None:
        """A worker was last heard so long ago."""
        self._do("ZADD", names.HEARTBEATS, int(self._broker.now_ms(names.CLOCK)) - for_ms, worker_id)

    def end_term(self) -> None:
        """Nobody leads."""
        self._do("DEL", names.LEADER)
