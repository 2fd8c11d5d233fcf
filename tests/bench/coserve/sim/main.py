"""`rollfab bench coserve-sim`: one GPU that serving and rollouts share, simulated, from light load to SLO capacity.

- The guard, its step-time model and its burst reserve are those of production. The engines and the GPU are simulated:
  every figure is, and carries the cost model's error.
- Two ways to share a GPU, since it is the device that says which holds: "paced", where serving waits while rollouts may
  run, for which the bound H* is; and "turns", where no one paces serving, and half of the steps is the most to be had.
- Loads are slices of a recorded trace, thinned or laid over themselves; SLO capacity is the most requests per second of
  which 99 % meet both objectives alone.
- The bench fails when ours loses more than 0.2 points of attainment against serving alone, in any load.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rollfab.deploy.replay.figures import Report, number, show
from rollfab.deploy.replay.records import Arrival
from rollfab.deploy.replay.scale import at_rate, window
from rollfab.deploy.replay.traces import load_trace
from rollfab.deploy.simulation.machine.cost import COST_MODEL_ERROR
from rollfab.fabric.rules.serving.guard import GuardRule
from tests.bench.measure import run_bench

from .arms import Foresight, Guarded, IdleOnly, RoseRules, ServingAlone, Unguarded
from .engine import ROLLOUT_8B, SERVING_7B
from .world import Arm, Run, World, bound, simulate

LOSS_MAX = 0.002  # of attainment against serving alone
TAG = f"simulated; {COST_MODEL_ERROR}"
ARMS = ("alone", "share-all", "idle-only", "rose", "ours", "foresight")
BOTH_WAYS = ("share-all", "rose", "ours")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to simulate. capacity_per_s: of the serving engine alone on this trace, 99 % within 500/150 ms."""

    trace: str = "azure-conv"
    capacity_per_s: float = 18.0
    loads: tuple[float, ...] = (0.1, 0.25, 0.5, 0.75, 0.95)
    slice_s: float = 200.0
    starts_s: tuple[float, ...] = (0.0, 400.0, 800.0)


QUICK = Settings(slice_s=60.0, starts_s=(300.0,))
FULL = Settings()


def bench_coserve_sim(*, quick: bool, json_output: bool) -> int:
    """Simulate and print; returns the exit code: 1 when ours breaks a promise that serving alone keeps."""
    found: list[Report] = []

    def measured() -> Report:
        found.append(measure(QUICK if quick else FULL))
        return found[0]

    code = run_bench(measured, _print_table, json_output=json_output)
    return code or (1 if found[0].results["violations"] else 0)


def measure(settings: Settings) -> Report:
    """Every arm on the same slices, at every load.

    Raises:
        ConfigError, InputError: the trace cannot be had.
    """
    trace = load_trace(settings.trace)
    rows = [_at_load(trace, load, settings) for load in settings.loads]
    paced = [row["arms"] for row in rows]
    turns = [row["turns"] for row in rows]
    return Report(
        name="coserve-sim",
        params={**asdict(settings), "tag": TAG, "slo_ms": [World().slo.ttft_ms, World().slo.tpot_ms]},
        results={
            "tag": TAG,
            "violations": sum(arms["ours"]["loss"] > LOSS_MAX for arms in (*paced, *turns)),
            "harvest_of_oracle": {str(row["load"]): row["arms"]["ours"]["of_bound"] for row in rows},
            "by_load": rows,
        },
        baselines={name: {str(row["load"]): row["arms"][name] for row in rows} for name in ARMS if name != "ours"},
        ratio={"ours_over_rose": _over(paced, "rose"), "ours_over_foresight": _over(paced, ARMS[-1])},
    )


def _over(rows: Sequence[Mapping[str, Any]], other: str) -> float:
    """Ours over another arm's harvest, all loads together."""
    return float(sum(row["ours"]["harvest"] for row in rows) / sum(row[other]["harvest"] for row in rows))


