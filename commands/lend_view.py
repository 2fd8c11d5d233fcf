"""What `rollfab lend` shows, as tables."""

from __future__ import annotations

import datetime
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from ..fabric.rules.lending import subject_text

__all__ = ["draw_log", "draw_report", "draw_status"]


def draw_status(seen: dict[str, Any]) -> Group:
    """What was said, what a switch just did, and what it comes to on every serving worker."""
    said = [Text(f"{subject_text(subject)}: {_setting(row)}") for subject, row in seen["lends"].items()]
    if not said:
        said = [Text("nothing was said yet: serving workers only observe. `rollfab lend on --pool NAME` lends them")]
    if "switched" in seen:
        said += [Text(line, style="bold") for line in _switched(seen["switched"])]
    table = Table(title="serving workers", title_justify="left", header_style="bold")
    for heading in ("worker", "pool", "lend", "why", "lease", "turns", "guard", "open", "headroom", "probe"):
        table.add_column(heading, overflow="fold")
    for row in seen["serving_workers"]:
        table.add_row(*map(Text, _worker(row)))
    return Group(*said, *([table] if table.row_count else [Text("no serving worker is known to the broker")]))


def _switched(row: dict[str, Any]) -> list[str]:
    """What the switch came to: who may lend, and what was given back."""
    whom, may_lend = row["worker_ids"], row["lending_ids"]
    lines = [f"{subject_text(row['subject'])}, now: {_count(len(may_lend), 'worker')} of {len(whom)} may lend"]
    if row["taken_ids"]:
        lines.append(
            f"taken back: {_count(len(row['taken_ids']), 'worker')}, {_count(row['turn_count'], 'running turn')} "
            f"({', '.join(row['taken_ids'])}), looked at for {row['waited_s']:.1f} s"
        )
    elif row["setting"]["mode"] in ("off", "observe") and whom:
        lines.append("nothing had to be taken back: no turn ran there")
    for name, (count, age_ms) in sorted(row["waiting"].items()):
        lines.append(
            f"not yet: {name} told last, {age_ms / 1000:.1f} s ago, that {_count(count, 'turn')} ran; "
            "it has not answered the switch yet: `rollfab lend status` shows when it has"
        )
    if row["setting"]["mode"] == "on" and len(may_lend) < len(whom):
        lines.append("what holds the others back is said below, under why")
    return lines


def _count(count: int, what: str) -> str:
    return f"{count} {what}" + ("" if count == 1 else "s")


def _setting(row: dict[str, Any]) -> str:
    bounds = [row["mode"]]
    if row["slot_count_max"] is not None:
        bounds.append(f"at most {row['slot_count_max']} slots")
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
        f"{lease['slot_count']} slots for {lease['run_id']}" if lease else "none",
        str(row["running_count"]),
        f"{guard}: {row['guard_reason']}" if row["guard_reason"] else guard,
        _percent(row["open_fraction"]),
        _percent(row["headroom_fraction"]),
        row["probe"] or "none",
    ]


def draw_log(seen: dict[str, Any]) -> Table:
    """Lends, revokes and switches, the newest last."""
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
        return f"{facts.get('slot_count', 0)} slots for {facts.get('run_id', '')}"
    bounds = [f"{name.split('_')[0]} {facts[name]}" for name in facts if name.endswith("_max")]
    return ", ".join([str(facts["value"]), *bounds, *map(str, facts.get("hours", []))])


def draw_report(seen: dict[str, Any]) -> Group:
    """What serving requests saw with rollouts and without, and what rollouts got."""
    table = Table(title="serving requests, alone → with rollouts", title_justify="left", header_style="bold")
    for heading in (
        "worker",
        "requests",
        "attained",
        "TTFT P50 ms",
        "TTFT P99 ms",
        "TPOT P50 ms",
        "TPOT P99 ms",
        "beyond",
    ):
        table.add_column(heading, justify="left" if heading == "worker" else "right", overflow="fold")
    for row in seen["workers"]:
        table.add_row(*_latencies(row))
    given = Table(title="rollouts", title_justify="left", header_style="bold")
    for heading in ("worker", "tokens", "lent", "computing", "could have lent", "reclaims", "reclaim P99 ms"):
        given.add_column(heading, justify="left" if heading == "worker" else "right", overflow="fold")
    for row in seen["workers"]:
        times = [f"{row[name]:.0f} s" for name in ("lent_s", "computing_s", "could_lend_s")]
        reclaim = f"{row['reclaim_ms_p99']:.1f}" if row["reclaim_count"] else ""
        given.add_row(row["worker_id"], f"{row['token_count']:,}", *times, str(row["reclaim_count"]), reclaim)
    return Group(table, given, Text(_verdict(seen["totals"])))


def _latencies(row: dict[str, Any]) -> list[str]:
    alone, shared = row["alone"], row["shared"]
    counts = f"{alone.get('request_count', 0):.0f} → {shared.get('request_count', 0):.0f}"
    attained = f"{_attained(alone)} → {_attained(shared)}"
    cells = []
    for name in ("ttft_ms_p50", "ttft_ms_p99", "tpot_ms_p50", "tpot_ms_p99"):
        tax = row[name.replace("_ms_", "_tax_")]
        cells.append(f"{_number(alone, name)} → {_number(shared, name)}" + ("" if tax is None else f" ({tax:+.1%})"))
    return [row["worker_id"], counts, attained, *cells, str(row["violation_count"])]


def _attained(row: dict[str, float]) -> str:
    return f"{row.get('attained_fraction', 0.0):.2%}" if row.get("request_count") else "–"


def _number(row: dict[str, float], name: str) -> str:
    return f"{row[name]:.1f}" if row.get("request_count") and row.get(name) else "–"


def _verdict(totals: dict[str, Any]) -> str:
    """One sentence that a team can decide on."""
    if not totals["worker_count"]:
        return "no serving worker has reported yet: reports come from those that were started with a probe"
    if not totals["shared_request_count"]:
        return f"no request met a rollout yet; {totals['could_lend_s']:.0f} s could have been lent"
    worst = [totals[f"{name}_tax_p99_worst"] for name in ("ttft", "tpot")]
    taxes = ", ".join(
        f"{name} P99 {tax:+.1%}" for name, tax in zip(("TTFT", "TPOT"), worst, strict=True) if tax is not None
    )
    return (
        f"with rollouts {totals['shared_attained_fraction']:.2%} of {totals['shared_request_count']:,} requests were "
        f"within the objectives, {totals['violation_count']:,} beyond; at worst {taxes or 'nothing to compare with'}; "
        f"{totals['token_count']:,} rollout tokens in {totals['computing_s']:.0f} s"
    )


def _percent(fraction: float | None) -> str:
    return "–" if fraction is None else f"{fraction:.0%}"
