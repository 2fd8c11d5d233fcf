"""Groups in memory: the twin of queue/rollouts.py."""

from __future__ import annotations

from collections.abc import Sequence

from ..contract.errors import FabricError
from ..contract.ids import new_process_id, trajectory_id
from ..contract.records import DeadLetter, Failure, Group, RunConfig
from ..contract.wire import dump_json
from ..ports.queue import ConsumerBeat, Delivery, GroupPush
from ..rules.queue.push import DEAD_COUNT_MAX, outcome, too_many_bytes, too_many_dead, too_many_open
from ..rules.queue.retries import NO_LETTER, RERUN_COUNT_MAX, given_up, is_stale, not_held, too_stale
from .queue import RunPort
from .state import GroupState, JobRecord, MemoryBroker


class MemoryRolloutStream(RunPort):
    """RolloutStream (see ports) in memory; every one is a client of its own."""

    def __init__(self, broker: MemoryBroker, run: RunConfig) -> None:
        super().__init__(broker, run)
        self._client_id = new_process_id()
        self._known_names: set[str] = set()
        self._in_hand: set[int] = set()

    async def push(self, groups: Sequence[GroupPush]) -> list[bool]:
        answers: dict[str, bool | FabricError] = {}
        for group in groups:
            try:
                answers[group.group_id] = self._push(group)
            except FabricError as error:
                answers[group.group_id] = error
        return outcome(answers)

    def _push(self, group: GroupPush) -> bool:
        run = self.run
        if group.group_id in run.groups or group.group_id in run.consumed:
            return False
        size = len(dump_json({"task_id": group.task_id, "task": group.task}))
        size += sum(len(job.encode()) for job in group.jobs)
        self._check_room(len(group.jobs), size)
        run.depth += len(group.jobs)
        state = GroupState(
            task_id=group.task_id,
            task=group.task,
            size=len(group.jobs),
            quorum=group.quorum or len(group.jobs),
            priority=group.priority,
        )
        run.groups[group.group_id] = state
        run.weigh(state, size)
        if group.deadline_s is not None:
            state.deadline_ms = run.late[group.group_id] = self._broker.now_ms() + group.deadline_s * 1000
        for job in group.jobs:
            run.trajectories.jobs[job.trajectory_id] = job
            run.trajectories.records[job.trajectory_id] = JobRecord()
            run.make_ready(run.trajectories, job.trajectory_id, was_held=False)
        run.count("groups_submitted")
        run.count("trajectories_submitted", len(group.jobs))
        return True

    def _check_room(self, count: int, size: int) -> None:
        run, run_id = self.run, self._config.run_id
        if run.depth + count > run.config.trajectory_count_max:
            raise too_many_open(run_id, run.depth, run.config.trajectory_count_max, count)
        if len(run.dead) >= DEAD_COUNT_MAX:
            raise too_many_dead(run_id, len(run.dead), DEAD_COUNT_MAX)
        if run.bytes_held + size > run.config.memory_bytes_max:
            raise too_many_bytes(run_id, run.bytes_held, run.config.memory_bytes_max, size)

    def _holder(self, consumer: str) -> str:
        return f"{consumer}/{self._client_id}"

    async def beat(self, consumer: str, duration_s: float) -> ConsumerBeat:
        """As queue/lua/rollouts/beat_consumer.lua."""
        run, me, now = self.run, self._holder(consumer), self._broker.now_ms()
        is_new = consumer not in self._known_names
        self._known_names.add(consumer)
        until_ms, was_lost = now + duration_s * 1000, me not in run.consumers and not is_new
        for name in run.pending.values():
            run.consumers.setdefault(name, until_ms)
        run.consumers[me] = until_ms
        taken_count, namesakes = 0, []
        for other, ends_ms in list(run.consumers.items()):
            is_namesake = other.rpartition("/")[0] == consumer
            if other == me:
                continue
            if ends_ms <= now or (is_namesake and is_new):
                entries = [entry for entry, name in run.pending.items() if name == other]
                run.pending.update(dict.fromkeys(entries, me))
                taken_count += len(entries)
                del run.consumers[other]
                run.asked_at_s.pop(other, None)
            elif is_namesake:
                namesakes.append(other.rpartition("/")[2])
        return ConsumerBeat(taken_count=taken_count, was_lost=was_lost, namesakes=tuple(namesakes))

    async def receive(self, consumer: str, count: int, timeout_s: float) -> list[Delivery]:
        run, me = self.run, self._holder(consumer)
        run.asked_at_s[me] = self._broker.clock.now_s()
        owed = [entry for entry, name in run.pending.items() if name == me and entry not in self._in_hand]
        found = [entry for entry in owed if run.groups.get(self._name_of(entry)) and not self._rerun_stale(entry)]
        if found:
            return [self._delivery(entry, me, is_again=True) for entry in found[:count]]
        if not run.completed:
            await self._broker.wait(run.completed_bell, timeout_s)
        entries = [entry for entry in list(run.completed)[:count] if not self._rerun_stale(entry)]
        for entry in entries:
            run.pending[entry] = me
        return [self._delivery(entry, me, is_again=False) for entry in entries]

    def _name_of(self, entry: int) -> str:
        return self.run.completed.get(entry) or self.run.completed_names[entry]

    def _rerun_stale(self, entry: int) -> bool:
        """As queue/lua/rollouts/rerun_stale.lua; False when the group may be delivered."""
        run = self.run
        if run.config.when_stale != "rerun":
            return False
        group_id = self._name_of(entry)
        group = run.groups[group_id]
        bound, head = run.config.staleness, run.head_version
        stale = [each for each in group.rollouts.values() if is_stale(each.policy_version, head, bound)]
        if not stale:
            return False
        run.completed.pop(entry, None)
        run.completed_names.pop(entry, None)
        group.is_redelivered |= run.pending.pop(entry, None) is not None
        group.state = "open"
        if group.deadline_ms is not None:
            run.late[group_id] = group.deadline_ms
        run.count("groups_completed", -1)
        dead = [each.trajectory_id for each in stale if not self._run_again(group, each.trajectory_id)]
        for rollout in stale:
            name = rollout.trajectory_id
            if name in dead:
                reason = too_stale(rollout.policy_version, head)
                run.dead[name] = given_up(run.config.run_id, "-", run.trajectories.jobs[name], reason)
                run.close(group_id, "failed")
        return True

    def _run_again(self, group: GroupState, name: str) -> bool:
        """A delivered trajectory's next attempt; False when it has none left."""
        run = self.run
        record = run.trajectories.records[name]
        run.forget_rollout(group, name)
        group.completed -= 1
        run.count("trajectories_completed", -1)
        record.worker = "-"
        may_run = run.spend_attempt(record, 0, RERUN_COUNT_MAX)
        record.state = "ready" if may_run else "failed"
        if may_run:
            run.make_ready(run.trajectories, name, was_held=True)
        return may_run

    def put_back(self, delivery: Delivery) -> None:
        self._in_hand.discard(int(delivery.entry_id))

    def _delivery(self, entry: int, holder: str, *, is_again: bool) -> Delivery:
        run = self.run
        self._in_hand.add(entry)
        group_id = run.completed_names[entry] = self._name_of(entry)
        run.completed.pop(entry, None)
        group = run.groups[group_id]
        names = [trajectory_id(group_id, index) for index in range(group.size)]
        missing = [name for name in names if name not in group.rollouts]
        failed = [name for name in missing if name in run.trajectories.records]
        reasons = {name: run.dead[name].reason if name in run.dead else NO_LETTER for name in failed}
        return Delivery(
            group=Group(
                group_id=group_id,
                task_id=group.task_id,
                rollouts=tuple(group.rollouts[name] for name in names if name in group.rollouts),
                failures=tuple(Failure(name, reason) for name, reason in reasons.items()),
                cancelled=tuple(name for name in missing if name not in reasons),
                ended_by=group.ended_by,
                redelivered=is_again or group.is_redelivered,
            ),
            shard=0,
            entry_id=str(entry),
            holder=holder,
        )

    async def acknowledge(self, delivery: Delivery) -> bool:
        run, entry, group_id = self.run, int(delivery.entry_id), delivery.group.group_id
        self._in_hand.discard(entry)
        if group_id in run.groups and not self._may_end(entry, delivery.holder):
            raise not_held(self._config.run_id, group_id)
        for table in (run.pending, run.completed_names, run.completed):
            table.pop(entry, None)
        if not self._drop(group_id):
            return False
        run.consumed.add(group_id)
        run.count("groups_consumed")
        return True

    def _may_end(self, entry: int, holder: str) -> bool:
        """As queue/lua/use/holder.lua."""
        run = self.run
        return run.pending[entry] == holder if entry in run.pending else entry in run.completed

    def _drop(self, group_id: str) -> bool:
        run = self.run
        if group_id not in run.groups:
            return False
        run.drop_unfinished(group_id)
        group = run.groups.pop(group_id)
        for index in range(group.size):
            name = trajectory_id(group_id, index)
            run.trajectories.records.pop(name, None)
            run.trajectories.jobs.pop(name, None)
        run.late.pop(group_id, None)
        run.depth -= group.size
        run.bytes_held -= group.bytes_held
        return True

    async def cancel(self, group_id: str) -> bool:
        run = self.run
        for entry in [entry for entry, name in run.completed.items() if name == group_id]:
            del run.completed[entry]
        is_dropped = self._drop(group_id)
        if is_dropped:
            run.consumed.add(group_id)
            run.count("groups_cancelled")
        return is_dropped

    async def reap(self) -> int:
        run, now = self.run, self._broker.now_ms()
        late = [name for name, until in run.late.items() if until <= now]
        for name in late:
            run.complete(name, "deadline")
        return len(late)

    async def dead_letters(self, count: int) -> list[DeadLetter]:
        return list(self.run.dead.values())[:count]

    async def discard(self, trajectory_id: str) -> bool:
        return self.run.dead.pop(trajectory_id, None) is not None
