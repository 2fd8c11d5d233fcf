"""taskiq: Redis stream broker (acknowledged when the result is saved), a hundred tasks at once, results stored."""

import asyncio
import logging
from typing import Any

from taskiq import TaskiqMiddleware
from taskiq.api import run_receiver_task
from taskiq_redis import RedisAsyncResultBackend, RedisStreamBroker

from .rounds import payload, result, serve

TASK_COUNT = 100
TIMEOUT_S = 120.0


class Tally(TaskiqMiddleware):
    """Counts jobs whose results are saved."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.wanted = 0
        self.reached = asyncio.Event()

    def post_save(self, message: Any, result: Any) -> None:
        self.count += 1
        if self.count >= self.wanted:
            self.reached.set()


async def push_all(work: Any, job_count: int) -> None:
    for start in range(0, job_count, TASK_COUNT):
        await asyncio.gather(*(work.kiq(payload()) for _ in range(min(TASK_COUNT, job_count - start))))


async def work_off(broker: Any, work: Any, tally: Tally, job_count: int) -> int:
    tally.count, tally.wanted = 0, job_count
    tally.reached.clear()
    await push_all(work, job_count)
    await asyncio.wait_for(tally.reached.wait(), TIMEOUT_S)
    return tally.count


def main(url: str) -> None:
    """Serve rounds on the broker at `url`."""
    logging.disable(logging.WARNING)
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    tally = Tally()
    results: Any = RedisAsyncResultBackend(redis_url=url, result_ex_time=60)
    broker = RedisStreamBroker(url=url, queue_name="bench-taskiq").with_result_backend(results)
    broker.add_middlewares(tally)

    @broker.task(task_name="work")
    async def work(data: str) -> str:
        return result()

    loop.run_until_complete(broker.startup())
    receiver = loop.create_task(run_receiver_task(broker, max_async_tasks=TASK_COUNT, max_prefetch=TASK_COUNT))
    serve(lambda job_count: loop.run_until_complete(work_off(broker, work, tally, job_count)))
    receiver.cancel()
