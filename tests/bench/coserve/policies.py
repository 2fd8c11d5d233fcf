"""What the guard of the lent engine decides by, arm by arm.

- `share-all`: no guard.
- `priority`: no guard, but a step that has begun gives way to a request that arrives, as ours does.
- `static`: a fixed half of the device's time, whatever serving does.
- `rose`: the rules that ROSE published. Rollouts are admitted in chunks of 512 tokens while the least TTFT slack of a
  waiting and the least TPOT slack of a running request are above 0, with step times profiled once, offline. Above the
  high watermark of KV memory the rollouts' share is halved, once, and stays so until the next training step.
- `ours`: the rule that workers run.
- `oracle`: the same rule, but what it reserves for requests to come is what will come.

All but the last two are what ours is measured against. They run inside the lent engine's scheduler, between two steps:
on a CPU vLLM schedules a step once the one before it has ended, so rollouts stand still when 0 is decided.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from rollfab.fabric.rules.serving.burst import BurstRule
from rollfab.fabric.rules.serving.facts import ServingState, StepWork
from rollfab.fabric.rules.serving.guard import Allowance, GuardFacts, GuardRule, decide
from rollfab.fabric.rules.serving.step_time import predict
from rollfab.workers.serving.guarding.guard import Policy

from .switch import ARM, ROUND, Profile, Switch

STATIC_PERIOD_S, STATIC_SHARE = 0.1, 0.5
ROSE_CHUNK = 512
ROSE_RESERVE = 0.2  # of KV memory, kept for serving
ROSE_TRAINING_STEP_S = 60.0  # a round is as long or shorter: one cut holds until its end


class Rule(Protocol):
    """What decides in one arm."""

    def decide(self, facts: GuardFacts, rule: GuardRule) -> Allowance: ...


class ShareAll:
    """Everything, always."""

    def decide(self, facts: GuardFacts, rule: GuardRule) -> Allowance:
        return _some(None, "no guard")


class PriorityAlone:
    """Everything, always, at the device's own priority: what that gives without a guard."""

    def decide(self, facts: GuardFacts, rule: GuardRule) -> Allowance:
        return replace(_some(None, "no guard"), gives_way=True)


class Static:
    """A fixed share of the time."""

    def decide(self, facts: GuardFacts, rule: GuardRule) -> Allowance:
        is_ours = facts.now_s % STATIC_PERIOD_S < STATIC_SHARE * STATIC_PERIOD_S
        return _some(None if is_ours else 0, "a fixed share")


class Rose:
    """See the module."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._cut_until_s = 0.0

    def decide(self, facts: GuardFacts, rule: GuardRule) -> Allowance:
        state = facts.state
        if state is None:
            return _some(0, "there is no probe")
        is_pressed = state.kv_used_tokens > (1 - ROSE_RESERVE) * state.kv_capacity_tokens > 0
        if is_pressed and facts.now_s >= self._cut_until_s:
            self._cut_until_s = facts.now_s + ROSE_TRAINING_STEP_S
        if self._slack_s(state, facts) <= 0:
            return _some(0, "no slack")
        if facts.now_s < self._cut_until_s:
            return _some(max(1, facts.work.decode_count // 2), "cut until the next training step")
        return _some(ROSE_CHUNK, "slack")

    def _slack_s(self, state: ServingState, facts: GuardFacts) -> float:
        profile, now_s, slo = self._profile, facts.now_s, facts.slo
        waiting = [
            each.arrived_at_s + slo.ttft_ms / 1000 - now_s - profile.prefill_s_per_token * each.prefill_tokens
            for each in state.waiting
        ]
        running = [_last_token_s(state) + slo.tpot_ms / 1000 - now_s - profile.step_s] if state.running else []
        return min([*waiting, *running], default=1.0)


class Ours:
    """The rule itself."""

    def decide(self, facts: GuardFacts, rule: GuardRule) -> Allowance:
        return decide(facts, rule)


class Oracle:
    """The rule, told the arrivals to come."""

    def __init__(self, switch: Switch) -> None:
        self._switch = switch

    def decide(self, facts: GuardFacts, rule: GuardRule) -> Allowance:
        arrivals = self._switch.arrivals()
        horizon_s = BurstRule.of(facts.slo).horizon_s
        now_ns, until_ns = int(1e9 * facts.now_s), int(1e9 * (facts.now_s + horizon_s))
        first, last = arrivals[:, 0].searchsorted([now_ns, until_ns])
        works = [StepWork(prefill_tokens=int(tokens)) for tokens in arrivals[first:last, 1]]
        base_s = predict(facts.serving, StepWork())  # paid once a step, not once a prompt
        reserve_s = sum(predict(facts.serving, work) - base_s for work in works)
        return decide(replace(facts, reserve_s=reserve_s), rule)


NAMES = ("alone", "share-all", "priority", "static", "rose", "ours", "oracle")
OWN_PRIORITY = ("ours", "oracle")  # the others compute at the priority of everybody
REACTING = ("rose", "ours", "oracle")  # to arrivals


def switched(options: Mapping[str, Any]) -> Policy:
    """What the guard of the bench's worker is told to decide by. options: `switch`: its path."""
    return Switched(Switch(Path(options["switch"]))).decide


class Switched:
    """The policy of the arm that the bench has switched to.

    Tells the bench how long after an arrival it shut: of the first one since it was last open, so that waiting for a
    step of ours to end counts. Shutting without an arrival is no reclaim.
    """

    def __init__(self, switch: Switch) -> None:
        self._switch = switch
        self._round = -1
        self._arm = ""
        self._policy: Rule = ShareAll()
        self._open_at_s: float | None = None

    def decide(self, facts: GuardFacts, rule: GuardRule) -> Allowance:
        """See Rule."""
        words = self._switch.words
        if int(words[ROUND]) != self._round:
            self._round, self._arm = int(words[ROUND]), NAMES[int(words[ARM])]
            self._policy, self._open_at_s = self._make(self._arm), None
        allowance = self._policy.decide(facts, rule)
        if allowance.step_tokens != 0:
            self._open_at_s = facts.now_s
        elif self._open_at_s is not None:
            self._note(facts, self._open_at_s)
            self._open_at_s = None
        return allowance

    def _note(self, facts: GuardFacts, open_at_s: float) -> None:
        waiting = facts.state.waiting if facts.state is not None and self._arm in REACTING else ()
        arrived_at_s = [each.arrived_at_s for each in waiting if each.arrived_at_s > open_at_s]
        if arrived_at_s:
            self._switch.note_reclaim(facts.now_s - min(arrived_at_s))

    def _make(self, name: str) -> Rule:
        if name == "static":
            return Static()
        if name == "priority":
            return PriorityAlone()
        if name == "rose":
            return Rose(self._switch.profile())
        if name == "oracle":
            return Oracle(self._switch)
        if name == "ours":
            return Ours()
        return ShareAll()


def _last_token_s(state: ServingState) -> float:
    """A step makes a token of every running request, and the next one begins with it."""
    return state.step_began_at_s if state.step is not None else state.seen_at_s


def _some(step_tokens: int | None, reason: str) -> Allowance:
    """Nobody else gives way within a step."""
    return Allowance(step_tokens=step_tokens, reason=reason, headroom_fraction=1.0, gives_way=False)
