"""`rollfab bench evaluation`: what an evaluation beside training costs the training's groups, at equal capacity.

Both are fed all along, with twice as many trajectories as a worker has slots. Workers are paced (worker.py): a step
takes STEP_S, whatever else the machine does, so what is measured is who gets the slots, and not who gets the cores.
Arms, by turns, each for some seconds in which it has settled:

- `alone`: training, in a fabric with one worker.
- `elsewhere`: the same, while an evaluation runs in another fabric with a worker of its own. What it costs is the
  machine's: it is the floor, and near `alone` where the machine keeps the pace.
- `beside`: both in one fabric with two workers, as two runs of equal weight.

A delay is how much longer the mean group of training takes than in `elsewhere` of the same turn; reported is the median
of the turns. Whatever training loses to the scheduler beyond its half of the workers is in it.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rollfab.deploy.local.supervisor import Supervisor
from rollfab.deploy.replay.figures import Report, number, show
from rollfab.fabric.broker.embedded import EmbeddedBroker
from rollfab.fabric.contract.errors import EnvironmentUnknown, FabricError
from rollfab.trainer.client import Run, connect
from tests.bench.lively import lively_weights
from tests.bench.measure import Figure, alternate

METRONOME = "metronome=tests.bench.worlds:Metronome"
OPTIONS = {"turn_count": 2, "completion_tokens": 8, "observation_tokens": 16}
GROUP_SIZE, GROUPS_AHEAD = 4, 8  # 32 trajectories under way
SLOT_COUNT = 16  # of a worker
STEP_S = 0.08
START_S = 120.0
END_S = 60.0  # for what is under way at the end
LOOK_S = 0.5
GOAL = 0.02


@dataclass(frozen=True, kw_only=True)
class Settings:
    """settle_s: before each measurement of window_s."""

    round_count: int
    settle_s: float
    window_s: float


FULL = Settings(round_count=7, settle_s=5.0, window_s=45.0)
QUICK = Settings(round_count=1, settle_s=4.0, window_s=4.0)


class Feed:
    """A thread that keeps a run's groups under way, and notes when each came."""

    def __init__(self, url: str, name: str, *, is_evaluation: bool) -> None:
        self._url = url
        self._name = name
        self._is_evaluation = is_evaluation
        self._is_over = threading.Event()
        self.ended_s: list[float] = []
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name)
        self._thread.start()

    def stop(self) -> None:
        """Let what is under way come to its end, if it does."""
        self._left_s = time.monotonic() + END_S
        self._is_over.set()
        self._thread.join()

    def check(self) -> None:
        """Raise FabricError if it has failed."""
        if self.failure is not None:
            raise FabricError(f"the bench's {self._name} has failed: {self.failure}") from self.failure

    def _run(self) -> None:
        try:
            with connect(self._url) as fabric:
                open_run = fabric.evaluation if self._is_evaluation else fabric.run
                self._feed(open_run(self._name, weight=1.0))
        except BaseException as error:  # noqa: BLE001  raised by check, in the bench's own thread
            self.failure = error

    def _feed(self, run: Run) -> None:
        under_way = 0
        while not self._is_over.is_set() or (under_way and time.monotonic() < self._left_s):
            if not self._is_over.is_set() and under_way < GROUPS_AHEAD:
                tasks = [{"seed": index} for index in range(GROUPS_AHEAD - under_way)]
                under_way += len(run.submit(tasks, group_size=GROUP_SIZE))
            for _ in run.groups(timeout=LOOK_S, count=1):
                under_way -= 1
                self.ended_s.append(time.monotonic())


class House:
    """A fabric of its own with so many workers, and a run "train" with weights; use as a context."""

    def __init__(self, directory: Path, worker_count: int) -> None:
        self._directory = directory
        self._worker_count = worker_count
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> House:
        with contextlib.ExitStack() as stack:
            self.url = stack.enter_context(EmbeddedBroker.start(self._directory / "broker")).url
            self._supervisor = stack.enter_context(Supervisor(self._directory / "logs"))
            roles = {"controller": ["controller"], "agent": ["agent", "--environment", METRONOME, "--count", "128"]}
            for index in range(self._worker_count):
                roles[f"worker{index}"] = ["bench", "paced", "--slots", str(SLOT_COUNT), "--step", str(STEP_S)]
            for name, words in roles.items():
                self._supervisor.add(name, words, is_restarted=False, environment={"ROLLFAB_URL": self.url})
            fabric = stack.enter_context(connect(self.url))
            self._open(fabric).publish(lively_weights(), version=0)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _open(self, fabric: Any) -> Run:
        deadline_s = time.monotonic() + START_S
        while True:
            try:
                made: Run = fabric.run("train", model="tiny", environment="metronome", environment_options=OPTIONS)
                return made
            except EnvironmentUnknown:  # no agent is up yet
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(0.1)

    @contextlib.contextmanager
    def fed(self, *, is_evaluation: bool) -> Iterator[Feed]:
        """Feed the training, or its evaluation, while the context lasts."""
        feed = Feed(self.url, "train", is_evaluation=is_evaluation)
        try:
            yield feed
        finally:
            feed.stop()


