"""Leases, leadership and the plan on Redis: what a capacity controller reads and writes.

- Only a leading controller writes. Everything it writes carries its term: leases are refused by a shard that a newer
  term has written to, the rest by the counter of terms. A leader that was replaced changes nothing, whatever it does.
- A reading of the whole board is three round trips, and carrying out a plan two to six, however many workers there are.
- A worker's assignment is written before its lease, and shard 0 of a run last. Readers read shard 0, so if a controller
  dies in between, the next one sees what is left to do.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from redis.asyncio import Redis

from ..broker.clients.channel import checked
from ..broker.clients.translate import answers_of, translate
from ..contract.errors import RunUnknown
from ..contract.lease_plan import LeaseChange, LeasePlan, Sample
from ..contract.limits import EVENT_BYTES_MAX
from ..contract.records import Lease, RunConfig, WorkerInfo
from ..contract.text import one_line
from ..contract.wire import check_size, dump_json
from ..ports.queue import BadRow, RunStatus, Survey
from . import keys as names
from .keys import RunShards, ShardKeys
from .rows import BadRows, lease_row, plan_row, sample_row, shown_name, worker_row
from .scripts import Call, Scripts
from .status import queue_status, read_status, sum_up

SAMPLES_AT_ONCE = 32  # up to a megabyte and a half
SAMPLES_AVERAGED = 60  # a sample in which many leases changed must not cost an hour of others
STANDING = 0
REFUSED = -1  # set_leases answers this where a newer term or lease is in place …
SAME_LEASE = 1  # … and this where it only extended a lease


class RedisLeases:
    """The controller's part of LeaseBoard (see ports)."""

    def __init__(self, client: Redis) -> None:
        self._client: Any = client  # its stubs do not know that replies are bytes
        self._scripts = Scripts(client)
        self._seen: dict[bytes, tuple[bytes, WorkerInfo]] = {}  # infos of workers at the last survey
        self._sample_bytes: float | None = None  # of samples of the last hour or so, on average

    async def lead(self, controller_id: str, duration_ms: int, *, process: str = "", is_new: bool = False) -> int:
        with translate():
            return int(await self._scripts.call("lead", [], [controller_id, process, duration_ms, int(is_new)]))

    async def open_term(self, term: int) -> None:
        with translate():
            runs = BadRows().runs(await self._client.hgetall(names.RUNS))
            calls = [_leases_call(keys, term, []) for config in runs.values() for keys in _shards(config).all]
            checked(await self._scripts.call_many(calls))

    async def survey(self, *, has_rewards: bool = False) -> Survey:
        bad = BadRows()
        with translate():
            (runs,) = await answers_of(self._client.pipeline(transaction=False).hgetall(names.RUNS))
            configs = list(bad.runs(bad.answer("runs", runs, {})).values())
            parts = [(config, keys) for config in configs for keys in _shards(config).all]
            pipeline = self._client.pipeline(transaction=False)
            pipeline.hgetall(names.WORKERS)
            pipeline.zrange(names.HEARTBEATS, 0, -1, withscores=True)
            pipeline.hgetall(names.ASSIGNMENTS)
            for _, keys in parts:
                pipeline.hgetall(keys.leases)
                queue_status(pipeline, keys, has_rewards=has_rewards)
            # The clocks come after the heartbeats: an age below 0 is then a clock that went back. Where nobody sets
            # the fabric's clock, everybody has been silent since: controllers set it before they look.
            answers = await answers_of(pipeline)
            clocks = [names.CLOCK, *(keys.clock for _, keys in parts)]
            calls: list[Call] = [("clock", [key], []) for key in clocks]
            (now_ms, wall_ms, unseen_ms), *shown = checked(await self._scripts.call_many(calls))
            infos, beats, assigned = (
                bad.answer(table, answer, {})
                for table, answer in zip(("workers", "heartbeats", "assignments"), answers, strict=False)
            )
        beats, read_ms = dict(beats), now_ms + unseen_ms
        self._seen = {name: self._seen_row(name, raw) for name, raw in infos.items()}
        return Survey(
            workers={_text(name): (info, beat_age(beats.get(name), read_ms)) for name, (_, info) in self._seen.items()},
            assignments={_text(name): _text(run_id) for name, run_id in assigned.items()},
            wall_ms=wall_ms,
            now_ms=now_ms,
            **_by_run(parts, answers[3:], [shard_ms for shard_ms, *_ in shown], bad),
            bad_rows=[*bad.found, *(_bad_worker(name, info) for name, (_, info) in self._seen.items() if not info.pid)],
        )

    def _seen_row(self, name: bytes, raw: bytes) -> tuple[bytes, WorkerInfo]:
        """Read a worker's row, or reuse the last reading of the same row: decoding is the dearest part of a survey."""
        seen = self._seen.get(name)
        return seen if seen is not None and seen[0] == raw else (raw, worker_row(name, raw))

    async def change_leases(self, term: int, changes: Sequence[LeaseChange], assigned: Mapping[str, str]) -> list[bool]:
        configs = await self._configs({change.lease.run_id for change in changes}) if changes else {}
        ends = [change for change in changes if change.is_end]
        sets = [change for change in changes if not change.is_end]
        wanted = {each.lease.worker_id: each.runs or each.lease.run_id for each in sets}
        moved = {worker_id: runs for worker_id, runs in wanted.items() if assigned.get(worker_id) != runs}
        codes: dict[int, int] = {}
        with translate():
            codes |= await self._write(term, ends, configs)
            await self._assign(term, moved)
            codes |= await self._write(term, sets, configs)
            await self._assign(term, {each.lease.worker_id: "" for each in changes if codes[id(each)] > SAME_LEASE})
        return [codes[id(change)] >= SAME_LEASE for change in changes]

    async def set_read_costs(self, term: int, costs: Mapping[str, Mapping[str, int]]) -> None:
        configs = await self._configs(set(costs)) if costs else {}
        parts = [(keys, costs[run_id]) for run_id, config in configs.items() for keys in _shards(config).all]
        with translate():
            checked(await self._scripts.call_many([_leases_call(keys, term, [], cost) for keys, cost in parts]))

    async def _write(
        self, term: int, changes: Sequence[LeaseChange], configs: Mapping[str, RunConfig]
    ) -> dict[int, int]:
        """Write changes; return the worst answer of any shard to each change, by the change's id()."""
        by_run: dict[str, list[LeaseChange]] = {}
        for change in changes:
            by_run.setdefault(change.lease.run_id, []).append(change)
        others, firsts = [], []
        for run_id, group in by_run.items():
            first, *rest = _shards(configs[run_id]).all
            firsts.append((first, group))
            others += [(keys, group) for keys in rest]
        found: dict[int, int] = {}
        for parts in (others, firsts):
            calls = [_leases_call(keys, term, group) for keys, group in parts]
            answers = checked(await self._scripts.call_many(calls)) if calls else []
            for (_, group), answer in zip(parts, answers, strict=True):
                for change, code in zip(group, answer, strict=True):
                    before = found.get(id(change), code)
                    found[id(change)] = REFUSED if REFUSED in (before, code) else max(before, code)
        return found

    async def _assign(self, term: int, runs: Mapping[str, str]) -> None:
        """Say which runs workers should look at ("": the same as before), and wake them."""
        calls: list[Call] = [
            (
                "assign",
                [names.lease_bell(worker_id)],
                [term, worker_id, run_id, names.BELL_TTL_MS],
            )
            for worker_id, run_id in runs.items()
        ]
        if calls:
            checked(await self._scripts.call_many(calls))

    async def _configs(self, run_ids: set[str]) -> dict[str, RunConfig]:
        wanted = sorted(run_ids)
        with translate():
            rows = await self._client.hmget(names.RUNS, wanted)
        found = BadRows().runs({name.encode(): raw for name, raw in zip(wanted, rows, strict=True) if raw is not None})
        for run_id in wanted:
            if run_id not in found:
                raise RunUnknown(f"run {run_id!r} does not exist on this broker")
        return found

    async def leases(self, run_id: str) -> dict[str, Lease]:
        with translate():
            keys = ShardKeys(run_id, 0)
            rows = await self._client.hgetall(keys.leases)
            now_ms, *_ = await self._scripts.call("clock", [keys.clock], [])
        return _leases(run_id, rows, now_ms)

    async def forget_workers(self, term: int, worker_ids: Sequence[str]) -> bool:
        wanted = set(worker_ids)
        # A name that is no UTF-8 is shown otherwise than it is stored: find its rows by the last survey.
        odd = [name for name in self._seen if _text(name) in wanted and _text(name).encode() != name]
        with translate():
            return bool(await self._scripts.call("forget_workers", [], [term, *worker_ids, *odd]))

    async def set_plan(self, plan: LeasePlan) -> bool:
        with translate():
            return bool(await self._scripts.call("set_plan", [], [plan.term, plan.encode()]))

    async def plan(self) -> LeasePlan | None:
        with translate():
            return plan_row(await self._client.get(names.PLAN))

    async def add_sample(self, term: int, sample: Sample) -> bool:
        row = sample.encode()
        if self._sample_bytes is None:  # the first of a term says of every worker what it holds: none is as large
            self._sample_bytes = len(replace(sample, leases=()).encode())
        self._sample_bytes += (len(row) - self._sample_bytes) / SAMPLES_AVERAGED
        count = max(1, min(names.SAMPLE_COUNT_MAX, int(names.SAMPLES_BYTES_MAX / self._sample_bytes)))
        with translate():
            return bool(await self._scripts.call("add_sample", [], [term, row, count]))

    async def samples(self, since_ms: int, until_ms: int) -> list[Sample]:
        found: list[Sample | None] = []
        start: Any = max(0, since_ms)
        while True:
            with translate():
                rows = await self._client.xrange(names.SAMPLES, min=start, max=max(0, until_ms), count=SAMPLES_AT_ONCE)
            for _, fields in rows:
                found.append(sample_row(fields.get(b"sample", b"")))
                await asyncio.sleep(0)  # a large one takes a millisecond, and a process may answer others meanwhile
            if len(rows) < SAMPLES_AT_ONCE:
                return [each for each in found if each is not None]
            start = b"(" + rows[-1][0]

    async def add_events(self, events: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
        calls: list[Call] = [
            (
                "add_event",
                [],
                [kind, check_size(f"event {kind}", dump_json(dict(facts)), EVENT_BYTES_MAX), names.EVENT_COUNT_MAX],
            )
            for kind, facts in events
        ]
        with translate():
            checked(await self._scripts.call_many(calls))


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")


def _bad_worker(name: bytes, info: WorkerInfo) -> BadRow:
    return BadRow("workers", shown_name(name), one_line(info.error or ""))


def beat_age(beat: float | None, now_ms: int) -> int:
    """Return how long ago a heartbeat was, ms; a heartbeat at an impossible time counts as none ever."""
    return now_ms - (int(beat) if beat is not None and math.isfinite(beat) else 0)


def _shards(config: RunConfig) -> RunShards:
    return RunShards(config.run_id, config.shard_count)


def _leases_call(
    keys: ShardKeys, term: int, changes: Sequence[LeaseChange], read_costs: Mapping[str, int] | None = None
) -> Call:
    args: list[Any] = [term, "" if read_costs is None else _lines(read_costs)]
    for change in changes:
        lease = change.lease
        args += [lease.worker_id, lease.lease_epoch, lease.slot_count, change.duration_ms or STANDING]
        args.append(int(change.is_end))
    return ("set_leases", [keys], args)


def _lines(read_costs: Mapping[str, int]) -> str:
    """Write costs as the scripts read them."""
    return "".join(f"{cost}\t{one_line(kind)}\n" for kind, cost in read_costs.items()) or "-"


def _leases(run_id: str, rows: Mapping[bytes, bytes], now_ms: int) -> dict[str, Lease]:
    return {
        (worker := name.decode("utf-8", "replace")): lease_row(worker, run_id, raw, now_ms)
        for name, raw in rows.items()
    }


def _by_run(
    parts: Sequence[tuple[RunConfig, ShardKeys]], answers: list[Any], clocks: Sequence[int], bad: BadRows
) -> dict[str, Any]:
    """Read status and leases of each run from its shards' answers: leases, then the answers to queue_status."""
    size = len(answers) // len(parts) if parts else 0
    configs = {config.run_id: config for config, _ in parts}
    leases: dict[str, list[dict[str, Lease]]] = {run_id: [] for run_id in configs}
    shards: dict[str, list[dict[str, Any]]] = {run_id: [] for run_id in configs}
    for index, (config, keys) in enumerate(parts):
        rows, *rest = answers[index * size : (index + 1) * size]
        leases[config.run_id].append(_good_leases(config.run_id, keys, rows, clocks[index], bad))
        shards[config.run_id].append(read_status(rest, keys, bad))
    runs: dict[str, RunStatus] = {run_id: sum_up(config, shards[run_id]) for run_id, config in configs.items()}
    return {"runs": runs, "leases": {run_id: _agreed(by_shard) for run_id, by_shard in leases.items()}}


def _good_leases(run_id: str, keys: ShardKeys, answer: Any, now_ms: int, bad: BadRows) -> dict[str, Lease]:
    """Read the leases of a shard; leave out unreadable ones, which the next plan writes anew."""
    table = names.table_of(keys.leases)
    found = {}
    for name, raw in bad.answer(table, answer, {}).items():
        try:
            found[name.decode()] = lease_row(name.decode(), run_id, raw, now_ms)
        except ValueError as error:
            bad.note(table, name, error)
    return found


def _agreed(by_shard: Sequence[Mapping[str, Lease]]) -> dict[str, Lease]:
    """Return the leases of one run; a lease that differs between shards gets no slots."""
    found: dict[str, Lease] = {}
    for name in dict.fromkeys(name for leases in by_shard for name in leases):
        held = [leases[name] for leases in by_shard if name in leases]
        newest = max(held, key=lambda lease: lease.lease_epoch)
        kinds = {(each.lease_epoch, each.slot_count, each.has_ended) for each in held}
        is_whole = len(held) == len(by_shard) and len(kinds) == 1
        found[name] = newest if is_whole else replace(newest, slot_count=0)
    return found
