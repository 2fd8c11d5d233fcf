"""Bugs to plant, each a small patch of the twin, a worker or the trainer: what the simulator must be able to find.

A simulation that passes proves nothing by itself; that it fails for each of these shows what its passing means.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from rollfab.fabric.memory import queue as twin_queue
from rollfab.fabric.memory import rollouts as twin_rollouts
from rollfab.fabric.memory.leases import MemoryLeases
from rollfab.fabric.memory.queue import MemoryTrajectoryQueue, MemoryTurnQueue, RunPort
from rollfab.fabric.memory.rollouts import MemoryRolloutStream
from rollfab.fabric.memory.state import FENCES_PER_CLAIM, JobTable, RunState
from rollfab.fabric.rules.giving_up import Suspicion
from rollfab.trainer.ledger import Ledger
from rollfab.workers import turn as workers_turn
from rollfab.workers.keeper import Keeper
from rollfab.workers.lease import LeaseKeeper
from rollfab.workers.rollout import RolloutWorker
from rollfab.workers.running import RunningTurns
from rollfab.workers.stall import EngineWatch

Patch = tuple[Any, str, Any]  # object, attribute, what to put there
PLANTS: dict[str, Callable[[], list[Patch]]] = {}


@contextlib.contextmanager
def planted(name: str) -> Iterator[None]:
    """The bug of that name is in the program."""
    with contextlib.ExitStack() as stack:
        for target, attribute, new in PLANTS[name]():
            stack.enter_context(mock.patch.object(target, attribute, new))
        yield


def plant(make: Callable[[], list[Patch]]) -> Callable[[], list[Patch]]:
    """Register a bug under its function's name."""
    PLANTS[make.__name__.replace("_", "-")] = make
    return make


# ---- settling


@plant
def turn_settled_without_fence() -> list[Patch]:
    """Whoever hands a turn in is believed to hold it."""
    original = MemoryTurnQueue._settle

    def settle(self: Any, worker_id: str, claim: Any, result: Any) -> bool:
        record = self.run.turns.records.get(claim.job.turn_id)
        if record is None or record.state != "claimed":
            return original(self, worker_id, claim, result)
        return original(self, record.worker, dataclasses.replace(claim, fence=record.fence), result)

    return [(MemoryTurnQueue, "_settle", settle)]


@plant
def trajectory_settled_without_fence() -> list[Patch]:
    """Whoever hands a trajectory in is believed to hold it."""
    original = MemoryTrajectoryQueue.settle

    async def settle(self: Any, claim: Any, rollout: Any, *, is_scored: bool) -> bool:
        record = self.run.trajectories.records.get(rollout.trajectory_id)
        if record is not None and record.state == "claimed":
            claim = dataclasses.replace(claim, fence=record.fence, worker_id=record.worker)
        return await original(self, claim, rollout, is_scored=is_scored)

    return [(MemoryTrajectoryQueue, "settle", settle)]


@plant
def settled_but_not_recorded() -> list[Patch]:
    """A settled trajectory still counts as held: when its claim is not renewed, it runs again."""
    original = MemoryTrajectoryQueue.settle

    async def settle(self: Any, claim: Any, rollout: Any, *, is_scored: bool) -> bool:
        is_settled = await original(self, claim, rollout, is_scored=is_scored)
        record = self.run.trajectories.records.get(rollout.trajectory_id)
        if record is not None and record.state == "completed":
            record.state = "claimed"
            self.run.trajectories.deadlines[rollout.trajectory_id] = self._broker.now_ms()
        return is_settled

    return [(MemoryTrajectoryQueue, "settle", settle)]


@plant
def result_delivered_once_only() -> list[Patch]:
    """A result that was lost on its way to the agent is not sent again."""
    original, sent = RunState.deliver, set[tuple[int, str]]()

    def deliver(self: RunState, agent_id: str, result: Any) -> None:
        if (id(self), result.turn_id) not in sent:
            sent.add((id(self), result.turn_id))
            original(self, agent_id, result)

    return [(RunState, "deliver", deliver)]


# ---- claims


@plant
def turn_claims_not_renewed() -> list[Patch]:
    """A worker does not say that it still runs its turns."""
    return [(RunningTurns, "renewals", lambda self, ended: [])]


@plant
def trajectory_claims_not_renewed() -> list[Patch]:
    """An agent does not say that it still runs its trajectories."""

    async def renew(*_: Any) -> None:
        await asyncio.Event().wait()

    return [(Keeper, "_renew", renew)]


@plant
def lost_claims_renewed() -> list[Patch]:
    """The broker lets anyone renew a job that somebody holds."""

    def is_held(self: JobTable, job_id: str, worker_id: str, fence: int) -> bool:
        record = self.records.get(job_id)
        return record is not None and record.state == "claimed"

    return [(JobTable, "is_held", is_held)]


@plant
def fence_not_raised() -> list[Patch]:
    """What was taken back is handed out again under the fence it had."""
    original = RunPort._take_ready

    def take(self: Any, *args: Any, **kwargs: Any) -> Any:
        taken = original(self, *args, **kwargs)
        for _, record in taken:
            if record.fence % FENCES_PER_CLAIM > 1:
                record.fence -= 1
        return taken

    return [(RunPort, "_take_ready", take)]


