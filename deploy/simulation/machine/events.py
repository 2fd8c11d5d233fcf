"""Simulated time: events in order, each at its moment; never backwards."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class Broken(AssertionError):
    """An invariant of the simulation does not hold: its figures mean nothing."""


class Events:
    """A queue of events. Events of one moment happen in the order in which they were asked for."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.count = 0
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._asked = 0

    def at(self, time_s: float, do: Callable[..., None], *arguments: Any) -> None:
        """Ask for an event.

        Raises:
            Broken: it lies in the past.
        """
        if time_s < self.now_s - 1e-9:
            raise Broken(f"time runs backwards: an event at {time_s:.6f} s was asked for at {self.now_s:.6f} s")
        self._asked += 1
        heapq.heappush(self._queue, (max(time_s, self.now_s), self._asked, do, arguments))

    def after(self, delay_s: float, do: Callable[..., None], *arguments: Any) -> None:
        """Ask for an event `delay_s` from now."""
        self.at(self.now_s + delay_s, do, *arguments)

    def run(self, is_over: Callable[[], bool], until_s: float) -> None:
        """Let events happen until it is over, no event is left, or the next one lies beyond `until_s`."""
        queue = self._queue
        while queue and not is_over() and queue[0][0] <= until_s:
            self.now_s, _, do, arguments = heapq.heappop(queue)
            self.count += 1
            do(*arguments)
