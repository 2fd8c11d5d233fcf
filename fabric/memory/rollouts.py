"""Groups in memory: the twin of bus/rollouts.py."""

from __future__ import annotations

from collections.abc import Sequence

from ..ids import trajectory_id
from ..ports import Delivery, GroupPush
from ..records import DeadLetter, Group, RunConfig
from ..rules.push import DEAD_COUNT_MAX, too_many_dead, too_many_open
from .queue import RunPort
from .state import GroupState, JobRecord, MemoryBroker


class MemoryRolloutStream(RunPort):
    """RolloutStream (see ports) in memory; one consumer."""

    def __init__(self, broker: MemoryBroker, run: RunConfig) -> None:
        super().__init__(broker, run)
        self._in_hand: set[int] = set()

    async def push(self, groups: Sequence[GroupPush]) -> list[bool]:
        return [self._push(group) for group in groups]

    def _push(self, group: GroupPush) -> bool:
        run = self.run
        if group.group_id in run.groups or group.group_id in run.consumed:
            return False
        limit = run.config.trajectory_count_max
        if run.depth + len(group.jobs) > limit:
            raise too_many_open(run.config.run_id, run.depth, limit)
        if len(run.dead) >= DEAD_COUNT_MAX:
            raise too_many_dead(run.config.run_id, len(run.dead), DEAD_COUNT_MAX)
        run.depth += len(group.jobs)
        run.groups[group.group_id] = GroupState(task_id=group.task_id, task=group.task, size=len(group.jobs))
        for job in group.jobs:
            run.trajectories.jobs[job.trajectory_id] = job
            run.trajectories.records[job.trajectory_id] = JobRecord()
            run.trajectories.make_ready(job.trajectory_id)
        run.count("groups_submitted")
        run.count("trajectories_submitted", len(group.jobs))
        return True

    async def receive(self, consumer: str, count: int, timeout_s: float) -> list[Delivery]:
        run = self.run
        owed = [entry for entry, name in run.pending.items() if name == consumer and entry not in self._in_hand]
        if owed:
            return [self._delivery(entry, is_again=True) for entry in owed[:count]]
        if not run.completed:
            await self._broker.wait(run.completed_bell, timeout_s)
        entries = list(run.completed)[:count]
        for entry in entries:
            run.pending[entry] = consumer
        return [self._delivery(entry, is_again=False) for entry in entries]

    def put_back(self, delivery: Delivery) -> None:
        self._in_hand.discard(int(delivery.entry_id))

    def _delivery(self, entry: int, *, is_again: bool) -> Delivery:
        run = self.run
        self._in_hand.add(entry)
        group_id = run.completed.pop(entry, None) or run.completed_names[entry]
        run.completed_names[entry] = group_id
        group = run.groups[group_id]
        names = [trajectory_id(group_id, index) for index in range(group.size)]
        return Delivery(
            group=Group(
                group_id=group_id,
                task_id=group.task_id,
                rollouts=tuple(group.rollouts[name] for name in names if name in group.rollouts),
                failures=tuple(name for name in names if name not in group.rollouts),
                redelivered=is_again,
            ),
            shard=0,
            entry_id=str(entry),
        )

    async def acknowledge(self, delivery: Delivery) -> bool:
        run = self.run
        self._in_hand.discard(int(delivery.entry_id))
        run.pending.pop(int(delivery.entry_id), None)
        run.completed_names.pop(int(delivery.entry_id), None)
        if not self._drop(delivery.group.group_id):
            return False
        run.consumed.add(delivery.group.group_id)
        run.count("groups_consumed")
        return True

    def _drop(self, group_id: str) -> bool:
        run = self.run
        group = run.groups.pop(group_id, None)
        if group is None:
            return False
        for index in range(group.size):
            name = trajectory_id(group_id, index)
            record = run.trajectories.records.pop(name, None)
            if record is not None:
                run.trajectories.end_claim(name, record)
            run.forget_turns(name)
            run.trajectories.jobs.pop(name, None)
            run.trajectories.logs.pop(name, None)
        run.depth -= group.size
        return True

    async def cancel(self, group_id: str) -> bool:
        run = self.run
        for entry in [entry for entry, name in run.completed.items() if name == group_id]:
            del run.completed[entry]
        is_dropped = self._drop(group_id)
        if is_dropped:
            run.count("groups_cancelled")
        return is_dropped

    async def dead_letters(self, count: int) -> list[DeadLetter]:
        return list(self.run.dead.values())[:count]

    async def discard(self, trajectory_id: str) -> bool:
        return self.run.dead.pop(trajectory_id, None) is not None
