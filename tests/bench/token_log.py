"""What saving the tokens of running turns costs: tokens per second with it, and without.

- One engine, one worker loop, the same requests; rounds alternate, the log at its default cadence and never, and which
  of the two goes first alternates, too. What is reported is the median over pairs of neighbours, with the quartiles:
  on a machine that others use, too, one round differs from its neighbour by far more than the log costs.
- Beside it stands what can be told more finely: the CPU time that the worker's loop, a thread beside the engine's, uses
  more with the log, over the time of a round. The engine needs the interpreter too, so it waits about that long.
- "Never" renews no claims either, since a renewal carries the log; so the figure is an upper bound. No reaper runs
  here, so claims outlive their time.
- Everything runs in this process, but the broker: the worker's loop, the engine's thread, and the asking.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rollfab.deploy.replay.figures import percentile
from rollfab.fabric.broker.embedded import EmbeddedBroker
from rollfab.fabric.contract.clock import SystemClock
from rollfab.fabric.contract.errors import FabricError
from rollfab.fabric.contract.records import Lease, RunConfig
from rollfab.fabric.opened import RedisFabric
from rollfab.trainer.aio import AsyncFabric
from rollfab.workers.engines.transformers.engine import TransformersConfig, TransformersEngine
from rollfab.workers.rollout.weights import WeightReceiver
from rollfab.workers.rollout.worker import RolloutConfig, RolloutWorker
from tests.bench.measure import Figure, split_cores
from tests.support.leases import set_lease

from .lively import lively_weights
from .resume.asker import Asker, greedy

RUN_ID = "token-log"
WORKER_ID = "bench-worker"
SEED = 5
NEVER_S = 1e6
READY_TIMEOUT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class LogSettings:
    """How much is measured: pairs of rounds, and the turns of one round, all at once."""

    round_count: int
    turn_count: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class _Round:
    tokens_per_s: float
    duration_s: float
    loop_cpu_s: float


async def measure_token_log(settings: LogSettings) -> dict[str, Any]:
    """Both arms in turn, after one of each that does not count.

    Raises:
        FabricError: the worker does not work, or made other tokens than it should.
    """
    with tempfile.TemporaryDirectory(prefix="rollfab-log-") as name, EmbeddedBroker.start(Path(name)) as broker:
        async with await RedisFabric.open(broker.url, client_name=WORKER_ID) as ports:
            arms = _Arms(ports, settings)
            with split_cores(broker.pid):
                async with arms.open(broker.url):
                    rounds: dict[bool, list[_Round]] = {True: [], False: []}
                    for index in range(settings.round_count + 1):
                        for is_logging in (bool(index % 2), not index % 2):
                            found = await arms.round(is_logging)
                            if index:
                                rounds[is_logging].append(found)
    return _figures(rounds[True], rounds[False])


class _Arms:
    def __init__(self, ports: RedisFabric, settings: LogSettings) -> None:
        self._ports = ports
        self._settings = settings
        self._run = RunConfig(run_id=RUN_ID, model="tiny", environment="none")
        self._engine = TransformersEngine(TransformersConfig(model="tiny", slot_count=settings.turn_count, seed=SEED))
        self._asker = Asker(ports, self._run, SEED)
        self._prompts = self._asker.prompts(settings.turn_count)

    @asynccontextmanager
    async def open(self, url: str) -> AsyncIterator[None]:
        """The run with its weights and the worker's lease, and the engine, while the block runs."""
        await self._ports.board.create_run(self._run)
        run = await AsyncFabric(self._ports, url).run(RUN_ID)
        await run.publish(await asyncio.to_thread(lively_weights), version=0)
        await self._engine.start()
        try:
            yield
        finally:
            await self._engine.close()

    async def round(self, is_logging: bool) -> _Round:
        """The worker anew, ready and waiting; then all turns from their asking until the last result."""
        config = RolloutConfig(
            worker_id=WORKER_ID, role="dedicated", model="tiny", slot_count=self._settings.turn_count
        )
        if not is_logging:
            config = replace(config, log_s=NEVER_S)
        stop = asyncio.Event()
        worker = RolloutWorker(self._ports, self._engine, config, SystemClock(), make_receiver=self._receiver)
        running = asyncio.create_task(worker.run(stop))
        try:
            await self._until_ready()
            return await self._measure()
        finally:
            stop.set()
            await running

    def _receiver(self, run_id: str) -> WeightReceiver:
        return WeightReceiver(self._ports.weights, run_id, self._engine)

    async def _until_ready(self) -> None:
        lease = Lease(
            worker_id=WORKER_ID,
            run_id=RUN_ID,
            lease_epoch=1,
            slot_count=self._settings.turn_count,
            lease_until_ms=None,
        )
        await set_lease(self._ports.board, lease, None)
        until_s = time.monotonic() + READY_TIMEOUT_S
        while True:
            info = (await self._ports.board.workers()).get(WORKER_ID, (None, 0))[0]
            if info is not None and info.active_version == 0:
                return
            if time.monotonic() >= until_s:
                raise FabricError(f"the bench's own worker was not ready after {READY_TIMEOUT_S:.0f} s")
            await asyncio.sleep(0.02)

    async def _measure(self) -> _Round:
        cpu_s, start_s = time.thread_time(), time.perf_counter()
        turns = await self._asker.ask(self._prompts, greedy(self._settings.completion_tokens))
        await self._asker.collect(turns, is_reaping=False)
        duration_s = time.perf_counter() - start_s
        expected = self._settings.turn_count * self._settings.completion_tokens
        if turns.token_count != expected:
            raise FabricError(f"{turns.token_count} tokens came, not {expected}: both arms must do the same work")
        return _Round(turns.token_count / duration_s, duration_s, time.thread_time() - cpu_s)


def _figures(logging: list[_Round], never: list[_Round]) -> dict[str, Any]:
    """Overheads as fractions, from rounds that are neighbours pair by pair."""
    speed = Figure(tuple(1 - ours.tokens_per_s / free.tokens_per_s for ours, free in zip(logging, never, strict=True)))
    more = [(ours.loop_cpu_s - free.loop_cpu_s) / free.duration_s for ours, free in zip(logging, never, strict=True)]
    return {
        "token_log_overhead_fraction": speed.median,
        "token_log_overhead_quartiles": (percentile(speed.rounds, 0.25), percentile(speed.rounds, 0.75)),
        "token_log_loop_cpu_fraction": Figure(tuple(more)).median,
        "token_log_tokens_per_s": Figure(tuple(each.tokens_per_s for each in logging)).median,
        "token_log_never_tokens_per_s": Figure(tuple(each.tokens_per_s for each in never)).median,
    }
