"""What the api answers: one model per noun, with units in the names. These are promises; fields are only added."""

from __future__ import annotations

from typing import Any, Literal

from .base import Model
from .lending import LendSettingView, LendTermsView, SharingTotals
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


class CauseView(Model):
    """Why a run does or does not move."""

    code: str
    """In one word: docs/why.md lists all."""
    kind: Literal["moves", "waits", "passing", "stuck"]
    """Work moves; it waits for its trainer or its turn; it stands and this may pass; it stands until somebody acts."""
    text: str
    """One sentence."""
    step: str
    """What to do next; empty: nothing."""


class RunReadiness(Readiness):
    """Whether the work of one run can flow. missing: the sentence and next step of every cause that is in the way."""

    run_id: str
    causes: list[CauseView]
    """The most fundamental first; never empty."""


class Rates(Model):
    """Work per second over the last few seconds."""

    rollouts_per_s: float = 0.0
    turns_per_s: float = 0.0
    tokens_per_s: float = 0.0


class RewardPoint(Model):
    """Completed rollouts of some policy versions, each counted once, as the broker counted them.

    One that was completed, and later too stale to be delivered, stays counted; its rerun counts for its own version.
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
    """What a run's trainer last reported."""

    time_ms: int
    """When, by the broker's wall clock."""
    step: int | None
    reward_mean: float | None
    policy_version: int | None
    facts: dict[str, Any]
    """All that it said."""


class AgreementFigures(Model):
    """Some tokens: what the worker said of them, compared with what the trainer's model says. Nats."""

    token_count: int
    not_finite_count: int
    """Tokens for which the worker gave NaN or infinity; in no other figure."""
    logprob_difference_mean: float
    """Of |trainer − worker|."""
    logprob_difference_p99: float
    logprob_difference_max: float
    importance_sampling_ratio_mean: float
    """Of exp(trainer − worker)."""
    importance_sampling_ratio_min: float
    importance_sampling_ratio_max: float
    ratio_outside_fraction: float
    """Of tokens, with a ratio below 1/2 or above 2."""
    k3_kl: float
    """Estimate of KL(worker ‖ trainer) per token."""


class WorkerAgreement(AgreementFigures):
    """One worker's tokens of the version that was compared."""

    worker_id: str
    policy_version: int
    is_over: bool
    """It has an alarm."""


class AgreementAlarm(Model):
    """A figure over its limit."""

    worker_id: str
    """Empty: the trainer's own log-probabilities."""
    figure: str
    value: float
    limit: float
    policy_version: int
    text: str
    """What is wrong, and what to do."""


class AgreementView(Model):
    """Whether workers compute the probabilities that the trainer's model does, as last compared."""

    policy_version: int
    """Of the weights that the trainer compared with."""
    rule: str
    """float32, bfloat16, or the name of the trainer's own limits."""
    difference_mean_limit: float | None
    """On a worker's mean; null: none."""
    fresh: AgreementFigures
    """Tokens which that version sampled: here both should agree."""
    stale: AgreementFigures
    """Tokens of other versions; what these differ by is what training changed."""
    trainer_not_finite_count: int
    worker_count: int
    workers: list[WorkerAgreement]
    """The worst first, at most 64."""
    alarms: list[AgreementAlarm]


class LeaseView(Model):
    """The right to run up to `slot_count` turns of a run on a worker until a time."""

    worker_id: str
    run_id: str
    lease_epoch: int
    slot_count: int
    is_standing: bool
    """It holds until another lease replaces it."""
    lease_until_ms: int | None
    """By the clock of the run's shard, which no other agrees with; null when standing."""
    remaining_ms: int | None
    """When it was read; null when standing."""


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
    """By version; at most 128 points here, at most 256 in /v1/runs/{run_id}."""
    is_well: bool
    """Nothing has to be mended, and nothing has to pass, before its work moves."""
    causes: list[CauseView]
    """Why it does or does not move, the most fundamental first; never empty."""
    agreement: AgreementView | None = None
    """Null until a trainer compares (`run.compare`)."""


