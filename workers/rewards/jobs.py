"""rq: stateless CPU jobs, that is rewards and housekeeping.

- The queue carries names and JSON, nothing else: no pickle, and no import path from the queue is ever imported.
  A worker refuses a job whose name is not in its own table, and reads nothing else of the job's row.
- Each run has a queue of its own: a worker takes jobs of runs whose reward it offers and that it has room for. So jobs
  that one run leaves lying hold up no other run, and several workers share a run's rewards.
- A job hands in a batch of rewards (an rq job costs milliseconds, a reward microseconds) and is over; scoring.py
  decides who computes them, and how they are kept and tried again. Nothing on a queue has to be kept: agents ask again
  for a reward that was lost on its way.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from redis import Redis
from redis.exceptions import RedisError, ResponseError
from redis.sentinel import Sentinel
from rq import Queue, SimpleWorker
from rq.exceptions import DequeueTimeout, StopRequested
from rq.job import Job
from rq.serializers import JSONSerializer
from rq.timeouts import TimerDeathPenalty

from ...fabric.broker.clients.translate import translated
from ...fabric.broker.clients.url import read_url
from ...fabric.contract.clock import Clock
from ...fabric.contract.errors import ConfigError, FabricError
from ...fabric.contract.limits import MIB
from ...fabric.contract.records import WorkerInfo
from ...fabric.host.helpers import Helpers
from ...fabric.host.memory import resident_bytes
from ...fabric.ports.queue import Fabric
from .scoring import Scoring

log = logging.getLogger(__name__)

QUEUE_NAME = "rollfab"
JOB_TIMEOUT_S = 60  # to hand a batch in, or to delete a run
JOB_BYTES_MAX = MIB  # for a job's name and arguments
RESULT_TTL_S = 0  # results go to the fabric's own streams
FAILURE_TTL_S = 3600
QUEUED_S = 30.0  # a reward is not queued again for this long while its queue holds others: workers may be few and busy
GATHER_S = 0.02  # rewards asked for within this time travel in one job
BATCH_COUNT_MAX = 64  # rewards of one job: workers share a run's rewards by jobs
PULL_S = 0.5  # longest wait for jobs; the worker then looks up its queues anew
FULL_PULL_S = 0.05  # the same, while a run has no room: it may have some soon
TIDY_S = 10.0
TIDY_COUNT = 1000  # most jobs of a deleted run that one round forgets
AWAY_S = 1.0  # between two tries to reach a broker that is away

JobFunction = Callable[..., object]


def open_queue(url: str) -> Queue:
    """Open the rq queue, JSON only: on the broker that the URL's `reward_queue` names, else on the URL's own.

    Nothing there has to be kept: reaping asks again for a reward that was lost on its way.

    Raises:
        ConfigError: the URL is malformed.
    """
    parts = read_url(url)
    parts = read_url(parts.reward_queue) if parts.reward_queue else parts
    connection: Any = Redis.from_url(parts.client_url)
    if parts.topology == "sentinel":
        make: Any = Sentinel  # untyped in the client library
        is_tls = parts.client_url.startswith("rediss")
        options = {
            name: value for name, value in connection.get_connection_kwargs().items() if name not in ("host", "port")
        }
        credentials = {"username": parts.sentinel_username, "password": parts.sentinel_password, "ssl": is_tls}
        connection = make(list(parts.hosts), sentinel_kwargs=credentials).master_for(
            parts.service, **options, ssl=is_tls
        )
    return Queue(QUEUE_NAME, connection=connection, serializer=JSONSerializer)


def check_queue(queue: Queue) -> None:
    """Refuse a broker that rq cannot use.

    Raises:
        ConfigError: it is a Redis Cluster: rq's keys lie in many slots, and its transactions over them are refused.
    """
    if queue.connection.info("cluster").get("cluster_enabled"):
        raise ConfigError(
            "rewards wait on an rq queue, which a Redis Cluster cannot hold: name a single broker for it in the URL, "
            "…?reward_queue=redis://host:port"
        )


def queue_of(queue: Queue, run_id: str) -> Queue:
    """Open the queue of one run's rewards, on the same broker as the queue for housekeeping."""
    return Queue(f"{QUEUE_NAME}.{run_id}", connection=queue.connection, serializer=JSONSerializer)


