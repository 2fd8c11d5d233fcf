"""An asyncio event loop on virtual time, and the processes that live on it.

- Time moves only when nothing can run, and then to the next timer: an hour of waiting costs nothing.
- What each process does keeps its order; processes are mixed by the seed, as a scheduler would mix them.
- There are no threads: what is handed to an executor runs at once.
- Nothing here reads a clock or throws dice but the seeded ones, so the same seed gives the same run.

A process is whatever runs in a context in which PROCESS names it; tasks inherit it from those who make them.
"""

from __future__ import annotations

import asyncio
import heapq
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from random import Random
from typing import Any

WALL_START_MS = 1_700_000_000_000
SPIN_COUNT_MAX = 50_000  # callbacks without time moving: somebody waits in a loop without waiting


class Deadlock(Exception):
    """Nothing can ever happen any more."""


class Spin(Exception):
    """Something runs for ever without letting time pass."""


class ThreadUsed(Exception):
    """A thread called back: what it did, and when, no seed decides."""


class Process:
    """A process of the simulated cluster: it can be stopped, woken and killed as a real one.

    Attributes:
        held: while stopped, what it would do next; None while it runs.
        is_replaced: another one runs in its place; it is not started again.
        is_world_hung: whether its environments hang now.
        crash: ends it, and has another one started.
        trouble_s: until when anything was wrong with it; checkers expect nothing of it before.
    """

    def __init__(self, name: str, role: str) -> None:
        self.name = name
        self.role = role
        self.is_dead = False
        self.held: list[asyncio.Handle] | None = None
        self.trouble_s = 0.0
        self.is_replaced = False
        self.is_world_hung = False
        self.crash: Callable[[], None] = lambda: None
        self.tasks: list[asyncio.Task[Any]] = []
        self.context = copy_context()
        self.context.run(PROCESS.set, self)

    def start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run `work` as this process."""
        return asyncio.get_running_loop().create_task(work, context=self.context)

    def kill(self) -> None:
        """SIGKILL. What its tasks still do while they are cancelled reaches nobody: see `Link`."""
        self.is_dead = True
        self.wake()
        for task in self.tasks:
            task.cancel()

    def stop(self) -> None:
        """SIGSTOP: timers and answers come, nothing is done about them."""
        if self.held is None:
            self.held = []

    def wake(self) -> None:
        """SIGCONT: all that waited is done now."""
        if self.held is not None:
            loop = asyncio.get_running_loop()
            assert isinstance(loop, VirtualLoop)
            held, self.held = self.held, None
            loop.put_back(held)


PROCESS: ContextVar[Process | None] = ContextVar("PROCESS", default=None)


class VirtualLoop(asyncio.BaseEventLoop):
    """See above."""

    def __init__(self, random: Random) -> None:
        super().__init__()
        self._now_s = 0.0
        self._random = random
        self._spin_count = 0
        self._has_thread = False
        self.tasks: list[asyncio.Task[Any]] = []
        self._ready: deque[asyncio.Handle] = deque()
        self._scheduled: list[asyncio.TimerHandle] = []
        self.set_task_factory(_make_task)

    def time(self) -> float:
        return self._now_s

    def put_back(self, handles: list[asyncio.Handle]) -> None:
        """Callbacks that were held while their process was stopped."""
        self._ready.extend(handles)

    def put_down(self) -> None:
        """End all that still runs, so that nothing is left to the garbage collector, and close."""
        try:
            self.run_until_complete(self._end_all())
        finally:
            self.close()

    async def _end_all(self) -> None:
        own = asyncio.current_task()
        for _ in range(10):
            left = [task for task in self.tasks if not task.done() and task is not own]
            if not left:
                return
            for task in left:
                task.cancel()
            await asyncio.wait(left, timeout=1.0)

    def run_in_executor(self, executor: Any, function: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        future = self.create_future()
        try:
            future.set_result(function(*args))
        except Exception as error:  # noqa: BLE001 - handed to whoever awaits it, as from a thread
            future.set_exception(error)
        return future

    def call_soon_threadsafe(self, callback: Any, *args: Any, context: Context | None = None) -> asyncio.Handle:
        self._has_thread |= threading.get_ident() != self._thread_id
        return super().call_soon_threadsafe(callback, *args, context=context)

    def _run_once(self) -> None:
        if self._has_thread:
            self._has_thread = False
            raise ThreadUsed("something runs in a thread: hand it to run_in_executor, or avoid it in the simulation")
        if not self._ready:
            self._advance()
        while self._scheduled and self._scheduled[0].when() <= self._now_s:
            self._ready.append(heapq.heappop(self._scheduled))
        batch, self._ready = self._ready, deque()
        self._spin_count += len(batch)
        if self._spin_count > SPIN_COUNT_MAX:
            self._spin_count = 0
            raise Spin(f"{SPIN_COUNT_MAX} callbacks at {self._now_s:.3f} s; the last: {batch[-1]!r}")
        for handle in self._mixed(batch):
            if handle.cancelled():
                continue
            process = handle._context.get(PROCESS)
            if process is not None and process.held is not None:
                process.held.append(handle)
            else:
                handle._run()

    def _advance(self) -> None:
        while self._scheduled and self._scheduled[0].cancelled():
            heapq.heappop(self._scheduled)
        if not self._scheduled:
            raise Deadlock(f"at {self._now_s:.3f} s everybody waits and nothing will ever happen")
        self._now_s = max(self._now_s, self._scheduled[0].when())
        self._spin_count = 0

    def _mixed(self, batch: deque[asyncio.Handle]) -> deque[asyncio.Handle]:
        """The callbacks in another order, each process' own kept."""
        if len(batch) == 1:
            return batch
        lines: dict[Process | None, deque[asyncio.Handle]] = {}
        order: list[Process | None] = []
        for handle in batch:
            process = handle._context.get(PROCESS)
            lines.setdefault(process, deque()).append(handle)
            order.append(process)
        if len(lines) == 1:
            return batch
        self._random.shuffle(order)
        return deque(lines[process].popleft() for process in order)

    # What BaseEventLoop leaves to its subclasses, and what needs no doing without sockets and threads.

    def _process_events(self, event_list: Any) -> None: ...

    def _write_to_self(self) -> None: ...

    def _timer_handle_cancelled(self, handle: Any) -> None: ...


def _make_task(
    loop: VirtualLoop, work: Coroutine[Any, Any, Any], context: Context | None = None, **rest: Any
) -> asyncio.Task[Any]:
    task = asyncio.Task(work, loop=loop, context=context, **rest)
    process = PROCESS.get() if context is None else context.get(PROCESS)
    _keep(loop.tasks, task)
    if process is not None:
        _keep(process.tasks, task)
    return task


def _keep(tasks: list[asyncio.Task[Any]], task: asyncio.Task[Any]) -> None:
    if len(tasks) >= 256:
        tasks[:] = [each for each in tasks if not each.done()]
    tasks.append(task)


class VirtualClock:
    """Clock (see fabric) of a virtual loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def now_s(self) -> float:
        return self._loop.time()

    def wall_ms(self) -> int:
        return WALL_START_MS + int(self.now_s() * 1000)

    async def sleep(self, duration_s: float) -> None:
        await asyncio.sleep(duration_s)


def on_virtual_time(work: Coroutine[Any, Any, None]) -> None:
    """Run `work` to its end on a loop of its own, and end what it leaves behind."""
    loop = VirtualLoop(Random(1))
    try:
        loop.run_until_complete(work)
    finally:
        loop.put_down()
