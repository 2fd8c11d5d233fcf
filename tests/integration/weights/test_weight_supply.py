"""A worker's supply of weights, whole: the broker, the node's shared memory, other workers, collectives."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack

import pytest
import torch

from rollfab.fabric.contract.errors import ConfigError
from rollfab.fabric.format.manifest import COLLECTIVE, WeightManifest
from rollfab.fabric.rules.weights.chain import DELTA, KEYFRAME
from rollfab.trainer.publish.publisher import Publisher
from rollfab.workers.rollout.weight_sources import SupplyOptions, WeightSupply, weights_for
from rollfab.workers.rollout.weights import ReceiverOptions, WeightReceiver
from tests.support.until import until
from tests.support.weights.faulty_weights import RUN, BitsEngine, FaultyStore, assert_holds, small_model, train

pytestmark = pytest.mark.timeout(60)
WAIT_S = 30.0


class Workers:
    """Workers in this process, each with a supply and an engine that only holds weights."""

    def __init__(self, store: FaultyStore, stack: AsyncExitStack, broker_id: str) -> None:
        self._store = store
        self._stack = stack
        self._broker_id = broker_id

    async def start(self, name: str, **options: object) -> tuple[WeightReceiver, BitsEngine]:
        supply: WeightSupply = await self._stack.enter_async_context(
            weights_for(self._store, name, self._broker_id, SupplyOptions(**options))  # type: ignore[arg-type]
        )
        engine = BitsEngine(small_model(seed=99))
        receiver = supply.receiver(RUN, engine)  # type: ignore[arg-type]
        receiver._options = ReceiverOptions(poll_s=0.2)
        receiver.start()
        self._stack.push_async_callback(receiver.close)
        return receiver, engine


@pytest.fixture
def store() -> FaultyStore:
    return FaultyStore()


@pytest.fixture
async def workers(store: FaultyStore, request: pytest.FixtureRequest) -> AsyncIterator[Workers]:
    async with AsyncExitStack() as stack:
        yield Workers(store, stack, request.node.name)


@pytest.fixture
def model() -> torch.nn.Module:
    return small_model()


async def test_workers_of_a_node_fetch_every_chunk_once(
    store: FaultyStore, workers: Workers, model: torch.nn.Module
) -> None:
    started = [await workers.start(f"w{index}") for index in range(4)]
    publisher = Publisher(store, RUN)

    for version in range(3):
        await publisher.publish(model.named_parameters(), version)
        for receiver, engine in started:
            assert await receiver.wait(version, WAIT_S)
            assert_holds(engine, model)
        train(model)

    chunk_count = sum(len(found.chunk_bytes) for found in await _held(store) if found.version < 3)
    assert len(store.fetched) == chunk_count


async def test_a_collective_brings_versions_that_the_broker_has_no_room_for(
    store: FaultyStore, workers: Workers, model: torch.nn.Module
) -> None:
    # Given a full broker, and two workers, of which neither holds anything yet
    store.room = 0
    started = [await workers.start("first"), await workers.start("second")]
    await _until_held(store, 2)
    publisher = Publisher(store, RUN, carrier="collective")

    # When a keyframe and a delta are published
    for version in range(2):
        await publisher.publish(model.named_parameters(), version)
        for receiver, engine in started:
            assert await receiver.wait(version, WAIT_S), receiver.error
            assert_holds(engine, model)
        if version == 0:
            train(model)

    # Then they went by the collective alone
    held = await _held(store)
    assert [(found.version, found.kind, found.carrier) for found in held] == [
        (0, KEYFRAME, COLLECTIVE),
        (1, DELTA, COLLECTIVE),
    ]
    for found in held:
        assert set(await store.chunks(found, range(len(found.chunk_bytes)))) == {None}
    await publisher.close()


async def test_what_a_collective_brought_is_there_for_the_whole_node_also_where_the_broker_has_no_room(
    store: FaultyStore, workers: Workers, model: torch.nn.Module
) -> None:
    # Given a version that one worker of the node has by a collective, and the broker has not
    store.room = 0
    first, _ = await workers.start("first")
    await _until_held(store, 1)
    publisher = Publisher(store, RUN, carrier="collective")
    await publisher.publish(model.named_parameters(), 0)
    assert await first.wait(0, WAIT_S), first.error
    await publisher.close()

    # When another worker of the node begins, which takes no copies of peers, then it has it too
    late, engine = await workers.start("late", believes_peers=False)
    assert await late.wait(0, WAIT_S), late.error
    assert_holds(engine, model)


async def _held_by_one_worker(store: FaultyStore, workers: Workers, model: torch.nn.Module) -> Publisher:
    """Version 0 went by a collective: a worker that serves has it, and the store has no chunk of it."""
    store.room = 0
    first, _ = await workers.start("first", listen="127.0.0.1:0", is_shared=False)
    await _until_held(store, 1)
    publisher = Publisher(store, RUN, carrier="collective")
    await publisher.publish(model.named_parameters(), 0)
    assert await first.wait(0, WAIT_S), first.error
    await _until_held(store, 1, version=0)
    return publisher


async def test_who_joins_after_a_collective_takes_a_copy_from_a_peer_that_serves(
    store: FaultyStore, workers: Workers, model: torch.nn.Module
) -> None:
    publisher = await _held_by_one_worker(store, workers, model)

    late, engine = await workers.start("late", is_shared=False)

    assert await late.wait(0, WAIT_S), late.error
    assert_holds(engine, model)
    await publisher.close()


async def test_who_believes_no_peer_takes_no_copy_of_one(
    store: FaultyStore, workers: Workers, model: torch.nn.Module
) -> None:
    # Given a version that only a worker that serves still has, and nobody publishes it again
    publisher = await _held_by_one_worker(store, workers, model)
    await publisher.close()

    wary, engine = await workers.start("wary", is_shared=False, believes_peers=False)
    trusting, _ = await workers.start("trusting", is_shared=False)

    assert await trusting.wait(0, WAIT_S), trusting.error
    assert not await wary.wait(0, 1.0) and wary.error
    with pytest.raises(AssertionError):
        assert_holds(engine, model)


async def test_what_a_collective_has_carried_is_at_the_broker_for_those_who_come_later(
    store: FaultyStore, workers: Workers, model: torch.nn.Module
) -> None:
    first, _ = await workers.start("first", is_shared=False)
    await _until_held(store, 1)
    publisher = Publisher(store, RUN, carrier="collective")
    for version in range(2):
        await publisher.publish(model.named_parameters(), version)
        assert await first.wait(version, WAIT_S), first.error
        train(model) if version == 0 else None
    assert [found.carrier for found in await _held(store)] == [COLLECTIVE, COLLECTIVE]

    late, engine = await workers.start("late", is_shared=False)

    assert await late.wait(1, WAIT_S), late.error
    assert_holds(engine, model)
    await publisher.close()


async def test_a_collective_of_nobody_goes_by_the_broker(store: FaultyStore, model: torch.nn.Module) -> None:
    publisher = Publisher(store, RUN, carrier="collective")

    report = await publisher.publish(model.named_parameters(), 0)

    (manifest,) = await _held(store)
    assert (report.kind, manifest.carrier) == (KEYFRAME, "broker")
    await publisher.close()


@pytest.mark.parametrize("listen", ["nowhere", "127.0.0.1:x", ":1", "127.0.0.1:70000", "203.0.113.1:9", "0.0.0.0:0"])
async def test_a_place_where_nobody_can_listen_is_refused_by_name(store: FaultyStore, listen: str) -> None:
    with pytest.raises(ConfigError, match=f"served at '?{listen}"):
        async with weights_for(store, "w1", "broker", SupplyOptions(listen=listen)):
            pass


async def _held(store: FaultyStore) -> list[WeightManifest]:
    found: Sequence[WeightManifest | None] = await store.manifests(RUN, await store.held(RUN))
    return [each for each in found if each is not None]


async def _until_held(store: FaultyStore, count: int, version: int = -1) -> None:
    async def are_held() -> bool:
        return sum(holder.version >= version for holder in await store.holders(RUN)) >= count

    await until(are_held, limit_s=WAIT_S)
