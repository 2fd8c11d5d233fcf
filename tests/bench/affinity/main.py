"""`rollfab bench affinity`: turns that go where their context is cached, over turns that go elsewhere.

Three fabrics of two workers each, fed by turns with the same work: trajectories of 8 turns, whose contexts grow.

- with, without: they differ in one setting of the run, `prefix_affinity`; without it a turn goes to whoever asks first.
- at random: each turn is handed to a worker that is drawn (cast.py).

Beside tokens a second stands what hangs less on the machine: how many turns went to the worker of the turn before, what
share of the prompts' tokens was cached, and how many tokens nobody had to read for that.
"""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rollfab.deploy.replay.figures import Report, number, show
from rollfab.fabric.contract.records import Group
from tests.bench.lively import lively_weights
from tests.bench.measure import Figure, alternate

from ..overhead.arms import Round, WholeFabric, Workload
from .cast import Read, read_so_far

WORKERS = ("worker-0", "worker-1")
CONTEXT_TOKENS = 2048
GOAL = 1.2
OURS, OTHERS = "with", ("without", "at random")
ARMS = (OURS, *OTHERS)
FIGURES = ("tokens_per_s", "home_fraction", "hit_fraction", "saved_tokens", "read_tokens", "worker_cpu_ms_per_turn")
DIVIDED = ("tokens_per_s", "saved_tokens", "read_tokens")  # printed as ratios, too


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
        params={"worker_count": len(WORKERS), "settings": asdict(settings), "goal": GOAL},
        results={**{name: headline[OURS][name] for name in FIGURES}, "rows": rows},
        baselines={name: headline[name] for name in OTHERS},
        ratio={
            **{name: headline["ratio"][name] for name in OTHERS},
            "by_workload": {row["name"]: row["ratio"] for row in rows},
        },
    )


def _measure(workload: Workload, slots: int, round_count: int) -> dict[str, Any]:
    with ExitStack() as stack:
        directories = {name: Path(stack.enter_context(tempfile.TemporaryDirectory())) for name in ARMS}
        fabrics = {
            name: stack.enter_context(_fabric(name, workload, slots, directory))
            for name, directory in directories.items()
        }
        arms = {name: partial(_round, fabric, directories[name]) for name, fabric in fabrics.items()}
        alternate(arms, 1)  # the first lease, the first weights, caches
        found = alternate(arms, round_count)
    made = {name: figures(workload, pairs) for name, pairs in found.items()}
    return {
        "name": workload.name,
        **{name: _arm(figures) for name, figures in made.items()},
        "ratio": {
            other: {name: ratio_over(made[OURS][name], made[other][name]) for name in FIGURES} for other in OTHERS
        },
    }


def _fabric(arm: str, workload: Workload, slots: int, directory: Path) -> WholeFabric:
    is_drawn = arm == "at random"
    words = ["bench", "counting", "--model", workload.model, "--slots", str(slots), "--context", str(CONTEXT_TOKENS)]
    words += ["--directory", str(directory), *(["--patient"] if is_drawn else [])]
    return WholeFabric(
        workload,
        lively_weights(workload.model),
        workers={name: [*words, "--name", name] for name in WORKERS},
        agent=("bench", "drawing", *WORKERS, "--") if is_drawn else ("agent",),
        run_options={"prefix_affinity": arm != "without"},
    )


def _round(fabric: WholeFabric, directory: Path) -> tuple[Round, Read]:
    before = read_so_far(directory)
    return fabric.round(), read_so_far(directory) - before


def figures(workload: Workload, rounds: Sequence[tuple[Round, Read]]) -> dict[str, Figure]:
    """Collect what all rounds of an arm brought, by FIGURES."""
    cpu_s = [sum(used for name, used in each.cpu_s.items() if name in WORKERS) for each, _ in rounds]
    found = (
        [each.token_count / each.duration_s for each, _ in rounds],
        [home_fraction(each.groups) for each, _ in rounds],
        [read.hit_fraction for _, read in rounds],
        [float(read.cached_count) for _, read in rounds],
        [float(read.prompt_count - read.cached_count) for _, read in rounds],
        [1000 * used_s / workload.turns for used_s in cpu_s],
    )
    return {name: Figure(tuple(values)) for name, values in zip(FIGURES, found, strict=True)}


def _arm(figures: dict[str, Figure]) -> dict[str, Any]:
    return {
        **{name: figure.median for name, figure in figures.items()},
        "spread": {name: figure.spread for name, figure in figures.items()},
    }


def ratio_over(ours: Figure, other: Figure) -> dict[str, Any]:
    """Divide round by round; what is divided by nothing is divided by 1."""
    found = Figure(tuple(one / (two or 1.0) for one, two in zip(ours.rounds, other.rounds, strict=True)))
    return {"median": found.median, "spread": found.spread}


def home_fraction(groups: Sequence[Group]) -> float:
    """Return which share of the turns after the first went to the worker of the turn before, and of a turn's parts."""
    pairs = [
        (last.worker_id, span.worker_id)
        for group in groups
        for rollout in group.rollouts
        for last, span in itertools.pairwise(rollout.spans)
    ]
    return sum(last == worker for last, worker in pairs) / len(pairs) if pairs else 1.0


def print_table(report: Report) -> None:
    found = json.loads(report.json())
    rows = []
    for each in found["results"]["rows"]:
        for name in ARMS:
            arm = each[name]
            over = [_said(each["ratio"][name][kind]) for kind in DIVIDED] if name in OTHERS else [""] * len(DIVIDED)
            rows.append(
                [
                    each["name"] if name == OURS else "",
                    name,
                    number(arm["tokens_per_s"]),
                    f"{arm['home_fraction']:.0%}",
                    f"{arm['hit_fraction']:.0%}",
                    *(number(arm[kind]) for kind in ("saved_tokens", "read_tokens", "worker_cpu_ms_per_turn")),
                    *over,
                ]
            )
    columns = ["", "affinity", "tokens/s", "turns at home", "prompts cached", "prompt tokens saved", "read"]
    columns += ["worker CPU ms/turn", "tokens/s, with ÷ this", "saved, with ÷ this", "read, with ÷ this"]
    show("rollfab bench affinity", columns, rows, [f"goal {GOAL}; machine: {found['machine']}"])


def _said(ratio: dict[str, Any]) -> str:
    low, high = ratio["spread"]
    return f"{ratio['median']:.2f}  ({low:.2f} to {high:.2f})"
