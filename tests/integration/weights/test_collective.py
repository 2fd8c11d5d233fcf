"""Versions from one publisher to many receivers by a collective, with nothing of them at the broker."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from rollfab.fabric.contract.errors import PayloadTooLarge
from rollfab.fabric.contract.records import NCCL
from rollfab.fabric.delivery.collective.group import Nursery
from rollfab.fabric.delivery.collective.invitations import Answer, CollectiveOptions, Offer
from rollfab.fabric.delivery.collective.publisher import CollectivePublisher, SendReport
from rollfab.fabric.delivery.collective.receiver import CollectiveReceiver, can_join
from rollfab.fabric.delivery.node_store import PassingStore, RelayedStore
from rollfab.fabric.format.layout import Layout, TensorSpec
from rollfab.fabric.format.manifest import Head, WeightManifest
from rollfab.fabric.opened import RedisFabric
from rollfab.fabric.ports.weights import WeightStore
from rollfab.fabric.versions.reader import fetch_bits
from rollfab.fabric.versions.snapshot import Identity, Snapshot
from rollfab.trainer.publish.publisher import Publisher
from tests.standin.fabric import StandInFabric
from tests.support.processes.collective_processes import Stage, check_live, stage
from tests.support.weights.collective_versions import OPTIONS, Versions

pytestmark = [pytest.mark.redis, pytest.mark.slow, pytest.mark.timeout(60)]


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with stage(tmp_path_factory.mktemp("collective")) as found:
        yield found


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    """One for all members of a process and all tests: it takes seconds to start."""
    found = Nursery()
    yield found
    asyncio.run(found.close())


async def test_receivers_get_every_version_byte_by_byte_though_they_come_and_go(scene: Stage) -> None:
    # Given three receivers, one of which gets a message garbled on the way
    first, second, third = scene.start("run", first="", second="garble:3", third="")
    async with await RedisFabric.open(scene.url, client_name="publisher") as fabric:
        sender = await scene.sender(fabric, "run")

        # When two versions are sent
        for version in range(2):
            report, digest = await sender.send(version, first, second, third)

            # Then all have them, in one round each, though the broker was never asked for a chunk
            assert (report.reached, report.left_out, report.round_count) == (("first", "second", "third"), (), 1)
            check_live(version, digest, first, second, third)

        # And when one has left and another has come, the next is theirs
        third.end()
        [fourth] = scene.start("run", fourth="")
        report, digest = await sender.send(2, first, second, fourth)
        assert (report.reached, report.round_count) == (("first", "fourth", "second"), 1)
        check_live(2, digest, first, second, fourth)


class Board(PassingStore):
    """Notes what is answered, and takes no word of some kinds, as if it were too large."""

    def __init__(self, inner: WeightStore, refused: str = "") -> None:
        super().__init__(inner)
        self.answered: list[Answer] = []
        self.offered: list[Offer] = []
        self.refused = refused

    async def offer(self, run_id: str, data: bytes, ttl_s: float) -> None:
        if self.refused == "offers":
            raise PayloadTooLarge("an offer is too large")
        self.offered.append(Offer.decode(data))
        await super().offer(run_id, data, ttl_s)

    async def answer(self, run_id: str, round_id: str, member: str, data: bytes, ttl_s: float) -> None:
        self.answered.append(Answer.decode(data))
        if self.refused == "keys" and self.answered[-1].keys:
            raise PayloadTooLarge("keys are too large")
        await super().answer(run_id, round_id, member, data, ttl_s)

    async def head(self, run_id: str) -> Head:
        if self.refused == "heads":
            raise RuntimeError("nobody thought of this")
        return await super().head(run_id)


class Rig:
    """A publisher and receivers in this process, on a broker in memory."""

    def __init__(self, nursery: Nursery, **options: float | str) -> None:
        self.broker = Board(StandInFabric().weights)
        self.options = CollectiveOptions(**{**OPTIONS, **options})
        self.nursery = nursery
        self.publisher = CollectivePublisher(self.broker, "run", options=self.options, nursery=nursery)

    def receiver(self, name: str, capacity_bytes: int = 1 << 30, watch: object = None) -> CollectiveReceiver:
        self.store = RelayedStore(self.broker, None, capacity_bytes=capacity_bytes)
        return CollectiveReceiver(self.store, name, options=self.options, watch=watch, nursery=self.nursery)

    async def send(
        self, manifest: WeightManifest, chunks: list[bytes], receivers: dict[str, CollectiveReceiver]
    ) -> tuple[SendReport, list[bool]]:
        """Send to receivers that attend; returns the report and to which of them something came."""
        is_over = asyncio.Event()

        async def attend(receiver: CollectiveReceiver) -> bool:
            has_come = False
            while not (has_come or is_over.is_set()):
                has_come = await receiver.attend("run")
                await asyncio.sleep(0.01)
            return has_come

        attending = [asyncio.create_task(attend(receiver)) for receiver in receivers.values()]
        report = await self.publisher.send(manifest, chunks, expected=list(receivers))
        is_over.set()
        return report, await asyncio.gather(*attending)


async def test_what_came_by_a_collective_is_staged_as_if_from_the_broker(nursery: Nursery) -> None:
    # Given a model whose second version is mostly unlike the first, and two receivers in one process
    rig = Rig(nursery)
    bits = {"a": np.arange(100_000, dtype=np.uint16), "b": np.zeros(0, dtype=np.uint16)}
    layout = Layout((TensorSpec("a", "bfloat16", (1000, 100)), TensorSpec("b", "bfloat16", (0,))))
    epoch = await rig.broker.open_publisher("run")
    snapshot = Snapshot(layout, bits)
    receivers = {name: rig.receiver(name) for name in ("first", "second")}
    for version in range(2):
        identity = Identity(run_id="run", epoch=epoch, version=version, carrier="collective")
        changed = {"a": bits["a"][::-1].copy(), "b": bits["b"]}
        prepared = snapshot.prepare_delta(identity, changed) if version else snapshot.prepare_keyframe(identity)

        # When both versions are sent and made the head
        report, have_come = await rig.send(prepared.manifest, prepared.chunks, receivers)
        assert report.is_enough and have_come == [True, True]
        await rig.broker.put_manifest(prepared.manifest)
        await rig.broker.advance_head(prepared.manifest, 1)
        snapshot.advance(prepared)

    # Then the ordinary path reads them from what was collected: the weights are the publisher's
    manifest, found = await fetch_bits(rig.store, "run")
    assert manifest.version == 1
    assert all(np.array_equal(found[name], changed[name]) for name in bits)


async def test_a_member_whose_bytes_stay_corrupt_is_left_out_and_the_others_are_not(nursery: Nursery) -> None:
    # Given a receiver for which something is wrong with the first message of every pass
    rig = Rig(nursery)

    def garble(index: int, data: NDArray[np.uint8]) -> None:
        if index == 0:
            data[0] ^= 1

    good, bad = rig.receiver("good"), rig.receiver("bad", watch=garble)
    manifest, chunks = Versions("run", await rig.broker.open_publisher("run"), chunk_count=4).next(0)

    # When a version is sent
    report, have_come = await rig.send(manifest, chunks, {"good": good, "bad": bad})

    # Then the publisher knows that only one has it, which is not all that it asked for; nor is the bad chunk kept
    assert (report.reached, report.left_out, report.is_enough) == (("good",), ("bad",), False)
    assert have_come == [True, False]
    assert await rig.store.chunks(manifest, [1]) == [None]


async def test_an_offer_that_nobody_may_or_can_take_costs_only_the_time_to_answer(
    nursery: Nursery,
    caplog: pytest.LogCaptureFixture,
) -> None:
    # Given a receiver with less room than the version takes
    rig = Rig(nursery, answer_s=0.3)
    small = rig.receiver("small", capacity_bytes=100)
    manifest, chunks = Versions("run", await rig.broker.open_publisher("run"), chunk_count=2).next(0)

    # When it is offered, then nobody answers, and the receiver says why, once
    with caplog.at_level(logging.WARNING):
        report, have_come = await rig.send(manifest, chunks, {"small": small})
    assert sum("too_large" in record.message for record in caplog.records) == 1
    assert (report.reached, report.left_out, report.round_count) == ((), ("small",), 1)
    assert not report.is_enough and report.error == "nobody answered"
    assert have_come == [False]

    # And neither when the publisher that offers it has been replaced
    await rig.broker.open_publisher("run")
    report, have_come = await rig.send(manifest, chunks, {"large": rig.receiver("large")})
    assert report.reached == () and have_come == [False]


@pytest.mark.skipif(can_join(NCCL), reason="there is a GPU, which may take part")
async def test_receivers_without_a_gpu_do_not_answer_offers_of_nccl(nursery: Nursery) -> None:
    rig = Rig(nursery, answer_s=0.3)
    store = rig.broker
    publisher = Publisher(store, "run", carrier="collective", collective_backend=NCCL)
    collective = publisher._carrying._collective
    assert collective is not None
    rig.publisher = CollectivePublisher(store, "run", options=collective._options, nursery=nursery)
    manifest, chunks = Versions("run", await store.open_publisher("run"), chunk_count=2).next(0)
    report, have_come = await rig.send(manifest, chunks, {"near": rig.receiver("near")})
    assert (report.reached, report.error, have_come) == ((), "nobody answered", [False])
    assert {offer.backend for offer in store.offered} == {NCCL} and not store.answered


async def test_the_address_that_was_set_is_the_one_that_is_told(nursery: Nursery) -> None:
    rig = Rig(nursery, host="localhost")
    manifest, chunks = Versions("run", await rig.broker.open_publisher("run"), chunk_count=2).next(0)

    report, _ = await rig.send(manifest, chunks, {"near": rig.receiver("near")})

    assert report.reached == ("near",)
    assert {answer.host for answer in rig.broker.answered} == {"localhost"}


@pytest.mark.parametrize("refused", ["offers", "heads"])
async def test_what_nobody_thought_of_ends_a_round_and_neither_side(nursery: Nursery, refused: str) -> None:
    rig = Rig(nursery, answer_s=0.3)
    manifest, chunks = Versions("run", await rig.broker.open_publisher("run"), chunk_count=2).next(0)
    rig.broker.refused = refused

    report, have_come = await rig.send(manifest, chunks, {"other": rig.receiver("other")})

    assert not report.is_enough and have_come == [False]
    assert ("too large" in report.error) == (refused == "offers")


async def test_keys_that_the_board_does_not_take_end_the_round_at_once(nursery: Nursery) -> None:
    # Given members that would wait for an hour for one another
    rig = Rig(nursery, stall_s=3600.0)
    manifest, chunks = Versions("run", await rig.broker.open_publisher("run"), chunk_count=2).next(0)

    # When their own keys cannot be told, then they say so and are done
    rig.broker.refused = "keys"
    report, have_come = await rig.send(manifest, chunks, {"other": rig.receiver("other")})

    assert "keys are too large" in report.error and have_come == [False]
