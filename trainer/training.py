"""`rollfab train`: the reference loop as a process."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..fabric.contract.errors import ConfigError
from ..fabric.contract.text import did_you_mean
from ..fabric.contract.wire import dump_json
from ..fabric.host.directories import make_directory
from .client import connect
from .grpo import PRESETS, GrpoSettings
from .loop import CHECKPOINT, TrainingLoop, summary_of


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """The environment to train on, and where to put the outcome."""

    url: str = field(repr=False)
    run_id: str
    environment: str
    reward: str | None
    steps: int | None
    seed: int
    output: str
    is_fresh: bool


def tuned_for(environment: str) -> GrpoSettings:
    """Return the reference trainer's tuned settings for an environment.

    Raises:
        ConfigError: none are known.
    """
    if environment not in PRESETS:
        raise ConfigError(
            f"no settings are known for environment {environment!r}: "
            + did_you_mean(environment, PRESETS, "For another one write your own loop, as README.md shows"),
            environment=environment,
        )
    return PRESETS[environment]


def run_training(options: TrainOptions) -> dict[str, Any]:
    """Train the tiny model on an environment and leave summary.json; return its content.

    Raises:
        ConfigError: no settings are known for that environment, or the output cannot be a directory.
    """
    settings = tuned_for(options.environment)
    if options.steps is not None:
        settings = dataclasses.replace(settings, step_count=options.steps)
    directory = make_directory(Path(options.output), "--output")
    if options.is_fresh:
        (directory / CHECKPOINT).unlink(missing_ok=True)
    torch.set_num_threads(1)
    with connect(options.url) as fabric:
        run = fabric.run(
            options.run_id,
            model="tiny",
            environment=options.environment,
            reward=options.reward,
            staleness=settings.staleness,
            sampling={"temperature": settings.temperature},
        )

        def report(facts: Mapping[str, Any]) -> None:
            run.report(**facts)

        loop = TrainingLoop(run, settings, tasks, seed=options.seed, directory=directory, report=report)
        summary = summary_of(loop.train(), settings)
    (directory / "summary.json").write_bytes(dump_json(summary))
    return summary


def tasks(count: int, first: int) -> list[dict[str, Any]]:
    """Make tasks `first` … `first + count - 1` of an endless series: a seed each, so a group meets one world."""
    return [{"seed": index, "number": index % 10 + 1} for index in range(first, first + count)]
