"""The processes of the pair: a serving engine, a serving worker beside it that is lent, a dedicated worker, and the
fabric around them. Each is what a person would start.

- They are started once, and live through all arms; but the serving worker is told the objectives when it starts, so it
  starts again once they are calibrated, which is done beside it: it is there, and idle, also while serving is alone.
- What an engine did is read from its own page of shared memory: steps, and when the last of them ended.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import orjson

from rollfab.deploy.cli.options import with_ports
from rollfab.deploy.local.supervisor import Supervisor
from rollfab.fabric.broker.embedded import EmbeddedBroker
from rollfab.fabric.contract.errors import FabricError
from rollfab.fabric.contract.records import WorkerInfo
from rollfab.fabric.model.presets import is_preset
from rollfab.fabric.rules.serving.facts import Slo
from rollfab.workers.engines.vllm.step.scheduler_page import STEP_AT_NS, STEPS, SchedulerPage
from rollfab.workers.serving.wiring import lock_path_of

from ..engine.offline import write_checkpoint
from ..lively import lively_weights
from ..overhead.arms import METRONOME
from ..remote import Remote
from .demand import Demand
from .load import Client
from .places import check_machine, engine_pid, put
from .server import ON_CPU, ServingEngine

BORROWED, DEDICATED = "borrowed", "dedicated"
START_S = 240.0
STOP_S = 60.0
LOOK_S = 0.05
DEPTH = 10  # trajectories per slot: with fewer the controller does not lend where a worker is slow
PAGE_NAME = "rollfab-page"


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Of the pair. Slots: requests or turns that each engine runs at once; no dedicated slots: no dedicated worker.

    model: a preset, or a directory with a checkpoint; then `serving_model` is another, which serving loads. is_on_cpu:
    the device is a core (places.py). serving_words, rollout_words: vLLM's own. borrowed_words: of `bench lent`.
    """

    model: str = "small"
    serving_model: str = ""
    serving_slots: int = 64
    borrowed_slots: int = 32
    dedicated_slots: int = 16
    context_tokens: int = 512
    is_on_cpu: bool = True
    serving_words: tuple[str, ...] = ON_CPU
    rollout_words: tuple[str, ...] = ()
    borrowed_words: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Made:
    """Tokens that a worker has made by a moment, as its heartbeat said."""

    token_count: int
    at_s: float


