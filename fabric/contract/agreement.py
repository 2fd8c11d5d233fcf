"""Log-probability agreement, as it is kept and shown: one record per run, of the batch that was compared last.

- A *difference* is |trainer − worker|, in nats; an *importance ratio* is exp(trainer − worker): 1 where both agree.
- *Fresh* tokens were sampled by the very version that the trainer compared with: there, both should agree.
- Every figure is finite. Tokens for which a worker gave NaN or infinity are counted, and left out of all else.

trainer/agreement.py makes the figures, and says what raises an alarm.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any, ClassVar

from .fields import parts_of
from .records import Float32, Int32
from .wire import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Some tokens: what the worker said of them, compared with what the trainer's model says. Nats."""

    token_count: int = 0
    not_finite_count: int = 0
    """Tokens for which the worker gave NaN or infinity; in no other figure."""
    logprob_difference_mean: float = 0.0
    """The mean of |trainer − worker|."""
    logprob_difference_p99: float = 0.0
    logprob_difference_max: float = 0.0
    importance_sampling_ratio_mean: float = 1.0
    """The mean of exp(trainer − worker)."""
    importance_sampling_ratio_min: float = 1.0
    importance_sampling_ratio_max: float = 1.0
    ratio_outside_fraction: float = 0.0
    """The fraction of tokens with a ratio below 1/2 or above 2."""
    k3_kl: float = 0.0
    """k3 estimate of KL(worker ‖ trainer) per token, never below 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFigures(Figures):
    """Fresh tokens of one worker; `not_finite_count` is of all its tokens, for NaN is wrong at any version."""

    worker_id: str
    policy_version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AlarmRule:
    """The most that a worker's fresh tokens may differ; None: any.

    token_count_min: fewer tokens say too little about a mean or a fraction, and are judged by their largest alone.
    """

    name: str
    difference_mean_limit: float | None = None
    difference_max_limit: float | None = None
    outside_fraction_limit: float | None = None
    k3_kl_limit: float | None = None
    token_count_min: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """One figure over its limit."""

    worker_id: str
    """The worker to blame; empty: the trainer's own log-probabilities."""
    figure: str
    value: float
    limit: float
    policy_version: int
    text: str
    """What is wrong, and what to do."""


@dataclass(frozen=True, kw_only=True)
class Agreement(Record):
    """A batch of rollouts, compared with the trainer's model at `policy_version`.

    stale: tokens that another version sampled, or that were sampled behind another version's keys and values; what they
    differ by is what training changed, so they raise no alarm. workers: the worst first, at most WORKER_COUNT_MAX of
    `worker_count`; one whose alarm is still open stays, with the version that it was compared at.
    """

    KIND: ClassVar[int] = 9
    NESTED: ClassVar[dict[str, Any]] = {
        "fresh": lambda row: Figures(**row),
        "stale": lambda row: Figures(**row),
        "rule": lambda row: AlarmRule(**row),
        "workers": parts_of(WorkerFigures),
        "alarms": parts_of(Alarm),
    }

    policy_version: int
    rule: AlarmRule
    fresh: Figures = Figures()
    stale: Figures = Figures()
    trainer_not_finite_count: int = 0
    worker_count: int = 0
    workers: tuple[WorkerFigures, ...] = ()
    alarms: tuple[Alarm, ...] = ()

    def metrics(self) -> dict[str, float]:
        """Return the batch in numbers, to be reported with a training step."""
        fresh = self.fresh
        return {
            "logprob_difference_mean": fresh.logprob_difference_mean,
            "logprob_difference_max": fresh.logprob_difference_max,
            "importance_sampling_ratio_mean": fresh.importance_sampling_ratio_mean,
            "importance_sampling_ratio_min": fresh.importance_sampling_ratio_min,
            "importance_sampling_ratio_max": fresh.importance_sampling_ratio_max,
            "k3_kl": fresh.k3_kl,
            "compared_token_count": float(fresh.token_count),
            "stale_token_count": float(self.stale.token_count),
            "agreement_alarm_count": float(len(self.alarms)),
        }


@dataclass(frozen=True, kw_only=True)
class TokenDifferences(Record):
    """How far a trainer's log-probabilities of a rollout's tokens are from the workers', token by token: for people.

    differences: float32, shape (T,), trainer − worker in nats, aligned with completion_ids; NaN where the policy did
    not make the token, or one of the two is not finite.
    """

    KIND: ClassVar[int] = 14
    ARRAYS: ClassVar[dict[str, str]] = {"differences": "f4"}

    trajectory_id: str
    policy_version: int
    """Of the weights that the trainer computed with."""
    mark: int
    """Of the tokens that were compared (`mark_of`): a trajectory may have run again since."""
    differences: Float32


def mark_of(completion_ids: Int32) -> int:
    """Return a number that tells the tokens of one attempt from another's."""
    return zlib.crc32(completion_ids.tobytes())
