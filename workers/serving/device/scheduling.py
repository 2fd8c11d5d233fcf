"""The scheduler class of the thread that computes rollouts on a CPU: as others in the steps that the guard lets begin,
idle from the moment a serving request arrives.

- A thread in the idle class gets only what serving leaves over. That is little on a device that is always in a step, so
  rollouts use slack by computing beside serving. The guard cannot take back a step that has begun; this can: within
  WATCH_S of a request's arrival the step goes on only where nothing else wants the processor.
- A process that may not raise a class again (without CAP_SYS_NICE) keeps the idle one from the first arrival on: safe,
  and slower.
- Linux only. How long a step had the device is guarding/step_times.py's.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

WATCH_S = 0.002


class YieldingThread:
    """Lowers and raises the one thread that calls `begins` and `ended`."""

    def __init__(self, arrived: Callable[[], int]) -> None:
        """arrived: how many serving requests there have been; must be cheap, and may be called by another thread."""
        self._arrived = arrived
        self._count = arrived()
        self._thread_id: int | None = None
        self._is_idle = self._is_computing = False
        self._gave_way_at_s: float | None = None
        self._may_raise = True
        self._lock = threading.Lock()  # of what follows, and the class
        self._is_watched = threading.Event()  # a step that may still have to give way
        threading.Thread(target=self._watch, name="rollfab-yield", daemon=True).start()

    def begins(self, arrived_count: int, *, gives_way: bool) -> None:
        """Note that the guard let a step begin, knowing of `arrived_count` requests."""
        with self._lock:
            self._thread_id = threading.get_native_id()
            self._count = arrived_count
            self._gave_way_at_s = time.monotonic() if self._is_idle else None
            self._is_computing = True
            if gives_way and not self._is_idle:
                self._is_watched.set()

    @property
    def gave_way_at_s(self) -> float | None:
        """The time since when the step under way has been behind serving, monotonic seconds; None: it is not."""
        return self._gave_way_at_s if self._is_computing else None

    def ended(self) -> None:
        """Note that the step has ended.

        What follows (an abort, a pause, the next question to the guard) must not wait for serving.
        """
        with self._lock:
            self._is_computing = False
            self._is_watched.clear()
            if self._is_idle and self._may_raise:
                self._is_idle = not self._set(os.SCHED_OTHER)
                self._may_raise = not self._is_idle

    def _watch(self) -> None:
        never = threading.Event()
        while self._is_watched.wait():
            never.wait(WATCH_S)
            with self._lock:
                if self._is_watched.is_set() and self._arrived() != self._count:
                    self._is_idle = self._set(os.SCHED_IDLE)
                    self._gave_way_at_s = time.monotonic() if self._is_idle else None
                    if self._is_idle:
                        self._is_watched.clear()  # from here on every look would be serving's time

    def _set(self, scheduler_class: int) -> bool:
        assert self._thread_id is not None
        try:
            os.sched_setscheduler(self._thread_id, scheduler_class, os.sched_param(0))
        except OSError:
            return False
        return True
