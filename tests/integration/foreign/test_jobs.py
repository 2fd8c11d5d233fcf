"""Asking for rewards, on a real broker: what is asked for is on the queue soon, whatever happens in between."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial

import pytest
from rq import Queue

from rollfab.fabric.broker.embedded import EmbeddedBroker
from rollfab.fabric.contract.clock import SystemClock
from rollfab.workers.rewards.jobs import RewardAsker, open_queue, queue_of

pytestmark = pytest.mark.redis


@pytest.fixture
async def queue() -> AsyncIterator[Queue]:
    with EmbeddedBroker.start() as broker:
        queue = open_queue(broker.url)
        yield queue
        queue.connection.close()


def asked(queue: Queue) -> list[list[object]]:
    return [row for job in queue_of(queue, "run").jobs for row in job.args[1]]


async def test_a_reward_asked_for_while_the_broker_is_slow_is_not_forgotten(queue: Queue) -> None:
    # Given an asker whose first job is held up at the broker
    asker = RewardAsker(partial(queue_of, queue), SystemClock())
    queue.connection.client_pause(400)
    await asker.ask("run", "group.0", 1)
    await asyncio.sleep(0.2)

    # When another reward is asked for meanwhile
    await asker.ask("run", "group.1", 1)
    await asyncio.sleep(0.6)

    # Then it follows, though nobody asks again
    assert asked(queue) == [["group.0", 1], ["group.1", 1]]
