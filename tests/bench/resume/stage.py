"""The stage of `rollfab bench resume`: a broker, two worker processes with real engines, and this process in the place
of agent and controller.

- Workers are processes, because two engines in one would share its interpreter, and each hand-over would be measured
  while the other engine's steps hold it up. They are witnessed (bench/witness.py), which tells when a turn's first new
  token was there; clocks agree, since both read the machine's monotonic one.
- This process pushes turns and writes leases through the same ports as an agent and a controller. So it knows exactly
  when it revoked what, and nothing else runs beside the workers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np

from rollfab.deploy.local.supervisor import Supervisor
from rollfab.fabric.broker.embedded import EmbeddedBroker
from rollfab.fabric.contract.errors import FabricError
from rollfab.fabric.contract.records import Lease, RunConfig, WorkerInfo
from rollfab.fabric.opened import RedisFabric
from rollfab.trainer.aio import AsyncFabric
from tests.support.leases import end_lease, set_lease

from ..lively import lively_weights
from ..witness import first_tokens, token_count
from .asker import AGENT_ID, Asker, Turns

RUN_ID = "resume"
WORKERS = ("one", "other")
SLOT_COUNT = 8
WORKER_TIMEOUT_S = 120.0  # importing torch twice on a busy machine
START_TIMEOUT_S = 20.0
LOOK_S = 0.002


class Stage:
    """Use as `async with`; everything it started has ended after it."""

    def __init__(
        self, directory: Path, seed: int, weights: Callable[[], Mapping[str, np.ndarray]] = lively_weights
    ) -> None:
        self._directory = directory
        self._weights = weights
        self._seed = seed
        self._stack = AsyncExitStack()
        self._epoch = 0
        self._run = RunConfig(run_id=RUN_ID, model="tiny", environment="none")

    async def __aenter__(self) -> Stage:
        try:
            self._broker = self._stack.enter_context(EmbeddedBroker.start(self._directory / "broker"))
            self._supervisor = self._stack.enter_context(Supervisor(self._directory / "logs"))
            for name in WORKERS:
                words = ["bench", "witness", "--name", name, "--slots", str(SLOT_COUNT)]
                place = {"ROLLFAB_URL": self._broker.url}
                self._supervisor.add(name, [*words, "--directory", str(self._directory)], environment=place)
            self.ports = await self._stack.enter_async_context(
                await RedisFabric.open(self._broker.url, client_name=AGENT_ID)
            )
            await self._open_run()
            self.asker = Asker(self.ports, self._run, self._seed)
            for name in WORKERS:
                await self.lend(name)
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def _open_run(self) -> None:
        await self.ports.board.create_run(self._run)
        run = await AsyncFabric(self.ports, self._broker.url).run(RUN_ID)
        await run.publish(await asyncio.to_thread(self._weights), version=0)

    # ---- leases

    async def lend(self, name: str) -> None:
        """Give a worker a lease and wait until it can take turns.

        Raises:
            FabricError: it did not come up.
        """
        await self._until_known(name, lambda info: True)
        self._epoch += 1
        await set_lease(self.ports.board, self._lease(name, SLOT_COUNT), None)
        await self._until_known(name, lambda info: info.run_id == RUN_ID and info.active_version == 0)

    async def revoke(self, name: str) -> int:
        """End a worker's lease as a controller does; returns when, in ns."""
        self._epoch += 1
        at_ns = time.monotonic_ns()
        await end_lease(self.ports.board, self._lease(name, 0))
        return at_ns

    def kill(self, name: str) -> int:
        """SIGKILL; returns when, in ns. `restart` starts it again."""
        at_ns = time.monotonic_ns()
        self._supervisor.kill(name)
        return at_ns

    async def restart(self) -> None:
        """Bring killed workers back, with leases."""
        for name, child in self._supervisor.children.items():
            if not child.is_running:
                child.start()
                await self.lend(name)

    def _lease(self, name: str, slot_count: int) -> Lease:
        return Lease(worker_id=name, run_id=RUN_ID, lease_epoch=self._epoch, slot_count=slot_count, lease_until_ms=None)

    async def _until_known(self, name: str, condition: Callable[[WorkerInfo], bool]) -> None:
        child = self._supervisor.children[name]
        asked_s = time.monotonic()
        until_s = asked_s + WORKER_TIMEOUT_S
        while True:
            found = (await self.ports.board.workers()).get(name)
            is_news = found is not None and found[1] < 1000 * (time.monotonic() - asked_s)  # said since we asked
            if found is not None and is_news and found[0].pid == child.pid and condition(found[0]):
                return
            if time.monotonic() >= until_s or not child.is_running:
                raise FabricError(f"worker {name} of the bench does not work, its last lines:\n{child.tail()}")
            await asyncio.sleep(0.02)

    # ---- what engines did

    async def started(self, turns: Turns) -> str:
        """Wait until all of these turns have a token; returns the worker that made most of the first ones.

        Raises:
            FabricError: they did not begin.
        """
        until_s = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < until_s:
            made = [line for line in self.first_tokens() if line["turn"] in turns.prompts]
            if len(made) >= len(turns.prompts):
                pids = [line["pid"] for line in made]
                children = {child.pid: name for name, child in self._supervisor.children.items()}
                return children[max(pids, key=pids.count)]
            await asyncio.sleep(LOOK_S)
        raise FabricError(f"of {len(turns.prompts)} turns only {len(made)} were seen to begin")

    def first_tokens(self) -> list[dict[str, Any]]:
        """What the workers' engines were asked for, see bench/witness.py."""
        return first_tokens(self._directory)

    def token_count(self) -> int:
        """Tokens that all engines have made so far."""
        return token_count(self._directory)

    async def until_counted(self, count: int) -> None:
        """Return once witnesses have written down `count` tokens: on a busy machine they may be late.

        Raises:
            FabricError: they did not.
        """
        until_s = time.monotonic() + START_TIMEOUT_S
        while (found := self.token_count()) < count:
            if time.monotonic() >= until_s:
                raise FabricError(f"the engines' witnesses count {found} tokens, {count} came: their figures are wrong")
            await asyncio.sleep(LOOK_S)
