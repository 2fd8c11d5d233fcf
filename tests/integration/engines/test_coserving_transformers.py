"""Two transformers engines on one CPU, one of which serves: what its guard lets the other one do."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from rollfab.fabric.contract.records import Sampling
from rollfab.fabric.contract.sharing import GuardView, SharingReport
from rollfab.workers.engines.base import Generation, GenerationRequest
from rollfab.workers.engines.transformers.engine import TransformersConfig, TransformersEngine
from rollfab.workers.serving.guarding.guard import GuardConfig, GuardOrders
from rollfab.workers.serving.guarding.thread import GuardThread
from rollfab.workers.serving.probes.native import NativeProbe
from tests.support.until import until

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.timeout(60)

WIDE = {"slo_ttft_ms": 2000.0, "slo_tpot_ms": 1000.0}  # what a loaded machine keeps too


@dataclass
class Pair:
    serving: TransformersEngine
    rollout: TransformersEngine
    probe: NativeProbe

    @property
    def step_count(self) -> int:
        """Of rollouts."""
        return self.rollout.stats().step_count

    @property
    def guard(self) -> GuardThread:
        assert self.rollout.guard is not None
        return self.rollout.guard

    @property
    def view(self) -> GuardView:
        return self.guard.view()

    @property
    def measured(self) -> SharingReport:
        return SharingReport(worker_id="w", **self.guard.sharing())

    async def until_steps(self, more: int = 3) -> None:
        """Rollouts make that many more."""
        count = self.step_count
        await until(lambda: self.step_count >= count + more)


@asynccontextmanager
async def pair(directory: Path, **slo: float) -> AsyncIterator[Pair]:
    page = directory / "page"
    probe = NativeProbe(page)
    serving = TransformersEngine(TransformersConfig(slot_count=4, seed=1), hook=probe)
    guard = GuardConfig(probe=str(page), **{**WIDE, **slo})
    rollout = TransformersEngine(TransformersConfig(slot_count=4, seed=2, guard=guard))
    await serving.start()
    await rollout.start()
    try:
        yield Pair(serving, rollout, probe)
    finally:
        await rollout.close()
        await serving.close()
        probe.close()


def ask(request_id: str, max_tokens: int = 10) -> GenerationRequest:
    prompt = np.arange(5, 25, dtype=np.int32)
    return GenerationRequest(request_id=request_id, prompt_ids=prompt, sampling=Sampling(max_tokens=max_tokens))


async def begin_rollouts(engines: Pair) -> None:
    engines.guard.order(GuardOrders(is_lent=True))
    for i in range(4):
        engines.rollout.generate(ask(f"rollout-{i}", 480))
    await engines.until_steps()


async def test_no_rollout_step_is_made_while_a_serving_request_has_no_slack_left(tmp_path: Path) -> None:
    # Given rollouts that run beside an idle serving engine
    async with pair(tmp_path, slo_ttft_ms=400.0) as engines:
        await begin_rollouts(engines)

        # When a serving request waits, longer than its objective allows
        await engines.serving.pause("test")
        engines.serving.generate(ask("served"))
        await until(lambda: engines.view.state == "shut" and "waiting request" in engines.view.reason)
        before = engines.step_count

        # Then no rollout step is made, and the engine says why
        await asyncio.sleep(0.3)
        assert engines.step_count - before <= 1, "one may have been under way"
        assert engines.view.state == "shut" and "waiting request" in engines.view.reason
        assert engines.rollout.stats().paused_by == ("guard",)

        # And they go on once it has been served
        await engines.serving.resume("test")
        [served] = await engines.serving.finished(20.0)
        assert served.finish_reason == "length"
        await engines.until_steps()


async def test_nothing_runs_before_it_is_lent_and_what_could_be_is_counted(tmp_path: Path) -> None:
    async with pair(tmp_path) as engines:
        engines.rollout.generate(ask("rollout"))
        await until(lambda: engines.measured.could_lend_s > 0.1)
        assert engines.step_count == 0
        engines.guard.order(GuardOrders(is_lent=True))
        assert (await engines.rollout.finished(20.0))[0].finish_reason == "length"


async def test_a_serving_engine_that_is_gone_lends_nothing(tmp_path: Path) -> None:
    async with pair(tmp_path) as engines:
        await begin_rollouts(engines)
        await engines.serving.close()
        await until(lambda: engines.view.state == "shut" and "no sign" in engines.view.reason)
        before = engines.step_count
        await asyncio.sleep(0.2)
        assert engines.step_count - before <= 1


async def test_what_serving_requests_met_is_measured(tmp_path: Path) -> None:
    async with pair(tmp_path) as engines:
        await begin_rollouts(engines)
        for i in range(3):
            engines.serving.generate(ask(f"served-{i}"))
        ended: list[Generation] = []
        while len(ended) < 3:
            ended += await engines.serving.finished(20.0)
        await engines.until_steps()
        measured = engines.measured
        assert measured.alone["request_count"] + measured.shared["request_count"] == 3
        assert measured.computing_s > 0


async def test_a_held_engine_still_learns(tmp_path: Path) -> None:
    # Given a rollout engine that is held, as without a lease
    async with pair(tmp_path) as engines:
        await engines.rollout.pause("lease")

        # When the serving engine works
        engines.serving.generate(ask("served"))
        await engines.serving.finished(20.0)

        # Then what it did is learned all the same
        await until(lambda: engines.measured.alone["request_count"] == 1)
        assert engines.view.step_error_p50 is not None
