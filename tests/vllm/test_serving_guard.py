"""A real vLLM server that shows itself to a probe, and a real rollout engine that keeps out of its way."""

import asyncio
import itertools
import os
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import numpy as np
import pytest

from rollfab.fabric.contract.records import Sampling
from rollfab.fabric.rules.serving.facts import ServingState
from rollfab.workers.engines.base import GenerationRequest
from rollfab.workers.engines.vllm.common.config import VllmConfig
from rollfab.workers.engines.vllm.engine import VllmEngine
from rollfab.workers.engines.vllm.step import scheduler
from rollfab.workers.engines.vllm.step.scheduler_page import SchedulerPage
from rollfab.workers.serving.device.priority import children_of, threads_named
from rollfab.workers.serving.guarding.guard import GuardConfig, GuardOrders
from rollfab.workers.serving.probes.probe_page import ProbeWriter
from rollfab.workers.serving.probes.reader import ProbeReader
from tests.support.until import until
from tests.vllm.attached.checkpoints import write_config
from tests.vllm.attached.server_process import Server, served

pytestmark = [pytest.mark.alone, pytest.mark.timeout(300)]

PROMPT = list(range(5, 45))


# ---- the probe in a server


@pytest.fixture(scope="module", params=["", "ahead"], ids=lambda how: how or "alone")
def ahead(request: pytest.FixtureRequest) -> str:
    """Whether the server schedules a step while the one before it runs, as serving engines on GPUs do."""
    return str(request.param)


