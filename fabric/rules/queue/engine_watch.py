"""Tells when a turn has stalled, and when an engine hangs: a fold over what was seen at every look.

- Time counts only while somebody looks. A gap between two looks (a frozen process, a busy event loop) counts for a
  bounded part: else a worker that wakes up would take every turn for stalled before its engine could make a step.
- While an engine is held (paused, or writing weights) nothing stalls.
- Before its first token a turn may be in its prefill, and an engine before its first step in its warm-up: both have
  `first_token_s`, everything later `stall_s`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StallRule:
    """Longest silences, in seconds."""

    stall_s: float = 2.0
    first_token_s: float = 20.0


@dataclass(frozen=True, slots=True)
class Pulse:
    """A count that should grow: what it was at the last look, and for how long it has not moved."""

    count: int
    looked_at_s: float
    quiet_s: float = 0.0


def feel(pulse: Pulse, count: int, now_s: float, *, gap_s_max: float, is_excused: bool = False) -> Pulse:
    """Return the pulse after one more look.

    Args:
        count: as seen now; another one than before is a sign of life.
        gap_s_max: most seconds that the time since the last look counts for.
        is_excused: it need not move now; its silence starts anew.
    """
    if count != pulse.count or is_excused:
        return Pulse(count, now_s)
    passed_s = min(max(0.0, now_s - pulse.looked_at_s), gap_s_max)
    return Pulse(count, now_s, pulse.quiet_s + passed_s)


def is_stalled(pulse: Pulse, rule: StallRule) -> bool:
    """Tell whether a turn (count: tokens made in this claim) or an engine (count: steps) was silent for too long."""
    return pulse.quiet_s >= (rule.stall_s if pulse.count > 0 else rule.first_token_s)
