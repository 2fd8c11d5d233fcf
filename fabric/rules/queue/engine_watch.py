"""Tells when a turn has stalled, and when an engine hangs: a fold over what was seen at every look.

- Time counts only while somebody looks. A gap between two looks (a frozen process, a busy event loop) counts for a
  bounded part: else a worker that wakes up would take every turn for stalled before its engine could make a step.
- While an engine is held (paused, or writing weights) nothing stalls.
- Before its first token a turn may be in its prefill, and an engine before its first step in its warm-up: both have
  `first_token_s`, everything later `stall_s`. A turn has time to read its context, too.
- Engines read prompts in the order in which they came, and put the last one back when their cache is full. So a turn
  that waits in line for its prompt, or for room, is not to be blamed: its silence counts in full only once a turn that
  was begun later has made a token, and else as WAITING_FRACTION. Many long prompts at once take minutes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

READ_TOKENS_PER_S_MIN = 1000.0  # of a context: slower than any engine on an accelerator
WAITING_FRACTION = 1 / 30  # of the time of a turn that waits in line: it may wait for ten minutes


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


@dataclass(slots=True)
class Line:
    """The turns of an engine in the order in which they were begun: by numbers, ascending.

    _moves: (number, when it made a token last), numbers descending, times ascending: earlier ones than a higher number
    has say nothing.
    """

    _moves: list[tuple[int, float]] = field(default_factory=list)

    def note(self, number: int, now_s: float) -> None:
        """Note that this turn has made a token, or has ended."""
        while self._moves and self._moves[-1][0] <= number:
            self._moves.pop()
        self._moves.append((number, now_s))

    def passed_at_s(self, number: int) -> float:
        """Return when a turn that was begun after this one made a token last; -inf: none has."""
        return next((at_s for other, at_s in reversed(self._moves) if other > number), -math.inf)


def feel(
    pulse: Pulse, count: int, now_s: float, *, gap_s_max: float, is_excused: bool = False, fraction: float = 1.0
) -> Pulse:
    """Return the pulse after one more look.

    Args:
        count: as seen now; another one than before is a sign of life.
        gap_s_max: most seconds that the time since the last look counts for.
        is_excused: it need not move now; its silence starts anew.
        fraction: of the time since the last look that counts.
    """
    if count != pulse.count or is_excused:
        return Pulse(count, now_s)
    passed_s = min(max(0.0, now_s - pulse.looked_at_s), gap_s_max)
    return Pulse(count, now_s, pulse.quiet_s + fraction * passed_s)


def is_stalled(pulse: Pulse, rule: StallRule, context_tokens: int = 0) -> bool:
    """Tell whether a turn (count: tokens made in this claim) or an engine (count: steps) was silent for too long.

    context_tokens: that the turn may have to read meanwhile.
    """
    limit_s = rule.stall_s if pulse.count > 0 else rule.first_token_s
    return pulse.quiet_s >= limit_s + context_tokens / READ_TOKENS_PER_S_MIN
