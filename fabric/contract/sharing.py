"""How a GPU is shared with its serving team: what the team allows, and what came of it.

- A LendSetting is one thing that a team said, about a worker, a pool of workers, or all ("*"). What follows from all of
  them is decided by rules/lending/terms.py.
- A SharingReport is what a serving worker's guard measured since the worker started: what the team decides on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from .wire import Record

ALL = "*"
POOL = "pool:"  # prefix of a pool's name as a subject


@dataclass(frozen=True, kw_only=True)
class LendSetting(Record):
    """A serving team's setting for one subject: a worker's id, "pool:NAME", or "*"."""

    KIND: ClassVar[int] = 10

    mode: str
    """on; observe: measure and show what could be lent, lend nothing; off: also revokes, at once."""
    slot_count_max: int | None = None
    """A hard cap, as the next two; null: none."""
    compute_fraction_max: float | None = None
    """A share of the device's time."""
    memory_fraction_max: float | None = None
    """A share of the KV cache."""
    hours: list[str] = field(default_factory=list)
    """The times when it may be lent, as "mon-fri 22:00-06:00" in UTC; none: always."""
    said_by: str = ""
    reason: str = ""
    said_at_ms: int = 0
    """The time when it was said, by the broker's clock."""
    names: list[str] = field(default_factory=list)
    """The pools ("pool:NAME") and workers without one that "on" for * is said of; later ones observe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Latencies:
    """Serving requests that ended, and their latencies; 0 requests: all other figures are 0. So is a TPOT without any.

    request_count, attained_fraction (of them, within both objectives): since the worker started. Latencies: of the
    newest ones: ttft_count of them, of which tpot_count had a second token, over the last span_s before the newest one
    ended. low and high: between them lies the true P99, with 95 %; 0: so few requests cannot say.
    """

    request_count: int = 0
    ttft_ms_p50: float = 0.0
    ttft_ms_p99: float = 0.0
    tpot_ms_p50: float = 0.0
    tpot_ms_p99: float = 0.0
    attained_fraction: float = 0.0
    span_s: float = 0.0
    ttft_count: int = 0
    tpot_count: int = 0
    ttft_ms_p99_low: float = 0.0
    ttft_ms_p99_high: float = 0.0
    tpot_ms_p99_low: float = 0.0
    tpot_ms_p99_high: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardView:
    """A guard's view and verdict of now.

    state: "open" (rollouts may run all their tokens), "narrow" (some), "shut" (none), "silent" (it has not been heard
    of, so whether they run is not known). shut_s: for how long it has been
    shut. headroom_fraction: distance to the SLO of the request that is nearest to it, [0, 1]; None: none measured.
    open_fraction: of the last seconds, in which rollouts were allowed to run. kv_tokens_max: tokens of KV cache that
    rollouts may hold; None: no bound. step_error_p50, step_error_p95: relative error of predicted serving steps.
    """

    state: str = "shut"
    reason: str = "there is no probe yet"
    shut_s: float = 0.0
    headroom_fraction: float | None = None
    load_fraction: float | None = None
    request_count: int | None = None
    open_fraction: float = 0.0
    kv_tokens_max: int | None = None
    step_error_p50: float | None = None
    step_error_p95: float | None = None
    probe: str = ""  # what it sees by: "vllm", "metrics", "transformers"
    probe_age_ms: float = 0.0
    probe_trouble: str | None = None  # why the serving engine is not seen, and what to do


@dataclass(frozen=True, kw_only=True)
class SharingReport(Record):
    """Costs and gains of sharing one device, since its worker started."""

    KIND: ClassVar[int] = 11
    IGNORES_UNKNOWN: ClassVar[bool] = True

    worker_id: str
    since_s: float = 0.0
    """The time for which it has measured."""
    ttft_slo_ms: float = 0.0
    tpot_slo_ms: float = 0.0
    alone: dict[str, float] = field(default_factory=dict)
    """Serving requests in whose time no rollout computed: their number, latencies, and the part within objectives."""
    shared: dict[str, float] = field(default_factory=dict)
    """Serving requests in whose time rollouts computed: the same figures."""
    violation_count: int = 0
    """Shared requests beyond an objective."""
    lent_s: float = 0.0
    """Time under a lease."""
    computing_s: float = 0.0
    """Time under a lease in which rollouts computed."""
    could_lend_s: float = 0.0
    """While it only observed: time in which rollouts could have run."""
    token_count: int = 0
    """Rollout tokens made."""
    reclaim_count: int = 0
    reclaim_ms_p50: float = 0.0
    """The time from a serving request's arrival to the end of the rollout step that it found."""
    reclaim_ms_p99: float = 0.0
