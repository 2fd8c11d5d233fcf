"""`rollfab bench sharing`: runs that share two workers by weight, with real engines: who waits how long, who has what.

All runs have work all the time. In most cases each has weights of its own, so a worker that changes hands fetches those
first. Every run's tokens are looked at from outside. A *fair turn* is how long it takes until everybody has had slices
by weight, and this run one of its own; slices are as long as the slowest switch seen asks for (decision 80). With
perfect turns a run waits for all others' slices; that is the floor.

In the last case all have the same weights, and one engine serves them at once: nobody has to wait for a slice.

Exit code 1 when a run waited for longer than three fair turns, or was never served.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rollfab.deploy.cli.options import with_ports
from rollfab.deploy.local.supervisor import Supervisor
from rollfab.deploy.replay.figures import Report, show
from rollfab.fabric.broker.embedded import EmbeddedBroker
from rollfab.fabric.contract.errors import EnvironmentUnknown, FabricError
from rollfab.fabric.rules.lending.capacity_facts import CapacityRule
from rollfab.fabric.rules.lending.division import slice_of
from rollfab.trainer.client import Fabric, Run, connect
from tests.bench.lively import lively_weights

from ..overhead.arms import METRONOME, START_TIMEOUT_S

GOAL = 3.0  # fair turns, at most
MODEL, SLOT_COUNT, STEP_S, TOKENS = "tiny", 8, 0.1, 10  # a turn takes a second
GROUP_SIZE, GROUP_COUNT = 8, 4  # a submission: work for some seconds of both workers
LOOK_S = 0.5
CASE_S_MAX = 1800.0  # on a machine so busy that slices are minutes


@dataclass(frozen=True, kw_only=True)
class Settings:
    """cases: of runs with weights of their own, the runs' shares. alike: the same, of runs with the same weights.
    turn_count: fair turns of the lightest run, for which is measured; where all are alike, one."""

    cases: tuple[tuple[float, ...], ...]
    alike: tuple[float, ...]
    turn_count: float
    worker_count: int = 2


FULL = Settings(cases=((1.0,) * 20, (2.0, 2.0, 1.0, 1.0, 0.5), (1.0, 1.0, 0.1)), alike=(1.0,) * 20, turn_count=5.0)
QUICK = Settings(cases=((2.0, 1.0, 1.0),), alike=(2.0, 1.0, 1.0), turn_count=2.0)


def measure(settings: Settings) -> Report:
    """Measure every case.

    Raises:
        FabricError: a process of the fabric has ended.
    """
    rows = [_measure_case(weights, settings, is_alike=False) for weights in settings.cases]
    rows.append(_measure_case(settings.alike, settings, is_alike=True))
    return Report(
        name="sharing",
        params={"settings": asdict(settings), "goal_fair_turns": GOAL},
        results={"rows": rows, "longest_wait_fair_turns": max(row["longest_wait_fair_turns"] for row in rows)},
        baselines={"floor_fair_turns": [row["floor_fair_turns"] for row in rows]},
        ratio={
            "floor": rows[0]["longest_wait_fair_turns"] / rows[0]["floor_fair_turns"],
            "wait_alike": rows[0]["longest_wait_s"] / rows[-1]["longest_wait_s"],
            "tokens_alike": rows[-1]["tokens_per_s"] / rows[0]["tokens_per_s"],
        },
    )


def faults(report: Report) -> list[str]:
    """Name what was promised and not kept."""
    rows = report.results["rows"]
    late = [row["longest_wait_fair_turns"] for row in rows if row["longest_wait_fair_turns"] > GOAL]
    idle = sum(token_count == 0 for row in rows for token_count in row["tokens"])
    return [f"a run waited {wait:.1f} fair turns, {GOAL:.0f} are promised" for wait in late] + (
        [f"{idle} runs were never served"] if idle else []
    )


def fair_turns_s(weights: Sequence[float], worker_count: int, *, switch_s: float = 0.0) -> list[float]:
    """Compute each run's fair turn in seconds. switch_s: what a worker needs to go to another run."""
    slice_s = slice_of(switch_s, CapacityRule())
    return [slice_s * sum(weights) / (weight * worker_count) for weight in weights]


def _measure_case(weights: Sequence[float], settings: Settings, *, is_alike: bool) -> dict[str, Any]:
    turn_count = 1.0 if is_alike else settings.turn_count
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rollfab-bench-")))
        broker = stack.enter_context(EmbeddedBroker.start(directory / "broker"))
        supervisor = stack.enter_context(Supervisor(directory / "logs"))
        _start(supervisor, broker.url, len(weights), settings.worker_count)
        fabric = stack.enter_context(connect(broker.url))
        runs = [
            _open(fabric, supervisor, f"run-{index}", weight, 0 if is_alike else index)
            for index, weight in enumerate(weights)
        ]
        looks = _looks(
            runs,
            supervisor,
            broker.url,
            lambda switch_s: turn_count * max(fair_turns_s(weights, settings.worker_count, switch_s=switch_s)),
        )
    switch_s = max(look.switch_s for look in looks)
    turns_s = fair_turns_s(weights, settings.worker_count, switch_s=switch_s)
    tokens = [looks[-1].tokens[run.run_id] - looks[0].tokens[run.run_id] for run in runs]
    seconds = looks[-1].at_s - looks[0].at_s
    waits = [wait / turn_s for wait, turn_s in zip(waits_s(looks), turns_s, strict=True)]
    return {
        "weights": list(weights),
        "is_alike": is_alike,
        "seconds": seconds,
        "switch_s": switch_s,
        "tokens": tokens,
        "tokens_per_s": sum(tokens) / seconds,
        "of_tokens": [
            count / (sum(tokens) * weight / sum(weights)) for count, weight in zip(tokens, weights, strict=True)
        ],
        "longest_wait_s": max(waits_s(looks)),
        "longest_wait_fair_turns": max(waits),
        "floor_fair_turns": max(0 if is_alike else 1 - settings.worker_count * each / sum(weights) for each in weights),
    }


