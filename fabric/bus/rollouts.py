"""Groups on Redis: pushed by a trainer, delivered when complete, gone when acknowledged.

- Delivery is a consumer group: what a consumer received but did not acknowledge comes again, first, marked so.
- Back-pressure is an error: a push above the run's bound writes nothing and says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from redis.asyncio import Redis

from ..clock import Clock, SystemClock
from ..errors import QueueFull, RunUnknown
from ..ids import trajectory_id
from ..ports import Delivery, GroupPush
from ..records import DeadLetter, Group, Rollout, RunConfig
from ..wire import dump_json, load_json
from .connection import translate
from .keys import CONSUMED_COUNT_MAX, CONSUMER_GROUP_TRAINER, ShardKeys
from .scripts import Scripts
from .shards import RunShards, ending_keys

LOOK_BACK_S = 5.0  # how often a consumer asks for what it was sent but never saw (the answer was lost)
PENDING_COUNT = 1_000


class RedisRolloutStream:
    """RolloutStream (see ports) of one run."""

    def __init__(self, client: Redis, run: RunConfig, *, clock: Clock | None = None) -> None:
        self._client: Any = client  # its stubs do not know that replies are bytes
        self._scripts = Scripts(client)
        self._run = run
        self._shards = RunShards(run.run_id, run.shard_count)
        self._clock = clock or SystemClock()
        self._in_hand: set[tuple[int, bytes]] = set()  # received here, neither acknowledged nor put back
        self._look_back_at_s: dict[str, float] = {}

    async def push(self, groups: Sequence[GroupPush]) -> list[bool]:
        calls = [self._push_call(group) for group in groups]
        with translate():
            answers = await self._scripts.call_many(calls)
        taken: list[bool] = []
        for answer in answers:
            if isinstance(answer, Exception):
                with translate():
                    raise answer
            self._check(answer, sum(taken))
            taken.append(answer[0] == 1)
        return taken

    def _push_call(self, group: GroupPush) -> tuple[str, list[str], list[Any]]:
        keys = self._shards.of(group.group_id)
        t = keys.trajectory
        names = [keys.run, t.ready, t.job, t.record, t.bell, keys.counters, keys.group(group.group_id), keys.consumed]
        facts = dump_json({"task_id": group.task_id, "task": group.task})
        args: list[Any] = [group.group_id, len(group.jobs), facts]
        for job in group.jobs:
            args += [job.trajectory_id, job.encode()]
        return "push_group", names, args

    def _check(self, answer: Sequence[int], taken_count: int) -> None:
        if answer[0] == -1:
            _, depth, limit = answer
            raise QueueFull(
                f"run {self._run.run_id!r} holds {depth} trajectories not yet consumed, its limit is {limit}: "
                "consume groups, or raise trajectory_count_max",
                depth=depth,
                limit=limit,
                taken_count=taken_count,
            )
        if answer[0] == -2:
            raise RunUnknown(f"run {self._run.run_id!r} does not exist on this broker: create it with fabric.run(…)")

    async def receive(self, consumer: str, count: int, timeout_s: float) -> list[Delivery]:
        if self._look_back_at_s.get(consumer, 0.0) <= self._clock.now_s():
            self._look_back_at_s[consumer] = self._clock.now_s() + LOOK_BACK_S
            owed = [row for row in await self._read(consumer, PENDING_COUNT, "0", None) if row[:2] not in self._in_hand]
            if owed:
                return await self._deliveries(owed[:count], is_again=True)
        fresh = await self._read(consumer, count, ">", None) or await self._read(consumer, count, ">", timeout_s)
        return await self._deliveries(fresh, is_again=False)

    def put_back(self, delivery: Delivery) -> None:
        self._in_hand.discard((delivery.shard, delivery.entry_id.encode()))
        self._look_back_at_s.clear()

    async def _read(self, consumer: str, count: int, after: str, timeout_s: float | None) -> list[tuple[int, Any, Any]]:
        streams: dict[Any, Any] = {keys.completed: after for keys in self._shards.all}
        block = None if timeout_s is None else max(1, int(timeout_s * 1000))
        with translate():
            answer = await self._client.xreadgroup(CONSUMER_GROUP_TRAINER, consumer, streams, count=count, block=block)
        return [
            (self._index(name), entry_id, fields) for name, parts in stream_rows(answer) for entry_id, fields in parts
        ]

    def _index(self, name: str) -> int:
        return next(index for index, keys in enumerate(self._shards.all) if keys.completed == name)

    async def _deliveries(self, rows: list[tuple[int, Any, Any]], *, is_again: bool) -> list[Delivery]:
        found: list[Delivery] = []
        for shard, entry_id, fields in rows:
            keys = self._shards.all[shard]
            group_id = fields[b"group"].decode() if fields else ""
            group = await self._group(keys, group_id, is_again=is_again) if group_id else None
            if group is None:  # cancelled after it was complete, or acknowledged by a call whose answer was lost
                with translate():
                    await self._client.xack(keys.completed, CONSUMER_GROUP_TRAINER, entry_id)
                    await self._client.xdel(keys.completed, entry_id)
                continue
            self._in_hand.add((shard, entry_id))
            found.append(Delivery(group=group, shard=shard, entry_id=entry_id.decode()))
        return found

    async def _group(self, keys: ShardKeys, group_id: str, *, is_again: bool) -> Group | None:
        with translate():
            facts = await self._client.hgetall(keys.group(group_id))
            raw = await self._client.hgetall(keys.rollouts(group_id))
        if not facts:
            return None
        names = [trajectory_id(group_id, index) for index in range(int(facts[b"size"]))]
        made = {name.decode(): Rollout.decode(value) for name, value in raw.items()}
        return Group(
            group_id=group_id,
            task_id=load_json(facts[b"task"])["task_id"],
            rollouts=tuple(made[name] for name in names if name in made),
            failures=tuple(name for name in names if name not in made),
            redelivered=is_again,
        )

    async def acknowledge(self, delivery: Delivery) -> bool:
        keys = self._shards.all[delivery.shard]
        group_id = delivery.group.group_id
        names = [keys.completed, keys.group(group_id), keys.rollouts(group_id), keys.trajectory.record]
        with translate():
            code = await self._scripts.call(
                "acknowledge",
                [*names, keys.run, keys.counters, keys.consumed],
                [delivery.entry_id, group_id, CONSUMED_COUNT_MAX],
            )
        self._in_hand.discard((delivery.shard, delivery.entry_id.encode()))
        return bool(code)

    async def cancel(self, group_id: str) -> bool:
        keys = self._shards.of(group_id)
        with translate():
            return bool(await self._scripts.call("cancel_group", [*ending_keys(keys, group_id), keys.run], [group_id]))

    async def dead_letters(self, count: int) -> list[DeadLetter]:
        letters: list[DeadLetter] = []
        for keys in self._shards.all:
            cursor = 0
            while len(letters) < count:
                with translate():
                    cursor, rows = await self._client.hscan(keys.dead, cursor, count=count)
                letters += [DeadLetter.decode(value) for value in rows.values()]
                if cursor == 0:
                    break
        return letters[:count]

    async def discard(self, trajectory_id: str) -> bool:
        with translate():
            return bool(await self._client.hdel(self._shards.of(trajectory_id).dead, trajectory_id))


def stream_rows(answer: Any) -> list[tuple[str, list[Any]]]:
    """An XREAD or XREADGROUP answer as (stream, entries), whichever RESP version the connection speaks."""
    rows = answer.items() if isinstance(answer, dict) else answer or []
    found: list[tuple[str, list[Any]]] = []
    for name, parts in rows:
        entries = parts[0] if parts and isinstance(parts[0], list) else parts  # RESP3 wraps them once more
        found.append((name.decode() if isinstance(name, bytes) else name, list(entries)))
    return found