def _at_load(trace: Sequence[Arrival], load: float, settings: Settings) -> dict[str, Any]:
    slices = [
        at_rate(
            window(trace, start_s, settings.slice_s),
            load * settings.capacity_per_s,
            span_s=settings.slice_s,
            seed=round(start_s),
        )
        for start_s in settings.starts_s
    ]
    world, span_s = World(), settings.slice_s
    bounds = [bound(each, span_s, world) for each in slices]
    runs = {name: [simulate(each, span_s, _arm(name, each)(), world) for each in slices] for name in ARMS}
    unpaced = replace(world, is_paced=False)
    turns = {name: [simulate(each, span_s, _arm(name, each)(), unpaced) for each in slices] for name in BOTH_WAYS}
    alone = runs["alone"]
    return {
        "load": load,
        "bound": sum(bounds) / len(bounds),
        "arms": {name: _summary(found, alone, bounds) for name, found in runs.items()},
        "turns": {name: _summary(found, alone, bounds) for name, found in turns.items()},
    }


def _arm(name: str, load: Sequence[Arrival]) -> Callable[[], Arm]:
    arms: dict[str, Callable[[], Arm]] = {
        "alone": ServingAlone,
        "share-all": Unguarded,
        "idle-only": IdleOnly,
        "rose": RoseRules,
        "ours": Guarded,
        "foresight": lambda: Foresight(load, SERVING_7B, ROLLOUT_8B, GuardRule()),
    }
    return arms[name]


def _summary(runs: Sequence[Run], alone: Sequence[Run], bounds: Sequence[float]) -> dict[str, float]:
    """An arm over all slices: means, and of attainment's loss and the worst minute the worst slice."""

    def mean(values: Sequence[float]) -> float:
        return sum(values) / len(values)

    return {
        "harvest": mean([run.harvest for run in runs]),
        "of_bound": sum(run.harvest for run in runs) / sum(bounds),
        "ttft_attained": mean([run.ttft_attained for run in runs]),
        "tpot_attained": mean([run.tpot_attained for run in runs]),
        "loss": max(one.attained - run.attained for one, run in zip(alone, runs, strict=True)),
        "worst_minute": min(run.worst_minute for run in runs),
        "ttft_ms_p99": mean([run.ttft_ms_p99 for run in runs]),
        "tpot_ms_p99": mean([run.tpot_ms_p99 for run in runs]),
        "ttft_tax_p99": mean([run.ttft_ms_p99 / one.ttft_ms_p99 - 1 for one, run in zip(alone, runs, strict=True)]),
        "tpot_tax_p99": mean([run.tpot_ms_p99 / one.tpot_ms_p99 - 1 for one, run in zip(alone, runs, strict=True)]),
    }


def _print_table(report: Report) -> None:
    columns = ("arm", "load", "h", "h/H*", "TTFT in", "TPOT in", "lost", "TTFT ms", "TPOT ms")
    rows: list[list[str]] = []
    for row in report.results["by_load"]:
        for way, arms in (("", row["arms"]), (" (t)", row["turns"])):
            rows += [[name + way, f"{row['load']:.2f}", *_cells(found)] for name, found in arms.items()]
    show(f"one GPU, serving and rollouts: {TAG}", columns, rows, _notes(report))


def _cells(found: Mapping[str, float]) -> list[str]:
    return [
        f"{found['harvest']:.3f}",
        f"{found['of_bound']:.2f}",
        f"{found['ttft_attained']:.4f}",
        f"{found['tpot_attained']:.4f}",
        f"{100 * found['loss']:+.2f}",
        number(found["ttft_ms_p99"]),
        number(found["tpot_ms_p99"]),
    ]


def _notes(report: Report) -> list[str]:
    return [
        "h: of the GPU's time, what rollouts harvested; H*: the most that keeps the SLO, the whole load known.",
        "lost: points of attainment against serving alone, worst slice; ms: P99. (t): in turns, serving is not paced.",
        "foresight: ours, told what will arrive and how long steps take. rose: its rules as published, chunks of 512.",
        f"ours broke a promise in {report.results['violations']} of {2 * len(report.results['by_load'])} settings.",
    ]
