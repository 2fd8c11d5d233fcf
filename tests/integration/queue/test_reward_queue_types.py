"""Keys of another type where rq keeps its queues: rewards are asked for all the same."""

from __future__ import annotations

import pytest
from redis import Redis

from rollfab.fabric.contract.clock import SystemClock
from rollfab.workers.rewards.jobs import RewardAsker, open_queue, queue_of

pytestmark = [pytest.mark.redis, pytest.mark.timeout(60)]


@pytest.mark.parametrize("key", ["rq:queue:rollfab.r1", "rq:queues"])
def test_a_queue_of_another_type_makes_room_for_the_next_rewards(url: str, redis: Redis, key: str) -> None:
    queue = open_queue(url)
    asker = RewardAsker(lambda run_id: queue_of(queue, run_id), SystemClock())
    redis.set(key, "x")
    redis.set("rq:queue:other", "mine")
    for _ in range(2):  # what was asked for as it was found is asked for again
        asker._enqueue("r1", {("g1.0", 1): False})
    assert redis.llen("rq:queue:rollfab.r1") >= 1
    assert redis.smembers("rq:queues") == {b"rq:queue:rollfab.r1"}
    assert redis.get("rq:queue:other") == b"mine"
    queue.connection.close()
