"""The guard inside vLLM's EngineCore: asked by the scheduler before each step, and telling the worker what it does.

- Its answer needs no other process: a worker that hangs, or a broker that is away, cannot keep rollouts running.
- While the engine has nothing to compute, a thread goes on looking, so that what could be lent is known; it also writes
  the guard's text for the worker: JSON with "view" (GuardView) and, more rarely, "sharing" (of a SharingReport).
"""

from __future__ import annotations

import importlib
import logging
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson
import torch
from vllm.platforms import current_platform

from .....fabric.rules.serving.facts import StepWork
from .....fabric.rules.serving.guard import Allowance
from ....serving.device.priority import lower, lower_threads, threads_named
from ....serving.device.scheduling import YieldingThread
from ....serving.guarding.guard import Guard, GuardConfig, Policy
from ....serving.guarding.step_times import StepTimes
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
        self._steps = StepTimes(is_on_cpu=bool(current_platform.is_cpu()), computes_here=self._yielding is not None)
        self._looked_at_s = 0.0
        self._sharing: dict[str, Any] | None = None
        self._counted_at_s = 0.0
        threading.Thread(target=self._live, name="rollfab-guard", daemon=True).start()

    def step_tokens(self, work: StepWork) -> int | None:
        """Decide how many tokens may run in the next step; None: all."""
        if not work.decode_count and not work.prefill_tokens:
            return None
        with self._lock:
            self._arrived_count = self._reader.arrived_count()
            allowed = self._look(time.monotonic(), work)
        return allowed if self._page.words[IS_GUARDED] else None

    def may_differ(self) -> bool:
        """Tell whether the guard may answer otherwise than it did: serving has gone on, or some time has passed."""
        return self._reader.change_count() != self._seen or time.monotonic() - self._looked_at_s >= AGAIN_S

    def _look(self, now_s: float, work: StepWork, *, is_idle: bool = False) -> int | None:
        self._guard.orders = self._page.orders()
        self._looked_at_s, self._seen = now_s, self._reader.change_count()
        self._allowance = self._guard.look(now_s, work, is_idle=is_idle)
        return self._allowance.step_tokens

    def begins(self, work: StepWork) -> None:
        """Note that a step was scheduled."""
        self._steps.begins(work)
        if self._yielding is not None:
            self._yielding.begins(self._arrived_count, gives_way=self._allowance.gives_way)

    def ended(self) -> None:
        """Note that the oldest scheduled step has ended."""
        if self._yielding is not None:
            self._yielding.ended()
        step = self._steps.ended()
        if step is not None:
            with self._lock:
                self._guard.stepped(step.began_s, step.ended_s, step.work, device_s=step.device_s)

    def _live(self) -> None:
        never = threading.Event()
        while not never.wait(TELL_S):
            now_s = time.monotonic()
            with self._lock:
                if now_s - self._looked_at_s >= TELL_S and not self._steps.is_computing:
                    self._look(now_s, ONE, is_idle=True)
                gave_way_at_s = self._yielding.gave_way_at_s if self._yielding is not None else None
                if gave_way_at_s is not None:
                    self._guard.waits(now_s, gave_way_at_s)
                if now_s - self._counted_at_s >= SHARING_S:
                    self._sharing, self._counted_at_s = self._guard.sharing(), now_s
                view = self._guard.view(now_s)
            self._page.say(orjson.dumps({"view": view, "sharing": self._sharing, "at_s": now_s}))


def _yielding(config: GuardConfig, reader: ProbeReader) -> YieldingThread | None:
    """Make what gives way within a step: the scheduler's thread, where it is the one that computes; else None."""
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
