"""What runs in the simulated processes: the real workers and trainer, wired as deploy/roles/run.py wires them."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Callable
from functools import cache
from itertools import count
from random import Random
from typing import TYPE_CHECKING, Any

from rollfab.fabric.contract.errors import BrokerError, FabricError, QueueFull
from rollfab.fabric.contract.records import Group, WorkerInfo
from rollfab.fabric.rules.queue.retries import SCORE_LOSS_MAX
from rollfab.trainer.aio import AsyncFabric, AsyncRun
from rollfab.workers.agent.worker import AgentConfig, AgentWorker
from rollfab.workers.controller.controller import Controller, ControllerConfig
from rollfab.workers.environments.registry import Registry
from rollfab.workers.rollout.weights import ReceiverOptions, WeightReceiver
from rollfab.workers.rollout.worker import RolloutConfig, RolloutWorker
from tests.sim.checks.check_capacity import FIRST_TOKEN_S, life_of
from tests.sim.checks.check_groups import score
from tests.sim.checks.checkers import require
from tests.sim.environment import TARGETS
from tests.sim.link import Link
from tests.sim.policy import tensors

if TYPE_CHECKING:
    from tests.sim.world import Watched, World

RUN_ID, GUEST_ID = "sim", "guest"
EVALUATION, EVALUATION_ID = "check", f"{RUN_ID}-eval-check"
GUEST_VERSION_MIN = 3  # versions of the second run have other numbers
TAKEOVER_S = 8.0  # more than any process is stopped for
OTHER_TASK = 50  # the first that replaces a dropped group
POOL = "spare"  # of the serving workers, by which they are lent whenever they start
RECEIVER = ReceiverOptions(poll_s=1.0, retry_s=0.1, retry_s_max=1.0, audit_every=1)

Role = Callable[["World", Link, asyncio.Event], Awaitable[None]]


@cache
def registry() -> Registry:
    """Made once: it reads what is installed from disk. Everything is loaded here, or a thread would do it later."""
    made = Registry(TARGETS)
    for target in TARGETS:
        made.make(target.partition("=")[0], {"turns": 1, "tokens": 1, "pace_s": 0.0})
    return made


KINDS = ("reads well", "reads badly")
SPEEDS = dict(zip(KINDS, ((20_000, 50_000), (200_000, 50_000)), strict=True))  # us for a token read, and for one made


async def agent(world: World, link: Link, stop: asyncio.Event) -> None:
    """A real agent worker."""
    config = AgentConfig(
        worker_id=link.process.name,
        environment_count=world.options.environment_count,
        environment_timeout_s=1.0,
        ask_again_s=2.0,
    )
    worker = AgentWorker(link, registry(), config, world.clock, ask_reward=link.rewards.ask)
    world.agents[link.process.name] = worker
    try:
        await worker.run(stop)
    finally:
        world.agents.pop(link.process.name, None)


async def rollout(world: World, link: Link, stop: asyncio.Event) -> None:
    """A real rollout worker with its real receiver; the engine is fake."""
    name, options = link.process.name, world.options
    followed: list[str] = []  # runs whose weights it has followed
    engine = world.make_engine(
        link.process,
        on_step=lambda names: world.stepped(link.process, name, names),
        on_apply=lambda version, digest: world.applied(link.process, name, followed[-1], version, digest),
        on_rest=lambda word: world.facts.note(name, word),
    )
    world.engines[name] = engine
    kind = KINDS[len(world.rollouts) % 2] if options.is_unlike else ""
    config = RolloutConfig(
        worker_id=name,
        role=link.process.role,
        pool=POOL if link.process.role == "serving" else "",
        model="tiny",
        hardware=kind,
        slot_count=options.slot_count,
        log_s=options.log_s,
        first_token_s=FIRST_TOKEN_S,
        sleep_after_s=options.sleep_after_s,
    )

    def make_receiver(run_id: str) -> WeightReceiver:
        followed.append(run_id)
        return WeightReceiver(link.weights, run_id, engine, options=RECEIVER, clock=world.clock)

    await engine.start()
    worker = world.rollouts[name] = RolloutWorker(
        link, engine, config, world.clock, make_receiver=make_receiver, guard=engine.guard_view
    )
    if kind:  # the engine is fake, and so are its speeds
        vars(worker._running)["speeds"] = lambda: SPEEDS[kind]
    try:
        async with engine.following(worker.keeper):
            await worker.run(stop)
    finally:
        world.rollouts.pop(name, None)
        world.engines.pop(name, None)
        await engine.close()


async def controller(world: World, link: Link, stop: asyncio.Event) -> None:
    """A real controller."""
    await Controller(link.board, ControllerConfig(worker_id=link.process.name), world.clock).run(stop)


class RewardQueue:
    """What rq is in the real fabric: asked for by agents, emptied by the reward worker; a crash of that loses some."""

    def __init__(self) -> None:
        self._asked: asyncio.Queue[tuple[str, str, int]] = asyncio.Queue()

    async def ask(self, run_id: str, trajectory_id: str, fence: int, *, is_again: bool = False) -> None:
        """Ask for a reward."""
        await self._asked.put((run_id, trajectory_id, fence))

    async def take(self) -> tuple[str, str, int]:
        """The next that is asked for."""
        return await self._asked.get()


async def reward(world: World, link: Link, stop: asyncio.Event) -> None:
    """A simulated reward worker: the calls of the real one, without rq."""
    info = WorkerInfo(worker_id=link.process.name, role="reward", pid=1, host="sim", rewards=["simulated"])
    while not stop.is_set():  # a trainer names a reward that somebody offers
        try:
            await link.board.heartbeat(info)
            break
        except BrokerError:
            await asyncio.sleep(0.1)
    while not stop.is_set():
        try:
            run_id, trajectory_id, fence = await link.rewards.take()
            run = (await link.board.runs()).get(run_id)
            if run is None:  # an evaluation that was deleted
                continue
            queue = link.trajectories(run)
            begun = await queue.begin_score(trajectory_id, fence, info.worker_id, 1.0, loss_max=SCORE_LOSS_MAX)
            if begun is not None and begun.rollout is not None:
                await asyncio.sleep(0.05)
                await queue.score(trajectory_id, fence, score(begun.rollout))
        except BrokerError:
            await asyncio.sleep(0.1)


async def trainer(world: World, link: Link, stop: asyncio.Event) -> None:
    """A training loop over the real client: submit what fits, use what comes, publish now and then."""
    settings = {"model": "tiny", "environment": f"sim-{world.options.recovery}", **world.options.settings}
    run = await _opened(link, stop.is_set, RUN_ID, **settings, kept_bytes_max=3_000)  # a few groups: some are dropped
    if run is not None:
        await _train(_TrainingLoop(world.first, world, link, run), stop)


async def rank(world: World, link: Link, stop: asyncio.Event) -> None:
    """A second process of the same training program: it consumes, and that is all."""
    run = await _opened(link, stop.is_set, RUN_ID)
    if run is not None:
        await _train(_RankLoop(world.first, world, link, run), stop)


async def guest(world: World, link: Link, stop: asyncio.Event) -> None:
    """The same for a second run, which publishes what the first one has, by numbers of its own."""
    assert world.guest is not None
    guest, options = world.guest, world.guest.facts.options
    settings = {"model": "tiny", "environment": f"sim-{options.recovery}", **options.settings}
    run = await _opened(link, lambda: stop.is_set() or guest.is_deleted, GUEST_ID, **settings)
    if run is not None:
        await _train(_GuestLoop(guest, world, link, run), stop)


async def evaluator(world: World, link: Link, stop: asyncio.Event) -> None:
    """Somebody who evaluates one version after another, as does another one under the same name."""
    random, life = Random(f"{link.process.name} {world.options.seed}"), life_of(link.process)
    numbers = count()
    while not stop.is_set():
        fabric = AsyncFabric(link, "memory:")  # type: ignore[arg-type]
        with contextlib.suppress(FabricError):  # it is refused often; what is accepted is looked at
            head = (await link.weights.head(RUN_ID)).version
            version = random.choice((None, head, head - 1))
            evaluation = await fabric.evaluation(RUN_ID, max(0, version) if version else None, name=EVALUATION)
            await asyncio.sleep(random.choice((0.0, 0.0, 0.2, 1.0)))
            name = f"e{life}-{next(numbers)}"
            assert evaluation.evaluates is not None
            world.evaluated[name] = evaluation.evaluates
            await evaluation.submit([{"number": 1}], group_size=2, group_ids=[name], timeout=0.05)
            view = {"consumer": link.process.name, "takeover": TAKEOVER_S}
            async for group in evaluation.groups(timeout=random.choice((0.5, 3.0)), **view):
                world.judge(check_evaluated, group, world.evaluated[group.group_id])
        await asyncio.sleep(random.choice((0.05, 0.3)))


def check_evaluated(group: Group, version: int) -> None:
    """An evaluation's rollouts are of the version that they were asked of."""
    found = {span.policy_version for each in group.rollouts for span in each.spans}
    require(found <= {version}, f"group {group.group_id} was to evaluate version {version}, and is of {found}")