Row = tuple[str, int]  # a trajectory and its fence


class RewardAsker:
    """Puts reward jobs on the queues of their runs, gathered into batches.

    Args:
        open_run: opens the rq queue of a run.
        clock: measures waits, and how long ago a reward was asked for.
    """

    def __init__(self, open_run: Callable[[str], Queue], clock: Clock) -> None:
        self._open_run = open_run
        self._clock = clock
        self._asked: dict[str, dict[Row, bool]] = {}  # run → row → whether it was asked for before
        self._asked_at_s: dict[Row, float] = {}
        self._sending: asyncio.Task[None] | None = None

    async def ask(self, run_id: str, trajectory_id: str, fence: int, *, is_again: bool = False) -> None:
        """Ask for the reward of one trajectory; if the request gets lost on the way, reaping asks again.

        A repeated request (`is_again`) goes out only if the queue is empty, so the first was lost, or is overdue: while
        others wait on the queue, the first may be among them.
        """
        self._asked.setdefault(run_id, {})[(trajectory_id, fence)] = is_again
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send())

    async def _send(self) -> None:
        while self._asked:  # again: more may have been asked for during a slow call
            await self._clock.sleep(GATHER_S)
            asked, self._asked = self._asked, {}
            for run_id, rows in asked.items():
                try:
                    await asyncio.to_thread(self._enqueue, run_id, rows)
                except Exception:  # the keeper asks again for a reward that does not come
                    log.exception("rewards.not_asked", extra={"run_id": run_id, "count": len(rows)})

    def _enqueue(self, run_id: str, asked: Mapping[Row, bool]) -> None:
        now_s = self._clock.now_s()
        queue = self._open_run(run_id)
        with _making_room([queue]):
            is_empty = all(asked.values()) and queue.count == 0
            rows = [row for row, is_again in asked.items() if not is_again or is_empty or self._is_overdue(row, now_s)]
            for first in range(0, len(rows), BATCH_COUNT_MAX):
                enqueue(queue, "score", run_id, rows[first : first + BATCH_COUNT_MAX])
            self._asked_at_s.update(dict.fromkeys(rows, now_s))
        self._asked_at_s = {row: at_s for row, at_s in self._asked_at_s.items() if at_s > now_s - 2 * QUEUED_S}

    def _is_overdue(self, row: Row, now_s: float) -> bool:
        return now_s - self._asked_at_s.setdefault(row, now_s) >= QUEUED_S


def enqueue(queue: Queue, name: str, *args: object) -> None:
    """Put a job on the queue by its registered name."""
    queue.enqueue_call(
        name, args=args, timeout=JOB_TIMEOUT_S, result_ttl=RESULT_TTL_S, failure_ttl=FAILURE_TTL_S, description=name
    )


@contextlib.contextmanager
def _making_room(queues: Sequence[Queue]) -> Iterator[None]:
    """Delete keys of another type, which agents may have put in the place of queues; the caller tries again later."""
    try:
        yield
    except ResponseError as error:
        keys = [key for queue in queues for key in (queue.key, queue.intermediate_queue_key)]
        removed = [key for key in keys if _is_of_another_type(queues[0].connection.llen, key)]
        removed += [key for key in [Queue.redis_queues_keys] if _is_of_another_type(queues[0].connection.scard, key)]
        if not removed:
            raise
        queues[0].connection.delete(*removed)
        log.warning("rewards.queue_of_another_type", extra={"keys": removed, "error": str(error)})


def _is_of_another_type(asking: Callable[[str], object], key: str) -> bool:
    """Tell whether a key is of another type than `asking`, a command for its size, expects."""
    try:
        asking(key)
    except ResponseError as error:
        return "WRONGTYPE" in str(error)
    return False


