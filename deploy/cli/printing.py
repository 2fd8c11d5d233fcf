"""Prints to a terminal or pipe: what comes from the broker was written by anybody, and moves no cursor here."""

from __future__ import annotations

import itertools
import os
import sys
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import rich.console
from rich.cells import cell_len, set_cell_size
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from ...fabric.contract.text import HARMFUL, counted, one_line, printable

PIPE_WIDTH = 1000  # no row is as long
NAME_WIDTH_MIN, KEY_WIDTH_MIN = 6, 12  # of columns of names; of the first
NAMES_SHOWN = 4
SPARKS = "▁▂▃▄▅▆▇█"


class Console(rich.console.Console):
    """Rich's, whose own control sequences alone reach the terminal; into a file or a pipe it writes whole lines.

    Brackets in a text are brackets: it may quote a name or a path. Colours come as styles, or with `Text.from_markup`.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, markup=False)
        if not self.is_terminal and settings.get("width") is None and "COLUMNS" not in self._environ:
            self.width = PIPE_WIDTH

    def on_broken_pipe(self) -> None:
        """End well where who reads has enough, as `… | head -1` does; the library ends with 1."""
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0)

    def render(
        self, renderable: rich.console.RenderableType, options: rich.console.ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Render as the library does, with every text made printable; no blanks end a line of a file or a pipe."""
        segments = super().render(renderable, options)
        for segment in segments if self.is_terminal else _without_blank_ends(segments):
            is_plain = segment.control or not HARMFUL.search(segment.text)
            yield segment if is_plain else Segment(printable(segment.text), segment.style)


def _without_blank_ends(segments: Iterable[Segment]) -> Iterator[Segment]:
    """Leave out the blanks before the end of each line: tables are padded to the width, which is large in a pipe."""
    blanks: list[Segment] = []
    for segment in segments:
        if segment.control:
            yield segment
            continue
        for index, part in enumerate(segment.text.split("\n")):
            if index:
                blanks = []
                yield Segment.line()
            text = part.rstrip(" ")
            if text:
                yield from blanks
                blanks = []
                yield Segment(text, segment.style)
            if text != part:
                blanks.append(Segment(part[len(text) :], segment.style))


def show(text: str, *, flush: bool = False) -> None:
    """Print text as it is, but for what is harmful in it."""
    print(printable(text), flush=flush)


def show_json(value: Any, *, flush: bool = False) -> None:
    """Print plain values as one line of JSON; what is harmful in texts stands as the escapes of JSON."""
    from ...fabric.contract.wire import dump_json  # brings numpy

    escaped = HARMFUL.sub(lambda found: f"\\u{ord(found.group()):04x}", dump_json(value).decode())
    print(escaped, flush=flush)


def tell_written(path: Path, noun: str, count: int, json: bool, but: str = "") -> None:
    """Say how many rows or groups a file got; 0: there is no file."""
    if json:
        show_json({"path": str(path), f"{noun}_count": count})
    else:
        show(f"{counted(count, noun)} written to {path}{but}" if count else f"{path} is not written")


class _Narrowing(Table):
    """A table whose last columns are left out where the first would keep too little of its names."""

    def __rich_console__(
        self, console: rich.console.Console, options: rich.console.ConsoleOptions
    ) -> rich.console.RenderResult:
        widths, least = self._widths(), self._least()
        ends = list(itertools.accumulate(1 + width for width in least))
        count = max(1, bisect_right(ends, options.max_width + 1))
        widths = widths[:count]
        while sum(widths) + count - 1 > max(options.max_width, ends[count - 1] - 1):
            index = max(range(count), key=lambda each: (widths[each] > least[each], widths[each]))
            widths[index] -= 1
        fitting = copy(self)
        pairs = zip(self.columns, widths, strict=False)  # those that are left out have no width
        fitting.columns = [replace(column, width=width, min_width=None) for column, width in pairs]
        yield from Table.__rich_console__(fitting, console, options)

    def _widths(self) -> list[int]:
        """Return the cells that each column would take."""
        return [
            max(cell_len(one_line(each.text if isinstance(each, Cell) else str(each))) for each in texts)
            for texts in ([column.header, *column.cells] for column in self.columns)
        ]

    def _least(self) -> list[int]:
        """Return the cells without which a column tells nothing."""
        words = [KEY_WIDTH_MIN if not at else NAME_WIDTH_MIN for at in range(len(self.columns))]
        return [
            width if column.no_wrap else min(width, word)
            for column, width, word in zip(self.columns, self._widths(), words, strict=True)
        ]


def new_table(*headings: str, title: str | None = None, left: Collection[str] = ()) -> Table:
    """Make a table without lines, for rows of `cells`: each is one line, also where the terminal is narrow.

    left: columns of names and words, which give way first where there is no room for all; the others hold figures.
    """
    table = _Narrowing(title=title, title_justify="left", title_style="bold", header_style="dim", box=None)
    table.padding, table.pad_edge = (0, 1, 0, 0), False
    for heading in headings:
        if heading in left:
            table.add_column(heading, overflow="ellipsis")
        else:
            table.add_column(heading, overflow="ellipsis", justify="right", no_wrap=True)
    return table


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of one line, which leaves out the middle of what is longer: names differ at both ends."""

    text: str
    style: str = ""

    def __rich_console__(
        self, console: rich.console.Console, options: rich.console.ConsoleOptions
    ) -> rich.console.RenderResult:
        yield Text(elided(self.text, options.max_width), style=self.style, no_wrap=True, justify=options.justify)

    def __rich_measure__(self, console: rich.console.Console, options: rich.console.ConsoleOptions) -> Measurement:
        return Measurement(1, max(1, min(cell_len(one_line(self.text)), options.max_width)))


def cells(*values: str | Cell) -> list[Cell]:
    return [value if isinstance(value, Cell) else Cell(value) for value in values]


def elided(text: str, width: int) -> str:
    """Leave out the middle of a text that takes more than so many cells: names differ at their ends, too."""
    line = one_line(text)
    if cell_len(line) <= width:
        return line
    head = set_cell_size(line, width // 2).rstrip()
    tail = set_cell_size(line[::-1], width - width // 2 - 1)[::-1].lstrip()
    return f"{head}…{tail}" if width > 1 else "…"[:width]


def said_once(rows: Iterable[tuple[str, str, str]], count: int) -> list[Text]:
    """Write what some of `count` say, a line each, that several say once. rows: who, what, and its style."""
    said: dict[tuple[str, str], list[str]] = {}
    for name, text, style in rows:
        said.setdefault((text, style), []).append(name)
    lines = []
    for (text, style), names in said.items():
        more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
        whom = "" if len(names) == count > 1 else f"{', '.join(names[:NAMES_SHOWN])}{more}: "
        lines.append(Text(f"  {one_line(whom)}{one_line(text)}", style=style))
    return lines


def brief(count: int) -> str:
    """Write a count in about five characters: 9,999, 12.3k, 3.4M."""
    if abs(count) < 10_000:
        return f"{count:,}"
    for size, unit in ((10**3, "k"), (10**6, "M")):
        if abs(count) < 999.5 * size:
            return f"{count / size:.3g}{unit}"
    return f"{count / 10**9:.4g}G"


def spark(values: list[float], width: int = 72) -> str:
    """Draw values as a row of block characters, scaled from 0 (or below) to 1."""
    if not values:
        return ""
    low, high = min(0.0, *values), max(1.0, *values)
    recent = values[-width:]
    return "".join(SPARKS[round((value - low) / (high - low) * (len(SPARKS) - 1))] for value in recent)
