"""The guard inside vLLM's EngineCore: asked by the scheduler before each step, and telling the worker what it does.

- Its answer needs no other process: one that hangs, or a broker that is away, cannot keep rollouts running.
- While the engine has nothing to compute, a thread goes on looking, so that what could be lent is known; it also writes
  the guard's text for the worker: JSON with "view" (GuardView) and, more rarely, "sharing" (of a SharingReport).
"""

from __future__ import annotations

import importlib
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import orjson
import torch
from vllm.platforms import current_platform

from .....fabric.rules.serving.facts import StepWork
from .....fabric.rules.serving.guard import Allowance
from ....serving.device.priority import lower, lower_threads, threads_named
from ....serving.guarding.guard import Guard, GuardConfig, Policy
from ....serving.probes.reader import ProbeReader
from .scheduler_page import IS_GUARDED, Page

log = logging.getLogger(__name__)

TELL_S = 0.1
AGAIN_S = 0.01  # what is left of a serving step shrinks, and slack may grow by it, without a word on its page
GLOO_THREAD = "gloo_tcp_loop"  # looks for other ranks again and again; here there are none
ONE = StepWork(decode_count=1)  # the least that could run, where there is nothing that would
SHARING_S = 1.0  # counting percentiles takes some milliseconds


class StepGuard:
    """The guard of one scheduler. Its thread and the scheduler's take turns."""

    def __init__(self, page: Page, row: dict[str, Any]) -> None:
        config = GuardConfig.of_row(row)
        self._page = page
        reader = ProbeReader(Path(config.probe), config.probe_name, owner_uid=config.probe_owner_uid)
        self._guard = Guard(config, reader, _policies(config.policies, config.options))
        self._reader = reader
        self._yielding = _yielding(config, reader)
        self._arrived_count = self._seen = 0
        self._allowance = Allowance(step_tokens=0, reason="")
        self._lock = threading.Lock()
        self._begun: list[tuple[float, float, StepWork]] = []
        self._looked_at_s = self._ended_at_s = 0.0
        self._sharing: dict[str, Any] | None = None
        self._counted_at_s = 0.0
        threading.Thread(target=self._live, name="rollfab-guard", daemon=True).start()

    def step_tokens(self, work: StepWork) -> int | None:
        """How many tokens may run in the next step; None: all."""
        if not work.decode_count and not work.prefill_tokens:
            return None
        with self._lock:
            self._arrived_count = self._reader.arrived_count()
            allowed = self._look(time.monotonic(), work)
        return allowed if self._page.words[IS_GUARDED] else None

    def may_differ(self) -> bool:
        """Whether the guard may answer otherwise than it did: serving has gone on, or some time has passed."""
        return self._reader.change_count() != self._seen or time.monotonic() - self._looked_at_s >= AGAIN_S

    def _look(self, now_s: float, work: StepWork, *, is_idle: bool = False) -> int | None:
        self._guard.orders = self._page.orders()
        self._looked_at_s, self._seen = now_s, self._reader.change_count()
        self._allowance = self._guard.look(now_s, work, is_idle=is_idle)
        return self._allowance.step_tokens

    def begins(self, work: StepWork) -> None:
        """A step was scheduled."""
        self._begun.append((time.monotonic(), time.thread_time(), work))
        if self._yielding is not None:
            self._yielding.begins(self._arrived_count, gives_way=self._allowance.gives_way)

    def ended(self) -> None:
        """The oldest of those that were scheduled has ended."""
        if self._yielding is not None:
            self._yielding.ended()
        if not self._begun:
            return
        began_s, thread_s, work = self._begun.pop(0)
        now_s, own_s = time.monotonic(), time.thread_time() - thread_s
        began_s = max(began_s, self._ended_at_s)
        self._ended_at_s = now_s
        computes_here = self._yielding is not None
        known_s = device_time(now_s - began_s, own_s, computes_here=computes_here, is_one=not self._begun)
        with self._lock:
            self._guard.stepped(began_s, now_s, work, device_s=known_s)

    def _live(self) -> None:
        never = threading.Event()
        while not never.wait(TELL_S):
            now_s = time.monotonic()
            with self._lock:
                if now_s - self._looked_at_s >= TELL_S and not self._begun:
                    self._look(now_s, ONE, is_idle=True)
                gave_way_at_s = self._yielding.gave_way_at_s if self._yielding is not None else None
                if gave_way_at_s is not None:
                    self._guard.waits(now_s, gave_way_at_s)
                if now_s - self._counted_at_s >= SHARING_S:
                    self._sharing, self._counted_at_s = self._guard.sharing(), now_s
                view = self._guard.view(now_s)
            self._page.say(orjson.dumps({"view": view, "sharing": self._sharing, "at_s": now_s}))


def _yielding(config: GuardConfig, reader: ProbeReader) -> YieldingThread | None:
    """What gives way within a step: the scheduler's thread, where it is the one that computes."""
    if not config.yields or not current_platform.is_cpu():
        return None
    if torch.get_num_threads() == 1:
        lower_threads(threads_named(os.getpid(), GLOO_THREAD), "idle")
        return YieldingThread(reader.arrived_count)
    log.info("several threads compute: %s", lower([os.getpid()], "idle"))
    return None


def _policies(names: Sequence[str], options: dict[str, Any]) -> list[Policy]:
    made = []
    for name in names:
        module, _, factory = name.partition(":")
        made.append(getattr(importlib.import_module(module), factory)(options))
    return made


# ---------------------------------------------------------------- scheduling
#
# The scheduler class of the thread that computes rollouts on a CPU: as others in the steps that the guard lets begin,
# idle from the moment a serving request arrives.
#
# - An idle class alone gets what serving leaves over, which on a device that is always in a step is little: slack is
#   used by computing beside serving. A step that has begun is what the guard cannot take back, and this can: within
#   WATCH_S of a request's arrival the step goes on only where nothing else wants the processor.
# - Who may not raise a class again (without CAP_SYS_NICE) keeps the idle one from the first arrival on: safe, and
#   slower.
# - Linux only.


WATCH_S = 0.002
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
        """A step that the guard let begin, knowing of so many requests."""
        with self._lock:
            self._thread_id = threading.get_native_id()
            self._count = arrived_count
            self._gave_way_at_s = time.monotonic() if self._is_idle else None
            self._is_computing = True
            if gives_way and not self._is_idle:
                self._is_watched.set()

    @property
    def gave_way_at_s(self) -> float | None:
        """Since when the step under way has been behind serving, monotonic seconds; None: it is not."""
        return self._gave_way_at_s if self._is_computing else None

    def ended(self) -> None:
        """It has; what follows (an abort, a pause, the next question to the guard) must not wait for serving."""
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
