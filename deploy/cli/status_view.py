"""Draws `rollfab status` for people: runs, why they stand, workers by role; no cell takes two lines at 80 columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ...fabric.contract.text import cleaned, counted, one_line
from ...fabric.host.command import with_commands
from ...fabric.inspect.diagnosis import SILENT_MS
from .printing import Cell, brief, cells, elided, new_table, said_once, spark

WIDE = 120  # columns from which on there is room for what is good to know
NAME_WIDTH = 40  # of a run in a sentence
CURVE_WIDTH = 40
AGREEMENT_ROW_COUNT = 8  # workers shown per run, the worst first; --json has all that are kept
ROLES = ("controller", "agent", "gateway", "dedicated", "serving", "reward")
KINDS = {"moves": "green", "waits": "", "passing": "yellow"}  # else red


def draw(seen: dict[str, Any], *, width: int = 80, has_all: bool = False) -> Group:
    """Draw the status.

    has_all: every cause of every run, and not the first alone. width: of the terminal.
    """
    seen = with_commands(cleaned(seen))
    is_wide = width >= WIDE
    parts: list[RenderableType] = [Text(_headline(seen), style="bold")]
    parts += [line for row in seen["bad_rows"] for line in bad_row_lines(row)]
    if seen["runs"]:
        parts += [_runs_card(seen["runs"][0]) if has_all else _runs_table(seen["runs"], is_wide)]
        parts += [line for run in sorted(seen["runs"], key=_urgency) for line in cause_lines(run, has_all=has_all)]
    parts += _workers(seen["workers"], seen["leases"], is_wide)
    parts += [*_rewards(seen["runs"], width), *_agreement(seen["runs"])]
    return Group(*parts)


def _headline(seen: dict[str, Any]) -> str:
    runs, workers = seen["runs"], seen["workers"]
    standing = sum(1 for run in runs if run["causes"] and run["causes"][0]["kind"] not in ("moves", "waits"))
    found = [counted(len(runs), "run") if runs else "there are no runs"]
    found += [f"{standing:,} standing"] if standing else []
    found += [counted(len(workers), "worker") if workers else "there are no workers"]
    return ", ".join(found)


def _runs_card(run: dict[str, Any]) -> Text:
    """Draw one run alone, with room for words."""
    states, turns = run["trajectories"], run["turns"]
    rows = (
        ("model", run["model"]),
        ("environment", run["environment"]),
        ("head version", str(run["head_version"])),
        ("trajectories", ", ".join(f"{count:,} {name}" for name, count in states.items())),
        ("turns", ", ".join(f"{count:,} {name}" for name, count in turns.items())),
        ("groups", f"{run['groups_waiting']:,} complete, {run['counters'].get('groups_consumed', 0):,} consumed"),
        ("dead letters", f"{run['dead_count']:,}"),
    )
    return Text(
        "\n".join([f"run {one_line(run['run_id'])}", *(f"  {name:13} {one_line(text)}" for name, text in rows)])
    )


def _runs_table(rows: Sequence[dict[str, Any]], is_wide: bool) -> Table:
    more = ("model", "environment") if is_wide else ()
    figures = ("head", "queued", "running", "turns", "ready", "used", "dead")
    table = new_table("run", *more, "is", *figures, left=("run", "is", *more))
    for run in rows:
        turns = f"{brief(run['turns']['ready'])}+{brief(run['turns']['claimed'])}"
        counts = (run["trajectories"]["queued"], run["trajectories"]["running"])
        groups = (run["groups_waiting"], run["counters"].get("groups_consumed", 0), run["dead_count"])
        names = (run[name] for name in more)
        row = (str(run["head_version"]), *map(brief, counts), turns, *map(brief, groups))
        table.add_row(*cells(run["run_id"], *names, _state_of_run(run), *row))
    return table


def _state_of_run(run: dict[str, Any]) -> Cell:
    kind = run["causes"][0]["kind"] if run["causes"] else ""
    return Cell(kind, KINDS.get(kind, "red"))


def _urgency(run: dict[str, Any]) -> int:
    """Order runs for a screen that cuts off the last: those that stand first, those that move last."""
    kinds = ("stuck", "passing", "waits", "moves")
    kind = run["causes"][0]["kind"] if run["causes"] else "moves"
    return kinds.index(kind) if kind in kinds else 0


def bad_row_lines(row: dict[str, Any]) -> list[Text]:
    """Show a row that cannot be read, and how it is removed."""
    what = f"row {row['row']!r} of table {row['table']}" if row["row"] else f"table {row['table']}"
    return [
        Text(f"{what} cannot be read and is passed over: {row['problem']}", style="red"),
        Text(with_commands(f"  → `{row['step']}`")),
    ]


def cause_lines(run: dict[str, Any], *, has_all: bool) -> list[Text]:
    """Say why a run does or does not move, with the next steps."""
    lines = []
    for cause in run["causes"] if has_all else run["causes"][:1]:
        name = elided(run["run_id"], NAME_WIDTH)
        lines.append(Text.assemble((f"{name}: ", "bold"), (cause["text"], KINDS.get(cause["kind"], "red"))))
        if cause["step"]:
            lines.append(Text(with_commands(f"  → {cause['step']}")))
    return lines


# ---------------------------------------------------------------- workers


def _workers(rows: Sequence[dict[str, Any]], leases: dict[str, Any], is_wide: bool) -> list[RenderableType]:
    """Draw a table for each role, without the columns that say nothing there, and what its workers say, said once."""
    parts: list[RenderableType] = []
    roles = [*ROLES, *sorted({row["role"] for row in rows} - set(ROLES))]
    for role in roles:
        mine = sorted((row for row in rows if row["role"] == role), key=lambda row: str(row["worker_id"]))
        if mine:
            parts += [_workers_table(role, mine, leases, is_wide), *_notes(mine, is_wide)]
    return parts


def _workers_table(role: str, rows: Sequence[dict[str, Any]], leases: dict[str, Any], is_wide: bool) -> Table:
    columns: dict[str, list[str | Cell]] = {
        "worker": [row["worker_id"] for row in rows],
        "state": [_state(row) for row in rows],
        "in use": [f"{row['running_count']}/{row['slot_count']}" if row["slot_count"] else "" for row in rows],
        "pool": [row["pool"] if is_wide else "" for row in rows],
        "lend": [row.get("lend") or "" for row in rows],
        "lease": [str(leases[name]["slot_count"]) if (name := row["worker_id"]) in leases else "" for row in rows],
        "run": [_runs(row) for row in rows],
        "version": [str(row["active_version"]) if row["active_version"] >= 0 else "" for row in rows],
        "engine": [(row["engine"] or "") if is_wide else "" for row in rows],
        "memory": [_memory(row) if is_wide else "" for row in rows],
        "steps off": [_steps_off(row) if is_wide else "" for row in rows],
        "seen": [f"{row['heartbeat_age_ms'] / 1000:.1f} s" for row in rows],
    }
    shown = {name: column for name, column in columns.items() if any(column)}
    title = f"{counted(len(rows), f'{one_line(role)} worker')}"
    table = new_table(*shown, title=title, left=("worker", "state", "pool", "lend", "run", "engine"))
    for row in zip(*shown.values(), strict=True):
        table.add_row(*cells(*row))
    return table


def _runs(row: dict[str, Any]) -> str:
    """Name the run whose weights a worker follows, and count those that it serves beside."""
    guest_count = len(row.get("guest_versions", ()))
    return (row["run_id"] or "") + (f" +{guest_count}" if guest_count else "")


def _state(row: dict[str, Any]) -> Cell:
    """Name a worker's state: what it said last, unless that was long ago."""
    is_silent = row["heartbeat_age_ms"] > SILENT_MS
    return Cell("silent" if is_silent else row["state"], "red" if is_silent or row["error"] else "")


