"""A trainer and a receiver of the storm: real publishers and receivers, each in a process that can be killed."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from rollfab.fabric.contract.errors import FabricError, VersionConflict
from rollfab.fabric.format.manifest import Holder
from rollfab.fabric.versions.commit import Staged
from rollfab.trainer.publish.publisher import Publisher
from rollfab.workers.rollout.weights import ReceiverOptions, WeightReceiver
from tests.support.weights.weight_models import Model
from tests.support.weights.weight_truth import Broken
from tests.support.weights.weight_weather import RUN, TornEngine

if TYPE_CHECKING:
    from tests.support.weights.weight_storm import Storm

CALM_S = 300.0


class Trainer:
    """Publishes a model that changes, whatever becomes of it."""

    def __init__(self, storm: Storm, model: Model, *, is_last: bool = False) -> None:
        self.storm, self.model, self.is_last = storm, model, is_last
        self.done = asyncio.Event()
        self.process = storm.process("trainer")
        self.version = -1
        self._conflict_count = 0
        self.process.start(self._guarded())

    def replace(self) -> None:
        """Kill it; another one begins from what it has, or from what it once had."""
        self.process.kill()
        self.storm.trainers.append(Trainer(self.storm, self.model.twin()))

    async def _guarded(self) -> None:
        try:
            await self._train()
        except Exception as error:  # noqa: BLE001 - said by the world
            self.storm.failures.append(error)

    async def _train(self) -> None:
        storm, random = self.storm, self.storm.random
        store = storm.link(self.process)
        publisher = Publisher(store, RUN, clock=storm.clock)
        goal = 2
        while goal and self._conflict_count < 3:
            await asyncio.sleep(random.uniform(0.0, 2.0) * storm.pace_s)
            try:
                head = await store.head(RUN)
                if random.random() < 0.8 or self.version < 0:
                    self.model.train()
                    self.version = self._number(head.version)
                storm.truth.is_tried(self.process.name, self.version, self.model)
                async with asyncio.timeout(self._patience_s()):
                    await publisher.publish(self.model.tensors(), self.version, allow_nonfinite=True)
                publisher.start()
                goal -= self.is_last
                self._conflict_count = 0
            except VersionConflict:
                self._conflict_count += 1
                self.version = -1
            except (FabricError, TimeoutError):
                pass
        if self.is_last:
            self.done.set()
        elif storm.trainers[-1] is self:
            self.replace()

    def _number(self, head_version: int) -> int:
        """The next version: one more than the head, or than our own last, or some are left out."""
        random = self.storm.random
        base = head_version if random.random() < 0.7 else max(head_version, self.version)
        return base + (1 if random.random() < 0.9 else random.randrange(1, 5))

    def _patience_s(self) -> float:
        """In the storm some publishes are broken off, at any await."""
        if self.is_last or self.storm.random.random() < 0.8:
            return 1e6
        return self.storm.random.uniform(0.0, 0.1)


class _Strict(WeightReceiver):
    """What nobody foresaw is survived at work; here it is a fault."""

    def __init__(self, failures: list[BaseException], *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._failures = failures

    def _expected(self, error: Exception) -> FabricError:
        if not isinstance(error, FabricError):
            self._failures.append(error)
        return super()._expected(error)


class Worker:
    """A receiver and its engine, killed and started again."""

    def __init__(self, storm: Storm, place: int) -> None:
        self.storm, self.place = storm, place
        self.process = storm.process(f"worker{place}")
        self._live = (-1, "", 0, 0)  # version, digest, how often the broker had fallen back before it, and at it
        self.engine = self._new_engine()
        self._start()

    def _new_engine(self) -> TornEngine:
        model = Model(self.storm.layout, self.storm.rng, self.storm.random)
        return TornEngine(self.storm.layout, model.bits, self.storm.random, self._on_commit)

    def _start(self) -> None:
        storm, random = self.storm, self.storm.random
        if not storm.is_calm:
            self.engine.tears = random.choice([0.0, 0.1, 0.5])
        every = random.choice([0, 1, 5])
        options = ReceiverOptions(poll_s=1.0, retry_s=0.05, retry_s_max=1.0, audit_every=every)
        store: Any = storm.link(self.process)
        holder = Holder(f"w{self.place}", -1) if random.random() < 0.7 else None
        engine: Any = self.engine
        self.receiver = _Strict(storm.failures, store, RUN, engine, options=options, clock=storm.clock, holder=holder)
        self._live = (-1, "", storm.fall_count, storm.fall_count)
        self.process.start(self._follow() if random.random() < 0.5 else self._drive())

    async def _follow(self) -> None:
        if not self.storm.is_calm:
            await asyncio.sleep(self.storm.random.uniform(0.0, 5.0) * self.storm.pace_s)
        self.receiver.start()

    async def _drive(self) -> None:
        """Ask for one round after another, and break some of them off, at any await."""
        random = self.storm.random
        while True:
            is_broken = not self.storm.is_calm and random.random() < 0.3
            try:
                async with asyncio.timeout(random.uniform(0.0, 0.1) if is_broken else None):
                    await self.receiver.update(1.0)
            except TimeoutError:
                pass
            except FabricError:
                await asyncio.sleep(0.1)
            except Exception as error:  # noqa: BLE001 - said by the world
                self.storm.failures.append(error)
                return
            self.look()

    def restart(self) -> None:
        """kill -9; what starts in its place finds the engine as it was left, or has a new one."""
        self.process.kill()
        self.process = self.storm.process(f"worker{self.place}")
        bits = self.engine.live
        self.engine = self._new_engine()
        if self.storm.random.random() < 0.5:
            self.engine.live = {name: array.copy() for name, array in bits.items()}
        self._start()

    def calm(self) -> None:
        self.engine.tears = 0.0
        self.process.wake()

    def look(self) -> None:
        """Whatever it says is live must be."""
        stamp = self.receiver.stamp()
        if stamp is None:
            return
        digest = self.storm.truth.check(self.process.name, stamp[0], self.engine.live)
        self.storm.truth.seen.looks += 1
        version, before, fall_count, last_count = self._live
        if (stamp[0], digest) == (version, before):
            return
        is_back = stamp[0] <= version
        if is_back and fall_count == self.storm.fall_count:
            raise Broken(f"{self.process.name}: version {version} became {stamp[0]}, and nothing was lost")
        # What was read before the broker fell back may be committed after it: so as of the commit before.
        self._live = (stamp[0], digest, last_count, self.storm.fall_count)

    async def arrive(self, version: int) -> None:
        """At that version, soon, and it is what it should be."""
        if not await self.receiver.wait(version, CALM_S) or self.receiver.stamp() is None:
            raise Broken(f"{self.process.name} stays at {self.receiver.version} below {version}: {self.receiver.error}")
        self.look()

    def _on_commit(self, staged: Any) -> None:
        if staged is None:
            self.storm.truth.seen.torn += 1
            if self.receiver.stamp() is not None:
                self.storm.failures.append(Broken(f"{self.process.name}: what is being written over counts as live"))
            return
        assert isinstance(staged, Staged)
        self.storm.truth.seen.torn -= 1
        self.storm.truth.seen.commits += 1
        self.storm.truth.seen.several += staged.version > self.receiver.version + 1 >= 1
        self.storm.truth.check(f"{self.process.name}'s commit", staged.version, self.engine.live)
