"""`rollfab history`: what happened over the last hours or days, and whether lending hurt anybody's users."""

from __future__ import annotations

import re
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ...fabric.contract.errors import ConfigError
from ...fabric.contract.text import cleaned
from ...fabric.inspect.history import HistoryPoint, LendingVerdict, lending_verdicts, points, row_columns, row_of
from ...trainer.files import check_new, write_rows
from ..cli.options import AsJson, Url, need_url, with_ports
from ..cli.printing import Console, show_json, spark, tell_written
from ..cli.speech import say_nothing

if TYPE_CHECKING:
    from ...fabric.opened import RedisFabric

SINCE = re.compile(r"(\d{1,6}(?:\.\d+)?)\s*(m|min|h|d)")
UNIT_MS = {"m": 60_000, "min": 60_000, "h": 3_600_000, "d": 86_400_000}
POINT_COUNT = 36  # as wide as a terminal has room for
JSON_POINT_COUNT = 1000
ROW_COUNT_MAX = 1_000_000  # of a file: more than are kept
STYLES = {"yes": "bold red", "unclear": "yellow", "no": "green", "idle": "dim"}


def register(app: typer.Typer) -> None:
    """Add the command of this file."""

    @app.command()
    def history(
        since: Annotated[str, typer.Option(help="How far back: 30m, 12h, 3d; a week is kept at most.")] = "12h",
        output: Annotated[
            Path | None,
            typer.Option(
                help="A new file, .jsonl or .parquet, in place of printing: a row for each sample that is kept, "
                "against the one before it.",
                dir_okay=False,
                show_default=False,
            ),
        ] = None,
        url: Url = None,
        json: AsJson = False,
    ) -> None:
        """Show what happened over the last hours or days, and whether lending hurt anybody's users."""
        back_ms = read_since(since)
        if output is not None:
            check_new(output)
        count_max = ROW_COUNT_MAX if output is not None else JSON_POINT_COUNT if json else POINT_COUNT
        found = with_ports(need_url(url), lambda ports: read(ports, back_ms, count_max))
        if output is not None and found:
            tell_written(output, "row", write_rows(output, map(row_of, found), row_columns()), json)
            return
        verdicts = lending_verdicts(found)
        if json and output is None:
            show_json({"points": [asdict(each) for each in found], "lending": [asdict(each) for each in verdicts]})
        elif found:
            Console().print(draw(found, verdicts), highlight=False)
        else:
            unwritten = "" if output is None else f"{output} is not written: "
            say_nothing(
                f"{unwritten}nothing is kept of the last {since}: a controller takes a sample a minute, so look again "
                "in two minutes (`rollfab status` says whether one runs)"
            )


def read_since(text: str) -> int:
    """Read a length of time, in milliseconds.

    Raises:
        ConfigError: it is none.
    """
    match = SINCE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"--since {text!r:.40} is no length of time: give minutes, hours or days, as 30m, 12h or 3d")
    return int(float(match[1]) * UNIT_MS[match[2]])


async def read(ports: RedisFabric, back_ms: int, count_max: int) -> list[HistoryPoint]:
    """Read what happened until now."""
    now_ms = await ports.board.wall_ms()
    return points(await ports.board.samples(now_ms - back_ms, now_ms), count_max)


def draw(found: list[HistoryPoint], verdicts: list[LendingVerdict]) -> Group:
    """Draw rates and levels as lines of blocks, and the verdicts."""
    first_ms = found[0].time_ms - found[0].span_ms
    lines: list[RenderableType] = [Text(f"{_clock(first_ms)} to {_clock(found[-1].time_ms)} UTC", "bold")]
    table = Table(box=None, pad_edge=False, show_header=False)
    series = {
        "tokens/s": [each.tokens_per_s for each in found],
        "of them lent": [each.lent_tokens_per_s for each in found],
        "rollouts/s": [each.rollouts_per_s for each in found],
        "turns running": [float(each.running_count) for each in found],
        "groups waiting": [float(each.groups_waiting) for each in found],
    }
    for name, values in series.items():
        told = f"{_number(values[-1])} now, {_number(max(values))} most"
        table.add_row(f"  {name}", spark(values, POINT_COUNT), told)
    lines += [table, Text("")]
    lines += [Text(f"  {text}") for text in _standing(found)]
    if verdicts:
        lines += [Text("Did lending hurt users?", "bold")]
    for each in verdicts:
        lines.append(Text(cleaned(f"  {each.worker_id}  {each.words}"), STYLES[each.answer]))
        worst = f"worst P99 beside rollouts: TTFT {each.ttft_ms_p99_worst:.0f} of {each.ttft_slo_ms:.0f} ms, "
        worst += f"TPOT {each.tpot_ms_p99_worst:.1f} of {each.tpot_slo_ms:.1f} ms"
        if each.answer != "idle" and each.request_count:
            lines.append(Padding(Text(worst, "dim"), (0, 0, 0, 4)))
        if each.hurt_at_ms:
            when = ", ".join(map(_clock, each.hurt_at_ms[:8])) + (" …" if len(each.hurt_at_ms) > 8 else "")
            lines.append(Padding(Text(f"late requests in the minutes before {when}", "dim"), (0, 0, 0, 4)))
    return Group(*lines)


def _standing(found: list[HistoryPoint]) -> list[str]:
    """Say for how long runs did not move, and why."""
    spans: dict[tuple[str, str], int] = {}
    for point in found:
        for name, run in point.runs.items():
            if run.cause not in ("moves", ""):
                spans[name, run.cause] = spans.get((name, run.cause), 0) + point.span_ms
    ranked = sorted(spans.items(), key=lambda item: -item[1])[:8]
    return [cleaned(f"{name}: {cause.replace('_', ' ')} for {_span(ms)}") for (name, cause), ms in ranked]


def _clock(time_ms: int) -> str:
    return datetime.fromtimestamp(time_ms / 1000, UTC).strftime("%a %H:%M")


def _span(ms: int) -> str:
    return f"{ms / 60_000:.0f} min" if ms < 7_200_000 else f"{ms / 3_600_000:.1f} h"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.3g}"
