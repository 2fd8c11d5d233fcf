"""`rollfab bench training`: does what the fabric does to rollouts change what is learnt?

- `reward`: GRPO on FrozenLake through a fabric whose workers are lent, taken back and killed all along, with deltas and
  a staleness of one version, beside the same algorithm in one process; as many seeds of each, mean reward of all steps
  and of the last. `chance`: of means as far apart as these if the arms were alike, by permuting seeds.
- At the preset's learning rate training is faster, and at times falls from a reward of 1 to one of 0, in one process
  too: with rewards all alike gradients vanish, and Adam makes a whole step of the next small one. LEARNING_RATE is a
  third of it.
- `lengths`: how long answers are under heavy revocation, beside those of an undisturbed fabric, and those of an engine
  that begins interrupted answers anew. `chance`: of a Kolmogorov-Smirnov distance as large as this one.

Both tell what can be told by so many samples: a chance of 0.5 proves no likeness, one of 0.001 proves a difference.
"""

from __future__ import annotations

import asyncio
import dataclasses
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from rollfab.deploy.replay.figures import Report, number, show
from rollfab.fabric.host.directories import replacing
from rollfab.trainer.grpo import PRESETS

from ..measure import run_bench
from .chance import chance, largest_gap, mean_distance
from .lengths import quantiles, rerun, through_fabric
from .one_process import train_in_one_process
from .through import Stage, Trained

