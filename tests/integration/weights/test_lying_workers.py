"""A worker writes others' rows of where weights are served, again and again: what that costs those who look there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import numpy as np
import pytest

from rollfab.fabric.delivery.node_cache import ChunkName
from rollfab.fabric.delivery.node_store import PassingStore, RelayedStore
from rollfab.fabric.delivery.relay_frames import make_address
from rollfab.fabric.delivery.relay_parents import Parents
from rollfab.fabric.delivery.relay_server import RelayServer
from rollfab.fabric.format.manifest import Damage, Holder
from rollfab.fabric.ports.weights import WeightStore
from rollfab.fabric.rules.weights.patience import LOST_FRACTION, LOST_S_MAX
from rollfab.fabric.versions.reader import fetch_bits
from rollfab.trainer.publish.healing import REPORT_BYTES_MIN
from rollfab.trainer.publish.publisher import Publisher
from rollfab.workers.rollout.peer_copies import PeerSource
from tests.standin.fabric import StandInFabric
from tests.support.processes.relay_nodes import FAST, RUN, CountingStore, StepClock, Trainer, digest_of

HOME = "home"
STALL_S = 10.0  # as long as a relay may be busy
ROUND_COUNT = 60
ME = Holder("me", -1, "", "mine", HOME)


class Liar:
    """Answers nobody, after as long as it is waited for. Its clock is the one of who asks."""

    def __init__(self, clock: StepClock) -> None:
        self._clock = clock
        self.count = 0
        self.port = 0

    async def open(self) -> asyncio.Server:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        return server

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.count += 1
        self._clock.time_s += STALL_S
        writer.close()

    @property
    def lost_s(self) -> float:
        return self.count * STALL_S


class Overwritten(PassingStore):
    """All holders are the liar, by other addresses whenever somebody looks: nobody knows them from before."""

    def __init__(self, inner: WeightStore, liar: Liar) -> None:
        super().__init__(inner)
        self._liar = liar
        self._count = 0

    async def holders(self, run_id: str, *, addressed: bool = True) -> list[Holder]:
        self._count += 1
        names = [f"liar{self._count}x{index}" for index in range(8)]
        return [Holder(name, 99, make_address("127.0.0.1", self._liar.port, name), name, HOME) for name in names]


@pytest.fixture
def broker() -> CountingStore:
    return CountingStore(StandInFabric().weights)


@pytest.fixture
def clock() -> StepClock:
    return StepClock()


@pytest.fixture
async def liar(clock: StepClock) -> AsyncIterator[Liar]:
    liar = Liar(clock)
    async with await liar.open():
        yield liar


def bound_s(clock: StepClock, one_s: float = STALL_S) -> float:
    """What docs/security.md says that others may cost."""
    return LOST_S_MAX + LOST_FRACTION * clock.time_s + one_s


async def test_relays_that_a_liar_names_cost_a_share_of_the_time_and_no_weights(
    broker: CountingStore, clock: StepClock, liar: Liar
) -> None:
    # Given a run whose holders' rows are a liar's, who changes them whenever they are looked at
    trainer = Trainer(broker, tensor_count=4)
    await trainer.publish(0)
    parents = Parents(Overwritten(broker, liar), ME, home_region=HOME, options=FAST, clock=clock)
    store = RelayedStore(broker, None, parents=parents, options=FAST)
    # When a worker fetches again and again
    for _ in range(ROUND_COUNT):
        clock.time_s += 1.0
        manifest, bits = await fetch_bits(store, RUN)
        assert digest_of(manifest.tensors, bits) == trainer.digest
    # Then it has asked the liar, and lost no more than it may
    assert liar.lost_s > LOST_S_MAX
    assert liar.lost_s <= bound_s(clock)
    await store.close()


async def test_a_relay_that_gives_what_is_right_too_slowly_is_left_for_the_broker(
    broker: CountingStore, clock: StepClock
) -> None:
    # Given a relay that has every chunk, and takes its time for each
    class Slow(RelayedStore):
        async def cached(self, names: Sequence[ChunkName]) -> list[bytes | None]:
            clock.time_s += STALL_S * len(names)
            return await self.chunks(manifest, list(range(len(manifest.chunk_bytes))))

    trainer = Trainer(broker, tensor_count=1)
    manifest = await trainer.publish(0)
    relay = RelayServer(Slow(broker, None), options=FAST)
    await relay.start()
    await broker.hold(RUN, Holder("slow", 0, relay.address, "slow", HOME), 1e6)
    parents = Parents(broker, ME, home_region=HOME, options=FAST, clock=clock)
    store = RelayedStore(broker, None, parents=parents, options=FAST)
    # When a worker fetches again and again
    for _ in range(ROUND_COUNT):
        assert digest_of(*await _fetched(store)) == trainer.digest
    # Then most came from the broker
    served = relay.served_bytes // int(manifest.chunk_bytes[0])
    assert served * STALL_S > LOST_S_MAX
    assert served * (STALL_S - 1) <= bound_s(clock)
    assert served < ROUND_COUNT / 4
    await store.close()
    await relay.close()


async def _fetched(store: WeightStore) -> tuple[object, object]:
    manifest, bits = await fetch_bits(store, RUN)
    return manifest.tensors, bits


async def test_peers_that_a_liar_names_cost_a_share_of_the_time(
    broker: CountingStore, clock: StepClock, liar: Liar
) -> None:
    trainer = Trainer(broker, tensor_count=1)
    await trainer.publish(0)
    source = PeerSource(Overwritten(broker, liar), "me", FAST, clock=clock)
    for _ in range(ROUND_COUNT):
        clock.time_s += 1.0
        assert await source.version_above(RUN, trainer.layout, -1) is None
    assert LOST_S_MAX < liar.lost_s <= bound_s(clock)


@pytest.mark.parametrize("chunks", [(), tuple(range(64))], ids=["of a version", "of its chunks"])
async def test_reports_of_damage_that_are_lies_have_the_publisher_read_less_and_less(
    broker: CountingStore, clock: StepClock, chunks: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    # Given a publisher that reads nothing unasked, and all that it holds reported again and again
    weights = {"w": np.random.default_rng(0).integers(0, 0x7000, 8 << 20, dtype=np.uint16)}
    publisher = Publisher(broker, RUN, clock=clock, scrub_bytes_per_s=0)
    await publisher.publish(weights, 0)
    size = sum(int(each) for manifest in publisher._upkeep.held() for each in manifest.chunk_bytes)
    assert size > 8 * REPORT_BYTES_MIN
    read = []
    for _ in range(ROUND_COUNT):
        await broker.report_damage(RUN, Damage(0, "keyframe", 1, chunks, "corrupt", "liar"))
        before = broker.chunk_bytes
        await publisher._healing.look()
        read.append(broker.chunk_bytes - before)
    # Then a lie is looked into at first, and then there is not much more read than the least
    assert read[0] >= size
    assert sum(read[20:]) <= (ROUND_COUNT - 20) * REPORT_BYTES_MIN + size
    # And what is true is found all the same, in time
    broker.spoil = {0}
    wrong = Damage(0, "keyframe", 1, (0,), "corrupt", "reader")
    assert "weights.healed" not in caplog.text
    for _ in range(size // REPORT_BYTES_MIN + 2):
        await broker.report_damage(RUN, wrong)
        await publisher._healing.look()
    assert "weights.healed: version 0 (keyframe): chunk 0" in caplog.text
    await publisher.close()
