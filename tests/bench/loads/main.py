"""`rollfab bench loads`: a simulated cluster under serving loads that no rule was tuned on.

- SHAPES are drawn from a seed: crowds, bursts, tides, long prompts, long answers. Other traces can be named instead.
- Each is brought to parts of what an instance can serve of it within the objectives, which is found first.
- Wrong is an arm of ours that misses an objective (P99 of TTFT or TPOT) which dedicated GPUs alone keep, or whose steps
  are slower than theirs.
- Every figure is simulated.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from rollfab.deploy.cli.progress import progress
from rollfab.deploy.replay.figures import Report, show
from rollfab.deploy.replay.traces import Part, read_trace
from rollfab.deploy.simulation.arms import ARMS
from rollfab.deploy.simulation.machine.capacity import Instance
from rollfab.deploy.simulation.report import TAG
from rollfab.deploy.simulation.run import Run, capacity_of, setup_of, simulate
from rollfab.deploy.simulation.scenario import ClusterPart, Scenario, ServingPart, TrainerPart, WorkPart
from rollfab.fabric.rules.serving.facts import Slo
from tests.bench.measure import run_bench

SPAN_S, RATE_PER_S = 3000.0, 6.0  # of a shape; both are changed to what an instance can serve
ALONE_FACTOR = 3.0  # TTFT's objective is 500 ms, or so many times what 99 of 100 requests take alone, if that is more
SLOWER_MAX = 1.02  # than dedicated GPUs alone
OURS = ("ours", "ours-advised")
CLUSTER = Scenario(
    name="loads",
    cluster=ClusterPart(dedicated=2, serving=4),
    work=WorkPart(kind="frozenlake", groups=8, group_size=16, steps=3),
    trainer=TrainerPart(train_s=60.0, transfer_s=2.0),
)


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much is simulated."""

    arms: Sequence[str]
    shapes: Sequence[str]
    loads: Sequence[float]
    seeds: Sequence[int]


QUICK = Size(arms=("fixed", "ours"), shapes=("crowds",), loads=(0.5,), seeds=(0,))


# ---- loads


def _even(dice: np.random.Generator, rate: Callable[[float], float]) -> Iterator[float]:
    """Draw the times of a Poisson process. rate: over the mean one, by time."""
    most, at_s = max(rate(each) for each in range(int(SPAN_S))), 0.0
    while (at_s := at_s + dice.exponential(1 / (most * RATE_PER_S))) < SPAN_S:
        if dice.random() * most < rate(at_s):
            yield at_s


def _bursts(dice: np.random.Generator) -> Iterator[float]:
    """Draw times whose gaps are of a Gamma: their variance is ten times that of even ones."""
    at_s = 0.0
    while (at_s := at_s + dice.gamma(0.1, 10 / RATE_PER_S)) < SPAN_S:
        yield at_s


def _times(shape: str, dice: np.random.Generator) -> Iterator[float]:
    if shape == "bursts":
        return _bursts(dice)
    rates: dict[str, Callable[[float], float]] = {
        "crowds": lambda at_s: 8.0 if at_s % 300 < 20 else 0.5,  # 16 times as many, for 20 s in 300
        "on and off": lambda at_s: 3.7 if at_s % 40 < 10 else 0.1,
        "tides": lambda at_s: 1 + 0.8 * math.sin(2 * math.pi * at_s / 1000),
    }
    return _even(dice, rates.get(shape, lambda at_s: 1.0))


LENGTHS = {  # medians of prompts and answers, and their log-deviations
    "long prompts": (4000, 0.6, 150, 0.5),
    "long answers": (200, 0.8, 900, 0.9),
}
SHAPES = ("crowds", "on and off", "bursts", "tides", *LENGTHS)
FULL = Size(
    arms=("fixed", "static", "rose", "elastic", *OURS, "ours-tails"),
    shapes=SHAPES,
    loads=(0.25, 0.5, 0.75),
    seeds=(0,),
)


def write_shape(shape: str, path: Path, seed: int = 0) -> Path:
    """Draw a load, and write it as a trace."""
    dice = np.random.default_rng((seed, SHAPES.index(shape)))
    prompt, prompt_log, answer, answer_log = LENGTHS.get(shape, (900, 1.0, 130, 1.0))
    rows = ["t_s,input_tokens,output_tokens"]
    for at_s in _times(shape, dice):
        prompt_tokens = round(min(12_000, max(10, prompt * math.exp(prompt_log * dice.normal()))))
        answer_tokens = round(min(6_000, max(1, answer * math.exp(answer_log * dice.normal()))))
        rows.append(f"{at_s:.4f},{prompt_tokens},{answer_tokens}")
    path.write_text("\n".join(rows) + "\n")
    return path


def under(trace: Path) -> Scenario:
    """Return the cluster under a trace, with objectives that its requests can keep."""
    given = replace(CLUSTER, serving=ServingPart(trace=str(trace), capacity_per_s=1.0))
    setup = setup_of(given, ARMS["fixed"], 0.01, 0)
    slo = Slo(ttft_ms=setup.ttft_ms, tpot_ms=setup.tpot_ms)
    instance = Instance(cost=setup.serving.cost, kv_tokens=setup.kv_serving, slo=slo)
    alone = instance.alone(read_trace(str(trace), Part()).arrivals)
    ttft_ms = max(slo.ttft_ms, ALONE_FACTOR * alone.ttft_ms_p99 if alone else 0.0)
    return replace(given, serving=replace(given.serving, capacity_per_s=0.0, ttft_ms=float(round(ttft_ms))))


