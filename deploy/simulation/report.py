"""Sums up runs over seeds: means with 95 % bootstrap intervals, and ratios of runs of the same seed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from random import Random
from typing import Any

from ...fabric.contract.text import counted
from ..cli.printing import Cell, Console, new_table
from ..replay.figures import number
from .arms import ARMS
from .machine.cost import COST_MODEL_ERROR
from .run import Run, capacity_of, told_trace
from .scenario import FailuresPart, Scenario

TAG = f"simulated; {COST_MODEL_ERROR}; held against real runs on CPUs, not on GPUs"
RESAMPLE_COUNT = 2000
BASE, PUBLISHED = "fixed", "rose"  # arms that others are compared with
COLUMNS = ("arm", "step s", "x fixed", "h", "h/H*", "in SLO %", "worst", "P99 ms", "wasted")

Figure = dict[str, float]  # mean, low, high


def figure(values: Sequence[float]) -> Figure:
    """Return a mean with its 95 % interval: percentiles of the means of resamples, by dice that are always the same."""
    count, dice = len(values), Random(0)
    means = sorted(sum(dice.choices(values, k=count)) / count for _ in range(RESAMPLE_COUNT if count > 1 else 1))
    mean = sum(values) / count
    low, high = means[int(0.025 * len(means))], means[min(len(means) - 1, int(0.975 * len(means)))]
    return {"mean": mean, "low": min(low, mean), "high": max(high, mean)}


def faster(runs: Sequence[Run], others: Sequence[Run]) -> Figure | None:
    """Return how many times as fast steps are as others of the same seed; None: there are none."""
    by_seed = {each.seed: each for each in others}
    found = [by_seed[each.seed].step_s / each.step_s for each in runs if each.seed in by_seed]
    return figure(found) if found else None


def summary(runs: Sequence[Run], fixed: Sequence[Run], rose: Sequence[Run] = ()) -> dict[str, Any]:
    """Sum up one arm over its seeds, for programs; fixed, rose: the runs that it is compared with, seed by seed."""
    arm = ARMS[runs[0].arm]

    def mean(of: Callable[[Run], float]) -> Figure:
        return figure([of(each) for each in runs])

    def of_bound(run: Run) -> float:
        return sum(run.bounds_s) / sum(step.rollout_s for step in run.steps)

    served = [each.served for each in runs if each.served is not None]
    return {
        "text": arm.text,
        "seeds": [each.seed for each in runs],
        "step_s": mean(lambda run: run.step_s),
        "rollout_s": mean(lambda run: run.rollout_s),
        "over_fixed": faster(runs, fixed),
        "over_rose": faster(runs, rose),
        "rollouts_of_bound": mean(of_bound) if arm.has_bound or arm.is_static else None,
        "tokens_per_s": mean(lambda run: run.tokens / run.span_s),
        "harvest": mean(lambda run: run.harvest),
        "harvest_of_oracle": mean(lambda run: run.harvest / run.spare if run.spare else 0.0),
        "harvested_tokens": mean(lambda run: run.harvested),
        "wasted_fraction": mean(lambda run: run.wasted / max(1, run.tokens + run.wasted)),
        "lost_fraction": mean(lambda run: run.lost / max(1, run.tokens + run.wasted)),
        "deaths": mean(lambda run: run.deaths),
        "runs": _of_runs(runs),
        "recomputed_tokens": mean(lambda run: run.refilled),
        "turns_moved": mean(lambda run: run.moved),
        "served": {
            name: figure([getattr(each, name) for each in served]) for name in (asdict(served[0]) if served else {})
        },
        "simulated_s": sum(each.span_s for each in runs),
        "cpu_s": round(sum(each.cpu_s for each in runs), 2),
        "simulated_s_per_cpu_s": round(speed_of(runs), 1),
    }


def speed_of(runs: Sequence[Run]) -> float:
    """Tell how many simulated seconds a second of one core makes."""
    return sum(each.span_s for each in runs) / max(1e-3, sum(each.cpu_s for each in runs))


def results(scenario: Scenario, runs: Sequence[Run]) -> dict[str, Any]:
    """Return everything as one object for programs; every figure in it is simulated, but for *cpu_s."""
    by_load = []
    for load in scenario.serving.loads:
        arms = {arm: [run for run in runs if run.load == load and run.arm == arm] for arm in scenario.simulation.arms}
        fixed, rose = arms.get(BASE, []), arms.get(PUBLISHED, [])
        by_load.append({"load": load, "arms": {name: summary(found, fixed, rose) for name, found in arms.items()}})
    return {
        "tag": TAG,
        "scenario": asdict(scenario),
        "trace": told_trace(scenario),
        "capacity_per_s": capacity_of(scenario),
        "by_load": by_load,
    }


def show_results(found: dict[str, Any]) -> None:
    """Print a table per load, within 80 columns."""
    scenario, console = found["scenario"], Console()
    own, lent = scenario["cluster"]["dedicated"], scenario["cluster"]["serving"]
    for part in found["by_load"]:
        title = f"{scenario['name']} simulated: {own}+{lent} GPUs, {scenario['work']['kind']}, load {part['load']:g}"
        table = new_table(*COLUMNS, title=title, left=("arm",))
        for name, row in part["arms"].items():
            table.add_row(Cell(name), *cells_of(row))
        console.print(table)
        if len(scenario["runs"]["weights"]) > 1:
            table = new_table(*RUN_COLUMNS, title="each run, simulated", left=("arm",))
            for name, *cells in run_cells(part["arms"]):
                table.add_row(Cell(name), *cells)
            console.print(table)
    for note in notes_of(found):
        console.print(note, style="dim", highlight=False)


def cells_of(row: dict[str, Any]) -> list[str]:
    """Write what COLUMNS name of an arm, but its name."""
    served, over = row["served"], row["over_fixed"]
    slo = ("-", "-", "-")
    if served:
        tails = f"{served['ttft_ms_p99']['mean']:.0f}/{served['tpot_ms_p99']['mean']:.0f}"
        slo = (f"{100 * served['attained']['mean']:.2f}", f"{100 * served['worst_minute']['mean']:.0f}", tails)
    return [
        f"{row['step_s']['mean']:.0f}",
        f"{over['mean']:.2f} {over['low']:.2f}-{over['high']:.2f}" if over else "-",
        f"{row['harvest']['mean']:.2f}",
        f"{row['harvest_of_oracle']['mean']:.2f}",
        *slo,
        f"{100 * row['wasted_fraction']['mean']:.1f}",
    ]


def notes_of(found: dict[str, Any]) -> list[str]:
    """Say what the figures are."""
    seeds = found["scenario"]["simulation"]["seeds"]
    rows = [row for part in found["by_load"] for row in part["arms"].values()]
    speeds = [row["simulated_s_per_cpu_s"] for row in rows]
    return [
        f"All figures are {found['tag']}.",
        "x fixed: speed of a step over dedicated GPUs alone, with its 95 % interval "
        f"(bootstrap, {counted(len(seeds), 'seed')}).",
        "h: of the time of the GPUs that serve, computed for rollouts, training included; H*: the oracle's.",
        "in SLO: serving requests within TTFT and TPOT; worst: of the worst minute; P99: TTFT/TPOT.",
        *([f"Trace: {found['trace']}."] if found["trace"] else []),
        *_of_capacity(found),
        *_of_rose(found),
        *(_OF_RUNS if len(found["scenario"]["runs"]["weights"]) > 1 else ()),
        *(_of_deaths(rows, found["scenario"]["failures"]) if any(row["deaths"]["mean"] for row in rows) else ()),
        f"The simulator's speed: {min(speeds):.0f} to {max(speeds):.0f} simulated seconds in one of a core, by arm.",
    ]


def _of_capacity(found: dict[str, Any]) -> list[str]:
    """Say what loads are parts of, where it was found and not given."""
    serving, capacity = found["scenario"]["serving"], found["capacity_per_s"]
    if serving["capacity_per_s"] or not capacity:
        return []
    rate = f"{number(capacity)} requests a second of {serving['trace']} for each instance"
    return [f"Load 1: {rate}, found: the most that keeps each objective for 99 of 100 while nothing is lent."]


def _of_rose(found: dict[str, Any]) -> list[str]:
    """Say how many times as fast as with ROSE's rules steps are with ours, where both were simulated."""
    said = []
    for part in found["by_load"]:
        rows = {name: row["over_rose"] for name, row in part["arms"].items() if name.startswith("ours")}
        texts = [
            f"{name} {over['mean']:.2f} ({over['low']:.2f}-{over['high']:.2f})" for name, over in rows.items() if over
        ]
        said += [f"Steps over those of {PUBLISHED}, load {part['load']:g}: {', '.join(texts)}."] if texts else []
    return said


