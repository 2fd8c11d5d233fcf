"""Damage in the broker itself heals by itself while the publisher lives, whatever it is and wherever it lies."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from redis import Redis

import rollfab
from rollfab.aio import connect
from rollfab.fabric.format.layout import Layout
from rollfab.fabric.format.manifest import Damage
from rollfab.fabric.inspect.verify import verify
from rollfab.fabric.opened import RedisFabric
from rollfab.fabric.queue.keys import WeightKeys
from rollfab.fabric.rules.weights.chain import DELTA, JUMPS, KEYFRAME, plan
from rollfab.fabric.versions import snapshot
from rollfab.fabric.versions.held import readable
from rollfab.fabric.versions.reader import fetch_bits, fetch_weights
from rollfab.trainer.publish import healing, upkeep
from rollfab.trainer.publish.publisher import Publisher
from rollfab.workers.rollout.weights import ReceiverOptions, WeightReceiver
from tests.support.until import until
from tests.support.weights.weight_models import chunk_key

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("redis")]

RUN = "healing"
HEAL_S = 10.0
OPTIONS = ReceiverOptions(poll_s=0.2, retry_s=0.1)
Bits = dict[str, np.ndarray]


class Engine:
    """The part of an engine that holds weights."""

    def __init__(self) -> None:
        self.bits = {"w": np.zeros(30_000, np.uint16), "b": np.zeros(50, np.uint16)}
        self.layout = Layout.from_rows([["w", "bfloat16", [30_000]], ["b", "bfloat16", [50]]])

    def weight_bits(self) -> Bits:
        return self.bits

    async def read_weights(self) -> Bits:
        return {name: array.copy() for name, array in self.bits.items()}

    async def apply(self, staged: Any, **_: Any) -> float:
        for name, (indices, values) in staged.writes.items():
            self.bits[name][... if indices is None else indices] = values
        return 0.0


@dataclass
class World:
    """A run on a real broker, and a model that is trained."""

    ports: RedisFabric
    redis: Redis
    publisher: Publisher
    weights: Bits
    version: int = -1

    async def publish(self, count: int = 1) -> None:
        """Versions, of 300 changed elements each."""
        for _ in range(count):
            self.version += 1
            self.weights["w"][self.version * 7 :: 100] += 1
            await self.publisher.publish(self.weights, self.version)

    async def receiver(self) -> tuple[WeightReceiver, Engine]:
        engine: Any = Engine()
        receiver = WeightReceiver(self.ports.weights, RUN, engine, options=OPTIONS)
        receiver.start()
        return receiver, engine

    def spoil(self, how: str, version: int, kind: str) -> None:
        spoil(self.redis, RUN, how, version, kind)


def spoil(redis: Redis, run_id: str, how: str, version: int, kind: str) -> None:
    """Damage what lies in the broker; a chunk's first publisher has put it there."""
    keys = WeightKeys(run_id)
    field, key = f"{version}:{kind}", chunk_key(redis, run_id, version, kind)
    if how == "manifest missing":
        assert redis.hdel(keys.manifests, field) == 1
        return
    if how == "manifest garbage":
        assert redis.hset(keys.manifests, field, b"garbage") == 0
        return
    data: Any = redis.get(key)
    assert data, f"{key} is not there"
    if how == "missing":
        redis.delete(key)
    elif how == "truncated":
        redis.set(key, data[: len(data) // 2])
    elif how == "flipped":
        redis.set(key, data[:-1] + bytes([data[-1] ^ 4]))
    elif how == "swapped":
        redis.set(key, b"of another" + data)
    else:
        assert how == "wrong type"
        redis.delete(key)
        redis.rpush(key, "a", "list")


HOWS = ("missing", "truncated", "flipped", "swapped", "wrong type", "manifest missing", "manifest garbage")


@pytest.fixture
async def world(url: str, redis: Redis, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr(snapshot, "CHUNK_BYTES", 8 << 10)  # several chunks in a keyframe
    rng = np.random.default_rng(0)
    weights = {"w": rng.integers(0, 0x7000, 30_000, dtype=np.uint16), "b": np.zeros(50, np.uint16)}
    ports = await RedisFabric.open(url, client_name="test")
    publisher = Publisher(ports.weights, RUN)
    yield World(ports, redis, publisher, weights)
    await publisher.close()
    await ports.close()


async def healed(world: World) -> None:
    """Everything held can be read, from nothing, and is what was published."""
    limit_s = time.monotonic() + HEAL_S
    while (found := await verify(world.ports.weights, RUN)).faults:
        assert time.monotonic() < limit_s, found.faults
        await asyncio.sleep(0.1)
    for version in {name[0] for name in await world.ports.weights.held(RUN)}:
        await fetch_bits(world.ports.weights, RUN, version)
    np.testing.assert_array_equal((await fetch_weights(world.ports.weights, RUN))["w"], world.weights["w"])


async def a_place(world: World, what: str) -> tuple[int, str]:
    """Something of that kind to damage."""
    store = world.ports.weights
    held = await readable(store, RUN, await store.held(RUN))
    if what == "keyframe of the head":
        await world.publisher.publish(world.weights, world.version, keyframe=True)
        return world.version, KEYFRAME
    if what == "keyframe":
        return next(name for name in held if name[1] == KEYFRAME)
    if what == "jump":
        return next(name for name in held if name[1] == JUMPS[0])
    if what == "delta of the head":
        return world.version, DELTA
    assert what == "older delta"
    way = plan(None, world.version, [manifest.link for manifest in held.values()])
    return next((link.version, link.kind) for link in way if link.kind == DELTA and link.version < world.version)


WHERES = ("keyframe of the head", "keyframe", "jump", "delta of the head", "older delta")


@pytest.mark.parametrize("is_kept", [True, False])
@pytest.mark.parametrize("where", WHERES)
@pytest.mark.parametrize("how", HOWS)
async def test_damage_is_found_and_healed_without_a_report(
    world: World, monkeypatch: pytest.MonkeyPatch, how: str, where: str, is_kept: bool
) -> None:
    # Given a run with keyframe, jump and deltas, whose late chunks the publisher has kept, or not
    if not is_kept:
        monkeypatch.setattr(upkeep, "KEPT_BYTES_MIN", 0)
        monkeypatch.setattr(upkeep, "KEPT_SHARE", 1 << 40)
    monkeypatch.setattr(healing, "TICK_S", 0.1)
    await world.publish(12)
    place = await a_place(world, where)
    before = {name[0] for name in await world.ports.weights.held(RUN)}

    # When something in the broker is damaged
    world.spoil(how, *place)
    is_seen = how != "manifest missing" or where == "keyframe"  # another way may lead round what is not listed
    assert (await verify(world.ports.weights, RUN)).faults or not is_seen
    world.publisher.start()

    # Then nobody has to do anything, and the next version is read by who comes new and by who goes on
    if how.startswith("manifest"):
        await until(lambda: world.redis.hexists(WeightKeys(RUN).manifests, f"{place[0]}:{place[1]}"), limit_s=HEAL_S)
    await healed(world)
    if is_kept and where != "keyframe":
        assert {name[0] for name in await world.ports.weights.held(RUN)} == before
    await world.publish()
    receiver, engine = await world.receiver()
    await until(lambda: receiver.version == world.version, limit_s=HEAL_S)
    np.testing.assert_array_equal(engine.bits["w"], world.weights["w"])
    await receiver.close()


@pytest.mark.parametrize("how", HOWS)
async def test_a_receiver_serves_on_while_a_damaged_delta_heals(world: World, how: str) -> None:
    # Given a receiver at the version before the head
    await world.publish(3)
    receiver, engine = await world.receiver()
    await until(lambda: receiver.version == 2, limit_s=HEAL_S)
    receiver._options = ReceiverOptions(poll_s=60.0)  # it looks when it hears of the head alone
    await world.publish(0)

    # When the delta to the next one is damaged before it comes
    original = world.ports.weights.advance_head

    async def damaging(manifest: Any, shard_count: int) -> None:
        world.spoil(how, manifest.version, manifest.kind)
        try:
            await original(manifest, shard_count)
        except rollfab.fabric.contract.errors.BrokerError:  # no manifest: written once more
            await world.ports.weights.put_manifest(manifest)
            await original(manifest, shard_count)
            world.spoil(how, manifest.version, manifest.kind)

    world.ports.weights.advance_head = damaging  # type: ignore[method-assign]
    await world.publish()
    world.ports.weights.advance_head = original  # type: ignore[method-assign]

    # Then it keeps what it holds, says why, and has told it
    await until(lambda: receiver.error is not None, limit_s=HEAL_S)
    assert (receiver.version, receiver.is_sound) == (2, True)
    await until(lambda: bool(world.redis.exists(WeightKeys(RUN).damage)), limit_s=HEAL_S)
    reports = await world.ports.weights.damages(RUN)
    assert {report.version for report in reports} == {3}

    # And follows once the publisher looks
    world.publisher.start()
    await until(lambda: receiver.version == 3, limit_s=HEAL_S)
    np.testing.assert_array_equal(engine.bits["w"], world.weights["w"])
    await healed(world)
    await until(lambda: not world.redis.exists(WeightKeys(RUN).damage), limit_s=HEAL_S)
    await receiver.close()


async def test_a_report_that_is_not_true_costs_a_read_and_changes_nothing(world: World) -> None:
    # Given reports of everything, of what is not there, and of nonsense
    await world.publish(4)
    store, keys = world.ports.weights, WeightKeys(RUN)
    held = await store.held(RUN)
    before = {key: world.redis.dump(key) for key in world.redis.keys(f"{keys.base}:chunk:*")}
    for version, kind in [*held, (99, DELTA), (1, "no-kind")]:
        await store.report_damage(RUN, Damage(version, kind, 1, tuple(range(70)), "corrupt", "liar"))
    world.redis.hset(keys.damage, "x", b"not json")
    world.redis.hset(keys.damage, "1:delta", b'[1, ["a"], 3, {}]')

    # When
    await world.publisher._healing.look()

    # Then
    assert await store.held(RUN) == held
    assert before == {key: world.redis.dump(key) for key in world.redis.keys(f"{keys.base}:chunk:*")}
    assert not world.redis.exists(keys.damage)


async def test_tables_that_became_another_type_of_key_heal(world: World) -> None:
    # Given
    await world.publish(4)
    keys = WeightKeys(RUN)
    held = await world.ports.weights.held(RUN)
    world.redis.set(keys.manifests, "not a table")
    world.redis.set(keys.damage, "not a table")

    # When
    world.publisher.start()

    # Then
    await until(
        lambda: world.redis.type(keys.manifests) == b"hash" and world.redis.hlen(keys.manifests) == len(held),
        limit_s=HEAL_S,
    )
    assert await world.ports.weights.held(RUN) == held
    await healed(world)

    # And a trainer that starts then begins anew
    await world.publisher.close()
    world.redis.set(keys.manifests, "not a table")
    again = Publisher(world.ports.weights, RUN)
    assert (await again.publish(world.weights, 9)).kind == KEYFRAME
    await fetch_weights(world.ports.weights, RUN)


async def test_another_trainer_that_took_over_is_left_alone(world: World) -> None:
    # Given a publisher that was replaced, and damage
    await world.publish(3)
    other = Publisher(world.ports.weights, RUN)
    await other.publish({name: array + 1 for name, array in world.weights.items()}, 3)
    world.spoil("missing", 0, KEYFRAME)

    # When it looks
    await world.publisher._healing.look()

    # Then it writes nothing; the other one heals
    assert await world.ports.weights.tended(RUN) is None
    assert (await verify(world.ports.weights, RUN)).faults
    await other._healing.look()
    assert not (await verify(world.ports.weights, RUN)).faults
    await other.close()


async def test_what_a_restarted_trainer_finds_damaged_is_healed(world: World) -> None:
    # Given a trainer that is gone, and what nobody can make again
    await world.publish(12)
    world.spoil("flipped", 0, KEYFRAME)
    world.spoil("manifest garbage", 11, DELTA)

    # When another one goes on
    again = Publisher(world.ports.weights, RUN)
    world.weights["w"][::50] += 1
    world.version += 1
    await again.publish(world.weights, world.version)
    again.start()

    # Then
    await healed(world)
    await again.close()


async def test_a_keyframe_can_be_asked_for(url: str) -> None:
    # Given
    weights = {"w": np.arange(1000, dtype=np.float32)}
    fabric = await connect(url)
    run = await fabric.run(RUN, model="any", environment="frozenlake")
    await run.publish(weights, version=0)
    weights["w"][3] += 1

    # When
    report = await run.publish(weights, version=1, keyframe=True)

    # Then it lies beside the delta, and repeating that changes nothing
    assert report.kind == DELTA and report.keyframe_bytes > 0
    assert (await run.publish(weights, version=1, keyframe=True)).keyframe_bytes == 0
    ports = await RedisFabric.open(url, client_name="test")
    assert await ports.weights.held(RUN) == [(0, KEYFRAME), (1, DELTA), (1, KEYFRAME)]

    # And a version that is out without one gets it, too
    weights["w"][4] += 1
    await run.publish(weights, version=2)
    assert (await run.publish(weights, version=2, keyframe=True)).keyframe_bytes > 0
    assert (2, KEYFRAME) in await ports.weights.held(RUN)
    await ports.close()
    await fabric.close()


def test_nothing_is_said_when_a_program_ends_with_or_without_closing(url: str) -> None:
    """What looks after the weights ends with the program, in silence."""
    import subprocess
    import sys

    for ending in ("fabric.close()", "", "raise SystemExit(0)"):
        program = (
            "import numpy as np, rollfab, time\n"
            f"fabric = rollfab.connect({url!r})\n"
            f"run = fabric.run({RUN!r}, model='no-preset', environment='frozenlake')\n"
            "run.publish({'w': np.arange(1000, dtype=np.float32)}, version=run.head_version() + 1)\n"
            f"time.sleep(0.3)\n{ending}\n"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), ending
