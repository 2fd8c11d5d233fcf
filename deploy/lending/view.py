"""Draws the tables of `rollfab lend`."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from ...fabric.contract.text import counted
from ...fabric.host.command import command
from ...fabric.rules.lending.terms import subject_text


def draw_status(seen: dict[str, Any]) -> Group:
    """Draw the settings, what a switch just did, and the outcome on every serving worker."""
    said = [Text(f"{subject_text(subject)}: {_setting(row)}") for subject, row in seen["lends"].items()]
    if not said:
        said = [
            Text(f"nothing was said yet: serving workers only observe. `{command('lend on --pool NAME')}` lends them")
        ]
    if "switched" in seen:
        said += [Text(line, style="bold") for line in _switched(seen["switched"])]
    table = Table(title="serving workers", title_justify="left", header_style="bold")
    for heading in ("worker", "pool", "lend", "why", "lease", "turns", "guard", "open", "headroom", "probe"):
        table.add_column(heading, overflow="fold")
    for row in seen["serving_workers"]:
        table.add_row(*map(Text, _worker(row)))
    return Group(*said, *([table] if table.row_count else [Text("no serving worker is known to the broker")]))


def _switched(row: dict[str, Any]) -> list[str]:
    """Say who may lend after the switch, and what was given back."""
    whom, may_lend = row["worker_ids"], row["lending_ids"]
    lines = [f"{subject_text(row['subject'])}, now: {counted(len(may_lend), 'worker')} of {len(whom)} may lend"]
    if row["taken_ids"]:
        lines.append(
            f"taken back: {counted(len(row['taken_ids']), 'worker')}, {counted(row['turn_count'], 'running turn')} "
            f"({', '.join(row['taken_ids'])}), looked at for {row['waited_s']:.1f} s"
        )
    elif row["setting"]["mode"] in ("off", "observe") and whom:
        lines.append("nothing had to be taken back: no turn ran there")
    for name, (count, age_ms) in sorted(row["waiting"].items()):
        lines.append(
            f"not yet: {name} told last, {age_ms / 1000:.1f} s ago, that {counted(count, 'turn')} ran; "
            f"it has not answered the switch yet: `{command('lend status')}` shows when it has"
        )
    if row["setting"]["mode"] == "on" and len(may_lend) < len(whom):
        lines.append("what holds the others back is said below, under why")
    return lines


def _setting(row: dict[str, Any]) -> str:
    bounds = [row["mode"]]
    if row["slot_count_max"] is not None:
        bounds.append(f"at most {counted(row['slot_count_max'], 'slot')}")
    for name, what in (("compute", "compute"), ("memory", "KV cache")):
        share = row[f"{name}_fraction_max"]
        if share is not None:
            bounds.append(f"at most {share:.0%} of {what}")
    bounds += [f"{text} UTC" for text in row["hours"]]
    if row["mode"] == "on" and row["names"]:
        bounds.append("of " + ", ".join(map(subject_text, row["names"])))
    at = datetime.datetime.fromtimestamp(row["said_at_ms"] / 1000, datetime.UTC)
    who = f"  (said by {row['said_by']}, {at:%Y-%m-%d %H:%M:%S} UTC)" if row["said_by"] else ""
    return ", ".join(bounds) + (f"  {row['reason']}" if row["reason"] else "") + who


def _worker(row: dict[str, Any]) -> list[str]:
    terms, lease = row["terms"], row["lease"]
    guard = row["guard_state"] or "none"
    return [
        row["worker_id"],
        row["pool"],
        terms["mode"],
        terms["reason"],
        f"{counted(lease['slot_count'], 'slot')} for {lease['run_id']}" if lease else "none",
        str(row["running_count"]),
        f"{guard}: {row['guard_reason']}" if row["guard_reason"] else guard,
        _percent(row["open_fraction"]),
        _percent(row["headroom_fraction"]),
        row["probe"] or "none",
    ]


def draw_log(seen: dict[str, Any]) -> Table | Text:
    """Draw lends, revokes and switches, the newest last."""
    if not seen["events"]:
        return Text("nothing was lent, revoked or switched yet")
    table = Table(title="lends, revokes and switches", title_justify="left", header_style="bold")
    for heading in ("when (UTC)", "what", "whom", "how", "by", "why"):
        table.add_column(heading, overflow="fold")
    for event in seen["events"]:
        facts = event["facts"]
        at = datetime.datetime.fromtimestamp(event["time_ms"] / 1000, datetime.UTC)
        subject = str(facts.get("worker_id", ""))
        row = (f"{at:%Y-%m-%d %H:%M:%S}", event["kind"], subject_text(subject), _how(facts))
        table.add_row(*map(Text, (*row, str(facts.get("said_by", "")), str(facts.get("reason", "")))))
    if seen["is_cut"]:
        table.caption = "older events, if any, were not looked at: a higher --limit does"
    return table


def _how(facts: dict[str, Any]) -> str:
    if "value" not in facts:
        return f"{counted(facts.get('slot_count', 0), 'slot')} for {facts.get('run_id', '')}"
    bounds = [f"{name.split('_')[0]} {facts[name]}" for name in facts if name.endswith("_max")]
    return ", ".join([str(facts["value"]), *bounds, *map(str, facts.get("hours", []))])


def draw_report(seen: dict[str, Any]) -> Group:
    """Draw a table for each worker: requests with rollouts and without, and what rollouts got."""
    parts = [part for row in seen["workers"] for part in (_requests(row), Text(_given(row)), Text(""))]
    return Group(*parts, Text(_verdict(seen["totals"], [name for row in seen["workers"] for name in row["few"]])))


def _requests(row: dict[str, Any]) -> Table:
    title = f"{row['worker_id']}, measured for {_duration(row['since_s'])}"
    table = Table(title=title, title_justify="left", header_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    for heading in ("serving requests", "alone", "with rollouts", "more"):
        table.add_column(heading, justify="left" if heading == "serving requests" else "right", overflow="fold")
    alone, shared = row["alone"], row["shared"]
    table.add_row("number", *(f"{each.get('request_count', 0):,.0f}" for each in (alone, shared)))
    table.add_row("within the objectives", _attained(alone), _attained(shared))
    table.add_row("of the newest, in", *map(_sample, (alone, shared)))
    for what in ("ttft", "tpot"):
        for rank in ("p50", "p99"):
            name, tax = f"{what}_ms_{rank}", row[f"{what}_tax_{rank}"]
            cells = (_latency(row, kind, name) for kind in ("alone", "shared"))
            table.add_row(f"{what.upper()} {rank.upper()}, ms", *cells, "" if tax is None else f"{tax:+.1%}")
    bounds = f"{row['ttft_slo_ms']:g} and {row['tpot_slo_ms']:g} ms"
    beyond = f"{row['violation_count']:,} beyond with rollouts"
    table.caption = f"objectives, TTFT and TPOT: {bounds}; {beyond}; in brackets: where the true P99 is, with 95 %"
    table.caption_justify = "left"
    return table


def _given(row: dict[str, Any]) -> str:
    lent, computing, could = (_duration(row[name]) for name in ("lent_s", "computing_s", "could_lend_s"))
    said = f"rollouts: {row['token_count']:,} tokens; lent {lent}, computing {computing}; {could} more could be lent"
    if not row["reclaim_count"]:
        return said
    note = f"of {row['reclaim_count']}: too few" if "reclaim_ms_p99" in row["few"] else f"of {row['reclaim_count']:,}"
    return (
        f"{said}; given back within {row['reclaim_ms_p50']:.1f} ms (P50), {row['reclaim_ms_p99']:.1f} ms (P99 {note})"
    )


def _sample(row: dict[str, float]) -> str:
    if not row.get("ttft_count"):
        return "–"
    return f"{row['ttft_count']:,.0f} in {_duration(row.get('span_s', 0.0))}"


def _latency(row: dict[str, Any], kind: str, name: str) -> str:
    """Write one figure; for a P99 also where the true one is, or of how few requests it is."""
    figures = row[kind]
    if not figures.get("request_count") or not figures.get(name):
        return "–"
    text = f"{figures[name]:.1f}"
    if f"{kind}.{name}" in row["few"]:
        count = figures.get(name.replace("_ms_p99", "_count"), figures["request_count"])
        return f"{text} (of {count:,.0f}: too few)"
    high = figures.get(f"{name}_high")
    return f"{text} ({figures[f'{name}_low']:.1f} to {high:.1f})" if high else text


def _attained(row: dict[str, float]) -> str:
    return f"{row.get('attained_fraction', 0.0):.2%}" if row.get("request_count") else "–"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _verdict(totals: dict[str, Any], few: Sequence[str]) -> str:
    """Write one sentence that a team can decide on."""
    if not totals["worker_count"]:
        return "no serving worker has reported yet: reports come from those that were started with a probe"
    if not totals["shared_request_count"]:
        return f"no request met a rollout yet; {totals['could_lend_s']:.0f} s could have been lent"
    worst = [totals[f"{name}_tax_p99_worst"] for name in ("ttft", "tpot")]
    taxes = ", ".join(
        f"{name} P99 {tax:+.1%}" for name, tax in zip(("TTFT", "TPOT"), worst, strict=True) if tax is not None
    )
    if taxes and any(name != "reclaim_ms_p99" for name in few):
        taxes += " (a P99 of so few requests says little: wait for 368 of each kind)"
    return (
        f"with rollouts {totals['shared_attained_fraction']:.2%} of {totals['shared_request_count']:,} requests were "
        f"within the objectives, {totals['violation_count']:,} beyond; at worst {taxes or 'nothing to compare with'}; "
        f"{totals['token_count']:,} rollout tokens in {totals['computing_s']:.0f} s"
    )


def _percent(fraction: float | None) -> str:
    return "–" if fraction is None else f"{fraction:.0%}"
