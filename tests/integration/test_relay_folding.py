"""Receivers far behind that ask a relay to fold: fewer bytes, and the right weights whatever the relay does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollfab.fabric.errors import ChainBroken, EngineError, PeerLost, WeightError, WireError
from rollfab.fabric.memory.state import MemoryBroker
from rollfab.fabric.memory.weights import MemoryWeightStore
from rollfab.fabric.ports_weights import Range, WeightStore
from rollfab.fabric.relay.cache import ChunkCache, ChunkName, chunk_name
from rollfab.fabric.relay.catching_up import CatchUp, CatchUpOptions
from rollfab.fabric.relay.client import Connection
from rollfab.fabric.relay.folding import Folder, FolderOptions, FoldRequest
from rollfab.fabric.relay.frames import Word
from rollfab.fabric.relay.options import RelayOptions
from rollfab.fabric.relay.parents import Parents
from rollfab.fabric.relay.passing import PassingStore
from rollfab.fabric.relay.server import ChunkRequest, RelayServer
from rollfab.fabric.relay.store import RelayedStore
from rollfab.fabric.rules.chain import DELTA, FOLD, JUMPS, KEYFRAME
from rollfab.fabric.weights.chain import ChainReader
from rollfab.fabric.weights.codec import Bits
from rollfab.fabric.weights.digest import state_sums
from rollfab.fabric.weights.layout import Layout, TensorSpec
from rollfab.fabric.weights.manifest import Holder, Sums, WeightManifest
from rollfab.fabric.weights.stage import Stage, commit
from rollfab.trainer.publish import Publisher
from tests.relay_nodes import RUN, CountingStore, LiveBits, StepClock

LAG = 40
EAST = Holder("me", 0, "", "mine", "east")
ASK = CatchUpOptions(saved_bytes_min=1)
RELAY = RelayOptions(stall_s=5.0, parent_stall_s=5.0, refresh_s=0.05, piece_bytes=1 << 20)  # patient: machines are busy


class Training:
    """Versions whose changes are like those of real updates: fp32 weights that drift and tremble, rounded to bfloat16.

    Real ones at learning rate 1e-6: 0.7 to 1.2 % of the elements change from one version to the next, and 8.1 % over
    40 versions, a quarter of the sum (net: what has changed back is not counted).
    """

    def __init__(self, store: WeightStore, *, tensor_count: int = 2, element_count: int = 150_000) -> None:
        self._rng = np.random.default_rng(5)
        self._publisher = Publisher(store, RUN)
        self._weights = [self._noise(element_count) * np.float32(0.02) for _ in range(tensor_count)]
        self._drifts = [self._noise(element_count) * np.float32(0.072e-6) for _ in range(tensor_count)]
        self.bits: dict[str, Bits] = {}
        self.changed_counts: list[int] = []
        self.delta_bytes = 0
        self.version = -1

    async def publish(self, count: int = 1, *, noise: float = 0.178e-6) -> None:
        """The next `count` versions, with the keyframe and the jumps that are due."""
        for _ in range(count):
            for weights, drift in zip(self._weights, self._drifts, strict=True):
                weights += drift + self._noise(len(weights)) * np.float32(noise)
            self.version += 1
            self.bits = {f"w{index}": _rounded(weights) for index, weights in enumerate(self._weights)}
            report = await self._publisher.publish(self.bits, self.version)
            if self.version:
                self.changed_counts.append(report.changed_count)
                self.delta_bytes += report.payload_bytes

    def _noise(self, count: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        return self._rng.standard_normal(count, dtype=np.float32)


def _rounded(weights: np.ndarray[tuple[int], np.dtype[np.float32]]) -> Bits:
    words = weights.view(np.uint32)
    return ((words + 0x7FFF + ((words >> 16) & 1)) >> 16).astype(np.uint16)


def layout_of(bits: dict[str, Bits]) -> Layout:
    return Layout(tuple(TensorSpec(name, "bfloat16", array.shape) for name, array in bits.items()))


class Receiver:
    """One that holds version 0, and asks for a fold before it takes the ordinary way."""

    def __init__(self, broker: WeightStore, bits: dict[str, Bits], name: str = "me", **how: Any) -> None:
        me = Holder(name, 0, "", how.pop("node", name))
        self.catch_up = CatchUp(broker, me, **{"options": ASK, "relay_options": RELAY, **how})
        self._reader = ChainReader(broker, RUN)
        self.kinds: list[str] = []
        self.payload_bytes = 0
        self.reset(bits)

    def reset(self, bits: dict[str, Bits]) -> None:
        """Hold these from now on, as version 0."""
        self.bits = {name: array.copy() for name, array in bits.items()}

    async def bring_to(self, goal: int) -> None:
        """From version 0 to `goal`; plans once more when what it was on its way by is gone, as receivers do."""
        for _ in range(2):
            with suppress(ChainBroken):
                way = await self._reader.plan(0, goal)
                found = await self.catch_up.stage(way, self._stage)
                if found is None:
                    staged = await self._reader.stage(way, self._stage())
                else:
                    way, staged = [found[0]], found[1]
                commit(staged, self.bits)
                self.kinds = [manifest.kind for manifest in way]
                self.payload_bytes = sum(manifest.payload_bytes for manifest in way)
                return
        raise AssertionError(f"no way leads to version {goal}")

    def _stage(self) -> Stage:
        return Stage(layout_of(self.bits), self.bits, 0)

    def has(self, bits: dict[str, Bits]) -> bool:
        return all(np.array_equal(self.bits[name], array) for name, array in bits.items())


class LookedUpStore(CountingStore):
    """Counts how often somebody looks for relays."""

    looked_up_count = 0

    async def holders(self, run_id: str) -> list[Holder]:
        self.looked_up_count += 1
        return await super().holders(run_id)


class StaticHolders(PassingStore):
    """A view of the tree in which there is one relay above."""

    def __init__(self, inner: WeightStore, above: Holder) -> None:
        super().__init__(inner)
        self._above = above

    async def holders(self, run_id: str) -> list[Holder]:
        return [self._above]


@dataclass
class Behind:
    """A run at version 3, with large deltas: a fold has several chunks.

    sums_without_the_first: of what the later two versions make of version 0.
    """

    broker: LookedUpStore
    start: dict[str, Bits]
    goal: dict[str, Bits]
    sums_without_the_first: Sums

    def receiver(self, name: str, **how: Any) -> Receiver:
        return Receiver(self.broker, self.start, name, **how)


@pytest.fixture(scope="module")
def behind() -> Behind:
    async def make() -> Behind:
        broker = LookedUpStore(MemoryWeightStore(MemoryBroker()))
        training = Training(broker, tensor_count=4, element_count=1_000_000)
        await training.publish()
        start = training.bits
        await training.publish(noise=4e-5)
        first = training.bits
        await training.publish(2, noise=4e-5)
        wrong = {name: array + training.bits[name] - first[name] for name, array in start.items()}
        return Behind(broker, start, training.bits, state_sums(layout_of(wrong), wrong))

    return asyncio.run(make())


@pytest.fixture
def broker() -> LookedUpStore:
    return LookedUpStore(MemoryWeightStore(MemoryBroker()))


@asynccontextmanager
async def relay(
    broker: WeightStore, cache: ChunkCache | None, make_folder: Callable[[RelayedStore], Folder | None] = Folder
) -> AsyncIterator[RelayServer]:
    """A relay that the broker's holders name."""
    store = RelayedStore(broker, cache, options=RELAY)
    server = RelayServer(store, options=RELAY, folder=make_folder(store))
    await server.start()
    await broker.hold(RUN, Holder("relay", 10**6, server.address, "relay"), 60)
    try:
        yield server
    finally:
        await server.close()
        await store.close()


