"""Rates and their history, from counters that only grow. Pure: the caller brings the time.

Samples are taken once per second; a rate is what was added since the oldest sample of the last few seconds, so a
burst does not make it jump and a standstill shows within that time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

WINDOW_S = 5.0
HISTORY_COUNT = 120  # two minutes


@dataclass(slots=True)
class Meter:
    """Counters of one thing over the last seconds."""

    names: tuple[str, ...]
    samples: deque[tuple[float, tuple[int, ...]]] = field(default_factory=lambda: deque(maxlen=int(WINDOW_S) + 2))
    history: dict[str, deque[float]] = field(default_factory=dict)

    def sample(self, now_s: float, counters: Mapping[str, int]) -> None:
        """Take note of the counters; call once per second."""
        rates = self.rates(now_s, counters)
        for name in self.names:
            self.history.setdefault(name, deque(maxlen=HISTORY_COUNT)).append(round(rates[name], 2))
        self.samples.append((now_s, self._values(counters)))

    def rates(self, now_s: float, counters: Mapping[str, int]) -> dict[str, float]:
        """Growth per second of every counter; 0 before the first sample and after a counter began anew."""
        base = next((each for each in self.samples if each[0] >= now_s - WINDOW_S), None)
        if base is None and self.samples:
            base = self.samples[-1]
        if base is None or now_s <= base[0]:
            return dict.fromkeys(self.names, 0.0)
        values = self._values(counters)
        return {
            name: max(0, value - before) / (now_s - base[0])
            for name, value, before in zip(self.names, values, base[1], strict=True)
        }

    def _values(self, counters: Mapping[str, int]) -> tuple[int, ...]:
        return tuple(counters.get(name, 0) for name in self.names)


class Meters:
    """A meter per thing, for the things that are there."""

    def __init__(self, *names: str) -> None:
        self._names = names
        self._meters: dict[str, Meter] = {}

    def sample(self, now_s: float, counters: Mapping[str, Mapping[str, int]]) -> None:
        """Take note of everything; what is not there any more is forgotten."""
        self._meters = {name: self._meters.get(name) or Meter(self._names) for name in counters}
        for name, each in counters.items():
            self._meters[name].sample(now_s, each)

    def rates(self, now_s: float, name: str, counters: Mapping[str, int]) -> dict[str, float]:
        """Growth per second of one thing's counters."""
        meter = self._meters.get(name)
        return meter.rates(now_s, counters) if meter else dict.fromkeys(self._names, 0.0)

    def history(self, name: str, counter: str) -> list[float]:
        """One rate per second, the newest last."""
        meter = self._meters.get(name)
        return list(meter.history.get(counter, ())) if meter else []
