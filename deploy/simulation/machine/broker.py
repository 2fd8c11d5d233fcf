"""The broker as its clients see it: there, or away for a while.

While it is away nothing gets through. What somebody would send waits in his hands, and goes when it is back, in order;
engines compute on, and environments go on with what they are about. Its clock counts COUNTED_S of an outage at most, so
that no claim ends by one. It loses nothing: it is its process that dies, not the machine.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec

from .events import Events

P = ParamSpec("P")
COUNTED_S = 1.0  # STEP_MS_MAX of use/look.lua


class Broker:
    """Is there, or away. silent_s: how long it was away in all, without what its clock has counted."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self.is_away = False
        self.silent_s = self._since_s = 0.0
        self._kept: list[Callable[[], None]] = []

    def go(self) -> None:
        """Be away from now on."""
        self.is_away, self._since_s = True, self._events.now_s

    def come_back(self) -> None:
        """Be there again, and take what has waited."""
        self.is_away = False
        self.silent_s += max(0.0, self._events.now_s - self._since_s - COUNTED_S)
        kept, self._kept = self._kept, []
        for do in kept:
            do()

    def keep(self, do: Callable[[], None]) -> None:
        """Let something wait until it is back."""
        self._kept.append(do)


def through_broker(method: Callable[Concatenate[Any, P], None]) -> Callable[Concatenate[Any, P], None]:
    """Have a method wait while its owner's `broker` is away."""

    @wraps(method)
    def waits(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> None:
        if self.broker.is_away:
            self.broker.keep(partial(method, self, *args, **kwargs))
        else:
            method(self, *args, **kwargs)

    return waits
