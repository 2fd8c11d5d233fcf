"""A fake engine beside a serving engine on one device: production's guard decides before each of its steps.

The serving engine, and how the two share the device, are those of the simulated cluster (deploy/simulation/machine):
by turns, a step each, serving first. All between them is the fabric's own: lease, guard, yielding, controller.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable
from random import Random
from typing import Any

from rollfab.deploy.replay.records import Arrival
from rollfab.deploy.simulation.machine.cost import StepCost
from rollfab.deploy.simulation.machine.engine import SHUT_S, SWITCH_S
from rollfab.deploy.simulation.machine.serving import ServingSide
from rollfab.fabric.contract.sharing import GuardView
from rollfab.fabric.rules.serving.facts import StepWork
from rollfab.workers.serving.guarding.guard import Guard, GuardConfig, GuardOrders
from rollfab.workers.serving.guarding.thread import narrowed
from rollfab.workers.serving.wiring import LOOK_S, ORDER_S, Leased
from tests.sim.engines.fake import FakeEngine

KV_TOKENS = 1_000_000  # memory is no matter here


def even(step_s: float) -> StepCost:
    """Steps that all take as long, whatever they compute."""
    rest = ("weights_ms", "token_us", "context_us_per_1000", "attention_ns", "cpu_step_ms", "cpu_sequence_ms")
    return StepCost(fixed_ms=1000 * step_s, **dict.fromkeys(rest, 0.0))


def draw_load(random: Random, from_s: float, until_s: float) -> list[Arrival]:
    """Requests between two times: one or several at once, now and then."""
    found, at_s = [], from_s
    while (at_s := at_s + random.expovariate(1.0)) < until_s:
        tokens = random.choice((4, 20, 80))
        found += [Arrival(at_s, 64, tokens)] * random.choice((1, 1, 2, 6))
    return found


class SharedEngine(FakeEngine):
    """See the module. Its prompts take no time.

    Args:
        serving: what a step of serving costs. load: its requests, by the loop's time.
    """

    def __init__(self, step_s: float, *, serving: StepCost, load: Iterable[Arrival], **told: Any) -> None:
        super().__init__(step_s, **told)
        self.serving = ServingSide(serving, KV_TOKENS)
        self._load = list(load)
        self._guard = Guard(GuardConfig(probe="", slo_ttft_ms=500.0, slo_tpot_ms=150.0), self.serving)
        self._has_work = asyncio.Event()

    def guard_view(self) -> GuardView:
        now_s = self._now_s()
        if not self._requests:
            self._guard.look(now_s, StepWork(decode_count=1), is_idle=True)
        return self._guard.view(now_s)

    @contextlib.asynccontextmanager
    async def following(self, keeper: Leased) -> AsyncIterator[None]:
        task = asyncio.create_task(self._follow(keeper))
        try:
            yield
        finally:
            task.cancel()

    async def _follow(self, keeper: Leased) -> None:
        while True:
            until_s = self._now_s() + ORDER_S
            self._guard.orders = GuardOrders(is_lent=keeper.lease is not None, until_s=until_s)
            await asyncio.sleep(LOOK_S)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        for each in self._load:
            loop.call_at(each.at_s, self._arrive, each)
        while True:
            serve_s = self.serving.next_step()[0] if self.serving.has_work else 0.0
            work = StepWork(decode_count=len(self._requests)) if self._may_step.is_set() else StepWork()
            if work.decode_count:
                work = narrowed(work, self._guard.look(self._now_s(), work).step_tokens)
            if not (serve_s or work.decode_count):
                await self._until_work()
                continue
            roll_s = self._step_s * self.slowness if work.decode_count else 0.0
            await asyncio.sleep(serve_s + roll_s + (SWITCH_S if serve_s and roll_s else 0.0))
            now_s = self._now_s()
            if serve_s:
                self.serving.did(1, serve_s, now_s - roll_s, is_seen=True)
            if roll_s:
                self._guard.stepped(now_s - roll_s, now_s, work)
            if roll_s and self._may_step.is_set():
                self._step(work.decode_count)
                self._look()

    async def _until_work(self) -> None:
        """Wait for a request; where turns wait at a guard that is shut, for a moment."""
        self._has_work.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SHUT_S if self._may_step.is_set() else None):
                await self._has_work.wait()

    def _look(self) -> None:
        super()._look()
        self._has_work.set()

    def _arrive(self, request: Arrival) -> None:
        self.serving.take(self._now_s(), request.prompt_tokens, request.completion_tokens, is_seen=True)
        self._has_work.set()

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()