def _memory(row: dict[str, Any]) -> str:
    """Write what a worker's processes hold: RAM, and device memory where it is told."""
    held = [row.get(name) for name in ("resident_bytes", "device_bytes")]
    return " + ".join(f"{each / 2**30:.1f} GiB" for each in held if each is not None)


def _steps_off(row: dict[str, Any]) -> str:
    """Write how far off a guard predicts serving's steps."""
    half, most = (row.get(f"step_error_fraction_{name}") for name in ("p50", "p95"))
    return "" if half is None or most is None else f"{half:.0%}, P95 {most:.0%}"


def _notes(rows: Sequence[dict[str, Any]], is_wide: bool) -> list[Text]:
    """Say what workers say of themselves."""
    said = [(str(row["worker_id"]), *note) for row in rows for note in _notes_of(row, is_wide)]
    return said_once(said, len(rows))


def _notes_of(row: dict[str, Any], is_wide: bool) -> list[tuple[str, str]]:
    found = [(row["error"], "red")] if row["error"] else []
    if row.get("waits_for") and not row["error"]:
        found.append((f"{row['state']}, waits for {row['waits_for']}", ""))
    if row.get("guest_versions"):
        found.append((f"serves beside {row['run_id']}: {', '.join(sorted(row['guest_versions']))}", ""))
    if row["engine"] and not is_wide:
        found.append((row["engine"], "dim"))
    if row["prefix_hit_fraction"] is not None:
        found.append((f"{row['prefix_hit_fraction']:.0%} of prompts cached", "dim"))
    if row["wake_ms"] is not None:
        found.append((f"woke in {row['wake_ms'] / 1000:.1f} s", "dim"))
    if row["weights_note"] is not None:
        found.append((row["weights_note"], "yellow"))
    if row["sleep_note"] is not None:
        found.append((f"cannot sleep: {row['sleep_note']}", "dim"))
    return found


