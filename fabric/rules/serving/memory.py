"""Bounds the KV cache of rollouts beside a serving engine: cut at once under pressure, given back as slack lasts.

- Never above the hard cap: what the serving team allows of the rollout engine's own cache.
- Past `cut_at_fraction` of the serving engine's KV cache the budget falls, and falls again while that goes on; past
  `stop_at_fraction` to its floor at once. It never grows under pressure.
- Below `thaw_below_fraction`, and not before that has lasted for `quiet_s`, it grows evenly up to the cap. Between the
  two marks it stays as it is, so that constant use moves nothing.
- Seen for the first time between the marks, an engine lends all that is allowed at once, or one that always stands
  there never would: rollouts have a cache of their own, which takes nothing from it.
- A cut starts from what rollouts hold, where that is less than their budget: a cut that frees nothing would be none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

GAP_S_MAX = 0.5  # seconds between two looks that count as slack: a process that froze has seen none


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRule:
    """Marks as fractions of the serving engine's KV cache; the rest as fractions of the hard cap."""

    thaw_below_fraction: float = 0.7
    cut_at_fraction: float = 0.85  # the remaining 15 % are the headroom for bursts
    stop_at_fraction: float = 0.95
    cut_ratio: float = 0.5
    cut_again_s: float = 0.25  # turns that yield need that long to be gone
    quiet_s: float = 1.0
    thaw_fraction_per_s: float = 0.2
    floor_fraction: float = 0.0

    def __post_init__(self) -> None:
        assert 0 <= self.thaw_below_fraction < self.cut_at_fraction <= self.stop_at_fraction, "marks in order"
        assert 0 <= self.cut_ratio < 1 and 0 <= self.floor_fraction <= 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFacts:
    """The facts of one moment.

    serving_used of serving_capacity: of the serving engine's KV cache, in any one unit; a capacity of 0: not known.
    rollout_tokens: KV that rollouts hold, None: not known; of rollout_capacity_tokens, which their engine has.
    memory_fraction_max: of that, what the serving team allows; None: all.
    """

    now_s: float
    serving_used: float
    serving_capacity: float
    rollout_capacity_tokens: int
    rollout_tokens: int | None = None
    memory_fraction_max: float | None = None

    @property
    def cap_tokens(self) -> int:
        """The most that rollouts may ever hold."""
        fraction = 1.0 if self.memory_fraction_max is None else min(1.0, max(0.0, self.memory_fraction_max))
        return math.floor(self.rollout_capacity_tokens * fraction)

    @property
    def serving_fraction(self) -> float:
        """The share of its KV cache that the serving engine holds; 0 where that is not known."""
        return self.serving_used / self.serving_capacity if self.serving_capacity > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryState:
    """The budget, and what led to it. looked_at_s: None before the first look."""

    budget_tokens: float = 0.0
    reason: str = "nothing is known of the memory yet"
    looked_at_s: float | None = None
    cut_at_s: float = -math.inf
    slack_since_s: float | None = None

    @property
    def kv_tokens_max(self) -> int:
        """KV cache that rollouts may hold."""
        return int(self.budget_tokens)


def decide(state: MemoryState, facts: MemoryFacts, rule: MemoryRule) -> MemoryState:
    """Return the budget after one more look; times of later looks must not be smaller."""
    cap, use = float(facts.cap_tokens), facts.serving_fraction
    if use >= rule.cut_at_fraction:
        return _cut(state, facts, rule, use)
    if use >= rule.thaw_below_fraction:
        budget = cap if state.looked_at_s is None else _budget(state, cap)
        reason = "" if budget >= cap else f"serving holds {use:.0%} of its KV cache, grows below {_thaw_mark(rule)}"
        return _looked(state, facts, budget, reason, slack_since_s=None)
    return _thaw(state, facts, rule)


def _cut(state: MemoryState, facts: MemoryFacts, rule: MemoryRule, use: float) -> MemoryState:
    cap = float(facts.cap_tokens)
    floor = cap * rule.floor_fraction
    budget = floor if state.looked_at_s is None else _budget(state, cap)
    reason = f"serving holds {use:.0%} of its KV cache, cut at {rule.cut_at_fraction:.0%}"
    is_due = facts.now_s - state.cut_at_s >= rule.cut_again_s
    if use >= rule.stop_at_fraction:
        budget, reason = min(budget, floor), f"serving holds {use:.0%} of its KV cache"
    elif is_due:
        held = budget if facts.rollout_tokens is None else min(budget, facts.rollout_tokens)
        budget = min(budget, max(floor, math.floor(held * rule.cut_ratio)))
    else:
        return _looked(state, facts, budget, reason, slack_since_s=None)
    return replace(_looked(state, facts, budget, reason, slack_since_s=None), cut_at_s=facts.now_s)


def _thaw(state: MemoryState, facts: MemoryFacts, rule: MemoryRule) -> MemoryState:
    cap = float(facts.cap_tokens)
    if state.looked_at_s is None:
        return _looked(state, facts, cap, "", slack_since_s=facts.now_s)
    slack_since_s = facts.now_s if state.slack_since_s is None else state.slack_since_s
    passed_s = min(max(0.0, facts.now_s - state.looked_at_s), GAP_S_MAX)
    is_quiet = facts.now_s - slack_since_s >= rule.quiet_s
    grown = rule.thaw_fraction_per_s * cap * passed_s if is_quiet else 0.0
    budget = min(cap, _budget(state, cap) + grown)
    reason = "" if budget >= cap else f"grows back after pressure: {budget / cap:.0%} of {facts.cap_tokens:,} tokens"
    return _looked(state, facts, budget, reason, slack_since_s=slack_since_s)


def _looked(
    state: MemoryState, facts: MemoryFacts, budget: float, reason: str, *, slack_since_s: float | None
) -> MemoryState:
    if not reason and facts.cap_tokens < facts.rollout_capacity_tokens:
        reason = f"the serving team allows {facts.cap_tokens:,} tokens of KV cache"
    return replace(state, budget_tokens=budget, reason=reason, looked_at_s=facts.now_s, slack_since_s=slack_since_s)


def _budget(state: MemoryState, cap: float) -> float:
    return min(state.budget_tokens, cap)


def _thaw_mark(rule: MemoryRule) -> str:
    return f"{rule.thaw_below_fraction:.0%}"
