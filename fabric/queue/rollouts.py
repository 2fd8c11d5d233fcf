"""Groups on Redis: pushed by a trainer, delivered when complete, gone when acknowledged.

- Delivery is a consumer group, whose consumers are clients: "name/client". A group that a client received but did not
  acknowledge is its own while it gives signs of life; a client that takes it over gets it again, marked so.
- Only the holder of a group may end it: no other client's acknowledgement counts, and no other client may take back a
  group that is too stale.
- A group is looked at for staleness at every delivery.
- Back-pressure is an error: a group above the run's bound is not taken in, and the error says which are.
- A push is acknowledged when it is as safe as `durability` asks (scripts.py).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from ..broker.clients.channel import Command, checked, stream_entries
from ..broker.clients.translate import translate
from ..broker.clients.typed import is_wrong_type
from ..broker.clients.url import Durability
from ..broker.clients.waiting import first_found
from ..contract.agreement import TokenDifferences
from ..contract.clock import Clock, SystemClock
from ..contract.errors import BrokerError, FabricError, FirstError, WireError
from ..contract.ids import group_of, new_worker_id, shard_of, trajectory_id
from ..contract.records import DeadLetter, Failure, Group, Rollout, RunConfig
from ..contract.text import counted
from ..contract.wire import dump_json, load_json
from ..ports.queue import ConsumerBeat, Delivery, GroupPush
from ..rules.queue.dead import VERDICTS, DeadVerdict
from ..rules.queue.keeping import KEPT_COUNT_MAX, to_drop
from ..rules.queue.length import task_name
from ..rules.queue.push import (
    DEAD_COUNT_MAX,
    another_group,
    evaluates_another,
    outcome,
    too_many_bytes,
    too_many_dead,
    too_many_open,
)
from ..rules.queue.retries import NO_LETTER, RERUN_COUNT_MAX, is_stale, not_held, too_stale
from .keys import CONSUMED_COUNT_MAX, CONSUMER_GROUP_TRAINER, RunShards, ShardKeys
from .rows import BadRows, GroupFacts, given_up_row, is_job_name, kept_row, letter_row, rollout_rows
from .scripts import Call, Owner, Scripts, call_durably
from .status import unknown_run

log = logging.getLogger(__name__)

LOOK_BACK_S = 5.0  # how often a consumer asks for groups that it was sent but never saw (the answer was lost)
PENDING_COUNT = 64  # of these looked at together
DROP_COUNT = 500  # entries looked at behind one of no group
TAKE_COUNT = 256  # groups taken over by one call: bounds the time a script holds the broker
SETTINGS_UNKNOWN = (None, None, None, None)  # where a key of another type stands
NOT_ITS = (-2, -5)  # queue/lua/rollouts/push_group.lua: the run is not there, or evaluates another version
NOT_HELD = -1  # queue/lua/rollouts/acknowledge.lua, and swap_group.lua
KEPT_TOO_MUCH = 2  # queue/lua/rollouts/use/leave.lua
SWAPPED = b"="  # queue/lua/rollouts/swap_group.lua
# What push_group.lua refuses for, and swap_group.lua: its code, and the error, made of the run and the other answers.
REFUSALS: dict[int, Callable[..., FabricError]] = {
    -1: too_many_open,
    -3: too_many_dead,
    -4: too_many_bytes,
}
RETRY_COUNT = 256  # groups of which dead trajectories are retried by one round trip
LATE_COUNT = 64  # groups closed at their deadline by one call


class RedisRolloutStream:
    """RolloutStream (see ports) of one run."""

    def __init__(
        self,
        client: Redis,
        run: RunConfig,
        *,
        clock: Clock | None = None,
        durability: Durability = "memory",
        client_id: str | None = None,
    ) -> None:
        """client_id: tells consumers of one name apart. Default: a new one."""
        self._client_id = client_id or new_worker_id("client")
        self._client: Any = client  # its stubs do not know that replies are bytes
        self._scripts = Scripts(client)
        self._run = run
        self._shards = RunShards(run.run_id, run.shard_count)
        self._clock = clock or SystemClock()
        self._durability = durability
        self._kept_bytes_max = run.kept_bytes_max // run.shard_count
        self._in_hand: set[tuple[int, bytes]] = set()  # received here, neither acknowledged nor put back
        self._first_fences: dict[int, str] = {}  # by shard: they tell this run from others of its name
        self._pinned = ""  # the version that this client evaluates; "": none
        self._look_back_at_s: dict[str, float] = {}
        self._first_shard = 0  # that was read first when groups were taken last, counted on
        self._known_names: set[str] = set()  # that this client has consumed under

    async def push(self, groups: Sequence[GroupPush]) -> list[bool]:
        shards = [shard_of(group.group_id, self._run.shard_count) for group in groups]
        await self._learn(shards)
        calls = [
            self._push_call(group, self._first_fences.get(shard, ""))
            for group, shard in zip(groups, shards, strict=True)
        ]
        answers = await self._push(calls)
        is_gone = any(isinstance(answer, list) and answer[0] in NOT_ITS for answer in answers)
        gone = await self._why_not_ours() if is_gone else None
        names = [group.group_id for group in groups]
        doubtful = [name for name, answer in zip(names, answers, strict=True) if isinstance(answer, FabricError)]
        verdicts = [self._verdict(group, answer, gone) for group, answer in zip(groups, answers, strict=True)]
        return outcome(dict(zip(names, verdicts, strict=True)), doubtful)

    async def known(self, group_ids: Sequence[str]) -> list[bool]:
        commands: list[Command] = []
        for name in group_ids:
            keys = self._shards.of(name)
            commands += [("EXISTS", keys.group(name)), ("ZSCORE", keys.consumed, name)]
        with translate():
            answers = await self._scripts.channel.ask_many(commands)
        found = [answer not in (None, 0) and not isinstance(answer, Exception) for answer in answers]
        return [is_here or is_over for is_here, is_over in zip(found[::2], found[1::2], strict=True)]

    async def _push(self, calls: Sequence[Call]) -> list[Any]:
        """Return answers in order; an error of ours where the round trip failed and the outcome is unknown."""
        by_shard: dict[Owner, list[int]] = {}  # one barrier for each shard
        for index, (_, owners, _) in enumerate(calls):
            by_shard.setdefault(owners[0] if self._durability != "memory" else "", []).append(index)
        answers: list[Any] = [None] * len(calls)
        for part in by_shard.values():
            wanted = [calls[index] for index in part]
            try:
                with translate():
                    if self._durability == "memory":
                        found = await self._scripts.call_many(wanted)
                    else:
                        found = await call_durably(self._scripts, wanted, self._durability)
            except BrokerError as error:
                found = [error] * len(part)
            for index, answer in zip(part, found, strict=True):
                answers[index] = answer
        return answers

    async def _learn(self, shards: Iterable[int]) -> None:
        """Look what tells this run from others of its name; what cannot be read now is looked for the next time."""
        wanted = sorted({*shards} - self._first_fences.keys())
        looks: list[Command] = [("HGET", self._shards.all[shard].run, "first_fence") for shard in wanted]
        with contextlib.suppress(BrokerError), translate():
            for shard, found in zip(wanted, await self._scripts.channel.ask_many(looks) if looks else (), strict=True):
                if isinstance(found, bytes):
                    self._first_fences[shard] = found.decode("utf-8", "replace")

    async def is_there(self) -> bool:
        await self._learn(range(self._run.shard_count))
        known = self._first_fences.get(0)
        with translate():
            (found,) = checked(await self._scripts.channel.ask_many([("HGET", self._shards.all[0].run, "first_fence")]))
        return known is None or found == known.encode()

    async def pinned(self) -> int | None:
        with translate():
            (found,) = checked(await self._scripts.channel.ask_many([("HGET", self._shards.all[0].run, "pinned")]))
        return int(found) if found is not None and found.isdigit() else None

    async def pin(self, version: int) -> None:
        self._pinned = str(version)
        with translate():
            checked(await self._scripts.call_many([("pin", [keys], [version]) for keys in self._shards.all]))

    async def check_there(self) -> None:
        if not await self.is_there() or await self._pinned_elsewhere() is not None:
            raise await self._why_not_ours()

    async def _pinned_elsewhere(self) -> bytes | None:
        """Return the version that the run evaluates by now, if this client evaluates another one."""
        with translate():
            found = await self._client.hget(self._shards.all[0].run, "pinned") if self._pinned else None
        return found if found != self._pinned.encode() else None

    async def _why_not_ours(self) -> FabricError:
        """Say why a call was refused: the run was deleted, or somebody has taken the evaluation on."""
        pinned = await self._pinned_elsewhere()
        if pinned is not None and await self.is_there():
            return evaluates_another(self._run, pinned.decode("utf-8", "replace"), self._pinned)
        return await unknown_run(self._client, self._run.run_id)

    def _push_call(self, group: GroupPush, first_fence: str) -> Call:
        keys = self._shards.of(group.group_id)
        facts = dump_json(_facts(group))
        size = len(group.jobs)
        deadline_ms = 0 if group.deadline_s is None else max(1, int(group.deadline_s * 1000))
        args = [group.group_id, size, group.quorum or size, group.priority, deadline_ms, facts, *self._rules(group)]
        return "push_group", [keys, keys.of_group(group.group_id)], [*args, first_fence, self._pinned, *_jobs(group)]

    def _rules(self, group: GroupPush) -> list[Any]:
        return [DEAD_COUNT_MAX, task_name(self._run, group.task_id), int(self._run.nearest_first)]

    def _verdict(self, group: GroupPush, answer: Any, gone: FabricError | None) -> bool | FabricError:
        """Say whether the group was new, or why it was refused; `gone`: the error if the run is not its any more."""
        if isinstance(answer, FabricError):
            return answer
        if isinstance(answer, Exception):
            return _translated(answer)
        if answer[0] in NOT_ITS:
            assert gone is not None
            return gone
        refusal = REFUSALS.get(answer[0])
        if refusal is not None:
            return refusal(self._run, *answer[1:])
        if answer[0]:
            return True
        _, task, size = answer
        if task and _is_other(group, task):
            return another_group(self._run.run_id, group.group_id, "another task")
        return another_group(self._run.run_id, group.group_id, counted(size, "trajectory")) if size else False

    async def beat(self, consumer: str, duration_s: float) -> ConsumerBeat:
        is_new = consumer not in self._known_names
        taken_count, was_lost, namesakes, first_error = 0, False, dict[str, None](), FirstError()
        await self._learn(range(self._run.shard_count))
        for shard, keys in enumerate(self._shards.all):
            args: list[Any] = [consumer, self._client_id, int(duration_s * 1000), int(is_new), TAKE_COUNT]
            args += [self._first_fences.get(shard, ""), self._pinned]
            count = TAKE_COUNT
            while count >= TAKE_COUNT:
                count = 0
                with first_error, translate():
                    count, *found = await self._scripts.call("beat_consumer", [keys], args)
                    if count < 0:
                        raise await self._why_not_ours()
                    is_unknown, *found = found
                    was_lost |= bool(is_unknown) and not is_new
                    namesakes.update(
                        dict.fromkeys(name.decode("utf-8", "replace").rpartition("/")[2] for name in found)
                    )
                taken_count += count
        if taken_count:
            self._look_back_at_s.clear()
        first_error.raise_it()
        self._known_names.add(consumer)
        return ConsumerBeat(taken_count=taken_count, was_lost=was_lost, namesakes=tuple(namesakes))

    async def receive(self, consumer: str, count: int, timeout_s: float) -> list[Delivery]:
        if self._look_back_at_s.get(consumer, 0.0) <= self._clock.now_s():
            at_most = len(self._in_hand) + PENDING_COUNT
            held = await self._read(consumer, at_most, "0", None)
            owed = [row for row in held if row[:2] not in self._in_hand]
            found: list[Delivery] = []
            while owed and not found:  # a group that is too stale runs again, and is not found
                found = await self._deliveries(owed[:count], consumer, is_again=True)
                del owed[:count]
            if found:
                return found
            if len(held) < at_most:  # else there may be more
                self._look_back_at_s[consumer] = self._clock.now_s() + LOOK_BACK_S
        try:
            return await self._deliveries(await self._fresh(consumer, count, timeout_s), consumer, is_again=False)
        except BaseException:  # the broker may have handed some over: they are looked for at once
            self._look_back_at_s.pop(consumer, None)
            raise

    async def peek(self, count: int) -> list[Group]:
        looks: list[Command] = [
            ("XREAD", "COUNT", count, "STREAMS", keys.completed, "0-0") for keys in self._shards.all
        ]
        with translate():
            found = await self._scripts.channel.ask_many(looks)
            answers = checked([None if is_wrong_type(each) else each for each in found])
        rows = [
            (shard, entry_id, fields[1].decode("utf-8", "replace"))
            for shard, answer in enumerate(answers)
            for _, entry_id, fields in stream_entries(answer)
            if len(fields) > 1
        ]
        rows.sort(key=lambda row: _moment(row[1]))
        return [
            await self._group(group_id, facts, made, is_again=False)
            for (_, _, group_id), (facts, made, _) in zip(rows[:count], await self._look(rows[:count]), strict=True)
            if b"ended_by" in facts[::2]
        ]

    def put_back(self, delivery: Delivery) -> None:
        self._in_hand.discard((delivery.shard, delivery.entry_id.encode()))
        self._look_back_at_s.clear()

    async def _fresh(self, consumer: str, count: int, timeout_s: float) -> list[tuple[int, bytes, str]]:
        """Take entries that nobody has received, `count` at most, after a wait if there are none."""
        names = [keys.completed for keys in self._shards.all]
        if len(names) == 1:
            return await self._read(consumer, count, ">", None) or await self._read(consumer, count, ">", timeout_s)
        until_s = self._clock.now_s() + timeout_s
        while True:
            ends = [("XREVRANGE", name, "+", "-", "COUNT", 1) for name in names]
            with translate():  # before the look: any group that comes after it ends the wait
                rows = [[] if is_wrong_type(each) else each for each in await self._scripts.channel.ask_many(ends)]
                last = [each[0][0] if each else b"0-0" for each in checked(rows)]
            found = await self._take(consumer, count)
            left_ms = int((until_s - self._clock.now_s()) * 1000)
            if found or left_ms <= 0:
                return found
            with translate():  # by XREAD: entries that a cancelled XREADGROUP took would be seen by nobody
                ends_of = dict(zip(names, last, strict=True))
                parts = [{name: ends_of[name] for name in part} for part in self._scripts.apart(names)]
                await first_found([self._client.xread(part, count=1, block=left_ms) for part in parts])

    async def _take(self, consumer: str, count: int) -> list[tuple[int, bytes, str]]:
        """Take entries of one shard after the other, from another one each time: at once, each would give `count`."""
        shards, self._first_shard = self._shards.all, self._first_shard + 1
        found: list[tuple[int, bytes, str]] = []
        for index in range(len(shards)):
            if len(found) < count:
                keys = shards[(self._first_shard + index) % len(shards)]
                found += await self._read(consumer, count - len(found), ">", None, [keys])
        return found

    async def _read(
        self,
        consumer: str,
        count: int,
        after: str,
        timeout_s: float | None,
        shards: Sequence[ShardKeys] | None = None,
    ) -> list[tuple[int, bytes, str]]:
        """Read completed streams, of each `count` at most: (shard, entry id, group id); that of a deleted one is empty.

        shards: None: all.
        """
        numbers = {keys.completed: number for number, keys in enumerate(self._shards.all)}
        names = [keys.completed for keys in shards or self._shards.all]
        block = () if timeout_s is None else ("BLOCK", max(1, int(timeout_s * 1000)))
        command = ("XREADGROUP", "GROUP", CONSUMER_GROUP_TRAINER, self._holder(consumer), "COUNT", count, *block)
        commands = [(*command, "STREAMS", *part, *[after] * len(part)) for part in self._scripts.apart(names)]
        try:
            with translate():
                answers = await self._scripts.channel.ask_alone(commands)
                if any(map(is_wrong_type, answers)):
                    await self._make_room(names)
                    return []
                checked(answers)
        except BrokerError as error:
            if error.facts.get("reason") != "forgotten":
                raise
            gone = await unknown_run(self._client, self._run.run_id)
            raise (gone if "deleted_ago_ms" in gone.facts else error) from error
        return [
            (numbers[name], entry_id, fields[1].decode("utf-8", "replace") if len(fields) > 1 else "")
            for answer in answers
            for name, entry_id, fields in stream_entries(answer)
        ]

    async def _make_room(self, names: Sequence[str]) -> None:
        """Make the streams of complete groups anew where keys of other types took their place."""
        for name in names:
            try:
                await self._client.xgroup_create(name, CONSUMER_GROUP_TRAINER, id="0", mkstream=True)
            except ResponseError as error:
                if not str(error).startswith("BUSYGROUP"):
                    raise

    def _holder(self, consumer: str) -> str:
        """Return this client's name as a consumer in the broker."""
        return f"{consumer}/{self._client_id}"

    async def _deliveries(self, rows: list[tuple[int, bytes, str]], consumer: str, *, is_again: bool) -> list[Delivery]:
        answers = await self._look(rows)
        found: list[Delivery] = []
        gone: dict[int, list[bytes]] = {}
        if any(self._is_another(row[0], settings[-1]) for row, (_, _, settings) in zip(rows, answers, strict=True)):
            raise await unknown_run(self._client, self._run.run_id)
        for (shard, entry_id, group_id), (facts, made, settings) in zip(rows, answers, strict=True):
            if not facts:  # cancelled after it was complete, or acknowledged by a call whose answer was lost
                gone.setdefault(shard, []).append(entry_id)
                continue
            if b"ended_by" not in facts[::2]:  # read from a primary that is gone: the new one has it open, and ends it
                continue
            group = await self._group(group_id, facts, made, is_again=is_again)
            delivery = Delivery(group=group, shard=shard, entry_id=entry_id.decode(), holder=self._holder(consumer))
            head_version, stale = self._stale(group, settings[:-1])
            if stale:
                await self._rerun(delivery, stale, head_version, is_again=is_again)
                continue
            self._in_hand.add((shard, entry_id))
            found.append(delivery)
        for shard, entry_ids in gone.items():
            await self._drop(shard, entry_ids)
        return found

    async def _look(self, rows: Sequence[tuple[int, bytes, str]]) -> list[tuple[Any, Any, Any]]:
        """Return of each group its facts, its rollouts, and what its shard says of the head, staleness and itself."""
        commands: list[Command] = []
        for shard, _, group_id in rows:
            keys = self._shards.all[shard]
            commands += [("HGETALL", keys.group(group_id)), ("HGETALL", keys.rollouts(group_id))]
            commands.append(("HMGET", keys.run, "head_version", "staleness", "when_stale", "first_fence"))
        with translate():
            found = await self._scripts.channel.ask_many(commands)
            answers = checked([[] if is_wrong_type(each) else each for each in found])
        settings = [each or SETTINGS_UNKNOWN for each in answers[2::3]]
        return list(zip(answers[::3], answers[1::3], settings, strict=True))

    def _is_another(self, shard: int, first_fence: bytes | None) -> bool:
        """Tell whether a shard is of a run that was made again under this one's name."""
        known = self._first_fences.get(shard)
        return first_fence is not None and known is not None and known.encode() != first_fence

    def _stale(self, group: Group, settings: Sequence[bytes | None]) -> tuple[int, list[Rollout]]:
        """Return the head, and the rollouts that are too stale by the settings of now: others may change them."""
        head, staleness, when_stale = settings
        read = BadRows()
        head_version = read.whole("", "", head, -1)
        if (when_stale or self._run.when_stale.encode()) != b"rerun":
            return head_version, []
        limit = read.whole("", "", staleness, self._run.staleness)
        return head_version, [each for each in group.rollouts if is_stale(each.policy_version, head_version, limit)]

    async def _rerun(self, delivery: Delivery, stale: Sequence[Rollout], head: int, *, is_again: bool) -> None:
        keys, run_id, group_id = self._shards.all[delivery.shard], self._run.run_id, delivery.group.group_id
        args: list[Any] = [group_id, delivery.entry_id, delivery.holder, int(is_again), RERUN_COUNT_MAX]
        with translate():
            jobs = await self._client.hmget(keys.trajectory.job, [each.trajectory_id for each in stale])
            for rollout, raw in zip(stale, jobs, strict=True):
                if raw is not None:  # else the group was cancelled a moment ago
                    reason = too_stale(rollout.policy_version, head)
                    letter = given_up_row(run_id, "-", rollout.trajectory_id, raw, reason)
                    args += [rollout.trajectory_id, letter.encode()]
            await self._scripts.call("rerun_stale", [keys, keys.of_group(group_id)], args)

    async def _group(self, group_id: str, raw_facts: list[bytes], made: list[bytes], *, is_again: bool) -> Group:
        """Read a group from its hashes, each as fields and values in turn; an unreadable rollout is a failure."""
        facts = GroupFacts.of(dict(zip(raw_facts[::2], raw_facts[1::2], strict=True)))
        rollouts, unread = rollout_rows(group_id, dict(zip(made[::2], made[1::2], strict=True)))
        names = [trajectory_id(group_id, index) for index in range(facts.size)]
        missing = [name for name in names if name not in rollouts and name not in unread]
        failures = await self._failures(group_id, missing) if missing and facts.failed_count else ()
        failed = {each.trajectory_id for each in failures}
        return Group(
            group_id=group_id,
            task_id=facts.task_id,
            rollouts=tuple(rollouts[name] for name in names if name in rollouts),
            failures=(*failures, *(Failure(name, reason) for name, reason in unread.items())),
            cancelled=tuple(name for name in missing if name not in failed),
            ended_by=facts.ended_by,
            redelivered=is_again or b"redelivered" in raw_facts[::2],
        )

    async def _failures(self, group_id: str, missing: Sequence[str]) -> tuple[Failure, ...]:
        """Say which of a group's missing trajectories were given up, and why."""
        keys = self._shards.of(group_id)
        tables = (keys.trajectory.record, keys.dead)
        with translate():
            records, letters = [await self._client.hmget(table, missing) for table in tables]
        return tuple(
            Failure(name, letter_row(self._run.run_id, name.encode(), letter).reason if letter else NO_LETTER)
            for name, record, letter in zip(missing, records, letters, strict=True)
            if record and record.startswith(b"failed ")
        )

    async def _drop(self, shard: int, entry_ids: Sequence[bytes]) -> None:
        """Remove entries of groups that are gone, and dead ones behind them: somebody may have made up thousands."""
        keys, ask = self._shards.all[shard], self._scripts.channel.ask_many
        look: Command = ("XREAD", "COUNT", DROP_COUNT, "STREAMS", keys.completed, entry_ids[-1])
        with translate():
            behind = stream_entries(checked([None if is_wrong_type(each) else each for each in await ask([look])])[0])
            groups = [b"".join(fields[1:2]).decode("utf-8", "replace") for _, _, fields in behind]
            asked: list[Command] = [("EXISTS", keys.group(name)) for name in groups]
            held = checked(await ask(asked))
            dropped = [
                *entry_ids,
                *(entry_id for (_, entry_id, _), is_held in zip(behind, held, strict=True) if not is_held),
            ]
            ack: Command = ("XACK", keys.completed, CONSUMER_GROUP_TRAINER, *dropped)
            answers = await ask([ack, ("XDEL", keys.completed, *dropped)])
            checked([each for each in answers if not is_wrong_type(each)])

    async def keep_differences(self, found: Sequence[TokenDifferences]) -> int:
        by_group: dict[str, list[TokenDifferences]] = {}
        for each in found:
            by_group.setdefault(group_of(each.trajectory_id), []).append(each)
        calls: list[Call] = []
        for group_id, group in by_group.items():
            keys, args = self._shards.of(group_id), list[Any]()
            for each in group:
                args += [each.trajectory_id, each.encode()]
            calls.append(("keep_differences", [keys, keys.of_group(group_id)], args))
        with translate():
            kept = checked(await self._scripts.call_many(calls)) if calls else []
        return sum(len(group) for group, is_kept in zip(by_group.values(), kept, strict=True) if is_kept)

    async def acknowledge(self, delivery: Delivery) -> bool:
        keys = self._shards.all[delivery.shard]
        with translate():
            code = await self._scripts.call(
                "acknowledge", [keys, keys.of_group(delivery.group.group_id)], self._end_args(delivery)
            )
        await self._end(delivery, code)
        return bool(code)

    async def swap(self, delivery: Delivery, group: GroupPush) -> bool:
        keys = self._shards.all[delivery.shard]
        assert keys == self._shards.of(group.group_id), "one script sees one shard"
        owners: list[Owner] = [keys, keys.of_group(delivery.group.group_id), keys.group(group.group_id)]
        args = [*self._end_args(delivery), group.group_id, dump_json(_facts(group)), *self._rules(group), *_jobs(group)]
        (answer,) = await self._push([("swap_group", owners, args)])
        if isinstance(answer, Exception):
            raise _translated(answer)
        if answer[0] < NOT_HELD:
            raise REFUSALS[answer[0]](self._run, *answer[1:])
        code, there = answer
        await self._end(delivery, code)
        return there == SWAPPED or bool(there and not _is_other(group, there))

    def _end_args(self, delivery: Delivery) -> list[Any]:
        args: list[Any] = [delivery.entry_id, delivery.holder, delivery.group.group_id]
        return [*args, CONSUMED_COUNT_MAX, self._kept_bytes_max, KEPT_COUNT_MAX]

    async def _end(self, delivery: Delivery, code: int) -> None:
        """Let go of a group that the broker was told to end; `code`: its answer."""
        self._in_hand.discard((delivery.shard, delivery.entry_id.encode()))
        if code < 0:
            raise not_held(self._run.run_id, delivery.group.group_id)
        if code == KEPT_TOO_MUCH:
            try:
                await self._drop_kept(self._shards.all[delivery.shard])
            except FabricError as error:  # the next one to acknowledge tries again; this group is acknowledged
                log.warning("rollouts.kept_too_much", extra={"run_id": self._run.run_id, "error": str(error)})

    async def _drop_kept(self, keys: ShardKeys) -> None:
        """Drop some of the groups that are kept for people to look at."""
        with translate():
            rows = await self._client.xrange(keys.kept, count=2 * KEPT_COUNT_MAX)
            kept = [kept_row(entry_id, fields) for entry_id, fields in rows]
            now_ms = _moment(rows[-1][0])[0] if rows else 0
            gone = [kept[index] for index in to_drop(kept, self._kept_bytes_max, now_ms)]
            for start in range(0, len(gone), DROP_COUNT):
                part = gone[start : start + DROP_COUNT]
                groups = [keys.of_group(each.group_id) for each in part]
                owners: list[Owner] = [keys, *(key for each in groups for key in (each.kept_row, each.kept_rollouts))]
                await self._scripts.call("drop_kept", owners, [each.entry_id for each in part])
            if not gone:  # somebody wrote over the sum
                await self._client.hset(keys.run, "kept_bytes", sum(each.size_bytes for each in kept))

    async def cancel(self, group_id: str) -> bool:
        keys, shard = self._shards.of(group_id), shard_of(group_id, self._run.shard_count)
        await self._learn([shard])
        args: list[Any] = [group_id, CONSUMED_COUNT_MAX, self._first_fences.get(shard, ""), self._pinned]
        with translate():
            code = await self._scripts.call("cancel_group", [keys, keys.of_group(group_id)], args)
        if code < 0:
            raise await self._why_not_ours()
        return bool(code)

    async def reap(self) -> int:
        closed, first_error = 0, FirstError()
        for keys in self._shards.all:
            with first_error, translate():
                for name in await self._scripts.call("late_groups", [keys], [LATE_COUNT]):
                    group_id = name.decode("utf-8", "replace")
                    with first_error, translate():  # a group that cannot be closed keeps no other waiting
                        closed += await self._scripts.call("close_group", [keys, keys.of_group(group_id)], [group_id])
        first_error.raise_it()
        return closed

    async def dead_letters(self, count: int) -> list[DeadLetter]:
        letters: list[DeadLetter] = []
        for keys in self._shards.all:
            cursor = 0
            while len(letters) < count:
                with translate():
                    cursor, rows = await self._client.hscan(keys.dead, cursor, count=count)
                letters += [letter_row(self._run.run_id, name, value) for name, value in rows.items()]
                if cursor == 0:
                    break
        return letters[:count]

    async def retry(self, trajectory_ids: Sequence[str], *, is_dry: bool = False) -> dict[str, DeadVerdict]:
        groups: dict[str, list[str]] = {}
        for name in dict.fromkeys(trajectory_ids):
            if is_job_name(name.encode("utf-8", "replace")):
                groups.setdefault(group_of(name), []).append(name)
        found: dict[str, DeadVerdict] = dict.fromkeys(trajectory_ids, "unknown")
        first_error = FirstError()
        rows = list(groups.items())
        for first in range(0, len(rows), RETRY_COUNT):
            part = rows[first : first + RETRY_COUNT]
            with translate():
                answers = await self._scripts.call_many([self._retry_call(*each, is_dry=is_dry) for each in part])
            for (_, names), answer in zip(part, answers, strict=True):
                with first_error, translate():  # a group that cannot be read keeps no other waiting
                    found.update(zip(names, (VERDICTS[code] for code in checked([answer])[0]), strict=True))
        first_error.raise_it()
        return found

    def _retry_call(self, group_id: str, names: Sequence[str], *, is_dry: bool) -> Call:
        keys = self._shards.of(group_id)
        return "retry_dead", [keys, keys.of_group(group_id)], [group_id, int(is_dry), *names]

    async def discard(self, trajectory_ids: Sequence[str], *, is_dry: bool = False) -> dict[str, DeadVerdict]:
        names = list(dict.fromkeys(trajectory_ids))
        word = "HEXISTS" if is_dry else "HDEL"
        with translate():
            asked: list[Command] = [
                (word, self._shards.of(name).dead, name.encode("utf-8", "replace")) for name in names
            ]
            answers = checked(await self._scripts.channel.ask_many(asked))
        return {name: "done" if answer else "unknown" for name, answer in zip(names, answers, strict=True)}


