"""The guard of one rollout engine beside one serving engine: what it has learned, and what it lets run now.

- `look` is asked before every rollout step, in the process that makes the step: no broker, no controller and no other
  process has a part in the answer. The decision itself is fabric/rules/serving/guard.py.
- It learns from what the probe shows: how long steps of both engines take, and how requests arrive. Steps in whose time
  the other engine computed are no measure of an engine alone, and are kept apart.
- It never lets more run than the team's caps allow, and nothing at all while it only observes.

No IO and no clock of its own: times are given, in seconds of the machine's monotonic clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

from ....fabric.contract.sharing import GuardView
from ....fabric.rules.serving.burst import Answers, Arrivals, BurstRule, arrived, load_fraction, reserve_s
from ....fabric.rules.serving.facts import ServingState, Slo, StepSample, StepWork
from ....fabric.rules.serving.guard import Allowance, GuardFacts, GuardRule, decide
from ....fabric.rules.serving.step_time import StepErrors, StepModel, cold, predict, refit
from ..probes.reader import Arrival, End, Step
from .ledger import SharingLedger

Policy = Callable[[GuardFacts, GuardRule], Allowance]

OPEN_S = 2.0  # memory of the open fraction and of the least headroom
TRIAL_FACTOR_MAX = 64.0
CAP_S = 1.0  # a cap on compute holds over this long


class Probe(Protocol):
    """Shows a serving engine; serving/probes/reader.py has the one for vLLM's plug-in."""

    @property
    def name(self) -> str: ...
    def read(self, now_s: float) -> ServingState | None: ...
    def new_arrivals(self) -> list[Arrival]: ...
    def new_steps(self) -> list[Step]: ...
    def new_ends(self) -> list[End]: ...