def _start(supervisor: Supervisor, url: str, run_count: int, worker_count: int) -> None:
    place = {"ROLLFAB_URL": url}
    places = str(run_count * SLOT_COUNT * worker_count)
    roles = {"controller": ["controller"], "agent": ["agent", "--environment", METRONOME, "--count", places]}
    paced = ["bench", "paced", "--slots", str(SLOT_COUNT), "--context", "512", "--step", str(STEP_S)]
    for name, words in (roles | {f"worker-{index}": paced for index in range(worker_count)}).items():
        supervisor.add(name, words, is_restarted=False, environment={**place, "OMP_NUM_THREADS": "1"})


def _open(fabric: Fabric, supervisor: Supervisor, name: str, weight: float, number: int) -> Run:
    """Begin a run whose model's weights are those of this number."""
    model = {name: each * np.float32(1 + number / 100) for name, each in lively_weights(MODEL).items()}
    options = {"turn_count": 1, "completion_tokens": TOKENS, "observation_tokens": 4}
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            run = fabric.run(name, model=MODEL, environment="metronome", environment_options=options, weight=weight)
        except EnvironmentUnknown:  # no agent is up yet
            _check_alive(supervisor)
            if time.monotonic() >= deadline_s:
                raise
        else:
            run.publish(model, version=0)
            return run


class Look(NamedTuple):
    """tokens: that each run has. switch_s: what the slowest worker's last switch took."""

    at_s: float
    tokens: Mapping[str, int]
    switch_s: float = 0.0


def _looks(
    runs: Sequence[Run], supervisor: Supervisor, url: str, duration_s: Callable[[float], float]
) -> Sequence[Look]:
    """Keep all runs at work, and look from when one has been served; for how long hangs on what switches take."""
    open_counts: defaultdict[str, int] = defaultdict(int)
    found: list[Look] = []
    while len(found) < 2 or found[-1].at_s < found[0].at_s + _bounded(duration_s, found):
        _check_alive(supervisor)
        for run in runs:
            open_counts[run.run_id] -= sum(1 for _ in run.groups(timeout=0.01, count=100))
            if open_counts[run.run_id] < GROUP_COUNT:
                open_counts[run.run_id] += len(run.submit([{} for _ in range(GROUP_COUNT)], group_size=GROUP_SIZE))
        survey = with_ports(url, lambda ports: ports.board.survey())
        tokens = {run.run_id: int(survey.runs[run.run_id].counters.get("tokens", 0)) for run in runs}
        switch_ms = max((info.switch_ms or 0 for info, _ in survey.workers.values()), default=0)
        if any(tokens.values()):
            found.append(Look(time.monotonic(), tokens, switch_ms / 1000))
        time.sleep(LOOK_S)
    return found


def _bounded(duration_s: Callable[[float], float], looks: Sequence[Look]) -> float:
    return min(CASE_S_MAX, duration_s(max(look.switch_s for look in looks)))


def waits_s(looks: Sequence[Look]) -> list[float]:
    """Return how long each run was without a new token, at most."""
    found = []
    for name in looks[0].tokens:
        since_s, count, longest_s = looks[0].at_s, looks[0].tokens[name], 0.0
        for now_s, tokens, _ in looks:
            longest_s = max(longest_s, now_s - since_s)
            if tokens[name] > count:
                since_s, count = now_s, tokens[name]
        found.append(longest_s)
    return found


def _check_alive(supervisor: Supervisor) -> None:
    for name, child in supervisor.children.items():
        if not child.is_running:
            raise FabricError(f"the {name} of the bench has ended, its last lines: {child.tail()}")


def print_table(report: Report) -> None:
    found = json.loads(report.json())
    rows = []
    for row in found["results"]["rows"]:
        low, high = min(row["of_tokens"]), max(row["of_tokens"])
        wait = f"{row['longest_wait_fair_turns']:.2f} ({row['longest_wait_s']:.0f} s)"
        weights = row["weights"]
        name = f"{len(weights)} runs{' of one model' if row['is_alike'] else ''}, {min(weights):g} to {max(weights):g}"
        pace, floor = f"{row['tokens_per_s']:.0f}", f"{row['floor_fair_turns']:.2f}"
        rows.append([name, f"{low:.2f} to {high:.2f}", pace, wait, floor])
    columns = ["", "tokens over its weight's part", "tokens/s", "longest wait, fair turns", "floor"]
    show("rollfab bench sharing", columns, rows, [f"goal: at most {GOAL:.0f}; machine: {found['machine']}"])