# ---- what comes out


def bench_loads(*, quick: bool, json_output: bool, traces: Sequence[Path]) -> int:
    """Run the bench; returns the exit code."""
    return run_bench(
        lambda: measure(QUICK if quick else FULL, traces), print_table, json_output=json_output, faults=faults
    )


def measure(size: Size, traces: Sequence[Path] = ()) -> Report:
    """Simulate every arm under every load. traces: in place of shapes."""
    rows: list[dict[str, Any]] = []
    with TemporaryDirectory() as directory:
        found = {path.name: path for path in traces} or {
            shape: write_shape(shape, Path(directory) / f"{shape}.csv") for shape in size.shapes
        }
        with progress("simulating", unit="count", total=len(found) * len(size.loads) * len(size.seeds)) as tell:
            for name, path in found.items():
                scenario = under(path)
                for load in size.loads:
                    for seed in size.seeds:
                        tell(len(rows) // len(size.arms), None, f"{name}, load {load:g}")
                        rows += _rows(scenario, size.arms, name, load, seed)
    return Report(
        name="loads",
        params={"tag": TAG, "arms": list(size.arms), "loads": list(size.loads), "seeds": list(size.seeds)},
        results={"tag": TAG, "arms": {arm: summed([row for row in rows if row["arm"] == arm]) for arm in size.arms}},
        baselines={"rows": rows},
        ratio={},
    )


def _rows(scenario: Scenario, arms: Sequence[str], name: str, load: float, seed: int) -> list[dict[str, Any]]:
    runs = [simulate(scenario, arm, load=load, seed=seed) for arm in arms]
    serving, fixed = scenario.serving, runs[0]
    where = {"trace": name, "load": load, "seed": seed, "capacity_per_s": capacity_of(scenario)}
    objectives = {"ttft_slo_ms": serving.ttft_ms, "tpot_slo_ms": serving.tpot_ms}
    return [
        {**where, **objectives, "arm": run.arm, "step_s": run.step_s, "over_fixed": fixed.step_s / run.step_s}
        | _served(run, serving, can_keep=not _missed(fixed, serving))
        for run in runs
    ]


def _served(run: Run, serving: ServingPart, *, can_keep: bool) -> dict[str, Any]:
    found = run.served
    if found is None:
        return {"missed": False}
    return {
        "attained": found.attained,
        "worst_minute": found.worst_minute,
        "ttft_ms_p99": found.ttft_ms_p99,
        "tpot_ms_p99": found.tpot_ms_p99,
        "missed": can_keep and _missed(run, serving),
    }


def _missed(run: Run, serving: ServingPart) -> bool:
    """Say whether a P99 is above its objective."""
    found = run.served
    return found is not None and (found.ttft_ms_p99 > serving.ttft_ms or found.tpot_ms_p99 > serving.tpot_ms)


def summed(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Sum up one arm: geometric means of how many times as fast as `fixed` steps are, and what serving missed."""
    loads = sorted({row["load"] for row in rows})

    def mean(rows: Sequence[dict[str, Any]]) -> float:
        return statistics.geometric_mean([row["over_fixed"] for row in rows])

    return {
        "over_fixed": mean(rows),
        "by_load": {f"{load:g}": mean([row for row in rows if row["load"] == load]) for load in loads},
        "slowest": min(row["over_fixed"] for row in rows),
        "attained_min": min(row.get("attained", 1.0) for row in rows),
        "missed": sum(row["missed"] for row in rows),
        "count": len(rows),
    }


def faults(report: Report) -> list[str]:
    """List where an arm of ours misses an objective that dedicated GPUs alone keep, or has slower steps than they."""
    said = []
    for row in report.baselines["rows"]:
        where = f"{row['trace']}, load {row['load']:g}, seed {row['seed']}, {row['arm']}"
        if row["arm"] in OURS and row["missed"]:
            tails = f"{row['ttft_ms_p99']:.0f} and {row['tpot_ms_p99']:.0f} ms"
            said.append(f"{where}: P99 {tails}, of {row['ttft_slo_ms']:g} and {row['tpot_slo_ms']:g}")
        if row["arm"] in OURS and row["over_fixed"] * SLOWER_MAX < 1:
            said.append(f"{where}: steps are {row['over_fixed']:.3f} times as fast as on dedicated GPUs alone")
    return said


def print_table(report: Report) -> None:
    found = report.results["arms"]
    loads = list(next(iter(found.values()))["by_load"])
    rows = [
        [
            arm,
            f"{row['over_fixed']:.2f}",
            *(f"{row['by_load'][load]:.2f}" for load in loads),
            f"{row['slowest']:.2f}",
            f"{100 * row['attained_min']:.2f}",
            f"{row['missed']} of {row['count']}",
        ]
        for arm, row in found.items()
    ]
    notes = [
        "x fixed: geometric mean over traces and seeds; least: of one of them. in SLO: least of one of them.",
        "P99 missed: of TTFT or TPOT, where dedicated GPUs alone keep both.",
    ]
    columns = ("arm", "x fixed", *(f"load {load}" for load in loads), "least", "in SLO %", "P99 missed")
    show(f"unknown loads: {TAG}", columns, rows, notes)
