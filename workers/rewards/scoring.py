"""The rewards that a worker has taken: decides which is computed when, and in which process.

- A user's reward function runs in processes that we can end, each for one run. A call that hangs, ends its process or
  fills its memory costs its own trajectory alone: it is tried once more, then it is a dead letter that says why.
- Runs share the processes: a run takes at most half of those that others leave, and each may have one. A run begins
  with one, gets more as rewards come, and is back at one when a process was lost.
- Each call is bounded: time, memory (of each process), bytes of its answer, lines printed, threads left.
- A reward that has cost a process or worker before is a suspect: a run computes one suspect at a time, the least
  suspicious first, so a whole worker's death is blamed on at most one of them.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ...fabric.contract.clock import Clock
from ...fabric.contract.errors import ConfigError, EnvironmentFailed, FabricError, FirstError, RewardFailed
from ...fabric.contract.ids import new_process_id
from ...fabric.contract.records import Rollout, RunConfig, TrajectoryJob, check_reward
from ...fabric.host.helpers import Helpers
from ...fabric.ports.queue import Fabric, ScoreClaim, TrajectoryQueue
from ...fabric.rules.queue.retries import SCORE_LOSS_MAX
from ...fabric.rules.queue.timings import RunTimings, Timings
from ...fabric.tracing.spans import Spans, place_of
from ..environments.confinement import UNASKED, Confinement
from ..environments.failures import dead_letter, reason_of
from ..environments.pool import PoolConfig, ProcessPool
from ..environments.process import EnvironmentProcess
from ..environments.registry import Registry, RewardFunction
from ..environments.spawn import NICENESS, Program

log = logging.getLogger(__name__)

DECODER = "rollfab.fabric.contract.records:Rollout.decode"
CALL_COUNT_MAX = 10_000  # of one process: bounds the leaks of a function
RUN_COUNT_MAX = 128  # runs that may have a process although all shared ones are taken
WAITING_COUNT_MAX = 128  # of a run; further rewards stay on its queue, for other workers
FEW = 6  # processes keep the broker busy, if a call takes less than
WORTH_S = 0.02
SLOW_S = 1.0  # a call that takes longer gives way to others for the processors
SUSPECT_S = 2.0
KEEP_S = 2.0  # a worker that has not said for so long that it keeps a reward has lost it: it may be killed
KEEP_EVERY_S = 0.5
FOLLOW_S = 0.25
SHOWN_MAX = 40  # characters of what should have been a number
LOSSES = ("timeout", "crashed", "answer")  # reasons that cost the process, and not only the call
ADVICE = {
    "timeout": "make it faster, or start the reward worker with a longer --timeout",
    "crashed": "it must return a float and let its process live; see docs/rewards.md for its limits of memory",
    "answer": "it must return a float",
}


@dataclass(frozen=True, kw_only=True)
class ScoringConfig:
    """Settings of a reward worker."""

    worker_id: str
    timeout_s: float = 20.0
    """Time limit of one reward."""
    process_count_max: int = 32
    """Processes that all runs share, [1, 10000]."""
    memory_bytes_max: int = 1 << 30
    """Memory that each process may write to."""
    confinement: Confinement = UNASKED
    """How the processes are held in."""


class RewardFunctions:
    """Calls reward functions: our own here, all others in processes."""

    def __init__(self, registry: Registry, config: ScoringConfig) -> None:
        self._registry = registry
        self._config = config
        count = config.process_count_max
        self._pool = ProcessPool(
            PoolConfig(
                idle_count_max=count,
                episode_count_max=CALL_COUNT_MAX,
                memory_bytes_max=config.memory_bytes_max,
                confinement=config.confinement,
            )
        )

    async def offered(self) -> list[str]:
        """Load and check each reward function once; return the names of those that can be called here.

        Raises:
            ConfigError: functions that this worker's options name cannot be loaded, or are no reward functions.
        """
        names = self._registry.rewards()
        errors = await asyncio.gather(*(self._check(name) for name in names))
        faults = {name: error for (name, is_own), error in zip(names.items(), errors, strict=True) if error and is_own}
        if faults:
            told = "; ".join(f"--reward {name}: {error}" for name, error in faults.items())
            raise ConfigError(told, name=next(iter(faults)))
        for name, error in zip(names, errors, strict=True):
            if error is not None:
                log.warning("rewards.not_offered", extra={"reward": name, "error": error})
        return [name for name, error in zip(names, errors, strict=True) if error is None]

    async def _check(self, name: str) -> str | None:
        try:
            found = self._registry.reward(name)
            if isinstance(found, Program):
                self._pool.give_back(await self._pool.take(self._limited(found, "")))
        except FabricError as error:
            return error.message
        return None

    async def compute(self, name: str, owner: str, task: Mapping[str, object], rollout: Rollout) -> float:
        """Compute the reward of one rollout, for one run.

        Raises:
            RewardFailed: it raised or gave no finite number (reason: score, reward), or its process was lost (LOSSES).
            ConfigError: the function is not offered here, or cannot be loaded.
        """
        where = f"reward function {name!r}"
        found = self._registry.reward(name)
        if not isinstance(found, Program):
            return check_reward(_call(found, where, dict(task), rollout), where, RewardFailed)
        try:
            process = await self._pool.take(self._limited(found, owner))
        except EnvironmentFailed as error:
            raise _failed(where, error) from error
        slow = asyncio.get_running_loop().call_later(SLOW_S, process.give_way)
        try:
            reward = await self._ask(process, task, rollout)
        except EnvironmentFailed as error:
            raise _failed(where, error) from error
        finally:
            slow.cancel()
            self._pool.give_back(process)
        if isinstance(reward, str):  # the text of an answer that is no number
            told = reward if len(reward) <= SHOWN_MAX else f"{reward[:SHOWN_MAX]}…"
            raise RewardFailed(f"{where} gave reward {told}: not a number", reason="reward")
        return check_reward(reward, where, RewardFailed)

    async def _ask(self, process: EnvironmentProcess, task: Mapping[str, object], rollout: Rollout) -> object:
        arguments = {"task": dict(task)}
        return await process.call("score", arguments, self._config.timeout_s, data=rollout.encode())

    def _limited(self, program: Program, owner: str) -> Program:
        return dataclasses.replace(
            program,
            decoder=DECODER,
            niceness=NICENESS,
            owner=owner,
        )

    async def close(self) -> None:
        """End every process."""
        await self._pool.close()


def _call(function: RewardFunction, where: str, task: dict[str, object], rollout: Rollout) -> object:
    try:
        return function(task, rollout)
    except (TypeError, ValueError, OverflowError) as error:  # the function reads the environment's own words
        raise RewardFailed(f"{where} raised {type(error).__name__}: {error}", reason="score") from error


def _failed(where: str, error: EnvironmentFailed) -> RewardFailed:
    reason = str(error.facts.get("reason", ""))
    text = error.message.removeprefix("score").removeprefix("load")
    advice = f"; {ADVICE[reason]}" if reason in ADVICE else ""
    return RewardFailed(f"{where}{text}{advice}", **error.facts)


@dataclass
class _Run:
    """The rewards of one run: those that wait, and those that are being computed."""

    config: RunConfig
    queue: TrajectoryQueue
    waiting: dict[str, int] = field(default_factory=dict)
    """Trajectory → fence, the oldest first."""
    suspects: dict[str, tuple[int, int, float]] = field(default_factory=dict)
    """Suspects that wait: trajectory → (loss, fence, since when we know of the loss)."""
    suspect: str | None = None
    """The suspect that is being computed now."""
    running: dict[str, tuple[int, asyncio.Task[None]]] = field(default_factory=dict)
    window: int = 1
    """Rewards that may be computed at once."""

    def rows(self) -> list[tuple[str, int]]:
        """List all rewards of the run that are held here, as (trajectory, fence)."""
        suspects = [(name, fence) for name, (_, fence, _) in self.suspects.items()]
        return [*self.waiting.items(), *suspects, *((name, fence) for name, (fence, _) in self.running.items())]

    def next(self, room: int, now_s: float) -> tuple[str, int, int] | None:
        """Choose the next reward to compute: trajectory, fence, and the highest loss that it may have.

        A suspect takes no room of others. Suspects wait a while for others that may be less suspicious, so that the
        same one is not chosen every time.
        """
        if self.suspects and self.suspect is None:
            since_s = min(since_s for _, _, since_s in self.suspects.values())
            if not self.waiting or now_s - since_s > SUSPECT_S:
                name = min(self.suspects, key=lambda name: self.suspects[name][0])
                _, fence, _ = self.suspects.pop(name)
                self.suspect = name
                return name, fence, SCORE_LOSS_MAX
        if self.waiting and len(self.running) - (self.suspect is not None) < room:
            name = next(iter(self.waiting))
            return name, self.waiting.pop(name), 0
        return None

    def forget(self, name: str) -> None:
        """Drop a trajectory that needs no reward from here any more; end its computation."""
        self.waiting.pop(name, None)
        self.suspects.pop(name, None)
        if name in self.running:
            self.running[name][1].cancel()


class Scoring:
    """Computes the rewards that it takes, while `run` runs."""

    def __init__(
        self,
        fabric: Fabric,
        functions: RewardFunctions,
        config: ScoringConfig,
        clock: Clock,
        spans: Spans | None = None,
    ) -> None:
        """spans: takes those of rewards of trajectories that are traced."""
        self._fabric = fabric
        self._functions = functions
        self._config = config
        self._clock = clock
        self._runs: dict[str, _Run] = {}
        self.timings = Timings(new_process_id(), spans)
        self.offered: list[str] = []
        self.error: str | None = None
        """The error of the reward that failed last."""
        self.open_runs: tuple[str, ...] = ()
        """Runs with room for more rewards; read by other threads."""
        self.are_all_open = True

    @property
    def running_count(self) -> int:
        """Count the rewards that are being computed now."""
        return sum(len(run.running) for run in self._runs.values())

    async def run(self) -> None:
        """Compute rewards, and follow runs that come and go; for ever. Release all rewards at the end."""
        try:
            loops = (self._patiently(self._follow, FOLLOW_S), self._patiently(self._keep, KEEP_EVERY_S))
            async with Helpers(*loops) as helpers:
                await helpers.watch()
        finally:
            await self._close()

    async def _patiently(self, do: Callable[[], Awaitable[None]], pause_s: float) -> None:
        while True:
            try:
                await do()
            except FabricError as error:
                log.warning("rewards.broker_lost", extra={"error": str(error)})
            await self._clock.sleep(pause_s)

    async def take(self, run_id: str, rows: Sequence[tuple[str, int]]) -> None:
        """Take rewards of a run to compute, as (trajectory_id, fence); ignore a run that is not served here."""
        if run_id not in self._runs:
            await self._follow()
        run = self._runs.get(run_id)
        if run is None:
            return
        run.waiting |= {name: fence for name, fence in rows if name not in run.running and name not in run.suspects}
        await run.queue.keep_scoring(list(run.waiting.items()), KEEP_S)
        self._start_more()

    async def _follow(self) -> None:
        configs = await self._fabric.board.runs()
        wanted = {name: config for name, config in configs.items() if config.reward in self.offered}
        for name in self._runs.keys() - wanted.keys():
            run = self._runs.pop(name)
            for row, _ in run.rows():
                run.forget(row)
        for name, config in wanted.items():
            run = self._runs.setdefault(name, _Run(config, self._fabric.trajectories(config)))
            if run.config != config:
                run.config, run.queue = config, self._fabric.trajectories(config)
        self._start_more()

    async def _keep(self) -> None:
        """Tell the broker that we keep our rewards; forget those that it no longer expects from us."""
        first_error = FirstError()
        for run in list(self._runs.values()):
            rows = run.rows()
            with first_error:
                gone = await run.queue.keep_scoring(rows, KEEP_S) if rows else []
                for name in gone:
                    if dict(run.rows()).get(name) == dict(rows)[name]:
                        run.forget(name)
        first_error.raise_it()

    def _start_more(self) -> None:
        """Start as many rewards as there is room for, one of each run in turn."""
        runs = list(self._runs.values())
        while runs:
            runs = [run for run in runs if self._start(run)]
        self.open_runs = tuple(
            name for name, run in self._runs.items() if len(run.waiting) + len(run.suspects) < WAITING_COUNT_MAX
        )
        self.are_all_open = len(self.open_runs) == len(self._runs)

    def _room(self, run: _Run) -> int:
        """Count how many rewards of a run may be computed at once now."""
        others = self.running_count - len(run.running)
        shared = (self._config.process_count_max - others + 1) // 2
        own = 1 if others < RUN_COUNT_MAX else 0
        return min(run.window, max(own, shared))

    def _start(self, run: _Run) -> bool:
        row = run.next(self._room(run), self._clock.now_s())
        if row is None:
            return False
        name, fence, loss_max = row
        task = asyncio.create_task(self._score(run, name, fence, loss_max))
        run.running[name] = (fence, task)
        task.add_done_callback(lambda task: self._end(run, name, task))
        return True

    def _end(self, run: _Run, name: str, task: asyncio.Task[None]) -> None:
        if run.running.get(name, (0, None))[1] is task:  # false if it has begun anew as a suspect
            del run.running[name]
            if run.suspect == name:
                run.suspect = None
            self._start_more()

    async def _score(self, run: _Run, name: str, fence: int, loss_max: int) -> None:
        try:
            claim = await run.queue.begin_score(name, fence, self._config.worker_id, KEEP_S, loss_max=loss_max)
            if claim is None:
                return
            if claim.rollout is None:
                run.suspects[name] = (claim.loss, fence, self._clock.now_s())
                return
            await self._settle(run, name, fence, claim)
        except FabricError as error:  # the broker is away, or its row unreadable: an agent asks for the reward again
            log.warning("rewards.not_scored", extra={"job_id": name, "error": str(error)})

    async def _settle(self, run: _Run, name: str, fence: int, claim: ScoreClaim) -> None:
        assert claim.rollout is not None
        config, timings, begun_s = run.config, self.timings.of(run.config.run_id), self._clock.now_s()
        try:
            reward = await self._functions.compute(config.reward or "", config.run_id, claim.task, claim.rollout)
        except (RewardFailed, ConfigError) as error:
            self._trace(timings, config, claim.rollout, fence, begun_s, error=type(error).__name__)
            await self._fail(run, name, fence, claim, error)
            return
        taken_s = self._clock.now_s() - begun_s
        timings.note("reward", taken_s, name)
        self._trace(timings, config, claim.rollout, fence, begun_s, reward=reward)
        if run.window < FEW or taken_s > WORTH_S:
            run.window += 1
        await run.queue.score(name, fence, reward)

    def _trace(
        self,
        timings: RunTimings,
        config: RunConfig,
        rollout: Rollout,
        fence: int,
        begun_s: float,
        *,
        reward: float | None = None,
        error: str = "",
    ) -> None:
        trajectory = place_of(rollout.traceparent) if timings.spans.is_on else None
        if trajectory is not None:
            timings.spans.add(
                "reward",
                trajectory.child("reward", fence),
                trajectory,
                begun_s,
                self._clock.now_s(),
                error=error,
                reward_name=config.reward,
                reward=reward,
            )

    async def _fail(self, run: _Run, name: str, fence: int, claim: ScoreClaim, error: FabricError) -> None:
        assert claim.rollout is not None
        self.error = f"run {run.config.run_id}: {reason_of(error)}"[:500]
        job = _job_of(claim.task, claim.rollout)
        facts = {"run_id": run.config.run_id, "worker_id": self._config.worker_id, "attempt": claim.rollout.attempt}
        letter = dead_letter(error, job, **facts)  # type: ignore[arg-type]
        if error.facts.get("reason") in LOSSES:
            run.window = 1
            outcome = await run.queue.lose_score(name, fence, letter)
        else:
            outcome = await run.queue.fail(name, fence, letter)
        log.warning("rewards.failed", extra={"job_id": name, "reason": str(error), "outcome": outcome})

    async def _close(self) -> None:
        """Release all rewards, so that other workers take them at once."""
        for run in self._runs.values():
            rows = run.rows()
            for name, _ in rows:
                run.forget(name)
            if rows:
                try:
                    async with asyncio.timeout(1.0):
                        await run.queue.keep_scoring(rows, 0.0, worker_id=self._config.worker_id)
                except (FabricError, TimeoutError) as error:
                    log.warning("rewards.left_without_saying", extra={"error": str(error)})


def _job_of(task: Mapping[str, object], rollout: Rollout) -> TrajectoryJob:
    return TrajectoryJob(
        trajectory_id=rollout.trajectory_id,
        group_id=rollout.group_id,
        task_id=rollout.task_id,
        index=int(rollout.trajectory_id.rsplit(".", 1)[1]),
        task=dict(task),
        seed=rollout.seed,
    )