@dataclass(frozen=True, kw_only=True)
class Round:
    """group_s: seconds for each group of training. evaluated_count: groups of the evaluation meanwhile."""

    group_s: float
    evaluated_count: int


class Stage:
    """The fabrics of all arms; use as a context."""

    def __init__(self, directory: Path, settings: Settings) -> None:
        self._settings = settings
        self._stack = contextlib.ExitStack()
        self._houses = {
            name: House(directory / name, count) for name, count in (("alone", 1), ("elsewhere", 1), ("beside", 2))
        }

    def __enter__(self) -> Stage:
        with contextlib.ExitStack() as stack:
            for house in self._houses.values():
                stack.enter_context(house)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def alone(self) -> Round:
        """Train."""
        return self._round("alone", None)

    def elsewhere(self) -> Round:
        """Train, and evaluate in another fabric."""
        return self._round("alone", "elsewhere")

    def beside(self) -> Round:
        """Train and evaluate in one."""
        return self._round("beside", "beside")

    def _round(self, training: str, evaluation: str | None) -> Round:
        with contextlib.ExitStack() as stack:
            feeds = [stack.enter_context(self._houses[training].fed(is_evaluation=False))]
            if evaluation is not None:
                feeds.append(stack.enter_context(self._houses[evaluation].fed(is_evaluation=True)))
            deadline_s = time.monotonic() + START_S
            while not all(each.ended_s for each in feeds):
                for each in feeds:
                    each.check()
                if time.monotonic() > deadline_s:
                    raise FabricError(f"no group came for {START_S:.0f} s")
                time.sleep(0.1)
            time.sleep(self._settings.settle_s)
            start_s = time.monotonic()
            time.sleep(self._settings.window_s)
            ended_s = [[moment_s for moment_s in each.ended_s if moment_s >= start_s] for each in feeds]
            for each in feeds:
                each.check()
        if len(set(ended_s[0])) < 2:
            raise FabricError(f"fewer than two groups of training came within {self._settings.window_s:.0f} s")
        return Round(group_s=seconds_a_group(ended_s[0]), evaluated_count=sum(map(len, ended_s[1:])))


def seconds_a_group(ended_s: Sequence[float]) -> float:
    """Fit a line through the moments at which groups came, in seconds, at least two of them different; its slope.

    Groups come in batches, as workers step in time: by a count, a window that begins or ends beside a batch is wrong by
    that batch. A line leans on every moment between, and is wrong by a part of it that falls with the window squared.
    """
    return statistics.linear_regression(range(len(ended_s)), ended_s).slope


def measure(settings: Settings) -> Report:
    """Measure all arms by turns.

    Raises:
        FabricError: a feed failed, or no group came.
    """
    with (
        tempfile.TemporaryDirectory(prefix="rollfab-evaluation-", ignore_cleanup_errors=True) as name,
        Stage(Path(name), settings) as stage,
    ):
        arms = {"alone": stage.alone, "elsewhere": stage.elsewhere, "beside": stage.beside}
        rounds = alternate(arms, settings.round_count)
    rows = {
        name: {
            "group_ms": _figure([1000 * each.group_s for each in found]),
            "evaluated_count": sum(each.evaluated_count for each in found),
        }
        for name, found in rounds.items()
    }
    delay = [
        ours.group_s / theirs.group_s - 1 for theirs, ours in zip(rounds["elsewhere"], rounds["beside"], strict=True)
    ]
    machine = [
        theirs.group_s / alone.group_s - 1 for alone, theirs in zip(rounds["alone"], rounds["elsewhere"], strict=True)
    ]
    results = {"delay": _figure(delay), "machine_delay": _figure(machine), "goal": GOAL, **rows}
    params = {"settings": asdict(settings), "group_size": GROUP_SIZE, "groups_ahead": GROUPS_AHEAD}
    params |= {"slot_count": SLOT_COUNT, "step_s": STEP_S, **OPTIONS}
    return Report(
        name="evaluation",
        params=params,
        results=results,
        baselines={"elsewhere": rows["elsewhere"]},
        ratio={"group": 1 + Figure(tuple(delay)).median},
    )


def _figure(values: list[float]) -> dict[str, Any]:
    figure = Figure(tuple(values))
    return {"median": figure.median, "spread": figure.spread}


def print_table(report: Report) -> None:
    found = json.loads(report.json())["results"]
    rows = []
    for name in ("alone", "elsewhere", "beside"):
        median, (low, high) = found[name]["group_ms"]["median"], found[name]["group_ms"]["spread"]
        rows.append([name, number(median), f"{number(low)} to {number(high)}", str(found[name]["evaluated_count"])])
    notes = []
    for key, what in (("delay", "beside, over elsewhere"), ("machine_delay", "elsewhere, over alone")):
        low, high = found[key]["spread"]
        notes.append(f"{what}: {found[key]['median']:+.1%} ({low:+.1%} to {high:+.1%})")
    notes.append(f"goal: at most {GOAL:+.0%} over elsewhere; machine: {report.machine}")
    columns = ["training", "ms a group", "rounds", "groups evaluated"]
    show("rollfab bench evaluation", columns, rows, notes)
