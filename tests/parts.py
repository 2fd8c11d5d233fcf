"""Run every test, part by part: `make test-all`; within so many minutes with `make test-all MINUTES=85`.

Each part is a target of the Makefile. What tells most goes first. With a limit, a part that would not end in time is
left out: the first part shows how fast this machine is, and `share` how long the others take beside it. The last lines
name every part, and what became of it; what was left out is told as left out, never as passed. A test that failed is
played once more with nothing beside it (`tests/again.py`); the last lines name it if it passes then.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.again import VARIABLE

MARGIN = 1.2  # of an estimate: machines have more to do at one time than at another


@dataclass(frozen=True)
class Part:
    """name: told at the end. words: for make. share: its time over the first part's, as measured."""

    name: str
    words: tuple[str, ...]
    share: float


PARTS = (
    Part("check, and tests but slow ones", ("test",), 1.0),
    Part("slow tests", ("test-slow",), 1.4),
    Part("vLLM, side by side", ("test-vllm-shared",), 0.9),  # with installing it
    Part("tests that need cores for themselves", ("test-alone",), 0.65),
    Part("vLLM, with cores for itself", ("test-vllm-alone",), 0.7),
    Part("TRL", ("test-trl",), 0.15),
    Part("verl", ("test-verl",), 0.3),
    Part("long tests", ("test-long",), 1.0),
)


@dataclass(frozen=True)
class Outcome:
    """What became of a part. is_good: None where it was left out. again: its tests that passed only alone."""

    name: str
    is_good: bool | None
    told: str
    again: tuple[str, ...] = ()


def run(
    parts: Sequence[Part],
    limit_s: float | None,
    make: Callable[[Part], tuple[bool, tuple[str, ...]]],
    now_s: Callable[[], float],
) -> list[Outcome]:
    """Run what fits into `limit_s` seconds; a part that fails keeps no other from running.

    Args:
        make: runs a part; returns whether it passed, and which of its tests passed only alone.
    """
    begun_s, unit_s, found = now_s(), None, list[Outcome]()
    for part in parts:
        why = None if limit_s is None or not found else _why_not(part, limit_s - (now_s() - begun_s), unit_s)
        if why is not None:
            found.append(Outcome(part.name, None, f"LEFT OUT: {why}; make {' '.join(part.words)}"))
            continue
        at_s = now_s()
        try:
            is_good, again = make(part)
        except KeyboardInterrupt:
            return [*found, Outcome(part.name, False, "INTERRUPTED")]
        took_s = now_s() - at_s
        if not found and is_good:  # one that failed may have done so at once
            unit_s = took_s / part.share
        told = f"{'passed' if is_good else 'FAILED'} in {took_s / 60:.1f} min"
        found.append(Outcome(part.name, is_good, told + (f", {len(again)} ONLY ALONE:" if again else ""), again))
    return found


def _why_not(part: Part, left_s: float, unit_s: float | None) -> str | None:
    """Tell why a part is not begun; None: it fits."""
    if unit_s is None:
        return "the first part failed, so how long others take is not known"
    needed_s = MARGIN * part.share * unit_s
    return f"it takes {needed_s / 60:.0f} min, and {max(0.0, left_s) / 60:.0f} are left" if needed_s > left_s else None


def minutes(text: str) -> float:
    """Read the limit. Raises ValueError: it is none."""
    found = float(text)
    if not 1 <= found < math.inf:
        raise ValueError(text)
    return found


def main(words: Sequence[str]) -> int:
    """Run all parts and tell; returns 1 when one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--minutes", type=minutes, help="1 and more: leave out what does not fit; by default nothing is"
    )
    limit_min = parser.parse_args(words).minutes

    def make(part: Part) -> tuple[bool, tuple[str, ...]]:
        print(f"\n=== {part.name}: make {' '.join(part.words)}", flush=True)
        with tempfile.TemporaryDirectory() as directory:
            again = Path(directory, "again")
            place = {**os.environ, "PYTEST_PLUGINS": "tests.again", VARIABLE: str(again)}
            is_good = subprocess.run(["make", *part.words], env=place, check=False).returncode == 0
            return is_good, tuple(again.read_text("utf-8").splitlines()) if again.exists() else ()

    found = run(PARTS, None if limit_min is None else 60 * limit_min, make, time.monotonic)
    print("\n=== all parts")
    for each in found:
        print("\n  ".join((f"{each.name}: {each.told}", *each.again)))
    return 1 if any(each.is_good is False for each in found) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
