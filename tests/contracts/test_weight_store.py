"""What every weight store promises, on a server, a cluster and the stand-in alike."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from rollfab.fabric.contract.errors import (
    BrokerError,
    BrokerFull,
    ConfigError,
    PayloadTooLarge,
    VersionConflict,
    VersionUnknown,
    WireError,
)
from rollfab.fabric.format.layout import Layout, TensorSpec
from rollfab.fabric.format.manifest import COLLECTIVE, DAMAGE_CHUNK_COUNT_MAX, Damage, Head, Holder
from rollfab.fabric.ports.weights import ANSWER_BYTES_MAX, DAMAGE_COUNT_MAX, OFFER_BYTES_MAX, WeightStore
from rollfab.fabric.queue.keys import ShardKeys, WeightKeys
from rollfab.fabric.queue.rows import holder_row
from rollfab.fabric.rules.weights.chain import DELTA, JUMPS, KEYFRAME
from rollfab.fabric.versions.held import readable
from rollfab.fabric.versions.reader import fetch_weights
from rollfab.fabric.versions.snapshot import Identity, Prepared, Snapshot
from rollfab.fabric.versions.store import BLOCK_MS_MAX, RedisWeightStore
from rollfab.trainer.publish.publisher import Publisher
from tests.contracts.conftest import empty_broker

RUN = "weights"
LAYOUT = Layout((TensorSpec("w", "bfloat16", (3, 1000)),))
only_servers = pytest.mark.parametrize("stored", ["redis", "redis-cluster"], indirect=True)


@dataclass
class Stored:
    """A store, and the client behind it."""

    store: WeightStore
    client: Any


@pytest.fixture(params=["stand-in", "redis", "redis-cluster"])
async def stored(request: pytest.FixtureRequest) -> AsyncIterator[Stored]:
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


async def began(store: WeightStore, count: int = 1) -> Trainer:
    """A trainer that has published so many versions, from 0 on."""
    trainer = Trainer(await store.open_publisher(RUN))
    for version in range(count):
        await publish(store, trainer, version)
    return trainer


async def test_a_run_begins_without_a_head(store: WeightStore) -> None:
    assert (await store.head(RUN)).version == -1
    assert await store.held(RUN) == []
    assert await store.manifests(RUN, [(0, KEYFRAME)]) == [None]


async def test_a_new_publisher_forgets_what_has_lost_chunks_and_keeps_the_rest_for_good(stored: Stored) -> None:
    # Given a delta whose chunk is lost, and a keyframe whose chunks still have a time to live
    store, trainer = stored.store, Trainer(await stored.store.open_publisher(RUN))
    key, _ = await publish(store, trainer, 0), await publish(store, trainer, 1)
    names = WeightKeys(RUN)
    await stored.client.delete(names.chunk(1, f"delta.{trainer.epoch}", 0))
    await stored.client.pexpire(names.chunk(0, f"keyframe.{trainer.epoch}", 0), 60_000)

    # When another publisher takes over
    await store.open_publisher(RUN)

    # Then
    assert await store.held(RUN) == [(0, KEYFRAME)]
    assert await store.chunks(key.manifest, [0]) == [key.chunks[0]]
    assert await stored.client.pttl(WeightKeys(RUN).chunk(0, f"keyframe.{trainer.epoch}", 0)) == -1


@pytest.mark.parametrize("kind", [KEYFRAME, DELTA, JUMPS[0]])
async def test_chunks_of_a_publisher_that_died_before_its_manifest_go_at_the_next_opening(
    stored: Stored, kind: str
) -> None:
    # Given what is published, and a publisher that dies when it has written some chunks of another version
    store, trainer = stored.store, Trainer(await stored.store.open_publisher(RUN))
    held = [await publish(store, trainer, version) for version in range(3)]
    before = await chunk_names(stored, trainer.epoch)
    lost = trainer.keyframe() if kind == KEYFRAME else jump(trainer, 0, 2) if kind in JUMPS else trainer.prepare(3)
    await store.put_chunks(lost.manifest, 0, lost.chunks)
    assert await chunk_names(stored, trainer.epoch) > before

    # When the next one opens the run
    epoch = await store.open_publisher(RUN)

    # Then they are gone, and what was published is whole
    assert await chunk_names(stored, trainer.epoch) == before
    for prepared in held:
        indices = range(len(prepared.chunks))
        assert await store.chunks(prepared.manifest, indices) == prepared.chunks
    assert await being_sent(stored) == 0
    # And it may publish the same numbers
    again = replace(lost.manifest, epoch=epoch)
    await store.put_chunks(again, 0, lost.chunks)
    await store.put_manifest(again)
    assert await being_sent(stored) == 0


async def test_chunks_of_what_is_held_stay_though_their_sending_was_repeated_and_broken_off(stored: Stored) -> None:
    # Given a publisher that sends a version again, and dies before it has written its manifest again
    store, trainer = stored.store, Trainer(await stored.store.open_publisher(RUN))
    prepared = await publish(store, trainer, 0)
    await store.put_chunks(prepared.manifest, 0, prepared.chunks)

    await store.open_publisher(RUN)

    assert await store.chunks(prepared.manifest, range(len(prepared.chunks))) == prepared.chunks
    assert await being_sent(stored) == 0
    names = await chunk_names(stored, trainer.epoch)
    assert [await stored.client.pttl(name) for name in sorted(names)] == [-1] * len(names)


async def test_a_row_of_what_is_being_sent_that_cannot_be_read_keeps_nobody_from_publishing(stored: Stored) -> None:
    rows = {"nonsense": "1", "1:delta.1": "many", "2:delta.1": str(1 << 60), b"\xff:delta.1": "1"}
    await stored.client.hset(WeightKeys(RUN).sending, mapping=rows)

    assert await stored.store.open_publisher(RUN) > 0


async def chunk_names(stored: Stored, epoch: int) -> set[Any]:
    """Chunks that the broker holds of versions 0 to 4, as a publisher has written them."""
    candidates = [
        WeightKeys(RUN).chunk(version, f"{kind}.{epoch}", index)
        for version in range(5)
        for kind in (KEYFRAME, DELTA, *JUMPS)
        for index in range(3)
    ]
    return {name for name in candidates if await stored.client.exists(name)}


async def being_sent(stored: Stored) -> int:
    """Versions whose chunks are written and whose manifest is not."""
    return int(await stored.client.hlen(WeightKeys(RUN).sending))


async def test_what_is_published_is_read_back(store: WeightStore) -> None:
    trainer = Trainer(await store.open_publisher(RUN))

    key, delta = await publish(store, trainer, 0), await publish(store, trainer, 3)

    head = await store.head(RUN)
    assert (head.version, head.epoch, head.kind) == (3, trainer.epoch, DELTA)
    assert await store.held(RUN) == [(0, KEYFRAME), (3, DELTA)]
    found = await store.manifests(RUN, [(3, DELTA), (9, DELTA), (0, KEYFRAME)])
    assert all(item.rows and item.tensors for item in found if item is not None)  # what was read is not sent along
    assert [None if item is None else item.encode() for item in found] == [
        delta.manifest.encode(),
        None,
        key.manifest.encode(),
    ]
    assert await store.chunks(key.manifest, [0]) == [key.chunks[0]]
    np.testing.assert_array_equal((await fetch_weights(store, RUN))["w"], trainer.bits["w"].reshape(3, 1000))


async def test_nothing_is_the_head_before_it_is_advanced(store: WeightStore) -> None:
    trainer = Trainer(await store.open_publisher(RUN))
    await write(store, trainer.prepare(0))

    assert (await store.head(RUN)).version == -1
    with pytest.raises(VersionUnknown, match=r"^the head of run .* is not held: nothing is published yet"):
        await fetch_weights(store, RUN)


async def test_a_newer_publisher_fences_the_older(store: WeightStore) -> None:
    old = await began(store)
    late = old.prepare(1)
    await write(store, late)

    new = Trainer(await store.open_publisher(RUN))

    assert new.epoch > old.epoch
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
    old = await began(store)
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
    trainer = await began(store)
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
    trainer = await began(store, 2)
    await write(store, trainer.keyframe())
    others = [
        Snapshot(LAYOUT, Trainer(7).bits).prepare_keyframe(Identity(run_id=RUN, epoch=trainer.epoch, version=version))
        for version in (0, 1)
    ]
    manifests = [*(other.manifest for other in others), replace(others[1].manifest, kind=DELTA, base_version=0)]

    for manifest in manifests:
        await store.put_chunks(manifest, 0, [])
        with pytest.raises(VersionConflict, match="already means something else"):
            await store.put_manifest(manifest)


async def test_the_head_may_get_a_keyframe_beside_its_delta(store: WeightStore) -> None:
    trainer = await began(store, 2)

    await write(store, trainer.keyframe())

    assert await store.held(RUN) == [(0, KEYFRAME), (1, DELTA), (1, KEYFRAME)]
    assert (await store.head(RUN)).kind == DELTA


async def test_a_manifest_without_its_chunks_and_a_head_without_its_manifest_are_refused(store: WeightStore) -> None:
    prepared = Trainer(await store.open_publisher(RUN)).prepare(0)

    with pytest.raises(BrokerError, match="1 of 1 chunks of version 0"):
        await store.put_manifest(prepared.manifest)
    with pytest.raises(BrokerError, match="manifest of version 0"):
        await store.advance_head(prepared.manifest, 1)
    assert await store.held(RUN) == []
    await store.put_chunks(prepared.manifest, 0, prepared.chunks)
    await store.put_manifest(prepared.manifest)


async def test_dropped_versions_are_gone(store: WeightStore) -> None:
    trainer = Trainer(await store.open_publisher(RUN))
    key = await publish(store, trainer, 0)
    delta = await publish(store, trainer, 1)

    await store.drop(RUN, [key.manifest.link], key.manifest.epoch)

    assert await store.held(RUN) == [(1, DELTA)]
    assert await store.chunks(key.manifest, [0]) == [None]
    assert await store.chunks(delta.manifest, [0]) == delta.chunks


async def test_a_publisher_that_was_replaced_deletes_nothing(store: WeightStore) -> None:
    trainer = Trainer(await store.open_publisher(RUN))
    key = await publish(store, trainer, 0)
    await store.open_publisher(RUN)

    with pytest.raises(VersionConflict, match="another publisher took over"):
        await store.drop(RUN, [key.manifest.link], trainer.epoch)

    assert await store.held(RUN) == [(0, KEYFRAME)]
    assert await store.chunks(key.manifest, [0]) == key.chunks


async def test_a_publisher_that_stalls_while_it_opens_the_run_deletes_nothing_of_its_successor(stored: Stored) -> None:
    # Given a trainer that takes a run over, and stalls before it has seen what is held
    is_looking, may_look = asyncio.Event(), asyncio.Event()

    class Stalling(RedisWeightStore):
        async def held(self, run_id: str) -> list[tuple[int, str]]:
            is_looking.set()
            await may_look.wait()
            return await super().held(run_id)

    opening = asyncio.create_task(Stalling(stored.client).open_publisher(RUN))
    await is_looking.wait()

    # When another takes over and publishes
    published = await publish(stored.store, Trainer(await stored.store.open_publisher(RUN)), 0)
    may_look.set()

    # Then
    with pytest.raises(VersionConflict, match="another publisher took over"):
        await opening
    assert await stored.store.held(RUN) == [(0, KEYFRAME)]
    assert await stored.store.chunks(published.manifest, [0]) == published.chunks


async def test_a_manifest_that_cannot_be_read_keeps_nobody_from_publishing(stored: Stored) -> None:
    # Given
    store, trainer = stored.store, await began(stored.store)
    await stored.client.hset(WeightKeys(RUN).manifests, "7:delta", b"torn")

    # When
    trainer.epoch = await store.open_publisher(RUN)
    await publish(store, trainer, 1)

    # Then
    assert [name for name in await store.held(RUN) if name[0] < 7] == [(0, KEYFRAME), (1, DELTA)]
    assert [*await readable(store, RUN, await store.held(RUN))] == [(0, KEYFRAME), (1, DELTA)]
    with pytest.raises(WireError):
        await store.manifests(RUN, [(7, DELTA)])


async def test_a_jump_of_which_no_answer_came_stays_like_any_other(
    stored: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a connection that breaks between a jump's manifest and the end of its chunks' time to live
    weights = {"w": np.random.default_rng(1).integers(0, 2**16, 60_000, dtype=np.uint16)}
    publisher, is_broken = Publisher(stored.store, RUN), False
    keep = RedisWeightStore._keep

    async def break_once(store: RedisWeightStore, keys: list[str]) -> int:
        nonlocal is_broken
        if not is_broken and any("jump" in key for key in keys):
            is_broken = True
            raise BrokerError("the connection broke")
        return await keep(store, keys)

    monkeypatch.setattr(RedisWeightStore, "_keep", break_once)
    for version in range(9):
        weights["w"][:30] += 1
        await publisher.publish(weights, version, allow_nonfinite=True)
    (jump,) = await stored.store.manifests(RUN, [(8, JUMPS[0])])
    assert is_broken and jump is not None
    chunk = WeightKeys(RUN).chunk(8, f"{JUMPS[0]}.{jump.epoch}", 0)
    assert await stored.client.pttl(chunk) > 0

    # When the next version is published
    weights["w"][:30] += 1
    await publisher.publish(weights, 9, allow_nonfinite=True)

    # Then
    assert await stored.client.pttl(chunk) == -1


async def test_waiting_ends_with_the_version(store: WeightStore) -> None:
    trainer = await began(store)

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


@pytest.mark.parametrize("field", ["version", "epoch"])
@pytest.mark.parametrize("data", [b"", b"x", b"\xff", b"nan", b"1e3", b"0x10", b"9" * 30, None])
async def test_a_head_that_is_no_number_is_an_answer_to_its_publisher_and_no_obstacle_to_the_next(
    stored: Stored, field: str, data: bytes | None
) -> None:
    # Given a head that somebody wrote over, or removed
    store, trainer, head = stored.store, Trainer(await stored.store.open_publisher(RUN)), WeightKeys(RUN).head
    manifest = (await publish(store, trainer, 0)).manifest
    writes = (
        lambda: store.put_manifest(manifest),
        lambda: store.advance_head(manifest, 1),
        lambda: store.mend(manifest, {}, trainer.epoch),
        lambda: store.drop(RUN, [manifest.link], trainer.epoch),
    )
    for write_again in writes:
        await (stored.client.hdel(head, field) if data is None else stored.client.hset(head, field, data))

        # Then who publishes is answered in words
        with suppress(BrokerError, VersionConflict):
            await write_again()

    # And another may publish, under an epoch above all before
    epoch = await store.open_publisher(RUN)
    assert epoch > trainer.epoch
    await publish(store, Trainer(epoch), 1)
    assert await store.head(RUN) == Head(1, epoch, KEYFRAME, epoch)


async def test_a_lost_announcement_costs_a_poll_and_no_more(stored: Stored) -> None:
    trainer = Trainer(await stored.store.open_publisher(RUN))
    waiting = asyncio.create_task(stored.store.wait_head(RUN, -1, 5.0))
    await asyncio.sleep(0.05)

    # When the head moves and nobody says so
    await stored.client.hset(WeightKeys(RUN).head, "version", 0)

    async with asyncio.timeout(3.0):
        found = await waiting
    assert (found.version, found.epoch) == (0, trainer.epoch)


class HurriedStore(RedisWeightStore):
    """The head moves just after it was read."""

    trainer: Trainer | None = None

    async def head(self, run_id: str) -> Head:
        head = await super().head(run_id)
        if self.trainer is not None:
            trainer, self.trainer = self.trainer, None
            await publish(self, trainer, 0)
        return head


async def test_an_announcement_between_looking_and_waiting_is_not_missed(stored: Stored) -> None:
    store = HurriedStore(stored.client)
    store.trainer = Trainer(await store.open_publisher(RUN))

    async with asyncio.timeout(BLOCK_MS_MAX / 2000):
        assert (await store.wait_head(RUN, -1, 60.0)).version == 0


async def test_every_shard_learns_the_head_and_never_unlearns_it(stored: Stored) -> None:
    trainer = Trainer(await stored.store.open_publisher(RUN))
    await stored.client.hset(ShardKeys(RUN, 1).run, "head_version", 9)
    prepared = trainer.prepare(5)
    await write(stored.store, prepared)

    await stored.store.advance_head(prepared.manifest, 3)

    heads = [int(await stored.client.hget(ShardKeys(RUN, shard).run, "head_version")) for shard in range(3)]
    assert heads == [5, 9, 5]


async def test_chunks_live_for_good_only_with_their_manifest(stored: Stored) -> None:
    prepared = Trainer(await stored.store.open_publisher(RUN)).prepare(0)
    key = WeightKeys(RUN).chunk(0, f"{KEYFRAME}.{prepared.manifest.epoch}", 0)

    await stored.store.put_chunks(prepared.manifest, 0, prepared.chunks)
    assert await stored.client.pttl(key) > 0
    await stored.store.put_manifest(prepared.manifest)
    assert await stored.client.pttl(key) == -1


# ---- jumps


def jump(trainer: Trainer, base: int, version: int, *, kind: str = JUMPS[0]) -> Prepared:
    """A manifest that says it leads from `base` to `version`; the store does not look into chunks."""
    prepared = trainer.keyframe()
    return replace(prepared, manifest=replace(prepared.manifest, version=version, base_version=base, kind=kind))


async def test_jumps_stand_beside_versions_up_to_the_head(store: WeightStore) -> None:
    trainer = await began(store, 5)
    short, long = jump(trainer, 0, 4), jump(trainer, 1, 3, kind=JUMPS[1])

    for _ in range(2):  # an answer was lost
        await write(store, short)
        await write(store, long)

    names = [(3, DELTA), (3, JUMPS[1]), (4, DELTA), (4, JUMPS[0])]
    assert (await store.held(RUN))[3:] == names
    kinds = [item and (item.version, item.kind, item.base_version) for item in await store.manifests(RUN, names)]
    assert kinds == [(3, DELTA, 2), (3, JUMPS[1], 1), (4, DELTA, 3), (4, JUMPS[0], 0)]
    assert await store.chunks(short.manifest, [0]) == short.chunks
    assert await store.head(RUN) == Head(4, trainer.epoch, DELTA, trainer.epoch)
    await store.drop(RUN, [short.manifest.link], short.manifest.epoch)
    assert (await store.held(RUN))[3:] == names[:3]
    assert await store.chunks(short.manifest, [0]) == [None]


@pytest.mark.parametrize(("base", "version"), [(0, 3), (1, 1), (-1, 1)])
async def test_a_jump_leads_up_to_a_version_that_is_published(store: WeightStore, base: int, version: int) -> None:
    trainer = await began(store, 3)

    with pytest.raises(VersionConflict, match="a jump leads up to a version that is published already"):
        await write(store, jump(trainer, base, version))
    assert len(await store.held(RUN)) == 3


async def test_a_jump_never_changes_and_never_becomes_the_head(store: WeightStore) -> None:
    trainer = await began(store, 3)
    await write(store, jump(trainer, 0, 2))

    with pytest.raises(VersionConflict, match="already means something else"):
        await write(store, jump(trainer, 1, 2))
    for version in (2, 3):
        with pytest.raises(VersionConflict, match="is never the head"):
            await store.advance_head(jump(trainer, 0, version).manifest, 1)
    assert (await store.head(RUN)).kind == DELTA


async def test_a_jump_without_its_chunks_or_of_a_publisher_that_was_replaced_is_refused(store: WeightStore) -> None:
    trainer = await began(store, 3)
    with pytest.raises(BrokerError, match="1 of 1 chunks of version 2"):
        await store.put_manifest(jump(trainer, 0, 2).manifest)
    await store.open_publisher(RUN)
    with pytest.raises(VersionConflict, match="another publisher took over"):
        await write(store, jump(trainer, 0, 2))
    assert len(await store.held(RUN)) == 3


# ---- what else than whole chunks, and how much of it


async def test_a_version_that_something_else_carries_needs_no_chunks(store: WeightStore) -> None:
    trainer = Trainer(await store.open_publisher(RUN))
    prepared = trainer.prepare(0)
    manifest = replace(prepared.manifest, carrier=COLLECTIVE)

    await store.put_manifest(manifest)
    await store.advance_head(manifest, 1)

    assert (await store.head(RUN)).version == 0
    (found,) = await store.manifests(RUN, [(0, KEYFRAME)])
    assert found is not None and found.carrier == COLLECTIVE
    assert await store.chunks(manifest, [0]) == [None]
    with pytest.raises(VersionConflict, match="another publisher took over"):
        await store.put_manifest(replace(manifest, epoch=manifest.epoch - 1))


async def test_parts_of_chunks_are_read(store: WeightStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollfab.fabric.versions.store.BATCH_BYTES", 100)
    trainer = Trainer(await store.open_publisher(RUN))
    manifest, (chunk,) = (prepared := await publish(store, trainer, 0)).manifest, prepared.chunks

    ranges = [(0, start, length) for start, length in ((0, 1), (7, 60), (20, 60), (1, 300), (len(chunk) - 5, 9))]
    found = await store.chunk_ranges(manifest, ranges)

    assert found == [chunk[start : start + length] for _, start, length in ranges]
    assert await store.chunk_ranges(manifest, []) == []
    assert await store.chunk_ranges(manifest, [(0, len(chunk), 9)]) == [None]
    await store.drop(RUN, [manifest.link], manifest.epoch)
    assert await store.chunk_ranges(manifest, ranges) == [None] * 5


async def test_without_a_limit_the_room_is_not_known(store: WeightStore) -> None:
    assert await store.room_bytes() is None


@only_servers
async def test_the_room_is_what_the_fullest_node_has_left(stored: Stored) -> None:
    nodes = stored.client.primaries() if hasattr(stored.client, "primaries") else [stored.client]
    used = [int((await node.info("memory"))["used_memory"]) for node in nodes]
    for index, node in enumerate(nodes[:2]):
        await node.config_set("maxmemory", used[index] + (64 - 32 * index << 20))
    try:
        room = await stored.store.room_bytes()
    finally:
        for node in nodes:
            await node.config_set("maxmemory", 0)

    limit = (32 if len(nodes) > 1 else 64) << 20
    assert room is not None and limit - (8 << 20) < room < limit + (8 << 20)


@only_servers
async def test_a_broker_that_does_not_tell_its_room_has_none_to_tell(
    stored: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = stored.client.primaries() if hasattr(stored.client, "primaries") else [stored.client]
    for node in nodes:  # a user that is not ours
        await node.execute_command("ACL", "SETUSER", "default", "-info")
    try:
        assert await stored.store.room_bytes() is None
    finally:
        for node in nodes:
            await node.execute_command("ACL", "SETUSER", "default", "+info")


# ---- the board


async def test_holders_are_known_until_they_go(store: WeightStore) -> None:
    one, two = Holder("one", 3, "tcp://a:1", "a", "west"), Holder("two", -1)
    assert await store.holders(RUN) == []

    await store.hold(RUN, two, 60.0)
    await store.hold(RUN, one, 60.0)
    assert await store.holders(RUN) == [one, two]
    assert await store.holders(RUN, addressed=False) == [replace(one, address=""), two]
    assert one.address not in repr(one)

    await store.hold(RUN, replace(two, version=7), 60.0)
    await store.release_hold(RUN, "one")
    await store.release_hold(RUN, "unknown")
    assert await store.holders(RUN) == [replace(two, version=7)]
    await store.hold(RUN, one, 60.0)
    await store.hold(RUN, replace(one, address=""), 60.0)  # it serves no more
    assert await store.holders(RUN) == [replace(one, address=""), replace(two, version=7)]
    assert await store.holders("other") == []


async def test_a_hold_ends_with_its_time_unless_it_is_renewed(store: WeightStore) -> None:
    await store.hold(RUN, Holder("renewed", 1), 0.05)
    await store.hold(RUN, Holder("over", 1), 0.05)
    await store.hold(RUN, Holder("renewed", 2), 60.0)

    await asyncio.sleep(0.1)

    assert await store.holders(RUN) == [Holder("renewed", 2)]


async def test_the_board_is_bounded(store: WeightStore, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOLDER_COUNT_MAX", "ANSWER_COUNT_MAX"):
        monkeypatch.setattr(f"rollfab.fabric.versions.board.{name}", 2)

    for index, ttl_s in enumerate((50.0, 40.0, 60.0)):
        await store.hold(RUN, Holder(f"h{index}", index), ttl_s)
        if index < 2:
            await store.answer(RUN, "round-1", f"m{index}", b"yes", 60.0)
    await store.answer(RUN, "round-1", "m0", b"no", 60.0)

    assert [holder.holder_id for holder in await store.holders(RUN)] == ["h0", "h2"]  # the one that ends first went
    with pytest.raises(BrokerFull, match="round 'round-1'"):
        await store.answer(RUN, "round-1", "m2", b"yes", 60.0)
    assert await store.answers(RUN, "round-1") == {"m0": b"no", "m1": b"yes"}
    with pytest.raises(PayloadTooLarge):
        await store.offer(RUN, bytes(OFFER_BYTES_MAX + 1), 1.0)
    with pytest.raises(PayloadTooLarge):
        await store.answer(RUN, "round-1", "m0", bytes(ANSWER_BYTES_MAX + 1), 1.0)
    with pytest.raises(ConfigError):
        await store.answer(RUN, "a:b", "m0", b"", 1.0)


async def test_the_newest_offer_stands_until_its_time_is_over(store: WeightStore) -> None:
    assert await store.offers(RUN) is None
    await store.offer(RUN, b"first", 60.0)
    await store.offer(RUN, b"second", 60.0)
    assert await store.offers(RUN) == b"second"
    await store.offer(RUN, b"third", 0.05)

    await asyncio.sleep(0.1)

    assert await store.offers(RUN) is None


async def test_answers_are_forgotten_with_their_round(store: WeightStore) -> None:
    await store.answer(RUN, "r1", "one", b"\0\1", 0.05)
    await store.answer(RUN, "r2", "one", b"", 60.0)
    await store.answer(RUN, "r2", "two", b"2", 60.0)

    await asyncio.sleep(0.1)

    assert await store.answers(RUN, "r1") == {}
    assert await store.answers(RUN, "r2") == {"one": b"", "two": b"2"}


async def test_an_offer_wakes_everyone_who_waits_for_the_head_and_once(store: WeightStore) -> None:
    await publish(store, Trainer(await store.open_publisher(RUN)), 3)
    waiting = [asyncio.create_task(store.wait_head(RUN, 3, 60.0)) for _ in range(3)]
    await asyncio.sleep(0.05)
    assert not any(task.done() for task in waiting)

    await store.offer(RUN, b"now", 60.0)

    async with asyncio.timeout(5.0):
        assert [head.version for head in await asyncio.gather(*waiting)] == [3, 3, 3]
    again = asyncio.create_task(store.wait_head(RUN, 3, 60.0))
    await asyncio.sleep(0.05)
    assert not again.done()
    await store.offer(RUN, b"more", 60.0)
    async with asyncio.timeout(5.0):
        assert (await again).version == 3


async def test_an_offer_made_while_nobody_waits_is_seen_by_the_next_wait(store: WeightStore) -> None:
    await publish(store, Trainer(await store.open_publisher(RUN)), 3)
    assert (await store.wait_head(RUN, 2, 60.0)).version == 3

    await store.offer(RUN, b"now", 60.0)

    async with asyncio.timeout(5.0):
        assert (await store.wait_head(RUN, 3, 60.0)).version == 3
    waiting = asyncio.create_task(store.wait_head(RUN, 3, 60.0))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    waiting.cancel()

    # And a wait that ends with a version takes no offer away
    await store.offer(RUN, b"more", 60.0)
    assert (await store.wait_head(RUN, 2, 60.0)).version == 3
    async with asyncio.timeout(5.0):
        assert (await store.wait_head(RUN, 3, 60.0)).version == 3


async def test_what_is_over_is_deleted_with_the_next_hold(stored: Stored) -> None:
    keys = WeightKeys(RUN)
    for index in range(20):
        await stored.store.hold(RUN, Holder(f"h{index}", index, "a"), 0.01)
    await asyncio.sleep(0.05)

    await stored.store.hold(RUN, Holder("one", 1, "a"), 60.0)

    assert await stored.client.hkeys(keys.holders) == await stored.client.hkeys(keys.addresses) == [b"one"]
    assert await stored.client.zcard(keys.holding) == 1


async def test_a_holder_that_cannot_be_read_hides_no_other(stored: Stored) -> None:
    keys = WeightKeys(RUN)
    await stored.store.hold(RUN, Holder("good", 1), 60.0)
    for index, row in enumerate((b"", b"{}", b"[1]", b'["1","",""]', b'[1,2,""]', b"\xff", None)):
        if row is not None:
            await stored.client.hset(keys.holders, f"bad{index}", row)
        await stored.client.zadd(keys.holding, {f"bad{index}": 9e15})
        with pytest.raises(WireError):
            holder_row(b"bad%d" % index, row)

    assert await stored.store.holders(RUN) == [Holder("good", 1)]


# ---- damage, said and mended


async def test_what_is_damaged_is_said_once_for_each_version_and_kind_until_it_is_cleared(store: WeightStore) -> None:
    first = Damage(3, DELTA, 1, (0, 2), "corrupt", "one")
    await store.report_damage(RUN, first)
    await store.report_damage(RUN, Damage(3, KEYFRAME, 1, (), "undecodable", "two"))
    await store.report_damage(RUN, replace(first, chunks=tuple(range(200)), reporter="two"))

    delta, keyframe = await store.damages(RUN)
    assert (delta.reporter, delta.chunks) == ("two", tuple(range(DAMAGE_CHUNK_COUNT_MAX)))
    assert (keyframe.kind, keyframe.problem) == (KEYFRAME, "undecodable")
    assert await store.damages("another") == []

    await store.clear_damages(RUN, [delta])
    assert await store.damages(RUN) == [keyframe]


async def test_reports_of_damage_are_few_and_forgotten(store: WeightStore) -> None:
    for version in range(DAMAGE_COUNT_MAX + 3):
        await store.report_damage(RUN, Damage(version, DELTA), 60.0)
    assert len(await store.damages(RUN)) == DAMAGE_COUNT_MAX
    await store.report_damage(RUN, Damage(0, DELTA), 0.05)
    await asyncio.sleep(0.1)
    assert await store.damages(RUN) == []


async def test_a_report_that_cannot_be_read_hides_no_other_and_is_forgotten(stored: Stored) -> None:
    key = WeightKeys(RUN).damage
    await stored.store.report_damage(RUN, Damage(1, DELTA))
    for field, row in (("x", b"[]"), ("2:delta", b"{}"), ("3:delta", b'[1,["a"],"x","y"]'), ("4:delta", b"\xff")):
        await stored.client.hset(key, field, row)
    assert [each.version for each in await stored.store.damages(RUN)] == [1]
    assert await stored.client.hlen(key) == 1


async def test_a_publisher_says_that_it_lives(store: WeightStore) -> None:
    assert await store.tended(RUN) is None
    await store.tend(RUN, 3, 60.0)
    assert await store.tended(RUN) == 3
    await store.tend(RUN, 3, 0.05)
    await asyncio.sleep(0.1)
    assert await store.tended(RUN) is None


async def test_a_version_is_mended_by_who_is_in_charge_alone(stored: Stored) -> None:
    # Given a version below the head that has lost its manifest and a chunk
    store, trainer = stored.store, await began(stored.store)
    delta = await publish(store, trainer, 1)
    await publish(store, trainer, 2)
    names = WeightKeys(RUN)
    await stored.client.delete(names.chunk(1, f"delta.{trainer.epoch}", 0))
    await stored.client.rpush(names.chunk(1, f"delta.{trainer.epoch}", 0), "another type")
    await stored.client.hdel(names.manifests, "1:delta")
    assert await store.chunks(delta.manifest, [0]) == [None]
    assert await store.chunk_ranges(delta.manifest, [(0, 0, 4)]) == [None]

    # When another publisher is in charge, the first one mends nothing
    epoch = await store.open_publisher(RUN)
    with pytest.raises(VersionConflict, match="another publisher took over"):
        await store.mend(delta.manifest, {0: delta.chunks[0]}, 1)
    assert (1, DELTA) not in await store.held(RUN)

    # Then the other one does, for good
    await store.mend(delta.manifest, {0: delta.chunks[0]}, epoch)
    assert await store.chunks(delta.manifest, [0]) == [delta.chunks[0]]
    assert (1, DELTA) in await store.held(RUN)
    assert await stored.client.pttl(WeightKeys(RUN).chunk(1, f"delta.{trainer.epoch}", 0)) == -1
    np.testing.assert_array_equal((await fetch_weights(store, RUN))["w"], trainer.bits["w"].reshape(3, 1000))


async def test_a_publisher_of_a_deleted_run_changes_nothing_in_one_of_its_name(stored: Stored) -> None:
    # Given a publisher whose run is deleted and made again, with other weights as version 0
    store, old = stored.store, Trainer(await stored.store.open_publisher(RUN))
    before = await publish(store, old, 0)
    names = WeightKeys(RUN)
    await stored.client.delete(names.head, names.manifests, names.announcements)
    new = Trainer(await store.open_publisher(RUN))
    after = await publish(store, new, 0)

    # Then whatever it still writes is refused
    with pytest.raises(VersionConflict, match="deleted and made again"):
        await store.mend(before.manifest, {0: before.chunks[0]}, old.epoch)
    with pytest.raises(VersionConflict, match="deleted and made again"):
        await publish(store, old, 1)
    with pytest.raises(VersionConflict, match="deleted and made again"):
        await store.drop(RUN, [after.manifest.link], old.epoch)
    assert await store.chunks(after.manifest, [0]) == [after.chunks[0]]


async def test_an_opening_that_a_fail_over_has_lost_gives_its_epoch_to_nobody_else(stored: Stored) -> None:
    store, names = stored.store, WeightKeys(RUN)
    await publish(store, Trainer(await store.open_publisher(RUN)), 0)
    before = await stored.client.hget(names.head, "epoch")
    lost = Trainer(await store.open_publisher(RUN))
    await stored.client.hset(names.head, "epoch", before)
    await asyncio.sleep(0.01)
    assert await store.open_publisher(RUN) > lost.epoch
    with pytest.raises(VersionConflict, match="another publisher took over"):
        await publish(store, lost, 1)
