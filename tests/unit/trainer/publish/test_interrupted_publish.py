"""A publish that is interrupted anywhere lets go of the trainer's memory, and the next one is right bit by bit.

The points are counted first, in a publish that is not interrupted: every call of the store, before and after it, and
every region that is encoded. Then a publish is interrupted at each.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from rollfab.fabric.contract.errors import ConfigError, VersionConflict, WeightError
from rollfab.fabric.contract.records import RunConfig
from rollfab.fabric.format.codec import Encoded, Encoder
from rollfab.fabric.versions.commit import commit
from rollfab.fabric.versions.held import readable
from rollfab.fabric.versions.rank_parts import whole
from rollfab.fabric.versions.reader import ChainReader, fetch_weights
from rollfab.fabric.versions.stage import Stage
from rollfab.fabric.versions.store import RedisWeightStore
from rollfab.trainer.aio import AsyncRun
from rollfab.trainer.client import Run, _Loop
from rollfab.trainer.publish.healing import Healing
from rollfab.trainer.publish.publisher import Publisher
from tests.standin.broker import Broker, DirectClient
from tests.standin.fabric import StandInFabric
from tests.support.tried import is_look

RUN = "interrupted"
PAUSE_S = 0.02  # of a thread that is interrupted before it reads: a trainer that goes on at once changes what it reads
WRITES = ("open_publisher", "put_chunks", "put_manifest", "advance_head", "drop")
READS = ("head", "held", "manifests", "holders", "room_bytes")


class Stopped(Exception):
    """What a signal's handler raises."""


class Points:
    """Counts points; at number `target` it interrupts."""

    def __init__(self) -> None:
        self.count = 0
        self.target = -1
        self.interrupt: Callable[[], None] = lambda: None

    def aim(self, target: int, interrupt: Callable[[], None]) -> None:
        self.count, self.target, self.interrupt = 0, target, interrupt

    def is_hit(self) -> bool:
        self.count += 1
        if self.count - 1 != self.target:
            return False
        self.interrupt()
        return True


class PointedStore(RedisWeightStore):
    """A store in memory; each call of it is a point before and a point after."""

    def __init__(self, points: Points) -> None:
        super().__init__(DirectClient(Broker()))
        for name in (*WRITES, *READS):
            setattr(self, name, self._pointed(getattr(self, name), points))

    def _pointed(self, call: Callable[..., Awaitable[Any]], points: Points) -> Callable[..., Awaitable[Any]]:
        async def pointed(*args: Any, **options: Any) -> Any:
            await self._pass(points)
            answer = await call(*args, **options)
            await self._pass(points)
            return answer

        return pointed

    async def _pass(self, points: Points) -> None:
        if points.is_hit():
            await asyncio.sleep(PAUSE_S)


@pytest.fixture
def points() -> Iterator[Points]:
    """Every region that is encoded is a point, too."""
    points = Points()

    def pointed(encode: Callable[..., Any]) -> Callable[..., Any]:
        def pointed(*args: Any) -> Encoded | None:
            if points.is_hit():
                time.sleep(PAUSE_S)
            return encode(*args)

        return pointed

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(Healing, "start", return_value=None))  # its calls are no points
        for name in ("delta", "few", "dense"):
            stack.enter_context(mock.patch.object(Encoder, name, pointed(getattr(Encoder, name))))
        yield points


class Trainer:
    """Weights that are changed in place: six tensors, so six regions."""

    def __init__(self, density: float, kind: str) -> None:
        self._rng = np.random.default_rng(7)
        self._density = density
        self.bits = {f"layer.{n}": self._rng.integers(0, 2**16, 3000, dtype=np.uint16) for n in range(6)}
        self.named: dict[str, Any] = dict(self.bits)
        if kind == "torch":
            self.named = {
                name: torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16) for name, bits in self.bits.items()
            }

    def train(self) -> None:
        for bits in self.bits.values():
            where = self._rng.random(len(bits)) < self._density
            bits[where] += self._rng.integers(1, 4, np.count_nonzero(where), dtype=np.uint16)

    def copy(self) -> dict[str, NDArray[np.uint16]]:
        return {name: bits.copy() for name, bits in self.bits.items()}


def looked_at(count: int) -> range:
    """The points at which a publish is interrupted: all, or in a look every fourth."""
    return range(0, count, 4 if is_look() else 1)


