"""`rollfab sim`: a scenario's arms beside each other, simulated."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from ...fabric.contract.errors import ConfigError
from ...fabric.contract.text import did_you_mean
from ..cli.options import AsJson
from ..cli.printing import Console, show_json
from ..cli.progress import progress
from .scenario import SAMPLES, Scenario, check_runs, read_scenario

SEED_COUNT_MAX = 10_000


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command()
    def sim(
        scenario: Annotated[str, typer.Argument(help=f"A TOML file, or one of {', '.join(SAMPLES)}.")],
        arms: Annotated[str, typer.Option(help="Comma-separated; default: the scenario's.")] = "",
        seeds: Annotated[
            int | None, typer.Option(help="So many, from 0; default: the scenario's.", min=1, max=SEED_COUNT_MAX)
        ] = None,
        report: Annotated[
            Path | None,
            typer.Option(
                help="A new file, .html: the tables, and what happened when (each arm's first seed).",
                show_default=False,
            ),
        ] = None,
        json: AsJson = False,
    ) -> None:
        """Simulate a cluster under production's rules beside other ways to run it. Every figure is simulated."""
        from .report import results, show_results

        wanted = chosen(read_scenario(scenario), arms, seeds)
        if report is not None:
            _check_report(report)
        wanted = with_load(wanted)
        timelines: dict[int, Any] = {}
        runs = run_all(wanted, None if report is None else timelines)
        found = results(wanted, runs)
        wrong = None if report is None else _write_report(found, runs, timelines, report)
        show_json(found) if json else show_results(found)
        if wrong is not None:
            raise ConfigError(wrong)
        if report is not None:
            Console(stderr=json).print(f"the report is in {report}", highlight=False)

    @app.command()
    def plan(
        scenario: Annotated[str, typer.Argument(help=f"A TOML file, or one of {', '.join(SAMPLES)}.")],
        seeds: Annotated[
            int | None, typer.Option(help="So many, from 0; default: the scenario's.", min=1, max=SEED_COUNT_MAX)
        ] = None,
        json: AsJson = False,
    ) -> None:
        """Simulate how many serving GPUs are worth borrowing, when, and which step time to expect."""
        from .plan import plan as made
        from .plan import show_plan

        found = made(with_load(chosen(read_scenario(scenario), "", seeds)))
        show_json(found) if json else show_plan(found)


def _check_report(path: Path) -> None:
    """Require that a report can be written, before minutes of simulating.

    Raises:
        ConfigError: it cannot.
    """
    if path.suffix != ".html":
        raise ConfigError(f"--report {path} ends in {path.suffix or 'no suffix'}: name it .html")
    if not path.parent.is_dir():
        raise ConfigError(f"--report: the directory of {path} is not there: make it first")
    if not os.access(path.parent, os.W_OK):
        raise ConfigError(f"--report: you may not write into the directory of {path}: name a file elsewhere")
    if os.path.lexists(path):
        raise ConfigError(f"--report {path} is there already: name another file, or move it away")
    if find_spec("matplotlib") is None:
        raise ConfigError("--report draws with matplotlib, which is not installed: pip install matplotlib")


def _write_report(found: dict[str, Any], runs: list[Any], timelines: dict[int, Any], path: Path) -> str | None:
    """Write it before anything is printed, as whoever reads that may go away; returns why it could not be."""
    from .page import write_page

    try:
        write_page(found, [(runs[index], timeline) for index, timeline in timelines.items()], path)
    except OSError as error:
        return f"--report {path} cannot be written: {error.strerror or error}"
    return None


def chosen(scenario: Scenario, arms: str, seed_count: int | None) -> Scenario:
    """Return a scenario with other arms and seeds.

    Raises:
        ConfigError: an arm is not known.
    """
    from .arms import ARMS

    part = scenario.simulation
    names = tuple(name.strip() for name in arms.split(",") if name.strip())
    for name in names:
        if name not in ARMS:
            raise ConfigError(f"--arms has no {name!r}: {did_you_mean(name, ARMS)}")
    part = replace(part, arms=tuple(dict.fromkeys(names)) or part.arms)
    if seed_count is not None:
        part = replace(part, seeds=tuple(range(seed_count)))
    wanted = replace(scenario, simulation=part)
    check_runs(wanted, "--arms" if names else scenario.name)
    return wanted


def with_load(scenario: Scenario) -> Scenario:
    """Find what loads are parts of, and which one a trace as recorded is; a terminal shows that it takes a while.

    Raises:
        ConfigError, InputError: it cannot be found.
    """
    from .run import capacity_of, recorded

    with progress(f"finding what an instance can serve of {scenario.serving.trace}"):
        capacity_of(scenario)
        return recorded(scenario)


def run_all(scenario: Scenario, timelines: dict[int, Any] | None = None) -> list[Any]:
    """Simulate every arm on every seed at every load; a terminal shows how far it is.

    timelines: gets the time line of each arm's first seed, by the number of its run; None: none is kept.
    """
    from .run import simulate
    from .timeline import Timeline

    part = scenario.simulation
    wanted = [(load, arm, seed) for load in scenario.serving.loads for arm in part.arms for seed in part.seeds]
    found: list[Any] = []
    with progress("simulating", unit="count", total=len(wanted)) as tell:
        for load, arm, seed in wanted:
            timeline = Timeline() if timelines is not None and seed == part.seeds[0] else None
            if timelines is not None and timeline is not None:
                timelines[len(found)] = timeline
            how_far = partial(tell, len(found), len(wanted))
            found.append(simulate(scenario, arm, load=load, seed=seed, timeline=timeline, tell=how_far))
    return found
