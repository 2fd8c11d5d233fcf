"""Which serving GPUs are worth borrowing: a scenario, simulated with none of them lent, some, and all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ..cli.printing import Cell, Console, new_table
from ..cli.progress import progress
from .report import TAG, faster, figure
from .run import Run, capacity_of, simulate
from .scenario import Scenario

PARTS = (0.0, 0.25, 0.5, 0.75, 1.0)  # of the serving instances, lent
WORTH = 1.02  # a plan that is faster than a smaller one by less is not worth the GPUs
LOSS_MAX = 0.002  # of serving's attainment
ARM = "ours"


def plan(scenario: Scenario) -> dict[str, Any]:
    """Simulate; return a row per number of instances, and the one to choose. Every figure is simulated."""
    each, count = scenario.cluster.gpus_per_instance, scenario.instances[1]
    load, seeds = scenario.serving.loads[0], scenario.simulation.seeds
    lendings = sorted({round(part * count) for part in PARTS})
    rows: list[dict[str, Any]] = []
    alone: list[Run] = []
    with progress("simulating", unit="count", total=len(lendings) * len(seeds)) as tell:
        tell(0, None, f"finding what an instance can serve of {scenario.serving.trace}")
        capacity = capacity_of(scenario)
        for number, lent in enumerate(lendings):
            offered = replace(scenario, serving=replace(scenario.serving, offered=lent))
            runs: list[Run] = []
            for seed in seeds:
                how_far = partial(tell, number * len(seeds) + len(runs), None)
                runs.append(simulate(offered, ARM if lent else "fixed", load=load, seed=seed, tell=how_far))
            alone = alone or runs
            rows.append({"gpus_lent": lent * each, **_row(runs, alone)})
    said = {"tag": TAG, "scenario": scenario.name, "load": load, "capacity_per_s": capacity}
    return {**said, "rows": rows, "choice": choose(rows)["gpus_lent"]}


def _row(runs: Sequence[Run], alone: Sequence[Run]) -> dict[str, Any]:
    attained = [run.served.attained if run.served else 1.0 for run in runs]
    before = [run.served.attained if run.served else 1.0 for run in alone]
    return {
        "step_s": figure([run.step_s for run in runs]),
        "over_none": faster(runs, alone),
        "harvested_tokens": figure([run.harvested for run in runs]),
        "attained": figure(attained),
        "lost": sum(before) / len(before) - sum(attained) / len(attained),
    }


def choose(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the row that is worth it: each more GPU must make steps faster, and serving keep its promise."""
    best = rows[0]
    for row in rows[1:]:
        if row["lost"] <= LOSS_MAX and row["step_s"]["mean"] * WORTH < best["step_s"]["mean"]:
            best = row
    return best


def show_plan(found: dict[str, Any]) -> None:
    """Print the rows and the choice, within 80 columns."""
    table = new_table("GPUs lent", "step s", "x none", "in SLO %", title=f"{found['scenario']}: a plan, simulated")
    for row in found["rows"]:
        over, step = row["over_none"], row["step_s"]
        table.add_row(
            Cell(f"{row['gpus_lent']}{' <-' if row['gpus_lent'] == found['choice'] else ''}"),
            f"{step['mean']:.0f} ({step['low']:.0f} to {step['high']:.0f})",
            f"{over['mean']:.2f} ({over['low']:.2f} to {over['high']:.2f})",
            f"{100 * row['attained']['mean']:.2f}",
        )
    console, choice = Console(), found["choice"]
    console.print(table)
    said = f"Lend {choice} of them" if choice else "Borrow none: no number makes steps 2 % faster and keeps the SLO"
    load = f"Load {found['load']:g}: {found['load'] * found['capacity_per_s']:.3g} requests a second for each instance."
    console.print(f"{said}. {load} All figures are {TAG}.", highlight=False)
