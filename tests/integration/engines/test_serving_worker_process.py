"""A serving worker as a process: it waits for its probe, is lent by its team alone, and reports what came of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rollfab.fabric.contract.records import WorkerInfo
from rollfab.workers.serving.device.priority import FRONT_NICE, lower, threads_of
from rollfab.workers.serving.probes.probe_page import ProbeWriter
from tests.support.processes.fabric_processes import PYTHONPATH, Processes, processes

TASKS = [{"id": "a", "seed": 0}]


@contextmanager
def resting_engine(page: Path) -> Iterator[None]:
    """A serving engine without requests, as its probe shows it, while the block runs."""
    writer, leave = ProbeWriter(page), threading.Event()
    writer.show(waiting=[], running=[], step=None, known=0, kv_used=0, kv_capacity=1000)

    def live() -> None:
        while not leave.wait(0.02):
            writer.alive(time.monotonic_ns())

    thread = threading.Thread(target=live)
    thread.start()
    try:
        yield
    finally:
        leave.set()
        thread.join()


def told(fabric: Processes) -> WorkerInfo:
    info = fabric.worker_of("serving")
    assert info is not None
    return info


@pytest.mark.timeout(180)  # processes start in seconds; many times that on a busy machine
def test_a_serving_worker_computes_only_beside_a_probe_and_only_when_lent(tmp_path: Path) -> None:
    page = tmp_path / "page"
    objectives = ("--slo-ttft-ms", "2000", "--slo-tpot-ms", "500")
    with processes(tmp_path) as fabric:
        # Given a serving worker whose serving engine is not there yet
        words = ("--role", "serving", "--probe", str(page), *objectives, "--pool", "chat", "--slots", "4")
        fabric.start("controller", "controller")
        fabric.start("agent", "agent")
        fabric.start("serving", "worker", *words)
        log = fabric.supervisor.children["serving"]
        fabric.until(lambda: f"ROLLFAB_PROBE={page} vllm serve" in log.tail(20), 60.0, "it says what to type")

        # And it is known to the broker, with what it waits for
        info = fabric.until(lambda: fabric.worker_of("serving"), 30.0, "it beats")
        assert (info.state, info.pool, info.guard_state, info.slot_count) == ("waiting", "chat", "shut", 0)
        assert f"ROLLFAB_PROBE={page} vllm serve" in str(info.error)
        page.write_bytes(b"foreign")
        fabric.until(lambda: "is no page of a probe" in log.tail(20), 30.0, "it says what it has found")
        fabric.until(lambda: "is no page of a probe" in str(told(fabric).error), 30.0, "its heartbeat says it")

        with resting_engine(page):
            # When that is started, then the worker is there, below it, and lends nothing that nobody lent
            fabric.wait_for_role("controller", "agent", "serving")
            fabric.until(lambda: told(fabric).guard_state == "open", 30.0, "its guard sees the serving engine")
            info = told(fabric)
            assert (info.pool, info.probe, info.error) == ("chat", "vllm", None)
            fabric.until(
                lambda: "in pool chat: ready, observing only" in log.tail(20), 30.0, "it says that it is ready"
            )
            assert f"by {page} (process {os.getpid()})" in log.tail(20)
            classes = [os.sched_getscheduler(thread) for thread in threads_of(info.pid)]
            assert os.SCHED_IDLE in classes and os.sched_getscheduler(info.pid) == os.SCHED_OTHER
            assert os.getpriority(os.PRIO_PROCESS, info.pid) == FRONT_NICE
            lower([info.pid], "normal")  # other tests may want all processors
            run = fabric.new_run("r", "frozenlake")
            [group_id] = run.submit(TASKS, group_size=2)
            time.sleep(1.0)
            assert told(fabric).token_count == 0

            # When its team lends the pool, then it works, and reports it
            fabric.ask(lambda ports: ports.board.set_lend("pool:chat", "on"))
            fabric.until(lambda: "in pool chat: ready, lent" in log.tail(20), 30.0, "it says that it is lent")
            [group] = fabric.collect(run, 1, 40.0)
            assert group.group_id == group_id
            reports = fabric.until(
                lambda: {
                    name: report
                    for name, report in fabric.ask(lambda ports: ports.board.sharing()).items()
                    if report.token_count > 0 and report.lent_s > 0
                },
                20.0,
                "its report arrived",
            )
            assert [report.ttft_slo_ms for report in reports.values()] == [2000.0]

            # When another one is started beside the same engine, then it ends at once, and names this one
            again = [sys.executable, "-m", "rollfab", "worker", *words]
            place = {"PYTHONPATH": PYTHONPATH, "ROLLFAB_URL": fabric.url}
            second = subprocess.run(again, env={**os.environ, **place}, capture_output=True, text=True)
            assert second.returncode == 2
            assert f"process {info.pid} is the worker beside this serving engine" in " ".join(second.stderr.split())

            # When this one is killed, then its successor finds its place free
            os.kill(info.pid, signal.SIGKILL)
            fabric.until(lambda: fabric.supervisor.children["serving"].pid != info.pid, 30.0, "it is started again")
            fabric.wait_for_role("serving")
            fabric.until(lambda: told(fabric).guard_state == "open", 30.0, "its guard sees the serving engine")
            lower([told(fabric).pid], "normal")

        # When the serving engine is gone, then it is shut
        fabric.until(lambda: told(fabric).guard_state == "shut", 30.0, "its guard is shut")
        assert "no sign" in str(told(fabric).guard_reason)
        fabric.until(lambda: told(fabric).state == "waiting", 30.0, "its heartbeat says what it waits for")
        assert "has ended or stands still" in str(told(fabric).error)
        log = fabric.supervisor.children["serving"]
        fabric.until(lambda: "waiting for the serving engine, nothing is lent" in log.tail(20), 30.0, "and so does it")
