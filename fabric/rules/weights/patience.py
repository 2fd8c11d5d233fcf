"""Bounds the time that other workers may cost one that asks them: LOST_S_MAX at once, LOST_FRACTION of all time.

- A process that may write a holder's row may name relays that stall, ever new ones. So the asker's time is bounded,
  whichever relay takes it: a worker without patience asks the broker until some has come back.
- Time in which bytes come at FAIR_BYTES_PER_S or faster costs none.
"""

from __future__ import annotations

from dataclasses import dataclass

LOST_S_MAX = 30.0
LOST_FRACTION = 0.1
FAIR_BYTES_PER_S = 1 << 20  # a link between regions that gives less is no way for weights


@dataclass(frozen=True, slots=True)
class Patience:
    """The patience left at a time, in seconds; below 0: the last wait took more than there was."""

    at_s: float
    left_s: float = LOST_S_MAX

    def is_left(self, now_s: float) -> bool:
        """Tell whether other workers may be asked."""
        return self._left_s(now_s) > 0

    def after(self, now_s: float, waited_s: float, byte_count: int = 0) -> Patience:
        """Return the patience left after a wait that has just ended and brought `byte_count` bytes."""
        return Patience(now_s, self._left_s(now_s) - max(0.0, waited_s - byte_count / FAIR_BYTES_PER_S))

    def _left_s(self, now_s: float) -> float:
        return min(LOST_S_MAX, self.left_s + LOST_FRACTION * max(0.0, now_s - self.at_s))
