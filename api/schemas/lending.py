"""What the api says of lending: what serving teams said, what it comes to, what it cost and gave, and the plan."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictInt, model_validator

from ...fabric.contract.limits import SLOT_COUNT_MAX
from ...fabric.rules.lending.terms import TEXT_LENGTH_MAX, WINDOW_COUNT_MAX
from .base import Model

Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Slots = Annotated[StrictInt, Field(ge=0, le=SLOT_COUNT_MAX)]


class LendTermsView(Model):
    """What of a worker may be lent now: the strictest of all that was said."""

    mode: str
    """on; observe: measure what could be lent, and lend nothing; off."""
    slot_count_max: int | None
    compute_fraction_max: float | None
    memory_fraction_max: float | None
    reason: str
    """Whose word decides, and why."""


class LendSettingView(Model):
    """What was said of a worker, a pool or all; null: no bound."""

    subject: str
    """A worker's id, pool:NAME, or * for all."""
    mode: str
    slot_count_max: int | None
    compute_fraction_max: float | None
    memory_fraction_max: float | None
    hours: list[str]
    """UTC; none: always."""
    said_by: str
    reason: str
    said_at_ms: int
    """By the broker's clock."""
    names: list[str]
    """Of * that is on: the pools and workers that it is said of; later ones observe."""


class LendRequest(BaseModel):
    """What a serving team says. What is left out stays as it is; a bound of null is taken away."""

    model_config = ConfigDict(extra="forbid")

    value: Literal["on", "observe", "off"] | Slots | None = Field(
        default=None,
        description="on: lend whatever is spare, with as many slots as there are; observe: lend nothing, measure; "
        "off: take everything back now; a number: at most so many slots",
    )
    mode: Literal["on", "observe", "off", "clear"] | None = Field(
        default=None, description="As value, but the slots stay as they are; clear: nothing is said of it any more"
    )
    slot_count_max: Slots | None = None
    compute_fraction_max: Share | None = Field(default=None, description="Share of the device's time")
    memory_fraction_max: Share | None = Field(default=None, description="Share of the KV cache")
    hours: list[str] | None = Field(
        default=None, max_length=WINDOW_COUNT_MAX, description='When, UTC: "mon-fri 22:00-06:00"; null or none: always'
    )
    reason: str = Field(default="", max_length=TEXT_LENGTH_MAX, description="Why; kept with the switch")
    future: bool = Field(default=False, description="The name may be one that nobody has yet")

    @model_validator(mode="after")
    def _says_one_thing(self) -> LendRequest:
        said = self.model_fields_set
        if any(name in said and getattr(self, name) is None for name in ("value", "mode")):
            raise ValueError("null is no value and no mode: leave it out")
        if not said - {"reason", "future"}:
            raise ValueError("say a value, a mode, a bound or hours")
        if {"value"} < said & {"value", "mode", "slot_count_max"}:
            raise ValueError("value says mode and slots itself: leave those out, or value")
        return self

    def changes(self) -> dict[str, Any]:
        """The fields of a setting that it changes."""
        found = {name: getattr(self, name) for name in self.model_fields_set - {"value", "future"}}
        if "value" in self.model_fields_set:
            is_lent = self.value not in ("observe", "off")
            slots = {"slot_count_max": self.value if isinstance(self.value, int) else None} if is_lent else {}
            found |= {"mode": "on" if is_lent else self.value, **slots}
        if "hours" in found:
            found["hours"] = found["hours"] or []
        return {**found, "reason": self.reason}


class Lend(Model):
    """The switch as it is now."""

    worker_id: str
    """What it was said of: a worker, pool:NAME, or * for all."""
    value: str
    worker_ids: list[str]
    """Serving workers alive now that it holds for."""
    lending_ids: list[str]
    """Those of them that may lend now."""
    taken_ids: list[str]
    """Those that ran turns and may lend no more."""
    turn_count: int
    """Turns that ran there."""
    waiting: dict[str, int]
    """Those that have not said yet that nothing runs, with the turns that they told last."""
    setting: LendSettingView | None = None
    """Null: nothing is said of it any more."""


class LendingWorker(Model):
    """A serving worker: what its team allows, what it was given, and what its guard does with it."""

    worker_id: str
    pool: str
    is_fresh: bool
    terms: LendTermsView
    slot_count: int
    """Of its lease; 0: none."""
    guard_state: str | None
    guard_reason: str | None
    open_fraction: float | None
    headroom_fraction: float | None
    probe: str | None
    plan_reason: str | None


class Lending(Model):
    """All that was said, and what it comes to."""

    settings: list[LendSettingView]
    workers: list[LendingWorker]


class SharingView(Model):
    """What sharing one device cost and gave, since its worker started."""

    worker_id: str
    since_s: float
    """For how long it has measured."""
    ttft_slo_ms: float
    tpot_slo_ms: float
    alone: dict[str, float]
    """Serving requests in whose time no rollout computed: their number, latencies, and the part within objectives."""
    shared: dict[str, float]
    """The others."""
    violation_count: int
    """Of the latter, beyond an objective."""
    few: list[str]
    """P99s of too few requests, as alone.ttft_ms_p99: no request that was measured bounds them from above."""
    ttft_tax_p50: float | None
    """shared over alone, less one; null where one of them has no request. So are those that follow."""
    ttft_tax_p99: float | None
    tpot_tax_p50: float | None
    tpot_tax_p99: float | None
    lent_s: float
    """Under a lease."""
    computing_s: float
    """Of that, with rollouts computing."""
    could_lend_s: float
    """While it only observed: time in which rollouts could have run."""
    token_count: int
    """Rollout tokens made."""
    reclaim_count: int
    reclaim_ms_p50: float
    """From the guard's shutting to the end of the last rollout step."""
    reclaim_ms_p99: float


class SharingTotals(Model):
    """All workers together."""

    worker_count: int = 0
    alone_request_count: int = 0
    shared_request_count: int = 0
    alone_attained_fraction: float | None = None
    shared_attained_fraction: float | None = None
    violation_count: int = 0
    ttft_ms_p99_alone_worst: float | None = None
    ttft_ms_p99_shared_worst: float | None = None
    tpot_ms_p99_alone_worst: float | None = None
    tpot_ms_p99_shared_worst: float | None = None
    ttft_tax_p99_worst: float | None = None
    """The highest of any worker's; percentiles of several cannot be added up."""
    tpot_tax_p99_worst: float | None = None
    lent_s: float = 0.0
    computing_s: float = 0.0
    could_lend_s: float = 0.0
    token_count: int = 0
    reclaim_count: int = 0
    reclaim_ms_p99_worst: float | None = None


class Sharing(Model):
    """What a serving team decides on."""

    workers: list[SharingView]
    totals: SharingTotals


class PlanRowView(Model):
    """One worker's part of the plan."""

    worker_id: str
    role: str
    slot_count: int
    """0: none, for the reason."""
    run_id: str | None
    reason: str


class RunDemandView(Model):
    """What a run could use, and what it is given."""

    run_id: str
    open_count: int
    """Trajectories queued or running."""
    dedicated_count: int
    """Slots."""
    borrowed_count: int


class PlanView(Model):
    """The capacity controller's newest plan."""

    controller_id: str
    term: int
    made_at_ms: int
    """When it last changed, by the controller's clock."""
    rows: list[PlanRowView]
    runs: list[RunDemandView]


class Plan(Model):
    """The plan, if a controller has made one."""

    plan: PlanView | None
