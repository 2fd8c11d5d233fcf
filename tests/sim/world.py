"""The simulated cluster: every role as a process of its own, over one stand-in broker, on virtual time.

Phase one: work under faults; the checkers look on. Phase two: the faults end, and everything that was accepted must
come to its end within `live_s`. Then everyone leaves, and the broker must be empty.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from random import Random
from typing import Any
from unittest import mock
from zlib import crc32

from rollfab.fabric.contract.errors import BrokerError, EngineError, FabricError, InputError, RunUnknown
from rollfab.fabric.contract.records import RunConfig
from rollfab.fabric.format.manifest import WeightManifest
from rollfab.fabric.queue.keys import RunShards
from rollfab.fabric.queue.trajectories import RedisTrajectoryQueue
from rollfab.fabric.rules.queue import token_parts
from rollfab.workers.agent.worker import AgentWorker
from rollfab.workers.rollout.worker import RolloutWorker
from tests.sim import roles
from tests.sim.checks.check_capacity import CapacityChecker, digest_of
from tests.sim.checks.check_end import check_end, check_idle
from tests.sim.checks.check_groups import GroupChecker
from tests.sim.checks.check_trajectories import TrajectoryChecker
from tests.sim.checks.check_turns import TurnChecker
from tests.sim.checks.checkers import Checkers, Facts, Violation
from tests.sim.engines.fake import FakeEngine
from tests.sim.engines.shared import SharedEngine, draw_load, even
from tests.sim.environment import KILLER
from tests.sim.faults import Faults
from tests.sim.link import Link, Network
from tests.sim.options import Options
from tests.sim.virtual_loop import Deadlock, Process, Spin, ThreadUsed, VirtualClock, VirtualLoop
from tests.standin.broker import Broker
from tests.standin.fabric import StandInFabric

LEAVE_S = 5.0  # within which a process that is asked to must leave
STATUS_S = 0.25
RETRY_S = 0.3
EVALUATED_S = 6.0  # beyond the faults, in which the run is evaluated
SERVED_S = 3.0  # beyond the faults, in which serving has requests
SCORE_MS = 3_000  # a reward that was lost is asked for again


class SimFabric(StandInFabric):
    """The fabric of one process, with its own time until a lost reward is asked for again.

    changes: of the first run's settings, which everybody has in his file: no late call takes them back.
    """

    def __init__(self, clock: VirtualClock, *, broker: Broker, client_id: str, changes: dict[str, Any]) -> None:
        super().__init__(clock, broker=broker, client_id=client_id)
        create_run, change_run = self.board.create_run, self.board.change_run

        def with_changes(config: RunConfig) -> RunConfig:
            return dataclasses.replace(config, **changes) if config.run_id == roles.RUN_ID else config

        async def create(config: RunConfig) -> RunConfig:
            return await create_run(with_changes(config))

        async def change(was: RunConfig, config: RunConfig) -> bool:
            return await change_run(was, with_changes(config))

        self.board.create_run = create  # type: ignore[method-assign]
        self.board.change_run = change  # type: ignore[method-assign]

    def trajectories(self, run: RunConfig) -> RedisTrajectoryQueue:
        return RedisTrajectoryQueue(self._client, run, score_ms=SCORE_MS)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a simulation ended. failure: what was broken, "" for nothing."""

    options: Options
    failure: str
    lines: list[tuple[float, str, str, str, str]]
    virtual_s: float

    @property
    def trace_hash(self) -> str:
        """Of all that happened, in its order."""
        return hashlib.sha256("\n".join(map(str, self.lines)).encode()).hexdigest()[:16]


