"""Runs of the same weights on one worker: real controller, worker and publishers, over the stand-in."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rollfab.fabric.contract.clock import SystemClock
from rollfab.fabric.contract.ids import turn_id
from rollfab.fabric.contract.records import RunConfig, Sampling, TurnJob, TurnResult
from rollfab.fabric.format.manifest import Head
from rollfab.fabric.ports.queue import TurnPush
from rollfab.trainer.aio import AsyncRun
from rollfab.trainer.checks import make_groups
from rollfab.workers.controller.controller import Controller, ControllerConfig
from rollfab.workers.rollout import guests
from rollfab.workers.rollout.weights import ReceiverOptions, WeightReceiver
from rollfab.workers.rollout.worker import RolloutConfig, RolloutWorker
from tests.sim.engines.fake import FakeEngine
from tests.sim.policy import context_of, extend, next_token, tensors, weights_digest
from tests.sim.virtual_loop import VirtualClock
from tests.standin.fabric import StandInFabric
from tests.support.until import until
from tests.support.virtual_time import in_virtual_time

WORKER, STEP_S = "w", 0.02
PROMPT_IDS = np.array([5, 6], np.int32)


class Shared:
    """One worker, and runs of its model. steps: of each step, the runs whose requests ran."""

    def __init__(self, slot_count: int = 4) -> None:
        self.slot_count = slot_count
        self.clock = VirtualClock(asyncio.get_running_loop())
        self.fabric = StandInFabric(self.clock)
        self.steps: list[list[str]] = []
        self.engine = FakeEngine(STEP_S, on_step=self._step, on_apply=lambda *_: None, on_rest=lambda _: None)
        self._runs: dict[str, AsyncRun] = {}

    def _step(self, names: Sequence[str]) -> None:
        self.steps.append(sorted(name.rpartition("@")[2] for name in names))

    async def run(self, run_id: str, version: int, weights: int, **settings: object) -> AsyncRun:
        """A run whose `version` has the weights of this number."""
        config = RunConfig(run_id=run_id, model="tiny", environment="frozenlake", **settings)  # type: ignore[arg-type]
        await self.fabric.board.create_run(config)
        run = self._runs[run_id] = AsyncRun(self.fabric, config)  # type: ignore[arg-type]
        await run.publish(tensors(weights, 0), version=version)
        return run

    async def ask(self, run: AsyncRun, count: int, token_count: int) -> None:
        """Turns of so many new trajectories of a run, which have the same names as in any other run."""
        await self.fabric.rollouts(run.config).push(make_groups([{"seed": 1}], count, ["g"]))
        for claim in await self.fabric.trajectories(run.config).claim("a", count):
            job = TurnJob(
                turn_id=turn_id(claim.job.trajectory_id, 0),
                agent_id="a",
                sampling=Sampling(max_tokens=token_count),
                prompt_ids=PROMPT_IDS,
            )
            push = TurnPush(trajectory_id=claim.job.trajectory_id, fence=claim.fence, job=job)
            assert await self.fabric.turns(run.config).push("a", [push]) == [None]

    async def results(self, run: AsyncRun, count: int) -> list[TurnResult]:
        found: list[TurnResult] = []
        queue = self.fabric.turns(run.config)
        while len(found) < count:
            found += await queue.results("a", 60.0)
        return found

    def leases(self) -> str:
        return self.fabric.tables.assignments.get(WORKER, "")

    @asynccontextmanager
    async def at_work(self) -> AsyncIterator[RolloutWorker]:
        config = RolloutConfig(
            worker_id=WORKER, role="dedicated", model="tiny", slot_count=self.slot_count, stall_s=60.0
        )

        def make_receiver(run_id: str) -> WeightReceiver:
            options = ReceiverOptions(poll_s=1.0, retry_s=0.1)
            return WeightReceiver(self.fabric.weights, run_id, self.engine, options=options, clock=self.clock)

        await self.engine.start()
        worker = RolloutWorker(self.fabric, self.engine, config, self.clock, make_receiver=make_receiver)
        controller = Controller(self.fabric.board, ControllerConfig(worker_id="c"), self.clock)
        stop = asyncio.Event()
        tasks = [asyncio.create_task(each.run(stop)) for each in (controller, worker)]
        try:
            yield worker
            worker.check_integrity()
        finally:
            stop.set()
            await asyncio.gather(*tasks)
            await self.engine.close()


def told(result: TurnResult, weights: int) -> bool:
    """Whether each token is the one that these weights make."""
    bits = {name: values.reshape(-1).view("<u4") for name, values in tensors(weights, 0).items()}
    digest, context = weights_digest(bits), context_of(PROMPT_IDS)
    for token in result.completion_ids:
        if int(token) != next_token(context, digest)[0]:
            return False
        context = extend(context, int(token))
    return True


@in_virtual_time
async def test_turns_of_runs_with_the_same_weights_run_at_once_by_each_one_s_version() -> None:
    shared = Shared()
    a, b = await shared.run("a", 7, 3), await shared.run("b", 2, 3)
    await shared.ask(a, 2, 40)
    await shared.ask(b, 2, 40)
    async with shared.at_work():
        of_a, of_b = await shared.results(a, 2), await shared.results(b, 2)
        assert shared.leases() == "a b"
    assert ["a", "a", "b", "b"] in shared.steps
    for results, version in ((of_a, 7), (of_b, 2)):
        assert [len(each.completion_ids) for each in results] == [40, 40]
        assert all(told(each, 3) for each in results)
        assert {span.policy_version for each in results for span in each.spans} == {version}


@in_virtual_time
async def test_turns_of_runs_with_other_weights_never_meet() -> None:
    shared = Shared()
    a, b = await shared.run("a", 0, 3), await shared.run("b", 0, 4)
    await shared.ask(a, 2, 40)
    await shared.ask(b, 2, 40)
    async with shared.at_work():
        of_a, of_b = await shared.results(a, 2), await shared.results(b, 2)
    assert not any("a" in step and "b" in step for step in shared.steps)
    assert all(told(each, 3) for each in of_a) and all(told(each, 4) for each in of_b)


@in_virtual_time
async def test_slots_are_shared_by_weight_while_all_have_work() -> None:
    shared = Shared()
    runs = {"a": await shared.run("a", 0, 3, weight=3.0), "b": await shared.run("b", 0, 3)}
    for run in runs.values():
        await shared.ask(run, 24, 10)
    async with shared.at_work():
        await shared.results(runs["a"], 24)
    # 24 turns of 10 tokens, three at a time, make 80 steps; the first and the last turns may share otherwise
    assert shared.steps.count(["a", "a", "a", "b"]) >= 60


@in_virtual_time
async def test_no_slot_is_empty_while_one_of_the_runs_has_work() -> None:
    # Given a run with one long turn, and one with many
    shared = Shared()
    a, b = await shared.run("a", 0, 3), await shared.run("b", 0, 3)
    await shared.ask(a, 1, 400)
    await shared.ask(b, 30, 10)
    async with shared.at_work():
        await shared.results(b, 30)
    both = [step for step in shared.steps if "a" in step and "b" in step]
    assert sum(step == ["a", "b", "b", "b"] for step in both) > 0.8 * len(both)


@in_virtual_time
async def test_turns_of_guests_leave_before_the_weights_change_and_go_on_with_their_own() -> None:
    # Given turns of two runs in one engine
    shared = Shared()
    a, b = await shared.run("a", 0, 3, staleness=9), await shared.run("b", 0, 3, staleness=9)
    await shared.ask(a, 1, 600)
    await shared.ask(b, 1, 600)
    async with shared.at_work():
        await until(lambda: ["a", "b"] in shared.steps)
        # When the run whose weights the worker follows has others
        await a.publish(tensors(5, 0), version=1)
        (of_b,), (of_a,) = await shared.results(b, 1), await shared.results(a, 1)
    # Then the guest's are made by its own weights to the end
    assert len(of_b.completion_ids) == 600 and told(of_b, 3)
    assert {span.policy_version for span in of_b.spans} == {0}
    assert {span.policy_version for span in of_a.spans} == {0, 1}


@in_virtual_time
async def test_a_guest_whose_weights_change_leaves() -> None:
    shared = Shared()
    a, b = await shared.run("a", 0, 3, staleness=9), await shared.run("b", 0, 3, staleness=9)
    await shared.ask(a, 1, 600)
    await shared.ask(b, 1, 600)
    async with shared.at_work():
        await until(lambda: ["a", "b"] in shared.steps)
        await b.publish(tensors(5, 0), version=1)
        (of_b,), (of_a,) = await shared.results(b, 1), await shared.results(a, 1)
    assert told(of_a, 3) and {span.policy_version for span in of_a.spans} == {0}
    assert {span.policy_version for span in of_b.spans} == {0, 1}


class Heads:
    """The versions of a run, of which each look finds the next. Their sums are their numbers."""

    def __init__(self, heads: Sequence[Head]) -> None:
        self._heads = list(heads)

    async def wait_head(self, run_id: str, above: int, timeout_s: float) -> Head:
        self.head = self._heads.pop(0)
        return self.head

    async def held(self, run_id: str) -> list[tuple[int, str]]:
        return [(self.head.version, "delta")]


@pytest.mark.parametrize(
    ("last", "known"),
    [
        (Head(version=4, epoch=1, moved_by=1), [2, 3, 4]),
        (Head(version=4, epoch=2, moved_by=2), [-1, -1, 4]),
        (Head(version=3, epoch=1, moved_by=1, kind="keyframe"), [-1, 3, -1]),
        (Head(version=2, epoch=1, moved_by=1), [2, -1, -1]),
    ],
)
async def test_a_guest_forgets_versions_whose_weights_may_be_others_now(
    last: Head, known: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    sums = {version: np.array([version], np.uint64) for version in range(9)}

    async def found(store: Heads, run_id: str, names: Sequence[tuple[int, str]]) -> dict[int, SimpleNamespace]:
        return {version: SimpleNamespace(version=version, sums=sums[version]) for version, _ in names}

    monkeypatch.setattr(guests, "readable", found)
    heads: Any = Heads([*(Head(version=version, epoch=1, moved_by=1) for version in (2, 3)), last])
    guest = guests.Guest(SimpleNamespace(run_id="b"), heads, SystemClock(), lambda: None)  # type: ignore[arg-type]
    for _ in range(3):
        await guest._look()
    assert [guest.version_of(sums[version]) for version in (2, 3, 4)] == known
    assert guest.moved_by == last.moved_by


@in_virtual_time
async def test_runs_meet_once_their_weights_are_the_same() -> None:
    # Given runs that take turns, as their weights differ
    shared = Shared()
    a, b = await shared.run("a", 0, 3, staleness=9), await shared.run("b", 0, 4, staleness=9)
    await shared.ask(a, 1, 3000)
    await shared.ask(b, 1, 3000)
    async with shared.at_work() as worker:
        await asyncio.sleep(5.0)
        assert len(shared.leases().split()) == 1
        # When one publishes what the other has
        await b.publish(tensors(3, 0), version=1)
        await asyncio.sleep(10.0)
        assert len(shared.leases().split()) == 2
        assert shared.steps[-1] == ["a", "b"]
        info = worker._info()
        versions = {info.run_id: info.active_version, **info.guest_versions}
    assert versions == {"a": 0, "b": 1}


@in_virtual_time
async def test_a_run_that_comes_later_is_owed_nothing_for_the_time_before() -> None:
    # Given a run that has had the only slot for long
    shared = Shared(slot_count=1)
    a, b = await shared.run("a", 0, 3), await shared.run("b", 0, 3)
    await shared.ask(a, 60, 4)
    async with shared.at_work():
        await shared.results(a, 30)
        # When another comes
        shared.steps.clear()
        await shared.ask(b, 30, 4)
        await shared.results(b, 12)
    # Then they take turns
    had = [step[0] for step in shared.steps if step]
    assert 0.3 < had[had.index("b") :].count("a") / len(had[had.index("b") :]) < 0.7


@in_virtual_time
async def test_of_more_runs_than_slots_none_waits_for_ever() -> None:
    # Given ten runs on eight slots, whose turns do not all end in the same step
    shared = Shared(slot_count=8)
    runs = [await shared.run(f"r{number}", 0, 3) for number in range(10)]
    for number, run in enumerate(runs):
        await shared.ask(run, 64, 7 if number == 3 else 5)
    async with shared.at_work():
        await until(lambda: len(shared.steps) > 200)
    # Then each gets its part of the slots, or nearly so
    had = Counter(run_id for step in shared.steps for run_id in step)
    assert min(had[run.run_id] for run in runs) > 0.8 * had.total() / len(runs)