@pytest.fixture(scope="module")
def page(ahead: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("probe") / "page"


@pytest.fixture(scope="module")
def server(ahead: str, page: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = write_config(tmp_path_factory.mktemp("model"))
    environment = {"ROLLFAB_PROBE": str(page), "TEST_SCHEDULES_AHEAD": ahead}
    with served(model, tmp_path_factory.mktemp("server"), "--load-format", "dummy", **environment) as server:
        yield server


def seen(reader: ProbeReader) -> ServingState:
    state = reader.read(time.monotonic())
    assert state is not None
    return state


async def complete(server: Server, token_count: int) -> None:
    body = {"prompt": PROMPT, "max_tokens": token_count, "ignore_eos": True, "temperature": 0.0}
    async with aiohttp.ClientSession() as session, session.post(server.url + "/v1/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        await answer.read()


async def test_a_server_without_requests_shows_that_it_lives(server: Server, page: Path) -> None:
    reader = ProbeReader(page)
    first = seen(reader)
    await until(lambda: seen(reader).seen_at_s > first.seen_at_s)

    assert (first.waiting, first.running, first.step) == ((), (), None)
    assert first.kv_capacity_tokens > 256


async def test_a_request_is_seen_from_its_arrival_to_its_end(server: Server, page: Path, ahead: str) -> None:
    reader = ProbeReader(page)
    seen(reader)
    states = []
    task = asyncio.create_task(complete(server, 60))
    while not task.done():
        states.append(seen(reader))
        await asyncio.sleep(0)
    await task
    await until(lambda: seen(reader).running == ())

    running = [state.running[0] for state in states if state.running]
    counts = [request.token_count for request in running]
    assert len(set(counts)) > 5
    assert counts == sorted(counts)
    assert running[-1].context_tokens == len(PROMPT) + counts[-1]
    assert any(state.step is not None and state.step.decode_count == 1 for state in states)
    (arrival,), (end,) = reader.new_arrivals(), reader.new_ends()
    assert (arrival.prompt_tokens, end.token_count) == (len(PROMPT), 60)
    assert end.arrived_at_s < end.first_token_at_s < end.last_token_at_s
    steps = reader.new_steps()
    assert steps[0].work.prefill_tokens == len(PROMPT)
    assert len(steps) == 60
    gaps_s = [two.began_at_s - one.began_at_s - one.duration_s for one, two in itertools.pairwise(steps)]
    assert min(gaps_s) > -1e-6  # rounding: the page has nanoseconds
    if ahead:
        assert max(gaps_s[:20]) < 1e-6  # a step has been scheduled when the one before it ends


async def test_a_request_that_waits_for_a_place_is_seen_to_wait(server: Server, page: Path) -> None:
    reader = ProbeReader(page)
    tasks = [asyncio.create_task(complete(server, 100)) for _ in range(12)]  # the server runs eight at a time
    await until(lambda: len(seen(reader).running) == 8)
    await until(lambda: len(seen(reader).waiting) == 4)

    assert all(request.prefill_tokens == len(PROMPT) for request in seen(reader).waiting)
    await asyncio.gather(*tasks)


async def test_a_request_that_its_client_left_is_gone_and_no_step_is_left_behind(server: Server, page: Path) -> None:
    reader = ProbeReader(page)
    for _ in range(3):
        task = asyncio.create_task(complete(server, 200))
        await until(lambda: bool(seen(reader).running))
        task.cancel()
        await until(lambda: not seen(reader).running)
        await until(lambda: seen(reader).step is None)
    reader.new_steps()

    await complete(server, 5)

    assert [step.work.prefill_tokens > 0 for step in reader.new_steps()] == [True, False, False, False, False]


# ---- the guard in a rollout engine, beside a serving engine that this test plays


class PlayedServing:
    """A serving engine's page, written by the test."""

    def __init__(self, path: Path) -> None:
        self._writer = ProbeWriter(path)
        self._is_frozen = threading.Event()
        self._has_ended = threading.Event()
        self.rest()
        threading.Thread(target=self._live, daemon=True).start()

    def _live(self) -> None:
        while not self._has_ended.wait(0.02):
            if not self._is_frozen.is_set():
                self._writer.alive(time.monotonic_ns())

    def rest(self) -> None:
        self._show([])

    def need_everything(self) -> None:
        """One request is far behind its pace."""
        self._show([(time.monotonic_ns() - 10_000_000_000, 2, 100)])

    def _show(self, running: list[tuple[int, int, int]]) -> None:
        self._writer.show(waiting=[], running=running, step=None, known=0, kv_used=0, kv_capacity=1000)
        self._writer.alive(time.monotonic_ns())

    def freeze(self) -> None:
        self._is_frozen.set()

    def end(self) -> None:
        self._has_ended.set()


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[PlayedServing]:
    played = PlayedServing(tmp_path / "page")
    yield played
    played.end()


@pytest.fixture
async def engine(serving: PlayedServing, tmp_path: Path) -> AsyncIterator[VllmEngine]:
    guard = GuardConfig(probe=str(tmp_path / "page"), slo_ttft_ms=5000.0, slo_tpot_ms=500.0)
    made = VllmEngine(VllmConfig(slot_count=8, guard=guard))
    await made.start()
    made.generate(
        GenerationRequest(
            request_id="long", prompt_ids=np.array(PROMPT, dtype=np.int32), sampling=Sampling(max_tokens=400)
        )
    )
    yield made
    await made.close()


def order(engine: VllmEngine, **orders: object) -> None:
    assert engine.guard is not None
    engine.guard.order(GuardOrders(**orders))  # type: ignore[arg-type]


def state_of(engine: VllmEngine) -> tuple[str, str]:
    assert engine.guard is not None
    view = engine.guard.view()
    return view.state, view.reason


def tokens_of(engine: VllmEngine) -> int:
    return sum(len(generation.completion_ids) for generation in engine.progress(["long"]))


async def stands_still(engine: VllmEngine) -> bool:
    """Whether no step was made in a while in which an engine that may makes many."""
    await asyncio.sleep(0.05)  # for the step under way
    before = engine.stats().step_count
    await asyncio.sleep(0.3)
    return engine.stats().step_count == before


async def test_rollouts_run_in_slack_stop_when_there_is_none_and_go_on(
    engine: VllmEngine, serving: PlayedServing
) -> None:
    order(engine, is_lent=True)
    await until(lambda: tokens_of(engine) > 20)

    serving.need_everything()
    await until(lambda: state_of(engine)[0] == "shut")
    assert "pace" in state_of(engine)[1]
    assert await stands_still(engine)

    before = engine.stats().step_count
    serving.rest()
    await until(lambda: engine.stats().step_count > before + 20)
    (generation,) = await engine.abort(["long"])
    assert len(generation.completion_ids) > 40  # what was made is kept


async def test_a_serving_engine_that_shows_no_life_gets_everything(engine: VllmEngine, serving: PlayedServing) -> None:
    order(engine, is_lent=True)
    await until(lambda: tokens_of(engine) > 20)

    serving.freeze()
    await until(lambda: "no sign" in state_of(engine)[1])

    assert await stands_still(engine)


async def test_an_engine_that_is_not_lent_only_observes(engine: VllmEngine, serving: PlayedServing) -> None:
    before = engine.stats().step_count

    assert await stands_still(engine)

    assert engine.stats().step_count == before
    assert engine.guard is not None
    await until(lambda: (engine.guard.sharing() or {}).get("could_lend_s", 0) > 0.5)  # type: ignore[union-attr]
    assert "observing" in state_of(engine)[1]


async def test_loops_that_look_for_other_ranks_take_nothing_from_serving(
    serving: PlayedServing, tmp_path: Path
) -> None:
    before = children_of([os.getpid()])
    guard = GuardConfig(probe=str(tmp_path / "page"), slo_ttft_ms=5000.0, slo_tpot_ms=500.0, yields=True)
    engine = VllmEngine(VllmConfig(slot_count=1, guard=guard))
    await engine.start()
    try:
        ours = [each for each in children_of([os.getpid()]) if each not in before]
        loops = [thread for each in ours for thread in threads_named(each, scheduler.GLOO_THREAD)]
        assert loops
        assert {os.sched_getscheduler(thread) for thread in loops} == {os.SCHED_IDLE}
    finally:
        await engine.close()


def test_a_guard_that_is_shut_is_asked_again_once_serving_goes_on_or_after_a_while(
    serving: PlayedServing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "AGAIN_S", 600.0)
    monkeypatch.setattr(scheduler, "TELL_S", 600.0)  # nobody else looks
    config = GuardConfig(probe=str(tmp_path / "page"), slo_ttft_ms=5000.0, slo_tpot_ms=500.0)
    page = SchedulerPage.create()
    page.guard_from_now()
    page.order(GuardOrders(is_lent=True))
    try:
        guard = scheduler.StepGuard(page, config.row())
        guard.step_tokens(scheduler.ONE)  # finds the page
        serving.need_everything()
        assert guard.step_tokens(scheduler.ONE) == 0
        assert not guard.may_differ()

        serving.rest()
        assert guard.may_differ()
        assert guard.step_tokens(scheduler.ONE) is None

        assert not guard.may_differ()
        monkeypatch.setattr(scheduler, "AGAIN_S", 0.0)
        assert guard.may_differ()
    finally:
        page.close()