class Pair:
    """All processes. Use as a context; everything it started has ended after it."""

    def __init__(self, sizes: Sizes, switch: Path) -> None:
        self.sizes = sizes
        self._switch = switch
        self._stack = ExitStack()
        self._cores = tuple(sorted(os.sched_getaffinity(0)))[:2]

    def __enter__(self) -> Self:
        check_machine()
        try:
            self._enter()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._stack.close()
        finally:
            for thread in os.listdir("/proc/self/task"):
                with suppress(ProcessLookupError):
                    os.sched_setaffinity(int(thread), self._cores)

    def _enter(self) -> None:
        sizes, enter = self.sizes, self._stack.enter_context
        self.directory = Path(enter(tempfile.TemporaryDirectory(prefix="rollfab-bench-")))
        self.probe = Path("/dev/shm") / f"rollfab-bench-{os.getpid()}"
        for path in (self.probe, lock_path_of(str(self.probe))):
            self._stack.callback(partial(path.unlink, missing_ok=True))
        weights, checkpoint = self._weights()
        self.broker = enter(EmbeddedBroker.start(self.directory / "broker"))
        self.supervisor = enter(Supervisor(self.directory / "logs"))
        self.serving = enter(
            ServingEngine(
                checkpoint,
                self.directory,
                slot_count=sizes.serving_slots,
                context_tokens=sizes.context_tokens,
                probe=self.probe,
                words=sizes.serving_words,
            )
        )
        slot_count = sizes.borrowed_slots + sizes.dedicated_slots
        self._add("controller", ["controller"])
        self._add("agent", ["agent", "--environment", METRONOME, "--count", str(2 * slot_count)])
        if sizes.dedicated_slots:
            self._add(DEDICATED, ["worker", *self._worker_words(DEDICATED, sizes.dedicated_slots)])
        self.demand = enter(Demand(self.broker.url, sizes.model, DEPTH * slot_count))
        self.demand.start(weights)
        self.client = enter(Remote("the client", self.directory / "client.log", Client, self.serving.url))
        self.client.ready(START_S)
        self.serving.ready()
        if sizes.dedicated_slots:
            self.until(lambda: self._is_ready(DEDICATED), START_S, "the dedicated worker to be ready")
        if sizes.is_on_cpu:
            self._place()

    def _weights(self) -> tuple[Any, Path]:
        """What is published, and where the checkpoint is that serving loads."""
        sizes = self.sizes
        if not is_preset(sizes.model):
            return sizes.model, Path(sizes.serving_model or sizes.model)
        weights = lively_weights(sizes.model)
        checkpoint = self.directory / "checkpoint"
        checkpoint.mkdir()
        write_checkpoint(sizes.model, weights, checkpoint)
        return weights, checkpoint

    def _add(self, name: str, words: list[str], **environment: str) -> None:
        environment = {"ROLLFAB_URL": self.broker.url, **environment}
        self.supervisor.add(name, words, is_restarted=False, environment=environment)

    def _worker_words(self, role: str, slot_count: int) -> list[str]:
        sizes = self.sizes
        words = ["--engine", "vllm", "--engine-log", "-", "--model", sizes.model, "--name", role]
        return [*words, "--slots", str(slot_count), "--context", str(sizes.context_tokens), *self._own_words()]

    def _own_words(self) -> list[str]:
        return ["--", *self.sizes.rollout_words] if self.sizes.rollout_words else []

    def _place(self) -> None:
        put(os.getpid(), "bench", self._cores)
        put(self.client.pid, "client", self._cores)
        put(self.broker.pid, "broker", self._cores)
        for role in ("controller", "agent"):
            put(self.pid(role), role, self._cores)
        self._place_engine("serving", self.serving.pid)
        if self.sizes.dedicated_slots:
            self._place_engine(DEDICATED, self.pid(DEDICATED))

    def _place_engine(self, role: str, pid: int) -> None:
        put(pid, f"{role} front", self._cores)
        put(engine_pid(pid), f"{role} engine", self._cores)

    # ---- the worker that is lent

    def borrow(self, slo: Slo) -> None:
        """Start the serving worker; it lends nothing until it is told to."""
        sizes = self.sizes
        words = ["--probe", str(self.probe), "--switch", str(self._switch), "--name", BORROWED, "--model", sizes.model]
        words += ["--slots", str(sizes.borrowed_slots), "--context", str(sizes.context_tokens)]
        words += ["--slo-ttft-ms", str(slo.ttft_ms), "--slo-tpot-ms", str(slo.tpot_ms)]
        self._add(BORROWED, ["bench", "lent", *words, *sizes.borrowed_words, *self._own_words()])
        self.until(lambda: self._is_known(BORROWED), START_S, "the serving worker to be known")
        if sizes.is_on_cpu:
            self._place_engine(BORROWED, self.pid(BORROWED))
        self.page = self._find_page(self.pid(BORROWED))

    def give_back(self) -> None:
        """End the lent worker, which is told the objectives once, when it starts."""
        process = self.supervisor.children.pop(BORROWED).process
        assert process is not None
        process.terminate()
        process.wait(STOP_S)
        self.until(lambda: not self._is_known(BORROWED), STOP_S, "the lent worker to have left")

    def lend(self, mode: str) -> None:
        """ "on", "off" or "observe": what the serving team says of it."""
        with_ports(self.broker.url, lambda ports: ports.board.set_lend(BORROWED, mode))

    def restart_controller(self) -> None:
        """After it was killed."""
        self._add("controller", ["controller"])
        if self.sizes.is_on_cpu:
            put(self.pid("controller"), "controller", self._cores)

    @staticmethod
    def _find_page(pid: int) -> SchedulerPage:
        for handle in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                if PAGE_NAME in os.readlink(handle):
                    return SchedulerPage(handle)
        raise FabricError(f"process {pid} has no page that limits a scheduler")

    def guard_text(self) -> dict[str, Any]:
        """What the guard of the lent engine said last: "view" and "sharing"."""
        for _ in range(100):
            text = self.page.said()
            if text is not None:
                said: dict[str, Any] = orjson.loads(text)
                return said
        return {}

    @property
    def step_count(self) -> int:
        """Steps that the lent engine has made."""
        return int(self.page.words[STEPS])

    @property
    def last_step_s(self) -> float:
        """When the last of them ended, by the monotonic clock."""
        return float(self.page.words[STEP_AT_NS]) / 1e9

    # ---- what is known

    def pid(self, role: str) -> int:
        """Of a role's process. Raises FabricError: it has ended."""
        pid = self.supervisor.children[role].pid
        if pid is None:
            raise FabricError(f"the {role} has ended, its last lines:\n{self.supervisor.children[role].tail()}")
        return pid

    def check(self) -> None:
        """Raises FabricError: somebody has ended."""
        self.demand.check()
        self.serving.check()
        for role in self.supervisor.children:
            self.pid(role)

    def made(self, role: str) -> Made:
        """What a worker said last."""
        now_s = time.monotonic()
        workers = with_ports(self.broker.url, lambda ports: ports.board.workers())
        info, age_ms = workers[role]
        return Made(token_count=info.token_count, at_s=now_s - age_ms / 1000)

    def final_count(self, roles: Sequence[str]) -> int:
        """Tokens that workers have made, all of them being idle."""
        asked_s = time.monotonic()
        self.until(lambda: all(self.made(role).at_s > asked_s for role in roles), START_S, "a heartbeat")
        return sum(self.made(role).token_count for role in roles)

    def info(self, role: str) -> WorkerInfo | None:
        """What a worker says of itself; None: it is not known."""
        found = with_ports(self.broker.url, lambda ports: ports.board.workers()).get(role)
        return found[0] if found else None

    def _is_known(self, role: str) -> bool:
        return self.info(role) is not None

    def _is_ready(self, role: str) -> bool:
        info = self.info(role)
        return info is not None and info.state == "ready" and info.token_count > 0

    def why_not(self) -> str:
        """What the controller and the guard say of the worker that is lent."""
        plan = with_ports(self.broker.url, lambda ports: ports.board.plan())
        reasons = [row.reason for row in plan.rows if row.worker_id == BORROWED] if plan is not None else []
        return (
            f"controller: {', '.join(reasons) or 'nothing'}; guard: {self.guard_text().get('view', {}).get('reason')}"
        )

    def until_it_steps(self, timeout_s: float) -> None:
        """Wait for the lent engine. Raises FabricError: it makes no step, and why."""
        step_count = self.step_count
        try:
            self.until(lambda: self.step_count > step_count, timeout_s, "the lent engine to step")
        except FabricError as error:
            raise FabricError(f"{error} ({self.why_not()})") from error

    def until(self, is_so: Callable[[], Any], timeout_s: float, what: str) -> None:
        """Wait for it. Raises FabricError: it does not come, or somebody has ended."""
        deadline_s = time.monotonic() + timeout_s
        while not is_so():
            self.check()
            if time.monotonic() > deadline_s:
                raise FabricError(f"the bench waited for {what}: it did not come in {timeout_s:.0f} s")
            time.sleep(LOOK_S)
