"""Trajectories on Redis, read for people: what is under way, what waits for a trainer, and what is kept of the past."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from redis.asyncio import Redis

from ..broker.clients.channel import Command, checked
from ..broker.clients.typed import is_wrong_type
from ..broker.connection import translate
from ..contract.errors import InputError, WireError
from ..contract.ids import group_of, turn_id
from ..contract.ids import trajectory_id as named
from ..contract.records import DeadLetter, RunConfig, TokenLog, TurnResult
from ..contract.wire import load_json
from ..ports.reading import Counts, GroupState, Progress, SeenGroup, SeenTrajectory
from .keys import RunShards, ShardKeys
from .rows import BadRows, GroupFacts, is_job_name, job_row, kept_row, letter_row, rollout_rows, turn_row
from .scripts import Scripts

CURSOR = re.compile(r"(\d{1,16})-(\d{1,16})\.(\d{1,6})")
BEGUN_COUNT_MAX = 10_000  # so far a reader may go into what is under way
TURNS_READ_MAX = 1_000  # settled turns of a trajectory under way that are read


class RedisTrajectoryReader:
    """TrajectoryReader (see ports) of one run."""

    def __init__(self, client: Redis, run: RunConfig) -> None:
        self._client: Any = client  # its stubs do not know that replies are bytes
        self._scripts = Scripts(client)
        self._run = run
        self._shards = RunShards(run.run_id, run.shard_count)

    async def counts(self) -> Counts:
        commands: list[Command] = []
        for keys in self._shards.all:
            commands += [("ZCARD", keys.begun), ("XLEN", keys.completed), ("XLEN", keys.kept)]
        found = await self._ask(commands, 0)
        return Counts(begun=sum(found[::3]), waiting=sum(found[1::3]), finished=sum(found[2::3]))

    async def begun(self, first: int, count: int) -> list[Progress]:
        last = min(first + count, BEGUN_COUNT_MAX)
        rows: list[Progress] = []
        for keys in self._shards.all:
            rows += await self._look(keys, last, ())
        rows.sort(key=lambda row: row.begun_ms or 0)
        return rows[first:last]

    async def groups(self, state: GroupState, count: int, cursor: str) -> tuple[list[SeenGroup], str]:
        if state == "open":
            return await self._open_groups(count, cursor)
        rows = await self._entries(state, count, cursor)
        is_kept = state == "finished"
        found = [await self._group(self._shards.all[shard], group_id, is_kept=is_kept) for _, shard, group_id in rows]
        is_last = len(rows) < count
        at = "" if is_last else f"{rows[-1][0]}.{rows[-1][1]}"
        return [each for each in found if each is not None], at

    async def find(self, trajectory_id: str) -> SeenTrajectory | None:
        if not is_job_name(trajectory_id.encode()):
            return None
        group_id, keys = group_of(trajectory_id), self._shards.of(trajectory_id)
        group = await self._group(keys, group_id) or await self._group(keys, group_id, is_kept=True)
        if group is None or trajectory_id not in {named(group_id, index) for index in range(group.size)}:
            return None
        progress = group.progress.get(trajectory_id)
        if progress is None or group.state == "finished":
            return SeenTrajectory(trajectory_id=trajectory_id, group=group)
        return await self._under_way(keys, group, progress)

    async def letters(self, trajectory_ids: Sequence[str]) -> dict[str, DeadLetter]:
        found: dict[str, DeadLetter] = {}
        commands: list[Command] = [("HGET", self._shards.of(name).dead, name) for name in trajectory_ids]
        for name, raw in zip(trajectory_ids, await self._ask(commands, None), strict=True):
            if raw is not None:
                found[name] = letter_row(self._run.run_id, name.encode(), raw)
        return found

    # ---- what is under way

    async def _look(self, keys: ShardKeys, count: int, names: Sequence[str]) -> list[Progress]:
        """Read the progress of the trajectories named, or of the `count` oldest that agents are at."""
        with translate():
            answer = await self._scripts.call("look_begun", [keys, keys.trajectory, keys.turn], [0, count, *names])
        now_ms = int(answer[1])
        return [_progress(row, now_ms) for row in answer[2:] if is_job_name(row[0])]

    async def _open_groups(self, count: int, cursor: str) -> tuple[list[SeenGroup], str]:
        first = int(cursor) if cursor.isdigit() else 0
        rows = await self.begun(0, BEGUN_COUNT_MAX)
        names = list(dict.fromkeys(group_of(row.trajectory_id) for row in rows))
        found = [await self._group(self._shards.of(name), name) for name in names[first : first + count]]
        at = str(first + count) if len(names) > first + count else ""
        return [each for each in found if each is not None and each.state == "open"], at

    async def _under_way(self, keys: ShardKeys, group: SeenGroup, progress: Progress) -> SeenTrajectory:
        name = progress.trajectory_id
        turns = [turn_id(name, index) for index in range(min(progress.turn_count, TURNS_READ_MAX))]
        commands: list[Command] = [("HGET", keys.trajectory.job, name)]
        if turns:
            commands += [
                ("HMGET", keys.turn_result, *turns),
                ("HGET", keys.turn.job, turns[-1]),
                ("HGET", keys.turn.log, turns[-1]),
            ]
        found = await self._ask(commands, None)
        raw_job, results, raw_turn, raw_log = found if turns else (found[0], [], None, None)
        bad = _Readable()
        return SeenTrajectory(
            trajectory_id=name,
            group=group,
            job=bad.read(lambda: job_row(name.encode(), raw_job)),
            results=tuple(
                each for raw in results or () if (each := bad.read(lambda raw=raw: TurnResult.decode(raw))) is not None
            ),
            turn=bad.read(lambda: turn_row(turns[-1].encode(), raw_turn)) if turns else None,
            turn_log=bad.read(lambda: TokenLog.decode(raw_log)),
        )

    # ---- groups

    async def _entries(self, state: GroupState, count: int, cursor: str) -> list[tuple[str, int, str]]:
        """Return (entry id, shard, group id) of complete or kept groups, in order, behind the cursor."""
        match = CURSOR.fullmatch(cursor)
        if cursor and match is None:
            raise InputError(f"{cursor[:60]!r} is no cursor: pass the one of the last page, or none")
        is_kept = state == "finished"
        commands: list[Command] = []
        for shard, keys in enumerate(self._shards.all):
            edge = "+" if is_kept else "-"
            if match is not None:
                at = f"{match[1]}-{match[2]}"
                is_seen = shard >= int(match[3]) if is_kept else shard <= int(match[3])
                edge = f"({at}" if is_seen else at
            span = ("XREVRANGE", keys.kept, edge, "-") if is_kept else ("XRANGE", keys.completed, edge, "+")
            commands.append((*span, "COUNT", count))
        rows = [
            (_parts(entry_id), shard, entry_id.decode(), _pairs(fields))
            for shard, answer in enumerate(await self._ask(commands, []))
            for entry_id, fields in answer or ()
        ]
        rows.sort(key=lambda row: row[:2], reverse=is_kept)
        return [(entry_id, shard, kept_row(b"0", fields).group_id) for _, shard, entry_id, fields in rows[:count]]

    async def _group(self, keys: ShardKeys, group_id: str, *, is_kept: bool = False) -> SeenGroup | None:
        """Read a group, or one that is kept; None: there is none."""
        if not is_job_name(f"{group_id}.0".encode()):
            return None  # somebody made it up
        own = keys.of_group(group_id)
        tables = (own.kept_row, own.kept_rollouts) if is_kept else (own.row, own.rollouts)
        raw_facts, made = await self._ask([("HGETALL", table) for table in tables], [])
        row = _pairs(raw_facts)
        if b"size" not in row:
            return None
        facts, bad = GroupFacts.of(row), BadRows()
        rollouts, unread = rollout_rows(group_id, _pairs(made))
        names = [named(group_id, index) for index in range(facts.size)]
        missing = [name for name in names if name not in rollouts]
        is_over = row.get(b"state") == b"complete"
        progress = await self._look(keys, 0, missing) if missing and not is_kept else []
        return SeenGroup(
            group_id=group_id,
            state="finished" if is_kept else "waiting" if is_over else "open",
            task_id=facts.task_id,
            task=_task(row),
            size=facts.size,
            quorum=bad.whole("", "quorum", row.get(b"quorum"), facts.size),
            completed_count=bad.whole("", "completed", row.get(b"completed"), 0),
            failed_count=facts.failed_count,
            ended_by=facts.ended_by if is_over else None,
            ended_ms=bad.whole("", "ended", row.get(b"ended"), 0) if is_kept else None,
            rollouts=rollouts,
            unread=unread,
            progress={each.trajectory_id: each for each in progress},
            letters=await self.letters(missing) if missing and facts.failed_count else {},
        )

    async def _ask(self, commands: Sequence[Command], nothing: Any) -> list[Any]:
        """Ask in one round trip; a key of another type holds nothing of ours."""
        with translate():
            found = await self._scripts.channel.ask_many(commands)
            return checked([nothing if is_wrong_type(each) else each for each in found])


class _Readable:
    """Reads what can be read: None in its place where it cannot."""

    def read(self, decode: Any) -> Any:
        try:
            return decode()
        except (WireError, TypeError):
            return None


def _progress(row: Sequence[Any], now_ms: int) -> Progress:
    raw_name, begun, record, turn_count, settled_count, turn = row
    state, worker, attempt = _record(record)
    turn_state, turn_worker, _ = _record(turn)
    return Progress(
        trajectory_id=raw_name.decode(),
        state=state,
        worker_id=worker,
        attempt=attempt,
        begun_ms=int(float(begun)) if begun else None,
        now_ms=now_ms,
        turn_count=turn_count,
        settled_count=settled_count,
        turn_state=turn_state,
        turn_worker_id=turn_worker,
    )


def _record(raw: bytes) -> tuple[str, str | None, int]:
    """Read state, worker and attempt of a job's record (queue/lua/use/record.lua); nothing of one that is none."""
    words = raw.decode("utf-8", "replace").split(" ")
    if len(words) < 6 or not words[2].isdigit() or len(words[2]) > 9:
        return "", None, 0
    return words[0], None if words[-1] == "-" else words[-1], int(words[2])


def _task(row: Mapping[bytes, bytes]) -> dict[str, Any]:
    try:
        found = load_json(row.get(b"task", b"{}"))
    except WireError:
        return {}
    task = found.get("task") if isinstance(found, dict) else None
    return task if isinstance(task, dict) else {}


def _pairs(answer: Any) -> dict[bytes, bytes]:
    """Read fields and values, in turn or as a map."""
    return answer if isinstance(answer, dict) else dict(zip(answer[::2], answer[1::2], strict=True))


def _parts(entry_id: bytes) -> tuple[int, int]:
    first, _, second = entry_id.partition(b"-")
    return int(first), int(second or 0)