def _jobs(group: GroupPush) -> list[Any]:
    return [each for job in group.jobs for each in (job.trajectory_id, job.encode())]


def _facts(group: GroupPush) -> dict[str, Any]:
    return {"task_id": group.task_id, "task": group.task}


def _is_other(group: GroupPush, known: bytes) -> bool:
    """Tell whether a group's row is of another task; not if it cannot be read."""
    try:
        return bool(load_json(known) != _facts(group))
    except WireError:
        return False


def _translated(error: Exception) -> FabricError:
    """Turn a broker's error into one of ours."""
    try:
        with translate():
            raise error
    except FabricError as found:
        return found


def _moment(entry_id: bytes) -> tuple[int, int]:
    """Read when an entry was added, from its id."""
    added_ms, _, index = entry_id.partition(b"-")
    return int(added_ms), int(index)


def stream_rows(answer: Any) -> list[tuple[str, list[Any]]]:
    """Read an XREAD or XREADGROUP answer as (stream, entries), whichever RESP version the connection speaks."""
    rows = answer.items() if isinstance(answer, dict) else answer or []
    found: list[tuple[str, list[Any]]] = []
    for name, parts in rows:
        entries = parts[0] if parts and isinstance(parts[0], list) else parts  # RESP3 wraps them once more
        found.append((name.decode() if isinstance(name, bytes) else name, list(entries)))
    return found