def check_weights(published: int | None, version: int, digest: int) -> None:
    """What is evaluated has the weights of the run beside it."""
    require(published == digest, f"an evaluation of version {version} holds other weights than the run's")


async def _opened(link: Link, is_over: Callable[[], bool], run_id: str, **settings: Any) -> AsyncRun | None:
    """Open a run, again and again until an agent has said that it offers the environment; None: it is over."""
    fabric = AsyncFabric(link, "memory:")  # type: ignore[arg-type]
    while not is_over():
        try:
            return await fabric.run(run_id, **settings)
        except FabricError:
            await asyncio.sleep(0.2)
    return None


async def _train(loop: _TrainingLoop, stop: asyncio.Event) -> None:
    while not stop.is_set():
        try:
            await loop.turn_over()
        except BrokerError:
            if loop.options.dies_on_errors:
                raise
            await asyncio.sleep(0.2)


class _TrainingLoop:
    """One life of the training program. What it has used is in its checkpoint, which is the world's."""

    _consumer = "trainer"

    def __init__(self, watched: Watched, world: World, link: Link, run: AsyncRun) -> None:
        self.options = watched.facts.options
        self._watched = watched
        self._world = world
        self._link = link
        self._run = run
        ended = watched.groups.groups
        # All of them, again, in every life, but for what it did not want any more.
        self._left = {
            name: task
            for name, task in watched.tasks.items()
            if ended.get(name) is None or ended[name].end != "cancelled"
        }
        self._others = ({"number": OTHER_TASK + n} for n in count())  # these, too, begin anew with every life
        self._step_count = 0
        self._wish: dict[int, Any] = {}

    async def turn_over(self) -> None:
        """One optimiser step."""
        await self._begin()
        await self._submit()
        await self._consume()
        self._step_count += 1
        if self._step_count % self.options.publish_every == 0 and not self._watched.is_all_used:
            await self._publish(await self._run.head_version() + 1)
        if self.options.cancels and self._step_count == 2:
            await self._run.cancel(next(iter(self._watched.tasks)))

    async def _consume(self) -> None:
        if self.options.is_transactional:
            async with self._run.groups(timeout=0.5, count=2, **self._view) as groups:
                used = [group.group_id async for group in groups if await self._think()]
                for group_id in used:
                    self._watched.groups.use(self._link.process, group_id)
        else:
            async for group in self._run.groups(timeout=0.5, count=1, **self._view):
                await self._think()
                self._watched.groups.use(self._link.process, group.group_id)

    async def _begin(self) -> None:
        if await self._run.head_version() < 0:
            await self._publish(0)

    @property
    def _view(self) -> dict[str, Any]:
        wishes: dict[str, Any] = {"keep": self._keep, "refill": self._others} if self.options.drops else {}
        if self.options.has_rank:
            wishes |= {"consumer": self._consumer, "takeover": TAKEOVER_S}
        return wishes

    def _keep(self, group: Group) -> bool:
        """About every other group is dropped, and so is every other one that replaces it, at most two times."""
        is_wanted = (
            re.search(r"-r([2-9]|\d\d+)$", group.group_id) is not None
            or Random(f"{group.group_id} {self.options.seed}").random() < 0.5
        )
        if not is_wanted:
            self._watched.groups.drop(self._link.process, group.group_id)
        return is_wanted

    async def _think(self) -> bool:
        await asyncio.sleep(self.options.think_s)
        return True

    async def _submit(self) -> None:
        """Everything that fits; a group at a time, so that back-pressure is met in the middle."""
        options = self.options
        for group_id, task in list(self._left.items()):
            try:
                await self._run.submit(
                    [task],
                    group_size=options.group_size,
                    quorum=options.quorum,
                    priority=task["number"] % 3,
                    deadline=options.deadline_s,
                    group_ids=[group_id],
                    timeout=0.05,
                )
            except QueueFull:
                return
            del self._left[group_id]

    async def _publish(self, version: int) -> None:
        if version <= self.options.version_max:
            await self._run.publish(tensors(version, life_of(self._link.process)), version=version)


class _RankLoop(_TrainingLoop):
    """Of the second process of the program."""

    _consumer = "rank-1"

    async def turn_over(self) -> None:
        await self._consume()


class _GuestLoop(_TrainingLoop):
    """Of the second run: it publishes once the first one has moved on, and mostly a little later."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._tried: dict[int, tuple[int, int]] = {}

    async def _begin(self) -> None:
        if self._world.facts.weights:  # if there are none, the next round looks again
            await self._publish(max(GUEST_VERSION_MIN, await self._run.head_version() + 1))

    async def _publish(self, version: int) -> None:
        newest, facts = self._world.facts.newest, self._watched.facts
        newest = self._tried.setdefault(version, newest)  # a version that may be there already has the same weights
        if newest != facts.newest or not facts.weights:
            self._watched.note_made(self._link.process, version, newest)
            await self._run.publish(tensors(*newest), version=version)
