"""Runs, workers and leases on Redis: the control plane.

- Only a leading controller writes leases; a lease of an older term never overwrites a newer one.
- Heartbeat ages and lease times are the broker's clock.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from itertools import chain
from typing import Any

from redis.asyncio import Redis

from ..broker.clients.channel import Argument, checked
from ..broker.clients.cluster_client import ClusterClient
from ..broker.clients.translate import answers_of, translate
from ..contract.agreement import Agreement
from ..contract.errors import ConfigError, WireError
from ..contract.ids import NAME
from ..contract.limits import EVENT_BYTES_MAX
from ..contract.records import HeldLease, Lease, RunConfig, WorkerInfo
from ..contract.sharing import LendSetting, SharingReport
from ..contract.wire import check_size, dump_json
from ..ports.queue import BadRow, RowSurvey, RunDetails, RunStatus
from ..rules.lending.terms import (
    CLEAR,
    changed,
    check_subject,
    concerns,
    lent_by_name,
    setting_of,
    subjects_of,
    switch_facts,
)
from ..rules.queue.runs import check_same_run
from ..rules.queue.timings import Histograms, Timings, field_of, latest_field_of, read_timings
from . import keys as names
from .keys import RunShards, ShardKeys, WeightKeys
from .leases import RedisLeases, beat_age
from .rollouts import stream_rows
from .rows import BadRows, event_row, lease_row, lend_row, run_row, sharing_row, text_rows, worker_row
from .scripts import Call
from .status import details_of, queue_status, read_status, sum_up, unknown_run
from .tables import remove_row, survey_rows

log = logging.getLogger(__name__)

OUTLAST_MS = 2 * names.FENCE_MS
NOTICED_S = 1.0  # after this long workers and controllers look for a deleted run no more


class RedisLeaseBoard(RedisLeases):
    """LeaseBoard (see ports)."""

    def __init__(self, client: Redis, *, has_reward_queue: bool = True) -> None:
        super().__init__(client)
        self._has_reward_queue = has_reward_queue

    async def create_run(self, config: RunConfig) -> RunConfig:
        if config.reward is not None and not self._has_reward_queue:
            raise ConfigError(
                f"run {config.run_id!r} has a reward function, and rewards wait on an rq queue, which a Redis Cluster "
                "cannot hold: name a single broker for it in the URL, …?reward_queue=redis://host:port"
            )
        with translate():
            while True:
                raw = await self._client.hget(names.RUNS, config.run_id)
                if raw is not None:
                    if await self._change(raw, _run_in(config.run_id, raw), config):
                        return config
                    continue
                await self._outlast(config.run_id)
                await self._open_shards(config)  # its shards first: whoever finds the run finds its streams
                if await self._scripts.call("change_run", [], [config.run_id, "", config.encode()]):
                    await self._open_shards(config)  # again: an older one's deletion may have removed them in between
                    return config

    async def change_run(self, was: RunConfig, config: RunConfig) -> bool:
        with translate():
            raw = await self._client.hget(names.RUNS, config.run_id)
            if raw is None or (found := _run_in(config.run_id, raw)) != was:
                return False
            return await self._change(raw, found, config)

    async def _change(self, raw: bytes, was: RunConfig, config: RunConfig) -> bool:
        """Change a run's settings, and what its shards know of them, unless they are not `raw` any more."""
        check_same_run(was, config)
        if not await self._scripts.call("change_run", [], [config.run_id, raw, config.encode()]):
            return False
        while True:
            await self._open_shards(config)
            now = await self._client.hget(names.RUNS, config.run_id)
            if now is None or (found := _run_in(config.run_id, now)) == config:
                return True
            config = found  # somebody else changed them meanwhile: the shards know what is there in the end

    async def _outlast(self, run_id: str) -> None:
        """Wait until no run of this name was deleted within the time that tells runs apart."""
        left_ms = await self._client.pttl(names.deleted_run(run_id))
        if names.DELETED_TTL_MS - left_ms <= OUTLAST_MS:
            await asyncio.sleep(OUTLAST_MS / 1000)

    async def _open_shards(self, config: RunConfig) -> None:
        """Begin the shards of a run, or tell them its settings of now."""
        made_ms, count = await self.wall_ms(), config.shard_count
        limits: list[Any] = [config.trajectory_count_max // count, config.memory_bytes_max // count]
        args = [*limits, config.staleness, config.when_stale, made_ms // names.FENCE_MS, made_ms]
        shards = RunShards(config.run_id, count).all
        checked(
            await self._scripts.call_many([("open_shard", [keys, keys.trajectory, keys.turn], args) for keys in shards])
        )

    async def runs(self) -> dict[str, RunConfig]:
        with translate():
            return BadRows().runs(await self._client.hgetall(names.RUNS))

    async def delete_run(self, run_id: str) -> None:
        """Remove the run and every key of it; scans twice per tag, so it is for people, not for loops.

        The second scan removes keys that workers wrote before they noticed. It spares a run made anew meanwhile.
        """
        with translate():
            raw = await self._client.hget(names.RUNS, run_id)
            mark = [names.deleted_run(run_id)]
            if raw is None or not await self._scripts.call("delete_run", mark, [run_id, names.DELETED_TTL_MS]):
                raise await unknown_run(self._client, run_id)
            bases = [WeightKeys(run_id).base, *_bases(run_id, raw)]
            await self._unlink(bases)
            await asyncio.sleep(NOTICED_S)
            if await self._client.hget(names.RUNS, run_id) is None:
                await self._unlink(bases)

    async def survey_rows(self, tables: Sequence[str] = ()) -> RowSurvey:
        with translate():
            return await survey_rows(self._client, tables)

    async def remove_row(self, row: BadRow) -> bool:
        with translate():
            return await remove_row(self._client, row)

    async def _unlink(self, bases: Sequence[str]) -> None:
        for base in bases:
            pattern = re.sub(r"([\[\]?\\])", r"\\\1", base) + ":*"
            found = [key async for key in self._client.scan_iter(match=pattern, count=1000)]
            for start in range(0, len(found), 500):
                await self._client.unlink(*found[start : start + 500])

    async def run_status(self, run_id: str) -> RunStatus:
        with translate():
            raw = await self._client.hget(names.RUNS, run_id)
            if raw is None:
                raise await unknown_run(self._client, run_id)
            config = _run_in(run_id, raw)
            shards = RunShards(run_id, config.shard_count).all
            pipeline = self._client.pipeline(transaction=False)
            for keys in shards:
                queue_status(pipeline, keys, has_rewards=True)
            answers = await answers_of(pipeline)
            size = len(answers) // len(shards)
            parts = [answers[n * size : (n + 1) * size] for n in range(len(shards))]
            read = [read_status(part, keys, BadRows()) for part, keys in zip(parts, shards, strict=True)]
        return sum_up(config, read)

    async def run_details(self, run: RunConfig) -> RunDetails:
        shards = RunShards(run.run_id, run.shard_count).all
        pipeline = self._client.pipeline(transaction=False)
        for keys in shards:
            pipeline.execute_command("XINFO", "CONSUMERS", keys.completed, names.CONSUMER_GROUP_TRAINER)
            pipeline.hscan(keys.dead, 0, count=1)
            pipeline.zrange(keys.consumers, 0, -1, withscores=True)
        with translate():
            answers = await answers_of(pipeline)  # a run that is being made or deleted has no stream
            clocks = checked(await self._scripts.call_many([("clock", [keys.clock], []) for keys in shards]))
        left_s: dict[bytes, float] = {}
        for rows, (now_ms, *_) in zip(answers[2::3], clocks, strict=True):
            for name, until_ms in () if isinstance(rows, Exception) else rows:
                left_s[name] = max(left_s.get(name, 0.0), (until_ms - now_ms) / 1000)
        return details_of(answers[::3], answers[1::3], left_s)

    async def memory_bytes(self) -> tuple[int, int]:
        with translate():
            servers = self._client.primaries() if isinstance(self._client, ClusterClient) else [self._client]
            infos = [await server.info("memory") for server in servers]
        found = [(int(info.get("used_memory", 0)), int(info.get("maxmemory", 0))) for info in infos]
        return max(found, key=lambda pair: pair[0] / pair[1] if pair[1] else 0.0)

    async def set_agreement(self, run_id: str, agreement: Agreement) -> None:
        run = await self._run(run_id)
        with translate():
            await self._client.hset(ShardKeys(run.run_id, 0).run, "agreement", agreement.encode())

    async def heartbeat(self, info: WorkerInfo) -> HeldLease | None:
        with translate():
            said = await self._scripts.call("heartbeat", [], [info.worker_id, info.encode()])
            runs = [] if said is None else said.decode("utf-8", "replace").split()
            if not runs or not all(NAME.match(run_id) for run_id in runs):
                return None
            pipeline = self._client.pipeline(transaction=False)
            for run_id in runs:
                pipeline.hexists(names.RUNS, run_id)
            known = await answers_of(pipeline)
            calls: list[Call] = [("read_lease", [ShardKeys(run_id, 0)], [info.worker_id]) for run_id in runs]
            answers = checked(await self._scripts.call_many(calls))
        rows = zip(runs, known, answers, strict=True)
        first, *guests = [
            _lease_of(info.worker_id, run_id, *row) if is_known else None for run_id, is_known, row in rows
        ]
        if first is None:
            return None
        own = {each.name: getattr(first, each.name) for each in fields(first)}
        return HeldLease(**own, guests=tuple(each for each in guests if each is not None))

    async def add_timings(self, info: WorkerInfo, timings: Timings) -> None:
        calls: list[Call] = []
        for report in timings.reports():
            shard = ShardKeys(report.run_id, 0)
            args: list[Argument] = [report.number, names.TOLD_TTL_MS, len(report.counts)]
            for (name, place), by in report.counts.items():
                args += [field_of(name, info.role, place), by]
            for (name, place), (seconds, trajectory_id) in report.latest.items():
                args += [latest_field_of(name, info.role, place), f"{seconds:.6f} {trajectory_id}"]
            calls.append(("add_timings", [shard, shard.told(info.worker_id)], args))
        if calls:
            with translate():
                checked(await self._scripts.call_many(calls))
            timings.heard()

    async def timings(self, run_id: str | None = None) -> dict[str, Histograms]:
        runs = await self.runs() if run_id is None else {run_id: await self._run(run_id)}
        shards = {name: RunShards(name, run.shard_count).all for name, run in runs.items()}
        pipeline = self._client.pipeline(transaction=False)
        for keys in chain.from_iterable(shards.values()):
            pipeline.hgetall(keys.timings)
        with translate():
            answers = iter(await answers_of(pipeline))
        return {name: read_timings([text_rows(next(answers)) for _ in each]) for name, each in shards.items()}

    async def wait_lease(self, worker_id: str, timeout_s: float) -> None:
        with translate():
            await self._client.blpop([names.lease_bell(worker_id)], timeout=timeout_s)

    async def workers(self) -> dict[str, tuple[WorkerInfo, int]]:
        with translate():
            infos = await self._client.hgetall(names.WORKERS)
            beats = dict(await self._client.zrange(names.HEARTBEATS, 0, -1, withscores=True))
            now_ms, _, unseen_ms = await self._scripts.call("clock", [names.CLOCK], [])
        read_ms = now_ms + unseen_ms
        return {
            name.decode("utf-8", "replace"): (worker_row(name, raw), max(0, beat_age(beats.get(name), read_ms)))
            for name, raw in infos.items()
        }

    async def forget_worker(self, worker_id: str) -> None:
        with translate():
            await self._client.hdel(names.WORKERS, worker_id)
            await self._client.zrem(names.HEARTBEATS, worker_id)
            await self._client.hdel(names.ASSIGNMENTS, worker_id)
            await self._client.hdel(names.SHARING, worker_id)

    async def _run(self, run_id: str) -> RunConfig:
        with translate():
            raw = await self._client.hget(names.RUNS, run_id)
        if raw is None:
            raise await unknown_run(self._client, run_id)
        return _run_in(run_id, raw)

    async def set_lend(self, subject: str, value: LendSetting | str) -> None:
        await self._say(subject, setting_of(subject, value), is_named_anew=True)

    async def change_lend(self, subject: str, changes: Mapping[str, Any]) -> LendSetting:
        check_subject(subject)
        while True:
            with translate():
                row = await self._client.hget(names.LENDS, subject)
            said = changed(None if row is None else lend_row(row), changes)
            if found := await self._say(subject, said, row or b"", is_named_anew="mode" in changes):
                return found

    async def _say(self, subject: str, said: LendSetting, *before: bytes, is_named_anew: bool) -> LendSetting | None:
        """Write a setting; None (and nothing written) if the row has changed meanwhile. before: the row to replace."""
        with translate():
            infos = await self._client.hgetall(names.WORKERS)
            now_ms, *_ = await self._scripts.call("clock", [names.CLOCK], [])
            said = replace(said, said_at_ms=now_ms)
            rows = {name.decode("utf-8", "replace"): worker_row(name, raw) for name, raw in infos.items()}
            said = lent_by_name(subject, said, rows.values()) if is_named_anew else said
            concerned = [name for name, info in rows.items() if concerns(subject, info)]
            facts = check_size("event lend.switched", dump_json(switch_facts(subject, said)), EVENT_BYTES_MAX)
            bells = [names.lease_bell(name) for name in concerned]
            row = b"" if said.mode == CLEAR else said.encode()
            args: list[Argument] = [subject, row, facts, names.BELL_TTL_MS, names.EVENT_COUNT_MAX, *before]
            return said if await self._scripts.call("set_lend", bells, args) else None

    async def lends(self) -> dict[str, LendSetting]:
        with translate():
            rows = await self._client.hgetall(names.LENDS)
        return {name.decode("utf-8", "replace"): lend_row(raw) for name, raw in rows.items()}

    async def lends_of(self, worker_id: str, pool: str) -> tuple[dict[str, LendSetting], int]:
        subjects = subjects_of(worker_id, pool)
        with translate():
            wall_ms, rows = await self._scripts.call("read_lends", [], subjects)
        said = zip(subjects, rows, strict=True)
        return {name: lend_row(raw) for name, raw in said if raw is not None}, int(wall_ms)

    async def wall_ms(self) -> int:
        with translate():
            _, wall_ms, _ = await self._scripts.call("clock", [names.CLOCK], [])
        return int(wall_ms)

    async def set_sharing(self, report: SharingReport) -> None:
        with translate():
            await self._scripts.call("set_sharing", [], [report.worker_id, report.encode()])

    async def sharing(self) -> dict[str, SharingReport]:
        with translate():
            rows = await self._client.hgetall(names.SHARING)
        found = {name.decode("utf-8", "replace"): sharing_row(raw) for name, raw in rows.items()}
        return {name: report for name, report in found.items() if report is not None}

    async def add_event(self, kind: str, facts: Mapping[str, Any]) -> None:
        await self.add_events([(kind, facts)])

    async def events(self, after: str, count: int, timeout_s: float) -> list[tuple[str, str, dict[str, Any]]]:
        block = max(1, int(timeout_s * 1000))
        with translate():
            answer = await self._client.xread({names.EVENTS: after}, count=count, block=block)
        return [event_row(*entry) for _, entries in stream_rows(answer) for entry in entries]

    async def newest_events(self, before: str, count: int) -> list[tuple[str, str, dict[str, Any]]]:
        with translate():
            entries = await self._client.xrevrange(names.EVENTS, max=f"({before}" if before else "+", count=count)
        return [event_row(*entry) for entry in entries]


def _lease_of(worker_id: str, run_id: str, now_ms: int, raw: bytes | None) -> Lease | None:
    """Read a worker's lease on a run; None: there is none that holds."""
    try:
        lease = lease_row(worker_id, run_id, raw, now_ms) if raw else None
    except WireError as error:  # the controller writes it anew
        log.warning("lease.unreadable", extra={"error": str(error)})
        return None
    return None if lease is None or lease.has_ended else lease


def _run_in(run_id: str, raw: bytes) -> RunConfig:
    """Read a run's row.

    Raises:
        WireError: it cannot be read; the text says how to remove it.
    """
    try:
        return run_row(run_id.encode(), raw)
    except WireError as error:
        raise WireError(
            f"run {run_id!r} cannot be read, `rollfab runs rm --run {run_id}` deletes it: {error}"
        ) from error


def _bases(run_id: str, raw: bytes) -> list[str]:
    """List the beginnings of the keys of a run's shards; of all possible shards if the run cannot be read."""
    try:
        count = run_row(run_id.encode(), raw).shard_count
    except WireError:
        return [ShardKeys(run_id, 0).base.replace(".0}", ".*}")]
    return [keys.base for keys in RunShards(run_id, count).all]
