"""The api's models of trajectories: pages of what fabric/inspect shows of them, and what happened before."""

from __future__ import annotations

from typing import Literal

from ...fabric.inspect.history import HistoryPoint, LendingVerdict
from ...fabric.inspect.trace import GroupRow, TrajectoryRow, TrajectoryView
from .base import Model

__all__ = ["GroupRow", "Groups", "History", "Lists", "Trajectories", "TrajectoryRow", "TrajectoryView"]

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


class History(Model):
    """What happened, coarse enough to draw."""

    points: list[HistoryPoint]
    """The oldest first: one a minute, as a controller takes samples; where they are too many, some together."""
    since_ms: int | None
    """When the oldest of them began, by the broker's wall clock; null: nothing is kept of that time."""
    lending: list[LendingVerdict]
    """Whether lending hurt anybody's users in that time, by serving worker, the worst first."""