@plant
def turns_forgotten_at_takeover() -> list[Patch]:
    """The next agent is not told which turns are settled."""
    original = MemoryTrajectoryQueue.claim

    async def claim(self: Any, worker_id: str, want: int, **how: bool) -> Any:
        return [dataclasses.replace(each, turns=()) for each in await original(self, worker_id, want, **how)]

    return [(MemoryTrajectoryQueue, "claim", claim)]


@plant
def everyone_blamed() -> list[Patch]:
    """Whatever an agent held when it died is to blame for that."""

    def after_loss(known: Suspicion, come: int, *, could_be_it: bool) -> Suspicion:
        return Suspicion(known.loss + 1, known.blame + 1, come)

    return [(twin_queue, "after_loss", after_loss)]


@plant
def killer_never_blamed() -> list[Patch]:
    """Nothing is ever to blame for its agents' deaths."""
    return [(twin_queue, "after_loss", lambda known, come, *, could_be_it: Suspicion(seen=come))]


# ---- tokens


@plant
def release_forgets_tokens() -> list[Patch]:
    """Tokens of a turn that is given back are not kept."""
    original = MemoryTurnQueue.release

    async def release(self: Any, worker_id: str, progress: Any, **rest: Any) -> None:
        await original(self, worker_id, [dataclasses.replace(each, log=None) for each in progress], **rest)

    return [(MemoryTurnQueue, "release", release)]


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
    original = MemoryTurnQueue._claim

    def claim(self: Any, worker_id: str, *args: Any) -> None:
        held = self.run.turns.held.pop(worker_id, 0)
        original(self, worker_id, *args)
        if held:
            self.run.turns.held[worker_id] = self.run.turns.held.get(worker_id, 0) + held

    def free_count(self: Any, ended_count: int = 0) -> int:
        return int(self._keeper.slot_count) if self._active_version() >= 0 else 0

    return [(MemoryTurnQueue, "_claim", claim), (RolloutWorker, "_free_count", free_count)]


@plant
def stale_workers_served() -> list[Patch]:
    """Turns are handed to workers however old their weights are."""
    original = MemoryTurnQueue._claim

    def claim(self: Any, worker_id: str, want: int, epoch: int, active_version: int, *rest: Any) -> None:
        original(self, worker_id, want, epoch, max(active_version, self.run.head_version), *rest)

    return [(MemoryTurnQueue, "_claim", claim)]


@plant
def stale_rollouts_delivered() -> list[Patch]:
    """Nobody looks how old a rollout is when it is delivered."""
    return [(twin_rollouts, "is_stale", lambda *_: False), (twin_queue, "is_stale", lambda *_: False)]


@plant
def stale_rollouts_delivered_again() -> list[Patch]:
    """Nobody looks how old a rollout is by the time its group comes again."""
    original = MemoryRolloutStream._rerun_stale

    def only_at_first(self: Any, entry: int) -> bool:
        return entry in self.run.completed and original(self, entry)

    return [(MemoryRolloutStream, "_rerun_stale", only_at_first)]


@plant
def late_acknowledgement_counts() -> list[Patch]:
    """A trainer that was replaced may acknowledge what its successor holds."""
    return [(MemoryRolloutStream, "_may_end", lambda self, entry, holder: True)]


@plant
def old_leader_obeyed() -> list[Patch]:
    """A controller that was replaced may still write leases."""
    original = MemoryLeases._change

    def change(self: Any, term: int, change: Any) -> bool:
        run = self._broker.runs[change.lease.run_id]
        run.lease_term = -1
        run.leases.pop(change.lease.worker_id, None)
        return original(self, term, change)

    return [(MemoryLeases, "_change", change)]


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
def push_not_idempotent() -> list[Patch]:
    """A group that was consumed is taken for a new one when it is pushed again."""
    original = MemoryRolloutStream._push

    def push(self: Any, group: Any) -> bool:
        self.run.consumed.discard(group.group_id)
        return original(self, group)

    return [(MemoryRolloutStream, "_push", push)]


@plant
def redelivery_not_marked() -> list[Patch]:
    """A group that comes again looks like new."""
    original = MemoryRolloutStream._delivery

    def unmarked(self: Any, entry: int, holder: str, *, is_again: bool) -> Any:
        self.run.groups[self._name_of(entry)].is_redelivered = False
        return original(self, entry, holder, is_again=False)

    return [(MemoryRolloutStream, "_delivery", unmarked)]


@plant
def depth_not_lowered() -> list[Patch]:
    """A group that has gone still counts."""
    original = MemoryRolloutStream._drop

    def drop(self: Any, group_id: str) -> bool:
        depth = self.run.depth
        is_dropped = original(self, group_id)
        self.run.depth = depth
        return is_dropped

    return [(MemoryRolloutStream, "_drop", drop)]


@plant
def unneeded_trajectories_go_on() -> list[Patch]:
    """When a group is complete, its other trajectories are not cancelled."""
    return [(RunState, "drop_unfinished", lambda self, group_id: 0)]
