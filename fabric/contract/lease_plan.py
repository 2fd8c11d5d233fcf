"""What a capacity controller writes down: what it decides to change, its reasons, and how all went.

- A LeaseChange is what one worker's lease is to become; the board carries many out at once.
- A LeasePlan is for people and pages: the newest plan whole, a line per worker and a line per run. Only
  serving's routers act on a part of it: on extra_requests.
- A Sample is for people who look later: totals and levels of one moment, once a minute.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from .fields import check_parts, parts_of
from .records import Lease
from .wire import Record

EPOCHS_PER_TERM = 1 << 20  # one change of lease every 100 ms would use them up in 29 hours of one term


def term_of(lease: Lease) -> int:
    """Return the term of the controller that numbered this lease."""
    return lease.lease_epoch // EPOCHS_PER_TERM


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseChange:
    """A lease to publish or extend for `duration_ms` (None: standing), or one to end."""

    lease: Lease
    duration_ms: int | None = None
    is_end: bool = False
    runs: str = ""
    """All runs that the worker should look at, the one whose weights it follows in front; empty: the lease's alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRow:
    """One worker's part of the plan."""

    worker_id: str
    role: str
    slot_count: int
    """0: none, for the reason."""
    run_id: str | None
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDemand:
    """The slots that a run could use, and those that it is given; runs of the same weights may be given the same."""

    run_id: str
    open_count: int
    """Slots that it has work for: one for each trajectory queued or running, or fewer where those ask for no turn."""
    dedicated_count: int
    """Slots."""
    borrowed_count: int
    """Slots."""
    moved_at_ms: int = 0
    """The time when the controller last saw a token, a turn or an end of it, by the fabric's clock; 0: not known."""
    stale_count: int = 0
    """Trajectories that ended too stale, and run again, since one more was completed or a group consumed, as the
    controller saw."""


@dataclass(frozen=True, kw_only=True)
class LeasePlan(Record):
    """A capacity controller's plan."""

    KIND: ClassVar[int] = 12
    NESTED: ClassVar[dict[str, Any]] = {"rows": parts_of(PlanRow), "runs": parts_of(RunDemand)}

    controller_id: str
    term: int
    made_at_ms: int
    """The time when the plan last changed, since 1970, by the controller's clock."""
    rows: tuple[PlanRow, ...] = ()
    runs: tuple[RunDemand, ...] = ()
    extra_requests: dict[str, int] = field(default_factory=dict)
    """How many requests more than they have serving's router should count of which workers
    (fabric/rules/lending/advice.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSample:
    """One run at one moment. Totals since it began."""

    run_id: str
    token_count: int
    rollout_count: int
    groups_waiting: int
    dead_count: int
    head_version: int
    cause: str
    """Why it moved or did not, in one word (fabric/inspect/diagnosis.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingSample:
    """One serving worker at one moment. Totals since it started; requests are those in whose time rollouts computed."""

    worker_id: str
    guard_state: str
    """open, narrow, shut or silent; empty: it has no guard."""
    slot_count: int
    """Of its lease; 0: none."""
    token_count: int
    request_count: int
    violation_count: int
    """Of those, beyond an objective."""
    request_count_alone: int
    """Requests in whose time no rollout computed."""
    violation_count_alone: int
    ttft_ms_p99: float
    tpot_ms_p99: float
    ttft_ms_p99_alone: float
    tpot_ms_p99_alone: float
    ttft_slo_ms: float
    tpot_slo_ms: float


@dataclass(frozen=True, slots=True)
class LeaseSample:
    """What a worker held from a time on, until it held something else."""

    worker_id: str
    since_ms: int
    """By the broker's wall clock, to about a second."""
    run_id: str
    """Of its lease; empty: it had none."""
    slot_count: int
    guard_state: str
    """open, narrow, shut or silent; empty: it has no guard; gone: there was no such worker."""

    def row(self) -> list[str | int]:
        """Return it as it travels: without names, for there are many."""
        return [self.worker_id, self.since_ms, self.run_id, self.slot_count, self.guard_state]


def lease_samples(rows: list[Any]) -> tuple[LeaseSample, ...]:
    """Make samples of the plain values that arrive in metadata."""
    found = tuple(LeaseSample(*row) for row in rows)
    check_parts(found, "Sample.leases")
    return found


@dataclass(frozen=True, kw_only=True)
class Sample(Record):
    """The fabric at one moment. runs, serving: the busiest, SAMPLE_ROW_COUNT_MAX at most; totals are of all.

    leases: what changed since the sample before, each with what was until then; what lasts is said again now and then.
    """

    KIND: ClassVar[int] = 13
    NESTED: ClassVar[dict[str, Any]] = {
        "runs": parts_of(RunSample),
        "serving": parts_of(ServingSample),
        "leases": lease_samples,
    }
    ROWS: ClassVar[dict[str, Any]] = {"leases": lambda found: [each.row() for each in found]}
    IGNORES_UNKNOWN: ClassVar[bool] = True

    time_ms: int
    """By the broker's wall clock."""
    token_count: int
    rollout_count: int
    groups_waiting: int
    dead_count: int
    worker_count: int
    """Alive."""
    running_count: int
    """Turns that run, on workers that generate."""
    slot_count: int
    """Of workers that generate."""
    runs: tuple[RunSample, ...] = ()
    serving: tuple[ServingSample, ...] = ()
    leases: tuple[LeaseSample, ...] = ()
