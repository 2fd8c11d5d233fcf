"""A rollout worker over the stand-in, with an engine that the test plays: it ends turns, hangs and dies as told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext
from typing import Any

import numpy as np

from rollfab.fabric.contract.clock import Clock, SystemClock
from rollfab.fabric.contract.errors import BrokerError, EngineError, EngineUnsupported
from rollfab.fabric.contract.ids import turn_id
from rollfab.fabric.contract.records import Int32, Lease, RunConfig, Sampling, TokenLog, TurnJob, WorkerInfo
from rollfab.fabric.contract.sharing import GuardView
from rollfab.fabric.ports.queue import Exchange, TurnPush
from rollfab.fabric.queue.turns import RedisTurnQueue
from rollfab.fabric.rules.queue.token_parts import whole
from rollfab.trainer.checks import make_groups
from rollfab.workers.engines.base import EngineStats, Generation, GenerationRequest
from rollfab.workers.rollout.engine_sleep import GivesBack
from rollfab.workers.rollout.weights import AtCommit
from rollfab.workers.rollout.worker import RolloutConfig, RolloutWorker
from tests.sim.virtual_loop import VirtualClock
from tests.standin.broker import DirectClient
from tests.standin.fabric import StandInFabric
from tests.standin.tables import JobTables
from tests.support.leases import end_lease, set_lease
from tests.support.until import until

RUN = RunConfig(run_id="r1", model="tiny", environment="frozenlake")
WORKER = "w"
PROMPT_IDS = np.array([5, 6], np.int32)


def made(request_id: str, finish_reason: str, token_count: int, version: int = 0) -> Generation:
    return Generation(
        request_id=request_id,
        finish_reason=finish_reason,
        completion_ids=np.arange(token_count, dtype=np.int32),
        logprobs=np.full(token_count, -1.0, np.float32),
        versions=((0, token_count, version),) if token_count else (),
    )


def turn_of(request_id: str) -> str:
    return request_id.split("#")[0]


class PlayedEngine:
    """Engine (see base) without a model: requests make tokens, and end, when the test says so.

    Attributes:
        token_counts: of running requests; a new one has `first_count`.
        prior_counts: tokens of earlier claims that a turn was begun with.
        salts: by what it shares KV cache.
        aborted, refused: turns.
        is_dead: raises at every question.
        is_deaf: answers no abort, no pause and no sleep, and makes no step, until it hears again.
        is_asleep: it was put to sleep. sleep_count, wake_count: how often it was asked to.
        can_sleep: else it says that it cannot.
        wake_error: why it does not wake.
    """

    def __init__(self) -> None:
        self.token_counts: dict[str, int] = {}
        self.first_count = 3
        self.prior_counts: dict[str, int] = {}
        self.salts: dict[str, str] = {}
        self.aborted: list[str] = []
        self.refused: set[str] = set()
        self.version = 0
        self.cannot: dict[str, str] = {}
        self.cannot_resume: frozenset[str] = frozenset()
        self.is_dead = False
        self.pauses: set[str] = set()
        self.step_count = 0
        self.prompt_token_count = self.cached_token_count = 0
        self.is_asleep, self.can_sleep, self.wake_error = False, True, ""
        self.sleep_count = self.wake_count = 0
        self.kv_capacity_tokens, self.kv_used_fraction = 0, 1.0
        self.waiting_count = 0
        self._hears = asyncio.Event()
        self._hears.set()
        self._ended: list[Generation] = []
        self._has_ended = asyncio.Event()

    @property
    def name(self) -> str:
        return "played 1"

    @property
    def turns(self) -> list[str]:
        """Turns that run, in order of their names."""
        return sorted(map(turn_of, self.token_counts))

    @property
    def is_deaf(self) -> bool:
        return not self._hears.is_set()

    @is_deaf.setter
    def is_deaf(self, value: bool) -> None:
        (self._hears.clear if value else self._hears.set)()

    def step(self, token_count: int = 1) -> None:
        """All that runs makes tokens."""
        self.step_count += 1
        self.token_counts = {name: count + token_count for name, count in self.token_counts.items()}

    def end(self, finish_reason: str = "length") -> None:
        """All that runs ends."""
        self.step_count += 1
        self._ended += [made(name, finish_reason, count, self.version) for name, count in self.token_counts.items()]
        self.token_counts = {}
        self._has_ended.set()

    def die(self) -> None:
        self.is_dead = True
        self.token_counts = dict.fromkeys(self.token_counts, 0)
        self.end("error")

    def generate(self, request: GenerationRequest) -> None:
        assert not self.is_asleep, "a turn for an engine that sleeps"
        if self.is_dead or turn_of(request.request_id) in self.refused:
            raise EngineError("the engine is dead" if self.is_dead else "too long")
        for name in request.sampling.row().keys() & self.cannot.keys():
            raise EngineUnsupported(f"{name}: {self.cannot[name]}")
        self.token_counts[request.request_id] = self.first_count
        self.prior_counts[turn_of(request.request_id)] = len(request.prior_ids)
        self.salts[turn_of(request.request_id)] = request.cache_salt

    async def finished(self, timeout_s: float) -> list[Generation]:
        await self._has_ended.wait()
        self._has_ended.clear()
        ended, self._ended = self._ended, []
        return ended

    def progress(self, request_ids: Sequence[str]) -> list[Generation]:
        running = [name for name in request_ids if name in self.token_counts]
        return [made(name, "", self.token_counts[name], self.version) for name in running]

    async def abort(self, request_ids: Sequence[str]) -> list[Generation]:
        await self._hears.wait()
        names = [name for name in request_ids if name in self.token_counts]
        self.aborted += map(turn_of, names)
        return [made(name, "abort", self.token_counts.pop(name), self.version) for name in names]

    async def pause(self, reason: str) -> None:
        self.pauses.add(reason)
        await self._hears.wait()

    async def resume(self, reason: str) -> None:
        self.pauses.discard(reason)

    async def sleep(self) -> float:
        assert not self.token_counts and not self.is_asleep
        self.sleep_count += 1
        if not self.can_sleep:
            raise EngineUnsupported("it has no bed: use another")
        self.is_asleep = True
        await self._hears.wait()
        return 0.25

    async def wake(self) -> float:
        self.wake_count += 1
        await self._hears.wait()
        if self.wake_error:
            raise EngineError(self.wake_error)
        self.is_asleep = False
        return 1.5

    def stats(self) -> EngineStats:
        if self.is_dead:
            raise EngineError("the engine is dead")
        return EngineStats(
            running_count=len(self.token_counts),
            waiting_count=self.waiting_count,
            kv_used_fraction=self.kv_used_fraction,
            kv_capacity_tokens=self.kv_capacity_tokens,
            step_count=self.step_count,
            token_count=0,
            active_version=self.version,
            paused_by=tuple(self.pauses),
            prompt_token_count=self.prompt_token_count,
            cached_token_count=self.cached_token_count,
        )


class LiveWeights:
    """A receiver whose engine is at the version that the test says."""

    def __init__(self) -> None:
        self.version, self.head_version, self.moved_by, self.error = 0, 0, 0, None
        self.last, self.note, self.at_commit = None, None, AtCommit()
        self.gate: Callable[[], Any] = nullcontext
        self.is_sound = self.is_engine_still = True
        self.ready_s: float | None = None
        self.live_sums = np.zeros(1, np.uint64)

    def start(self) -> None:
        return

    async def close(self) -> None:
        return


class WatchedTurns(RedisTurnQueue):
    """Remembers what each exchange brought: turns handed in, turns taken."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.exchanges: list[tuple[int, int]] = []
        self.returned: list[tuple[str, bool]] = []  # turn, and whether it stalled
        self.refusal_count = 0  # releases that shall fail
        self.failing: set[str] = set()  # turns on a shard that does not settle

    async def exchange(self, worker_id: str, **asked: Any) -> Exchange:
        rows = asked.pop("settles", ())
        settles = [row for row in rows if row.claim.job.turn_id not in self.failing]
        found = await super().exchange(worker_id, settles=settles, **asked)
        found.unsettled = {row.claim.job.turn_id for row in rows if row not in settles}
        self.exchanges.append((len(rows), len(found.claims)))
        return found

    async def release(self, worker_id: str, progress: Sequence[Any], *, is_stalled: bool = False) -> None:
        if self.refusal_count:
            self.refusal_count -= 1
            raise BrokerError("the broker is away")
        self.returned += [(row.claim.job.turn_id, is_stalled) for row in progress]
        await super().release(worker_id, progress, is_stalled=is_stalled)


