"""The two arms of `rollfab bench overhead`: an engine fed directly, and the same engine at the end of a whole fabric.

- Both make the same tokens: as many trajectories at once, of as many turns, with prompts of the same lengths, from the
  same weights, in as many slots. No turn ends early, so the counts are equal, and they are checked.
- The fabric arm is what users run: a broker, a controller, an agent and a worker, each a process of its own.
- Its processes live, idle, while the engine alone is measured, and the other way round.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from rollfab.deploy.cli.options import with_ports
from rollfab.deploy.local.supervisor import Supervisor
from rollfab.fabric.broker.embedded import EmbeddedBroker
from rollfab.fabric.contract.errors import EnvironmentUnknown, FabricError
from rollfab.fabric.contract.records import Group, Int32, Sampling, WorkerInfo
from rollfab.fabric.model.tokenizer import CharTokenizer
from rollfab.fabric.tracing.export import COLLECTOR
from rollfab.trainer.client import Fabric, Run, connect
from rollfab.workers.engines.base import GenerationRequest
from rollfab.workers.engines.transformers.engine import TransformersConfig, TransformersEngine
from tests.bench.measure import process_cpu_s

from ..worlds import observation

SLOT_COUNT = 64
CONTEXT_TOKENS = 512
SEED = 7  # of sampling; weights come from the preset
GROUP_SIZE = 8
START_TIMEOUT_S = 120.0  # importing torch on a busy machine
GROUP_TIMEOUT_S = 120.0  # for all groups of a round: something is broken
LOOK_S = 5.0  # without a group: is everybody still there?
METRONOME = "metronome=tests.bench.worlds:Metronome"

Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What every trajectory does; all are in flight at once."""

    name: str
    model: str
    trajectory_count: int
    turn_count: int
    completion_tokens: int
    observation_tokens: int

    @property
    def turns(self) -> int:
        """Turns of one round."""
        return self.trajectory_count * self.turn_count

    @property
    def tokens(self) -> int:
        """Tokens generated in one round."""
        return GROUP_SIZE * self.turn_count * sum(self.lengths)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each turn, by group."""
        return [self.completion_tokens] * (self.trajectory_count // GROUP_SIZE)

    def tasks(self) -> list[dict[str, Any]]:
        """What the metronome is asked for, by group."""
        return [{"seed": index} for index in range(self.trajectory_count // GROUP_SIZE)]


@dataclass(frozen=True, kw_only=True)
class Round:
    """One round of one arm. cpu_s: CPU seconds by process, as far as the system says. groups: that a fabric made."""

    duration_s: float
    token_count: int
    cpu_s: dict[str, float] = field(default_factory=dict)
    groups: Sequence[Group] = ()


class EngineAlone:
    """The engine in this process, fed by the least code that can feed it."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._runner = asyncio.Runner()
        self._engine = TransformersEngine(
            TransformersConfig(
                model=workload.model, slot_count=SLOT_COUNT, context_tokens_max=CONTEXT_TOKENS, seed=SEED
            )
        )
        self._observation = CharTokenizer().encode(observation(workload.observation_tokens))
        self._sampling = Sampling(temperature=1.0, max_tokens=workload.completion_tokens)

    def __enter__(self) -> EngineAlone:
        self._runner.run(self._engine.start())
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.run(self._engine.close())
        self._runner.close()

    def weights(self) -> Arrays:
        """The engine's own weights, to be published for the other arm."""
        bits, layout = self._engine.weight_bits(), self._engine.layout
        return {each.name: bits[each.name].view(each.dtype).reshape(each.shape) for each in layout.tensors}

    def round(self) -> Round:
        """All trajectories from start to end."""
        cpu_s, start_s = time.process_time(), time.perf_counter()
        token_count = self._runner.run(self._feed())
        duration_s = time.perf_counter() - start_s
        return Round(duration_s=duration_s, token_count=token_count, cpu_s={"engine": time.process_time() - cpu_s})

    async def _feed(self) -> int:
        contexts = [self._observation] * self._workload.trajectory_count
        turn_counts = [0] * self._workload.trajectory_count
        token_count, open_count = 0, self._workload.trajectory_count
        for index, context in enumerate(contexts):
            self._ask(index, context)
        while open_count:
            for generation in await self._engine.finished(1.0):
                index = int(generation.request_id)
                token_count += len(generation.completion_ids)
                turn_counts[index] += 1
                if turn_counts[index] == self._workload.turn_count:
                    open_count -= 1
                    continue
                contexts[index] = np.concatenate((contexts[index], generation.completion_ids, self._observation))
                self._ask(index, contexts[index])
        return token_count

    def _ask(self, index: int, context: Int32) -> None:
        self._engine.generate(GenerationRequest(request_id=str(index), prompt_ids=context, sampling=self._sampling))


