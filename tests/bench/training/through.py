"""The fabric's arm of `rollfab bench training`: the reference trainer before a whole fabric that is always disturbed.

A dedicated and a serving worker generate. The serving one is lent and taken back again and again, and the dedicated one
is killed with -9 now and then; every new version reaches them as a delta.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollfab.deploy.local.supervisor import Supervisor
from rollfab.fabric.broker.embedded import EmbeddedBroker
from rollfab.fabric.contract.records import RunConfig
from rollfab.fabric.opened import RedisFabric
from rollfab.trainer.client import connect
from rollfab.trainer.grpo import GrpoSettings
from rollfab.trainer.loop import TrainingLoop, tasks

POOL = "bench"
SLOT_COUNT = 16  # less than half of a step's trajectories: both workers are needed, and turns are in flight always
LEND_S = 1.5
KILL_EVERY = 7  # changes of lending
WATCH_S = 0.1


@dataclass(kw_only=True)
class Harm:
    """What was done to the workers."""

    lent_count: int = 0
    taken_back_count: int = 0
    kill_count: int = 0


@dataclass(frozen=True, kw_only=True)
class Trained:
    """One training. moved_turn_count: turns that were finished by another claim than the first."""

    rewards: list[float]
    harm: Harm
    staleness_mean: float
    moved_turn_count: int
    delta_count: int
    lost_count: int


class Stage:
    """Broker and roles; use as a context. Every training is a run of its own."""

    def __init__(self, directory: Path, model: str) -> None:
        self._directory = directory
        self._model = model
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Stage:
        with contextlib.ExitStack() as stack:
            self._url = stack.enter_context(EmbeddedBroker.start(self._directory / "broker")).url
            self._supervisor = stack.enter_context(Supervisor(self._directory / "logs"))
            worker = ["worker", "--model", self._model, "--slots", str(SLOT_COUNT)]
            for name, words in {
                "controller": ["controller", "--name", "controller"],
                "agent": ["agent"],
                "dedicated": [*worker, "--role", "dedicated"],
                "serving": [*worker, "--role", "serving", "--pool", POOL],
            }.items():
                self._supervisor.add(name, words, environment={"ROLLFAB_URL": self._url})
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def train(self, settings: GrpoSettings, seed: int) -> Trained:
        """Train with one seed."""
        rewards: list[float] = []
        staleness: list[float] = []
        run_id = f"training-{seed}"

        def report(facts: Mapping[str, Any]) -> None:
            rewards.append(facts["reward_mean"])
            staleness.append(facts["staleness_mean"])

        with connect(self._url) as fabric:
            run = fabric.run(
                run_id,
                model=self._model,
                environment="frozenlake",
                staleness=settings.staleness,
                sampling={"temperature": settings.temperature},
            )
            place = self._directory / run_id
            loop = TrainingLoop(run, settings, tasks, seed=seed, directory=place, report=report)
            with self._disturbed() as harm:
                progress = loop.train()
            moved = _moved_count(self._url, run.config)
        return Trained(
            rewards=rewards,
            harm=dataclasses.replace(harm),
            staleness_mean=sum(staleness) / len(staleness),
            moved_turn_count=moved,
            delta_count=progress.delta_count,
            lost_count=progress.submitted_count * settings.group_size - progress.rollout_count - progress.failed_count,
        )

    @contextlib.contextmanager
    def _disturbed(self) -> Iterator[Harm]:
        """Lend, take back and kill in a thread, until the context ends."""
        harm, is_over = Harm(), threading.Event()
        thread = threading.Thread(target=lambda: asyncio.run(self._disturb(harm, is_over)), name="harm")
        thread.start()
        try:
            yield harm
        finally:
            is_over.set()
            thread.join()

    async def _disturb(self, harm: Harm, is_over: threading.Event) -> None:
        async with await RedisFabric.open(self._url, client_name="bench") as ports:
            count = 0
            while not is_over.is_set():
                await ports.board.set_lend(f"pool:{POOL}", "off" if count % 2 else "on")
                harm.lent_count += count % 2 == 0
                harm.taken_back_count += count % 2
                count += 1
                if count % KILL_EVERY == 0 and self._supervisor.children["dedicated"].is_running:
                    self._supervisor.kill("dedicated")
                    harm.kill_count += 1
                for _ in range(int(LEND_S / WATCH_S)):
                    await asyncio.to_thread(is_over.wait, WATCH_S)
                    self._supervisor.watch()


def _moved_count(url: str, run: RunConfig) -> int:
    async def look() -> int:
        async with await RedisFabric.open(url, client_name="bench") as ports:
            return (await ports.board.run_status(run.run_id)).counters.get("turns_resumed", 0)

    return asyncio.run(look())
