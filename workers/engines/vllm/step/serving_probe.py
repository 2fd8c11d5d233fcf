"""The probe inside a serving team's own vLLM: one environment variable, no change to its command.

    ROLLFAB_PROBE=/dev/shm/rollfab-serving vllm serve …

- vLLM loads our plug-in in every process of an environment that has rollfab installed; with the variable set, the
  EngineCore shows its requests and steps in that page (workers/serving/probes/probe_page.py). Nothing else of vLLM is
  changed.
- A request shows as soon as its message has reached the process, while the step before it still computes.
- One line of vLLM's log says that the probe is on, or why it is not. A fault of the probe must never be one of serving:
  the probe ends, the page shows no life and why, and nothing is lent.
- Any version of vLLM will do that has what is touched here: it is looked for, version numbers are not compared.
- Needs the standard library and numpy alone, beside vLLM.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from .....fabric.contract.errors import ConfigError
from .....fabric.rules.serving.facts import StepWork
from ....serving.probes.probe_page import ProbeWriter
from ..common.names import PROBE, log

SAID = "ROLLFAB_PROBE_SAID"  # set once it was said why there is no probe: processes that are started later inherit it
ALIVE_S = 0.05
KEEP_COUNT = 20  # signs of life between two looks at the page's file
CLOCK_STEP_NS = 10_000_000_000  # between front end and engine nothing takes that long: the wall clock was set

TOUCHED: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "vllm.v1.core.sched.scheduler": {
        "Scheduler": ("__init__", "schedule", "update_from_output", "add_request", "finish_requests")
    },
    "vllm.v1.engine.core": {"EngineCore": ("preprocess_add_request",)},
    "vllm.v1.core.sched.output": {"SchedulerOutput": ("num_scheduled_tokens", "total_num_scheduled_tokens")},
    "vllm.v1.request": {"Request": ("num_tokens", "num_output_tokens", "is_finished")},
}
"""By module and class, what is wrapped or read; what instances alone have is found missing when it is first read."""


def install() -> None:
    """Wrap vLLM's scheduler; the page that the variable names is made with it."""
    path = os.environ[PROBE]
    missing = missing_of(TOUCHED)
    if not missing:
        _install(Path(path))
    elif SAID not in os.environ:
        os.environ[SAID] = "1"
        note = f"{engine_name()} has no {', '.join(missing)}: the probe cannot see it"
        log.error("rollfab probe: off at %s, serving goes on, nothing is lent: %s", path, note)
        with suppress(ConfigError, OSError):
            ProbeWriter(Path(path), engine_name()).end(note)


def missing_of(touched: Mapping[str, Mapping[str, tuple[str, ...]]]) -> list[str]:
    """List what this vLLM lacks of `touched`."""
    missing = []
    for module_name, classes in touched.items():
        try:
            module = import_module(module_name)
        except Exception:  # noqa: BLE001 - it counts as missing, and the look at the others goes on
            missing.append(module_name)
            continue
        for class_name, names in classes.items():
            found = getattr(module, class_name, None)
            known = {*dir(found), *getattr(found, "__dataclass_fields__", ())}
            missing += [f"{class_name}.{name}" for name in names if name not in known]
    return missing


def engine_name() -> str:
    """Name vLLM with its version, by its own word: its distribution may have any name, or be missing."""
    return f"vllm {getattr(sys.modules.get('vllm'), '__version__', 'of unknown version')}"


def _install(path: Path) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore

    if getattr(Scheduler, "_rollfab_probe", False):
        return
    Scheduler._rollfab_probe = True
    probes = _Probes(path)
    _wrap(Scheduler, "__init__", probes.around_start)
    _wrap(Scheduler, "schedule", probes.around_schedule)
    _wrap(Scheduler, "update_from_output", probes.around_update)
    _wrap(Scheduler, "add_request", probes.around_add)
    _wrap(Scheduler, "finish_requests", probes.around_finish)
    _wrap(EngineCore, "preprocess_add_request", probes.around_arrival)


def _wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    inner = getattr(owner, name)

    @functools.wraps(inner)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(inner, self, *args, **kwargs)

    setattr(owner, name, wrapped)


