"""The scheduler class of the thread that computes rollouts on a CPU: as others in the steps that the guard lets begin,
idle from the moment a serving request arrives.

- An idle class alone gets what serving leaves over, which on a device that is always in a step is little: slack is used
  by computing beside serving. A step that has begun is what the guard cannot take back, and this can: within WATCH_S of
  a request's arrival the step goes on only where nothing else wants the processor.
- Serving may want it for seconds. Once the guard would let the step begin, it is like any other again.
- Who may not raise a class again (without CAP_SYS_NICE) keeps the idle one from the first arrival on: safe, and slower.
- Linux only.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

WATCH_S = 0.002
GO_ON_S = 0.005  # between two questions whether it may go on: each costs a tenth of a millisecond
OWN_FRACTION_MIN = 0.3  # of a step's duration: who had less of a processor waited for somebody else


def device_time(passed_s: float, thread_s: float, *, computes_here: bool, is_one: bool) -> float | None:
    """Seconds that a step had of the device; None: not known, at most as long as it took.

    Args:
        passed_s: from its beginning to its end.
        thread_s: processor time of the thread that called for it.
        computes_here: that thread computes, and may have had to give way for long. Else it may do so, or only wait for
            a GPU or other threads.
        is_one: no other step was under way.
    """
    is_own = computes_here or (thread_s > OWN_FRACTION_MIN * passed_s and is_one)
    return thread_s if is_own else None


class YieldingThread:
    """Of the one thread that calls `begins` and `ended`."""

    def __init__(self, arrived: Callable[[], int], goes_on: Callable[[], bool]) -> None:
        """Both may be called by another thread.

        Args:
            arrived: how many serving requests there have been; must be cheap.
            goes_on: whether the step under way may be as others again.
        """
        self._arrived = arrived
        self._goes_on = goes_on
        self._count = arrived()
        self._thread_id: int | None = None
        self._is_idle = self._gives_way = False
        self._may_raise = True
        self._is_computing = threading.Event()
        threading.Thread(target=self._watch, name="rollfab-yield", daemon=True).start()

    def begins(self, arrived_count: int, *, gives_way: bool) -> None:
        """A step that the guard let begin, knowing of so many requests."""
        self._gives_way = gives_way
        self._thread_id = threading.get_native_id()
        self._count = arrived_count
        self._is_computing.set()

    def ended(self) -> None:
        """It has; what follows (an abort, a pause, the next question to the guard) must not wait for serving."""
        self._is_computing.clear()
        if self._is_idle and self._may_raise:
            self._raise()

    def _watch(self) -> None:
        never = threading.Event()
        while self._is_computing.wait():
            never.wait(GO_ON_S if self._is_idle else WATCH_S)
            if not self._is_computing.is_set():
                continue
            count = self._arrived()
            if self._is_idle:
                if self._goes_on() and self._may_raise:
                    self._count = count
                    self._raise()
            elif self._gives_way and count != self._count:
                self._is_idle = self._set(os.SCHED_IDLE)

    def _raise(self) -> None:
        self._is_idle = not self._set(os.SCHED_OTHER)
        self._may_raise = not self._is_idle

    def _set(self, scheduler_class: int) -> bool:
        assert self._thread_id is not None
        try:
            os.sched_setscheduler(self._thread_id, scheduler_class, os.sched_param(0))
        except OSError:
            return False
        return True
