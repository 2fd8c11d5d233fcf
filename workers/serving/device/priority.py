"""The strongest priority that the device offers, below the guard: what serving wants, it gets first.

- On a CPU: the scheduler's idle class for every thread of the rollout engine, else nice 19. Linux only. A scheduler
  class counts among the threads of one cgroup: between two containers their `cpu.weight` (or `cpu.idle`) decides,
  which whoever starts them sets.
- Where Linux' autogroups are on, a class counts only within one session (`session_note`); with two engines in two
  sessions of a pair of cores, serving's P50 of the first token was three times as long.
- Threads that are started later inherit it from the thread that starts them.
- "idle" can be taken back by anyone who may set it; "low" (nice 19) only with CAP_SYS_NICE.
- "yield" lowers nothing at the start: the engine's own thread is idle from the moment a serving request arrives
  (YieldingThread). In the idle class it gets only what serving leaves over. That is little on a device that is always
  in a step, so rollouts use slack by computing beside serving. The guard cannot take back a step that has begun; this
  can: within WATCH_S of a request's arrival the step goes on only where nothing else wants the processor.
- A process that may not raise a class again (without CAP_SYS_NICE) keeps the idle one from the first arrival on: safe,
  and slower.
- A worker's front end, which is what runs beside its engine, is on serving's processors too: FRONT_NICE.
- On a GPU: the client priority of CUDA's multi-process service, see mps.py.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from ....fabric.contract.errors import ConfigError
from ....fabric.contract.text import did_you_mean

PRIORITIES = ("yield", "idle", "low", "normal")
NICE_LOW = 19
FRONT_NICE = 10  # a tenth against one normal thread: leases are renewed also while serving has all processors
PASSES_MAX = 5  # threads may be started while others are being lowered
WATCH_S = 0.002


def check_priority(how: str) -> None:
    """Refuse a priority that is none of PRIORITIES. Raises ConfigError."""
    if how not in PRIORITIES:
        raise ConfigError(f"there is no priority {how!r}: {did_you_mean(how, PRIORITIES)}", option="--priority")


def lower(pids: Iterable[int], how: str) -> str:
    """Give processes, their children and all their threads a priority.

    Args:
        pids: processes; those that have ended are left out.
        how: one of PRIORITIES; "normal" takes a lowered one back, where that is allowed.

    Returns:
        What came of it, for people.
    """
    check_priority(how)
    if how == "yield":
        return "as others while the guard lets rollouts run, idle class from a request's arrival on"
    roots = list(pids)
    done: set[int] = set()
    notes: set[str] = set()
    for _ in range(PASSES_MAX):
        new = {thread for pid in [*roots, *children_of(roots)] for thread in threads_of(pid)} - done
        if not new:
            break
        notes.add(lower_threads(new, how))
        done |= new
    return "; ".join(sorted(notes)) or "no process to lower"


def lower_threads(thread_ids: Iterable[int], how: str) -> str:
    """Give threads, named by their native ids, a priority as `lower` does; those that have ended are left out."""
    check_priority(how)
    if not sys.platform.startswith("linux"):
        return f"priority stays normal: {sys.platform} has no idle class that this program knows to set"
    reached = {note for thread in thread_ids if (note := _set(thread, how)) is not None}
    return "; ".join(sorted(reached)) or "no thread to lower"


def lower_engine_thread(name: str, how: str) -> str:
    """Lower an engine that runs in this process: its thread, by name, and threads that are not Python's (torch's).

    The other threads go on as before: leases must be renewed also while serving has all processors.
    """
    ours = {each.native_id for each in threading.enumerate() if each.name != name}
    return lower_threads([each for each in threads_of(os.getpid()) if each not in ours], how)


def lower_front(engine_thread: str | None = None) -> str:
    """Give the threads of this process FRONT_NICE, where they are not lower already; those that they start inherit it.

    Args:
        engine_thread: name of the engine's, where that runs in this process: it stays as it is, and so do threads that
            no Python thread is (torch's). None: it runs in another one.

    Returns:
        What came of it, for people.
    """
    if not sys.platform.startswith("linux"):
        return f"the front end's priority stays normal: on {sys.platform} threads have none of their own"
    done: set[int] = set()
    for _ in range(PASSES_MAX):
        new = set(_front_threads(engine_thread)) - done
        if not new:
            break
        done |= new
        for thread in new:
            try:
                if os.getpriority(os.PRIO_PROCESS, thread) < FRONT_NICE:
                    os.setpriority(os.PRIO_PROCESS, thread, FRONT_NICE)
            except ProcessLookupError:
                continue
            except OSError as error:
                return f"the front end's priority stays as it is: {error.strerror}"
    return f"the front end (leases, weights): nice {FRONT_NICE}"


def _front_threads(engine_thread: str | None) -> list[int]:
    if engine_thread is None:
        return threads_of(os.getpid())
    ours = [each.native_id for each in threading.enumerate() if each.name != engine_thread]
    return [each for each in ours if each is not None]


def session_note(other_pid: int | None) -> str | None:
    """Return what keeps scheduler classes from counting between this process and another one; None: nothing known.

    Linux' autogroups share a CPU between sessions first, whatever the classes of their threads.
    """
    try:
        is_on = Path("/proc/sys/kernel/sched_autogroup_enabled").read_text().strip() == "1"
        if not is_on or other_pid is None or os.getsid(other_pid) == os.getsid(0):
            return None
    except OSError:
        return None
    return (
        "Linux shares this CPU between sessions first (autogroups), so priorities count little between two sessions:"
        " type sysctl kernel.sched_autogroup_enabled=0, or start both engines in one session"
    )


def children_of(pids: Iterable[int]) -> list[int]:
    """List all processes below these, in no order."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        parent = _parent_of(entry)
        if parent is not None:
            parents.setdefault(parent, []).append(int(entry.name))
    found: list[int] = []
    open_ids = list(pids)
    while open_ids:
        below = parents.pop(open_ids.pop(), [])
        found += below
        open_ids += below
    return found


def threads_of(pid: int) -> list[int]:
    """List the native ids of a process' threads; none if it has ended, or where there is no /proc."""
    try:
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return []


def threads_named(pid: int, name: str) -> list[int]:
    """List the native ids of a process' threads of that name, as the kernel knows it: 15 characters at most."""
    found = []
    for thread in threads_of(pid):
        with contextlib.suppress(OSError):  # it has just ended
            if Path(f"/proc/{pid}/task/{thread}/comm").read_text().strip() == name:
                found.append(thread)
    return found


def _parent_of(entry: Path) -> int | None:
    try:
        text = (entry / "stat").read_text()
    except OSError:
        return None
    return int(text.rpartition(")")[2].split()[1])  # a program's name may hold spaces and brackets


def _set(thread: int, how: str) -> str | None:
    """Give one thread a priority; returns what came of it for people, None if the thread has ended."""
    try:
        if how == "idle" and _may_have_class(thread, os.SCHED_IDLE):
            return "idle class: runs when nothing else wants the processor"
        if how != "idle":
            _may_have_class(thread, os.SCHED_OTHER)
        os.setpriority(os.PRIO_PROCESS, thread, 0 if how == "normal" else NICE_LOW)
    except ProcessLookupError:
        return None
    except OSError as error:
        cause = "raising it again needs CAP_SYS_NICE" if how == "normal" else error.strerror
        return f"priority stays as it is: {cause}"
    if how == "normal":
        return "normal priority"
    return f"nice {NICE_LOW}: the lowest share of the processor; only CAP_SYS_NICE raises it again"


def _may_have_class(thread: int, scheduler_class: int) -> bool:
    """Set a thread's scheduler class; False if that is forbidden, as in a sandbox that still allows nice."""
    try:
        os.sched_setscheduler(thread, scheduler_class, os.sched_param(0))
    except PermissionError:
        return False
    return True


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
