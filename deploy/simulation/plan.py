"""Which serving GPUs are worth borrowing, and when: a scenario, simulated with none of them lent, some, and all.

A trace rises and falls. It is cut into windows, whose loads are rounded up to a few levels. Each level is simulated,
and a window has what is worth it at its level.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, groupby
from typing import Any

from ..cli.printing import Cell, Console, new_table
from ..cli.progress import progress
from ..replay.figures import number
from ..replay.records import Arrival
from .report import TAG, faster, figure
from .run import Run, capacity_of, simulate, told_trace, trace_of
from .scenario import Scenario

PARTS = (0.0, 0.25, 0.5, 0.75, 1.0)  # of the serving instances, lent
WORTH = 1.02  # a plan that is faster than a smaller one by less is not worth the GPUs
LOSS_MAX = 0.002  # of serving's attainment
NONE, LENT, ADVISED = "fixed", "ours", "ours-advised"
WINDOW_S, WINDOW_COUNT_MAX = 600.0, 24
LEVEL_COUNT_MAX, LEVEL_STEP = 4, 0.05
FULL = 1.0  # at this load serving needs all that it has


@dataclass(frozen=True, kw_only=True)
class Window:
    """A part of a trace, in seconds of its own time, and its load."""

    from_s: float
    to_s: float
    load: float


def plan(scenario: Scenario) -> dict[str, Any]:
    """Simulate; return for each level a row per number of instances and the one to choose, and when to lend how many.

    Every figure is simulated.
    """
    mean, instances, seeds = scenario.serving.loads[0], scenario.instances[1], scenario.simulation.seeds
    lendings = sorted({round(part * instances) for part in PARTS})
    windows = windows_of(*trace_of(scenario), mean) if instances and mean else []
    levels = levels_of([each.load for each in windows] or [mean])
    done, most = count(), len(levels) * (len(lendings) + 1) * len(seeds)
    with progress("simulating", unit="count", total=most) as tell:

        def runs(arm: str, lent: int, load: float) -> list[Run]:
            offered = replace(scenario, serving=replace(scenario.serving, offered=lent))
            return [
                simulate(offered, arm, load=load, seed=seed, tell=partial(tell, next(done), most)) for seed in seeds
            ]

        found = [_level(load, lendings if load < FULL else lendings[:1], scenario, runs) for load in levels]
    said = {"tag": TAG, "scenario": scenario.name, "capacity_per_s": capacity_of(scenario)}
    said["trace"] = told_trace(scenario)
    return {**said, "levels": found, "when": list(_when(windows, found))}


def _level(
    load: float, lendings: Sequence[int], scenario: Scenario, runs: Callable[[str, int, float], list[Run]]
) -> dict[str, Any]:
    each, alone = scenario.cluster.gpus_per_instance, runs(NONE, 0, load)
    rows = [{"gpus_lent": lent * each, **_row(runs(LENT, lent, load) if lent else alone, alone)} for lent in lendings]
    best = choose(rows)["gpus_lent"]
    advised = _row(runs(ADVISED, best // each, load), alone) if best else None
    return {"load": load, "rows": rows, "choice": best, "advised": advised}


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


# ---- when


def windows_of(arrivals: Sequence[Arrival], span_s: float, mean: float) -> list[Window]:
    """Cut a trace into at most 24 windows of some ten minutes or more, with their loads. mean: of the whole."""
    number = max(1, min(WINDOW_COUNT_MAX, round(span_s / WINDOW_S)))
    width_s, counts = span_s / number, [0] * number
    for each in arrivals:
        counts[min(number - 1, int(each.at_s / width_s))] += 1
    usual = len(arrivals) / number
    return [
        Window(from_s=index * width_s, to_s=(index + 1) * width_s, load=mean * found / usual)
        for index, found in enumerate(counts)
    ]


def levels_of(loads: Sequence[float]) -> list[float]:
    """Return the few loads that stand for these: each is rounded up to one of them."""
    found = sorted({round(math.ceil(each / LEVEL_STEP - 1e-9) * LEVEL_STEP, 9) for each in loads})
    if len(found) <= LEVEL_COUNT_MAX:
        return found
    last = len(found) - 1
    return [found[math.ceil(last * (index + 1) / LEVEL_COUNT_MAX)] for index in range(LEVEL_COUNT_MAX)]


def _when(windows: Sequence[Window], levels: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Tell what is worth it from when to when; windows in a row that are of one level are one."""

    def level(window: Window) -> int:
        return next(index for index, each in enumerate(levels) if window.load <= each["load"] + 1e-9)

    for index, group in groupby(windows, level):
        those, found = list(group), levels[index]
        chosen = next(row for row in found["rows"] if row["gpus_lent"] == found["choice"])
        yield {
            "from_s": those[0].from_s,
            "to_s": those[-1].to_s,
            "load": found["load"],
            "gpus_lent": found["choice"],
            "step_s": chosen["step_s"]["mean"],
        }


def show_plan(found: dict[str, Any]) -> None:
    """Print the rows and the choice of each level, and when which one holds, within 80 columns."""
    console, capacity = Console(), found["capacity_per_s"]
    for level in found["levels"]:
        rate = f"{number(level['load'] * capacity)} requests/s each"
        title = f"{found['scenario']} simulated; load {level['load']:g}, {rate}"
        table = new_table("GPUs lent", "step s", "x none", "in SLO %", title=title)
        for row in level["rows"]:
            table.add_row(
                Cell(f"{row['gpus_lent']}{' <-' if row['gpus_lent'] == level['choice'] else ''}"), *_cells(row)
            )
        if level["advised"]:
            table.add_row(Cell(f"{level['choice']}, advised"), *_cells(level["advised"]))
        console.print(table)
    if len(found["when"]) > 1:
        table = new_table("of the trace", "load", "GPUs to lend", "step s", title="when, simulated")
        for each in found["when"]:
            span = f"{_clock(each['from_s'])} to {_clock(each['to_s'])}"
            table.add_row(Cell(span), f"{each['load']:g}", f"{each['gpus_lent']}", f"{each['step_s']:.0f}")
        console.print(table)
    if found["trace"]:
        console.print(f"Trace: {found['trace']}.", highlight=False)
    choices = sorted({level["choice"] for level in found["levels"]})
    said = "Borrow none: no number makes steps 2 % faster and keeps the SLO"
    if choices[-1]:
        said = f"Lend {choices[0]} to {choices[-1]} of them" if len(choices) > 1 else f"Lend {choices[0]} of them"
        said += "; advised: where serving's router follows the advice whom to spare"
    console.print(f"{said}. All figures are {TAG}.", highlight=False)


def _cells(row: dict[str, Any]) -> list[str]:
    over, step = row["over_none"], row["step_s"]
    return [
        f"{step['mean']:.0f} ({step['low']:.0f} to {step['high']:.0f})",
        f"{over['mean']:.2f} ({over['low']:.2f} to {over['high']:.2f})",
        f"{100 * row['attained']['mean']:.2f}",
    ]


def _clock(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{minutes // 60}:{minutes % 60:02d}"
