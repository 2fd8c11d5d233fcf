"""How long a process waits for the one of its node that fetches: never for ever, and not twice for the same one."""

from __future__ import annotations

import inspect
from dataclasses import replace
from pathlib import Path

import pytest

from rollfab.fabric.delivery.node_cache import ChunkCache
from rollfab.fabric.delivery.node_store import STALL_COUNT_MAX, FetchLock, PassingStore, RelayedStore, take_fetch_lock
from rollfab.fabric.format.manifest import WeightManifest
from rollfab.fabric.ports.weights import WeightBoard, WeightStore
from tests.standin.fabric import StandInFabric
from tests.support.processes.relay_nodes import FAST, CountingStore, StepClock, Trainer

CHUNK_COUNT = 6


@pytest.fixture
def broker() -> CountingStore:
    return CountingStore(StandInFabric().weights)


def lock_of(cache: ChunkCache, manifest: WeightManifest) -> FetchLock:
    """The lock to fetch that version, as another process would take it."""
    key = f"{manifest.run_id} {manifest.version} {manifest.kind} {manifest.epoch}"
    lock = take_fetch_lock(cache.directory, key, [])
    assert isinstance(lock, FetchLock)
    return lock


async def test_a_frozen_owner_costs_one_stall_and_no_more(broker: CountingStore, tmp_path: Path) -> None:
    manifest = await Trainer(broker, CHUNK_COUNT).publish(0)
    clock, cache = StepClock(), ChunkCache(tmp_path / "node")
    store = RelayedStore(broker, cache, options=FAST, clock=clock)
    frozen = lock_of(cache, manifest)

    await store.chunks(manifest, [0, 1, 2])
    first_s = clock.time_s
    await store.chunks(manifest, [3, 4, 5])

    assert FAST.stall_s <= first_s < 2 * FAST.stall_s
    assert clock.time_s - first_s < FAST.stall_s
    assert sorted(index for _, _, index in broker.fetched) == list(range(CHUNK_COUNT))
    frozen.release()
    await store.close()


async def test_chunks_that_appear_renew_the_patience(broker: CountingStore, tmp_path: Path) -> None:
    manifest = await Trainer(broker, CHUNK_COUNT).publish(0)
    clock, cache = StepClock(), ChunkCache(tmp_path / "node")
    slow_but_alive = lock_of(cache, manifest)
    found = await broker.inner.chunks(manifest, range(CHUNK_COUNT))
    unsent = list(range(CHUNK_COUNT))

    def send_one() -> None:
        if unsent and clock.time_s > 0.8 * FAST.stall_s * (CHUNK_COUNT + 1 - len(unsent)):
            index = unsent.pop(0)
            data = found[index]
            assert data is not None
            (cache.directory / f"{manifest.chunk_hashes[index]}-{len(data)}").write_bytes(data)

    clock.on_sleep = send_one
    store = RelayedStore(broker, cache, options=FAST, clock=clock)

    assert await store.chunks(manifest, range(CHUNK_COUNT)) == found

    assert broker.fetched == []
    slow_but_alive.release()
    await store.close()


async def test_an_owner_that_beats_is_not_passed_though_it_brings_nothing_for_long(
    broker: CountingStore, tmp_path: Path
) -> None:
    manifest = await Trainer(broker, 1).publish(0)
    clock, cache = StepClock(), ChunkCache(tmp_path / "node")
    owner = lock_of(cache, manifest)
    (data,) = await broker.inner.chunks(manifest, [0])
    assert data is not None

    def beat() -> None:
        owner.beat()
        if clock.time_s > 3 * STALL_COUNT_MAX * FAST.stall_s:
            (cache.directory / f"{manifest.chunk_hashes[0]}-{len(data)}").write_bytes(data)

    clock.on_sleep = beat
    store = RelayedStore(broker, cache, options=replace(FAST, poll_s=FAST.stall_s / 4), clock=clock)

    assert await store.chunks(manifest, [0]) == [data]

    assert broker.fetched == []
    owner.release()
    await store.close()


async def test_owners_that_follow_one_another_and_bring_nothing_are_not_waited_for_for_ever(
    broker: CountingStore, tmp_path: Path
) -> None:
    manifest = await Trainer(broker, CHUNK_COUNT).publish(0)
    clock, cache = StepClock(), ChunkCache(tmp_path / "node")
    locks = [lock_of(cache, manifest)]

    def next_owner() -> None:
        locks.pop().release()
        locks.append(lock_of(cache, manifest))

    clock.on_sleep = next_owner
    store = RelayedStore(broker, cache, options=FAST, clock=clock)

    assert None not in await store.chunks(manifest, [0, 1])

    assert clock.time_s <= STALL_COUNT_MAX * FAST.stall_s + 2 * FAST.poll_s
    locks.pop().release()
    await store.close()


def test_a_store_around_another_passes_on_every_call_of_the_port() -> None:
    port = {name for part in (WeightStore, WeightBoard) for name in vars(part) if not name.startswith("_")}

    assert port - {*vars(PassingStore)} == set()
    for name in port:
        given, expected = inspect.signature(getattr(PassingStore, name)), inspect.signature(getattr(WeightStore, name))
        assert given == expected, name
