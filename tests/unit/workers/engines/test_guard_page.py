"""Orders to a guard and its words to the worker, through a page of shared memory; and giving way within a step."""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rollfab.fabric.contract.errors import ConfigError
from rollfab.workers.engines.vllm.step.scheduler_page import SchedulerPage
from rollfab.workers.serving.device.priority import YieldingThread
from rollfab.workers.serving.guarding.guard import GuardOrders
from rollfab.workers.serving.probes.probe_page import ProbeWriter
from tests.support.until import wait_until


@pytest.mark.parametrize(
    "orders",
    [
        GuardOrders(),
        GuardOrders(is_lent=True),
        GuardOrders(is_lent=True, until_s=1234.5, compute_fraction_max=0.25, policy=3),
    ],
)
def test_orders_arrive_as_they_were_given_with_their_end(orders: GuardOrders) -> None:
    page = SchedulerPage.create()
    page.order(orders)

    assert SchedulerPage(page.path).orders() == orders
    page.close()


def test_a_new_page_lends_nothing() -> None:
    page = SchedulerPage.create()

    assert page.orders() == GuardOrders(is_lent=False, until_s=math.inf)
    assert page.said() is None
    page.close()


def test_words_of_the_guard_arrive_whole() -> None:
    page = SchedulerPage.create()
    other = SchedulerPage(page.path)

    other.say(b"first and long")
    assert page.said() == b"first and long"
    other.say(b"second")
    assert page.said() == b"second"
    page.close()


def test_a_second_engine_may_not_write_over_the_page_of_one_that_lives(tmp_path: Path) -> None:
    writer = ProbeWriter(tmp_path / "page")
    writer.alive(time.monotonic_ns())
    child = os.fork()
    if child == 0:
        try:
            ProbeWriter(tmp_path / "page")
        except ConfigError as error:
            os._exit(7 if "give every engine its own" in str(error) else 8)
        os._exit(0)

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


class Computing:
    """A thread that computes steps as a test says."""

    def __init__(self, yielding: YieldingThread) -> None:
        self._yielding = yielding
        self._turns: list[Callable[[], None]] = []
        self._has_turn = threading.Semaphore(0)
        self._is_done = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            self._has_turn.acquire()
            self._turns.pop(0)()
            self._is_done.release()

    def do(self, turn: Callable[[], None]) -> None:
        self._turns.append(turn)
        self._has_turn.release()
        self._is_done.acquire()

    @property
    def scheduler_class(self) -> int:
        assert self._thread.native_id is not None
        return os.sched_getscheduler(self._thread.native_id)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="scheduler classes are Linux'")
def test_a_step_gives_way_once_a_request_arrives_and_the_next_one_does_not() -> None:
    arrived = [5]
    yielding = YieldingThread(lambda: arrived[0])
    computing = Computing(yielding)

    computing.do(lambda: yielding.begins(5, gives_way=True))
    assert computing.scheduler_class == os.SCHED_OTHER
    arrived[0] = 6
    wait_until(lambda: computing.scheduler_class == os.SCHED_IDLE)
    wait_until(lambda: yielding.gave_way_at_s is not None)

    computing.do(yielding.ended)
    assert yielding.gave_way_at_s is None
    can_raise = os.geteuid() == 0
    assert computing.scheduler_class == (os.SCHED_OTHER if can_raise else os.SCHED_IDLE)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="scheduler classes are Linux'")
def test_who_has_given_way_or_computes_nothing_is_not_watched() -> None:
    # Given looks that are counted: each of them is time of the processor that serving computes on
    looks, arrived = [0], [5]

    def count() -> int:
        looks[0] += 1
        return arrived[0]

    def looks_meanwhile() -> int:
        before = looks[0]
        time.sleep(0.05)
        return looks[0] - before

    yielding = YieldingThread(count)
    computing = Computing(yielding)
    assert looks_meanwhile() == 0  # nothing has begun

    computing.do(lambda: yielding.begins(5, gives_way=True))
    assert looks_meanwhile() > 0
    arrived[0] = 6
    wait_until(lambda: yielding.gave_way_at_s is not None)
    assert looks_meanwhile() == 0  # it has given way

    computing.do(yielding.ended)
    assert looks_meanwhile() == 0
    computing.do(lambda: yielding.begins(6, gives_way=True))
    if os.geteuid() == 0:  # who may not raise it again stays idle, with nothing left to watch
        assert looks_meanwhile() > 0
        computing.do(yielding.ended)
        arrived[0] = 7
        assert looks_meanwhile() == 0
        assert computing.scheduler_class == os.SCHED_OTHER  # between two steps nothing gives way


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="scheduler classes are Linux'")
def test_a_request_that_arrived_between_the_decision_and_the_step_counts() -> None:
    yielding = YieldingThread(lambda: 6)
    computing = Computing(yielding)

    computing.do(lambda: yielding.begins(5, gives_way=True))

    wait_until(lambda: computing.scheduler_class == os.SCHED_IDLE)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="scheduler classes are Linux'")
def test_a_step_that_need_not_give_way_does_not() -> None:
    yielding = YieldingThread(lambda: 6)
    computing = Computing(yielding)

    computing.do(lambda: yielding.begins(5, gives_way=False))
    time.sleep(0.05)

    assert computing.scheduler_class == os.SCHED_OTHER