class Watched:
    """A run, and the checkers that look at it. tasks: its work, by group."""

    def __init__(self, run_id: str, options: Options, world: World, tasks: dict[str, dict[str, int]]) -> None:
        self.run_id, self.tasks = run_id, tasks
        shards = RunShards(run_id, options.shard_count)
        self.facts = Facts(
            options, world.clock.now_s, lambda group_id: world.store.now_ms(shards.of(group_id).clock), world.broker
        )
        self.turns = TurnChecker(self.facts)
        self.trajectories = TrajectoryChecker(self.facts, self.turns)
        self.groups = GroupChecker(self.facts, self.trajectories)
        self.is_deleted = False
        self._made: dict[tuple[str, int], tuple[int, int]] = {}

    @property
    def is_all_used(self) -> bool:
        """Whether every group has come to its end, or the run to its own."""
        if self.is_deleted:
            return True
        groups = self.groups.groups
        return all(name in groups for name in self.tasks) and all(group.end for group in groups.values())

    def note_made(self, process: Process, version: int, made_of: tuple[int, int]) -> None:
        """A trainer is about to publish a version of these weights: see `Facts.newest`."""
        self._made[process.name, version] = made_of

    def weights_advance_head(self, process: Process, result: None, manifest: WeightManifest, shard_count: int) -> None:
        """Of a run whose versions were noted so."""
        facts, version = self.facts, manifest.version
        if version > facts.head_version:
            facts.head_version, facts.newest = version, self._made[process.name, version]
            facts.weights[version] = digest_of(*facts.newest)


def _checkers_of(each: Watched, last: Any) -> Checkers:
    return Checkers([each.turns, each.trajectories, each.groups, last])