def assert_same(found: Any, truth: dict[str, NDArray[np.uint16]]) -> None:
    for name, bits in truth.items():
        np.testing.assert_array_equal(found[name].reshape(-1), bits)


async def assert_right(store: RedisWeightStore, truths: dict[int, dict[str, NDArray[np.uint16]]]) -> None:
    """Every version that is held, and what a receiver of the first one makes of the chain to the head."""
    held = {version for version, _ in await store.held(RUN)}
    head = (await store.head(RUN)).version
    assert head == max(truths)
    for version in sorted(held):
        assert_same(await fetch_weights(store, RUN, version), truths[version])
    live = {name: bits.copy() for name, bits in truths[min(held)].items()}
    reader = ChainReader(store, RUN)
    manifests = await reader.plan(min(held), head)
    layout = next(iter((await readable(store, RUN, await store.held(RUN))).values())).tensors
    commit(await reader.stage(manifests, Stage(whole(layout), live, min(held))), live)
    assert_same(live, truths[head])


def make_run(points: Points) -> tuple[PointedStore, AsyncRun]:
    store = PointedStore(points)
    fabric = StandInFabric()
    fabric.weights = store
    return store, AsyncRun(fabric, RunConfig(run_id=RUN, model="any", environment="any"))  # type: ignore[arg-type]


CASES = [(0.9, "numpy", "host"), (0.01, "numpy", "host"), (0.9, "torch", "device"), (0.01, "torch", "device")]


async def interrupted_life(points: Points, target: int, at: int, case: tuple[float, str, Any]) -> int:
    """Publish 0, 1, 2 and train between them; version `at` is interrupted at point `target`. Returns its points."""
    density, kind, compares_on = case
    store, run = make_run(points)
    trainer, truths = Trainer(density, kind), {}
    count = 0
    for version in range(4):
        truths[version] = trainer.copy()
        task = asyncio.ensure_future(
            run.publish(trainer.named, version=version, compares_on=compares_on, allow_nonfinite=True)
        )
        points.aim(
            target if version == at else -1, partial(asyncio.get_running_loop().call_soon_threadsafe, task.cancel)
        )
        try:
            await task
        except asyncio.CancelledError:
            assert version == at
        if version == at:
            count = points.count
        trainer.train()  # at once, and in place
        await asyncio.sleep(0)
    points.aim(-1, lambda: None)
    await assert_right(store, truths)
    return count


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "case", [CASES[0], CASES[3], *(pytest.param(each, marks=pytest.mark.slow) for each in CASES[1:3])]
)
@pytest.mark.parametrize("at", [pytest.param(0, marks=pytest.mark.slow), 2])
async def test_cancelled_at_any_point_the_next_version_is_right(
    points: Points, case: tuple[float, str, Any], at: int
) -> None:
    count = await interrupted_life(points, -1, at, case)
    assert count > 20

    for target in looked_at(count):
        await interrupted_life(points, target, at, case)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("density", [0.9, 0.01])
def test_a_signal_at_any_point_leaves_the_call_only_when_it_has_ended(points: Points, density: float) -> None:
    loop, main = _Loop(), threading.main_thread().ident
    assert main is not None

    def handler(*_: Any) -> None:
        raise Stopped

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        count = _signalled_life(points, loop, -1, density)
        for target in looked_at(count):
            _signalled_life(points, loop, target, density)
    finally:
        signal.signal(signal.SIGUSR1, before)
        loop.close()


def _signalled_life(points: Points, loop: _Loop, target: int, density: float) -> int:
    store, run = make_run(points)
    client, trainer, count = Run(loop, run), Trainer(density, "numpy"), 0
    main = threading.main_thread().ident
    assert main is not None
    truths = {}
    for version in range(3):
        truths[version] = trainer.copy()
        points.aim(target if version == 1 else -1, lambda: signal.pthread_kill(main, signal.SIGUSR1))
        try:
            client.publish(trainer.named, version, allow_nonfinite=True)
        except Stopped:
            assert version == 1
            assert not asyncio.run_coroutine_threadsafe(_others(), loop._loop).result()
        count = points.count if version == 1 else count
        trainer.train()
    points.aim(-1, lambda: None)
    asyncio.run(assert_right(store, truths))
    return count


async def _others() -> int:
    return len(asyncio.all_tasks()) - 1


