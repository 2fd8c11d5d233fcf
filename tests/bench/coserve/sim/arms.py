"""Who may decide when rollouts run: the arms of the simulated co-serving bench.

- Ours is the guard of production with its step-time model and burst reserve, unchanged; it learns while it runs.
- The others are as their authors published them, as far as one GPU goes; none of them knows more than a real probe.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random

from rollfab.deploy.replay.records import Arrival
from rollfab.deploy.simulation.machine.cost import StepCost
from rollfab.fabric.rules.serving.burst import Arrivals, BurstRule, arrived, reserve_s
from rollfab.fabric.rules.serving.facts import StepSample, StepWork
from rollfab.fabric.rules.serving.guard import Allowance, GuardFacts, GuardRule, decide
from rollfab.fabric.rules.serving.step_time import StepErrors, StepModel, cold, predict, refit

from .world import ROSE_SLO, Device

WHOLE_CHUNK, SMALL_CHUNK = 2048, 512  # of serving prompts: vLLM's usual, and what ROSE sets while it shares


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
class RoseRules(ServingAlone):
    """ROSE's rule for compute: rollouts run while all waiting requests have TTFT slack and all running ones TPOT slack.

    Slack: the moment of its arrival or last token, plus the objective, minus now and the time profiled for what it
    waits for. The profile is in its favour: exact, with the chunks, the prompts before it and the decodes beside it.
    Its rules for memory have nothing to do here: neither engine runs out.
    """

    chunk_tokens: int = SMALL_CHUNK

    def rollout_tokens(self, now_s: float, device: Device) -> int | None:
        serving, slo = device.serving, device.world.slo
        cost = device.world.serving
        free_s = now_s + device.rollout.seconds(device.rollout.work(None))
        decodes = StepWork(decode_count=len(serving.running), context_tokens=serving.context_tokens)
        slack_s = math.inf
        if serving.running:
            slack_s = device.last_token_at_s + 1e-3 * slo.tpot_ms - free_s - cost.seconds(decodes, 0.0)
        chunk_s = cost.seconds(replace(decodes, prefill_tokens=self.chunk_tokens - len(serving.running)), 0.0)
        tokens = 0
        for each in serving.waiting:
            tokens += each.arrival.prompt_tokens - each.prefilled
            prompts_s = chunk_s * max(1.0, tokens / (self.chunk_tokens - len(serving.running)))
            slack_s = min(slack_s, each.arrival.at_s + 1e-3 * slo.ttft_ms - free_s - prompts_s)
        return None if slack_s > 0 else 0


@dataclass
class Guarded(ServingAlone):
    """Ours. `rule` and `burst` are those of production unless a sweep says otherwise."""

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


class Foresight(Guarded):
    """Ours, told the future: which prompts will come within the reserve's horizon, and how long steps really take."""

    def __init__(self, load: Sequence[Arrival], serving: StepCost, rollout: StepCost, rule: GuardRule) -> None:
        super().__init__(rule=rule, serving=taught(serving), rollout=taught(rollout))
        self._times = [each.at_s for each in load]
        self._work_s = [0.0]
        for each in load:
            prompt = each.prompt_tokens
            seconds = 1e-6 * serving.token_us * prompt + 1e-9 * serving.attention_ns * prompt**2 / 2
            self._work_s.append(self._work_s[-1] + seconds)

    def reserve_s(self, now_s: float) -> float:
        begin = bisect_right(self._times, now_s)
        end = bisect_left(self._times, now_s + self.burst.horizon_s)
        return self._work_s[end] - self._work_s[begin]


def taught(cost: StepCost, seed: int = 0, count: int = 400) -> StepModel:
    """A model that has seen steps of every kind, without noise."""
    dice, model = Random(seed), cold(0.05, 2e-4, 2e-3)
    for index in range(count):
        prefill, decodes = (dice.randint(16, WHOLE_CHUNK) if index % 3 == 0 else 0), dice.randint(1, 128)
        work = StepWork(prefill_tokens=prefill, decode_count=decodes, context_tokens=decodes * dice.randint(200, 2000))
        model = refit(model, StepSample(work=work, duration_s=cost.seconds(work, prefill * prefill / 2)))
    return model
