"""A task that asks the broker ends when it is cancelled, at whatever moment, and gives its connection back."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest

from rollfab.fabric.broker.connection import open_broker
from rollfab.fabric.broker.embedded import EmbeddedBroker

pytestmark = pytest.mark.redis


async def for_ever(ask: Callable[[], Awaitable[object]]) -> None:
    while True:
        await ask()


@pytest.mark.timeout(30)
async def test_a_loop_that_asks_the_broker_ends_at_the_first_cancelling() -> None:
    dice = random.Random(0)
    with EmbeddedBroker.start() as broker:
        client = await open_broker(broker.url, client_name="test")
        questions = (lambda: client.hgetall("none"), lambda: client.blpop(["none"], timeout=0.02))
        for index in range(400):
            # Given a loop somewhere in the middle of a question, an answer, or in between
            task = asyncio.create_task(for_ever(questions[index % 2]))
            await asyncio.sleep(dice.random() * 0.02 + index % 2 * 0.012)

            # When it is cancelled once, Then it ends
            task.cancel()
            done, _ = await asyncio.wait({task}, timeout=1.0)
            assert done, f"cancelling {index} was not obeyed"
        assert not client.connection_pool._in_use_connections
        await client.aclose()