def job_class(functions: Mapping[str, JobFunction]) -> type[Job]:
    """Make a class of rq jobs that run functions of this table and nothing else."""

    class RegisteredJob(Job):
        def restore(self, raw_data: Any) -> Any:
            # Agents write these rows, so leave out the fields that rq would act on (requests to anywhere, other time
            # limits, retries, other jobs).
            data = zlib.decompressobj().decompress(raw_data.get(b"data", b""), JOB_BYTES_MAX)
            super().restore({b"data": data, b"origin": raw_data.get(b"origin", b"")})
            self.timeout, self.result_ttl, self.failure_ttl = JOB_TIMEOUT_S, RESULT_TTL_S, FAILURE_TTL_S

        @property
        def func(self) -> JobFunction:
            function = functions.get(self.func_name or "")
            if function is None:
                raise ConfigError(
                    f"rq job {self.func_name!r} is not registered; this worker runs {', '.join(sorted(functions))}"
                )
            return function

        def perform(self) -> Any:
            try:
                return super().perform()
            except (FabricError, TypeError, ValueError) as error:
                log.warning("rewards.job_failed", extra={"job_id": self.id, "error": str(error)})
                raise

        # rq would import these by the path that the queue names.
        success_callback = property(lambda self: None)
        failure_callback = property(lambda self: None)
        stopped_callback = property(lambda self: None)

    return RegisteredJob


class _Puller(SimpleWorker):
    """An rq worker on a thread of its own. It handles no signals, and no commands by pub/sub."""

    death_penalty_class = TimerDeathPenalty
    queues_now: Callable[[], tuple[list[Queue], float]]  # returns the queues, and how many seconds to wait at them

    def _install_signal_handlers(self) -> None:
        return

    def subscribe(self) -> None:
        return

    def unsubscribe(self) -> None:
        return

    def dequeue_job_and_maintain_ttl(self, timeout: int | None, max_idle_time: int | None = None) -> Any:
        """Take the next job of any queue that is open now; the queue served last comes last."""
        last = ""
        while not self._stop_requested:
            queues, wait_s = self.queues_now()
            self.queues = self._ordered_queues = sorted(queues, key=lambda queue: (queue.name == last, queue.name))
            with contextlib.suppress(DequeueTimeout), _ending_quietly(), _passing_over(), _making_room(queues):
                self.heartbeat()
                found = Queue.dequeue_any(
                    self._ordered_queues,
                    wait_s,  # type: ignore[arg-type]  # seconds need not be whole
                    connection=self.connection,
                    job_class=self.job_class,
                    serializer=self.serializer,
                    death_penalty_class=self.death_penalty_class,
                )
                if found is not None:
                    last = found[1].name
                    return found
        return None


@contextlib.contextmanager
def _ending_quietly() -> Iterator[None]:
    """End rq's worker if the broker is away, with one line in the log; our loop then makes a new worker."""
    try:
        yield
    except RedisError as error:
        log.warning("rewards.queue_lost", extra={"error": str(translated(error))})
        raise StopRequested from error


