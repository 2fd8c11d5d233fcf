"""`python -m tests.versus ../before queue overhead`: benches of another checkout and of this one, by turns.

Benches compare us with others in one run; this compares us with ourselves. Each checkout has a `.venv` of its own. Each
number of both reports is shown as new over old: the median of the pairs, with the least and the greatest.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parents[1]
LEFT_OUT = ("spread", "quartiles", "examples", "slowest")  # parts of paths: of no use over one another


def numbers(value: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Name every number of a report by where it stands; rows go by their names."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        yield path, float(value)
    elif isinstance(value, Mapping):
        for name, each in value.items():
            if not any(word in name for word in LEFT_OUT):
                yield from numbers(each, f"{path}.{name}" if path else name)
    elif isinstance(value, list) and all(isinstance(each, Mapping) and "name" in each for each in value):
        for each in value:
            yield from numbers({name: part for name, part in each.items() if name != "name"}, f"{path}[{each['name']}]")


def compared(pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> dict[str, list[float]]:
    """Divide the new report's numbers by the old one's, pair by pair; what one of them has not is left out."""
    found: dict[str, list[float]] = {}
    for old, new in pairs:
        before, after = (
            dict(numbers({part: report.get(part, {}) for part in ("results", "ratio")})) for report in (old, new)
        )
        for path in before.keys() & after.keys():
            if before[path]:
                found.setdefault(path, []).append(after[path] / before[path])
    return {path: ratios for path, ratios in sorted(found.items()) if len(ratios) == len(pairs)}


def report_of(checkout: Path, venv: str, bench: str) -> dict[str, Any]:
    """Run a bench of a checkout. Raises CalledProcessError: it failed; its own words stand above."""
    words = [str(checkout / venv / "bin" / "rollfab"), "bench", bench, "--quick", "--json"]
    print(f"{checkout}: {bench}", file=sys.stderr, flush=True)
    found: dict[str, Any] = json.loads(subprocess.check_output(words, cwd=checkout, stdin=subprocess.DEVNULL))
    return found


def main() -> int:
    """Print a table for each bench."""
    parser = argparse.ArgumentParser(prog="python -m tests.versus", description=__doc__)
    parser.add_argument("old", type=Path, help="a checkout of what was before, with its .venv")
    parser.add_argument("benches", nargs="+", metavar="bench", help="as `rollfab bench` knows it in both")
    parser.add_argument("--pairs", type=int, default=3, help="how often both run")
    parser.add_argument("--venv", default=".venv", help="of both: .venv-vllm for engine and coserve")
    given = parser.parse_args()
    sides = (given.old.resolve(), HERE)
    for bench in given.benches:
        pairs = []
        for number in range(given.pairs):
            order = sides if number % 2 == 0 else sides[::-1]  # whoever comes first may find a cooler machine
            made = {side: report_of(side, given.venv, bench) for side in order}
            pairs.append((made[sides[0]], made[sides[1]]))
        for path, ratios in compared(pairs).items():
            print(f"{bench:10} {median(ratios):6.2f} ({min(ratios):.2f} to {max(ratios):.2f})  {path}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
