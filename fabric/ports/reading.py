"""What people may ask of trajectories: read, and never changed. Beside the ports that trajectories pass (queue.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from ..contract.agreement import TokenDifferences
from ..contract.errors import InputError
from ..contract.records import DeadLetter, Rollout, TokenLog, TrajectoryJob, TurnJob, TurnResult

GroupState = Literal["open", "waiting", "finished"]


def no_cursor(cursor: str) -> InputError:
    """Make the error for a cursor that no page gave."""
    return InputError(f"{cursor[:60]!r} is no cursor: pass the one of the last page, or none", name="cursor")


def place_of(cursor: str) -> int:
    """Read the cursor of a list whose pages begin at a number. Raises InputError."""
    if cursor and not (cursor.isascii() and cursor.isdigit()):
        raise no_cursor(cursor)
    return int(cursor or 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a trajectory has come. Its tokens are not in here.

    state: of its record (ready, claimed, scoring, completed, failed); "": there is none. begun_ms: since when agents
    have been at it, by its shard's clock; None: none has, or it is over. turn_count: turns asked for, of which
    settled_count are settled. turn_state, turn_worker_id: of the last of them; "" and None: there is none, nobody.
    """

    trajectory_id: str
    state: str = ""
    worker_id: str | None = None
    attempt: int = 0
    begun_ms: int | None = None
    now_ms: int = 0
    turn_count: int = 0
    settled_count: int = 0
    turn_state: str = ""
    turn_worker_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenGroup:
    """A group as it is in the broker.

    state: open; waiting (complete, for a trainer); finished (acknowledged, and kept for people). rollouts: by
    trajectory. unread: why others cannot be read. progress: of all that have no rollout. letters: of those that were
    given up. ended_ms: when it was acknowledged, by the broker's wall clock. differences: of the one trajectory that
    was asked for, where a trainer compared it.
    """

    group_id: str
    state: GroupState
    task_id: str
    task: dict[str, Any]
    size: int
    quorum: int
    completed_count: int
    failed_count: int
    ended_by: str | None = None
    ended_ms: int | None = None
    rollouts: dict[str, Rollout] = field(default_factory=dict)
    unread: dict[str, str] = field(default_factory=dict)
    progress: dict[str, Progress] = field(default_factory=dict)
    letters: dict[str, DeadLetter] = field(default_factory=dict)
    differences: TokenDifferences | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenTrajectory:
    """A trajectory as it is in the broker.

    results: of its settled turns, while it runs. turn: the one under way, with what was saved of it.
    """

    trajectory_id: str
    group: SeenGroup
    job: TrajectoryJob | None = None
    results: tuple[TurnResult, ...] = ()
    turn: TurnJob | None = None
    turn_log: TokenLog | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """begun: trajectories that agents are at. waiting, finished: groups."""

    begun: int
    waiting: int
    finished: int


class TrajectoryReader(Protocol):
    """The trajectories of one run, for people. Raises BrokerError; of reason "refused" where its user may not read."""

    async def counts(self) -> Counts: ...
    async def begun(self, first: int, count: int) -> list[Progress]:
        """Return trajectories that agents are at, the oldest first, from the `first`-th on."""
        ...

    async def groups(self, state: GroupState, count: int, cursor: str) -> tuple[list[SeenGroup], str]:
        """Return groups, and a cursor to go on from; "": the beginning, or the end.

        In order: open ones by their oldest trajectory, waiting ones by when they were complete, finished ones the
        newest first.
        """
        ...

    async def find(self, trajectory_id: str) -> SeenTrajectory | None:
        """Return a trajectory; None: it is not in the broker, or not any more."""
        ...

    async def letters(self, trajectory_ids: Sequence[str]) -> dict[str, DeadLetter]:
        """Return the dead letters of those that were given up."""
        ...
