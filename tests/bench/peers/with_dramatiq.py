"""dramatiq: Redis broker, eight threads, results stored."""

import logging
import threading
from typing import Any

import dramatiq
from dramatiq.brokers.redis import RedisBroker
from dramatiq.results import Results
from dramatiq.results.backends import RedisBackend

from .rounds import payload, result, serve

THREAD_COUNT = 8
TIMEOUT_S = 120.0


class Tally(dramatiq.Middleware):
    """Counts acknowledged jobs: the library's own join() looks only every tenth of a second."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._count = 0

    def after_ack(self, broker: Any, message: Any) -> None:
        with self._changed:
            self._count += 1
            self._changed.notify()

    def take(self, count: int) -> int:
        """Wait for that many, and forget them."""
        with self._changed:
            self._changed.wait_for(lambda: self._count >= count, TIMEOUT_S)
            done, self._count = self._count, 0
        return done


def main(url: str) -> None:
    """Serve rounds on the broker at `url`."""
    logging.disable(logging.WARNING)
    tally = Tally()
    make_broker: Any = RedisBroker  # untyped, as Results is
    keep_results: Any = Results
    broker = make_broker(url=url, namespace="bench-dramatiq")
    broker.add_middleware(keep_results(backend=RedisBackend(url=url, namespace="bench-results"), result_ttl=60_000))
    broker.add_middleware(tally)
    dramatiq.set_broker(broker)

    @dramatiq.actor(store_results=True)
    def work(data: str) -> str:
        return result()

    worker = dramatiq.Worker(broker, worker_threads=THREAD_COUNT)
    worker.start()

    def work_off(job_count: int) -> int:
        for _ in range(job_count):
            work.send(payload())
        return tally.take(job_count)

    serve(work_off)
    worker.stop()
