"""Who may decide when rollouts run on one simulated GPU.

- The guard is that of production with its step-time model and burst reserve, unchanged; it learns while it runs.
- None of them knows more than a real probe.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rollfab.deploy.replay.records import Arrival
from rollfab.fabric.rules.serving.burst import Arrivals, BurstRule, arrived, reserve_s
from rollfab.fabric.rules.serving.facts import StepSample
from rollfab.fabric.rules.serving.guard import Allowance, GuardFacts, GuardRule, decide
from rollfab.fabric.rules.serving.step_time import StepErrors, StepModel, cold, predict, refit

from .world import ROSE_SLO, Device

WHOLE_CHUNK = 2048  # of serving prompts: vLLM's usual


@dataclass
class ServingAlone:
    """No rollouts: what the others are measured against."""

    chunk_tokens: int = WHOLE_CHUNK

    def rollout_tokens(self, now_s: float, device: Device) -> int | None:
        return 0

    def came(self, arrivals: Sequence[Arrival]) -> None:
        pass

    def served(self, sample: StepSample) -> None:
        pass

    def rolled(self, sample: StepSample) -> None:
        pass


class Unguarded(ServingAlone):
    """Share all: one step of each in turn."""

    def rollout_tokens(self, now_s: float, device: Device) -> int | None:
        return 0 if device.was_rollout and device.serving.has_work else None


class IdleOnly(ServingAlone):
    """Rollouts run while serving has nothing at all to do."""

    def rollout_tokens(self, now_s: float, device: Device) -> int | None:
        return 0 if device.serving.has_work else None


@dataclass
class Guarded(ServingAlone):
    """Production's guard."""

    rule: GuardRule = field(default_factory=GuardRule)
    burst: BurstRule = field(default_factory=lambda: BurstRule.of(ROSE_SLO))
    serving: StepModel = field(default_factory=lambda: cold(0.05, 2e-4, 2e-3))
    rollout: StepModel = field(default_factory=lambda: cold(0.05, 2e-4, 2e-3))
    arrivals: Arrivals = field(default_factory=Arrivals)
    errors: StepErrors = field(default_factory=StepErrors)

    def rollout_tokens(self, now_s: float, device: Device) -> int | None:
        return self.look(now_s, device).step_tokens

    def look(self, now_s: float, device: Device) -> Allowance:
        """What the guard says, given what a probe without delay would show."""
        facts = GuardFacts(
            now_s=now_s,
            state=device.serving.state(now_s),
            slo=device.world.slo,
            serving=self.serving,
            rollout=self.rollout,
            reserve_s=self.reserve_s(now_s),
            work=device.rollout.work(None),
        )
        return decide(facts, self.rule)

    def reserve_s(self, now_s: float) -> float:
        """Seconds of serving work to keep free."""
        return reserve_s(self.arrivals, now_s, self.serving, self.burst)

    def came(self, arrivals: Sequence[Arrival]) -> None:
        for each in arrivals:
            self.arrivals = arrived(self.arrivals, each.at_s, each.prompt_tokens)

    def served(self, sample: StepSample) -> None:
        self.errors = self.errors.noted(predict(self.serving, sample.work), sample.duration_s)
        self.serving = refit(self.serving, sample)

    def rolled(self, sample: StepSample) -> None:
        self.rollout = refit(self.rollout, sample)