@contextlib.contextmanager
def _passing_over() -> Iterator[None]:
    """Log an entry that is no job and go on: agents may have put it there, and it is off the queue by now."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError, zlib.error) as error:
        log.warning("rewards.job_unreadable", extra={"error": f"{type(error).__name__}: {error}"})


class RewardWorker:
    """Takes jobs off the queues on a thread, and does their work on the loop."""

    def __init__(self, fabric: Fabric, scoring: Scoring, queue: Queue, info: WorkerInfo, clock: Clock) -> None:
        self._fabric = fabric
        self._scoring = scoring
        self._queue = queue
        self._info = info
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._is_stopping = threading.Event()
        self._tidied_at_s = 0.0

    @property
    def functions(self) -> dict[str, JobFunction]:
        """The jobs this worker runs, by name."""
        return {"score": self.score, "delete_run": self.delete_run}

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop`; agents ask again for rewards that are not scored by then."""
        thread = threading.Thread(target=self._pull, name="rq", daemon=True)  # it may wait for a broker that is away
        try:
            async with Helpers(self._scoring.run(), self._beat()) as helpers:
                thread.start()
                try:
                    await helpers.watch(stop)
                finally:
                    self._is_stopping.set()
        finally:
            with contextlib.suppress(FabricError, TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._fabric.board.forget_worker(self._info.worker_id)

    async def _beat(self) -> None:
        while True:
            scoring = self._scoring
            facts = {"rewards": scoring.offered, "running_count": scoring.running_count, "error": scoring.error}
            facts["resident_bytes"] = resident_bytes()
            try:
                await self._fabric.board.heartbeat(dataclasses.replace(self._info, **facts))  # type: ignore[arg-type]
                await self._fabric.board.add_timings(self._info, scoring.timings)
            except FabricError as error:
                log.warning("rewards.heartbeat_failed", extra={"error": str(error)})
            await self._clock.sleep(1.0)

    # ---- on the thread

    def _pull(self) -> None:
        while not self._is_stopping.is_set():
            try:
                check_queue(self._queue)
                self._serve()  # until we stop, or the broker is away or refuses us
            except RedisError as error:
                log.warning("rewards.queue_lost", extra={"error": str(translated(error))})
            except Exception:  # logged, and the thread looks at the queue again after AWAY_S
                log.exception("rewards.queue_unreadable")
            self._is_stopping.wait(AWAY_S)

    def _serve(self) -> None:
        worker = _Puller(
            [self._queue],
            connection=self._queue.connection,
            serializer=JSONSerializer,
            job_class=job_class(self.functions),
        )
        worker.log_result_lifespan = False
        worker.queues_now = self._queues
        worker.work(logging_level="CRITICAL")  # rq would log a traceback if a broker is away

    def _queues(self) -> tuple[list[Queue], float]:
        if self._is_stopping.is_set():
            raise SystemExit  # rq takes this for the end of its work
        if self._clock.now_s() > self._tidied_at_s + TIDY_S:
            self._tidied_at_s = self._clock.now_s()
            self._tidy()
        wait_s = PULL_S if self._scoring.are_all_open else FULL_PULL_S
        return [self._queue, *(queue_of(self._queue, run_id) for run_id in self._scoring.open_runs)], wait_s

    def _tidy(self) -> None:
        """Forget the queues of runs that are gone, with the jobs on them."""
        runs = self._call(self._fabric.board.runs())
        connection = self._queue.connection
        found: Any = set()
        with _making_room([self._queue]):
            found = connection.smembers(Queue.redis_queues_keys)
        for key in found:
            name = key.decode("utf-8", "replace").removeprefix(Queue.redis_queue_namespace_prefix)
            queue = Queue(name, connection=connection, serializer=JSONSerializer)
            if queue.key.encode() != key:
                connection.srem(Queue.redis_queues_keys, key)  # no queue has this key
                continue
            prefix, _, run_id = queue.name.partition(".")
            if prefix == QUEUE_NAME and run_id and run_id not in runs:
                for job_id in queue.get_job_ids(0, TIDY_COUNT):
                    queue.connection.delete(Job.key_for(job_id))
                    queue.connection.lrem(queue.key, 1, job_id)
                if queue.count == 0:
                    queue.connection.srem(Queue.redis_queues_keys, queue.key)

    def score(self, run_id: str, rows: Sequence[Sequence[Any]]) -> None:
        """Hand rewards to scoring, given as (trajectory_id, fence)."""
        self._call(self._scoring.take(str(run_id), [(str(name), int(fence)) for name, fence in rows]))

    def delete_run(self, run_id: str) -> None:
        """Remove a run and every key of it."""
        self._call(self._fabric.board.delete_run(run_id))

    def _call(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(JOB_TIMEOUT_S)
