"""Shared by every bench: rounds that alternate, medians with their spread, the machine, and the report.

- Arms are measured in turn, A B A B …, so that what else the machine does hits all alike; only ratios between arms of
  one run mean anything.
- A figure is a median; its spread is the lowest and highest round.
- A report is one object: name, params, results, baselines, ratio, and beside them the machine.
"""

from __future__ import annotations

import contextlib
import os
import platform
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import orjson
from rich.table import Table

from ...fabric.contract.errors import FabricError
from ..cli.printing import Console
from ..cli.printing import show as write

T = TypeVar("T")


@dataclass(frozen=True)
class Figure:
    """Rounds of one measurement."""

    rounds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.rounds)

    @property
    def spread(self) -> tuple[float, float]:
        """The lowest and the highest round."""
        return min(self.rounds), max(self.rounds)

    def __str__(self) -> str:
        low, high = self.spread
        return f"{number(self.median)}  ({number(low)} to {number(high)})"


@dataclass(frozen=True, kw_only=True)
class Report:
    """The findings of a bench, for programs. Values are numbers, texts, None, and lists and dicts of them."""

    name: str
    params: dict[str, Any]
    results: dict[str, Any]
    baselines: dict[str, Any]
    ratio: dict[str, Any]
    machine: dict[str, Any] = field(default_factory=lambda: machine_facts())

    def json(self) -> str:
        """One line of JSON."""
        return orjson.dumps(self).decode()


def run_bench(measure: Callable[[], Report], print_table: Callable[[Report], None], *, json_output: bool) -> int:
    """Measure, then print one object or a table; returns the exit code: 1 when measuring failed, and why is said."""
    try:
        report = measure()
    except FabricError as error:
        Console(stderr=True).print(str(error), markup=False, highlight=False, soft_wrap=True)
        return 1
    if json_output:
        write(report.json())
    else:
        print_table(report)
    return 0


def alternate(arms: Mapping[str, Callable[[], T]], round_count: int) -> dict[str, list[T]]:
    """Measure all arms `round_count` times, in turn; results by arm."""
    found: dict[str, list[T]] = {name: [] for name in arms}
    for _ in range(round_count):
        for name, measure in arms.items():
            found[name].append(measure())
    return found


def percentile(values: Sequence[float], fraction: float) -> float:
    """The value that `fraction` of all are at or below; by rank, so it is one that occurred."""
    assert values and 0 < fraction <= 1
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * fraction))]


def number(value: float) -> str:
    """A figure with three digits that matter."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def machine_facts() -> dict[str, Any]:
    """Describe the machine: a ratio of two runs on different machines means nothing."""
    return {
        "processor": _processor(),
        "core_count": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "load_1_min": round(os.getloadavg()[0], 2),  # above core_count: others were running too
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


@contextmanager
def split_cores(server_pid: int | None) -> Iterator[bool]:
    """Give the server one core and this process with all its children another, for as long as the block runs.

    Yields:
        Whether it was done: there must be two cores, a server of ours, and a system that can pin.
    """
    can_pin = hasattr(os, "sched_setaffinity") and len(os.sched_getaffinity(0)) > 1
    if server_pid is None or not can_pin:
        yield False
        return
    allowed = os.sched_getaffinity(0)
    for thread in os.listdir(f"/proc/{server_pid}/task"):
        os.sched_setaffinity(int(thread), {min(allowed)})
    os.sched_setaffinity(0, {max(allowed)})
    try:
        yield True
    finally:
        os.sched_setaffinity(0, allowed)


def process_cpu_s(pid: int) -> float:
    """CPU seconds that a process has used so far, all its threads; 0 where the system does not say."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / float(os.sysconf("SC_CLK_TCK"))


def child_pids(pid: int) -> list[int]:
    """All processes below this one, also of children; none where the system does not say."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            parents[int(entry.parent.name)] = int(entry.read_text().rpartition(")")[2].split()[1])
    found = [pid]
    for each in found:
        found += [child for child, parent in parents.items() if parent == each]
    return found[1:]


def process_title(pid: int) -> str:
    """The title that `ps` shows of a process; empty where the system does not say."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str] = ()) -> None:
    """Print a table for people; the first column is text, the others are figures."""
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console = Console()
    console.print(table)
    for note in notes:
        console.print(note, style="dim")
