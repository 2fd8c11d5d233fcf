"""The api's models of lending: settings of serving teams, their outcome, costs and gains, and the plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, StrictInt, model_validator

from ...fabric.contract.lease_plan import LeasePlan
from ...fabric.contract.limits import SLOT_COUNT_MAX
from ...fabric.contract.sharing import LendSetting, SharingReport
from ...fabric.rules.lending.terms import TEXT_LENGTH_MAX, WINDOW_COUNT_MAX, LendTerms
from ...fabric.rules.serving.tax import SharingTotals
from .base import Model, Request, Shown

Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Slots = Annotated[StrictInt, Field(ge=0, le=SLOT_COUNT_MAX)]


@dataclass(frozen=True, kw_only=True)
class LendSettingView(Shown, LendSetting):
    """The setting of a worker, a pool or all; null: no bound."""

    subject: str
    """A worker's id, pool:NAME, or * for all."""


class LendRequest(Request):
    """A serving team's change. A field that is left out stays as it is; a bound of null is taken away."""

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
        """Return the fields of a setting that the request changes."""
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
    """The subject of the switch: a worker, pool:NAME, or * for all."""
    value: str
    worker_ids: list[str]
    """Serving workers alive now that it holds for."""
    lending_ids: list[str]
    """The workers among them that may lend now."""
    taken_ids: list[str]
    """The workers that ran turns and may lend no more."""
    turn_count: int
    """Turns that ran there."""
    waiting: dict[str, int]
    """The workers that have not said yet that nothing runs, with the turns that they told last."""
    setting: LendSettingView | None = None
    """The setting; null: nothing is said of it any more."""


class LendingWorker(Model):
    """A serving worker: what its team allows, what it was given, and what its guard does with it."""

    worker_id: str
    pool: str
    is_fresh: bool
    terms: LendTerms
    slot_count: int
    """Slots of its lease; 0: none."""
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


@dataclass(frozen=True, kw_only=True)
class SharingView(Shown, SharingReport):
    """Costs and gains of sharing one device, since its worker started."""

    few: list[str]
    """P99s of too few requests, as alone.ttft_ms_p99: no request that was measured bounds them from above."""
    ttft_tax_p50: float | None
    """shared over alone, less one; null where one of them has no request. So are those that follow."""
    ttft_tax_p99: float | None
    tpot_tax_p50: float | None
    tpot_tax_p99: float | None


class Sharing(Model):
    """The figures that a serving team decides on."""

    workers: list[SharingView]
    totals: SharingTotals


class RouterAdvice(Model):
    """Advice to the router in front of serving engines, to be read once a second and forgotten after three."""

    extra_requests: dict[str, int]
    """By serving worker: how many requests more than its engine has the router should count, when it looks for the one
    with the fewest; 0 for all others. Empty where nothing is advised, and where no controller has been heard of for
    3 s."""


class Plan(Model):
    """The plan, if a controller has made one."""

    plan: LeasePlan | None
