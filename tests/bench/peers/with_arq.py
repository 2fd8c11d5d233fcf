"""arq: a hundred jobs at once, results kept. Runs in an environment of its own, since it needs redis < 6."""

import asyncio
import logging
from typing import Any
from urllib.parse import urlsplit

from arq import create_pool, func
from arq.connections import ArqRedis, RedisSettings
from arq.worker import Worker

from .rounds import payload, result, serve

TASK_COUNT = 100
QUEUE = "bench-arq"


async def work(context: dict[str, Any], data: str) -> str:
    """The job."""
    return result()


def settings_of(url: str) -> RedisSettings:
    """arq has its own form of a unix socket's address."""
    parts = urlsplit(url)
    if parts.scheme == "unix":
        return RedisSettings(unix_socket_path=parts.path)
    return RedisSettings.from_dsn(url)


async def work_off(pool: ArqRedis, job_count: int) -> int:
    for start in range(0, job_count, TASK_COUNT):
        names = range(min(TASK_COUNT, job_count - start))
        await asyncio.gather(*(pool.enqueue_job("work", payload(), _queue_name=QUEUE) for _ in names))
    worker = Worker(
        functions=[func(work, name="work")],
        queue_name=QUEUE,
        redis_pool=pool,
        burst=True,
        max_jobs=TASK_COUNT,
        poll_delay=0.01,
        keep_result=60,
        handle_signals=False,
    )
    await worker.async_run()
    done_count: int = worker.jobs_complete
    return done_count


def main(url: str) -> None:
    """Serve rounds on the broker at `url`."""
    logging.disable(logging.WARNING)
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    pool = loop.run_until_complete(create_pool(settings_of(url)))
    serve(lambda job_count: loop.run_until_complete(work_off(pool, job_count)))