class _Probes:
    """One probe for the one scheduler of this process, made with it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._probe: SchedulerProbe | None = None
        self._is_over = False
        self._lock = threading.Lock()  # arrivals come in a thread of their own, signs of life in another

    def around_start(self, inner: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
        inner(scheduler, *args, **kwargs)
        self._do(lambda: self._start(scheduler))

    def _start(self, scheduler: Any) -> None:
        parallel = scheduler.vllm_config.parallel_config
        if parallel.data_parallel_size > 1:  # each has a device of its own
            self._path = self._path.with_name(f"{self._path.name}-dp{parallel.data_parallel_rank}")
        if self._probe is not None:  # a process may make one engine after another
            self._probe.stop("another engine of this process has taken its place")
        self._probe = SchedulerProbe(ProbeWriter(self._path, engine_name()), self._end)
        self._probe.show(scheduler)
        log.info(
            "rollfab probe: on at %s (process %d, %s): shows requests, steps and KV cache use, changes nothing",
            self._path,
            os.getpid(),
            engine_name(),
        )

    def around_schedule(self, inner: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        output = inner(scheduler, *args, **kwargs)
        self._tell(lambda probe: probe.scheduled(scheduler, output))
        return output

    def around_update(self, inner: Any, scheduler: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        stepped: list[Any] = []
        self._tell(lambda probe: stepped.extend(_stepped(scheduler, scheduler_output)))
        outputs = inner(scheduler, scheduler_output, *args, **kwargs)
        self._tell(lambda probe: probe.updated(scheduler, stepped) if scheduler_output.num_scheduled_tokens else None)
        return outputs

    def around_add(self, inner: Any, scheduler: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        added = inner(scheduler, request, *args, **kwargs)
        self._tell(lambda probe: probe.added(request))
        return added

    def around_finish(self, inner: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        finished = inner(scheduler, *args, **kwargs)
        self._tell(lambda probe: probe.left(scheduler))
        return finished

    def around_arrival(self, inner: Any, core: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        taken = inner(core, request, *args, **kwargs)  # one that is refused here never arrives
        self._tell(lambda probe: probe.arrived(request))
        return taken

    def _tell(self, work: Callable[[SchedulerProbe], None]) -> None:
        probe = self._probe
        if probe is not None:
            self._do(lambda: work(probe))

    def _do(self, work: Callable[[], None]) -> None:
        if self._is_over:
            return
        try:
            work()
        except Exception as error:  # noqa: BLE001 - the probe ends and says why; serving goes on
            self._end(error)

    def _end(self, error: Exception) -> None:
        """Log once, from any thread, why the probe ends, and look no more."""
        with self._lock:
            if self._is_over:
                return
            self._is_over = True
        text = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
        if self._probe is not None:
            self._probe.stop(f"in {engine_name()}: {text}")
        log.error("rollfab probe: off at %s, serving goes on, nothing is lent: %s", self._path, text)


def _stepped(scheduler: Any, output: Any) -> list[Any]:
    """List the requests that a step was of; what was aborted meanwhile is not among them."""
    return [scheduler.requests[name] for name in output.num_scheduled_tokens if name in scheduler.requests]


class SchedulerProbe:
    """Follows one scheduler. `arrived` may be called by another thread than the rest."""

    def __init__(self, writer: ProbeWriter, failed: Callable[[Exception], None]) -> None:
        """failed: is told what ended the probe's own thread."""
        self._writer = writer
        self._failed = failed
        self._requests: dict[str, _Followed] = {}
        self._steps: deque[tuple[int, StepWork]] = deque()  # scheduled, not yet ended: two where they overlap
        self._last_end_ns = 0
        self._known = 0
        self._has_ended = threading.Event()
        threading.Thread(target=self._live, name="rollfab-probe", daemon=True).start()

    def stop(self, note: str) -> None:
        """Give no sign of life any more, and show why."""
        self._has_ended.set()
        with suppress(OSError):
            self._writer.end(note)

    def _live(self) -> None:
        count = 0
        try:
            while not self._has_ended.wait(ALIVE_S):
                self._writer.alive(time.monotonic_ns())
                count += 1
                if count % KEEP_COUNT == 0:
                    self._writer.keep()
        except (ConfigError, OSError) as error:
            if not self._has_ended.is_set():
                self._failed(error)

    def arrived(self, request: Any) -> None:
        """Show a request whose message is here; the scheduler gets it once the step under way has ended."""
        self._writer.arrived(_arrived_ns(request), len(request.prompt_token_ids or ()))

    def added(self, request: Any) -> None:
        self._requests[request.request_id] = _Followed(_arrived_ns(request))
        self._known += 1  # until the next step shows it, the reader counts it among those on their way

    def scheduled(self, scheduler: Any, output: Any) -> None:
        if output.total_num_scheduled_tokens == 0:
            return
        prefill = decode = context = 0
        for name, count in output.num_scheduled_tokens.items():
            request = scheduler.requests[name]
            if request.num_computed_tokens <= request.num_prompt_tokens:  # counted with this step's already
                prefill += count
            else:
                decode += 1
            context += request.num_computed_tokens
        work = StepWork(prefill_tokens=prefill, decode_count=decode, context_tokens=context)
        self._steps.append((time.monotonic_ns(), work))
        self.show(scheduler)

    def updated(self, scheduler: Any, stepped: list[Any]) -> None:
        now_ns = time.monotonic_ns()
        if self._steps:
            scheduled_ns, work = self._steps.popleft()
            began_ns = max(scheduled_ns, self._last_end_ns)
            self._writer.stepped(began_ns, now_ns - began_ns, work)
            self._last_end_ns = now_ns
        for request in stepped:
            self._follow(request, now_ns)
        self.show(scheduler)

    def _follow(self, request: Any, now_ns: int) -> None:
        followed = self._requests.get(request.request_id)
        if followed is None:
            return
        count = request.num_output_tokens
        if count > followed.token_count:
            followed.first_ns = followed.first_ns or now_ns
            followed.last_ns, followed.token_count = now_ns, count
        if request.is_finished():
            self._end(request.request_id)

    def _end(self, name: str) -> None:
        followed = self._requests.pop(name)
        if followed.token_count:
            self._writer.ended(followed.arrived_ns, followed.first_ns, followed.last_ns, followed.token_count)

    def show(self, scheduler: Any) -> None:
        """Show everything as it is now."""
        self._drop_gone(scheduler)
        waiting, running = [], []
        for name, followed in self._requests.items():
            request = scheduler.requests[name]
            if request.is_finished():  # it only waits for its blocks to be taken elsewhere
                continue
            if followed.first_ns:
                running.append((followed.first_ns, followed.token_count, request.num_tokens))
            else:
                waiting.append((followed.arrived_ns, max(1, request.num_tokens - request.num_computed_tokens)))
        manager, config = scheduler.kv_cache_manager, scheduler.cache_config
        capacity = int(config.num_gpu_blocks or 0) * int(scheduler.block_size)
        self._writer.show(
            waiting=waiting,
            running=running,
            step=(max(self._steps[0][0], self._last_end_ns), self._steps[0][1]) if self._steps else None,
            known=self._known,
            kv_used=int(manager.usage * capacity),
            kv_capacity=capacity,
        )
        self._writer.alive(time.monotonic_ns())

    def left(self, scheduler: Any) -> None:
        """Show that requests were ended from outside: aborted, or complete by a stop text that the front end saw."""
        self._drop_gone(scheduler)
        self.show(scheduler)

    def _drop_gone(self, scheduler: Any) -> None:
        for name in [name for name in self._requests if name not in scheduler.requests]:
            self._end(name)


def _arrived_ns(request: Any) -> int:
    """Return when its front end took it in, by the monotonic clock; vLLM notes it by the wall clock."""
    since_ns = time.time_ns() - int(request.arrival_time * 1e9)
    return time.monotonic_ns() - min(max(0, since_ns), CLOCK_STEP_NS)


class _Followed:
    """One request: times in ns, 0 before its first token."""

    __slots__ = ("arrived_ns", "first_ns", "last_ns", "token_count")

    def __init__(self, arrived_ns: int) -> None:
        self.arrived_ns = arrived_ns
        self.first_ns = self.last_ns = self.token_count = 0
