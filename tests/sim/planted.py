"""Bugs to plant, each a small patch of a script, a port, a worker or the trainer: what the simulator must find.

A simulation that passes proves nothing by itself; that it fails for each of these shows what its passing means.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from rollfab.fabric.contract.errors import QueueFull
from rollfab.fabric.queue import rollouts as bus_rollouts
from rollfab.fabric.queue import scripts
from rollfab.fabric.queue import turns as bus_turns
from rollfab.fabric.queue.rollouts import RedisRolloutStream
from rollfab.fabric.queue.trajectories import RedisTrajectoryQueue
from rollfab.fabric.queue.turns import RedisTurnQueue
from rollfab.fabric.rules.queue.token_parts import followed
from rollfab.trainer.groups import Ledger
from rollfab.workers.agent.keeper import Keeper
from rollfab.workers.rollout import turns as rollout_turns
from rollfab.workers.rollout import turns as workers_turn
from rollfab.workers.rollout.engine_watch import EngineWatch
from rollfab.workers.rollout.guests import Guest
from rollfab.workers.rollout.lease import LeaseKeeper
from rollfab.workers.rollout.turns import RunningTurns
from rollfab.workers.rollout.worker import RolloutWorker

Patch = tuple[Any, str, Any]  # object, attribute, what to put there
Plants = dict[str, Callable[[], list[Patch]]]
PLANTS: Plants = {}


@contextlib.contextmanager
def planted(name: str, plants: Plants = PLANTS) -> Iterator[None]:
    """The bug of that name is in the program."""
    with contextlib.ExitStack() as stack:
        for target, attribute, new in plants[name]():
            stack.enter_context(mock.patch.object(target, attribute, new))
        yield


def plant_in(plants: Plants) -> Callable[[Callable[[], list[Patch]]], Callable[[], list[Patch]]]:
    """Register bugs under their functions' names."""

    def plant(make: Callable[[], list[Patch]]) -> Callable[[], list[Patch]]:
        plants[make.__name__.replace("_", "-")] = make
        return make

    return plant


plant = plant_in(PLANTS)


def in_lua(*changes: tuple[str, str]) -> Patch:
    """Scripts with other text in a place: (what stands there, once in all scripts, what to put there)."""
    folder, load_script = Path(scripts.__file__).parent / "lua", scripts.load_script
    texts = [path.read_text("utf-8") for path in folder.rglob("*.lua")]
    for old, _ in changes:
        assert sum(text.count(old) for text in texts) == 1, f"not once in the scripts: {old}"

    def load(name: str) -> str:
        source = load_script(name)
        for old, new in changes:
            source = source.replace(old, new)
        return source

    return (scripts, "load_script", load)


# ---- in scripts: what stands there, and what to put there


IN_LUA: dict[str, tuple[str, str]] = {
    # Whoever hands a turn in is believed to hold it.
    "turn-settled-without-fence": (
        "  if fence == ARGV[i + 1] and holder == worker then",
        "  if state == 'claimed' or fence == ARGV[i + 1] and holder == worker then",
    ),
    # Parts of what a turn had made outlive it.
    "parts-outlive-their-turn": (
        "forget_logs(turn.log, settled)",
        "call_in_parts('HDEL', turn.log, settled)",
    ),
    # Whoever hands a trajectory in is believed to hold it.
    "trajectory-settled-without-fence": (
        "  and (r.state == 'scoring' and ARGV[7] == '' or r.state == 'claimed' and r.worker == ARGV[7])",
        "  and r.state == 'scoring' and ARGV[7] == '' or r and r.state == 'claimed'",
    ),
    # A settled trajectory still counts as held: when its claim is not renewed, it runs again.
    "settled-but-not-recorded": (
        "  close(group_id, 'completed')\nend\nreturn 1",
        "  close(group_id, 'completed')\n"
        "  r.state, r.worker = 'claimed', ARGV[7]\n"
        "  write_record(trajectory.record, id, r)\n"
        "  redis.call('ZADD', trajectory.deadline, 0, id)\n"
        "end\n"
        "return 1",
    ),
    # A result that was lost on its way to the agent is not sent again.
    "result-delivered-once-only": (
        "      answer[n] = 3\n      redis.call('XADD', inbox, '*', 'id', id, 'result', result)\n",
        "      answer[n] = 3\n",
    ),
    # The broker lets anyone renew a job that somebody holds.
    "lost-claims-renewed": (
        "  return value and string.sub(value, 1, #head) == head and string.sub(value, -#tail) == tail",
        "  return value and string.sub(value, 1, 8) == 'claimed '",
    ),
    # What was taken back is handed out again under the fence it had.
    "fence-not-raised": (
        "  fence, attempt, loss = tonumber(fence) + 1, tonumber(attempt), tonumber(loss)",
        "  fence, attempt, loss = tonumber(fence), tonumber(attempt), tonumber(loss)\n"
        "  fence = fence + (fence % FENCES_PER_CLAIM > 0 and 0 or 1)",
    ),
    # Whatever an agent held when it died is to blame for that.
    "everyone-blamed": (
        "    note_loss(r, come, could_be_it, suspect_loss)",
        "    r.loss, r.blame, r.seen = r.loss + 1, r.blame + 1, come",
    ),
    # Nothing is ever to blame for its agents' deaths.
    "killer-never-blamed": (
        "    note_loss(r, come, could_be_it, suspect_loss)",
        "    r.loss, r.blame, r.seen = 0, 0, come",
    ),
    # Turns are handed to workers however old their weights are.
    "stale-workers-served": (
        "  if is_of_another or head - tonumber(ARGV[5]) > whole(facts[2], 0) then return {-1, head} end",
        "  if is_of_another then return {-1, head} end",
    ),
    # A trainer that was replaced may acknowledge what its successor holds.
    "late-acknowledgement-counts": (
        "  if held[1] then return held[1][2] == consumer end",
        "  if held[1] then return true end",
    ),
    # A controller that was replaced may still write leases.
    "old-leader-obeyed": (
        "  if term < last or held_epoch > epoch then",
        "  if false then",
    ),
    # A group that was consumed is taken for a new one when it is pushed again.
    "push-not-idempotent": (
        " or redis.call('ZSCORE', shard.consumed, group_id) then",
        " then",
    ),
    # A turn that waits for what suits it is never seen by anybody.
    "suited-turns-forgotten": (
        "  wait_at_home(has_home and home or SUITED, class, all.now, tokens, id)",
        "  if has_home then wait_at_home(home, class, all.now, tokens, id) end",
    ),
    # When a group is complete, its other trajectories are not cancelled.
    "unneeded-trajectories-go-on": (
        "    if r and r.state ~= 'completed' and r.state ~= 'failed' then",
        "    if false then",
    ),
}
PLANTS |= {name: partial(lambda change: [in_lua(change)], change) for name, change in IN_LUA.items()}