# ---------------------------------------------------------------- what it spares


@pytest.mark.timeout(60)
async def test_a_receiver_forty_versions_behind_fetches_a_fifth_of_the_deltas(
    broker: CountingStore, tmp_path: Path
) -> None:
    # Given updates that are like real ones
    training = Training(broker)
    await training.publish()
    await broker.hold(RUN, Holder("laggard", 0), 60)  # so what leads from there is kept
    start = training.bits
    await training.publish(LAG)
    element_count = sum(map(len, start.values()))
    net_count = sum(np.count_nonzero(training.bits[name] != start[name]) for name in start)
    assert 0.007 < sum(training.changed_counts) / LAG / element_count < 0.010
    assert 0.22 < net_count / sum(training.changed_counts) < 0.28

    # When one receiver takes the ordinary way, and another asks a relay
    alone, asking = Receiver(broker, start), Receiver(broker, start)
    await alone.bring_to(LAG)
    broker.chunk_bytes = 0
    async with relay(broker, ChunkCache(tmp_path / "relay")) as server:
        await asking.bring_to(LAG)

        # Then it has the same weights for a fifth of the deltas' bytes, and what it says is what crossed its link
        assert asking.has(training.bits)
        assert alone.has(training.bits)
        assert asking.kinds == [FOLD]
        assert alone.kinds == [JUMPS[0]] * 5
        assert asking.payload_bytes == server.served_bytes
        assert asking.payload_bytes <= 0.2 * training.delta_bytes < alone.payload_bytes

    # And for fewer from a relay that holds the wanted version itself
    informed = Receiver(broker, start)
    async with relay(broker, None) as server:
        server.offer(RUN, LiveBits(layout_of(training.bits), training.bits, LAG))
        await informed.bring_to(LAG)
    assert informed.has(training.bits)
    assert informed.kinds == [FOLD]
    assert informed.payload_bytes < 0.85 * asking.payload_bytes
    assert FOLD not in {kind for _, kind in await broker.held(RUN)}


