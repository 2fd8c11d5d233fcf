"""Runs, workers and leases on Redis: the control plane.

- Only a leading controller writes leases; a lease of an older term never overwrites a newer one.
- Heartbeat ages and lease times are the broker's clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from ..agreement import Agreement
from ..errors import ConfigError, RunUnknown
from ..limits import EVENT_BYTES_MAX
from ..ports import RunStatus
from ..records import Lease, RunConfig, WorkerInfo
from ..rules.lease import lease_left
from ..rules.runs import check_same_run
from ..wire import check_size, dump_json
from . import keys as names
from .connection import translate
from .keys import ShardKeys, WeightKeys
from .rollouts import stream_rows
from .rows import agreement_row, event_row, lease_row, worker_row
from .scripts import Scripts
from .shards import RunShards

STANDING = 0
SAME_LEASE = 1  # what set_lease answers when it only extended


class RedisLeaseBoard:
    """LeaseBoard (see ports)."""

    def __init__(self, client: Redis, *, has_reward_queue: bool = True) -> None:
        self._client: Any = client  # its stubs do not know that replies are bytes
        self._scripts = Scripts(client)
        self._has_reward_queue = has_reward_queue

    async def create_run(self, config: RunConfig) -> RunConfig:
        if config.reward is not None and not self._has_reward_queue:
            raise ConfigError(
                f"run {config.run_id!r} has a reward function, and rewards wait on an rq queue, which a Redis Cluster "
                "cannot hold: name a single broker for it in the URL, …?reward_queue=redis://host:port"
            )
        with translate():
            is_new = await self._client.hsetnx(names.RUNS, config.run_id, config.encode())
            if not is_new:
                raw = await self._client.hget(names.RUNS, config.run_id)
                if raw is not None:
                    check_same_run(RunConfig.decode(raw), config)
                await self._client.hset(names.RUNS, config.run_id, config.encode())
            for keys in RunShards(config.run_id, config.shard_count).all:
                await self._create_shard(keys, config)
        return config

    async def _create_shard(self, keys: ShardKeys, config: RunConfig) -> None:
        limits = {
            "depth_max": config.trajectory_count_max // config.shard_count,
            "bytes_max": config.memory_bytes_max // config.shard_count,
            "staleness": config.staleness,
            "when_stale": config.when_stale,
        }
        await self._client.hset(keys.run, mapping=limits)
        for field, first in (("depth", 0), ("bytes", 0), ("head_version", -1)):
            await self._client.hsetnx(keys.run, field, first)
        ready = (*keys.trajectory.ready, *keys.turn.ready)
        for stream, group in (
            *((stream, names.CONSUMER_GROUP_WORKERS) for stream in ready),
            (keys.completed, names.CONSUMER_GROUP_TRAINER),
        ):
            try:
                await self._client.xgroup_create(stream, group, id="0", mkstream=True)
            except ResponseError as error:
                if not str(error).startswith("BUSYGROUP"):
                    raise

    async def runs(self) -> dict[str, RunConfig]:
        with translate():
            rows = await self._client.hgetall(names.RUNS)
        return {name.decode(): RunConfig.decode(raw) for name, raw in rows.items()}

    async def delete_run(self, run_id: str) -> None:
        """Remove the run and every key of it; scans once per tag, so it is for people, not for loops."""
        with translate():
            raw = await self._client.hget(names.RUNS, run_id)
            if raw is None:
                raise RunUnknown(f"run {run_id!r} does not exist on this broker")
            await self._client.hdel(names.RUNS, run_id)
            shards = RunShards(run_id, RunConfig.decode(raw).shard_count)
            for base in [*(keys.base for keys in shards.all), WeightKeys(run_id).base]:
                pattern = base.replace("[", r"\[") + ":*"
                found = [key async for key in self._client.scan_iter(match=pattern, count=1000)]
                for start in range(0, len(found), 500):
                    await self._client.unlink(*found[start : start + 500])

    async def run_status(self, run_id: str) -> RunStatus:
        with translate():
            raw = await self._client.hget(names.RUNS, run_id)
            if raw is None:
                raise RunUnknown(f"run {run_id!r} does not exist on this broker: create it with fabric.run(…)")
            config = RunConfig.decode(raw)
            parts = [await self._shard_status(keys) for keys in RunShards(run_id, config.shard_count).all]
        return _sum_up(config, parts)

    async def _shard_status(self, keys: ShardKeys) -> dict[str, Any]:
        pipeline = self._client.pipeline(transaction=False)
        pipeline.hmget(keys.run, "head_version", "depth", "bytes", "agreement")
        pipeline.hgetall(keys.counters)
        for stream in (keys.completed, *keys.trajectory.ready, *keys.turn.ready):
            pipeline.xlen(stream)
        pipeline.hvals(keys.trajectory.held)
        pipeline.hvals(keys.turn.held)
        pipeline.zcard(keys.trajectory.deadline)
        pipeline.hlen(keys.dead)
        facts, counters, waiting, *rest = await pipeline.execute()
        queued, ready = sum(rest[: names.URGENCY_COUNT]), sum(rest[names.URGENCY_COUNT : -4])
        running, claimed, timed, dead = rest[-4:]
        running_count = sum(map(int, running))
        return {
            "head_version": int(facts[0] or -1),
            "depth": int(facts[1] or 0),
            "memory_bytes": int(facts[2] or 0),
            "agreement": facts[3],
            "counters": {name.decode(): int(value) for name, value in counters.items()},
            "trajectories": {"queued": queued, "running": running_count, "scoring": max(0, timed - running_count)},
            "turns": {"ready": ready, "claimed": sum(map(int, claimed))},
            "groups_waiting": waiting,
            "dead_count": dead,
        }

    async def set_agreement(self, run_id: str, agreement: Agreement) -> None:
        run = await self._run(run_id)
        with translate():
            await self._client.hset(ShardKeys(run.run_id, 0).run, "agreement", agreement.encode())

    async def heartbeat(self, info: WorkerInfo) -> Lease | None:
        keys = [names.WORKERS, names.HEARTBEATS, names.ASSIGNMENTS, names.CLOCK]
        with translate():
            run = await self._scripts.call("heartbeat", keys, [info.worker_id, info.encode()])
            if run is None or not await self._client.hexists(names.RUNS, run):
                return None
            shard = ShardKeys(run.decode(), 0)
            now_ms, raw = await self._scripts.call("read_lease", [shard.leases, shard.clock], [info.worker_id])
        return lease_left(lease_row(info.worker_id, run.decode(), raw), now_ms) if raw else None

    async def wait_lease(self, worker_id: str, timeout_s: float) -> None:
        with translate():
            await self._client.blpop([names.lease_bell(worker_id)], timeout=timeout_s)

    async def workers(self) -> dict[str, tuple[WorkerInfo, int]]:
        with translate():
            infos = await self._client.hgetall(names.WORKERS)
            beats = dict(await self._client.zrange(names.HEARTBEATS, 0, -1, withscores=True))
            now_ms = int(await self._scripts.call("clock", [names.CLOCK], []))
        return {
            name.decode("utf-8", "replace"): (worker_row(name, raw), max(0, now_ms - int(beats.get(name, 0))))
            for name, raw in infos.items()
        }

    async def forget_worker(self, worker_id: str) -> None:
        with translate():
            await self._client.hdel(names.WORKERS, worker_id)
            await self._client.zrem(names.HEARTBEATS, worker_id)
            await self._client.hdel(names.ASSIGNMENTS, worker_id)

    async def lead(self, controller_id: str, duration_ms: int) -> int:
        with translate():
            return int(
                await self._scripts.call(
                    "lead", [names.LEADER, names.LEASE_EPOCH, names.CLOCK], [controller_id, duration_ms]
                )
            )

    async def set_lease(self, lease: Lease, duration_ms: int | None) -> bool:
        run = await self._run(lease.run_id)
        args: list[Any] = [lease.worker_id, lease.lease_epoch, lease.slot_count, duration_ms or STANDING, 0]
        # The assignment first: a controller that dies in between leaves a worker without a lease, which is seen.
        with translate():
            assigned = await self._client.hget(names.ASSIGNMENTS, lease.worker_id)
        if assigned != lease.run_id.encode():
            await self._wake(lease.worker_id, lease.run_id)
        codes = await self._set_lease(run, args)
        if max(codes) > SAME_LEASE:
            await self._wake(lease.worker_id, "")
        return min(codes) >= SAME_LEASE

    async def end_lease(self, lease: Lease) -> None:
        run = await self._run(lease.run_id)
        await self._set_lease(run, [lease.worker_id, lease.lease_epoch, 0, STANDING, 1])
        await self._wake(lease.worker_id, "")

    async def _set_lease(self, run: RunConfig, args: list[Any]) -> list[int]:
        """What set_lease answers on every shard."""
        with translate():
            return [
                await self._scripts.call("set_lease", [keys.leases, keys.clock], args)
                for keys in RunShards(run.run_id, run.shard_count).all
            ]

    async def _wake(self, worker_id: str, run_id: str) -> None:
        keys = [names.ASSIGNMENTS, names.lease_bell(worker_id)]
        with translate():
            await self._scripts.call("assign", keys, [worker_id, run_id, names.BELL_TTL_MS])

    async def _run(self, run_id: str) -> RunConfig:
        with translate():
            raw = await self._client.hget(names.RUNS, run_id)
        if raw is None:
            raise RunUnknown(f"run {run_id!r} does not exist on this broker")
        return RunConfig.decode(raw)

    async def leases(self, run_id: str) -> dict[str, Lease]:
        with translate():
            rows = await self._client.hgetall(ShardKeys(run_id, 0).leases)
        return {name.decode(): lease_row(name.decode(), run_id, raw) for name, raw in rows.items()}

    async def set_lend(self, worker_id: str, value: str) -> None:
        with translate():
            await self._client.hset(names.LENDS, worker_id, value)

    async def lends(self) -> dict[str, str]:
        with translate():
            rows = await self._client.hgetall(names.LENDS)
        return {name.decode(): value.decode() for name, value in rows.items()}

    async def add_event(self, kind: str, facts: Mapping[str, Any]) -> None:
        said = check_size(f"event {kind}", dump_json(dict(facts)), EVENT_BYTES_MAX)
        args: list[Any] = [kind, said, names.EVENT_COUNT_MAX]
        with translate():
            await self._scripts.call("add_event", [names.EVENTS], args)

    async def events(self, after: str, count: int, timeout_s: float) -> list[tuple[str, str, dict[str, Any]]]:
        block = max(1, int(timeout_s * 1000))
        with translate():
            answer = await self._client.xread({names.EVENTS: after}, count=count, block=block)
        return [event_row(*entry) for _, entries in stream_rows(answer) for entry in entries]


def _sum_up(config: RunConfig, parts: list[dict[str, Any]]) -> RunStatus:
    def total(name: str) -> dict[str, int]:
        summed: dict[str, int] = {}
        for part in parts:
            for key, value in part[name].items():
                summed[key] = summed.get(key, 0) + value
        return summed

    return RunStatus(
        config=config,
        head_version=max(part["head_version"] for part in parts),
        depth=sum(part["depth"] for part in parts),
        memory_bytes=sum(part["memory_bytes"] for part in parts),
        trajectories=total("trajectories"),
        turns=total("turns"),
        groups_waiting=sum(part["groups_waiting"] for part in parts),
        dead_count=sum(part["dead_count"] for part in parts),
        counters=total("counters"),
        agreement=agreement_row(parts[0]["agreement"]),
    )