class Stage:
    """One run, turns that wait, and a worker with a played engine."""

    def __init__(self, run: RunConfig = RUN, engine: Any = None, clock: Clock | None = None) -> None:
        self.run = run
        self.clock = clock or SystemClock()
        self.fabric = StandInFabric(self.clock)
        self.engine = engine or PlayedEngine()
        self.turns = WatchedTurns(DirectClient(self.fabric.broker), run)
        self.fabric.turns = lambda run: self.turns  # type: ignore[method-assign]
        self.receivers: list[LiveWeights] = []
        self.guard: Callable[[], GuardView | None] | None = None  # of the workers that begin from now on,
        self.memory: GivesBack | None = None  # and this

    @property
    def table(self) -> JobTables:
        return self.fabric.tables_of("r1").turns

    @property
    def logs(self) -> dict[str, TokenLog]:
        """Tokens that are saved of turns which have not settled."""
        found = {name: whole(self.parts(name)) for name in self.table.logs}
        return {name: log for name, log in found.items() if log is not None}

    def parts(self, turn_id: str) -> list[TokenLog | None]:
        """The parts in which they are saved."""
        return [None if row is None else TokenLog.decode(row) for row in self.table.logs[turn_id]]

    @property
    def ready(self) -> list[str]:
        """Turns that wait, in order of their names."""
        return sorted(self.table.ready)

    @property
    def info(self) -> WorkerInfo:
        """What the worker said last."""
        return self.fabric.tables.workers[WORKER]

    async def ask(
        self, count: int, sampling: Sampling | None = None, *, prompt_ids: Int32 = PROMPT_IDS, home: str = ""
    ) -> list[str]:
        """Turns of `count` trajectories that agent "a" holds. home: the worker that they wait for."""
        await self.fabric.board.create_run(self.run)
        self.fabric.tables_of("r1").head_version = 0
        await self.fabric.rollouts(self.run).push(make_groups([{"seed": 1}], count, ["g"]))
        pushes = []
        for claim in await self.fabric.trajectories(self.run).claim("a", count):
            name = turn_id(claim.job.trajectory_id, 0)
            job = TurnJob(turn_id=name, agent_id="a", sampling=sampling or Sampling(), prompt_ids=prompt_ids)
            pushes.append(TurnPush(trajectory_id=claim.job.trajectory_id, fence=claim.fence, job=job, home=home))
        assert not any(await self.turns.push("a", pushes))
        return [push.job.turn_id for push in pushes]

    async def lease(self, epoch: int, slot_count: int, duration_ms: int | None = None) -> Lease:
        lease = Lease(worker_id=WORKER, run_id="r1", lease_epoch=epoch, slot_count=slot_count, lease_until_ms=None)
        await set_lease(self.fabric.board, lease, duration_ms)
        self._lease = lease
        return lease

    async def end_lease(self) -> None:
        """End the newest lease."""
        await end_lease(self.fabric.board, self._lease)

    @asynccontextmanager
    async def at_work(self, turn_count: int, slot_count: int, **settings: Any) -> AsyncIterator[list[str]]:
        """A worker that runs as many of these turns as it has slots; the others wait."""
        names = await self.ask(turn_count)
        await self.lease(1, slot_count)
        async with self.worker(**settings):
            await until(lambda: len(self.engine.turns) == min(turn_count, slot_count))
            yield names

    def _receiver(self, run_id: str) -> Any:
        self.receivers.append(LiveWeights())
        return self.receivers[-1]

    @asynccontextmanager
    async def worker(self, role: str = "dedicated", **settings: float) -> AsyncIterator[asyncio.Task[None]]:
        heartbeat_s = 0.25 if isinstance(self.clock, VirtualClock) else 0.02
        config = RolloutConfig(
            worker_id=WORKER,
            role=role,
            model="tiny",
            slot_count=8,
            **{"heartbeat_s": heartbeat_s, "poll_s": 0.05, "stall_s": 60.0, **settings},  # type: ignore[arg-type]
        )
        tools = {"make_receiver": self._receiver, "guard": self.guard, "memory": self.memory}
        worker = RolloutWorker(self.fabric, self.engine, config, self.clock, **tools)  # type: ignore[arg-type]
        stop = asyncio.Event()
        task = asyncio.create_task(worker.run(stop))
        try:
            yield task
            worker.check_integrity()
        finally:
            stop.set()
            await asyncio.gather(task, return_exceptions=True)
