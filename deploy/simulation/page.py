"""One HTML file of what was simulated: the tables, and for each arm what happened when. It loads nothing else."""

from __future__ import annotations

import html
import io
import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from ...fabric.host.directories import write_private
from .report import COLUMNS, RUN_COLUMNS, cells_of, notes_of, run_cells
from .run import Run
from .timeline import MINUTE_S, Moment, Timeline, by_minute

POINT_COUNT = 240  # along a line: more are not seen
LANE_COUNT = 64  # of lent GPUs shown one by one
OWN, LENT, SERVING, IDLE = "#1c7ed6", "#2f9e44", "#f08c00", "#e9ecef"

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 68rem; margin: 2rem auto; padding: 0 1rem; color: #212529 }
table { border-collapse: collapse } td, th { padding: .2rem .7rem; text-align: right; border-bottom: 1px solid #dee2e6 }
td:first-child, th:first-child { text-align: left }
.tag { background: #fff3bf; padding: .5rem 1rem } .note { color: #868e96 }
svg { width: 100%; height: auto } h2 { margin-top: 2.5rem }
"""


def write_page(found: dict[str, Any], shown: Sequence[tuple[Run, Timeline]], path: Path) -> None:
    """Write the report: all or nothing, and never over a file that came meanwhile.

    Raises:
        OSError: it cannot be written.

    Args:
        found: what report.results returned.
        shown: runs whose time lines are drawn.
    """
    scenario = found["scenario"]
    own, lent = scenario["cluster"]["dedicated"], scenario["cluster"]["serving"]
    title = html.escape(f"{scenario['name']}, simulated: {own} + {lent} GPUs, {scenario['work']['kind']}")
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title><style>{STYLE}</style>",
        f"<h1>{title}</h1><p class=tag>Every figure here is {html.escape(found['tag'])}.</p>",
    ]
    for part in found["by_load"]:
        rows = [[name, *cells_of(row)] for name, row in part["arms"].items()]
        parts += [f"<h2>Load {part['load']:g}</h2>", _table(COLUMNS, rows)]
        if of_runs := run_cells(part["arms"]):
            parts += ["<h3>Each run</h3>", _table(RUN_COLUMNS, of_runs)]
        for run, timeline in shown:
            if run.load == part["load"]:
                text = html.escape(part["arms"][run.arm]["text"])
                parts += [f"<h3>{html.escape(run.arm)}, seed {run.seed}: {text}</h3>", _figure(scenario, run, timeline)]
    parts += [f"<p class=note>{html.escape(note)}</p>" for note in (*notes_of(found)[1:], *READING)]
    parts.append(f"<details><summary>The scenario</summary><pre>{html.escape(json.dumps(scenario, indent=1))}</pre>")
    write_private(path, "\n".join(parts) + "</details></html>\n", is_new=True)


READING = (
    "Instances in use: dedicated ones, lent ones for rollouts, and serving; the rest of their time they stand idle.",
    "Lent: a line per serving instance, green while it is lent. Vertical lines: a step ends.",
    "SLO: the P99 of a minute's requests over its objective; above 1 it is missed.",
    "Trajectories: under way, and queued; the slope to a step's end is its tail.",
)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(name)}" for name in columns)
    written = ["<tr>" + "".join(f"<td>{html.escape(cell)}" for cell in row) for row in rows]
    return f"<table><tr>{head}{''.join(written)}</table>"


def _figure(scenario: Mapping[str, Any], run: Run, timeline: Timeline) -> str:
    """Draw one run as SVG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "rollfab"
    moments = [each for each in timeline.moments if each.at_s <= run.span_s]
    lane_count = len(moments[0].leased)
    heights = (3, 1 + min(lane_count, LANE_COUNT) / 12, 2, 2) if lane_count else (3, 2)
    figure, axes = pyplot.subplots(
        len(heights), 1, figsize=(11, 1.1 * sum(heights)), sharex=True, height_ratios=heights, layout="constrained"
    )
    _draw_use(axes[0], scenario, moments)
    if lane_count:
        _draw_leases(axes[1], moments)
        _draw_slo(axes[2], scenario, run, timeline)
    _draw_trajectories(axes[-1], moments)
    for each in axes:
        for step in run.steps:
            each.axvline(step.at_s / MINUTE_S, color="#adb5bd", linewidth=0.7)
    axes[-1].set_xlabel("simulated minutes")
    axes[-1].set_xlim(0, run.span_s / MINUTE_S)
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    pyplot.close(figure)
    return text.getvalue().partition("<svg")[1] + text.getvalue().partition("<svg")[2]


def _draw_use(axes: Any, scenario: Mapping[str, Any], moments: Sequence[Moment]) -> None:
    """Draw how many instances compute what, between two moments each."""
    some = moments[:: max(1, len(moments) // POINT_COUNT)]
    at = [after.at_s / MINUTE_S for after in some[1:]]
    rows = [
        [
            max(0.0, getattr(after, name) - getattr(before, name)) / (after.at_s - before.at_s)
            for before, after in pairwise(some)
        ]
        for name in ("own_s", "lent_s", "serving_s")
    ]
    axes.stackplot(at, *rows, labels=("dedicated", "lent", "serving"), colors=(OWN, LENT, SERVING), linewidth=0)
    part = scenario["cluster"]
    axes.axhline((part["dedicated"] + part["serving"]) / part["gpus_per_instance"], color="#868e96", linewidth=0.7)
    axes.set_ylabel("instances in use")
    axes.legend(loc="upper right", fontsize=8, ncols=3)


def _draw_leases(axes: Any, moments: Sequence[Moment]) -> None:
    """Draw a lane for each GPU that may be lent, filled while it is."""
    for lane in range(min(len(moments[0].leased), LANE_COUNT)):
        spans, since = [], None
        for moment in moments:
            if moment.leased[lane] and since is None:
                since = moment.at_s
            elif not moment.leased[lane] and since is not None:
                spans.append((since / MINUTE_S, (moment.at_s - since) / MINUTE_S))
                since = None
        if since is not None:
            spans.append((since / MINUTE_S, (moments[-1].at_s - since) / MINUTE_S))
        axes.broken_barh(spans, (lane + 0.1, 0.8), facecolors=LENT)
    axes.set_ylim(0, min(len(moments[0].leased), LANE_COUNT))
    axes.set_ylabel("lent")
    axes.set_yticks([])


def _draw_slo(axes: Any, scenario: Mapping[str, Any], run: Run, timeline: Timeline) -> None:
    """Draw P99s of each minute over their objectives."""
    part, rows = scenario["serving"], by_minute(timeline.requests, run.span_s)
    rows = [each for each in rows if each[0] < run.span_s]
    for index, name in ((1, "ttft"), (2, "tpot")):
        values = [each[index] / part[f"{name}_ms"] for each in rows]
        axes.plot([each[0] / MINUTE_S for each in rows], values, label=f"{name.upper()} P99", linewidth=1.2)
    axes.axhline(1.0, color="#e03131", linewidth=0.9)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("over objective")
    axes.legend(loc="upper right", fontsize=8, ncols=2)


def _draw_trajectories(axes: Any, moments: Sequence[Moment]) -> None:
    at = [each.at_s / MINUTE_S for each in moments]
    axes.plot(at, [each.running for each in moments], label="under way", color=OWN, linewidth=1.2)
    axes.plot(at, [each.queued for each in moments], label="queued", color="#868e96", linewidth=1.2)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("trajectories")
    axes.legend(loc="upper right", fontsize=8, ncols=2)
