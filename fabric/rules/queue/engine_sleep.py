"""Decides when a rollout engine is put to sleep, and when it is woken: a pure function of what its worker sees.

- Nothing is claimed or fetched for an engine that is not awake: a lease wakes it first.
- It may sleep once it has had no lease, and nothing of an earlier one left to do, for `sleep_after_s`.
- An engine that did not fall asleep or wake as it should counts as failed, and waking is tried again, ever more rarely,
  with a lease or without: a worker that says "failed" is given none, and would else stay so for ever.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Rest(Enum):
    """The state of an engine between two changes. FAILED: nobody knows whether it sleeps."""

    AWAKE = "awake"
    ASLEEP = "asleep"
    FAILED = "failed"


class Move(Enum):
    """The change to make now."""

    STAY = "stay"
    SLEEP = "sleep"
    WAKE = "wake"


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationRule:
    """Bounds of sleeping. sleep_after_s: None: never.

    After a failed change it waits `retry_s`, doubled up to `retry_s_max`.
    """

    sleep_after_s: float | None = None
    retry_s: float = 1.0
    retry_s_max: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationFacts:
    """The worker's facts. idle_s: since it last had a lease or something to do. quiet_s: since the last change ended.

    is_in_use: a run is being served, or the engine owes something. failure_count: changes in a row that failed.
    """

    rest: Rest
    has_lease: bool
    is_in_use: bool
    idle_s: float
    can_sleep: bool = True
    failure_count: int = 0
    quiet_s: float = 0.0


def decide(facts: ActivationFacts, rule: ActivationRule) -> Move:
    """Decide the move to make now; changes take a while, and none is begun before the last has ended."""
    if facts.rest is Rest.FAILED:
        wait_s = min(rule.retry_s * 2 ** min(facts.failure_count - 1, 16), rule.retry_s_max)
        return Move.WAKE if facts.quiet_s >= wait_s else Move.STAY
    if facts.rest is Rest.ASLEEP:
        return Move.WAKE if facts.has_lease else Move.STAY
    is_free = facts.can_sleep and not facts.has_lease and not facts.is_in_use
    is_due = rule.sleep_after_s is not None and facts.idle_s >= rule.sleep_after_s
    return Move.SLEEP if is_free and is_due else Move.STAY