# ---------------------------------------------------------------- curves and figures


def _rewards(runs: Sequence[dict[str, Any]], width: int) -> list[Table]:
    """Draw how each run's mean reward went, by policy version, where it has rollouts."""
    figures = ("mean", "±", "lowest", "highest", "rollouts", "versions")
    table = new_table("run", *figures, "curve", title="rewards", left=("run", "curve"))
    for run in runs:
        points = [point for point in run["rewards"] if point["reward_mean"] is not None]
        if not points:
            continue
        last = points[-1]
        found = [last[f"reward_{name}"] for name in ("mean", "deviation", "min", "max")]
        versions = f"{points[0]['version']}–{last['version'] + last['version_count'] - 1}"
        means = [point["reward_mean"] for point in points]
        length = CURVE_WIDTH if width >= WIDE else CURVE_WIDTH // 4
        curve = spark(means[:: -(-len(means) // length)], length)
        row = ("" if value is None else f"{value:.3g}" for value in found)
        count = brief(sum(point["rollout_count"] for point in points))
        table.add_row(*cells(run["run_id"], *row, count, versions, curve))
    return [table] if table.row_count else []


def _agreement(runs: Sequence[dict[str, Any]]) -> list[RenderableType]:
    """Draw log-probabilities of workers against the trainer's, where it compares them, and who is over a limit."""
    parts: list[RenderableType] = []
    for run in runs:
        found = run["agreement"]
        if found is None:
            continue
        title = f"log-probabilities of {elided(run['run_id'], NAME_WIDTH)}, |trainer − worker|"
        headings = ("worker", "version", "tokens", "mean", "max", "ratio min", "ratio mean", "ratio max")
        table = new_table(*headings, title=title, left=("worker",))
        blamed = {alarm["worker_id"] for alarm in found["alarms"]}
        rows = [{**found["fresh"], "worker_id": "all", "policy_version": found["policy_version"]}, *found["workers"]]
        for row in rows[: 1 + AGREEMENT_ROW_COUNT]:
            table.add_row(*cells(*_figures(row)), style="red" if row["worker_id"] in blamed else None)
        parts += [table, *(Text(alarm["text"], style="red") for alarm in found["alarms"][:AGREEMENT_ROW_COUNT])]
    return parts


def _figures(row: dict[str, Any]) -> list[str]:
    ratio = [f"{row[f'importance_sampling_ratio_{name}']:.3g}" for name in ("min", "mean", "max")]
    figures = [f"{row['logprob_difference_mean']:.2g}", f"{row['logprob_difference_max']:.2g}", *ratio]
    has_any = row["token_count"] > 0
    counts = [str(row["policy_version"]), brief(row["token_count"])]
    return [row["worker_id"], *counts, *(figures if has_any else [""] * 5)]
