"""vLLM's scheduler under limits that change at any time; it tells what it does. Both go through words of shared memory.

- Limits are read at every step (scheduler_page.py); a lowered one holds from the next step on.
- Above a lowered running count the oldest requests go on; the others keep their KV cache and wait.
- With limits of 0 it schedules nothing, and rests a millisecond between two looks, so that other processes have the
  processor.
- A KV limit admits requests by what they hold, oldest first; those that run keep what they have, and go on growing.
- Beside a serving engine the guard is asked before each step (serving_guard.py); where it says none, it is asked again
  once the serving engine has done something, or after some milliseconds.

Runs in vLLM's EngineCore process. vLLM calls this interface non-public: the pinned version is what it was read for.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from .....fabric.rules.serving.facts import StepWork
from ...base import EngineLimits
from .scheduler_page import IS_HELD, KV_CAPACITY, KV_USED_PPM, RUNNING, SCHEDULED_TOKENS, STEP_AT_NS, STEPS, Page
from .serving_guard import StepGuard

REST_S = 0.001
GUARD_REST_S = 0.002  # between two looks at a guard that is shut
SHUT_S = 0.1  # then vLLM has its turn again, which may hold an abort; an empty step of it is a millisecond's work
SWITCH_S = 0.0005  # with Python's own 5 ms, an abort could wait a step for the thread that reads it to get its turn


class _Limited(Scheduler):  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        options = self.vllm_config.additional_config["rollfab"]
        self._page = Page(Path(options["page"]))
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
        """End requests, and tell of it."""
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
