"""A run in numbers: the questions to each of its shards, the reading of the answers, and their sum.

- The cost is the same however long the run has lasted.
- A caller that wants many runs puts all their shards into one round trip.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..broker.clients.translate import translate
from ..contract.errors import RunUnknown
from ..contract.records import RunConfig
from ..ports.queue import Consumer, RunDetails, RunStatus
from ..rules.queue.curve import put_together
from ..rules.queue.push import no_such_run, waiting
from . import keys as names
from .keys import ShardKeys
from .rows import BadRows, agreement_row, letter_row


async def unknown_run(client: Any, run_id: str) -> RunUnknown:
    """Make the error for a run that is not there: for some days we know that it was deleted."""
    with translate():
        left_ms = int(await client.pttl(names.deleted_run(run_id)))
        is_another = await client.hget(names.RUNS, run_id) is not None
    return no_such_run(run_id, names.DELETED_TTL_MS - left_ms if left_ms > 0 else None, is_made_again=is_another)


def queue_status(pipeline: Any, keys: ShardKeys, *, has_rewards: bool = False) -> None:
    """Ask a shard in the same pipeline as other questions; if wanted also for its curve of rewards, about 10 KiB."""
    pipeline.hmget(keys.run, "head_version", "depth", "bytes", "agreement", "weights")
    pipeline.hgetall(keys.counters)
    for stream in (keys.completed, *keys.trajectory.ready, *keys.turn.ready):
        pipeline.xlen(stream)
    pipeline.zcard(keys.turn_homed_at)
    for jobs in (keys.trajectory, keys.turn):
        pipeline.llen(jobs.suspects)
    pipeline.hgetall(keys.trajectory.held)
    pipeline.hgetall(keys.turn.held)
    pipeline.zcard(keys.trajectory.deadline)
    pipeline.hlen(keys.dead)
    if has_rewards:
        pipeline.hgetall(keys.rewards)


def read_status(answers: list[Any], keys: ShardKeys, bad: BadRows) -> dict[str, Any]:
    """Read one shard's answers; an unreadable one is noted, and counts as none."""
    tables, nothing = _asked(keys)
    answers = [bad.answer(table, answer, none) for table, answer, none in zip(tables, answers, nothing, strict=False)]
    facts, counters, groups_waiting, *rest = answers[: len(tables) - 1]
    curve = answers[-1] if len(answers) == len(tables) else {}
    queued, ready = sum(rest[: names.URGENCY_COUNT]), sum(rest[names.URGENCY_COUNT : -6])
    suspected, suspected_turns, running, claimed, timed, dead = rest[-6:]
    running_count, claimed_count = (
        _held(table, rows, bad) for table, rows in zip(tables[-5:-3], (running, claimed), strict=True)
    )
    scoring = max(0, timed - running_count)
    # If it cannot be read, believe that all waiting jobs are wanted.
    depth = bad.whole(tables[0], "depth", facts[1], queued + suspected + ready + suspected_turns + timed)
    return {
        "head_version": bad.whole(tables[0], "head_version", facts[0], -1),
        "depth": depth if facts[1] is not None else 0,
        "memory_bytes": bad.whole(tables[0], "bytes", facts[2], 0),
        "agreement": facts[3],
        "weights": (facts[4] or b"").decode("ascii", "replace"),
        "counters": bad.wholes(tables[1], counters),
        "trajectories": {
            "queued": waiting(queued + suspected, depth - scoring, running_count),
            "running": running_count,
            "scoring": scoring,
        },
        "turns": {"ready": waiting(ready + suspected_turns, depth - scoring, claimed_count), "claimed": claimed_count},
        "groups_waiting": groups_waiting,
        "dead_count": dead,
        "rewards": bad.curve(tables[-1], curve),
    }


def _asked(keys: ShardKeys) -> tuple[list[str], list[Any]]:
    """List the tables that queue_status asks, in its order, and the answer of each when it is empty."""
    tables: dict[str, Any] = {keys.run: [None] * 5, keys.counters: {}, keys.completed: 0}
    tables |= dict.fromkeys((*keys.trajectory.ready, *keys.turn.ready), 0)
    tables |= dict.fromkeys((keys.turn_homed_at, keys.trajectory.suspects, keys.turn.suspects), 0)
    tables |= {
        keys.trajectory.held: {},
        keys.turn.held: {},
        keys.trajectory.deadline: 0,
        keys.dead: 0,
        keys.rewards: {},
    }
    return [names.table_of(key) for key in tables], list(tables.values())


def _held(table: str, rows: dict[bytes, bytes], bad: BadRows) -> int:
    """Count the claims of all workers."""
    return sum(max(0, bad.whole(table, name, raw, 0)) for name, raw in rows.items() if name != b"-")


def sum_up(config: RunConfig, parts: list[dict[str, Any]]) -> RunStatus:
    """Add up a run's status from its shards."""

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
        weights=parts[0]["weights"],
        rewards=put_together(bucket for part in parts for bucket in part["rewards"]),
    )


def details_of(consumers: list[Any], dead: list[Any], left_s: Mapping[bytes, float]) -> RunDetails:
    """Read the answers to XINFO CONSUMERS and HSCAN, one of each per shard; leave out refusals.

    left_s: of the clients that give signs of life, as "consumer/client": until others may take over from them.
    """
    found: dict[str, Consumer] = {}
    for rows in consumers:
        for row in rows if isinstance(rows, list) else ():
            facts = _pairs(row)
            raw: bytes = facts["name"]
            name = (raw.rpartition(b"/")[0] or raw).decode("utf-8", "replace")
            before = found.get(name, Consumer(name=name, held_count=0, heard_s=float("inf")))
            found[name] = Consumer(
                name=name,
                held_count=before.held_count + int(facts["pending"]),
                heard_s=min(before.heard_s, int(facts["idle"]) / 1000),
                left_s=max(before.left_s, left_s.get(raw, 0.0)),
            )
    letters = [row for answer in dead if not isinstance(answer, Exception) for row in answer[1].items()]
    reason = letter_row("", *letters[0]).reason if letters else None
    return RunDetails(consumers=tuple(found.values()), dead_reason=reason)


def _pairs(row: Any) -> dict[str, Any]:
    """Read a row of either RESP version: a map, or names and values in turn."""
    pairs = row.items() if isinstance(row, dict) else zip(row[::2], row[1::2], strict=True)
    return {name.decode() if isinstance(name, bytes) else name: value for name, value in pairs}