@dataclass(frozen=True, kw_only=True)
class GuardConfig:
    """The settings of a guard; they travel to the engine's process as a row of plain values."""

    probe: str
    """Path of a probe's page."""
    slo_ttft_ms: float
    slo_tpot_ms: float
    probe_name: str = "vllm"
    """The program that writes that page."""
    probe_owner_uid: int | None = None
    """A user whose page is believed, beside root's and that of the worker's own user."""
    rule: GuardRule = field(default_factory=GuardRule)
    burst: BurstRule | None = None
    """The reserve's rule; None: as the objectives ask for."""
    yields: bool = False
    """Whether the thread that computes on a CPU gives way within a step; see engines/vllm/step/scheduler.py."""
    is_mps_client: bool = False
    """Whether both engines are clients of one MPS server, and a kill in the middle of a step may end serving's too."""
    policies: tuple[str, ...] = ()
    """Other rules to measure ours against, as "module:factory"; policy 0 is ours."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options that those rules are given."""

    def row(self) -> dict[str, Any]:
        """Return plain values, as `of_row` reads them."""
        return asdict(self)

    @classmethod
    def of_row(cls, row: dict[str, Any]) -> GuardConfig:
        """Build a config from what `row` returned."""
        rule, burst = GuardRule(**row["rule"]), BurstRule(**row["burst"]) if row["burst"] else None
        return cls(**{**row, "rule": rule, "burst": burst, "policies": tuple(row["policies"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardOrders:
    """The orders to a guard, which may change at any time.

    until_s: nothing is lent after it, unless it is said again: whoever gives orders may hang. compute_fraction_max: of
    the device's time; None: no cap. policy: 0 is ours.
    """

    is_lent: bool = False
    until_s: float = math.inf
    compute_fraction_max: float | None = None
    policy: int = 0


class GuardPort(Protocol):
    """The worker's side of the guard of its engine, wherever that runs."""

    def order(self, orders: GuardOrders) -> None:
        """Give orders that hold from the next step on."""
        ...

    def view(self) -> GuardView:
        """Return what the guard sees and does, at most some hundred milliseconds old."""
        ...

    def sharing(self) -> dict[str, Any] | None:
        """Return the fields of a SharingReport, without the worker's id and token count; None: nothing measured yet."""
        ...


class Guard:
    """Decides for one rollout engine (see the module). Takes one caller at a time."""

    def __init__(self, config: GuardConfig, probe: Probe, policies: Sequence[Policy] = ()) -> None:
        self.orders = GuardOrders()
        self._config = config
        self._slo = Slo(ttft_ms=config.slo_ttft_ms, tpot_ms=config.slo_tpot_ms)
        self._burst = config.burst or BurstRule.of(self._slo)
        self._probe = probe
        self._policies: tuple[Policy, ...] = (decide, *policies)
        self._serving = self._rollout = cold(0.03, 0.0002, 0.0005)
        self._errors = StepErrors()
        self._arrivals, self._answers = Arrivals(), Answers()
        self._first_new_arrival_s: float | None = None
        self._ledger = SharingLedger(self._slo)
        self._allowance = Allowance(step_tokens=0, reason="there is no probe yet")
        self._state: ServingState | None = None
        self._looked_at_s: float | None = None
        self._shut_at_s: float | None = None
        self._open_fraction = 0.0
        self._headroom = 1.0
        self._computed_s = 0.0  # of late, forgotten over CAP_S
        self._stepped_at_s = 0.0
        self._trial_factor = 1.0  # doubles with every trial that changed nothing

    # ---- deciding

    def look(self, now_s: float, work: StepWork, *, is_idle: bool = False) -> Allowance:
        """Decide how much of `work` may run in a step that begins now.

        is_idle: there is no work; the caller asks how much could run.
        """
        self._state = self._probe.read(now_s)
        self._hear()
        self._learn()
        allowance = self._decide(now_s, work)
        still_s = (now_s - self._stepped_at_s) / self._trial_factor
        if allowance.may_try and still_s >= self._config.rule.trial_s:
            # Also where no step can run now: a shut guard gets no lease and no work, and would stay shut for good.
            allowance = replace(allowance, step_tokens=self._config.rule.trial_tokens, reason="a trial step")
            if not is_idle and self._is_lent(now_s):
                self._stepped_at_s, self._trial_factor = now_s, min(2 * self._trial_factor, TRIAL_FACTOR_MAX)
        elif allowance.step_tokens != 0:
            self._trial_factor = 1.0
        allowance = self._capped(allowance)
        self._account(now_s, allowance)
        return allowance if self._is_lent(now_s) else replace(allowance, step_tokens=0)

    def waits(self, now_s: float, since_s: float) -> None:
        """Note that a step under way has been behind serving since `since_s`.

        While serving computes the guard counts as shut: the engine ends no step, and nothing is wrong with it.
        """
        state = self._probe.read(now_s)
        if state is None or not (state.waiting or state.running):
            return
        self._hear()
        was_open = self._allowance.step_tokens != 0
        shut = replace(self._allowance, step_tokens=0, reason="a step that has begun gives way to serving")
        self._account(since_s if was_open else now_s, shut)

    def _decide(self, now_s: float, work: StepWork) -> Allowance:
        facts = GuardFacts(
            now_s=now_s,
            state=self._state,
            slo=self._slo,
            serving=self._serving,
            rollout=self._rollout,
            reserve_s=reserve_s(self._arrivals, now_s, self._serving, self._burst),
            work=work,
        )
        return self._policies[min(self.orders.policy, len(self._policies) - 1)](facts, self._config.rule)

    def _is_lent(self, now_s: float) -> bool:
        return self.orders.is_lent and now_s < self.orders.until_s

    def _capped(self, allowance: Allowance) -> Allowance:
        cap = self.orders.compute_fraction_max
        if cap is not None and allowance.step_tokens != 0 and self._computed_s > cap * CAP_S:
            return replace(allowance, step_tokens=0, reason=f"the cap on compute: {cap:.0%}")
        return allowance

    def _account(self, now_s: float, allowance: Allowance) -> None:
        """Add the time since the last look to the ledger and the averages; then keep this decision."""
        passed_s = min(1.0, max(0.0, now_s - self._looked_at_s)) if self._looked_at_s is not None else 0.0
        self._looked_at_s = now_s
        was_open, is_open = self._allowance.step_tokens != 0, allowance.step_tokens != 0
        keep = max(0.0, 1 - passed_s / OPEN_S)
        self._open_fraction = keep * self._open_fraction + (1 - keep) * was_open
        self._headroom = min(allowance.headroom_fraction or 0.0, self._headroom + passed_s / OPEN_S)
        self._computed_s *= max(0.0, 1 - passed_s / CAP_S)
        self._ledger.passed(passed_s, is_open=was_open, is_lent=self._is_lent(now_s))
        if not is_open and (was_open or self._shut_at_s is None):
            self._shut_at_s = now_s
        if was_open and not is_open and self._first_new_arrival_s is not None:
            self._ledger.reclaimed(now_s - self._first_new_arrival_s)
        self._first_new_arrival_s = None
        self._allowance = allowance

    # ---- learning

    def stepped(self, began_s: float, ended_s: float, work: StepWork, *, device_s: float | None = None) -> None:
        """Learn from a rollout step that was computed in [began_s, ended_s).

        device_s: what it had of the device, where that is known (a thread's time on a CPU); else its duration, which is
        too long where serving computed meanwhile: that errs on the safe side.
        """
        self._stepped_at_s = ended_s
        if (device_s or ended_s - began_s) < 0.5 * predict(self._rollout, work):
            self._stepped_at_s, self._trial_factor = began_s - TRIAL_FACTOR_MAX, 1.0  # far from what was thought: go on
        self._ledger.computed(began_s, ended_s)
        self._computed_s += ended_s - began_s
        self._rollout = refit(self._rollout, StepSample(work=work, duration_s=device_s or ended_s - began_s))

    def _hear(self) -> None:
        for arrival in self._probe.new_arrivals():
            self._arrivals = arrived(self._arrivals, arrival.at_s, arrival.prompt_tokens)
            if self._first_new_arrival_s is None:
                self._first_new_arrival_s = arrival.at_s

    def _learn(self) -> None:
        """Learn from serving's steps and requests that ended.

        Called between two steps of ours: while one is under way, it is not known which steps of serving it slowed down.
        """
        for step in self._probe.new_steps():
            is_shared = self._ledger.is_shared(step.began_at_s, step.began_at_s + step.duration_s)
            if not is_shared:
                self._errors = self._errors.noted(predict(self._serving, step.work), step.duration_s)
            sample = StepSample(work=step.work, duration_s=step.duration_s, is_shared=is_shared)
            self._serving = refit(self._serving, sample)
        for end in self._probe.new_ends():
            self._ledger.ended(end)
            self._answers = self._answers.noted(end.token_count)

    # ---- telling

    def view(self, now_s: float) -> GuardView:
        """Return what the guard sees and does now, or would do if it were lent."""
        allowance, state = self._allowance, self._state
        is_shut = allowance.step_tokens == 0
        name = "shut" if is_shut else "open" if allowance.step_tokens is None else "narrow"
        return GuardView(
            state=name,
            reason=allowance.reason if self._is_lent(now_s) else f"observing only: {allowance.reason}",
            shut_s=max(0.0, now_s - self._shut_at_s) if is_shut and self._shut_at_s is not None else 0.0,
            headroom_fraction=round(self._headroom, 4) if state is not None else None,
            load_fraction=self._load(now_s, state) if state is not None else None,
            request_count=len(state.waiting) + len(state.running) if state is not None else None,
            open_fraction=round(self._open_fraction, 4),
            step_error_p50=self._errors.p50,
            step_error_p95=self._errors.p95,
            probe=self._probe.name,
            probe_age_ms=round(1000 * (now_s - state.seen_at_s), 1) if state is not None else -1.0,
        )

    def _load(self, now_s: float, state: ServingState) -> float | None:
        load = load_fraction(self._arrivals, self._answers, state, now_s, self._serving, self._slo)
        return None if load is None else round(load, 4)

    def sharing(self) -> dict[str, Any]:
        """Return the fields of a SharingReport, without the worker's id and token count."""
        return self._ledger.report()

    @property
    def models(self) -> tuple[StepModel, StepModel]:
        """The models of serving's and of rollouts' steps."""
        return self._serving, self._rollout
