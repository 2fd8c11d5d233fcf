"""`rollfab bench tails`: groups that take long first, over first come, first served, where some tasks take much longer.

A step ends with its last trajectory. Three fabrics with the same tasks differ in the run's order: `first come` has it
as groups came, `nearest` puts groups near completion first, `ours` also those whose tasks took long in earlier rounds.
A task takes about as many turns as the round before, seldom just as many, and comes in another place of each round.

No order can do better than the *floor*: the longest groups alone on the machine, or as many turns spread evenly over
all groups, whichever takes longer. Both are measured with the usual lengths, before and after the rounds, and a round's
floor is made from them by its longest task and its turns.

Where slots are plenty, no order helps, but putting tails off does (rounds.py): that is measured apart, as trainings.
"""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from rollfab.deploy.replay.figures import Report, number, show
from rollfab.fabric.contract.errors import FabricError
from tests.bench.lively import lively_weights
from tests.bench.measure import Figure, alternate

from ..overhead.arms import WholeFabric, Workload
from .rounds import put_tails_off, train_on_all

GOAL = 1.2
GROUP_SIZE = 2
ARMS = {
    "first come": {"longest_first": False, "nearest_first": False},
    "nearest": {"longest_first": False, "nearest_first": True},
    "ours": {"longest_first": True, "nearest_first": True},
}
DEVIATION = 0.2  # of the logarithm of a task's turns, from round to round
EPOCH_STEPS = 8  # steps of a training
TURN_COUNT_MAX = 48  # of which the tiny preset holds the tokens


@dataclass(frozen=True, kw_only=True)
class Case:
    """Tasks by their usual number of turns, and what is there for them."""

    name: str
    turn_counts: tuple[int, ...]
    slot_count: int
    place_count: int
    """Environments at once."""
    step_s: float = 0.15
    """A step of the engine takes so long at least, as on a GPU, where it hardly hangs on how many turns are in it."""
    model: str = "tiny"
    completion_tokens: int = 4
    observation_tokens: int = 2


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is measured. The first case is the headline."""

    cases: tuple[Case, ...]
    round_count: int
    put_off: Case
    epoch_count: int
    arms: tuple[str, ...] = field(default=tuple(ARMS))


FEW_LONG = (3,) * 14 + (18,) * 2
SPREAD = (2, 3, 3, 4, 4, 5, 5, 6, 7, 7, 8, 9, 11, 13, 18, 28)  # lognormal, as terminal agents'
SPREAD_OUT = Case(name="lengths spread, a place a slot", turn_counts=SPREAD, slot_count=8, place_count=8)
FULL = Settings(
    cases=(
        SPREAD_OUT,
        Case(name="few long tasks, a place a slot", turn_counts=FEW_LONG, slot_count=8, place_count=8),
        Case(name="few long tasks, all begun at once", turn_counts=FEW_LONG, slot_count=8, place_count=32),
    ),
    round_count=9,
    put_off=Case(name="few long tasks, a slot each", turn_counts=FEW_LONG, slot_count=64, place_count=64),
    epoch_count=3,
)
QUICK = replace(
    FULL,
    cases=(SPREAD_OUT,),
    round_count=3,
    arms=("first come", "ours"),
    put_off=replace(FULL.put_off, step_s=0.03),
    epoch_count=1,
)


def measure(settings: Settings) -> Report:
    """Measure every case.

    Raises:
        FabricError: a process of a fabric ended, or an arm made other turns than it should.
    """
    rows = [measure_case(case, settings) for case in settings.cases]
    put_off = measure_put_off(settings)
    headline = rows[0]
    return Report(
        name="tails",
        params={"settings": asdict(settings), "goal": GOAL},
        results={"step_s": headline["step_s"]["ours"], "rows": rows, "put_off": put_off},
        baselines={"first come": headline["step_s"]["first come"], "floor": headline["step_s"]["floor"]},
        ratio={
            "first come": headline["ratio"]["ours"],
            "first come_spread": headline["ratio_spread"]["ours"],
            "by_case": {row["name"]: row["ratio"]["ours"] for row in rows},
            "put_off": put_off["ratio"],
            "put_off_spread": put_off["ratio_spread"],
        },
    )


def measure_case(case: Case, settings: Settings) -> dict[str, Any]:
    """Measure one case: rounds of all arms by turns, and the floor before and after."""
    with ExitStack() as stack:
        fabrics = {name: stack.enter_context(fabric_of(case, ARMS[name])) for name in settings.arms}
        for fabric in fabrics.values():  # the first lease, the first weights; and what ours learns from
            step_s(fabric, tasks_of(case, -1))
        floors = [_floor_s(fabrics["first come"], case)]
        rounds: list[dict[str, float]] = []
        for number_of_round in range(settings.round_count):
            tasks = tasks_of(case, number_of_round)
            found = alternate({name: partial(step_s, fabric, tasks) for name, fabric in fabrics.items()}, 1)
            rounds.append({name: times[0] for name, times in found.items()})
        floors.append(_floor_s(fabrics["first come"], case))
    parts = {name: statistics.fmean(each[name] for each in floors) for name in floors[0]}
    for index, each in enumerate(rounds):
        each["floor"] = floor_of(case, tasks_of(case, index), parts)
    columns = (*settings.arms, "floor")
    steps = {name: Figure(tuple(each[name] for each in rounds)) for name in columns}
    ratios = {name: Figure(tuple(each["first come"] / each[name] for each in rounds)) for name in columns}
    return {
        "name": case.name,
        "step_s": {name: figure.median for name, figure in steps.items()},
        "step_s_spread": {name: figure.spread for name, figure in steps.items()},
        "ratio": {name: figure.median for name, figure in ratios.items()},
        "ratio_spread": {name: figure.spread for name, figure in ratios.items()},
        "ratio_of_sums": {name: sum(steps["first come"].rounds) / sum(steps[name].rounds) for name in columns},
        "floor_parts_s": parts,
    }


def fabric_of(case: Case, run_options: dict[str, bool]) -> WholeFabric:
    """Make a fabric for a case, not started."""
    workload = Workload(
        name=case.name,
        model=case.model,
        trajectory_count=GROUP_SIZE * len(case.turn_counts),
        turn_count=TURN_COUNT_MAX,
        completion_tokens=case.completion_tokens,
        observation_tokens=case.observation_tokens,
    )
    words = ("--slots", str(case.slot_count), "--context", "512")
    worker = ("bench", "paced", *words, "--step", str(case.step_s)) if case.step_s else ()
    return WholeFabric(
        workload,
        lively_weights(case.model),
        words,
        run_options=run_options,
        place_count=case.place_count,
        worker=worker,
    )


def measure_put_off(settings: Settings) -> dict[str, Any]:
    """Measure trainings of EPOCH_STEPS steps of the case's tasks, in one fabric: waiting for all, and putting off."""
    case = settings.put_off
    count = len(case.turn_counts)
    with fabric_of(case, ARMS["ours"]) as fabric:
        step_s(fabric, tasks_of(case, -1))
        pairs = []
        for epoch in range(settings.epoch_count):
            tasks = [task for step in range(EPOCH_STEPS) for task in tasks_of(case, epoch * EPOCH_STEPS + step)]
            pairs.append(
                (
                    train_on_all(fabric, tasks, count, GROUP_SIZE),
                    put_tails_off(fabric, tasks, count, GROUP_SIZE, f"epoch-{epoch}"),
                )
            )
    ratio = Figure(tuple(waits.duration_s / off.duration_s for waits, off in pairs))
    return {
        "name": case.name,
        "step_s": {
            "all": Figure(tuple(waits.duration_s / EPOCH_STEPS for waits, _ in pairs)).median,
            "put off": Figure(tuple(off.duration_s / EPOCH_STEPS for _, off in pairs)).median,
        },
        "ratio": ratio.median,
        "ratio_spread": ratio.spread,
        "lost": Figure(tuple(off.lost for _, off in pairs)).median,
    }


