"""What every bench shares: rounds that alternate, medians with their spread, and what processes cost.

Arms are measured in turn, A B A B …, so that what else the machine does hits all alike; only ratios between arms of one
run mean anything. A figure is a median; its spread is the lowest and highest round.
"""

from __future__ import annotations

import contextlib
import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from rollfab.deploy.cli.printing import Console
from rollfab.deploy.cli.printing import show as write
from rollfab.deploy.replay.figures import Report, number
from rollfab.fabric.contract.errors import FabricError

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


def run_bench(
    measure: Callable[[], Report],
    print_table: Callable[[Report], None],
    *,
    json_output: bool,
    faults: Callable[[Report], Sequence[str]] = lambda report: (),
) -> int:
    """Measure, then print one object or a table; returns the exit code: 1 when anything is wrong, and what is said.

    Args:
        measure: raises FabricError when measuring failed.
        print_table: prints a report for people.
        json_output: print one object in place of the table.
        faults: lists what a report shows that should not be.
    """
    try:
        report = measure()
    except FabricError as error:
        complain(str(error))
        return 1
    if json_output:
        write(report.json())
    else:
        print_table(report)
    wrong = faults(report)
    for each in wrong:
        complain(each)
    return 1 if wrong else 0


def complain(text: str) -> None:
    """Say to stderr what is wrong, or what a long bench is about."""
    Console(stderr=True).print(text, highlight=False, soft_wrap=True)


def alternate(arms: Mapping[str, Callable[[], T]], round_count: int) -> dict[str, list[T]]:
    """Measure all arms `round_count` times, in turn; results by arm."""
    found: dict[str, list[T]] = {name: [] for name in arms}
    for _ in range(round_count):
        for name, measure in arms.items():
            found[name].append(measure())
    return found


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
    """What `ps` shows of a process; empty where the system does not say."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""
