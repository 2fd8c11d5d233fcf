"""vLLM's scheduler under limits that change at any time; it tells what it does. Both go through words of shared memory.

- Limits are read at every step (scheduler_page.py); a lowered one holds from the next step on.
- Above a lowered running count the oldest requests go on; the others keep their KV cache and wait.
- With limits of 0 it schedules nothing, and rests a millisecond between two looks, so that other processes have the
  processor.
- A KV limit admits requests by what they hold, oldest first; those that run keep what they have, and go on growing.
- Beside a serving engine the guard is asked before each step; where it says none, it is asked again
  once the serving engine has done something, or after some milliseconds.
- The guard's answer needs no other process: a worker that hangs, or a broker that is away, cannot keep rollouts
  running.
- While the engine has nothing to compute, a thread goes on asking the guard, so that what could be lent is known; it
  also writes the guard's text for the worker: JSON with "view" (GuardView) and, more rarely, "sharing" (of a
  SharingReport).

Runs in vLLM's EngineCore process. vLLM calls this interface non-public: the pinned version is what it was read for.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson
import torch
from vllm.platforms import current_platform
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from .....fabric.rules.serving.facts import StepWork
from .....fabric.rules.serving.guard import Allowance
from ....serving.device.priority import YieldingThread, lower, lower_threads, threads_named
from ....serving.guarding.guard import Guard, GuardConfig, Policy
from ....serving.guarding.step_times import StepTimes
from ....serving.probes.reader import ProbeReader
from ...base import EngineLimits
from .scheduler_page import (
    IS_GUARDED,
    IS_HELD,
    KV_CAPACITY,
    KV_USED_PPM,
    RUNNING,
    SCHEDULED_TOKENS,
    STEP_AT_NS,
    STEPS,
    SchedulerPage,
)

log = logging.getLogger(__name__)

REST_S = 0.001
GUARD_REST_S = 0.002  # between two looks at a guard that is shut
SHUT_S = 0.1  # then vLLM has its turn again, which may hold an abort; an empty step of it is a millisecond's work
SWITCH_S = 0.0005  # with Python's own 5 ms, an abort could wait a step for the thread that reads it to get its turn
TELL_S = 0.1
AGAIN_S = 0.01  # what is left of a serving step shrinks, and slack may grow by it, without a word on its page
GLOO_THREAD = "gloo_tcp_loop"  # looks for other ranks again and again; here there are none
ONE = StepWork(decode_count=1)  # the least that could run, where there is nothing that would
SHARING_S = 1.0  # counting percentiles takes some milliseconds


class _Limited(Scheduler):  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        options = self.vllm_config.additional_config["rollfab"]
        self._page = SchedulerPage(Path(options["page"]))
        self._page.words[KV_CAPACITY] = int(self.cache_config.num_gpu_blocks or 0) * int(self.block_size)
        self._own_running_max: int = self.max_num_active_reqs  # type: ignore[has-type]
        self._own_step_tokens_max: int = self.max_num_scheduled_tokens  # type: ignore[has-type]
        self._never = threading.Event()
        guard = options.get("guard")
        self._guard = StepGuard(self._page, guard) if guard else None
        sys.setswitchinterval(SWITCH_S)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Schedule one step's work, within the limits."""
        limits = self._page.limits()
        running_max = _least(self._own_running_max, limits.running_count)
        step_tokens_max = _least(self._own_step_tokens_max, limits.step_tokens)
        is_held = running_max == 0 or step_tokens_max == 0 or bool(self._page.words[IS_HELD])
        if not is_held and self._guard is not None:
            step_tokens_max = _least(step_tokens_max, self._guarded(running_max))
        if is_held or step_tokens_max == 0:
            self._never.wait(REST_S)
            running_max = step_tokens_max = 0
        self.max_num_scheduled_tokens = step_tokens_max
        self.max_num_active_reqs = min(running_max, self._admissible(limits))
        waiting_with_kv = self.running[running_max:]
        del self.running[running_max:]
        try:
            output = super().schedule(*args, **kwargs)
        finally:
            self.running.extend(waiting_with_kv)
        self._page.words[SCHEDULED_TOKENS] = output.total_num_scheduled_tokens
        if self._guard is not None and output.total_num_scheduled_tokens:
            self._guard.begins(self._work_of(output))
        self._tell()
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Take in a step's results, and tell of the step before its tokens are sent."""
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if scheduler_output.total_num_scheduled_tokens > 0:
            self._page.words[STEP_AT_NS] = time.monotonic_ns()
            self._page.words[STEPS] += 1
            if self._guard is not None:
                self._guard.ended()
        self._tell()
        return outputs

    def finish_requests(self, *args: Any, **kwargs: Any) -> Any:
        finished = super().finish_requests(*args, **kwargs)
        self._tell()
        return finished

    def _admissible(self, limits: EngineLimits) -> int:
        """Count the requests that may run at once, by what all of them hold."""
        if limits.kv_tokens is None:
            return self._own_running_max
        room = limits.kv_tokens - sum(request.num_tokens for request in self.running)
        count = len(self.running)
        for request in self.waiting:
            room -= request.num_tokens
            if room < 0:
                break
            count += 1
        return count

    def _guarded(self, running_max: int) -> int | None:
        """Ask the guard what may run now, and again within SHUT_S until it lets anything run; None: all.

        On a CPU all of this is time of the core that serving computes on: it is asked again only when it may answer
        otherwise.
        """
        assert self._guard is not None
        work = self._next_work(running_max)
        allowed, until_s = self._guard.step_tokens(work), time.monotonic() + SHUT_S
        while allowed == 0 and not self._page.words[IS_HELD] and time.monotonic() < until_s:
            self._never.wait(GUARD_REST_S)
            if self._guard.may_differ():
                allowed = self._guard.step_tokens(work)
        return allowed

    def _next_work(self, running_max: int) -> StepWork:
        """Describe what the next step would compute, if it could."""
        prefill = decode = context = 0
        for request in self.running[:running_max]:
            left = request.num_tokens - request.num_computed_tokens
            prefill, decode = (prefill + left, decode) if left > 1 else (prefill, decode + 1)
            context += request.num_computed_tokens
        free = running_max - len(self.running)
        for request in self.waiting:
            if free <= 0 or prefill >= self._own_step_tokens_max:
                break
            prefill, free = prefill + request.num_tokens - request.num_computed_tokens, free - 1
        prefill = min(prefill, self._own_step_tokens_max)
        return StepWork(prefill_tokens=prefill, decode_count=decode, context_tokens=context)

    def _work_of(self, output: Any) -> StepWork:
        """Describe what a step that was scheduled computes."""
        prefill = decode = context = 0
        for name, count in output.num_scheduled_tokens.items():
            prefill, decode = (prefill + count, decode) if count > 1 else (prefill, decode + 1)
            context += self.requests[name].num_computed_tokens
        return StepWork(prefill_tokens=prefill, decode_count=decode, context_tokens=context)

    def _tell(self) -> None:
        self._page.words[RUNNING] = len(self.running)
        self._page.words[KV_USED_PPM] = int(self.kv_cache_manager.usage * 1e6)


class LimitedScheduler(_Limited):
    """Limits engines that schedule a step once the one before it has ended."""


class LimitedAsyncScheduler(_Limited, AsyncScheduler):  # type: ignore[misc]
    """Limits engines that schedule a step while the one before it runs."""


def _least(own: int, limit: int | None) -> int:
    return own if limit is None else min(own, limit)


class StepGuard:
    """The guard of one scheduler. Its thread and the scheduler's take turns."""

    def __init__(self, page: SchedulerPage, row: dict[str, Any]) -> None:
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