async def test_a_fold_asked_for_by_several_is_made_once_and_crosses_to_a_node_once(
    behind: Behind, tmp_path: Path
) -> None:
    # Given two receivers of one node and one of another
    caches = [ChunkCache(tmp_path / node) for node in ("a", "a", "b")]
    receivers = [
        behind.receiver(f"me-{place}", node=cache.directory.name, cache=cache) for place, cache in enumerate(caches)
    ]
    folders: list[Folder] = []

    def make(store: RelayedStore) -> Folder:
        folders.append(Folder(store))
        return folders[0]

    async with relay(behind.broker, None, make) as server:
        await asyncio.gather(*(receiver.bring_to(3) for receiver in receivers))

        assert [receiver.kinds for receiver in receivers] == [[FOLD]] * 3
        assert all(receiver.has(behind.goal) for receiver in receivers)
        assert folders[0].made_count == 1
        assert server.served_bytes == 2 * receivers[0].payload_bytes
    for cache in caches:
        cache.close()


async def test_far_from_the_broker_only_what_the_node_has_is_folded(broker: CountingStore, tmp_path: Path) -> None:
    training = Training(broker)
    await training.publish()
    start = training.bits
    await training.publish(5)
    cache = ChunkCache(tmp_path / "relay")
    async with relay(broker, cache, lambda store: Folder(store, may_fetch=False)):
        early, late = Receiver(broker, start, "early"), Receiver(broker, start, "late")
        await early.bring_to(5)

        # When the relay's own engine takes the versions, its node has them
        node = RelayedStore(broker, cache, options=RELAY)
        for manifest in await ChainReader(node, RUN).plan(0, 5):
            await node.chunks(manifest, range(len(manifest.chunk_bytes)))
        broker.fetched.clear()
        await late.bring_to(5)

    assert early.kinds == [DELTA] * 5
    assert late.kinds == [FOLD]
    assert broker.fetched == []
    assert early.has(training.bits)
    assert late.has(training.bits)


async def test_a_fold_crosses_to_a_region_once(behind: Behind, tmp_path: Path) -> None:
    # Given a region of two nodes that are both behind, and a relay at home
    broker = behind.broker
    cache = ChunkCache(tmp_path / "gateway")
    gateway_store = RelayedStore(broker, cache, options=RELAY)
    gateway = RelayServer(gateway_store, options=RELAY, folder=Folder(gateway_store, may_fetch=False))
    await gateway.start()
    async with relay(broker, None) as home:
        # When the first has caught up, the second finds the fold's chunks there
        first = behind.receiver("first", node="gateway", cache=cache)
        await first.bring_to(3)
        crossed_bytes = home.served_bytes
        below = Parents(StaticHolders(broker, Holder("gateway", 3, gateway.address, "gateway", "east")), EAST)
        second = behind.receiver("second", parents=below)
        await second.bring_to(3)

        assert [first.kinds, second.kinds] == [[FOLD], [FOLD]]
        assert second.has(behind.goal)
        assert home.served_bytes == crossed_bytes == first.payload_bytes == gateway.served_bytes
    await below.close()
    await gateway.close()
    await gateway_store.close()


