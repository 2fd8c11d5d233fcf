"""The api's answers, with units in the names. These are promises; fields are only added.

A worker, a lease or a cause is the fabric's record, extended where the api knows more of it. A run is a selection: its
config holds options and sampling, which a reader need not see.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from ...fabric.contract.agreement import Alarm, Figures, WorkerFigures
from ...fabric.contract.records import DeadLetter, Lease, WorkerInfo
from ...fabric.inspect.diagnosis import Cause
from ...fabric.ports.queue import BadRow
from ...fabric.rules.lending.terms import LendTerms
from ...fabric.rules.serving.tax import SharingTotals
from .base import Model, Shown
from .lending import LendSettingView
from .weights import WeightsView


class Problem(Model):
    """An error."""

    error: str
    """Its kind, as named in the fabric's errors."""
    message: str
    """What is wrong, why, and what to do next."""
    facts: dict[str, Any]
    """What the message says, for programs."""


class Health(Model):
    """The process is alive."""

    status: Literal["ok"] = "ok"
    version: str


class Readiness(Model):
    """Whether work can flow."""

    is_ready: bool
    missing: list[str]
    """What is not there, each with the next step; empty when ready."""


class RunReadiness(Readiness):
    """Whether the work of one run can flow. missing: the sentence and next step of every cause that is in the way."""

    run_id: str
    causes: list[Cause]
    """The most fundamental first; never empty."""


class Rates(Model):
    """Work per second over the last few seconds."""

    rollouts_per_s: float = 0.0
    turns_per_s: float = 0.0
    tokens_per_s: float = 0.0


class RewardPoint(Model):
    """Completed rollouts of some policy versions, each counted once, as the broker counted them.

    A rollout that was completed, and later too stale to be delivered, stays counted; its rerun counts for its version.
    """

    step: int | None
    """Always null; what a trainer calls a step is in `training`."""
    reward_mean: float | None
    """Null, as the next three: not finite."""
    policy_version: int | None
    """The first of them, by each rollout's oldest token; null: rollouts without tokens."""
    version_count: int = 1
    """Versions in one point, the same for all points."""
    rollout_count: int = 0
    reward_deviation: float | None = None
    """Standard deviation."""
    reward_min: float | None = None
    reward_max: float | None = None
    completion_tokens_mean: float = 0.0


class Training(Model):
    """The last report of a run's trainer."""

    time_ms: int
    """The time of the report, by the broker's wall clock."""
    step: int | None
    reward_mean: float | None
    policy_version: int | None
    facts: dict[str, Any]
    """All that it said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerAgreement(Shown, WorkerFigures):
    """One worker's tokens of the version that was compared."""

    is_over: bool
    """It has an alarm."""


class AgreementView(Model):
    """Whether workers compute the probabilities that the trainer's model does, as last compared."""

    policy_version: int
    """The version of the weights that the trainer compared with."""
    rule: str
    """float32, bfloat16, or the name of the trainer's own limits."""
    difference_mean_limit: float | None
    """The limit on a worker's mean; null: none."""
    fresh: Figures
    """Tokens which that version sampled: here both should agree."""
    stale: Figures
    """Tokens of other versions; what these differ by is what training changed."""
    trainer_not_finite_count: int
    worker_count: int
    workers: list[WorkerAgreement]
    """The worst first, at most 64."""
    alarms: list[Alarm]


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseView(Shown, Lease):
    """The right to run up to `slot_count` turns of a run on a worker until a time."""

    is_standing: bool = field()
    """It holds until another lease replaces it."""