def _of_deaths(rows: Sequence[dict[str, Any]], failures: dict[str, Any]) -> list[str]:
    """Say how often somebody died, and what died with workers: the fewest and the most, by arm."""
    deaths = [row["deaths"]["mean"] for row in rows]
    lost = [100 * row["lost_fraction"]["mean"] for row in rows]
    return [
        f"Deaths in a run: {min(deaths):.1f} to {max(deaths):.1f} (of {', '.join(FailuresPart(**failures).mortals)}); "
        f"{min(lost):.2f} to {max(lost):.2f} % of all tokens died with their workers."
    ]


_OF_RUNS = (
    "of share: slots that a run had ready over those due by weight, while several had enough work for theirs.",
    "of tokens: tokens that it made meanwhile, over its weight's part of all: one slot is faster than another.",
    "waited: the longest time with work and no worker ready, in fair turns (by weight, in slices of 10 s or more).",
)


def _of_runs(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Sum up each of several runs that share a cluster over the seeds; the longest wait is of all of them."""
    return [
        {
            "weight": those[0].weight,
            "step_s": figure([each.step_s for each in those]),
            "of_share": _figure_of_known([each.had for each in those]),
            "of_tokens": _figure_of_known([each.made for each in those]),
            "longest_wait_fair_turns": max(each.longest_wait for each in those),
        }
        for those in zip(*(run.shared for run in runs), strict=True)
    ]


def _figure_of_known(values: Sequence[float | None]) -> Figure | None:
    known = [each for each in values if each is not None]
    return figure(known) if known else None


RUN_COLUMNS = ("arm", "weight", "step s", "of share", "of tokens", "waited")


def run_cells(arms: Mapping[str, dict[str, Any]]) -> list[list[str]]:
    """Write what RUN_COLUMNS name of each run in each arm; nothing where there is one run."""
    found = []
    for name, row in arms.items():
        for run in row["runs"] if len(row["runs"]) > 1 else ():
            had, made = (
                f"{each['mean']:.2f} {each['low']:.2f}-{each['high']:.2f}" if each else "-"
                for each in (run["of_share"], run["of_tokens"])
            )
            waited = f"{run['longest_wait_fair_turns']:.2f}"
            found.append([name, f"{run['weight']:g}", f"{run['step_s']['mean']:.0f}", had, made, waited])
    return found
