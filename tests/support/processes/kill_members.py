"""A trainer's publisher, or a worker's receiver, as a process of its own, for faults at any point of a round.

They are those of production, with short limits. What they say to the parent are tuples of words: ("up",),
("live", version, digest of the engine's bits) and ("published", version, members reached, rounds, why the last failed).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from rollfab.fabric.delivery.collective import group
from rollfab.fabric.delivery.collective.invitations import CollectiveOptions
from rollfab.fabric.delivery.collective.publisher import CollectivePublisher, SendReport
from rollfab.fabric.delivery.collective.receiver import CollectiveReceiver
from rollfab.fabric.opened import RedisFabric
from rollfab.trainer.publish.publisher import Publisher
from rollfab.workers.rollout.weight_sources import SupplyOptions, weights_for
from rollfab.workers.rollout.weights import ReceiverOptions
from tests.support.processes.collective_member import ForkedNursery
from tests.support.weights.faulty_weights import BitsEngine

OPTIONS = CollectiveOptions(answer_s=0.4, stall_s=0.6)
MESSAGE_BYTES = 64 << 10  # a version has some tens of messages
ELEMENT_COUNT = 1 << 20


class Model:
    """The weights of a version: every bit of them follows from its number."""

    def __init__(self, version: int) -> None:
        self.bits = np.random.default_rng(version + 1).integers(0, 1 << 16, ELEMENT_COUNT, dtype=np.uint16)

    def named_parameters(self) -> Iterator[tuple[str, NDArray[np.uint16]]]:
        yield "weight", self.bits


def digest_of(bits: Any) -> str:
    return xxhash.xxh3_128_hexdigest(np.ascontiguousarray(bits["weight"]))


class Noting(CollectivePublisher):
    """Notes the last report."""

    last: SendReport | None = None

    async def send(self, *args: Any, **kwargs: Any) -> SendReport:
        self.last = await super().send(*args, **kwargs)
        return self.last


async def receive(fabric: RedisFabric, run_id: str, name: str, pipe: Connection) -> None:
    supply_options = SupplyOptions(is_shared=False, believes_peers=False)
    async with weights_for(fabric.weights, name, run_id, supply_options) as supply:
        assert supply._relayed is not None
        supply._collective = CollectiveReceiver(supply._relayed, name, options=OPTIONS, nursery=ForkedNursery())
        engine = BitsEngine(Model(-1))  # type: ignore[arg-type]
        receiver = supply.receiver(run_id, engine)  # type: ignore[arg-type]
        receiver._options = ReceiverOptions(poll_s=1.0, retry_s_max=0.5)
        receiver.start()
        pipe.send(("up",))
        while True:
            version = receiver.version
            if await receiver.wait(version + 1, 3600.0):
                pipe.send(("live", receiver.version, digest_of(engine.bits)))


async def publish(fabric: RedisFabric, run_id: str, pipe: Connection) -> None:
    publisher = Publisher(fabric.weights, run_id, carrier="collective")
    collective = Noting(fabric.weights, run_id, options=OPTIONS, nursery=ForkedNursery())
    publisher._carrying._collective = collective
    pipe.send(("up",))
    while True:
        version = await asyncio.to_thread(pipe.recv)
        await publisher.publish(Model(version).named_parameters(), version, allow_nonfinite=True)
        report = collective.last
        assert report is not None
        pipe.send(("published", version, len(report.reached), report.round_count, report.error))


def main(url: str, run_id: str, name: str, log_path: str, pipe: Connection) -> None:
    """The whole process. A member named "publisher" publishes the versions that it is told to."""
    logging.basicConfig(filename=log_path, level=logging.INFO, format="%(asctime)s %(message)s %(error)s", force=True)
    logging.getLogger().handlers[0].setFormatter(logging.Formatter("%(asctime)s %(message)s", defaults={"error": ""}))
    group.MESSAGE_BYTES["gloo"] = MESSAGE_BYTES

    async def run() -> None:
        async with await RedisFabric.open(url, client_name=name) as fabric:
            await (publish(fabric, run_id, pipe) if name == "publisher" else receive(fabric, run_id, name, pipe))

    asyncio.run(run())
