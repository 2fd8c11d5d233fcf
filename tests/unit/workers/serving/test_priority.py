"""Priorities of real processes: children that do nothing, looked at by the operating system's own means."""

import ast
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollfab.fabric.contract.errors import ConfigError
from rollfab.workers.serving.device.priority import (
    FRONT_NICE,
    children_of,
    lower,
    lower_engine_thread,
    lower_threads,
    threads_named,
    threads_of,
)

OURS = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[4] / "src")}

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="scheduler classes are Linux'")

# a process with a thread beside its main one, and a child
FAMILY = """
import subprocess, sys, threading, time
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
child = subprocess.Popen([sys.executable, "-c", "print('up', flush=True); import time; time.sleep(60)"],
                         stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(60)
"""


@pytest.fixture
def family() -> Iterator[tuple[int, int]]:
    """A process and its child."""
    parent = subprocess.Popen([sys.executable, "-c", FAMILY], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    yield parent.pid, child
    os.kill(child, 9)
    parent.kill()
    parent.stdout.close()
    parent.wait()


def classes_of(*pids: int) -> set[int]:
    return {os.sched_getscheduler(thread) for pid in pids for thread in threads_of(pid)}


def test_idle_is_the_class_of_every_thread_of_a_process_and_its_children(family: tuple[int, int]) -> None:
    parent, child = family
    assert len(threads_of(parent)) == 2 and children_of([parent]) == [child]
    note = lower([parent], "idle")
    assert classes_of(parent, child) == {os.SCHED_IDLE}
    assert note.startswith("idle class")


def test_idle_is_taken_back_without_a_trace(family: tuple[int, int]) -> None:
    parent, child = family
    lower([parent], "idle")
    note = lower([parent], "normal")
    assert classes_of(parent, child) == {os.SCHED_OTHER}
    assert {os.getpriority(os.PRIO_PROCESS, pid) for pid in family} == {0}
    assert note == "normal priority"


def test_low_is_nice_19_and_takes_it_out_of_the_idle_class(family: tuple[int, int]) -> None:
    parent, child = family
    lower([parent], "idle")
    note = lower([parent], "low")
    threads = [*threads_of(parent), *threads_of(child)]
    assert {os.getpriority(os.PRIO_PROCESS, thread) for thread in threads} == {19}
    assert classes_of(parent, child) == {os.SCHED_OTHER}
    assert "CAP_SYS_NICE" in note


def test_what_is_forbidden_is_told(family: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setscheduler", forbidden)
    assert lower([family[0]], "idle").startswith("nice 19"), "the next best"
    monkeypatch.setattr(os, "setpriority", forbidden)
    assert "CAP_SYS_NICE" in lower([family[0]], "normal")


def test_processes_that_have_ended_are_left_out() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert lower([ended.pid], "idle") == "no process to lower"
    assert lower_threads([ended.pid], "idle") == "no thread to lower"


def test_an_engine_in_this_process_is_lowered_and_the_rest_of_it_is_not() -> None:
    leave = threading.Event()
    engine = threading.Thread(target=leave.wait, name="some-engine")
    engine.start()
    try:
        lower_engine_thread("some-engine", "idle")
        assert engine.native_id is not None
        assert os.sched_getscheduler(engine.native_id) == os.SCHED_IDLE
        assert os.sched_getscheduler(threading.get_native_id()) == os.SCHED_OTHER
    finally:
        lower_engine_thread("some-engine", "normal")
        leave.set()
        engine.join()


# lowers itself beside an engine's thread if there is one, then starts one more of its own; prints what each has
FRONT = """
import os, sys, threading
from rollfab.workers.serving.device.priority import lower_engine_thread, lower_front
leave, rows = threading.Event(), []
engine = sys.argv[1] or None
def start(name):
    threading.Thread(target=leave.wait, name=name, daemon=True).start()
start("some-engine")
if engine:
    lower_engine_thread(engine, "idle")
note = lower_front(engine)
start("later")
for each in threading.enumerate():
    rows.append((each.name, os.getpriority(os.PRIO_PROCESS, each.native_id), os.sched_getscheduler(each.native_id)))
print(dict((name, (nice, kind)) for name, nice, kind in rows), note, sep="|")
"""


@pytest.mark.parametrize("engine", ["", "some-engine"])
def test_the_front_end_has_a_tenth_and_an_engine_in_its_process_what_it_had(engine: str) -> None:
    found = subprocess.run(
        [sys.executable, "-c", FRONT, engine], capture_output=True, text=True, check=True, env=OURS
    ).stdout
    threads, note = found.strip().split("|")
    own = os.getpriority(os.PRIO_PROCESS, 0)  # these tests may run with a low priority themselves
    front = (max(own, FRONT_NICE), os.SCHED_OTHER)
    beside = (own, os.SCHED_IDLE) if engine else front
    assert ast.literal_eval(threads) == {"MainThread": front, "some-engine": beside, "later": front}
    assert note == "the front end (leases, weights): nice 10"


def test_a_front_end_that_is_lower_already_is_not_raised() -> None:
    code = FRONT.replace("import os, sys", "import os; os.nice(15)\nimport sys")
    found = subprocess.run(
        [sys.executable, "-c", code, ""], capture_output=True, text=True, check=True, env=OURS
    ).stdout
    lowered = min(19, os.getpriority(os.PRIO_PROCESS, 0) + 15)
    assert {nice for nice, _ in ast.literal_eval(found.split("|")[0]).values()} == {lowered}


def test_threads_are_found_by_their_name() -> None:
    leave = threading.Event()
    thread = threading.Thread(target=leave.wait)
    thread.start()
    try:
        Path(f"/proc/self/task/{thread.native_id}/comm").write_text("looks-for-ranks")
        assert threads_named(os.getpid(), "looks-for-ranks") == [thread.native_id]
        assert threads_named(os.getpid(), "looks") == []
    finally:
        leave.set()
        thread.join()


def test_a_priority_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean low"):
        lower([], "lowest")
