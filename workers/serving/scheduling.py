"""The scheduler class of the thread that computes rollouts on a CPU: as others in the steps that the guard lets begin,
idle from the moment a serving request arrives.

- An idle class alone gets what serving leaves over, which on a device that is always in a step is little: slack is used
  by computing beside serving. A step that has begun is what the guard cannot take back, and this can: within WATCH_S of
  a request's arrival the step goes on only where nothing else wants the processor.
- Serving may want it for seconds, and have slack: from that arrival on the guard is asked every GO_ON_S, and the step
  is idle or like any other as it says, as if it were many small ones.
- Who may not raise a class again (without CAP_SYS_NICE) keeps the idle one from the first arrival on: safe, and slower.
- Linux only.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

WATCH_S = 0.002
GO_ON_S = 0.005  # between two questions whether a step may go on: each costs a tenth of a millisecond
QUANTUM_S = 2 * GO_ON_S  # that serving can be delayed by until the next one, which may come late
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
            goes_on: whether the step under way may compute as others for QUANTUM_S.
        """
        self._arrived = arrived
        self._goes_on = goes_on
        self._count = arrived()
        self._thread_id: int | None = None
        self._is_idle = self._gives_way = self._is_asking = False
        self._may_raise = True
        self._step_count = 0
        self._lock = threading.Lock()  # of what a step is: its watcher must not touch the next one, or what follows
        self._is_computing = threading.Event()
        threading.Thread(target=self._watch, name="rollfab-yield", daemon=True).start()

    def begins(self, arrived_count: int, *, gives_way: bool) -> None:
        """A step that the guard let begin, knowing of so many requests."""
        with self._lock:
            self._gives_way, self._is_asking = gives_way, False
            self._thread_id = threading.get_native_id()
            self._count = arrived_count
            self._step_count += 1
            self._is_computing.set()

    def ended(self) -> None:
        """It has; what follows (an abort, a pause, the next question to the guard) must not wait for serving."""
        with self._lock:
            self._is_computing.clear()
            if self._is_idle and self._may_raise:
                self._raise()

    def _watch(self) -> None:
        never = threading.Event()
        while self._is_computing.wait():
            never.wait(GO_ON_S if self._is_asking else WATCH_S)
            if self._is_computing.is_set() and self._gives_way:
                self._look()

    def _look(self) -> None:
        step, is_asking = self._step_count, self._is_asking
        if not is_asking and self._arrived() == self._count:
            return
        goes_on = is_asking and self._goes_on()  # at first it gives way, whatever there is room for
        with self._lock:
            if self._is_computing.is_set() and step == self._step_count:
                self._is_asking = True
                self._follow(goes_on)

    def _follow(self, goes_on: bool) -> None:
        if goes_on and self._is_idle and self._may_raise:
            self._raise()
        elif not goes_on and not self._is_idle:
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
