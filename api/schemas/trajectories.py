"""The api's models of trajectories: pages of what fabric/inspect/trace.py shows of them."""

from __future__ import annotations

from typing import Literal

from ...fabric.inspect.trace import GroupRow, TrajectoryRow, TrajectoryView
from .base import Model

__all__ = ["GroupRow", "Groups", "Lists", "Trajectories", "TrajectoryRow", "TrajectoryView"]

Lists = Literal["open", "waiting", "finished"]


class TrajectoryCounts(Model):
    """How many there are in each list."""

    open: int
    """Trajectories that agents are at."""
    waiting_groups: int
    """Groups that are complete, and that the trainer has not acknowledged."""
    finished_groups: int
    """Groups that are kept of those it has: the newest, and ever fewer older ones."""


class Trajectories(Model):
    """A page of trajectories."""

    trajectories: list[TrajectoryRow]
    """open: those that agents are at, the oldest first: they hold up a step. waiting: group by group, in the order in
    which they were complete. finished: group by group, the newest first."""
    counts: TrajectoryCounts
    cursor: str | None
    """What to pass for the next page; null: this is the last."""


class Groups(Model):
    """A page of groups, in the order of Trajectories."""

    groups: list[GroupRow]
    counts: TrajectoryCounts
    cursor: str | None


class RunPoint(Model):
    """One run in a sample."""

    tokens_per_s: float
    rollouts_per_s: float
    groups_waiting: int
    head_version: int
    cause: str
    """The code of why it moved or did not."""


class ServingPoint(Model):
    """One serving worker in a sample: what its users saw since the sample before, and what it lent."""

    lend: str
    """What its guard did: open, narrow, shut or silent."""
    slot_count: int
    """Of its lease; 0: none."""
    tokens_per_s: float
    """Rollout tokens."""
    request_count: int
    """Serving requests in whose time rollouts computed."""
    violation_count: int
    """Of those, beyond an objective."""
    ttft_ms_p99: float
    """Of the newest of those; 0: there were none. So is the next one."""
    tpot_ms_p99: float
    ttft_ms_p99_alone: float
    """Of the newest requests in whose time no rollout computed."""
    tpot_ms_p99_alone: float
    ttft_slo_ms: float
    tpot_slo_ms: float


class HistoryPoint(Model):
    """One sample: what was counted since the sample before it, as rates, and levels as they were."""

    time_ms: int
    """By the broker's wall clock."""
    tokens_per_s: float
    rollouts_per_s: float
    lent_tokens_per_s: float
    """Of serving workers."""
    running_count: int
    slot_count: int
    groups_waiting: int
    dead_count: int
    worker_count: int
    runs: dict[str, RunPoint]
    serving: dict[str, ServingPoint]
    """By worker."""


class History(Model):
    """What happened, coarse enough to draw."""

    points: list[HistoryPoint]
    """The oldest first."""
    interval_ms: int
    """Between two samples."""
    since_ms: int | None
    """When the oldest sample that is kept was taken; null: there is none."""
