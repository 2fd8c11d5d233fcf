"""`python -m tests.sim --seed 42`: one simulated run, or many. Prints what was drawn, then what came of it."""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
import time

from tests.sim.options import draw
from tests.sim.planted import PLANTS, planted
from tests.sim.world import Outcome, simulate


def main() -> int:
    """Returns the exit code: 0 when every promise held."""
    given = _parse()
    logging.getLogger("rollfab").addHandler(logging.NullHandler())  # the trace says what happened
    seeds = range(given.seed, given.seed + given.seeds)
    started_s, virtual_s = time.perf_counter(), 0.0
    with planted(given.plant) if given.plant else contextlib.nullcontext():
        for seed in seeds:
            options = draw(seed, job_count=given.jobs)
            if given.seeds == 1:
                print("\n".join(options.lines()))
            outcome = simulate(options)
            virtual_s += outcome.virtual_s
            if given.trace:
                print_trace(outcome)
            if outcome.failure:
                print(f"{outcome.failure}\n{replay(seed, given.jobs, given.plant)}")
                return 1
            if given.seeds == 1:
                print(f"all promises held; {outcome.virtual_s:.1f} virtual seconds, trace {outcome.trace_hash}")
    if given.seeds > 1:
        print(
            f"{given.seeds} seeds, all promises held; {virtual_s / 3600:.1f} virtual hours "
            f"in {time.perf_counter() - started_s:.0f} s"
        )
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="the first seed")
    parser.add_argument("--seeds", type=int, default=1, help="how many, up to the first that fails")
    parser.add_argument("--jobs", type=int, help="about so many trajectories instead of what the seed draws")
    parser.add_argument("--trace", action="store_true", help="print a line per transition")
    parser.add_argument("--plant", choices=sorted(PLANTS), help="plant a bug first, to see it found")
    return parser.parse_args()


def print_trace(outcome: Outcome) -> None:
    """One aligned line per transition."""
    for at_s, who, what, whom, details in outcome.lines:
        print(f"{at_s:9.3f}  {who:<13} {what:<13} {whom:<13} {details}")


def replay(seed: int, jobs: int | None, plant: str | None) -> str:
    """The command that shows the same again."""
    extra = (f" --jobs {jobs}" if jobs else "") + (f" --plant {plant}" if plant else "")
    return f"python -m tests.sim --seed {seed}{extra} --trace"


if __name__ == "__main__":
    sys.exit(main())