def tasks_of(case: Case, number_of_round: int) -> list[dict[str, Any]]:
    """Return the tasks of a round, the same for every arm."""
    dice = random.Random(number_of_round)
    tasks = [
        {"task_id": f"task-{index}", "turn_count": _near(usual, dice)} for index, usual in enumerate(case.turn_counts)
    ]
    dice.shuffle(tasks)
    return tasks


def _near(usual: int, dice: random.Random) -> int:
    return min(TURN_COUNT_MAX, max(1, round(usual * dice.lognormvariate(0, DEVIATION))))


def step_s(fabric: WholeFabric, tasks: Sequence[dict[str, Any]]) -> float:
    """Return how long these tasks take together, in seconds.

    Raises:
        FabricError: not all of their turns were made.
    """
    groups, duration_s = fabric.timed(tasks, GROUP_SIZE)
    made = sum(rollout.turn_count for group in groups for rollout in group.rollouts)
    asked = GROUP_SIZE * sum(task["turn_count"] for task in tasks)
    if made != asked:
        reasons = {failure.reason for group in groups for failure in group.failures}
        reason = min(reasons, default="no failures")
        raise FabricError(f"{made} turns of {asked} were made in {len(groups)} of {len(tasks)} groups: {reason}")
    return duration_s


def _floor_s(fabric: WholeFabric, case: Case) -> dict[str, float]:
    """Measure what no order can be faster than: the usual lengths without noise, in seconds."""
    count, longest = len(case.turn_counts), max(case.turn_counts)
    share, over = divmod(sum(case.turn_counts), count)
    even = [share + (index < over) for index in range(count)]
    alone = [longest] * case.turn_counts.count(longest)
    return {
        name: step_s(
            fabric, [{"task_id": f"{name}-{index}", "turn_count": turns} for index, turns in enumerate(wanted)]
        )
        for name, wanted in {"longest alone": alone, "work spread evenly": even}.items()
    }


def floor_of(case: Case, tasks: Sequence[dict[str, Any]], parts: dict[str, float]) -> float:
    """Return what no order of these tasks can be faster than, in seconds; parts: as the usual lengths took."""
    counts: list[int] = [task["turn_count"] for task in tasks]
    alone_s = parts["longest alone"] * max(counts) / max(case.turn_counts)
    return max(alone_s, parts["work spread evenly"] * sum(counts) / sum(case.turn_counts))


def print_table(report: Report) -> None:
    found = json.loads(report.json())
    rows = []
    for each in found["results"]["rows"]:
        for name, median in each["step_s"].items():
            low, high = each["ratio_spread"][name]
            rows.append(
                [
                    each["name"] if name == "first come" else "",
                    name,
                    number(median),
                    "" if name == "first come" else f"{each['ratio'][name]:.2f}  ({low:.2f} to {high:.2f})",
                    "" if name == "first come" else f"{each['ratio_of_sums'][name]:.2f}",
                ]
            )
    off = found["results"]["put_off"]
    low, high = off["ratio_spread"]
    rows.append([off["name"], "waits for all", number(off["step_s"]["all"]), "", ""])
    told = f"{off['ratio']:.2f}  ({low:.2f} to {high:.2f})"
    rows.append(["", f"tails put off, {off['lost']:.0%} lost", number(off["step_s"]["put off"]), told, ""])
    columns = ["", "order", "step s", "first come ÷ it", "all steps ÷ all of it"]
    show("rollfab bench tails", columns, rows, [f"goal {GOAL}; CPU; machine: {found['machine']}"])
