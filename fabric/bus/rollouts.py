"""Groups on Redis: pushed by a trainer, delivered when complete, gone when acknowledged.

- Delivery is a consumer group: what a consumer received but did not acknowledge comes again, first, marked so.
- Back-pressure is an error: a push above the run's bound writes nothing and says so.
- A push is acknowledged when it is as safe as `durability` asks (durability.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from redis.asyncio import Redis

from ..clock import Clock, SystemClock
from ..errors import FirstError
from ..ids import trajectory_id
from ..ports import Delivery, GroupPush
from ..records import DeadLetter, Group, Rollout, RunConfig, TrajectoryJob
from ..rules.giving_up import RERUN_COUNT_MAX, given_up, is_stale, too_stale
from ..rules.push import DEAD_COUNT_MAX, no_such_run, too_many_bytes, too_many_dead, too_many_open
from ..wire import dump_json, load_json
from .channel import Command, checked, stream_entries
from .connection import translate
from .durability import Durability, call_durably
from .keys import CONSUMED_COUNT_MAX, CONSUMER_GROUP_TRAINER
from .scripts import Call, Scripts
from .shards import RunShards, ending_keys, rerun_keys, waking_keys

LOOK_BACK_S = 5.0  # how often a consumer asks for what it was sent but never saw (the answer was lost)
PENDING_COUNT = 1_000
LATE_COUNT = 64  # groups closed at their deadline by one call


class RedisRolloutStream:
    """RolloutStream (see ports) of one run."""

    def __init__(
        self, client: Redis, run: RunConfig, *, clock: Clock | None = None, durability: Durability = "memory"
    ) -> None:
        self._client: Any = client  # its stubs do not know that replies are bytes
        self._scripts = Scripts(client)
        self._run = run
        self._shards = RunShards(run.run_id, run.shard_count)
        self._clock = clock or SystemClock()
        self._durability = durability
        self._in_hand: set[tuple[int, bytes]] = set()  # received here, neither acknowledged nor put back
        self._look_back_at_s: dict[str, float] = {}

    async def push(self, groups: Sequence[GroupPush]) -> list[bool]:
        answers = await self._push([self._push_call(group) for group in groups])
        taken: list[bool] = []
        for answer in answers:
            if isinstance(answer, Exception):
                with translate():
                    raise answer
            self._check(answer)
            taken.append(answer[0] == 1)
        return taken

    async def _push(self, calls: Sequence[Call]) -> list[Any]:
        if self._durability == "memory":
            with translate():
                return await self._scripts.call_many(calls)
        by_run_key: dict[str, list[int]] = {}  # one barrier for each shard
        for index, (_, names, _) in enumerate(calls):
            by_run_key.setdefault(names[0], []).append(index)
        answers: list[Any] = [None] * len(calls)
        for part in by_run_key.values():
            with translate():
                found = await call_durably(self._scripts, [calls[index] for index in part], self._durability)
            for index, answer in zip(part, found, strict=True):
                answers[index] = answer
        return answers

    def _push_call(self, group: GroupPush) -> tuple[str, list[str], list[Any]]:
        keys = self._shards.of(group.group_id)
        t = keys.trajectory
        names = [keys.run, *waking_keys(keys, t), t.job, t.record, keys.counters, keys.group(group.group_id)]
        names += [keys.late, keys.clock, keys.consumed, keys.dead]
        facts = dump_json({"task_id": group.task_id, "task": group.task})
        size = len(group.jobs)
        deadline_ms = 0 if group.deadline_s is None else max(1, int(group.deadline_s * 1000))
        args: list[Any] = [group.group_id, size, group.quorum or size, group.priority, deadline_ms, facts]
        args.append(DEAD_COUNT_MAX)
        for job in group.jobs:
            args += [job.trajectory_id, job.encode()]
        return "push_group", names, args

    def _check(self, answer: Sequence[int]) -> None:
        refusals = {-1: too_many_open, -3: too_many_dead, -4: too_many_bytes}
        if answer[0] in refusals:
            raise refusals[answer[0]](self._run.run_id, *answer[1:])
        if answer[0] == -2:
            raise no_such_run(self._run.run_id)

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

    async def _read(
        self, consumer: str, count: int, after: str, timeout_s: float | None
    ) -> list[tuple[int, bytes, str]]:
        """Entries of the completed streams as (shard, entry id, group id); no group id: it was deleted meanwhile."""
        names = [keys.completed for keys in self._shards.all]
        block = () if timeout_s is None else ("BLOCK", max(1, int(timeout_s * 1000)))
        command = ("XREADGROUP", "GROUP", CONSUMER_GROUP_TRAINER, consumer, "COUNT", count, *block)
        with translate():
            (answer,) = checked(
                await self._scripts.channel.ask_alone([(*command, "STREAMS", *names, *[after] * len(names))])
            )
        return [
            (names.index(name), entry_id, fields[1].decode() if fields else "")
            for name, entry_id, fields in stream_entries(answer)
        ]

    async def _deliveries(self, rows: list[tuple[int, bytes, str]], *, is_again: bool) -> list[Delivery]:
        commands: list[Command] = []
        for shard, _, group_id in rows:
            keys = self._shards.all[shard]
            commands += [("HGETALL", keys.group(group_id)), ("HGETALL", keys.rollouts(group_id))]
            commands.append(("HGET", keys.run, "head_version"))
        with translate():
            answers = checked(await self._scripts.channel.ask_many(commands))
        found: list[Delivery] = []
        for row, facts, made, head in zip(rows, answers[::3], answers[1::3], answers[2::3], strict=True):
            shard, entry_id, group_id = row
            if not facts:  # cancelled after it was complete, or acknowledged by a call whose answer was lost
                await self._drop(shard, entry_id)
                continue
            if b"ended_by" not in facts[::2]:  # read from a primary that is gone: the new one has it open, and ends it
                continue
            group = await self._group(group_id, facts, made, is_again=is_again)
            stale = [] if is_again else self._stale(group, int(head))  # what comes again was fresh when it first came
            if stale:
                await self._rerun(shard, entry_id, group, stale, int(head))
                continue
            self._in_hand.add((shard, entry_id))
            found.append(Delivery(group=group, shard=shard, entry_id=entry_id.decode()))
        return found

    def _stale(self, group: Group, head: int) -> list[Rollout]:
        if self._run.when_stale != "rerun":
            return []
        return [each for each in group.rollouts if is_stale(each.policy_version, head, self._run.staleness)]

    async def _rerun(self, shard: int, entry_id: bytes, group: Group, stale: Sequence[Rollout], head: int) -> None:
        keys, run_id = self._shards.all[shard], self._run.run_id
        args: list[Any] = [group.group_id, entry_id, RERUN_COUNT_MAX]
        with translate():
            jobs = await self._client.hmget(keys.trajectory.job, [each.trajectory_id for each in stale])
            for rollout, raw in zip(stale, jobs, strict=True):
                if raw is not None:  # else the group was cancelled a moment ago
                    reason = too_stale(rollout.policy_version, head)
                    letter = given_up(run_id, "-", TrajectoryJob.decode(raw), reason)
                    args += [rollout.trajectory_id, letter.encode()]
            await self._scripts.call("rerun_stale", rerun_keys(keys, group.group_id), args)

    async def _group(self, group_id: str, raw_facts: list[bytes], made: list[bytes], *, is_again: bool) -> Group:
        """A group of its hashes, each as fields and values in turn."""
        facts = dict(zip(raw_facts[::2], raw_facts[1::2], strict=True))
        rollouts = {name.decode(): Rollout.decode(raw) for name, raw in zip(made[::2], made[1::2], strict=True)}
        names = [trajectory_id(group_id, index) for index in range(int(facts[b"size"]))]
        missing = [name for name in names if name not in rollouts]
        failed: set[str] = set()
        if missing and int(facts[b"failed"]):
            with translate():
                records = await self._client.hmget(self._shards.of(group_id).trajectory.record, missing)
            failed = {name for name, raw in zip(missing, records, strict=True) if raw and raw.startswith(b"failed ")}
        return Group(
            group_id=group_id,
            task_id=load_json(facts[b"task"])["task_id"],
            rollouts=tuple(rollouts[name] for name in names if name in rollouts),
            failures=tuple(name for name in missing if name in failed),
            cancelled=tuple(name for name in missing if name not in failed),
            ended_by=facts[b"ended_by"].decode(),
            redelivered=is_again,
        )

    async def _drop(self, shard: int, entry_id: bytes) -> None:
        name = self._shards.all[shard].completed
        commands = [("XACK", name, CONSUMER_GROUP_TRAINER, entry_id), ("XDEL", name, entry_id)]
        with translate():
            checked(await self._scripts.channel.ask_many(commands))

    async def acknowledge(self, delivery: Delivery) -> bool:
        keys = self._shards.all[delivery.shard]
        group_id = delivery.group.group_id
        names = [keys.completed, keys.group(group_id), keys.rollouts(group_id), keys.trajectory.record]
        with translate():
            code = await self._scripts.call(
                "acknowledge",
                [*names, keys.run, keys.counters, keys.consumed, keys.trajectory.job, keys.clock],
                [delivery.entry_id, group_id, CONSUMED_COUNT_MAX],
            )
        self._in_hand.discard((delivery.shard, delivery.entry_id.encode()))
        return bool(code)

    async def cancel(self, group_id: str) -> bool:
        keys = self._shards.of(group_id)
        with translate():
            names = [*ending_keys(keys, group_id), keys.consumed, keys.clock]
            return bool(await self._scripts.call("cancel_group", names, [group_id, CONSUMED_COUNT_MAX]))

    async def reap(self) -> int:
        closed, first_error = 0, FirstError()
        for keys in self._shards.all:
            with first_error, translate():
                for name in await self._scripts.call("late_groups", [keys.late, keys.clock], [LATE_COUNT]):
                    group_id = name.decode()
                    closed += await self._scripts.call("close_group", ending_keys(keys, group_id), [group_id])
        first_error.raise_it()
        return closed

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