async def test_a_node_that_has_the_deltas_asks_nobody(behind: Behind, tmp_path: Path) -> None:
    cache = ChunkCache(tmp_path / "mine")
    node = RelayedStore(behind.broker, cache, options=RELAY)
    for manifest in await ChainReader(node, RUN).plan(0, 3):
        await node.chunks(manifest, range(len(manifest.chunk_bytes)))
    receiver = behind.receiver("me", cache=cache)
    behind.broker.looked_up_count = 0

    async with relay(behind.broker, None):
        await receiver.bring_to(3)

    assert receiver.kinds == [DELTA] * 3
    assert behind.broker.looked_up_count == 0
    await node.close()


# ---------------------------------------------------------------- folding by live weights


class EndedBits(LiveBits):
    """Of an engine that has ended."""

    def bits(self) -> Mapping[str, Bits]:
        raise EngineError("it has ended")


def standing(behind: Behind) -> LiveBits:
    return LiveBits(layout_of(behind.goal), behind.goal, 3)


def ahead(behind: Behind) -> LiveBits:
    return LiveBits(layout_of(behind.goal), behind.goal, 4)


def committing(behind: Behind) -> LiveBits:
    live = standing(behind)
    live.is_committing = True
    return live


def restless(behind: Behind) -> LiveBits:
    """Something begins to be written whenever a block is being read."""
    live = standing(behind)
    live.on_read = lambda: live.commit({"w0": np.zeros_like(behind.goal["w0"])}, 3)
    return live


def of_another_model(behind: Behind) -> LiveBits:
    bits = {name: array.reshape(2, -1) for name, array in behind.goal.items()}
    return LiveBits(layout_of(bits), bits, 3)


def ended(behind: Behind) -> LiveBits:
    return EndedBits(layout_of(behind.goal), behind.goal, 3)


@asynccontextmanager
async def brought_by(
    behind: Behind, live: LiveBits | None, options: CatchUpOptions = ASK
) -> AsyncIterator[tuple[Receiver, RelayServer]]:
    """A receiver that has asked a relay with these live weights, and the relay."""
    async with relay(behind.broker, None) as server:
        server.offer(RUN, live)
        receiver = behind.receiver("me", options=options)
        await receiver.bring_to(3)
        assert receiver.has(behind.goal)
        yield receiver, server


async def payload_bytes(behind: Behind, live: LiveBits | None) -> int:
    """Of a fold by a relay with these live weights."""
    async with brought_by(behind, live) as (receiver, _):
        assert receiver.kinds == [FOLD]
        return receiver.payload_bytes


async def test_a_relay_that_holds_the_wanted_version_folds_by_it_and_others_fold_without(behind: Behind) -> None:
    plain_bytes = await payload_bytes(behind, None)

    assert await payload_bytes(behind, standing(behind)) < 0.95 * plain_bytes
    for make in (ahead, committing, restless, of_another_model, ended):
        assert await payload_bytes(behind, make(behind)) == plain_bytes, make.__name__


async def test_a_relay_that_moves_on_half_way_folds_the_rest_without_its_weights(behind: Behind) -> None:
    live = standing(behind)

    def move() -> None:
        if live.read_count == 3:  # of four tensors of one block each
            live.commit({name: np.zeros_like(array) for name, array in behind.goal.items()}, 4)

    live.on_read = move
    moved_bytes = await payload_bytes(behind, live)

    assert await payload_bytes(behind, standing(behind)) < moved_bytes < await payload_bytes(behind, None)


async def test_a_fold_that_takes_long_goes_on_without_the_live_weights(behind: Behind) -> None:
    live = standing(behind)
    options = FolderOptions(ranked_s=0.05)
    live.on_read = lambda: time.sleep(0.1)  # the second block comes too late
    folder = Folder(RelayedStore(behind.broker, None), options=options)
    folder.offer(RUN, live)

    await folder.manifest(FoldRequest(RUN, 0, 3, (await behind.broker.head(RUN)).epoch))

    assert live.read_count <= 1
    await folder.close()


