"""Trajectories on Redis, read for people: what is under way, what waits for a trainer, and what is kept of the past."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from redis.asyncio import Redis

from ..broker.clients.channel import Command, checked
from ..broker.clients.translate import translate
from ..broker.clients.typed import is_wrong_type
from ..contract.agreement import TokenDifferences
from ..contract.errors import WireError
from ..contract.ids import group_of, turn_id
from ..contract.ids import trajectory_id as named
from ..contract.records import DeadLetter, RunConfig, TokenLog, TurnResult
from ..contract.wire import load_json
from ..ports.reading import Counts, GroupState, Progress, SeenGroup, SeenTrajectory, no_cursor, place_of
from ..rules.queue.token_parts import whole
from .keys import DIFFERENCES, PART_ENDINGS, RunShards, ShardKeys
from .rows import BadRows, GroupFacts, is_job_name, job_row, kept_row, letter_row, rollout_rows, turn_row
from .scripts import Scripts

CURSOR = re.compile(r"(\d{1,16})-(\d{1,16})\.(\d{1,6})")
BEGUN_COUNT_MAX = 10_000  # so far a reader may go into what is under way
READ_BYTES_MAX = 32 << 20  # of a group that waits: of a larger one a list tells no more than how far each has come
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
        rows: list[Progress] = []
        names = await self._oldest(first, count)
        for keys in self._shards.all:
            rows += await self._look(keys, [name for name in names if self._shards.of(name) is keys])
        return sorted(rows, key=lambda row: names.index(row.trajectory_id))

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
        group = await self._group(keys, group_id, only=trajectory_id)
        group = group or await self._group(keys, group_id, is_kept=True, only=trajectory_id)
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

    async def _oldest(self, first: int, count: int) -> list[str]:
        """Return the names of trajectories that agents are at, the oldest first, from the `first`-th on."""
        last = min(first + count, BEGUN_COUNT_MAX)
        commands: list[Command] = [("ZRANGE", keys.begun, 0, last - 1, "WITHSCORES") for keys in self._shards.all]
        rows = [pair for answer in await self._ask(commands, []) for pair in _scored(answer)] if last > first else []
        rows.sort()
        return [name.decode() for _, name in rows[first:last] if is_job_name(name)]

    async def _look(self, keys: ShardKeys, names: Sequence[str]) -> list[Progress]:
        """Read the progress of trajectories."""
        if not names:
            return []
        with translate():
            answer = await self._scripts.call("look_begun", [keys, keys.trajectory, keys.turn], list(names))
        return [_progress(row, int(answer[0])) for row in answer[1:]]

    async def _open_groups(self, count: int, cursor: str) -> tuple[list[SeenGroup], str]:
        first = place_of(cursor)
        names = list(dict.fromkeys(map(group_of, await self._oldest(0, BEGUN_COUNT_MAX))))
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
                ("HMGET", keys.turn.log, *(f"{turns[-1]}{ending}" for ending in PART_ENDINGS)),
            ]
        found = await self._ask(commands, None)
        raw_job, results, raw_turn, raw_logs = found if turns else (found[0], [], None, (None,))
        bad = _Readable()
        return SeenTrajectory(
            trajectory_id=name,
            group=group,
            job=bad.read(lambda: job_row(name.encode(), raw_job)),
            results=tuple(
                each for raw in results or () if (each := bad.read(lambda raw=raw: TurnResult.decode(raw))) is not None
            ),
            turn=bad.read(lambda: turn_row(turns[-1].encode(), raw_turn)) if turns else None,
            turn_log=whole([bad.read(lambda raw=raw: TokenLog.decode(raw)) for raw in raw_logs]),
        )

    # ---- groups

    async def _entries(self, state: GroupState, count: int, cursor: str) -> list[tuple[str, int, str]]:
        """Return (entry id, shard, group id) of complete or kept groups, in order, behind the cursor."""
        match = CURSOR.fullmatch(cursor)
        if cursor and match is None:
            raise no_cursor(cursor)
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

    async def _group(
        self, keys: ShardKeys, group_id: str, *, is_kept: bool = False, only: str | None = None
    ) -> SeenGroup | None:
        """Read a group, or one that is kept; None: there is none. only: with nothing of its other trajectories."""
        if not is_job_name(f"{group_id}.0".encode()):
            return None  # somebody made it up
        own = keys.of_group(group_id)
        tables = (own.kept_row, own.kept_rollouts) if is_kept else (own.row, own.rollouts)
        row = _pairs((await self._ask([("HGETALL", tables[0])], []))[0])
        if b"size" not in row:
            return None
        facts, bad = GroupFacts.of(row), BadRows()
        is_large = not is_kept and bad.whole("", "bytes", row.get(b"bytes"), 0) > READ_BYTES_MAX
        rollouts, unread = rollout_rows(group_id, await self._made(tables[1], only, is_large=is_large))
        names = [named(group_id, index) for index in range(facts.size)] if only is None else [only]
        missing = [name for name in names if name not in rollouts]
        is_over = row.get(b"state") == b"complete"
        progress = await self._look(keys, missing) if not is_kept else []
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
            differences=_differences(row, only),
        )

    async def _made(self, table: str, only: str | None, *, is_large: bool) -> dict[bytes, bytes]:
        """Read a group's rollouts, or one; none of a large group, which would hold up the broker."""
        if only is not None:
            (raw,) = await self._ask([("HGET", table, only)], None)
            return {} if raw is None else {only.encode(): raw}
        return {} if is_large else _pairs((await self._ask([("HGETALL", table)], []))[0])

    async def _ask(self, commands: Sequence[Command], nothing: Any) -> list[Any]:
        """Ask in one round trip; a key of another type holds nothing of ours."""
        with translate():
            found = await self._scripts.channel.ask_many(commands)
            return checked([nothing if is_wrong_type(each) else each for each in found])


def _differences(row: Mapping[bytes, bytes], trajectory_id: str | None) -> TokenDifferences | None:
    """Read from a group's row how far a trajectory's log-probabilities differ; None: nobody compared it."""
    raw = None if trajectory_id is None else row.get(DIFFERENCES + trajectory_id.encode())
    return None if raw is None else _Readable().read(lambda: TokenDifferences.decode(raw))


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


def _scored(answer: Sequence[Any]) -> list[tuple[float, bytes]]:
    """Read members with scores, in turn or as pairs."""
    pairs = answer if answer and isinstance(answer[0], list) else zip(answer[::2], answer[1::2], strict=True)
    return [(float(score), name) for name, score in pairs]


def _parts(entry_id: bytes) -> tuple[int, int]:
    first, _, second = entry_id.partition(b"-")
    return int(first), int(second or 0)
