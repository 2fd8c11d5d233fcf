"""rq: SimpleWorker (no fork per job), JSON, jobs pushed with enqueue_many."""

import itertools

from redis import Redis
from rq import Queue, SimpleWorker
from rq.serializers import JSONSerializer

from .rounds import payload, result, serve

NAMES = itertools.count()


def work(data: str) -> str:
    """The job."""
    return result()


def main(url: str) -> None:
    """Serve rounds on the broker at `url`."""
    client = Redis.from_url(url)
    queue = Queue("bench-rq", connection=client, serializer=JSONSerializer)

    def work_off(job_count: int) -> int:
        jobs = [Queue.prepare_data(work, args=(payload(),), result_ttl=60) for _ in range(job_count)]
        queue.enqueue_many(jobs)
        worker = SimpleWorker([queue], connection=client, serializer=JSONSerializer, name=f"bench-{next(NAMES)}")
        worker.work(burst=True, logging_level="ERROR")
        failed_count: int = queue.failed_job_registry.get_job_count()
        return job_count - queue.count - failed_count

    serve(work_off)
