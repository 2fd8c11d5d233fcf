"""Readers of the head while a trainer publishes as fast as it can, on a real broker."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

import rollfab
from rollfab.fabric.broker.embedded import EmbeddedBroker

ELEMENTS = 50_000


Weights = dict[str, np.ndarray]


def train(url: str, weights: Weights, sums: dict[int, int], density: float, count: int = 200) -> None:
    """Publish versions as fast as it goes; `sums` says of each what its weights add up to."""
    rng = np.random.default_rng(1)
    with rollfab.connect(url) as fabric:
        run = fabric.run("fast")
        for version in range(len(sums), len(sums) + count):
            where = rng.random(ELEMENTS) < density
            weights["w"][where] = rng.integers(0, 2**16, np.count_nonzero(where), dtype=np.uint16)
            weights["version"][0] = version
            sums[version] = int(weights["w"].sum())
            run.publish(weights, version, allow_nonfinite=True)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("density", [0.001, 1.0])
async def test_the_head_can_be_read_however_fast_versions_follow_one_another(density: float) -> None:
    with EmbeddedBroker.start() as broker:
        async with await rollfab.aio.connect(broker.url) as fabric:
            view = await fabric.run("fast", model="any", environment="frozenlake")
            weights = {"w": np.zeros(ELEMENTS, dtype=np.uint16), "version": np.zeros(1, dtype=np.int64)}
            sums: dict[int, int] = {}
            await asyncio.to_thread(train, broker.url, weights, sums, density, 1)
            is_over, read_count = asyncio.Event(), 0

            async def read() -> None:
                nonlocal read_count
                while not is_over.is_set():
                    found = await view.weights()
                    assert int(found["w"].sum()) == sums[int(found["version"][0])]
                    read_count += 1

            readers = [asyncio.create_task(read()) for _ in range(8)]
            await asyncio.to_thread(train, broker.url, weights, sums, density)
            is_over.set()
            await asyncio.gather(*readers)

    assert read_count > 20
