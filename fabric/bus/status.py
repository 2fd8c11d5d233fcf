"""A run in numbers, as its shards tell it: what is asked of each, how the answers read, and how they add up.

- The cost is the same however long the run has lasted.
- A caller that wants many runs puts all their shards into one round trip.
"""

from __future__ import annotations

from typing import Any

from ..errors import RunUnknown, WireError
from ..ports import Consumer, RunDetails, RunStatus
from ..records import DeadLetter, RunConfig
from ..rules.curve import put_together, read_curve
from ..rules.push import no_such_run, waiting
from . import keys as names
from .connection import translate
from .keys import ShardKeys
from .rows import agreement_row

__all__ = ["details_of", "queue_status", "read_status", "sum_up", "unknown_run"]


async def unknown_run(client: Any, run_id: str) -> RunUnknown:
    """What to say of a run that is not there: for some days it is known that it was deleted."""
    with translate():
        left_ms = int(await client.pttl(names.deleted_run(run_id)))
    return no_such_run(run_id, names.DELETED_TTL_MS - left_ms if left_ms > 0 else None)


def queue_status(pipeline: Any, keys: ShardKeys, *, has_rewards: bool = False) -> None:
    """Ask a shard, with whatever else the pipeline carries; also for its curve of rewards, about 10 KiB, if wanted."""
    pipeline.hmget(keys.run, "head_version", "depth", "bytes", "agreement")
    pipeline.hgetall(keys.counters)
    for stream in (keys.completed, *keys.trajectory.ready, *keys.turn.ready):
        pipeline.xlen(stream)
    for jobs in (keys.trajectory, keys.turn):
        pipeline.llen(jobs.suspects)
    pipeline.hvals(keys.trajectory.held)
    pipeline.hvals(keys.turn.held)
    pipeline.zcard(keys.trajectory.deadline)
    pipeline.hlen(keys.dead)
    if has_rewards:
        pipeline.hgetall(keys.rewards)


def read_status(answers: list[Any]) -> dict[str, Any]:
    """What one shard answered."""
    *answers, curve = answers if isinstance(answers[-1], dict) else (*answers, {})
    facts, counters, groups_waiting, *rest = answers
    queued, ready = sum(rest[: names.URGENCY_COUNT]), sum(rest[names.URGENCY_COUNT : -6])
    suspected, suspected_turns, running, claimed, timed, dead = rest[-6:]
    running_count, claimed_count, depth = sum(map(int, running)), sum(map(int, claimed)), int(facts[1] or 0)
    scoring = max(0, timed - running_count)
    return {
        "head_version": int(facts[0] or -1),
        "depth": depth,
        "memory_bytes": int(facts[2] or 0),
        "agreement": facts[3],
        "counters": {name.decode(): int(value) for name, value in counters.items()},
        "trajectories": {
            "queued": waiting(queued + suspected, depth - scoring, running_count),
            "running": running_count,
            "scoring": scoring,
        },
        "turns": {"ready": waiting(ready + suspected_turns, depth - scoring, claimed_count), "claimed": claimed_count},
        "groups_waiting": groups_waiting,
        "dead_count": dead,
        "rewards": read_curve(curve),
    }


def sum_up(config: RunConfig, parts: list[dict[str, Any]]) -> RunStatus:
    """A run of its shards."""

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
        rewards=put_together(bucket for part in parts for bucket in part["rewards"]),
    )


def details_of(consumers: list[Any], dead: list[Any], live: set[bytes]) -> RunDetails:
    """What XINFO CONSUMERS and HSCAN answered, one of each per shard; what a shard refused is left out.

    live: the clients that give signs of life, as "consumer/client".
    """
    found: dict[str, Consumer] = {}
    for rows in consumers:
        for row in rows if isinstance(rows, list) else ():
            facts = _pairs(row)
            raw: bytes = facts["name"]
            name = (raw.rpartition(b"/")[0] or raw).decode("utf-8", "replace")
            before = found.get(name, Consumer(name=name, held_count=0, idle_s=float("inf")))
            found[name] = Consumer(
                name=name,
                held_count=before.held_count + int(facts["pending"]),
                idle_s=min(before.idle_s, int(facts["idle"]) / 1000),
                is_live=before.is_live or raw in live,
            )
    letters = [raw for answer in dead if not isinstance(answer, Exception) for raw in answer[1].values()]
    return RunDetails(consumers=tuple(found.values()), dead_reason=_reason_of(letters[0]) if letters else None)


def _pairs(row: Any) -> dict[str, Any]:
    """A row of either RESP version: a map, or names and values in turn."""
    pairs = row.items() if isinstance(row, dict) else zip(row[::2], row[1::2], strict=True)
    return {name.decode() if isinstance(name, bytes) else name: value for name, value in pairs}


def _reason_of(raw: bytes) -> str:
    try:
        return DeadLetter.decode(raw).reason
    except WireError as error:
        return f"its dead letter cannot be read: {error}"