# ---- claims


@plant
def turn_claims_not_renewed() -> list[Patch]:
    """A worker does not say that it still runs its turns."""
    return [(RunningTurns, "_renewals", lambda self, ended, run_id: [])]


@plant
def trajectory_claims_not_renewed() -> list[Patch]:
    """An agent does not say that it still runs its trajectories."""

    async def renew(*_: Any) -> None:
        await asyncio.Event().wait()

    return [(Keeper, "_renew", renew)]


@plant
def turns_forgotten_at_takeover() -> list[Patch]:
    """The next agent is not told which turns are settled."""
    original = RedisTrajectoryQueue.claim

    async def claim(self: Any, worker_id: str, want: int, **how: bool) -> Any:
        return [dataclasses.replace(each, turns=()) for each in await original(self, worker_id, want, **how)]

    return [(RedisTrajectoryQueue, "claim", claim)]


# ---- tokens


@plant
def release_forgets_tokens() -> list[Patch]:
    """Tokens of a turn that is given back are not kept."""
    original = RedisTurnQueue.release

    async def release(self: Any, worker_id: str, progress: Any, **rest: Any) -> None:
        await original(self, worker_id, [dataclasses.replace(each, log=None) for each in progress], **rest)

    return [(RedisTurnQueue, "release", release)]


@plant
def tokens_of_earlier_claims_dropped() -> list[Patch]:
    """A worker hands in what it made itself, and not what it went on from."""
    original = workers_turn.merge
    return [(workers_turn, "merge", lambda prior, made, worker_id: original(None, made, worker_id))]


@plant
def spans_not_moved() -> list[Patch]:
    """A worker's spans count from where it began, not from where the turn began."""
    original = workers_turn.merge

    def merge(prior: Any, made: Any, worker_id: str) -> Any:
        log = original(prior, made, worker_id)
        start = len(prior.completion_ids) if prior is not None else 0
        moved = [
            dataclasses.replace(span, start=span.start - start, end=span.end - start) if span.start >= start else span
            for span in log.spans
        ]
        return dataclasses.replace(log, spans=tuple(moved))

    return [(workers_turn, "merge", merge)]


@plant
def parts_of_another_claim_read() -> list[Patch]:
    """What a turn had made is put together from whatever parts there are."""

    def whole(found: Any) -> Any:
        made, *rest = found
        for part in rest if made is not None else ():
            made = followed(made, part) if part is not None else made
        return made

    return [(bus_turns, "whole", whole)]


@plant
def stall_not_noticed() -> list[Patch]:
    """A worker keeps turns that make no tokens, and does not see that its engine hangs."""
    return [(RunningTurns, "standing", lambda self: ([], False)), (EngineWatch, "_note_hang", lambda *_: None)]


# ---- leases, slots, staleness


@plant
def lease_end_ignored() -> list[Patch]:
    """A worker goes on with its turns when its lease has ended."""
    original = LeaseKeeper._take

    def take(self: Any, lease: Any, asked_at_s: float) -> None:
        if lease is not None:
            original(self, lease, asked_at_s)

    async def watch(self: Any) -> None:
        await asyncio.Event().wait()

    return [(LeaseKeeper, "_take", take), (LeaseKeeper, "watch", watch)]


