"""Reports measurements: percentiles, numbers, the machine, and one object for programs."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
from rich.table import Table

from ..cli.printing import Console


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
        """Return one line of JSON."""
        return orjson.dumps(self).decode()


def percentile(values: Sequence[float], fraction: float) -> float:
    """Return a value that at least `fraction` of all are at or below; by rank, so it is one that occurred."""
    assert values and 0 < fraction <= 1
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * fraction))]


def number(value: float) -> str:
    """Write a figure with the three digits that matter."""
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
