"""A run of weights under faults, drawn from one seed: `python -m tests.support.weights.weight_storm --seed 42`.

Real publishers and receivers on virtual time, each a process with a connection of its own to one store. While the
storm lasts, calls are lost, repeated, late, and what they bring is spoilt; processes are killed, stopped, broken off
and started again at any await; a second trainer takes over; the broker falls back to what a replica had, and fills up.

What must hold:
- whenever a receiver says that a version is live, its bits are those a trainer made the head under that number;
- its version goes down, or comes to mean other weights, only after the broker fell back;
- after every version, what a stage holds is whole, and its sums are those of the live weights with it;
- when the storm is over, everyone reaches the head, and the head can be fetched.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import sys
import types
from collections.abc import Iterator
from random import Random
from typing import Any
from unittest import mock

import numpy as np

from rollfab.fabric.format import regions
from rollfab.fabric.inspect.healing import examine
from rollfab.fabric.versions import fold, snapshot
from rollfab.fabric.versions import reader as chain
from rollfab.fabric.versions.held import readable
from rollfab.fabric.versions.reader import fetch_bits
from tests.sim.virtual_loop import Process, VirtualClock
from tests.support.weights.checked_stage import checked_stages
from tests.support.weights.weight_models import Model, draw_layout
from tests.support.weights.weight_roles import CALM_S, Trainer, Worker
from tests.support.weights.weight_truth import Broken, Seen, Truth
from tests.support.weights.weight_weather import RUN, CalmNetwork, StormLink, StormStore, ThreadedLoop

VERSION_COUNT = 40  # per seed, while the storm lasts
HEAL_S = 60.0  # of virtual time, for a publisher that may be at anything just then
STORM_S_MAX = 400  # times the pace: where faults leave hardly a version, the storm ends all the same


class Storm:
    """The world of one seed."""

    def __init__(self, loop: ThreadedLoop, seed: int, version_count: int) -> None:
        self.loop = loop
        self.random = Random(seed)
        self.rng = np.random.default_rng(seed)
        self.clock = VirtualClock(loop)
        self.store = StormStore(loop, Random(seed + 1))
        self.broker = Process("broker", "broker")
        self.network = CalmNetwork(Random(seed + 2), self.random.choice([0.01, 0.03, 0.1]), 0.001)
        self.failures: list[BaseException] = []
        self.truth = Truth(self.failures)
        self.layout = draw_layout(self.random, has_table=is_large(seed))
        self.version_count = version_count
        self.is_calm = False
        self.fall_count = 0
        self.pace_s = self.random.choice([0.02, 0.2, 1.0])
        self.names = 0
        self.trainers: list[Trainer] = []
        self.workers = [Worker(self, place) for place in range(self.random.randrange(2, 5))]

    def link(self, process: Process) -> Any:
        ports = types.SimpleNamespace(board=None, weights=self.store)
        return StormLink(process, self.broker, ports, self.network, self.truth.observe).weights

    def process(self, role: str) -> Process:
        self.names += 1
        return Process(f"{role}-{self.names}", role)

    def fault(self, name: str) -> None:
        self.truth.seen.faults[name] = self.truth.seen.faults.get(name, 0) + 1

    async def play(self) -> Seen:
        self.network.is_rough = True
        self.trainers.append(Trainer(self, Model(self.layout, self.rng, self.random)))
        weather = asyncio.ensure_future(self._weather())
        while self.truth.seen.published < self.version_count and self.loop.time() < STORM_S_MAX * self.pace_s:
            await asyncio.sleep(self.random.uniform(0.0, 2.0) * self.pace_s)
            self._raise()
            for worker in self.workers:
                worker.look()
        weather.cancel()
        await asyncio.gather(weather, return_exceptions=True)
        await self._calm_down()
        self.truth.seen.ambiguous = sum(len(digests) > 1 for digests in self.truth.heads.values())
        return self.truth.seen

    def _raise(self) -> None:
        if self.failures:
            raise self.failures[0]

    async def _weather(self) -> None:
        kinds = [
            self._kill_worker,
            self._stop_worker,
            self._kill_trainer,
            self._stop_trainer,
            self._second_trainer,
            self._fall_back,
            self._fill_up,
            self._spoil,
        ]
        chosen = self.random.sample(kinds, self.random.randrange(1, len(kinds) + 1))
        while True:
            await asyncio.sleep(self.random.uniform(0.0, 8.0) * self.pace_s)
            kind = self.random.choice(chosen)
            self.fault(kind.__name__.strip("_"))
            await kind()

    async def _kill_worker(self) -> None:
        self.random.choice(self.workers).restart()

    async def _stop_worker(self) -> None:
        process = self.random.choice(self.workers).process
        process.stop()
        self.loop.call_later(self.random.uniform(0.0, 30.0) * self.pace_s, process.wake)

    async def _kill_trainer(self) -> None:
        self.trainers[-1].replace()

    async def _stop_trainer(self) -> None:
        """It sleeps, another one may take over meanwhile, and it comes back."""
        process = self.trainers[-1].process
        process.stop()
        self.loop.call_later(self.random.uniform(0.0, 10.0) * self.pace_s, process.wake)
        if self.random.random() < 0.5:
            await self._second_trainer()

    async def _second_trainer(self) -> None:
        self.trainers.append(Trainer(self, self.trainers[-1].model.twin()))

    async def _fall_back(self) -> None:
        before, epoch = self.store.tables.remember(), self.store.tables.epoch
        await asyncio.sleep(self.random.uniform(0.0, 3.0) * self.pace_s)
        self.store.tables.fall_back(before)
        self.truth.is_epoch_lost |= self.truth.epoch != epoch
        self.truth.epoch = epoch
        self.fall_count += 1

    async def _fill_up(self) -> None:
        self.store.room = self.random.choice([0, 100, 10_000])
        await asyncio.sleep(self.random.uniform(0.0, 5.0) * self.pace_s)
        self.store.room = None

    async def _spoil(self) -> None:
        """Something that the broker holds is damaged, and stays so until it is healed."""
        self.store.spoil()

    async def _calm_down(self) -> None:
        """No faults any more: one trainer publishes twice, and everyone comes to hold what it published.

        What was damaged, also after its last word, is whole again by itself.
        """
        self.is_calm, self.network.is_rough, self.store.room = True, False, None
        for trainer in self.trainers:
            trainer.process.kill()
        for worker in self.workers:
            worker.calm()
        await asyncio.sleep(30.0)  # calls that were late are through
        last = Trainer(self, self.trainers[-1].model.twin(), is_last=True)
        async with asyncio.timeout(CALM_S):
            await last.done.wait()
        head = await self.store.head(RUN)
        for worker in self.workers:
            await worker.arrive(head.version)
        self._raise()
        self.store.spoil()
        await asyncio.sleep(HEAL_S)
        await self._look_at_held()
        _, bits = await fetch_bits(self.store, RUN)
        self.truth.check("the store", head.version, bits)
        self._raise()

    async def _look_at_held(self) -> None:
        """Nothing that is held is damaged."""
        names = await self.store.held(RUN)
        found = await readable(self.store, RUN, names)
        if strange := [name for name in names if name not in found]:
            raise Broken(f"nobody has healed or dropped what cannot be read: {strange}")
        for manifest in found.values():
            if (wound := await examine(self.store, manifest)) is not None:
                raise Broken(f"nobody has healed it: {wound}")


@contextlib.contextmanager
def small_blocks(random: Random) -> Iterator[None]:
    """Blocks, chunks and batches small enough that a small model has many of each."""
    block_bytes = random.choice([64, 256, 1024, 4 << 20])
    chunk_bytes = random.choice([64, 1024, 1 << 20])
    with contextlib.ExitStack() as stack:
        for module, name, value in (
            (regions, "BLOCK_BYTES", block_bytes),
            (snapshot, "CHUNK_BYTES", chunk_bytes),
            (snapshot, "CHUNK_BYTES_MAX", 4 * chunk_bytes),
            (snapshot, "THREAD_COUNT_MAX", 1),
            (chain, "FETCH_BYTES_MAX", random.choice([1024, 8192, 16 << 20])),
            (fold, "WINDOW_BYTES", random.choice([256, 4096, 16 << 20])),
        ):
            stack.enter_context(mock.patch.object(module, name, value))
        yield


def is_large(seed: int) -> bool:
    """Whether a seed has a tensor above one block, and blocks as they are."""
    return seed % 20 == 0


def simulate(seed: int, version_count: int = VERSION_COUNT) -> Seen:
    """One seed, from beginning to end.

    Raises:
        Broken, or whatever went wrong; it names the command that shows it again.
    """
    random = Random(seed)
    loop = ThreadedLoop(Random(seed + 3))
    try:
        with checked_stages(), contextlib.nullcontext() if is_large(seed) else small_blocks(random):

            async def play() -> Seen:
                return await Storm(loop, seed, version_count).play()

            return loop.run_until_complete(play())
    except Exception as error:
        raise Broken(f"{error!r}\npython -m tests.support.weights.weight_storm --seed {seed}") from error
    finally:
        loop.put_down()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.support.weights.weight_storm", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="the first seed")
    parser.add_argument("--seeds", type=int, default=1, help="how many")
    parser.add_argument("--trace", action="store_true", help="show where it broke")
    parser.add_argument("--log", action="store_true", help="show what the product logs")
    given = parser.parse_args()
    logging.basicConfig(level=logging.DEBUG if given.log else logging.CRITICAL)
    total, failed = Seen(), 0
    for seed in range(given.seed, given.seed + given.seeds):
        try:
            total.add(simulate(seed))
        except Broken as error:
            print(error)
            if given.trace:
                raise
            failed += 1
    print(total)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
