"""How many files somebody reads to follow one trajectory, and one version of the weights, in the order they go.

The program is the real one, in one process: a trainer's client, a controller, an agent and a rollout worker with the
transformers engine, on the stand-in broker. tests/support/walk.py says what counts: the files that keep a record of it
while anybody waits, and to which other files each hands it.

- The walk ends at two doors: behind the broker's ports (scripts, connections) a trajectory is bytes, and behind an
  engine's `generate` a record of the engine's own.
- `trainer/client.py` and `trainer/aio.py` are faces before it: they pass tasks in and groups out, and keep neither.
- The environment scores, and is replayed when an agent dies. A snapshot goes from episode.py straight to
  fabric/queue/trajectories.py, and a reward function is a visit to workers/rewards.
- Work in threads is not looked into: the bytes of weights are made and read there.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from rollfab.fabric.contract.clock import SystemClock
from rollfab.trainer.aio import AsyncFabric
from rollfab.trainer.client import Fabric, Run, _Loop
from rollfab.trainer.publish import publisher
from rollfab.workers.agent.episode import TurnCaller
from rollfab.workers.agent.worker import AgentConfig, AgentWorker
from rollfab.workers.controller.controller import Controller, ControllerConfig
from rollfab.workers.engines.transformers.engine import TransformersConfig, TransformersEngine
from rollfab.workers.environments.registry import Registry
from rollfab.workers.rollout import worker as rollout_worker
from rollfab.workers.rollout.weights import ReceiverOptions, WeightReceiver
from rollfab.workers.rollout.worker import RolloutConfig, RolloutWorker
from tests.standin.broker import Broker
from tests.standin.fabric import StandInFabric
from tests.support.walk import Walk

GROUP_ID = "walked"
RECORDS = frozenset(
    f"rollfab.{name}" for name in ("fabric.contract.records", "fabric.ports.queue", "workers.engines.base")
)
TRAJECTORY_WALK = [
    "trainer/groups.py",
    "fabric/queue/rollouts.py",
    "fabric/queue/trajectories.py",
    "workers/agent/run.py",
    "workers/agent/episode.py",
    "fabric/queue/turns.py",
    "workers/rollout/turns.py",
    "workers/engines/transformers/engine.py",
]
VERSION_RECORDS = ("rollfab.fabric.format.", "rollfab.fabric.versions.", "rollfab.trainer.publish.report")
VERSION_WALK = [  # how it is read; a run of the test finds those of them that wait for something in it
    "trainer/publish/publisher.py",
    "trainer/publish/ranks.py",
    "fabric/versions/snapshot.py",
    "trainer/publish/upkeep.py",
    "trainer/publish/healing.py",
    "fabric/versions/store.py",
    "fabric/inspect/healing.py",
    "fabric/versions/stage.py",
    "fabric/versions/reader.py",
    "workers/rollout/weights.py",
    "workers/engines/transformers/engine.py",
]


def is_of_trajectory(value: Any) -> bool:
    """Whether a value is a record of the group that is walked, of its trajectory, or of one of its turns."""
    return type(value).__module__ in RECORDS and _names_it(value)


def _names_it(value: Any) -> bool:
    if isinstance(value, str):
        return value.startswith(GROUP_ID)
    if isinstance(value, (list, tuple)):
        return any(map(_names_it, value))
    if type(value).__module__ not in RECORDS or not dataclasses.is_dataclass(value):
        return False
    return any(_names_it(getattr(value, field.name)) for field in dataclasses.fields(value))


def is_of_version(value: Any, version: int) -> bool:
    """Whether a value is a record of a version of the weights: its manifest, the head, what is staged, a report."""
    is_record = type(value).__module__.startswith(VERSION_RECORDS) and dataclasses.is_dataclass(value)
    return is_record and getattr(value, "version", None) == version


class SlowBroker(Broker):
    """A broker that is waited for, as one at the other end of a connection is."""

    async def ask(self, command: Sequence[Any]) -> Any:
        await asyncio.sleep(0)
        return await super().ask(command)


class Program:
    """All roles in one process, on the loop of the trainer's client."""

    def __init__(self) -> None:
        self._client = _Loop()
        self.loop = self._client._loop
        self._ports = StandInFabric(broker=SlowBroker(SystemClock()))
        self._stop = asyncio.Event()
        self._engine = TransformersEngine(TransformersConfig(slot_count=2, seed=1))
        self._client.call(self._engine.start())
        self._roles = asyncio.run_coroutine_threadsafe(self._serve(), self.loop)
        fabric = Fabric(self._client, AsyncFabric(self._ports, "stand-in"), None)
        self.run: Run = fabric.run("r1", model="tiny", environment="frozenlake", turn_count_max=2)

    def model(self) -> dict[str, Any]:
        """Weights of the engine's architecture."""
        shapes = {spec.name: spec for spec in self._engine.layout.tensors}
        return {
            name: bits.view("float32").reshape(shapes[name].shape) for name, bits in self._engine.weight_bits().items()
        }

    def wait_until_live(self, version: int) -> None:
        """Return when the worker generates with it."""

        async def look() -> None:
            async with asyncio.timeout(120):
                while self._engine.stats().active_version < version:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)

        self._client.call(look())

    def close(self) -> None:
        async def end() -> None:
            self._stop.set()
            await asyncio.wrap_future(self._roles)
            await self._engine.close()

        self._client.call(end())
        self._client.close()

    async def _serve(self) -> None:
        async def ask_reward(*_: Any, **__: Any) -> None:
            raise AssertionError("the environment scores")

        ports, clock, engine = self._ports, SystemClock(), self._engine
        options = ReceiverOptions(poll_s=0.5, retry_s=0.1, retry_s_max=1.0)
        worker = RolloutWorker(
            ports,
            engine,
            RolloutConfig(worker_id="w", role="dedicated", model="tiny", slot_count=2),
            clock,
            make_receiver=lambda run_id: WeightReceiver(ports.weights, run_id, engine, options=options, clock=clock),
        )
        async with Registry() as registry, asyncio.TaskGroup() as roles:
            agent = AgentWorker(ports, registry, AgentConfig(worker_id="a"), clock, ask_reward=ask_reward)
            controller = Controller(ports.board, ControllerConfig(worker_id="c"), clock)
            for role in (controller, agent, worker):
                roles.create_task(role.run(self._stop))  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def program() -> Iterator[Program]:
    made = Program()
    made.run.publish(made.model(), version=0)
    made.wait_until_live(0)
    yield made
    made.close()


