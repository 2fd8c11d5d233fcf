"""Measures an engine's steps for the guard, on the thread that calls for them.

- On a CPU a step's measure is the processor time of the thread that computes it: serving's steps do not lengthen that.
- On a GPU it is the time from scheduling the step until its tokens are on the host. There the thread's own time only
  launches kernels; the thread then waits (vLLM on an event, transformers on its stream) until the tokens are copied.
  This leaves out a few bookkeeping kernels behind that copy, which the next step waits for.
- Pairs of CUDA events would measure no better: they too go on while another process has the device, leave out the
  launching, and see one rank of several.
- So a step in whose time serving computed counts on a GPU as longer than it was: the guard then lends less, never more.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from ....fabric.rules.serving.facts import StepWork

OWN_FRACTION_MIN = 0.3  # of a step's duration: who had less of a processor waited for somebody else


@dataclass(frozen=True, slots=True)
class StepTime:
    """A step that has ended. device_s: how long it had the device; None: not known, at most as long as it took."""

    began_s: float
    ended_s: float
    work: StepWork
    device_s: float | None


class StepTimes:
    """Takes the times of one engine's steps, which end in the order in which they begin.

    Steps may overlap: one begins on the device when the one before it has ended there.
    """

    def __init__(
        self,
        *,
        is_on_cpu: bool,
        computes_here: bool = False,
        now_s: Callable[[], float] = time.monotonic,
        thread_s: Callable[[], float] = time.thread_time,
    ) -> None:
        """
        Args:
            is_on_cpu: where it computes.
            computes_here: on a CPU, whether the calling thread computes, and may have had to give way for long. Else it
                may do so, or only wait for other threads.
            now_s: the time.
            thread_s: processor time of the calling thread.
        """
        self._is_on_cpu = is_on_cpu
        self._computes_here = computes_here
        self._now_s = now_s
        self._thread_s = thread_s
        self._begun: deque[tuple[float, float, StepWork]] = deque()
        self._ended_at_s = 0.0

    @property
    def is_computing(self) -> bool:
        """Whether a step is under way."""
        return bool(self._begun)

    def begins(self, work: StepWork) -> None:
        self._begun.append((self._now_s(), self._thread_s(), work))

    def forget(self) -> None:
        """Drop what has begun: it turned out to be no step."""
        self._begun.clear()

    def ended(self) -> StepTime | None:
        """Measure the oldest step, which has ended now; None: none has begun."""
        if not self._begun:
            return None
        began_s, own_began_s, work = self._begun.popleft()
        now_s, own_s = self._now_s(), self._thread_s() - own_began_s
        began_s, self._ended_at_s = max(began_s, self._ended_at_s), now_s
        device_s = own_s if self._is_own(now_s - began_s, own_s) else None
        return StepTime(began_s, now_s, work, device_s)

    def _is_own(self, passed_s: float, own_s: float) -> bool:
        """Tell whether the calling thread's processor time is what the step had of the device."""
        if not self._is_on_cpu:
            return False
        return self._computes_here or (own_s > OWN_FRACTION_MIN * passed_s and not self._begun)