class WholeFabric:
    """The engine in a worker process, reached through everything."""

    def __init__(
        self,
        workload: Workload,
        weights: Arrays,
        engine: Sequence[str] = (),
        *,
        worker_count: int = 1,
        run_options: Mapping[str, Any] = MappingProxyType({}),
        collector: str = "",
        sampler: str = "",
        settle_s: float = 0,
        place_count: int | None = None,
        worker: Sequence[str] = (),
        workers: Mapping[str, Sequence[str]] = MappingProxyType({}),
        agent: Sequence[str] = ("agent",),
    ) -> None:
        """Make it, not started.

        Args:
            engine: words for `rollfab worker`, which come last.
            worker_count: of several, each computes on one core.
            run_options: settings of the run.
            collector: takes the traces of all roles; "": there are none.
            sampler: which groups are traced, as OTEL_TRACES_SAMPLER has it.
            settle_s: how long a round waits when its time was taken, so that what it left to do is in its CPU seconds,
                and not in the next arm's.
            place_count: environments at once; None: one for each trajectory.
            worker: the command of a rollout worker of another kind, whole.
            workers: such commands by the worker's name, where they are not alike.
            agent: the command of an agent of another kind; an agent's words come behind it.
        """
        self._workload = workload
        self._weights = weights
        self._run_options = run_options
        self._collector = collector
        self._sampler = sampler
        self._settle_s = settle_s
        self._place_count = place_count or workload.trajectory_count
        own = ["worker", "--model", workload.model, "--slots", str(SLOT_COUNT), "--context", str(CONTEXT_TOKENS)]
        words = list(worker) or [*own, "--seed", str(SEED), *engine]
        alike = {f"worker-{index}" if index else "worker": words for index in range(worker_count)}
        self._workers = workers or alike
        self._agent = agent
        self._stack = ExitStack()
        self._version = 0

    def __enter__(self) -> Self:
        try:
            directory = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="rollfab-bench-")))
            self._broker = self._stack.enter_context(EmbeddedBroker.start(directory / "broker"))
            self._supervisor = self._stack.enter_context(Supervisor(directory / "logs"))
            self._start_roles()
            with _variable(COLLECTOR, self._collector), _variable("OTEL_TRACES_SAMPLER", self._sampler):
                fabric = self._stack.enter_context(connect(self._broker.url))
            self._run = self._open_run(fabric)
            self._run.publish(self._weights, version=self._version)
            self._await_workers()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _start_roles(self) -> None:
        place = {"ROLLFAB_URL": self._broker.url, COLLECTOR: self._collector}
        for role, words in {
            "controller": ["controller"],
            "agent": [*self._agent, "--environment", METRONOME, "--count", str(self._place_count)],
        }.items():
            self._supervisor.add(role, words, is_restarted=False, environment=place)
        threads = {"OMP_NUM_THREADS": "1"} if len(self._workers) > 1 else {}
        for name, command in self._workers.items():
            self._supervisor.add(name, command, is_restarted=False, environment={**place, **threads})

    def _open_run(self, fabric: Fabric) -> Run:
        workload = self._workload
        options = {
            "turn_count": workload.turn_count,
            "completion_tokens": workload.completion_tokens,
            "observation_tokens": workload.observation_tokens,
        }
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                return fabric.run(
                    "overhead",
                    model=workload.model,
                    environment="metronome",
                    environment_options=options,
                    **self._run_options,
                )
            except EnvironmentUnknown:  # no agent is up yet
                self._check_alive()
                if time.monotonic() >= deadline_s:
                    raise

    def _await_workers(self) -> None:
        """Wait until every worker is there: some engines take long to start.

        Raises:
            FabricError: a process has ended, or they are not there in time.
        """
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while len(self._run_workers()) < len(self._workers):
            self._check_alive()
            if time.monotonic() >= deadline_s:
                raise FabricError(f"not all of {', '.join(self._workers)} started within {START_TIMEOUT_S:g} s")
            time.sleep(0.2)

    def _run_workers(self) -> list[WorkerInfo]:
        found = with_ports(self._broker.url, lambda ports: ports.board.workers())
        return [info for info, _ in found.values() if info.role in ("dedicated", "serving")]

    @property
    def the_run(self) -> Run:
        """The run, for a bench that asks otherwise than `ask`."""
        return self._run

    @property
    def url(self) -> str:
        """The broker's."""
        return self._broker.url

    def publish(self) -> None:
        """Publish the same weights as the next version."""
        self._version += 1
        self._run.publish(self._weights, version=self._version)

    def _check_alive(self) -> None:
        for name, child in self._supervisor.children.items():
            if not child.is_running:
                raise FabricError(f"the {name} of the bench has ended, its last lines: {child.tail()}")

    def round(self) -> Round:
        """All trajectories from their submission until the last group is received."""
        cpu_s = self._cpu_s()
        groups, duration_s = self.timed(self._workload.tasks())
        time.sleep(self._settle_s)
        used_s = {name: used - cpu_s[name] for name, used in self._cpu_s().items()}
        count = count_tokens(groups, self._workload)
        return Round(duration_s=duration_s, token_count=count, cpu_s=used_s, groups=groups)

    def timed(self, tasks: Sequence[dict[str, Any]], group_size: int = GROUP_SIZE) -> tuple[list[Group], float]:
        """A group for each task, and how long all of them took, in seconds."""
        start_s = time.perf_counter()
        groups = self.ask(tasks, group_size=group_size)
        return groups, time.perf_counter() - start_s

    def ask(
        self, tasks: Sequence[dict[str, Any]], timeout_s: float = GROUP_TIMEOUT_S, *, group_size: int = GROUP_SIZE
    ) -> list[Group]:
        """A group for each task, in the order of the tasks; what does not come in time is missing.

        Raises:
            FabricError: a process has ended.
        """
        order = {name: index for index, name in enumerate(self._run.submit(tasks, group_size=group_size))}
        groups: list[Group] = []
        deadline_s = time.monotonic() + timeout_s
        while len(groups) < len(tasks) and time.monotonic() < deadline_s:
            groups += self._run.groups(timeout=LOOK_S, count=len(tasks) - len(groups))
            self._check_alive()
        return sorted(groups, key=lambda group: order[group.group_id])

    def _cpu_s(self) -> dict[str, float]:
        pids = {name: child.pid for name, child in self._supervisor.children.items()}
        found = {name: process_cpu_s(pid) for name, pid in {**pids, "broker": self._broker.pid}.items() if pid}
        return {**found, "trainer": time.process_time()}


@contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    """Have a variable of this process' environment at a value, for as long as the block runs."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def count_tokens(groups: Sequence[Group], workload: Workload) -> int:
    """Tokens that the policy made.

    Raises:
        FabricError: this was not the same work as the other arm's, so there is nothing to compare.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    counts = [int(rollout.completion_mask.sum()) for rollout in rollouts]
    expected = sorted(workload.turn_count * length for length in workload.lengths for _ in range(GROUP_SIZE))
    if sorted(counts) != expected:
        failure_count = sum(len(group.failures) for group in groups)
        raise FabricError(
            f"{len(rollouts)} rollouts of {sorted(set(counts))} tokens and {failure_count} dead letters came back, not"
            f" {len(expected)} rollouts of {sorted(set(expected))} tokens: both arms must do the same work"
        )
    return sum(counts)
