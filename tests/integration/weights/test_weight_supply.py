"""A worker's supply of weights, whole: the broker, the node's shared memory, other workers, collectives."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack

import pytest

from rollfab.fabric.contract.errors import ConfigError
from rollfab.fabric.format.manifest import COLLECTIVE, WeightManifest
from rollfab.fabric.rules.weights.chain import DELTA, KEYFRAME
from rollfab.trainer.publish.publisher import Publisher
from rollfab.workers.rollout.weight_sources import SupplyOptions, WeightSupply, weights_for
from rollfab.workers.rollout.weights import ReceiverOptions, WeightReceiver
from tests.support.until import until
from tests.support.weights.faulty_weights import RUN, BitsEngine, FaultyStore, Trainer, assert_holds, small_model

pytestmark = pytest.mark.timeout(60)
WAIT_S = 30.0


class Workers(Trainer):
    """A trainer, and workers in this process, each with a supply and an engine that only holds weights."""

    def __init__(self, stack: AsyncExitStack, broker_id: str) -> None:
        super().__init__()
        self._stack = stack
        self._broker_id = broker_id

    async def work(self, name: str, **options: object) -> tuple[WeightReceiver, BitsEngine]:
        """Another worker."""
        supply: WeightSupply = await self._stack.enter_async_context(
            weights_for(self.store, name, self._broker_id, SupplyOptions(**options))  # type: ignore[arg-type]
        )
        engine = BitsEngine(small_model(seed=99))
        receiver = supply.receiver(RUN, engine)  # type: ignore[arg-type]
        receiver._options = ReceiverOptions(poll_s=0.2)
        receiver.start()
        self._stack.push_async_callback(receiver.close)
        return receiver, engine

    def carry(self) -> None:
        """Publish by a collective from now on."""
        self.publisher = Publisher(self.store, RUN, carrier="collective")
        self._stack.push_async_callback(self.publisher.close)

    async def bring(self, version: int, *started: tuple[WeightReceiver, BitsEngine]) -> None:
        """Publish a version, and see it live at these workers."""
        await self.publish(version)
        for each in started:
            await self.check_live(version, *each)

    async def check_live(self, version: int, receiver: WeightReceiver, engine: BitsEngine) -> None:
        assert await receiver.wait(version, WAIT_S), receiver.error
        assert_holds(engine, self.model)

    async def held(self) -> list[WeightManifest]:
        found: Sequence[WeightManifest | None] = await self.store.manifests(RUN, await self.store.held(RUN))
        return [each for each in found if each is not None]

    async def until_held(self, count: int, version: int = -1) -> None:
        async def are_held() -> bool:
            return sum(holder.version >= version for holder in await self.store.holders(RUN)) >= count

        await until(are_held, limit_s=WAIT_S)


@pytest.fixture
async def workers(request: pytest.FixtureRequest) -> AsyncIterator[Workers]:
    async with AsyncExitStack() as stack:
        yield Workers(stack, request.node.name)


async def test_workers_of_a_node_fetch_every_chunk_once(workers: Workers) -> None:
    started = [await workers.work(f"w{index}") for index in range(4)]
    for version in range(3):
        await workers.bring(version, *started)

    assert workers.store.fetched == [(0, KEYFRAME), (1, DELTA), (2, DELTA)]  # of one chunk each


async def test_a_collective_brings_versions_that_the_broker_has_no_room_for(workers: Workers) -> None:
    # Given a full broker, and two workers, of which neither holds anything yet
    workers.store.room = 0
    started = [await workers.work("first"), await workers.work("second")]
    await workers.until_held(2)
    workers.carry()

    # When a keyframe and a delta are published
    for version in range(2):
        await workers.bring(version, *started)

    # Then they went by the collective alone
    held = await workers.held()
    assert [(found.version, found.kind, found.carrier) for found in held] == [
        (0, KEYFRAME, COLLECTIVE),
        (1, DELTA, COLLECTIVE),
    ]
    for found in held:
        assert set(await workers.store.chunks(found, range(len(found.chunk_bytes)))) == {None}


async def test_what_a_collective_brought_is_there_for_the_whole_node_also_where_the_broker_has_no_room(
    workers: Workers,
) -> None:
    # Given a version that one worker of the node has by a collective, and the broker has not
    workers.store.room = 0
    first = await workers.work("first")
    await workers.until_held(1)
    workers.carry()
    await workers.bring(0, first)
    await workers.publisher.close()

    # When another worker of the node begins, which takes no copies of peers, then it has it too
    await workers.check_live(0, *await workers.work("late", believes_peers=False))


async def held_by_one_worker(workers: Workers) -> None:
    """Version 0 went by a collective: a worker that serves has it, and the store has no chunk of it."""
    workers.store.room = 0
    first = await workers.work("first", listen="127.0.0.1:0", is_shared=False)
    await workers.until_held(1)
    workers.carry()
    await workers.bring(0, first)
    await workers.until_held(1, version=0)


async def test_who_joins_after_a_collective_takes_a_copy_from_a_peer_that_serves(workers: Workers) -> None:
    await held_by_one_worker(workers)
    await workers.check_live(0, *await workers.work("late", is_shared=False))


async def test_who_believes_no_peer_takes_no_copy_of_one(workers: Workers) -> None:
    # Given a version that only a worker that serves still has, and nobody publishes it again
    await held_by_one_worker(workers)
    await workers.publisher.close()

    wary, engine = await workers.work("wary", is_shared=False, believes_peers=False)
    await workers.check_live(0, *await workers.work("trusting", is_shared=False))

    assert not await wary.wait(0, 1.0) and wary.error
    with pytest.raises(AssertionError):
        assert_holds(engine, workers.model)


async def test_what_a_collective_has_carried_is_at_the_broker_for_those_who_come_later(workers: Workers) -> None:
    first = await workers.work("first", is_shared=False)
    await workers.until_held(1)
    workers.carry()
    for version in range(2):
        await workers.bring(version, first)
    assert [found.carrier for found in await workers.held()] == [COLLECTIVE, COLLECTIVE]

    await workers.check_live(1, *await workers.work("late", is_shared=False))


async def test_a_collective_of_nobody_goes_by_the_broker(workers: Workers) -> None:
    workers.carry()

    report = await workers.publish(0)

    (manifest,) = await workers.held()
    assert (report.kind, manifest.carrier) == (KEYFRAME, "broker")


@pytest.mark.parametrize("listen", ["nowhere", "127.0.0.1:x", ":1", "127.0.0.1:70000", "203.0.113.1:9", "0.0.0.0:0"])
async def test_a_place_where_nobody_can_listen_is_refused_by_name(listen: str) -> None:
    with pytest.raises(ConfigError, match=f"served at '?{listen}"):
        async with weights_for(FaultyStore(), "w1", "broker", SupplyOptions(listen=listen)):
            pass