async def test_weights_that_are_not_what_a_relay_says_cost_the_fold_and_nothing_else(behind: Behind) -> None:
    # Given a relay some of whose live weights are wrong, without its knowing
    live = standing(behind)
    live.arrays["w1"][::1000] ^= 0x4000

    async with brought_by(behind, live) as (receiver, server):
        assert receiver.kinds == [DELTA] * 3
        assert server.served_bytes > 0  # it was the sums that told


async def test_weights_that_are_on_offer_no_more_are_not_folded_by(behind: Behind) -> None:
    live = standing(behind)
    async with relay(behind.broker, None) as server:
        server.offer(RUN, live)
        server.offer(RUN, None)
        receiver = behind.receiver("me")
        await receiver.bring_to(3)

    assert receiver.kinds == [FOLD]
    assert live.read_count == 0


# ---------------------------------------------------------------- what can go wrong


class MuteFolder(Folder):
    async def manifest(self, wanted: FoldRequest) -> bytes:
        return await asyncio.Event().wait() and b""


class BabblingFolder(Folder):
    async def manifest(self, wanted: FoldRequest) -> bytes:
        return b"not a manifest"


class LyingFolder(Folder):
    """Gives out the steps from version 1 on as all there are, with the sums of what they lead to."""

    sums: Sums

    async def manifest(self, wanted: FoldRequest) -> bytes:
        made = await super().manifest(wanted._replace(base_version=wanted.base_version + 1))
        return replace(WeightManifest.decode(made), sums=self.sums).encode()


class ForgetfulFolder(Folder):
    def chunk(self, name: ChunkName) -> bytes | None:
        return None


class DyingFolder(Folder):
    """Ends the connection after the first chunk, as a relay that is killed does."""

    given_count = 0

    def chunk(self, name: ChunkName) -> bytes | None:
        self.given_count += 1
        if self.given_count > 1:
            raise WireError("the relay is killed")
        return super().chunk(name)


async def test_a_relay_that_sends_too_slowly_is_given_up(behind: Behind) -> None:
    class Slow(RelayServer):
        async def _find(self, request: ChunkRequest, piece: Sequence[int]) -> list[bytes | None]:
            await asyncio.Event().wait()  # it goes on saying that it is busy
            return []

    store = RelayedStore(behind.broker, None, options=RELAY)
    server = Slow(store, options=RELAY, folder=Folder(store))
    await server.start()
    await behind.broker.hold(RUN, Holder("relay", 3, server.address, "relay"), 60)
    receiver = behind.receiver(
        "me",
        options=replace(ASK, wait_s=1.0, bytes_per_s_min=1e9),
        relay_options=replace(RELAY, patience_s=3600.0),
    )
    await receiver.bring_to(3)

    assert receiver.kinds == [DELTA] * 3
    assert receiver.has(behind.goal)
    await server.close()


@pytest.mark.parametrize("kind", [None, MuteFolder, BabblingFolder, LyingFolder, ForgetfulFolder, DyingFolder])
async def test_a_receiver_whose_relay_fails_takes_the_ordinary_way(behind: Behind, kind: type[Folder] | None) -> None:
    options = replace(ASK, wait_s=0.3) if kind is MuteFolder else ASK
    async with relay(behind.broker, None, lambda store: None if kind is None else kind(store)) as server:
        folder = server._folder
        if isinstance(folder, LyingFolder):
            folder.sums = behind.sums_without_the_first
        receiver = behind.receiver("me", options=options)
        await receiver.bring_to(3)

    assert receiver.kinds == [DELTA] * 3
    assert receiver.has(behind.goal)
    assert not isinstance(folder, DyingFolder) or folder.given_count == 3  # the second one by two connections