async def test_a_cancelling_leaves_no_thread_behind_however_often_it_comes() -> None:
    # Given threads that encode one region after another, slowly, and a task that is cancelled twice
    _, run = make_run(Points())
    named = {f"layer.{n}": np.zeros(100, dtype=np.uint16) for n in range(40)}
    await run.publish(named, version=0, allow_nonfinite=True)
    await cancelled_in_the_middle(run.publish(named, version=1, allow_nonfinite=True), count=2)


async def test_a_timeout_is_still_a_timeout(points: Points) -> None:
    _, run = make_run(points)
    trainer = Trainer(0.9, "numpy")
    points.aim(10, lambda: time.sleep(0.2))

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await run.publish(trainer.named, version=0, allow_nonfinite=True)

    points.aim(-1, lambda: None)
    await run.publish(trainer.named, version=1, allow_nonfinite=True)


async def test_an_interrupted_version_that_is_out_cannot_be_published_again_with_other_weights(points: Points) -> None:
    # Given a version whose call was cancelled when the head had moved
    store, run = make_run(points)
    trainer = Trainer(0.9, "numpy")
    await run.publish(trainer.named, version=0, allow_nonfinite=True)
    trainer.train()
    task = asyncio.ensure_future(run.publish(trainer.named, version=1, allow_nonfinite=True))
    with (
        mock.patch.object(store, "advance_head", _cancelling(store.advance_head, task)),
        pytest.raises(asyncio.CancelledError),
    ):
        await task
    truth = trainer.copy()
    trainer.train()

    # Then the same number with other weights is refused, and what is out is what it was
    with pytest.raises(VersionConflict, match="publish 2 or higher"):
        await run.publish(trainer.named, version=1, allow_nonfinite=True)
    assert_same(await fetch_weights(store, RUN), truth)


def _cancelling(call: Callable[..., Awaitable[Any]], task: asyncio.Future[Any]) -> Callable[..., Awaitable[Any]]:
    async def cancelling(*args: Any) -> None:
        await call(*args)
        task.cancel()
        await asyncio.sleep(1)

    return cancelling


def test_what_a_call_runs_cannot_call_and_wait_for_itself() -> None:
    loop = _Loop()

    async def outer() -> None:
        async def inner() -> None: ...

        loop.call(inner())

    try:
        with pytest.raises(ConfigError, match="from within another call"):
            loop.call(outer())
    finally:
        loop.close()

    async def late() -> None: ...

    with pytest.raises(ConfigError, match="closed"):
        loop.call(late())


async def test_a_rank_of_a_sharded_trainer_that_is_interrupted_reads_nothing_afterwards(tmp_path: Path) -> None:
    # Given a rank that encodes, slowly, and is cancelled
    store = PointedStore(Points())
    file = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=file, rank=0, world_size=1)
    try:
        publisher = Publisher(store, RUN, group=torch.distributed.group.WORLD, thread_count=2)
        named = {f"layer.{n}": torch.zeros(100, dtype=torch.bfloat16) for n in range(40)}
        await publisher.publish(named, 0, allow_nonfinite=True)
        await publisher.publish(named, 1, allow_nonfinite=True)
        await cancelled_in_the_middle(publisher.publish(named, 2, allow_nonfinite=True))
        # Then nothing was published, and the next call says why it cannot be
        assert (await store.head(RUN)).version == 1
        with pytest.raises(WeightError, match="rank 0 was interrupted while publishing: start the ranks again"):
            await publisher.publish(named, 2, allow_nonfinite=True)
        await publisher.close()
    finally:
        torch.distributed.destroy_process_group()


async def cancelled_in_the_middle(publishing: Coroutine[Any, Any, Any], count: int = 1) -> None:
    """Cancel a publish of forty regions that take a while each; nothing is read after it has ended."""
    started: list[int] = []
    begun, delta = threading.Event(), Encoder.delta

    def slow(self: Encoder, old: Any, new: Any) -> Encoded | None:
        started.append(len(started))
        begun.set()
        time.sleep(0.02)
        return delta(self, old, new)

    with mock.patch.object(Encoder, "delta", slow):
        task = asyncio.ensure_future(publishing)
        await asyncio.to_thread(begun.wait, 5)
        for _ in range(count):
            task.cancel()
            await asyncio.sleep(0.001)
        with pytest.raises(asyncio.CancelledError):
            await task
        seen = len(started)
        await asyncio.sleep(0.2)
        assert len(started) == seen < 40
