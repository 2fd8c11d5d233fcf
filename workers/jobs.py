"""rq: stateless CPU jobs, that is rewards and housekeeping.

- The queue carries names and JSON, nothing else: no pickle, and no import path from the queue is ever imported.
  A job whose name is not in the worker's own table is refused.
- A reward job scores a batch (one rq job costs milliseconds, one reward microseconds), and is safe to repeat.
- A worker that computes a reward says so to the broker (`keep_scoring`) again and again. What nobody sees to is asked
  for again within KEEP_S, but not put on the queue twice while it may still wait there.
- A reward function that raises, hangs or gives NaN fails its trajectory's attempt; it never becomes a reward of 0.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from redis import Redis
from redis.sentinel import Sentinel
from rq import Queue, SimpleWorker
from rq.job import Job
from rq.serializers import JSONSerializer

from ..fabric.bus.url import read_url
from ..fabric.clock import Clock
from ..fabric.errors import ConfigError, EnvironmentFailed, FabricError
from ..fabric.ports import Fabric, TrajectoryQueue
from ..fabric.records import DeadLetter, Rollout, RunConfig, TrajectoryJob, WorkerInfo, check_reward
from .environments.base import in_thread
from .environments.registry import Registry
from .failures import dead_letter

log = logging.getLogger(__name__)

QUEUE_NAME = "rollfab"
JOB_TIMEOUT_S = 60  # for a whole batch; what is not scored by then is asked for again
RESULT_TTL_S = 0  # results go to the fabric's own streams
FAILURE_TTL_S = 3600
QUEUED_S = 30.0  # with others on the queue a reward is left alone for this long: workers may be few and busy
KEEP_S = 2.0  # one that is being computed for this long: its worker may be killed
KEEP_EVERY_S = 0.5
GATHER_S = 0.02  # rewards asked for within this time travel in one job
REWARD_COUNT_MAX = 16  # rewards of one job computed at once: one that hangs holds up none beside it

JobFunction = Callable[..., object]


def open_queue(url: str) -> Queue:
    """The rq queue on a broker, JSON only. It is on the URL's `reward_queue`, where that names one.

    Nothing there has to be kept: a reward that is lost on its way is asked for again (reap).

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


async def trajectories_of(fabric: Fabric, run_id: str) -> tuple[RunConfig, TrajectoryQueue] | None:
    """A run's settings and trajectories as they are now; None when it was deleted."""
    config = (await fabric.board.runs()).get(run_id)
    return None if config is None else (config, fabric.trajectories(config))


Row = tuple[str, int]  # a trajectory and its fence


class RewardAsker:
    """Puts reward jobs on the rq queue, gathered into batches."""

    def __init__(self, queue: Queue, clock: Clock) -> None:
        self._queue = queue
        self._clock = clock
        self._asked: dict[str, dict[Row, bool]] = {}  # run → rows, and whether they were asked for before
        self._asked_at_s: dict[Row, float] = {}
        self._sending: asyncio.Task[None] | None = None

    async def ask(self, run_id: str, trajectory_id: str, fence: int, *, is_again: bool = False) -> None:
        """Ask for the reward of one trajectory; if it gets lost on the way, reaping asks again.

        Then it was lost if nothing waits on the queue; with others there it may be among them.
        """
        self._asked.setdefault(run_id, {})[(trajectory_id, fence)] = is_again
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send())

    async def _send(self) -> None:
        while self._asked:  # again: what was asked for during a slow call waits here
            await self._clock.sleep(GATHER_S)
            asked, self._asked = self._asked, {}
            for run_id, rows in asked.items():
                try:
                    await asyncio.to_thread(self._enqueue, run_id, rows)
                except Exception:
                    log.exception("rewards.not_asked", extra={"run_id": run_id, "count": len(rows)})

    def _enqueue(self, run_id: str, asked: Mapping[Row, bool]) -> None:
        now_s = self._clock.now_s()
        is_empty = all(asked.values()) and self._queue.count == 0
        rows = [row for row, is_again in asked.items() if not is_again or is_empty or self._is_overdue(row, now_s)]
        if rows:
            enqueue(self._queue, "score", run_id, rows)
        self._asked_at_s.update(dict.fromkeys(rows, now_s))
        self._asked_at_s = {row: at_s for row, at_s in self._asked_at_s.items() if at_s > now_s - 2 * QUEUED_S}

    def _is_overdue(self, row: Row, now_s: float) -> bool:
        return now_s - self._asked_at_s.setdefault(row, now_s) >= QUEUED_S


def enqueue(queue: Queue, name: str, *args: object) -> None:
    """Put a job on the queue by its registered name."""
    queue.enqueue_call(
        name, args=args, timeout=JOB_TIMEOUT_S, result_ttl=RESULT_TTL_S, failure_ttl=FAILURE_TTL_S, description=name
    )


def job_class(functions: Mapping[str, JobFunction]) -> type[Job]:
    """An rq job that runs functions of this table and nothing else."""

    class RegisteredJob(Job):
        @property
        def func(self) -> JobFunction:
            function = functions.get(self.func_name or "")
            if function is None:
                raise ConfigError(
                    f"rq job {self.func_name!r} is not registered; this worker runs {', '.join(sorted(functions))}"
                )
            return function

        # rq would import these by the path that the queue names.
        success_callback = property(lambda self: None)
        failure_callback = property(lambda self: None)
        stopped_callback = property(lambda self: None)

    return RegisteredJob