async def test_after_a_failure_nobody_is_asked_for_a_while(broker: LookedUpStore) -> None:
    training = Training(broker, element_count=10_000)
    await training.publish()
    start = training.bits
    await training.publish(5)
    clock = StepClock()
    receiver = Receiver(broker, start, clock=clock)

    looked_up_counts = []
    for passed_s in (0.0, ASK.retry_s - 1.0, 1.0):
        clock.time_s += passed_s
        broker.looked_up_count = 0
        receiver.reset(start)
        await receiver.bring_to(5)
        looked_up_counts.append(broker.looked_up_count)

    assert looked_up_counts == [1, 0, 1]
    assert receiver.has(training.bits)


async def test_what_is_dropped_while_it_is_folded_is_refused_and_the_receiver_plans_again(
    broker: CountingStore,
) -> None:
    # Given a relay whose sources go while it reads them, because nobody is known to need them
    training = Training(broker)
    await training.publish()
    start = training.bits
    await training.publish(5)

    class Dropping(CountingStore):
        async def chunk_ranges(self, manifest: WeightManifest, ranges: Sequence[Range]) -> list[bytes | None]:
            if training.version == 5:
                await training.publish(noise=0.1)  # so much that a keyframe is due
                links = [each.link for each in await self.manifests(RUN, await self.held(RUN)) if each is not None]
                await self.drop(RUN, [link for link in links if link.version < 5], links[0].epoch)
            return await super().chunk_ranges(manifest, ranges)

    async with relay(Dropping(broker), None):
        receiver = Receiver(broker, start)
        with pytest.raises(AssertionError, match="no way"):
            await receiver.bring_to(5)
        await receiver.bring_to(6)

    assert receiver.kinds == [KEYFRAME]
    assert receiver.has(training.bits)


async def test_a_relay_folds_one_at_a_time_keeps_it_for_a_while_and_then_forgets_it(behind: Behind) -> None:
    options = FolderOptions(keep_s=0.05)
    folder = Folder(RelayedStore(behind.broker, None), options=options)
    epoch = (await behind.broker.head(RUN)).epoch
    wanted = FoldRequest(RUN, 0, 3, epoch)

    first = asyncio.create_task(folder.manifest(wanted))
    await asyncio.sleep(0)
    with pytest.raises(WeightError, match="as many as it may"):
        await folder.manifest(wanted._replace(base_version=1))
    first.cancel()  # who asked has left; others may still come

    manifest = WeightManifest.decode(await folder.manifest(wanted))
    name = chunk_name(manifest, 0)
    assert folder.made_count == 1
    data = folder.chunk(name)
    assert data is not None
    assert name.matches(data)
    await asyncio.sleep(4 * options.keep_s)
    assert folder.chunk(name) is None
    await folder.close()


async def test_folds_are_kept_within_a_bound(behind: Behind) -> None:
    folder = Folder(RelayedStore(behind.broker, None), options=FolderOptions(kept_bytes_max=1))
    epoch = (await behind.broker.head(RUN)).epoch

    made = [WeightManifest.decode(await folder.manifest(FoldRequest(RUN, base, 3, epoch))) for base in (0, 1)]

    assert folder.chunk(chunk_name(made[0], 0)) is None
    assert folder.chunk(chunk_name(made[1], 0)) is not None
    await folder.close()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"epoch": 9}, "another publisher"),
        ({"base_version": -1}, "no chain"),
        ({"base_version": 3}, "nothing"),
        ({"version": 4}, "no chain"),
        ({"run_id": "other"}, "no chain"),
    ],
)
async def test_what_cannot_be_folded_is_refused_and_says_why(behind: Behind, change: dict[str, Any], why: str) -> None:
    epoch = (await behind.broker.head(RUN)).epoch
    wanted = FoldRequest(RUN, 0, 3, epoch)._replace(**change)
    async with relay(behind.broker, None) as server:
        connection = await Connection.open(server.address, RELAY)
        await connection.ask_json(Word.FOLD, wanted._asdict())
        with pytest.raises(PeerLost, match=why):
            await connection.answer(Word.FOLDED)

        # The connection is good for another wish
        await connection.ask_json(Word.FOLD, FoldRequest(RUN, 0, 3, epoch)._asdict())
        assert WeightManifest.decode(await connection.answer(Word.FOLDED)).kind == FOLD

        # But nonsense ends it
        await connection.ask_json(Word.FOLD, {"run_id": RUN})
        with pytest.raises(PeerLost):
            await connection.answer(Word.FOLDED)
        connection.close()