LAST_COUNT = 5  # steps whose mean reward is the outcome
SMALL = 0.001  # a chance below this is called a difference
SEED = 11
LEARNING_RATE = 1e-3


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How much is measured. step_count: of each training; length_count: answers of each arm."""

    seed_count: int
    step_count: int
    length_count: int


FULL = Settings(seed_count=5, step_count=80, length_count=2000)
QUICK = Settings(seed_count=1, step_count=2, length_count=96)


def bench_training(*, quick: bool, json_output: bool, figure: str = "") -> int:
    """Measure, print and draw, if `figure` is named; returns the exit code: 1 if the fabric changed something."""
    settings = QUICK if quick else FULL

    def measured() -> Report:
        report = measure(settings)
        if figure:
            draw(report, Path(figure))
        return report

    return run_bench(measured, _print_table, json_output=json_output, faults=lambda report: _wrong(report, settings))


def _wrong(report: Report, settings: Settings) -> list[str]:
    """Tell what the fabric changed. One seed has no spread to lie within."""
    reward, lengths = report.results["reward"], report.results["lengths"]
    found = []
    for name, _ in OUTCOMES if settings.seed_count > 1 else ():
        if not reward[name]["is_within_spread"]:
            found.append(f"rewards ({name}): the fabric's mean lies outside of the seeds' spread in one process")
    if lengths["chance"] < SMALL:
        found.append(f"lengths: a distance of {lengths['gap']:.3f} has a chance of {lengths['chance']:.4f}")
    if reward["lost_count"]:
        found.append(f"{reward['lost_count']} rollouts were lost")
    return found


def measure(settings: Settings) -> Report:
    """Train in both arms, then measure lengths in all three.

    Raises:
        FabricError: a process of the bench does not work.
    """
    started_s = time.monotonic()
    torch.set_num_threads(1)
    grpo = dataclasses.replace(
        PRESETS["frozenlake"], staleness=1, step_count=settings.step_count, learning_rate=LEARNING_RATE
    )
    with tempfile.TemporaryDirectory(prefix="rollfab-training-", ignore_cleanup_errors=True) as name:
        here = [train_in_one_process("tiny", grpo, seed) for seed in range(settings.seed_count)]
        with Stage(Path(name) / "training", "tiny") as stage:
            through = [stage.train(grpo, seed) for seed in range(settings.seed_count)]
        quiet, revoked = asyncio.run(through_fabric(Path(name) / "lengths", settings.length_count, SEED))
    # As many tokens between revocations as a worker of the fabric had. At least one, should none have been revoked.
    every = max(1, revoked.made_count // max(1, revoked.revoked_count))
    again = asyncio.run(rerun(settings.length_count, SEED, every))
    curves = [each.rewards for each in through]
    results = {
        "reward": {
            "curves": curves,
            **{name: _beside([of(each) for each in here], [of(each) for each in curves]) for name, of in OUTCOMES},
            **_sums(through),
        },
        "lengths": {
            "tenths": quantiles(revoked.values),
            "mean": statistics.mean(revoked.values),
            "values": revoked.values,
            "revoked_count": revoked.revoked_count,
            "made_count": revoked.made_count,
            "gap": largest_gap(*_arrays(quiet.values, revoked.values)),
            "chance": chance(quiet.values, revoked.values, largest_gap),
        },
        "wall_s": time.monotonic() - started_s,
    }
    baselines = {
        "one_process": {"curves": here, **{name: [of(each) for each in here] for name, of in OUTCOMES}},
        "undisturbed": {
            "tenths": quantiles(quiet.values),
            "mean": statistics.mean(quiet.values),
            "values": quiet.values,
        },
        "rerun": {
            "tenths": quantiles(again.values),
            "mean": statistics.mean(again.values),
            "values": again.values,
            "revoked_count": again.revoked_count,
            "made_count": again.made_count,
            "gap": largest_gap(*_arrays(quiet.values, again.values)),
            "chance": chance(quiet.values, again.values, largest_gap),
        },
    }
    ratio = {
        "reward": statistics.mean(map(_end, curves)) / statistics.mean(map(_end, here)),
        "length_mean": statistics.mean(revoked.values) / statistics.mean(quiet.values),
        "length_mean_rerun": statistics.mean(again.values) / statistics.mean(quiet.values),
    }
    params = {"settings": asdict(settings), "grpo": asdict(grpo), "last_count": LAST_COUNT, "tokens_between": every}
    return Report(name="training", params=params, results=results, baselines=baselines, ratio=ratio)


def _end(rewards: Sequence[float]) -> float:
    return statistics.mean(rewards[-LAST_COUNT:])


OUTCOMES: tuple[tuple[str, Callable[[Sequence[float]], float]], ...] = (("all", statistics.mean), ("end", _end))


def _beside(theirs: list[float], ours: list[float]) -> dict[str, Any]:
    return {
        "values": ours,
        "chance": chance(theirs, ours, mean_distance),
        "is_within_spread": min(theirs) <= statistics.mean(ours) <= max(theirs),
    }


def _arrays(*samples: Sequence[float]) -> list[Any]:
    import numpy as np

    return [np.array(each, np.float64) for each in samples]


def _sums(through: Sequence[Trained]) -> dict[str, Any]:
    return {
        "lent_count": sum(each.harm.lent_count for each in through),
        "taken_back_count": sum(each.harm.taken_back_count for each in through),
        "kill_count": sum(each.harm.kill_count for each in through),
        "moved_turn_count": sum(each.moved_turn_count for each in through),
        "staleness_mean": statistics.mean(each.staleness_mean for each in through),
        "delta_count": sum(each.delta_count for each in through),
        "lost_count": sum(each.lost_count for each in through),
    }


def _print_table(report: Report) -> None:
    reward, lengths = report.results["reward"], report.results["lengths"]
    here, quiet, again = (report.baselines[name] for name in ("one_process", "undisturbed", "rerun"))
    rows = []
    for name, what in (("all", "all steps"), ("end", f"the last {LAST_COUNT}")):
        rows.append([f"one process, {what}", *_spread(here[name]), ""])
        rows.append(["the fabric, disturbed", *_spread(reward[name]["values"]), number(reward[name]["chance"])])
    notes = [
        f"lent {reward['lent_count']} times, taken back {reward['taken_back_count']}, {reward['kill_count']} kills;"
        f" {reward['moved_turn_count']} turns moved, {reward['delta_count']} deltas, {reward['lost_count']} lost;"
        f" {reward['staleness_mean']:.2f} versions behind on average"
    ]
    show(
        "rollfab bench training: mean reward, by seed",
        ["", "mean", "lowest", "highest", "chance"],
        rows,
        notes,
    )
    rows = [
        ["undisturbed", *_tenths(quiet), "", ""],
        ["revoked, goes on", *_tenths(lengths), number(lengths["gap"]), number(lengths["chance"])],
        ["revoked, begins anew", *_tenths(again), number(again["gap"]), number(again["chance"])],
    ]
    notes = [
        f"{lengths['revoked_count']} leases ended, {report.params['tokens_between']} engine tokens between two of one"
        f" worker; begun anew: {again['revoked_count']}, {again['made_count']:,} tokens made for"
        f" {sum(again['values']):,.0f}",
        f"{report.results['wall_s']:.0f} s in all; machine: {report.machine}",
    ]
    columns = ["lengths of answers", "mean", "P10", "P50", "P90", "distance", "chance"]
    show("", columns, rows, notes)


def _spread(values: Sequence[float]) -> list[str]:
    return [f"{each:.3f}" for each in (statistics.mean(values), min(values), max(values))]


def _tenths(arm: dict[str, Any]) -> list[str]:
    return [number(arm["mean"]), *(number(arm["tenths"][index]) for index in (0, 4, 8))]


def draw(report: Report, path: Path) -> None:
    """Draw rewards by step with the spread of the seeds, and the shares of answers up to each length."""
    import matplotlib

    matplotlib.use("Agg")
    import numpy as np
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "rollfab"
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), dpi=130)
    for name, curves, colour in (
        ("one process", report.baselines["one_process"]["curves"], "#868e96"),
        ("the fabric: lent, taken back, killed", report.results["reward"]["curves"], "#2f9e44"),
    ):
        rows = np.array(curves)
        left.plot(rows.mean(axis=0), label=name, color=colour)
        left.fill_between(
            range(rows.shape[1]), rows.min(axis=0), rows.max(axis=0), color=colour, alpha=0.2, linewidth=0
        )
    left.set(xlabel="optimizer step", ylabel="mean reward", title=f"frozenlake, {len(rows)} seeds each: mean and range")
    for name, arm, style in (
        ("undisturbed", report.baselines["undisturbed"], {"color": "#868e96", "linewidth": 3}),
        ("revoked, goes on (the fabric)", report.results["lengths"], {"color": "#2f9e44"}),
        ("revoked, begins anew", report.baselines["rerun"], {"color": "#e03131"}),
    ):
        values = np.sort(arm["values"])
        right.step(values, np.arange(1, len(values) + 1) / len(values), label=name, **style)
    right.set(xlabel="tokens of an answer", ylabel="share of answers", title="lengths of answers under revocation")
    for axes in (left, right):
        axes.legend(loc="lower right", fontsize=8)
        axes.grid(visible=True, alpha=0.3)
    figure.tight_layout()
    with replacing(path) as new:
        figure.savefig(new, format=path.suffix[1:], metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)
