"""The api's models of trajectories: rows of a list, one in full, and groups of them."""

from __future__ import annotations

from typing import Any, Literal

from .base import Model

State = Literal["queued", "running", "scoring", "completed", "failed", "finished"]
Kept = Literal["open", "waiting", "finished"]


class TrajectoryRow(Model):
    """A trajectory in a list."""

    trajectory_id: str
    group_id: str
    task_id: str
    state: State
    """queued, running, scoring (its reward is computed), completed (its group waits for others, or for the trainer),
    failed (a dead letter), finished (the trainer acknowledged its group; it is kept for people)."""
    place: str
    """Where it is, in words: "turn 3 on worker w1", "turn 3 waits for a worker", "environment on agent a1"."""
    worker_id: str | None
    """Who holds it or its turn now; null: nobody."""
    turn_count: int
    """Turns begun."""
    attempt: int
    """Attempts that failed before this one."""
    age_ms: int | None
    """Since an agent took it first; null: none has, or it has ended."""
    reward: float | None
    finish_reason: str | None
    completion_token_count: int
    """Tokens after the prompt, as far as turns are settled."""
    policy_version: int | None
    """The oldest that made one of its tokens; null: none yet."""
    worker_ids: list[str]
    """Whose tokens it holds, in order of first appearance."""
    ended_ms: int | None
    """When the trainer acknowledged its group, by the broker's clock; null: it has not."""


class TrajectoryCounts(Model):
    """How many there are in each list."""

    open: int
    """Trajectories that an agent has taken, and that have not ended."""
    waiting_groups: int
    finished_groups: int
    """Kept: the newest, and a sample of older ones."""


class Trajectories(Model):
    """A page of trajectories."""

    trajectories: list[TrajectoryRow]
    """state=open: the oldest first, which hold up a step; waiting: the oldest group first; finished: the newest first."""
    counts: TrajectoryCounts
    cursor: str | None
    """What to pass for the next page; null: this is the last."""


class TokenSpan(Model):
    """Tokens [start, end) of a piece, made by one worker at one policy version."""

    start: int
    end: int
    worker_id: str
    policy_version: int


class Piece(Model):
    """Tokens of a trajectory that belong together."""

    kind: Literal["prompt", "turn", "observation"]
    turn: int | None
    """The turn that made it, or that it answers; null: the prompt."""
    parent: int
    """The piece that it continues, below its own index; -1: none. A trajectory that branches is a tree of pieces."""
    ids: list[int]
    tokens: list[str]
    """The text of each token, joined the text of all; empty where no tokenizer could be loaded."""
    logprobs: list[float] | None
    """Natural logarithms, one a token; null: the policy did not make it."""
    spans: list[TokenSpan]
    is_running: bool
    """A worker is still making it; what is here was saved a moment ago."""


class TimeBar(Model):
    """What a trajectory did from start to end, in milliseconds since an agent took it."""

    kind: Literal["reset", "turn", "environment"]
    turn: int | None
    start_ms: int
    end_ms: int | None
    """Null: it goes on."""
    worker_id: str | None


class TrajectoryView(TrajectoryRow):
    """A trajectory in full."""

    run_id: str
    seed: int
    task: dict[str, Any]
    text_note: str | None
    """Why there is no text of tokens; null: there is."""
    pieces: list[Piece]
    timeline: list[TimeBar]
    rewards: list[float]
    """By turn."""
    info: dict[str, Any]
    """What the environment said last."""
    messages: list[dict[str, Any]]
    """Of chat, in order of first appearance; none where text was not chat."""
    sibling_ids: list[str]
    """All trajectories of its group, itself among them."""


class GroupRow(Model):
    """A group with its trajectories side by side."""

    group_id: str
    task_id: str
    state: Literal["open", "waiting", "finished"]
    size: int
    quorum: int
    completed_count: int
    failed_count: int
    ended_by: str | None
    ended_ms: int | None
    trajectories: list[TrajectoryRow]


class HistoryPoint(Model):
    """One sample: counters' growth since the sample before it, as rates, and levels as they were."""

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
    slot_count: int
    tokens_per_s: float
    request_count: int
    violation_count: int
    """Requests beyond an objective in whose time rollouts computed."""
    ttft_ms_p99: float
    tpot_ms_p99: float
    """Of the newest requests in whose time rollouts computed; 0: there were none."""
    ttft_ms_p99_alone: float
    tpot_ms_p99_alone: float
    ttft_slo_ms: float
    tpot_slo_ms: float


class History(Model):
    """What happened, coarse enough to draw."""

    points: list[HistoryPoint]
    """The oldest first."""
    interval_ms: int
    """Between two samples."""
    since_ms: int | None
    """When the oldest sample that is kept was taken; null: there is none."""


HistoryPoint.model_rebuild()
