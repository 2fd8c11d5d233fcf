"""What every weight store promises, on Redis and in memory alike."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from rollfab.fabric.bus.keys import ShardKeys, WeightKeys
from rollfab.fabric.bus.weights import BLOCK_MS_MAX, RedisWeightStore
from rollfab.fabric.errors import BrokerError, VersionConflict, VersionUnknown
from rollfab.fabric.memory.state import MemoryBroker
from rollfab.fabric.memory.weights import MemoryWeightStore
from rollfab.fabric.ports_weights import WeightStore
from rollfab.fabric.rules.chain import DELTA, KEYFRAME
from rollfab.fabric.weights.chain import fetch_weights
from rollfab.fabric.weights.layout import Layout, TensorSpec
from rollfab.fabric.weights.manifest import Head
from rollfab.fabric.weights.snapshot import Identity, Prepared, Snapshot

from .conftest import empty_broker

RUN = "weights"
LAYOUT = Layout((TensorSpec("w", "bfloat16", (3, 1000)),))
only_redis = pytest.mark.parametrize("stored", ["redis", "redis-cluster"], indirect=True)


@dataclass
class Stored:
    """A store, and the client behind it where there is one."""

    store: WeightStore
    client: Any = None


@pytest.fixture(params=["memory", "redis", "redis-cluster"])
async def stored(request: pytest.FixtureRequest) -> AsyncIterator[Stored]:
    if request.param == "memory":
        yield Stored(MemoryWeightStore(MemoryBroker()))
        return
    client = await empty_broker(request)
    yield Stored(RedisWeightStore(client), client)
    await client.aclose()


@pytest.fixture
def store(stored: Stored) -> WeightStore:
    return stored.store


class Trainer:
    """Makes versions: a keyframe, then deltas, of weights that it keeps."""

    def __init__(self, epoch: int) -> None:
        self.rng = np.random.default_rng(epoch)
        self.bits = {"w": self.rng.integers(0, 2**16, 3000, dtype=np.uint16)}
        self.snapshot = Snapshot(LAYOUT, self.bits)
        self.epoch = epoch

    def prepare(self, version: int) -> Prepared:
        identity = Identity(run_id=RUN, epoch=self.epoch, version=version)
        if self.snapshot.version < 0:
            return self.snapshot.prepare_keyframe(identity)
        self.bits["w"][self.rng.integers(0, 3000, 20)] += 1
        return self.snapshot.prepare_delta(identity, self.bits)

    def keyframe(self) -> Prepared:
        identity = Identity(run_id=RUN, epoch=self.epoch, version=self.snapshot.version)
        return self.snapshot.prepare_keyframe(identity)


async def write(store: WeightStore, prepared: Prepared) -> None:
    await store.put_chunks(prepared.manifest, 0, prepared.chunks)
    await store.put_manifest(prepared.manifest)


async def publish(store: WeightStore, trainer: Trainer, version: int) -> Prepared:
    prepared = trainer.prepare(version)
    await write(store, prepared)
    await store.advance_head(prepared.manifest, 1)
    trainer.snapshot.advance(prepared)
    return prepared


async def test_a_run_begins_without_a_head(store: WeightStore) -> None:
    assert (await store.head(RUN)).version == -1
    assert await store.held(RUN) == []
    assert await store.manifests(RUN, [(0, KEYFRAME)]) == [None]


async def test_what_is_published_is_read_back(store: WeightStore) -> None:
    trainer = Trainer(await store.open_publisher(RUN))

    key, delta = await publish(store, trainer, 0), await publish(store, trainer, 3)

    head = await store.head(RUN)
    assert (head.version, head.epoch, head.kind) == (3, 1, DELTA)
    assert await store.held(RUN) == [(0, KEYFRAME), (3, DELTA)]
    found = await store.manifests(RUN, [(3, DELTA), (9, DELTA), (0, KEYFRAME)])
    assert [None if item is None else item.encode() for item in found] == [
        delta.manifest.encode(),
        None,
        key.manifest.encode(),
    ]
    assert await store.chunks(key.manifest, [0]) == [key.chunks[0]]
    np.testing.assert_array_equal((await fetch_weights(store, RUN))["w"], trainer.bits["w"].reshape(3, 1000))


async def test_every_version_held_can_be_read(store: WeightStore) -> None:
    trainer = Trainer(await store.open_publisher(RUN))
    states = []
    for version in range(4):
        await publish(store, trainer, version)
        states.append(trainer.bits["w"].copy())

    for version, state in enumerate(states):
        np.testing.assert_array_equal((await fetch_weights(store, RUN, version))["w"].reshape(-1), state)
    with pytest.raises(VersionUnknown, match="held are 0-3"):
        await fetch_weights(store, RUN, 4)


async def test_nothing_is_the_head_before_it_is_advanced(store: WeightStore) -> None:
    trainer = Trainer(await store.open_publisher(RUN))
    await write(store, trainer.prepare(0))

    assert (await store.head(RUN)).version == -1
    with pytest.raises(VersionUnknown, match="nothing is published yet"):
        await fetch_weights(store, RUN)


async def test_a_newer_publisher_fences_the_older(store: WeightStore) -> None:
    old = Trainer(await store.open_publisher(RUN))
    await publish(store, old, 0)
    late = old.prepare(1)
    await write(store, late)

    new = Trainer(await store.open_publisher(RUN))

    assert new.epoch == old.epoch + 1
    with pytest.raises(VersionConflict, match="another publisher took over"):
        await store.advance_head(late.manifest, 1)
    with pytest.raises(VersionConflict, match="another publisher took over"):
        await store.put_manifest(late.manifest)
    await publish(store, new, 1)
    np.testing.assert_array_equal((await fetch_weights(store, RUN))["w"].reshape(-1), new.bits["w"])


async def test_an_older_publisher_cannot_overwrite_chunks(store: WeightStore) -> None:
    old, new = Trainer(await store.open_publisher(RUN)), Trainer(await store.open_publisher(RUN))
    published = await publish(store, new, 0)

    await store.put_chunks(old.prepare(0).manifest, 0, [b"late"])

    assert await store.chunks(published.manifest, [0]) == published.chunks


async def test_what_never_became_the_head_goes_with_its_publisher(store: WeightStore) -> None:
    old = Trainer(await store.open_publisher(RUN))
    await publish(store, old, 0)
    orphan = old.prepare(1)
    await write(store, orphan)

    await store.open_publisher(RUN)

    assert await store.held(RUN) == [(0, KEYFRAME)]
    assert await store.chunks(orphan.manifest, [0]) == [None]


@pytest.mark.parametrize("version", [3, 5])
async def test_a_version_must_be_newer(store: WeightStore, version: int) -> None:
    await publish(store, Trainer(await store.open_publisher(RUN)), 5)
    again = Trainer(await store.open_publisher(RUN)).prepare(version)
    await store.put_chunks(again.manifest, 0, again.chunks)

    with pytest.raises(VersionConflict):
        await write(store, again)
    with pytest.raises(
        VersionConflict, match=f"version {version} of run 'weights' is not newer than its head, version 5"
    ):
        await store.advance_head(again.manifest, 1)


async def test_a_delta_needs_the_head_as_its_base(store: WeightStore) -> None:
    trainer = Trainer(await store.open_publisher(RUN))
    await publish(store, trainer, 0)
    one, two = trainer.prepare(1), trainer.prepare(2)
    for prepared in (one, two):
        await write(store, prepared)
    await store.advance_head(one.manifest, 1)

    with pytest.raises(VersionConflict, match="its base 0 is not the head"):
        await store.advance_head(two.manifest, 1)


async def test_every_write_may_be_repeated(store: WeightStore) -> None:
    trainer = Trainer(await store.open_publisher(RUN))
    prepared = trainer.prepare(0)

    for _ in range(2):
        await store.put_chunks(prepared.manifest, 0, prepared.chunks)
        await store.put_manifest(prepared.manifest)
        await store.advance_head(prepared.manifest, 1)

    assert (await store.head(RUN)).version == 0
    assert await store.chunks(prepared.manifest, [0]) == prepared.chunks


async def test_a_published_version_never_changes(store: WeightStore) -> None:
    trainer = Trainer(await store.open_publisher(RUN))
    await publish(store, trainer, 0)
    await publish(store, trainer, 1)
    other = Snapshot(LAYOUT, Trainer(7).bits).prepare_keyframe(Identity(run_id=RUN, epoch=trainer.epoch, version=0))
    await store.put_chunks(other.manifest, 0, [])

    with pytest.raises(VersionConflict, match="already means something else"):
        await store.put_manifest(other.manifest)


async def test_the_head_may_get_a_keyframe_beside_its_delta(store: WeightStore) -> None:
    trainer = Trainer(await store.open_publisher(RUN))
    await publish(store, trainer, 0)
    await publish(store, trainer, 1)

    await write(store, trainer.keyframe())

    assert await store.held(RUN) == [(0, KEYFRAME), (1, DELTA), (1, KEYFRAME)]
    assert (await store.head(RUN)).kind == DELTA


async def test_a_manifest_without_its_chunks_is_refused(store: WeightStore) -> None:
    prepared = Trainer(await store.open_publisher(RUN)).prepare(0)

    with pytest.raises(BrokerError, match="1 of 1 chunks of version 0"):
        await store.put_manifest(prepared.manifest)
    await store.put_chunks(prepared.manifest, 0, prepared.chunks)
    await store.put_manifest(prepared.manifest)


async def test_a_head_without_a_manifest_is_refused(store: WeightStore) -> None:
    prepared = Trainer(await store.open_publisher(RUN)).prepare(0)

    with pytest.raises(BrokerError, match="manifest of version 0"):
        await store.advance_head(prepared.manifest, 1)


async def test_dropped_versions_are_gone(store: WeightStore) -> None:
    trainer = Trainer(await store.open_publisher(RUN))
    key = await publish(store, trainer, 0)
    delta = await publish(store, trainer, 1)

    await store.drop(RUN, [key.manifest.link])

    assert await store.held(RUN) == [(1, DELTA)]
    assert await store.chunks(key.manifest, [0]) == [None]
    assert await store.chunks(delta.manifest, [0]) == delta.chunks


async def test_waiting_ends_with_the_version(store: WeightStore) -> None:
    trainer = Trainer(await store.open_publisher(RUN))
    await publish(store, trainer, 0)

    waiting = [asyncio.create_task(store.wait_head(RUN, 0, 5.0)) for _ in range(3)]
    await asyncio.sleep(0.05)
    assert not any(task.done() for task in waiting)
    await publish(store, trainer, 1)

    assert [head.version for head in await asyncio.gather(*waiting)] == [1, 1, 1]


async def test_waiting_ends_with_time(store: WeightStore) -> None:
    assert (await store.wait_head(RUN, -1, 0.05)).version == -1
    assert (await store.wait_head(RUN, -1, 0.0)).version == -1


async def test_waiting_for_what_is_there_does_not_wait(store: WeightStore) -> None:
    await publish(store, Trainer(await store.open_publisher(RUN)), 4)

    async with asyncio.timeout(1.0):
        assert (await store.wait_head(RUN, 3, 60.0)).version == 4


@only_redis
async def test_a_lost_announcement_costs_a_poll_and_no_more(stored: Stored) -> None:
    trainer = Trainer(await stored.store.open_publisher(RUN))
    waiting = asyncio.create_task(stored.store.wait_head(RUN, -1, 5.0))
    await asyncio.sleep(0.05)

    # When the head moves and nobody says so
    await stored.client.hset(WeightKeys(RUN).head, "version", 0)

    async with asyncio.timeout(3.0):
        assert (await waiting).version == 0
    assert trainer.epoch == 1


class HurriedStore(RedisWeightStore):
    """The head moves just after it was read."""

    trainer: Trainer | None = None

    async def head(self, run_id: str) -> Head:
        head = await super().head(run_id)
        if self.trainer is not None:
            trainer, self.trainer = self.trainer, None
            await publish(self, trainer, 0)
        return head


@only_redis
async def test_an_announcement_between_looking_and_waiting_is_not_missed(stored: Stored) -> None:
    store = HurriedStore(stored.client)
    store.trainer = Trainer(await store.open_publisher(RUN))

    async with asyncio.timeout(BLOCK_MS_MAX / 2000):
        assert (await store.wait_head(RUN, -1, 60.0)).version == 0


@only_redis
async def test_every_shard_learns_the_head_and_never_unlearns_it(stored: Stored) -> None:
    trainer = Trainer(await stored.store.open_publisher(RUN))
    await stored.client.hset(ShardKeys(RUN, 1).run, "head_version", 9)
    prepared = trainer.prepare(5)
    await write(stored.store, prepared)

    await stored.store.advance_head(prepared.manifest, 3)

    heads = [int(await stored.client.hget(ShardKeys(RUN, shard).run, "head_version")) for shard in range(3)]
    assert heads == [5, 9, 5]


@only_redis
async def test_chunks_live_for_good_only_with_their_manifest(stored: Stored) -> None:
    prepared = Trainer(await stored.store.open_publisher(RUN)).prepare(0)
    key = WeightKeys(RUN).chunk(0, f"{KEYFRAME}.1", 0)

    await stored.store.put_chunks(prepared.manifest, 0, prepared.chunks)
    assert await stored.client.pttl(key) > 0
    await stored.store.put_manifest(prepared.manifest)
    assert await stored.client.pttl(key) == -1