class WorkerView(Model):
    """A worker as its last heartbeat described it, with what it may do."""

    worker_id: str
    role: str
    state: str
    """ready, loading, asleep or failed."""
    waits_for: str | None = None
    """What it needs before it can take a turn, though it is well: a lease, or weights of a run."""
    error: str | None
    host: str
    pid: int
    model: str | None
    run_id: str | None
    slot_count: int
    running_count: int
    active_version: int
    """Policy version it generates with; -1: none."""
    token_count: int
    """Generated since it started."""
    tokens_per_s: float
    environments: list[str]
    rewards: list[str]
    """Reward functions that a reward worker offers."""
    headroom_fraction: float | None
    """Distance to the SLO on a serving worker; null where nothing is measured."""
    engine: str | None
    """What generates, with its version; null where nothing does."""
    prefix_hit_fraction: float | None
    """Of recent prompts' tokens, those found in the prefix cache; null while there were none."""
    wake_ms: int | None
    """What waking its engine took last; null: it never slept."""
    sleep_ms: int | None
    """What putting it to sleep took last."""
    sleep_note: str | None
    """Why its engine cannot sleep, where it was asked to."""
    versions_behind: int | None = None
    """The head of its run less the version that it holds; null where it holds none, or nothing is published."""
    stage_ms: int | None = None
    """What fetching and checking the weights that it holds took, while it generated; null before the first."""
    pause_ms: float | None = None
    """What writing them took, while it did not generate."""
    payload_bytes: int | None = None
    """Of them, as they were fetched."""
    weights_note: str | None = None
    """What its engine cannot do as its run wishes when weights change."""
    heartbeat_age_ms: int
    is_fresh: bool
    """Its heartbeat is at most 3 s old."""
    lend: str | None
    """What the serving team allows now: on, observe, off or a slot limit; null where there is no team to ask."""
    lend_terms: LendTermsView | None = None
    """The same in full, and why."""
    pool: str = ""
    """The serving workers that its team switches together."""
    guard_state: str | None = None
    """Of a serving worker's guard: open, narrow or shut; null: it has none."""
    guard_reason: str | None = None
    open_fraction: float | None = None
    """Of the last seconds, in which its guard let rollouts run."""
    probe: str | None = None
    """By what its guard sees the serving engine."""
    plan_reason: str | None = None
    """Why the capacity controller gives it what it does."""
    lease: LeaseView | None


class EventView(Model):
    """Something that happened."""

    event_id: str
    time_ms: int
    """By the broker's wall clock."""
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
    """Of workers that generate: dedicated and serving."""
    running_count: int


class BadRowView(Model):
    """A row of the broker's tables that cannot be read, and is passed over."""

    table: str
    row: str
    """Its name; empty: the whole table is of another type than it should be."""
    problem: str
    step: str
    """The command that removes it."""


class Status(Model):
    """Everything the page shows, read at one moment."""

    time_ms: int
    version: str
    readiness: Readiness
    runs: list[RunView]
    workers: list[WorkerView]
    leases: list[LeaseView]
    """Those that have not ended."""
    weights: list[WeightsView]
    lend_all: str
    """What was said of all serving workers: on, observe (also where nothing was said), off or a slot limit."""
    lending: list[LendSettingView]
    """All that serving teams said."""
    sharing: SharingTotals
    """What sharing devices with rollouts cost and gave."""
    totals: Totals
    rates: Rates
    rollouts_per_s_history: list[float]
    tokens_per_s_history: list[float]
    events: list[EventView]
    """The newest first, at most 40; without trainer.step, which `training` shows."""
    bad_rows: list[BadRowView]
    """What could not be read and was left out, at most 100."""


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


class DeadLetterView(Model):
    """A trajectory given up."""

    trajectory_id: str
    run_id: str
    worker_id: str
    reason: str
    traceback: str
    attempt: int
    job: dict[str, Any]
    """All that is needed to try it again."""


class DeadLetters(Model):
    """Some of a run's dead letters."""

    dead_count: int
    """How many there are in all."""
    dead_letters: list[DeadLetterView]
