"""The simulator's own ground: time, order, stopped and killed processes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from random import Random
from typing import Any

import pytest

from rollfab.fabric.contract.errors import BrokerError
from rollfab.fabric.contract.records import RunConfig
from tests.sim.link import Link, Network
from tests.sim.virtual_loop import Deadlock, Process, Spin, ThreadUsed, VirtualClock, VirtualLoop
from tests.standin.fabric import StandInFabric

RUN = RunConfig(run_id="r1", model="tiny", environment="e")


def run(work: Coroutine[Any, Any, Any], seed: int = 1) -> Any:
    loop = VirtualLoop(Random(seed))
    try:
        return loop.run_until_complete(work)
    finally:
        loop.put_down()


def test_an_hour_passes_at_once() -> None:
    async def work() -> float:
        await asyncio.sleep(3600)
        return asyncio.get_running_loop().time()

    assert run(work()) == 3600


def test_waiting_for_what_can_never_happen_is_an_error() -> None:
    with pytest.raises(Deadlock):
        run(asyncio.Event().wait())


def test_running_without_letting_time_pass_is_an_error() -> None:
    async def work() -> None:
        while True:  # noqa: ASYNC110 - that is the point
            await asyncio.sleep(0)

    with pytest.raises(Spin):
        run(work())


def test_a_thread_is_an_error() -> None:
    async def work() -> None:
        loop = asyncio.get_running_loop()
        done = loop.create_future()
        thread = threading.Thread(target=lambda: loop.call_soon_threadsafe(done.cancel))
        thread.start()
        thread.join()
        await done

    with pytest.raises(ThreadUsed):
        run(work())


def orders(seed: int) -> tuple[str, ...]:
    """What three processes do at one time, twice each."""
    seen: list[str] = []

    async def act(name: str) -> None:
        for number in (1, 2):
            await asyncio.sleep(1)
            seen.append(f"{name}{number}")

    async def work() -> None:
        await asyncio.gather(*(Process(name, "x").start(act(name)) for name in "abc"))

    run(work(), seed)
    return tuple(seen)


def test_the_seed_decides_who_goes_first() -> None:
    assert len({orders(seed) for seed in range(30)}) > 3
    assert all(orders(seed) == orders(seed) for seed in range(5))
    assert all(sorted(order[:3]) == ["a1", "b1", "c1"] for order in map(orders, range(30)))


def test_a_stopped_process_does_nothing_until_it_is_woken() -> None:
    async def work() -> list[float]:
        times: list[float] = []
        loop = asyncio.get_running_loop()

        async def act() -> None:
            while True:
                await asyncio.sleep(1)
                times.append(loop.time())

        process = Process("a", "x")
        process.start(act())
        await asyncio.sleep(2.5)
        process.stop()
        await asyncio.sleep(5)
        process.wake()
        await asyncio.sleep(1.2)
        return times

    assert run(work()) == [1, 2, 7.5, 8.5]


class Setting:
    """A process with a connection to a broker that notes what it carries out."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.fabric = StandInFabric(VirtualClock(asyncio.get_running_loop()))
        self.process = Process("a", "x")
        self.network = Network(Random(1), 0.0, 0.1)
        observe = lambda process, run_id, name, *_: self.seen.append(name)  # noqa: E731
        self.link = Link(self.process, Process("broker", "broker"), self.fabric, self.network, observe, object())


def test_a_call_that_was_sent_is_carried_out_though_its_process_was_killed() -> None:
    async def work() -> list[str]:
        setting = Setting()
        setting.process.start(setting.link.board.create_run(RUN))
        await asyncio.sleep(0.01)
        setting.process.kill()
        await asyncio.sleep(1)
        with pytest.raises(BrokerError):
            await setting.link.board.runs()
        return setting.seen

    assert run(work()) == ["board.create_run"]


def test_a_call_over_a_cut_connection_fails_and_changes_nothing() -> None:
    async def work() -> list[str]:
        setting = Setting()
        setting.link.is_cut = True
        with pytest.raises(BrokerError):
            await setting.link.board.create_run(RUN)
        return setting.seen

    assert run(work()) == []


def test_rough_weather_loses_repeats_and_delays_calls() -> None:
    async def work() -> tuple[int, int]:
        setting = Setting()
        setting.network.is_rough, setting.network.trouble_fraction = True, 1.0
        errors = 0
        for _ in range(200):
            try:
                await setting.link.board.create_run(RUN)
            except BrokerError:
                errors += 1
        await asyncio.sleep(10)
        return errors, len(setting.seen)

    errors, carried_out = run(work())
    assert 80 < errors < 160
    assert 160 < carried_out < 240  # less the lost, more the doubled
