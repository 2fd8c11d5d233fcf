"""`rollfab bench sim`: the shipped scenarios of the simulated cluster, whole, and how fast it is simulated.

- Every figure but the simulator's own speed is simulated, and says so.
- A run that breaks an invariant gives no figures: the bench fails. What ours misses of its criteria is listed, no more.
- `ratio` has, by scenario, load and arm of ours: speedup_over_fixed, over_rose, of_oracle (of rollouts' bound), and
  violations (P99s beyond an objective that dedicated GPUs alone keep).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rollfab.deploy.replay.figures import Report, number, show
from rollfab.deploy.simulation.command import chosen, run_all
from rollfab.deploy.simulation.report import TAG, results, speed_of
from rollfab.deploy.simulation.run import simulate
from rollfab.deploy.simulation.scenario import SAMPLES, read_scenario

LOSS_MAX = 0.002  # of attainment against dedicated GPUs alone
SLOWER_MAX = 1.02  # than dedicated GPUs alone
OF_ORACLE = {0.1: 0.93, 0.25: 0.93, 0.5: 0.80}  # by load: what of the oracle's harvest ours should have (s10)
WORST_MINUTE_MIN, WASTED_MAX = 0.95, 0.02
OVER_ROSE, OF_BOUND = 1.1, 0.85  # how fast steps should be beside ROSE's, and rollouts beside their least time
BOUND_IN = ("s1", "s2", "s3")
OURS = ("ours", "ours-few", "ours-advised", "ours-tails")
SEED_COUNT = 3
FULL, QUICK = SAMPLES, ("s0",)


def measure(names: Sequence[str]) -> Report:
    """Simulate scenarios, and one hour of 112 GPUs."""
    found: dict[str, Any] = {}
    for name in names:
        scenario, began = chosen(read_scenario(name), "", SEED_COUNT), time.perf_counter()
        found[name] = results(scenario, run_all(scenario))
        found[name]["wall_s"] = round(time.perf_counter() - began, 1)
    return Report(
        name="sim",
        params={"tag": TAG, "scenarios": list(names)},
        results={"tag": TAG, "hour_of_112_gpus": speed(), "misses": misses(found), "scenarios": found},
        baselines={},
        ratio=ratios(found),
    )


def ratios(found: dict[str, Any]) -> dict[str, Any]:
    """Return what each of our arms comes to, by scenario and load. None: the other arm, or the bound, is not there."""
    return {
        name: {
            f"{part['load']:g}": {
                arm: {
                    "speedup_over_fixed": _mean(row["over_fixed"]),
                    "over_rose": _mean(row["over_rose"]),
                    "of_oracle": _mean(row["rollouts_of_bound"]),
                    "violations": len(_late(result["scenario"]["serving"], part, row)),
                }
                for arm, row in part["arms"].items()
                if arm in OURS
            }
            for part in result["by_load"]
        }
        for name, result in found.items()
    }


def _mean(figure: dict[str, float] | None) -> float | None:
    return None if figure is None else round(figure["mean"], 3)


def speed() -> dict[str, Any]:
    """Tell the seconds that simulating an hour of 112 GPUs takes (28 instances of four), by arm."""
    scenario = read_scenario("s2")
    scenario = replace(scenario, work=replace(scenario.work, steps=1))
    found = {}
    for arm in ("fixed", "ours"):
        run = simulate(scenario, arm, load=0.25, seed=0)
        found[arm] = {
            "cpu_s_per_hour": round(run.cpu_s * 3600 / run.span_s, 1),
            "simulated_s": round(run.span_s),
            "simulated_s_per_cpu_s": round(speed_of([run]), 1),
        }
    return found


def misses(found: dict[str, Any]) -> list[str]:
    """List where ours is worse than its criteria, by scenario and load."""
    said = []
    for name, result in found.items():
        for part in result["by_load"]:
            for arm in (each for each in OURS if each in part["arms"]):
                where = f"{name}, load {part['load']:g}, {arm}"
                said += [f"{where}: {text}" for text in _misses(name, part, part["arms"][arm])]
                said += [f"{where}: {text}" for text in _late(result["scenario"]["serving"], part, part["arms"][arm])]
    return said


def _misses(name: str, part: dict[str, Any], row: dict[str, Any]) -> list[str]:
    said, fixed = [], part["arms"]["fixed"]
    if row["over_fixed"]["mean"] < 1 / SLOWER_MAX:
        said.append(f"steps are {row['over_fixed']['mean']:.2f} times as fast as on dedicated GPUs alone")
    over, bound = row["over_rose"], row["rollouts_of_bound"]
    if over is not None and over["mean"] < OVER_ROSE:
        said.append(f"steps are {over['mean']:.2f} times as fast as ROSE's, {OVER_ROSE:g} wanted")
    if name in BOUND_IN and bound is not None and bound["mean"] < OF_BOUND:
        said.append(f"rollouts have {bound['mean']:.2f} of their bound, {OF_BOUND:g} wanted")
    if row["served"]:
        lost = fixed["served"]["attained"]["mean"] - row["served"]["attained"]["mean"]
        if lost > LOSS_MAX:
            said.append(f"{100 * lost:.2f} points of attainment lost")
        if row["served"]["worst_minute"]["mean"] < WORST_MINUTE_MIN <= fixed["served"]["worst_minute"]["mean"]:
            said.append(f"{row['served']['worst_minute']['mean']:.3f} attained in the worst minute")
    if row["wasted_fraction"]["mean"] > WASTED_MAX:
        said.append(f"{row['wasted_fraction']['mean']:.1%} of tokens wasted")
    least = OF_ORACLE.get(part["load"]) if name == "s10" else None
    if least is not None and row["harvest_of_oracle"]["mean"] < least:
        said.append(f"{row['harvest_of_oracle']['mean']:.2f} of the oracle's harvest, {least:.2f} wanted")
    return said


def _late(serving: dict[str, Any], part: dict[str, Any], row: dict[str, Any]) -> list[str]:
    """Say which P99 is above its objective, where dedicated GPUs alone keep it."""
    fixed, served = part["arms"]["fixed"]["served"], row["served"]
    return [
        f"P99 of {name.upper()} is {served[f'{name}_ms_p99']['mean']:.0f} ms, of {serving[f'{name}_ms']:g}"
        for name in ("ttft", "tpot")
        if served and fixed[f"{name}_ms_p99"]["mean"] <= serving[f"{name}_ms"] < served[f"{name}_ms_p99"]["mean"]
    ]


def print_table(report: Report) -> None:
    found = report.results
    rows = []
    for name, result in found["scenarios"].items():
        for part in result["by_load"]:
            for arm, row in part["arms"].items():
                over, served = row["over_fixed"], row["served"]
                attained = f"{100 * served['attained']['mean']:.2f}" if served else "-"
                times = f"{over['mean']:.2f} ({over['low']:.2f} to {over['high']:.2f})"
                harvest = f"{row['harvest_of_oracle']['mean']:.2f}"
                where = f"{name} {part['load']:g} {arm}"
                rows.append([where, number(row["step_s"]["mean"]), times, harvest, attained])
    hours = ", ".join(
        f"{arm} {row['cpu_s_per_hour']:g} s ({row['simulated_s_per_cpu_s']:g} simulated seconds a second)"
        for arm, row in found["hour_of_112_gpus"].items()
    )
    notes = [f"CPU seconds for a simulated hour of 112 GPUs: {hours}", *(f"missed: {each}" for each in found["misses"])]
    show(f"the cluster: {TAG}", ("scenario load arm", "step s", "x fixed", "h/H*", "in SLO %"), rows, notes)