class RewardWorker:
    """Runs reward and housekeeping jobs in one process."""

    def __init__(
        self,
        fabric: Fabric,
        registry: Registry,
        worker_id: str,
        loop: asyncio.AbstractEventLoop,
        *,
        reward_timeout_s: float = 20.0,
    ) -> None:
        self._fabric = fabric
        self._registry = registry
        self._worker_id = worker_id
        self._loop = loop
        self._reward_timeout_s = reward_timeout_s

    @property
    def functions(self) -> dict[str, JobFunction]:
        """The jobs this worker runs, by name."""
        return {"score": self.score, "delete_run": self.delete_run}

    def work(self, queue: Queue, info: WorkerInfo, *, burst: bool = False) -> None:
        """Serve the queue until stopped by a signal; `burst`: until it is empty."""
        check_queue(queue)
        beating = asyncio.run_coroutine_threadsafe(self._beat(info), self._loop)
        worker = SimpleWorker(
            [queue], connection=queue.connection, serializer=JSONSerializer, job_class=job_class(self.functions)
        )
        worker.log_result_lifespan = False
        try:
            worker.work(burst=burst, logging_level="WARNING")
        finally:
            beating.cancel()

    async def _beat(self, info: WorkerInfo) -> None:
        while True:
            try:
                await self._fabric.board.heartbeat(info)
            except FabricError as error:
                log.warning("rewards.heartbeat_failed", extra={"error": str(error)})
            await asyncio.sleep(1.0)

    def score(self, run_id: str, rows: Sequence[Sequence[Any]]) -> None:
        """Reward and complete trajectories, given as (trajectory_id, fence)."""
        self._call(self._score(run_id, rows))

    def delete_run(self, run_id: str) -> None:
        """Remove a run and every key of it."""
        self._call(self._fabric.board.delete_run(run_id))

    def _call(self, work: Any) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(JOB_TIMEOUT_S)

    async def _score(self, run_id: str, rows: Sequence[Sequence[Any]]) -> None:
        found = await trajectories_of(self._fabric, run_id)
        if found is None:
            return
        config, queue = found
        open_rows = {str(name): int(fence) for name, fence in rows}
        await queue.keep_scoring(list(open_rows.items()), KEEP_S)
        places = asyncio.Semaphore(REWARD_COUNT_MAX)

        async def score(trajectory_id: str, fence: int) -> None:
            async with places:
                await self._score_one(config, queue, trajectory_id, fence)
            del open_rows[trajectory_id]

        keeping = asyncio.create_task(self._keep(queue, open_rows))
        try:
            await asyncio.gather(*(score(name, fence) for name, fence in list(open_rows.items())))
        finally:
            keeping.cancel()

    async def _keep(self, queue: TrajectoryQueue, open_rows: Mapping[str, int]) -> None:
        """Say again and again that these rewards are being seen to."""
        while True:
            await asyncio.sleep(KEEP_EVERY_S)
            try:
                await queue.keep_scoring(list(open_rows.items()), KEEP_S)
            except FabricError as error:
                log.warning("rewards.not_kept", extra={"count": len(open_rows), "error": str(error)})

    async def _score_one(self, config: RunConfig, queue: TrajectoryQueue, trajectory_id: str, fence: int) -> None:
        waiting = await queue.scoring(trajectory_id)
        if waiting is None:
            return
        task, rollout = waiting
        try:
            reward = await self._reward(config, task, rollout)
        except Exception as error:  # noqa: BLE001 - around a user's reward function: its attempt fails
            log.warning("rewards.attempt_failed", extra={"job_id": trajectory_id, "reason": str(error)})
            await queue.fail(trajectory_id, fence, self._letter(config.run_id, task, rollout, error))
            return
        await queue.score(trajectory_id, fence, reward)

    async def _reward(self, config: RunConfig, task: dict[str, Any], rollout: Rollout) -> float:
        where = f"reward function {config.reward!r}"
        function = self._registry.reward(config.reward or "")
        try:
            async with asyncio.timeout(self._reward_timeout_s) as limit:
                reward = await in_thread(lambda: function(task, rollout))
        except Exception as error:  # around a user's reward function
            if limit.expired():
                text = f"{where} took longer than {self._reward_timeout_s:g} s"
            else:
                text = f"{where} raised {type(error).__name__}: {error}"
            raise EnvironmentFailed(text, reason="reward") from error
        return check_reward(reward, where)

    def _letter(self, run_id: str, task: dict[str, Any], rollout: Rollout, error: Exception) -> DeadLetter:
        job = TrajectoryJob(
            trajectory_id=rollout.trajectory_id,
            group_id=rollout.group_id,
            task_id=rollout.task_id,
            index=int(rollout.trajectory_id.rsplit(".", 1)[1]),
            task=task,
            seed=rollout.seed,
        )
        return dead_letter(error, job, run_id=run_id, worker_id=self._worker_id, attempt=rollout.attempt)