@plant
def slots_not_counted() -> list[Patch]:
    """Neither the worker nor the broker counts the turns that run already."""

    def free_count(self: Any, served: Any = None, ended_count: int = 0) -> int:
        return int(self._keeper.slot_count) if self._active_version() >= 0 else 0

    uncounted = in_lua(("local held = whole(redis.call('HGET', jobs.held, worker), 0)", "local held = 0"))
    return [uncounted, (RolloutWorker, "_free_count", free_count)]


@plant
def stale_rollouts_delivered() -> list[Patch]:
    """Nobody looks how old a rollout is when it is delivered."""
    looks = "if facts[3] == 'rerun' and oldest >= 0"
    return [(bus_rollouts, "is_stale", lambda *_: False), in_lua((looks, "if false"))]


@plant
def stale_rollouts_delivered_again() -> list[Patch]:
    """Nobody looks how old a rollout is by the time its group comes again."""
    original = RedisRolloutStream._stale

    def only_at_first(self: Any, group: Any, head: int) -> Any:
        return [] if group.redelivered else original(self, group, head)

    return [(RedisRolloutStream, "_stale", only_at_first)]


# ---- guests


@plant
def guests_stay_when_weights_change() -> list[Patch]:
    """A worker writes other weights under the turns of its guests."""

    async def stay(self: Any) -> None:
        return

    return [(RolloutWorker, "_part_with_guests", stay), (RolloutWorker, "_must_wait", lambda self: False)]


@plant
def guests_versions_named_as_the_engine_s() -> list[Patch]:
    """A guest's tokens are said to be of the version by which the engine knows its weights."""
    original = RunningTurns._start

    def start(self: Any, claims: Any, served: Any, version: int | None) -> None:
        original(self, claims, served, None)

    return [(RunningTurns, "_start", start)]


@plant
def guests_weights_not_compared() -> list[Patch]:
    """A worker takes a guest's newest version for that which is live."""
    return [(Guest, "version_of", lambda self, sums: max(self._sums, default=-1))]


@plant
def guests_turns_named_alike() -> list[Patch]:
    """A turn's name in the engine says nothing of its run."""
    return [(rollout_turns, "request_id_of", lambda run_id, claim: f"{claim.job.turn_id}#{claim.fence}")]


# ---- groups


@plant
def acknowledged_before_use() -> list[Patch]:
    """The trainer acknowledges a group when it receives it."""
    original = Ledger.receive

    async def receive(self: Any, consumer: str, timeout_s: float, **wishes: Any) -> Any:
        delivery = await original(self, consumer, timeout_s, **wishes)
        if delivery is not None:
            await self._rollouts.acknowledge(delivery)
        return delivery

    return [(Ledger, "receive", receive)]


@plant
def dropped_groups_make_no_room() -> list[Patch]:
    """What replaces a group is pushed beside it first."""

    async def swap(self: Any, delivery: Any, push: Any) -> bool:
        (is_new,) = await self._rollouts.push([push])
        return bool(is_new and await self.acknowledge(delivery))

    return [(Ledger, "swap", swap)]


@plant
def dropped_groups_give_their_place_up() -> list[Patch]:
    """A dropped group is acknowledged first: a death before the push of what replaces it loses a task."""

    async def swap(self: Any, delivery: Any, push: Any) -> bool:
        await self.acknowledge(delivery)
        with contextlib.suppress(QueueFull):
            return bool(await self._rollouts.push([push]))
        return False

    return [(Ledger, "swap", swap)]


@plant
def each_shard_gives_what_is_asked_for() -> list[Patch]:
    """A consumer reads the streams of all shards at once, and gets so many groups of each."""

    async def take(self: Any, consumer: str, count: int) -> Any:
        return await self._read(consumer, count, ">", None)

    return [(RedisRolloutStream, "_take", take)]


@plant
def a_deleted_run_gets_a_clock() -> list[Patch]:
    """Who still reads or writes a run that was deleted makes its clock anew."""
    return [in_lua(("redis.call('SET', clock, text, 'XX')", "redis.call('SET', clock, text)"))]


@plant
def versions_are_not_pinned() -> list[Patch]:
    """Who evaluates a version submits to a run that evaluates another one by now."""
    return [
        in_lua(("return pinned ~= '' and facts[2] and facts[2] ~= pinned and 'of another version'", "return false"))
    ]


@plant
def redelivery_not_marked() -> list[Patch]:
    """A group that comes again looks like new."""
    original = RedisRolloutStream._group

    async def unmarked(self: Any, *args: Any, is_again: bool) -> Any:
        return dataclasses.replace(await original(self, *args, is_again=is_again), redelivered=False)

    return [(RedisRolloutStream, "_group", unmarked)]


@plant
def depth_not_lowered() -> list[Patch]:
    """A group that has gone still counts."""
    return [
        in_lua(
            (
                "  tally(shard.run, 'depth', -size)\n  tally(shard.run, 'bytes', -whole(row[2], 0))",
                "  tally(shard.run, 'bytes', -whole(row[2], 0))",
            ),
            (
                "tally(shard.run, 'depth', -size)\ntally(shard.counters, 'groups_cancelled', 1)",
                "tally(shard.counters, 'groups_cancelled', 1)",
            ),
        )
    ]