class RunView(Model):
    """A run in numbers."""

    run_id: str
    model: str
    environment: str
    reward: str | None
    """Registered reward function; null: the environment's own."""
    staleness: int
    """Policy versions behind the head that may still generate."""
    weight: float
    """Share of the pool among runs."""
    head_version: int
    """Newest published version; -1: none yet."""
    depth: int
    """Trajectories submitted and not yet consumed."""
    trajectory_count_max: int
    """Above this depth a push is refused."""
    memory_bytes: int
    """Jobs and rollouts that the broker holds for the run."""
    memory_bytes_max: int
    """Above this a push is refused, and only what is urgent is started while complete groups wait."""
    trajectories: dict[str, int]
    """Unfinished trajectories by state: queued, running, scoring."""
    turns: dict[str, int]
    """Unfinished turns by state: ready, claimed."""
    groups_waiting: int
    """Complete groups that the trainer has not yet acknowledged."""
    dead_count: int
    """Trajectories in the dead letters."""
    counters: dict[str, int]
    """Totals since the run began."""
    rates: Rates
    rollouts_per_s_history: list[float]
    """One value per second, the newest last, at most 120."""
    training: Training | None
    """Null until a trainer reports a step."""
    reward_curve: list[RewardPoint]
    """Rewards by version; at most 128 points here, at most 256 in /v1/runs/{run_id}."""
    is_well: bool
    """Nothing has to be mended, and nothing has to pass, before its work moves."""
    causes: list[Cause]
    """Why it does or does not move, the most fundamental first; never empty."""
    agreement: AgreementView | None = None
    """Null until a trainer compares (`run.compare`)."""


@dataclass(frozen=True, kw_only=True)
class WorkerView(Shown, WorkerInfo):
    """A worker as its last heartbeat described it, with what it may do."""

    tokens_per_s: float = field()
    """Over the last few seconds, as its heartbeats counted them."""
    versions_behind: int | None
    """The head of its run less the version that it holds; null where it holds none, or nothing is published."""
    heartbeat_age_ms: int
    is_fresh: bool
    """Its heartbeat is at most 3 s old."""
    lend: str | None
    """The serving team's setting now: on, observe, off or a slot limit; null where there is no team to ask."""
    lend_terms: LendTerms | None
    """The team's terms in full, and why."""
    plan_reason: str | None
    """Why the capacity controller gives it what it does."""
    lease: LeaseView | None


class EventView(Model):
    """Something that happened."""

    event_id: str
    time_ms: int
    """The time of the event, by the broker's wall clock."""
    kind: str
    facts: dict[str, Any]


class Totals(Model):
    """Sums over all runs and workers."""

    trajectories: dict[str, int]
    turns: dict[str, int]
    groups_waiting: int
    dead_count: int
    counters: dict[str, int]
    worker_count: int
    slot_count: int
    """Slots of workers that generate: dedicated and serving."""
    running_count: int


@dataclass(frozen=True, slots=True)
class BadRowView(Shown, BadRow):
    """A row of the broker's tables that cannot be read, and is passed over."""

    step: str = field()
    """The command that removes it."""


class Status(Model):
    """Everything the page shows, read at one moment."""

    time_ms: int
    version: str
    readiness: Readiness
    runs: list[RunView]
    workers: list[WorkerView]
    leases: list[LeaseView]
    """The leases that have not ended."""
    weights: list[WeightsView]
    lend_all: str
    """The setting of all serving workers: on, observe (also where nothing was said), off or a slot limit."""
    lending: list[LendSettingView]
    """All that serving teams said."""
    sharing: SharingTotals
    """The cost and gain of sharing devices with rollouts."""
    totals: Totals
    rates: Rates
    rollouts_per_s_history: list[float]
    tokens_per_s_history: list[float]
    events: list[EventView]
    """The newest first, at most 40; without trainer.step, which `training` shows."""
    bad_rows: list[BadRowView]
    """Rows that could not be read and were left out, at most 100."""


class Runs(Model):
    """All runs."""

    runs: list[RunView]


class Workers(Model):
    """All workers."""

    workers: list[WorkerView]


class Leases(Model):
    """All leases that have not ended."""

    leases: list[LeaseView]


class Weights(Model):
    """Weights of all runs."""

    weights: list[WeightsView]


class DeadLetters(Model):
    """Some of a run's dead letters."""

    dead_count: int
    """The number of dead letters in all."""
    dead_letters: list[DeadLetter]