class World:
    """One simulated cluster."""

    def __init__(self, options: Options, loop: VirtualLoop) -> None:
        self.options = options
        self.clock = VirtualClock(loop)
        self.broker = Process("broker", "broker")
        self.network = Network(Random(f"network {options.seed}"), options.trouble_fraction, options.travel_s)
        self.store = Broker(self.clock)
        self.changes: dict[str, Any] = {}
        self.fabric = self._fabric("world")
        tasks = {f"g{number}": {"number": number} for number in range(options.group_count)}
        killing = {"killer_seed": crc32(KILLER.encode()), "kills_at": options.seed % 2} if options.kills else {}
        self.first = Watched(roles.RUN_ID, options, self, tasks | {"g0": tasks["g0"] | killing})
        self.facts, self.turns = self.first.facts, self.first.turns
        self.trajectories, self.groups = self.first.trajectories, self.first.groups
        self.capacity = CapacityChecker(roles.RUN_ID, self.facts, self.turns)
        self._guest_tasks = tasks
        self.guest = Watched(roles.GUEST_ID, options.of_guest, self, tasks) if options.has_guest else None
        # Turns before trajectories: what a call did to turns is judged by who held them before it.
        self._checkers = {
            each.run_id: _checkers_of(each, last)
            for each, last in ((self.first, self.capacity), (self.guest, self.guest))
            if each is not None
        }
        self.evaluated: dict[str, int] = {}  # which version each group of the evaluation was submitted for
        self.rewards = roles.RewardQueue()
        self.links: dict[str, Link] = {}
        self.agents: dict[str, AgentWorker] = {}
        self.engines: dict[str, FakeEngine] = {}
        self.rollouts: dict[str, RolloutWorker] = {}
        self.failed: asyncio.Future[None] = loop.create_future()
        self._loop = loop
        self._main: dict[str, asyncio.Task[None]] = {}
        self._stops: dict[str, asyncio.Event] = {}
        self._lives: dict[str, int] = {}
        self._is_closing = False

    @property
    def watched(self) -> list[Watched]:
        """The runs."""
        return [each for each in (self.first, self.guest) if each is not None]

    def living(self) -> list[Process]:
        """Processes that run now, stopped ones too."""
        return [self.links[name].process for name in self._main]

    async def run(self) -> None:
        """Both phases.

        Raises:
            Violation: a promise was broken.
        """
        options = self.options
        for role, count in (
            ("controller", 2),
            ("agent", options.agent_count),
            ("dedicated", options.dedicated_count),
            ("serving", options.serving_count),
            ("reward", int(options.has_reward)),
            ("trainer", 1),
            ("rank", int(options.has_rank)),
            ("guest", int(options.has_guest)),
            ("evaluator", 2 * options.evaluates),
        ):
            for _ in range(count):
                self.start(role)
        await self.set_lend("on")
        others = [
            asyncio.create_task(each)
            for each in (
                self._delete_guest(),
                self._delete_evaluation(),
                self._watch(),
                self._retry_dead(),
                self._loosen(),
            )
        ]
        faults = Faults(self, Random(f"faults {options.seed}"))
        try:
            await self._unless_failed(faults.run(options.faults_s))
            self.facts.note("world", "calm")
            await self._unless_failed(faults.settle())
            await self.set_lend("on")
            for each in others[:2]:
                await self._unless_failed(each)
            await self._unless_failed(self._live())
            await self._unless_failed(check_idle(self))
            await self._unless_failed(self._leave())
            await check_end(self)
        finally:
            for each in others:
                each.cancel()

    async def _delete_guest(self) -> None:
        """The second run's trainer is gone for good, and the run is deleted: nothing may be left of it."""
        if self.guest is None or not self.options.deletes_guest:
            return
        await asyncio.sleep(Random(f"deleted when {self.options.seed}").uniform(1.0, self.options.faults_s + 2.0))
        while not self.guest.groups.pushed_count:
            await self.clock.sleep(0.05)
        self.guest.is_deleted = True
        for process in [each for each in self.living() if each.role == "guest"]:
            process.is_replaced = True
            self.crash(process, after_s=0.0)
        del self._checkers[roles.GUEST_ID]
        await self.fabric.board.delete_run(roles.GUEST_ID)
        self.facts.note("operator", "delete", roles.GUEST_ID)
        if self.options.remakes_guest:
            await asyncio.sleep(Random(f"remade when {self.options.seed}").choice((0.0, 0.5, 5.0)))
            made = Watched(roles.GUEST_ID, self.options.of_guest, self, self._guest_tasks)
            self.guest, self._checkers[roles.GUEST_ID] = made, _checkers_of(made, made)
            self.start("guest")

    async def _delete_evaluation(self) -> None:
        """Nobody evaluates any more, once the faults have been over for a while; what is left of it goes."""
        if not self.options.evaluates:
            return
        await asyncio.sleep(self.options.faults_s + EVALUATED_S)
        for process in [each for each in self.living() if each.role == "evaluator"]:
            process.is_replaced = True
            self.crash(process, after_s=0.0)
        with contextlib.suppress(RunUnknown):
            await self.fabric.board.delete_run(roles.EVALUATION_ID)

    async def _retry_dead(self) -> None:
        """Somebody looks at the dead letters again and again, and lets them run again."""
        operator = Process("operator-1", "operator")
        link = Link(operator, self.broker, self._fabric(operator.name), self.network, self._observe, self.rewards)
        while self.options.retries and self._loop.time() < self.options.faults_s:
            await asyncio.sleep(RETRY_S)
            with contextlib.suppress(BrokerError):
                if run := (await link.board.runs()).get(roles.RUN_ID):
                    letters = await link.rollouts(run).dead_letters(10)
                    await link.rollouts(run).retry([each.trajectory_id for each in letters])

    async def _loosen(self) -> None:
        """Somebody changes settings of the run while it works: what it has promised by the old ones still holds."""
        random = Random(f"loosened {self.options.seed}")
        for _ in range(2 if self.options.loosens else 0):
            await asyncio.sleep(random.uniform(0.3, self.options.faults_s))
            self.changes |= self.facts.options.loosened(random)
            known = {name: self.changes[name] for name in ("staleness", "when_stale", "trajectory_count_max")}
            self.facts.options = dataclasses.replace(self.facts.options, **known)
            self.facts.note("operator", "loosen", roles.RUN_ID, self.changes)
            if run := (await self.fabric.board.runs()).get(roles.RUN_ID):
                await self.fabric.board.create_run(run)

    # ---- processes

    def start(self, role: str) -> None:
        """A new process, under a new name."""
        self._lives[role] = self._lives.get(role, 0) + 1
        process = Process(f"{role}-{self._lives[role]}", role)
        process.crash = partial(self._crash_by_world, process)
        link = Link(process, self.broker, self._fabric(process.name), self.network, self._observe, self.rewards)
        self.links[process.name] = link
        work: roles.Role = getattr(roles, "rollout" if role in ("dedicated", "serving") else role)
        stop = self._stops[process.name] = asyncio.Event()
        self.facts.note("world", "start", process.name)
        self._main[process.name] = process.start(self._contain(process, work(self, link, stop)))

    def make_engine(self, process: Process, **told: Any) -> FakeEngine:
        """The engine of a rollout worker, not started."""
        options = self.options
        if process.role != "serving" or not options.serves_s:
            return FakeEngine(options.step_s, **told)
        random = Random(f"load of {process.name} {options.seed}")
        load = draw_load(random, self._loop.time(), options.faults_s + SERVED_S)
        return SharedEngine(options.step_s, serving=even(options.serves_s), load=load, **told)

    def _fabric(self, name: str) -> SimFabric:
        """A client of the broker."""
        return SimFabric(self.clock, broker=self.store, client_id=name, changes=self.changes)

    async def _contain(self, process: Process, work: Any) -> None:
        """Run a process to its end; one that ends by itself is started again, as a supervisor would."""
        try:
            await work
        except InputError as error:  # nobody here gives wrong ones
            self.fail(error)
        except (EngineError, FabricError) as error:
            self.facts.note("world", "exit", process.name, type(error).__name__)
            if not process.is_dead and not self._is_closing:
                self.crash(process, after_s=0.2)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is a finding
            self.fail(error)
        else:
            self._main.pop(process.name, None)

    def crash(self, process: Process, *, after_s: float) -> None:
        """A process is gone at once; another one of its role is started after a while."""
        self._main.pop(process.name, None)
        self.engines.pop(process.name, None)
        self.rollouts.pop(process.name, None)
        self.agents.pop(process.name, None)
        process.kill()
        if not process.is_replaced:
            self._loop.call_later(after_s, self._start_again, process.role)

    def _crash_by_world(self, process: Process) -> None:
        self.facts.note("fault", "world.kills", process.name, "")
        process.trouble_s = max(process.trouble_s, self._loop.time())
        self.crash(process, after_s=0.3)

    def _start_again(self, role: str) -> None:
        if not self._is_closing:
            self.start(role)

    async def set_lend(self, value: str) -> None:
        """The operator's switch."""
        await self.fabric.board.set_lend(f"pool:{roles.POOL}", value)

    async def end(self) -> None:
        """Nobody runs on, and nothing that they still do reaches the broker."""
        self.broker.wake()
        for link in self.links.values():
            link.process.kill()

    # ---- judging

    def fail(self, error: BaseException) -> None:
        """Something is broken: the simulation ends."""
        if not self.failed.done():
            self.failed.set_exception(error)

    def judge(self, check: Callable[..., None], *args: Any) -> None:
        """Have a checker look at something. What it finds is told to the world, not to the process it looks at."""
        try:
            check(*args)
        except Exception as error:  # noqa: BLE001 - see above
            self.fail(error)

    def _observe(self, process: Process, run_id: str, name: str, result: Any, args: Any, kwargs: Any) -> None:
        if name.startswith("weights."):
            run_id = next((getattr(each, "run_id", each) for each in args if not isinstance(each, int)), "")
        if (checkers := self._checkers.get(run_id or roles.RUN_ID)) is not None:
            self.judge(checkers.observe, process, name, result, args, kwargs)

    def stepped(self, process: Process, worker_id: str, requests: Sequence[str]) -> None:
        """An engine is about to make a token for each of these."""
        self.judge(self.capacity.stepped, process, worker_id, requests)

    def applied(self, process: Process, worker_id: str, run_id: str, version: int, digest: int) -> None:
        """An engine holds weights of a run now."""
        watched = next((each for each in self.watched if each.run_id == run_id), None)
        if watched is None:
            self.judge(roles.check_weights, self.facts.weights.get(version), version, digest)
        if watched is None or watched.is_deleted:
            return self.capacity.forget(worker_id)
        return self.judge(self.capacity.applied, process, worker_id, watched.facts, version, digest)

    async def _unless_failed(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        await asyncio.wait((task, self.failed), return_when=asyncio.FIRST_COMPLETED)
        if self.failed.done():
            task.cancel()
            self.failed.result()
        task.result()

    async def _watch(self) -> None:
        """Look at the numbers again and again."""
        while True:
            await asyncio.sleep(STATUS_S)
            try:
                self.capacity.check_status(await self.fabric.board.run_status(roles.RUN_ID))
                for each, shard in product(self.watched, range(self.options.shard_count)):
                    self._fabric("integrity").tables_of(each.run_id, shard).check_integrity()
                for worker in self.rollouts.values():
                    worker.check_integrity()
                self.capacity.check_standing({name: engine.standing_s for name, engine in self.engines.items()})
            except RunUnknown:
                continue
            except Exception as error:  # noqa: BLE001 - as in judge
                self.fail(error)

    async def _live(self) -> None:
        limit_s = self.options.live_s
        until_s = self._loop.time() + limit_s
        while not all(each.is_all_used for each in self.watched):
            if self._loop.time() > until_s:
                raise Violation(f"not everything ended within {limit_s:g} s without faults: {await self._stuck()}")
            await asyncio.sleep(0.1)
        self.facts.note("world", "all used")

    async def _stuck(self) -> str:
        found = []
        for each in self.watched:
            groups = each.groups.groups
            left = [name for name in each.tasks if name not in groups or not groups[name].end]
            status = await self.fabric.board.run_status(each.run_id)
            queued = f"trajectories {dict(status.trajectories)}; turns {dict(status.turns)}"
            found.append(f"run {each.run_id}: groups {left}; {queued}")
        return "; ".join(found)

    async def _leave(self) -> None:
        """Everyone is asked to leave, and does."""
        self._is_closing = True
        for role in ("trainer", "rank", "guest", "agent", "dedicated", "serving", "reward", "controller"):
            tasks = []
            for name, task in list(self._main.items()):
                if self.links[name].process.role == role:
                    self._stops[name].set()
                    tasks.append(task)
                    if role == "reward":
                        task.cancel()
            if tasks:
                _, late = await asyncio.wait(tasks, timeout=LEAVE_S)
                if late:
                    raise Violation(f"{role}: did not leave within {LEAVE_S:g} s of being asked")


def simulate(options: Options) -> Outcome:
    """One whole run. Its turns are short, so the parts in which they are saved are too."""
    loop = VirtualLoop(Random(f"loop {options.seed}"))
    limits = {"SECOND_TOKENS_MAX": 6, "THIRD_TOKENS_MAX": 2}
    try:
        with mock.patch.multiple(token_parts, **limits):
            return _simulate(loop, options)
    finally:
        loop.put_down()


def _simulate(loop: VirtualLoop, options: Options) -> Outcome:
    world = World(options, loop)
    loop.set_exception_handler(lambda _, context: _report(world, context))
    failure = _run(loop, world)
    outcome = Outcome(options=options, failure=failure, lines=list(world.facts.lines), virtual_s=loop.time())
    loop.run_until_complete(world.end())
    return outcome


def _run(loop: VirtualLoop, world: World) -> str:
    try:
        loop.run_until_complete(world.run())
    except (Violation, Deadlock, Spin, ThreadUsed) as error:
        return f"{type(error).__name__}: {error}"
    except Exception as error:  # noqa: BLE001 - a finding, too
        return f"{type(error).__name__}: {error!r}"
    return ""


def _report(world: World, context: dict[str, Any]) -> None:
    """A callback that raised is a finding. A task that nobody asked how it ended is not: its process was killed."""
    if "handle" in context:
        world.fail(context["exception"])
