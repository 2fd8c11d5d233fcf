"""Work under way: a step's groups, their trajectories, and the turns that these ask for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from .workload import Group, StepPlan, TrajectoryPlan


@dataclass(slots=True)
class GroupState:
    """A group under way. missing: trajectories that are not complete; made: tokens of those that are."""

    batch: Batch
    index: int
    quorum: int
    missing: int
    made: int = 0


@dataclass(slots=True)
class Batch:
    """A training step's work under way."""

    plan: StepPlan
    on_done: Callable[[list[Group]], None]
    began_s: float
    missing_groups: int
    groups: list[GroupState] = field(default_factory=list)
    open: dict[int, Trajectory] = field(default_factory=dict)
    is_done: bool = False


class Trajectory:
    """A trajectory under way: its next turn, and the tokens before it.

    made: tokens of its turns that ended. agent: the one that has it; None: it waits for one. fence: how often an agent
    has died with it. is_followed: whether its agent waits for its turn; while the trajectory is replayed, it does not.
    """

    __slots__ = (
        "agent",
        "context_tokens",
        "fence",
        "fresh_tokens",
        "group",
        "index",
        "is_followed",
        "is_over",
        "made",
        "number",
        "oldest_version",
        "plan",
        "turn",
    )

    def __init__(self, number: int, plan: TrajectoryPlan, group: GroupState) -> None:
        self.number, self.plan, self.group = number, plan, group
        self.index = self.made = 0
        self.context_tokens = self.fresh_tokens = plan.prompt_tokens
        self.turn: Turn | None = None
        self.oldest_version = -1  # of the policies that made it; -1: none did yet
        self.is_over = self.is_followed = False
        self.agent: int | None = None
        self.fence = 0


class Turn:
    """A turn that somebody asked for.

    context_tokens: before its own tokens; fresh_tokens of these were computed nowhere. engine: the name of the one that
    has it; "": none. home: the one that made the turn before. read_tokens: of its prompt, what its engine computes.
    name: its key, for rules that know turns by a text. saved: of its tokens, those that the broker has; renewed_at_s:
    when its claim was renewed.
    """

    __slots__ = (
        "begun_s",
        "context_tokens",
        "end_step",
        "engine",
        "first_made",
        "first_s",
        "fresh_tokens",
        "home",
        "is_over",
        "key",
        "left_prefill",
        "made",
        "name",
        "output_tokens",
        "read_tokens",
        "renewed_at_s",
        "saved",
        "since_step",
        "trajectory",
        "version",
        "waits_since_s",
        "was_held",
    )

    def __init__(self, trajectory: Trajectory, index: int, context_tokens: int, fresh: int, output: int) -> None:
        self.trajectory = trajectory
        self.key = (trajectory.number, index)
        self.name = str(self.key)
        self.context_tokens, self.fresh_tokens, self.output_tokens = context_tokens, fresh, output
        self.made = self.saved = self.left_prefill = self.read_tokens = self.since_step = self.end_step = 0
        self.first_made, self.first_s = 0, 0.0  # with its first token at its engine: its tokens then, and when
        self.begun_s = self.waits_since_s = self.renewed_at_s = 0.0
        self.version = -1  # of the policy that began it
        self.was_held = self.is_over = False
        self.engine = self.home = ""
