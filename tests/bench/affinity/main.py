"""`rollfab bench affinity`: turns that go where their context is cached, over turns that go to whoever asks first.

Two fabrics of two workers each, fed by turns with the same work: trajectories of 8 turns, whose contexts grow. They
differ in one setting of the run, `prefix_affinity`. Beside tokens a second stands where turns were made, which hangs
less on the machine: how many went to the worker of the turn before, and what share of the prompts was cached.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any

from rollfab.deploy.replay.figures import Report, number, show
from rollfab.fabric.contract.records import Group
from tests.bench.lively import lively_weights
from tests.bench.measure import Figure, alternate

from ..overhead.arms import Round, WholeFabric, Workload

WORKER_COUNT = 2
GOAL = 1.2
ARMS = {"with": True, "without": False}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is measured: workloads, each with the slots of a worker. The first is the headline."""

    cases: tuple[tuple[Workload, int], ...]
    round_count: int


LONG = Workload(
    name="8 turns, 96 tokens read and 8 made",
    model="small",
    trajectory_count=48,
    turn_count=8,
    completion_tokens=8,
    observation_tokens=96,
)
EVEN = Workload(
    name="8 turns, 48 tokens read and 48 made",
    model="small",
    trajectory_count=48,
    turn_count=8,
    completion_tokens=48,
    observation_tokens=48,
)
PLENTY = replace(LONG, name="the same, slots for all in one worker", trajectory_count=32)
FULL = Settings(cases=((LONG, 16), (EVEN, 16), (PLENTY, 64)), round_count=5)
QUICK = Settings(cases=((LONG, 16), (PLENTY, 64)), round_count=2)


def measure(settings: Settings) -> Report:
    """Measure every workload.

    Raises:
        FabricError: a process of a fabric ended, or an arm made other tokens than it should.
    """
    rows = [_measure(workload, slots, settings.round_count) for workload, slots in settings.cases]
    headline = rows[0]
    return Report(
        name="affinity",
        params={"worker_count": WORKER_COUNT, "settings": asdict(settings), "goal": GOAL},
        results={"tokens_per_s": headline["with"]["tokens_per_s"], "rows": rows},
        baselines={"without prefix_affinity": headline["without"]},
        ratio={
            "without": headline["ratio"],
            "without_spread": headline["ratio_spread"],
            "by_workload": {row["name"]: row["ratio"] for row in rows},
        },
    )


def _measure(workload: Workload, slots: int, round_count: int) -> dict[str, Any]:
    weights = lively_weights(workload.model)
    with ExitStack() as stack:
        fabrics = {
            name: stack.enter_context(
                WholeFabric(
                    workload,
                    weights,
                    ("--slots", str(slots), "--context", "2048"),
                    worker_count=WORKER_COUNT,
                    run_options={"prefix_affinity": has_affinity},
                )
            )
            for name, has_affinity in ARMS.items()
        }
        arms = {name: partial(_round, fabric) for name, fabric in fabrics.items()}
        alternate(arms, 1)  # the first lease, the first weights, caches
        found = alternate(arms, round_count)
    rounds = {name: [each for each, _ in pairs] for name, pairs in found.items()}
    hits = {name: fmean(hit for _, hit in pairs) for name, pairs in found.items()}
    rates = {name: Figure(tuple(each.token_count / each.duration_s for each in made)) for name, made in rounds.items()}
    ratio = Figure(
        tuple(ours / other for ours, other in zip(rates["with"].rounds, rates["without"].rounds, strict=True))
    )
    return {
        "name": workload.name,
        **{name: _arm(workload, rates[name], rounds[name], hits[name]) for name in ARMS},
        "ratio": ratio.median,
        "ratio_spread": ratio.spread,
    }


def _round(fabric: WholeFabric) -> tuple[Round, float]:
    return fabric.round(), fabric.hit_fraction()  # of recent prompts: not of what it made before another arm's round


def _arm(workload: Workload, rate: Figure, rounds: Sequence[Round], hit_fraction: float) -> dict[str, Any]:
    worker_s = Figure(tuple(sum(used for name, used in each.cpu_s.items() if "worker" in name) for each in rounds))
    return {
        "tokens_per_s": rate.median,
        "spread": rate.spread,
        "home_fraction": Figure(tuple(home_fraction(each.groups, workload.turn_count) for each in rounds)).median,
        "hit_fraction": hit_fraction,
        "worker_cpu_ms_per_turn": 1000 * worker_s.median / workload.turns,
    }


def home_fraction(groups: Sequence[Group], turn_count: int) -> float:
    """Return which share of the turns after the first went to the worker of the turn before."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    moves = 0
    for rollout in rollouts:
        names = [span.worker_id for span in rollout.spans]
        moves += sum(name != last for last, name in itertools.pairwise(names))
    return 1 - moves / (len(rollouts) * (turn_count - 1))


def print_table(report: Report) -> None:
    found = json.loads(report.json())
    rows = []
    for each in found["results"]["rows"]:
        low, high = each["ratio_spread"]
        for name in ARMS:
            arm = each[name]
            rows.append(
                [
                    each["name"] if name == "with" else "",
                    name,
                    number(arm["tokens_per_s"]),
                    f"{arm['home_fraction']:.0%}",
                    f"{arm['hit_fraction']:.0%}",
                    number(arm["worker_cpu_ms_per_turn"]),
                    f"{each['ratio']:.2f}  ({low:.2f} to {high:.2f})" if name == "with" else "",
                ]
            )
    columns = ["", "affinity", "tokens/s", "turns at home", "prompts cached", "worker CPU ms/turn", "with ÷ without"]
    show("rollfab bench affinity", columns, rows, [f"goal {GOAL}; machine: {found['machine']}"])
