"""What the in-memory broker remembers: the same tables as queue/keys.py, as plain Python.

It exists for tests and simulation: one process, no persistence. Held to the same contract tests as Redis.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..contract.agreement import Agreement
from ..contract.clock import Clock, SystemClock
from ..contract.errors import RunUnknown
from ..contract.ids import group_of, trajectory_id, turn_id
from ..contract.lease_plan import LeasePlan
from ..contract.records import DeadLetter, Rollout, RunConfig, TurnResult, WorkerInfo
from ..contract.sharing import LendSetting, SharingReport
from ..rules.queue.curve import Curve, bucket_of, put_together
from ..rules.queue.priority import urgency
from ..rules.queue.push import no_such_run
from ..rules.queue.retries import Suspicion

STEP_MS_MAX = 1000.0
FENCES_PER_CLAIM = 65536


@dataclass(slots=True)
class JobRecord:
    """A job's record, as in queue/lua/use/record.lua."""

    state: str = "ready"
    fence: int = 0
    attempt: int = 0
    loss: int = 0
    rerun: int = 0
    blame: int = 0
    seen: int = 0
    is_inside: bool = True
    worker: str = "-"

    @property
    def suspicion(self) -> Suspicion:
        """What speaks against it."""
        return Suspicion(self.loss, self.blame, self.seen)

    @suspicion.setter
    def suspicion(self, known: Suspicion) -> None:
        self.loss, self.blame, self.seen = known.loss, known.blame, known.seen


@dataclass(slots=True)
class JobTable:
    """One kind of job: who waits, who holds, until when."""

    ready: tuple[list[str], ...] = field(default_factory=lambda: ([], [], []))  # by urgency
    jobs: dict[str, Any] = field(default_factory=dict)
    records: dict[str, JobRecord] = field(default_factory=dict)
    deadlines: dict[str, float] = field(default_factory=dict)
    held: dict[str, int] = field(default_factory=dict)
    logs: dict[str, Any] = field(default_factory=dict)
    bell: asyncio.Event = field(default_factory=asyncio.Event)
    suspects: list[str] = field(default_factory=list)  # those that wait

    @property
    def ready_count(self) -> int:
        """Entries that wait; some may be of jobs that do not any more."""
        return sum(map(len, self.ready)) + len(self.suspects)

    def end_claim(self, job_id: str, record: JobRecord) -> None:
        """No deadline, one claim less for its worker."""
        self.deadlines.pop(job_id, None)
        if record.state == "claimed":
            self.held[record.worker] = self.held.get(record.worker, 0) - 1
            if self.held[record.worker] <= 0:
                del self.held[record.worker]

    def is_held(self, job_id: str, worker_id: str, fence: int) -> bool:
        """Whether this worker holds the job under this fence."""
        record = self.records.get(job_id)
        return record is not None and record.state == "claimed" and record.worker == worker_id and record.fence == fence


