"""The end: everyone has left, and the broker holds nothing of the work any more."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Any

from tests.sim.checks.checkers import require
from tests.standin.streams import Stream

if TYPE_CHECKING:
    from tests.sim.world import Watched, World

IDLE_S = 1.5  # within which cancelled work has let go of its slots: a second, and the way there
# What stays of a run that has nothing to do, each with its own bound.
STAYS = (
    *(
        "run",
        "clock",
        "counters",
        "rewards",
        "lengths",
        "consumed",
        "consumers",
        "leases",
        "lease_slots",
        "lease_term",
        "dead",
    ),
    *("inbox:", "kept", "timings", "told:"),
    *(
        "trajectory:ready:",
        "trajectory:suspects",
        "trajectory:bell",
        "turn:ready:",
        "turn:suspects",
        "turn:bell",
        "turn:homed",
        "turn:hardware",
    ),
)


async def check_idle(world: World) -> None:
    """Everything is done, everyone is still there: after a moment nobody may be busy with anything."""
    await asyncio.sleep(IDLE_S)
    places = dict.fromkeys(world.agents, 1 << 30)
    for _ in range(20):  # agents ask for work now and then, and keep places free for it meanwhile
        await asyncio.sleep(0.07)
        for name, worker in world.agents.items():
            places[name] = min(places.get(name, 1 << 30), worker.places.held_count)
    busy = {name: count for name, count in places.items() if count}
    require(not busy, f"agents keep places for nothing: {busy}")
    for name, engine in world.engines.items():
        count = engine.stats().running_count
        require(not count or engine.is_hung, f"engine of {name} runs {count} turns that nobody wants")


async def check_end(world: World) -> None:
    """Promise 7, and that the totals add up, for each run."""
    for watched in world.watched:
        if watched.is_deleted and watched.run_id in await world.fabric.board.runs():
            continue  # a last call of its trainer, late on its way, made it anew
        if watched.is_deleted:
            left = [name for name in _names(world) if f"{{{watched.run_id}." in name]
            require(not left, f"of the deleted run {watched.run_id} the broker still holds {left}")
        else:
            await _check_end(world, watched)


async def _check_end(world: World, watched: Watched) -> None:
    run_id = watched.run_id
    run = (await world.fabric.board.runs())[run_id]
    left = _left(world, run_id)
    require(not left, f"the broker still holds {left}")
    watched.groups.check_replaced()
    letters = await world.fabric.rollouts(run).dead_letters(1000)
    unknown = set(watched.groups.failures) - {letter.trajectory_id for letter in letters}
    require(not unknown, f"{unknown} failed, and there are no dead letters of them")
    for letter in letters:
        watched.trajectories.check_dead(letter)
    status = await world.fabric.board.run_status(run_id)
    counters = status.counters
    require(status.depth == 0, f"depth is {status.depth} at the end")
    require(status.memory_bytes == 0, f"{status.memory_bytes} bytes are counted as held at the end")
    submitted, consumed = counters.get("groups_submitted", 0), counters.get("groups_consumed", 0)
    cancelled = counters.get("groups_cancelled", 0)
    require(
        submitted == consumed + cancelled, f"{submitted} groups submitted, {consumed} consumed, {cancelled} cancelled"
    )
    pushed = watched.groups.pushed_count
    require(submitted == pushed, f"{submitted} groups are counted as submitted, {pushed} were pushed")
    timed = sum((await world.fabric.board.timings())[run_id]["group", "broker"].counts) if pushed > cancelled else 0
    require(timed >= counters.get("groups_completed", 0), f"{timed} groups are timed, and more were completed")
    ends = [counters.get(f"trajectories_{end}", 0) for end in ("completed", "failed", "cancelled")]
    total = counters.get("trajectories_submitted", 0)
    require(cancelled or sum(ends) == total, f"{total} trajectories submitted, {ends} completed, failed, cancelled")
    settled = counters.get("turns_settled", 0)
    require(counters.get("tokens", 0) >= watched.turns.token_count, "tokens were settled that are not counted")
    require(settled >= watched.turns.settled_count, "turns were settled that are not counted")


def _left(world: World, run_id: str) -> list[str]:
    """Tables of a run's shards that hold something, except those that may stay."""
    found = (re.fullmatch(rf"rf:{{{run_id}\.\d+}}:(.*)", name) for name in _names(world))
    return [each[1] for each in found if each is not None and not each[1].startswith(STAYS)]


def _names(world: World) -> list[str]:
    """Tables that hold something."""
    tables = world.store.keys
    return [key.decode() for key in tables.names() if not _is_empty(tables.held[key])]


def _is_empty(value: Any) -> bool:
    """Whether a stream has no entries, and nobody was given any."""
    return isinstance(value, Stream) and not value.ids and not any(each.pending for each in value.groups.values())