def walk_of_trajectory(program: Program, group_id: str) -> Walk:
    walk = Walk(is_of_trajectory)
    with walk.following(program.loop):
        program.run.submit([{"seed": 1}], group_ids=[group_id])
        with program.run.groups(count=1, timeout=120) as groups:
            (group,) = groups
    assert group.group_id == group_id
    assert [rollout.turn_count for rollout in group.rollouts] == [2]
    return walk


def shown(walk: Walk) -> str:
    hands = [f"  {giver} → {taker}" for giver, taker in walk.hands]
    return "\n".join(["kept by:", *walk.files, "handed on:", *hands, "called with it, and returned:", *walk.helpers])


def test_a_trajectory_goes_through_eight_files_and_only_from_each_to_the_next(program: Program) -> None:
    walk = walk_of_trajectory(program, f"{GROUP_ID}-1")
    print(shown(walk))
    assert walk.files == TRAJECTORY_WALK
    assert walk.detours == []


def test_a_file_that_keeps_the_trajectory_on_its_way_is_found(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a program in which turns are asked for by way of a ninth file
    detour = "async def ask(*given):\n    await sleep(0)\n    return await ask_directly(*given)\n"
    names: dict[str, Any] = {"sleep": asyncio.sleep, "ask_directly": TurnCaller.ask}
    exec(compile(detour, rollout_worker.__file__, "exec"), names)
    monkeypatch.setattr(TurnCaller, "ask", names["ask"])
    # When a trajectory is walked through it; then the file is found, and that the walk leaves its line for it
    walk = walk_of_trajectory(program, f"{GROUP_ID}-2")
    assert set(walk.files) - set(TRAJECTORY_WALK) == {"workers/rollout/worker.py"}
    assert ("workers/rollout/worker.py", "workers/agent/episode.py") in walk.hands
    assert walk.detours != []


def test_a_function_that_only_looks_at_the_trajectory_is_no_part_of_the_walk(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a program in which another file is asked about each turn, and answers at once
    glance = "def ask(self, claim, job, files):\n    look(job)\n    return ask_directly(self, claim, job, files)\n"
    names: dict[str, Any] = {"look": lambda job: job.turn_id, "ask_directly": TurnCaller.ask}
    exec(compile(glance, rollout_worker.__file__, "exec"), names)
    monkeypatch.setattr(TurnCaller, "ask", names["ask"])
    # Then that file is listed among the helpers
    walk = walk_of_trajectory(program, f"{GROUP_ID}-3")
    assert walk.files == TRAJECTORY_WALK
    assert "workers/rollout/worker.py" in walk.helpers


def walk_of_version(program: Program, version: int) -> Walk:
    walk = Walk(lambda value: is_of_version(value, version))
    with walk.following(program.loop):
        program.run.publish(program.model(), version=version)
        program.wait_until_live(version)
    print(shown(walk))
    return walk


def way_back(walk: Walk) -> list[tuple[str, str]]:
    """Where a version is handed back, but for what a file answers to the next one, which asked it."""
    place = {name: index for index, name in enumerate(VERSION_WALK)}
    return [(a, b) for a, b in walk.hands if place.get(b, -1) < place.get(a, 99) - 1]


def test_a_version_of_the_weights_goes_through_eleven_files_and_never_back(program: Program) -> None:
    walk = walk_of_version(program, 1)
    assert set(walk.files) <= set(VERSION_WALK)
    assert {VERSION_WALK[0], "fabric/versions/store.py", *VERSION_WALK[-3:]} <= set(walk.files)
    assert way_back(walk) == []


def test_a_file_that_hands_a_version_back_is_found(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a program in which the receiver stages by way of a function of the publisher's
    back = "async def stage(receiver, head):\n    await sleep(0)\n    return await stage_directly(receiver, head)\n"
    names: dict[str, Any] = {"sleep": asyncio.sleep, "stage_directly": WeightReceiver._stage}
    exec(compile(back, publisher.__file__, "exec"), names)
    monkeypatch.setattr(WeightReceiver, "_stage", names["stage"])
    # Then that is found
    walk = walk_of_version(program, 2)
    assert way_back(walk) != []
