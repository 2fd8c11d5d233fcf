"""What the in-memory broker remembers: the same tables as bus/keys.py, as plain Python.

It exists for tests and simulation: one process, no persistence. Held to the same contract tests as Redis.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from ..clock import Clock, SystemClock
from ..ids import turn_id
from ..records import DeadLetter, Rollout, RunConfig, TurnResult, WorkerInfo


@dataclass(slots=True)
class JobRecord:
    """A job's record, as in bus/lua/use/record.lua."""

    state: str = "ready"
    fence: int = 0
    attempt: int = 0
    loss: int = 0
    worker: str = "-"


@dataclass(slots=True)
class JobTable:
    """One kind of job: who waits, who holds, until when."""

    ready: list[str] = field(default_factory=list)
    jobs: dict[str, Any] = field(default_factory=dict)
    records: dict[str, JobRecord] = field(default_factory=dict)
    deadlines: dict[str, float] = field(default_factory=dict)
    held: dict[str, int] = field(default_factory=dict)
    logs: dict[str, Any] = field(default_factory=dict)
    bell: asyncio.Event = field(default_factory=asyncio.Event)

    def make_ready(self, job_id: str) -> None:
        """Put a job on the ready list and wake who waits."""
        self.ready.append(job_id)
        self.bell.set()

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
    closed: int = 0
    failed: int = 0
    rollouts: dict[str, Rollout] = field(default_factory=dict)


@dataclass(slots=True)
class RunState:
    """All of one run."""

    config: RunConfig
    head_version: int = -1
    depth: int = 0
    counters: dict[str, int] = field(default_factory=dict)
    trajectories: JobTable = field(default_factory=JobTable)
    turns: JobTable = field(default_factory=JobTable)
    agents: dict[str, str] = field(default_factory=dict)
    results: dict[str, TurnResult] = field(default_factory=dict)
    inboxes: dict[str, list[TurnResult]] = field(default_factory=dict)
    inbox_bell: asyncio.Event = field(default_factory=asyncio.Event)
    groups: dict[str, GroupState] = field(default_factory=dict)
    completed: dict[int, str] = field(default_factory=dict)
    completed_next: int = 0
    completed_names: dict[int, str] = field(default_factory=dict)  # entries received and not yet acknowledged
    completed_bell: asyncio.Event = field(default_factory=asyncio.Event)
    pending: dict[int, str] = field(default_factory=dict)
    consumed: set[str] = field(default_factory=set)
    dead: dict[str, DeadLetter] = field(default_factory=dict)
    leases: dict[str, tuple[int, int, float]] = field(default_factory=dict)

    def count(self, name: str, by: int = 1) -> None:
        """Add to a total."""
        self.counters[name] = self.counters.get(name, 0) + by

    def forget_turns(self, trajectory_id: str) -> None:
        """As bus/lua/use/forget_turns.lua."""
        index = 0
        while (name := turn_id(trajectory_id, index)) in self.turns.records:
            self.turns.end_claim(name, self.turns.records.pop(name))
            for table in (self.turns.jobs, self.turns.logs, self.agents, self.results):
                table.pop(name, None)
            index += 1

    def close(self, group_id: str, outcome: str) -> None:
        """As bus/lua/use/close.lua."""
        group = self.groups[group_id]
        self.count(f"trajectories_{outcome}")
        group.failed += outcome == "failed"
        group.closed += 1
        if group.closed >= group.size:
            self.completed[self.completed_next] = group_id
            self.completed_next += 1
            self.completed_bell.set()
            self.count("groups_completed")

    def deliver(self, agent_id: str, result: TurnResult) -> None:
        """Put a result into an agent's inbox."""
        self.inboxes.setdefault(agent_id, []).append(result)
        self.inbox_bell.set()


class MemoryBroker:
    """Everything that the memory ports share."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock = clock or SystemClock()
        self.runs: dict[str, RunState] = {}
        self.workers: dict[str, tuple[WorkerInfo, float]] = {}
        self.assignments: dict[str, str] = {}
        self.lends: dict[str, str] = {}
        self.leader: tuple[str, int, float] | None = None
        self.term = 0
        self.events: list[tuple[str, str, dict[str, Any]]] = []

    def now_ms(self) -> float:
        """The broker's clock."""
        return self.clock.now_s() * 1000

    async def wait(self, bell: asyncio.Event, timeout_s: float) -> None:
        """Wait for a bell, at most `timeout_s`."""
        try:
            await asyncio.wait_for(bell.wait(), timeout_s)
        except TimeoutError:
            return
        bell.clear()