@dataclass(slots=True)
class GroupState:
    """A group between push and acknowledge."""

    task_id: str
    task: dict[str, Any]
    size: int
    quorum: int
    priority: int
    deadline_ms: float | None = None
    completed: int = 0
    failed: int = 0
    cancelled: int = 0
    state: str = "open"
    ended_by: str = "all"
    is_redelivered: bool = False  # somebody may have used it before it was taken back
    bytes_held: int = 0
    rollouts: dict[str, Rollout] = field(default_factory=dict)
    rollout_bytes: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class RunState:
    """All of one run."""

    config: RunConfig
    head_version: int = -1
    depth: int = 0
    bytes_held: int = 0
    agreement: Agreement | None = None
    counters: dict[str, int] = field(default_factory=dict)
    trajectories: JobTable = field(default_factory=JobTable)
    turns: JobTable = field(default_factory=JobTable)
    agents: dict[str, str] = field(default_factory=dict)
    results: dict[str, TurnResult] = field(default_factory=dict)
    inboxes: dict[str, list[TurnResult]] = field(default_factory=dict)
    inbox_bell: asyncio.Event = field(default_factory=asyncio.Event)
    groups: dict[str, GroupState] = field(default_factory=dict)
    late: dict[str, float] = field(default_factory=dict)  # group id → its deadline
    completed: dict[int, str] = field(default_factory=dict)
    completed_next: int = 0
    completed_names: dict[int, str] = field(default_factory=dict)  # entries received and not yet acknowledged
    completed_bell: asyncio.Event = field(default_factory=asyncio.Event)
    pending: dict[int, str] = field(default_factory=dict)  # the consumer that holds each, "name/client"
    consumers: dict[str, float] = field(default_factory=dict)  # until when what each received is its own
    asked_at_s: dict[str, float] = field(default_factory=dict)  # consumer → when it asked for groups last
    consumed: set[str] = field(default_factory=set)
    dead: dict[str, DeadLetter] = field(default_factory=dict)
    leases: dict[str, tuple[int, int, float]] = field(default_factory=dict)
    lease_term: int = -1

    rewards: Curve = ()

    def note_reward(self, rollout: Rollout) -> None:
        """As queue/lua/jobs/use/curve.lua."""
        if rollout.reward is not None:
            bucket = bucket_of(rollout.policy_version, rollout.reward, len(rollout.completion_ids))
            self.rewards = put_together((*self.rewards, bucket))

    def count(self, name: str, by: int = 1) -> None:
        """Add to a total."""
        self.counters[name] = self.counters.get(name, 0) + by

    def forget_turns(self, trajectory_id: str) -> None:
        """As queue/lua/use/forget_turns.lua."""
        index = 0
        while (name := turn_id(trajectory_id, index)) in self.turns.records:
            self.turns.end_claim(name, self.turns.records.pop(name))
            for table in (self.turns.jobs, self.turns.logs, self.agents, self.results):
                table.pop(name, None)
            index += 1

    def make_ready(self, table: JobTable, job_id: str, *, was_held: bool) -> None:
        """As queue/lua/use/ring.lua."""
        group = self.groups.get(group_of(job_id))
        place = 1
        if group is not None:
            missing = group.quorum - group.completed
            place = urgency(priority=group.priority, missing_count=missing, quorum=group.quorum, was_held=was_held)
        table.ready[place].append(job_id)
        table.bell.set()

    def keep_rollout(self, group: GroupState, rollout: Rollout) -> None:
        """Hold a rollout with its group, and count its bytes."""
        self.forget_rollout(group, rollout.trajectory_id)
        group.rollouts[rollout.trajectory_id] = rollout
        size = group.rollout_bytes[rollout.trajectory_id] = len(rollout.encode())
        self.weigh(group, size)

    def forget_rollout(self, group: GroupState, trajectory: str) -> None:
        """As queue/lua/use/close.lua and queue/lua/use/drop.lua."""
        if group.rollouts.pop(trajectory, None) is not None:
            self.weigh(group, -group.rollout_bytes.pop(trajectory))

    def weigh(self, group: GroupState, size: int) -> None:
        """Count bytes that the run holds, on the run and on the group that will take them with it."""
        self.bytes_held += size
        group.bytes_held += size

    def drop_unfinished(self, group_id: str) -> int:
        """As queue/lua/use/close.lua and queue/lua/use/drop.lua."""
        group, count = self.groups[group_id], 0
        for index in range(group.size):
            name = trajectory_id(group_id, index)
            record = self.trajectories.records.get(name)
            if record is not None and record.state not in ("completed", "failed"):
                self.trajectories.end_claim(name, record)
                self.forget_turns(name)
                self.forget_rollout(group, name)
                for table in (self.trajectories.records, self.trajectories.jobs, self.trajectories.logs):
                    table.pop(name, None)
                count += 1
        return count

    def spend_attempt(self, record: JobRecord, attempt_max: int, rerun_max: int) -> bool:
        """As queue/lua/use/close.lua and queue/lua/use/drop.lua."""
        if rerun_max:
            record.rerun += 1
            self.count("reruns")
            return record.rerun < rerun_max
        record.attempt += 1
        self.count("attempts_failed")
        return record.attempt < attempt_max

    def complete(self, group_id: str, ended_by: str) -> None:
        """As queue/lua/use/close.lua and queue/lua/use/drop.lua."""
        group = self.groups[group_id]
        dropped = self.drop_unfinished(group_id)
        group.cancelled += dropped
        group.state, group.ended_by = "complete", ended_by
        self.late.pop(group_id, None)
        self.completed[self.completed_next] = group_id
        self.completed_next += 1
        self.completed_bell.set()
        self.count("groups_completed")
        if dropped:
            self.count("trajectories_cancelled", dropped)

    def close(self, group_id: str, outcome: str) -> None:
        """As queue/lua/use/close.lua and queue/lua/use/drop.lua."""
        group = self.groups[group_id]
        self.count(f"trajectories_{outcome}")
        group.failed += outcome == "failed"
        group.completed += outcome == "completed"
        if group.completed >= group.quorum:
            self.complete(group_id, "quorum" if group.quorum < group.size else "all")
        elif group.completed + group.failed + group.cancelled >= group.size:
            self.complete(group_id, "all")

    def deliver(self, agent_id: str, result: TurnResult) -> None:
        """Put a result into an agent's inbox."""
        self.inboxes.setdefault(agent_id, []).append(result)
        self.inbox_bell.set()


class Leader(NamedTuple):
    """The process of a controller that leads."""

    name: str
    process: str
    until_ms: float


class MemoryBroker:
    """Everything that the memory ports share."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock = clock or SystemClock()
        self.set_ahead_s = 0.0  # how far somebody has set the broker machine's time, for tests
        self._wall_ms = self._now_ms = self.clock.now_s() * 1000
        self.lease_bells: dict[str, asyncio.Event] = {}
        self.runs: dict[str, RunState] = {}
        self.workers: dict[str, tuple[WorkerInfo, float]] = {}
        self.assignments: dict[str, str] = {}
        self.lends: dict[str, LendSetting] = {}
        self.deleted: dict[str, float] = {}  # when
        self.sharing: dict[str, SharingReport] = {}
        self.leader: Leader | None = None
        self.term = 0
        self.plan: LeasePlan | None = None
        self.events: list[tuple[str, str, dict[str, Any]]] = []

    def now_ms(self) -> float:
        """As queue/lua/use/look.lua and queue/lua/use/time.lua: the machine's time without its steps."""
        wall_ms = (self.clock.now_s() + self.set_ahead_s) * 1000
        self._now_ms += max(0.0, min(STEP_MS_MAX, wall_ms - self._wall_ms))
        self._wall_ms = wall_ms
        return self._now_ms

    def no_run(self, run_id: str) -> RunUnknown:
        """What to say of a run that is not there."""
        at_ms = self.deleted.get(run_id)
        return no_such_run(run_id, None if at_ms is None else int(self.now_ms() - at_ms))

    def lease_bell(self, worker_id: str) -> asyncio.Event:
        """What wakes a worker when its lease has changed."""
        return self.lease_bells.setdefault(worker_id, asyncio.Event())

    async def wait(self, bell: asyncio.Event, timeout_s: float) -> None:
        """Wait for a bell, at most `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):  # wait_for may swallow a cancelling
                await bell.wait()
        except TimeoutError:
            return
        bell.clear()
