"""Draws the tables of `rollfab lend`."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from ...fabric.contract.sharing import ALL, POOL
from ...fabric.contract.text import counted, one_line
from ...fabric.host.command import command
from ...fabric.rules.lending.terms import subject_text
from ..cli.printing import cells, new_table, said_once


def draw_status(seen: dict[str, Any]) -> Group:
    """Draw the settings, what a switch just did, and the outcome on every serving worker."""
    said = [Text(f"{subject_text(subject)}: {_setting(row)}") for subject, row in seen["lends"].items()]
    if not said:
        said = [
            Text(f"nothing was said yet: serving workers only observe. `{command('lend on --pool NAME')}` lends them")
        ]
    if "switched" in seen:
        said += [Text(line, style="bold") for line in _switched(seen["switched"])]
        said += [Text(line, style="bold") for line in _held_back(seen)]
    rows = seen["serving_workers"]
    if not rows:
        is_silent = "switched" in seen and seen["switched"]["worker_ids"]
        return Group(
            *said, Text(f"no serving worker {'is heard of just now' if is_silent else 'is known to the broker'}")
        )
    names = ("worker", "pool", "lend", "run")
    table = new_table(*names, "slots", "turns", "guard", "open", "headroom", title="serving workers", left=names)
    for row in rows:
        table.add_row(*cells(*_worker(row)))
    notes = [(row["worker_id"], *note) for row in rows for note in _notes(row)]
    return Group(*said, table, *said_once(notes, len(rows)))


def _held_back(seen: dict[str, Any]) -> list[str]:
    """Say after a switch to "on" what else is said of the same workers and holds them back, and what takes it back."""
    switched = seen["switched"]
    if switched["setting"]["mode"] != "on":
        return []
    held = set(switched["worker_ids"]) - set(switched["lending_ids"])
    rows = [row for row in seen["serving_workers"] if row["worker_id"] in held]
    names = {row["worker_id"]: f"--worker {row['worker_id']}" for row in rows}
    names |= {f"{POOL}{row['pool']}": f"--pool {row['pool']}" for row in rows if row["pool"]}
    names |= {ALL: "--all"} if held or not switched["worker_ids"] else {}
    said = {subject: (name, seen["lends"][subject]) for subject, name in names.items() if subject in seen["lends"]}
    return [
        f"{subject_text(subject)}: {what}: `{command(step)}` takes that back"
        for subject, (name, setting) in said.items()
        for what, step in _holds(setting, name, is_switched=subject == switched["subject"])
    ]


def _holds(setting: dict[str, Any], name: str, *, is_switched: bool) -> list[tuple[str, str]]:
    """Name what of one setting holds its workers back now or at times, and the command that takes it back.

    Args:
        name: the words of the command line that name whom it is said of.
    """
    if setting["mode"] != "on":
        step = f"lend clear {name}" if name == "--all" else f"lend on {name}"
        return [] if is_switched else [(f"{setting['mode']}, and the strictest word holds", step)]
    caps = {"slots": "slot_count_max", "compute": "compute_fraction_max", "memory": "memory_fraction_max"}
    found = [
        (f"at most 0 {option}", f"lend limit {name} --{option} none")
        for option, key in caps.items()
        if setting[key] == 0
    ]
    hours = ", ".join(setting["hours"])
    return [*found, *([(f"lent only {hours} UTC", f"lend limit {name} --hours none")] if hours else [])]


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
        lines.append("what holds back those that may not is said behind the table")
    return lines


def _setting(row: dict[str, Any]) -> str:
    bounds = [row["mode"], *_bounds(row)]
    if row["mode"] == "on" and row["names"]:
        bounds.append("of " + ", ".join(map(subject_text, row["names"])))
    at = datetime.datetime.fromtimestamp(row["said_at_ms"] / 1000, datetime.UTC)
    who = f"  (said by {row['said_by']}, {at:%Y-%m-%d %H:%M:%S} UTC)" if row["said_by"] else ""
    return ", ".join(bounds) + (f"  {row['reason']}" if row["reason"] else "") + who


def _bounds(row: dict[str, Any]) -> list[str]:
    """Write the caps and hours of a setting, or of an event that tells of one: an event may hold anything."""
    found, slots = [], row.get("slot_count_max")
    if isinstance(slots, int):
        found.append(f"at most {counted(slots, 'slot')}")
    for name, what in (("compute", "compute"), ("memory", "KV cache")):
        share = row.get(f"{name}_fraction_max")
        if isinstance(share, int | float):
            found.append(f"at most {share:.0%} of {what}")
    hours = row.get("hours")
    return [*found, *(f"{text} UTC" for text in (hours if isinstance(hours, list) else []))]


def _worker(row: dict[str, Any]) -> list[str]:
    lease = row["lease"]
    return [
        row["worker_id"],
        row["pool"],
        row["terms"]["mode"],
        lease["run_id"] if lease else "",
        str(lease["slot_count"]) if lease else "",
        str(row["running_count"]),
        row["guard_state"] or "none",
        _percent(row["open_fraction"]),
        _percent(row["headroom_fraction"]),
    ]


def _notes(row: dict[str, Any]) -> list[tuple[str, str]]:
    """Say why it lends what it does, and by what it sees its engine."""
    found = [(f"lend {row['terms']['mode']}: {row['terms']['reason']}", "")] if row["terms"]["reason"] else []
    if row["guard_reason"]:
        found.append((f"guard {row['guard_state'] or 'none'}: {row['guard_reason']}", "dim"))
    return [*found, (f"probe: {row['probe'] or 'none'}", "dim")]


def draw_log(seen: dict[str, Any]) -> Group:
    """Draw lends, revokes and switches, the newest last."""
    if not seen["events"]:
        return Group(Text("nothing was lent, revoked or switched yet"))
    lines = [Text("lends, revokes and switches (UTC)", style="bold")]
    for event in seen["events"]:
        facts = event["facts"]
        at = datetime.datetime.fromtimestamp(event["time_ms"] / 1000, datetime.UTC)
        subject = subject_text(str(facts.get("worker_id", "")))
        lines.append(Text(f"{at:%Y-%m-%d %H:%M:%S}  {event['kind']}  {one_line(f'{subject}: {_how(facts)}')}"))
        by, why = str(facts.get("said_by", "")), str(facts.get("reason", ""))
        if by or why:
            lines.append(Text(one_line(f"  {f'by {by}' if by else 'why'}{f': {why}' if why else ''}"), style="dim"))
    if seen["is_cut"]:
        lines.append(Text("older events, if any, were not looked at: a higher --limit does", style="dim"))
    return Group(*lines)


def _how(facts: dict[str, Any]) -> str:
    if "value" not in facts:
        return f"{counted(facts.get('slot_count', 0), 'slot')} for {facts.get('run_id', '')}"
    return ", ".join([str(facts["value"]), *_bounds(facts)])


def draw_report(seen: dict[str, Any]) -> Group:
    """Draw a table for each worker: requests with rollouts and without, and what rollouts got."""
    parts = [part for row in seen["workers"] for part in (*_requests(row), Text(_given(row)), Text(""))]
    return Group(*parts, Text(_verdict(seen["totals"], [name for row in seen["workers"] for name in row["few"]])))


def _requests(row: dict[str, Any]) -> tuple[Table, Text]:
    title = f"{row['worker_id']}, measured for {_duration(row['since_s'])}"
    headings = ("serving requests", "alone", "with rollouts", "more")
    table = new_table(*headings, title=one_line(title), left=headings[:1])
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
    return table, Text(
        f"objectives, TTFT and TPOT: {bounds}; {beyond}; in brackets: where the true P99 is, with 95 %", style="dim"
    )


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
