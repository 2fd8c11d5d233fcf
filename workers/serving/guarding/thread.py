"""The guard of a transformers engine: a hook before each of its steps, and a thread that looks while it makes none.

- It decides on the engine's thread, in the moment before the step.
- While the engine rests, or is held, the thread goes on learning, so that what is shown is of now and the first step is
  decided on models that are up to date. It never looks while a step is computed: that look could end nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ....fabric.contract.clock import SystemClock
from ....fabric.contract.sharing import GuardView
from ....fabric.rules.serving.facts import StepWork
from ...engines.base import Generation
from ...engines.steps import Moment
from ..probes.reader import ProbeReader
from .guard import Guard, GuardConfig, GuardOrders
from .step_times import StepTimes

LOOK_S = 0.01


class GuardThread:
    """A StepHook and a GuardPort. Methods of the latter may be called on any thread."""

    def __init__(self, config: GuardConfig, *, slot_count: int = 1, is_on_cpu: bool = True) -> None:
        """slot_count: sequences that could run, while nothing does."""
        assert not config.policies, "other rules are measured on vLLM"
        reader = ProbeReader(Path(config.probe), config.probe_name, owner_uid=config.probe_owner_uid)
        self._guard = Guard(config, reader)
        self._clock = SystemClock()
        self._steps = StepTimes(is_on_cpu=is_on_cpu, computes_here=is_on_cpu, now_s=self._clock.now_s)
        self._lock = threading.Lock()  # of the guard and what follows
        self._work = StepWork(decode_count=slot_count)  # of the last step
        self._looked_at_s = 0.0
        self._leave = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rollfab-guard", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Look no more."""
        self._leave.set()
        self._thread.join(1.0)

    def order(self, orders: GuardOrders) -> None:
        """Give orders that hold from the next look on."""
        self._guard.orders = orders

    def view(self) -> GuardView:
        """Return what the guard sees and does now."""
        with self._lock:
            return self._guard.view(self._clock.now_s())

    def sharing(self) -> dict[str, Any]:
        """Return the fields of a SharingReport."""
        with self._lock:
            return self._guard.sharing()

    # ---- on the engine's thread

    def arrived(self, at_s: float, prompt_tokens: int) -> None:
        """Do nothing: the engine's own requests are not those that this guards."""

    def before_step(self, moment: Moment) -> int | None:
        """Decide how many tokens may run in the step that begins now; None: all of it."""
        with self._lock:
            self._steps.forget()
            if not moment.requests:
                return None
            self._work = moment.work
            now = self._looked_at_s = self._clock.now_s()
            allowed = self._guard.look(now, self._work).step_tokens
            if allowed != 0:
                self._steps.begins(narrowed(self._work, allowed))
            return allowed

    def after_step(self, moment: Moment, ended: Sequence[Generation]) -> None:
        """Measure the step that is over."""
        with self._lock:
            step = self._steps.ended()
            if step is not None:
                self._guard.stepped(step.began_s, step.ended_s, step.work, device_s=step.device_s)

    def _run(self) -> None:
        while not self._leave.wait(LOOK_S):
            with self._lock:
                now = self._clock.now_s()
                if not self._steps.is_computing and now - self._looked_at_s >= LOOK_S:
                    self._looked_at_s = now
                    self._guard.look(now, self._work)


def narrowed(work: StepWork, step_tokens: int | None) -> StepWork:
    """Return what a step computes of `work` if it may take `step_tokens` tokens: sequences that decode come first."""
    if step_tokens is None:
        return work
    decode_count = min(work.decode_count, step_tokens)
    return StepWork(
        prefill_tokens=min(work.prefill_tokens, step_tokens - decode_count),
        decode_count=decode_count,
        context_tokens=work.context_tokens * decode_count // max(1, work.decode_count),
    )
