"""`rollfab runs`: what runs there are, and deleting those that are over; `rollfab rows`: what cannot be read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from ...fabric.contract.errors import ConfigError, InputError
from ...fabric.contract.text import cleaned, counted, did_you_mean
from ...fabric.host.command import with_commands
from ...fabric.ports.queue import BadRow
from ...fabric.rules.queue.push import no_such_run
from .options import AsJson, Run, RunFirst, Url, need_url, with_ports
from .printing import Console, brief, cells, new_table, show, show_json
from .speech import say_nothing
from .status import bad_row

if TYPE_CHECKING:
    from ...fabric.opened import RedisFabric

CUT_COUNT = 8  # tables named that were looked at in part


def register(app: typer.Typer) -> None:
    """Add the commands of this file."""
    runs = typer.Typer(no_args_is_help=True, help="Runs: what there is, and deleting those that are over.")
    app.add_typer(runs, name="runs")

    @runs.command("ls")
    def list_runs(url: Url = None, json: AsJson = False) -> None:
        """List the runs, and what of each waits in the broker."""
        rows = with_ports(need_url(url), _rows)
        if json:
            show_json(rows)
        elif rows:
            Console().print(_table(cleaned(rows)), highlight=False)
        else:
            say_nothing("there are no runs on this broker: a trainer makes one, with fabric.run(…)")

    @runs.command("rm", cls=RunFirst)
    def remove_run(
        run: Run = None,
        is_sure: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
        url: Url = None,
        json: AsJson = False,
    ) -> None:
        """Delete a run with all that it has in the broker: work, groups nobody consumed, dead letters, weights."""
        found = {row["run_id"]: row for row in with_ports(need_url(url), _rows)}
        if run is None:
            raise ConfigError(f"say which run to delete: --run RUN; {did_you_mean('', found)}", option="--run")
        unread = [row.row for row in with_ports(need_url(url), _bad_rows) if row.table == "runs"]
        if run in unread:
            found[run] = {"run_id": run, "depth": "?", "groups_waiting": "?", "dead": "?"}
        if run not in found:
            raise no_such_run(run, known=found)
        if not is_sure and not _agrees(found[run]):
            raise ConfigError(f"run {run!r} was not deleted: say yes, or give --yes")
        with_ports(need_url(url), lambda ports: ports.board.delete_run(run))
        show_json({"run_id": run, "is_deleted": True}) if json else show(f"run {run} is deleted")

    _register_rows(app)


def _register_rows(app: typer.Typer) -> None:
    rows = typer.Typer(no_args_is_help=True, help="Rows of the broker's tables that cannot be read.")
    app.add_typer(rows, name="rows")

    @rows.command("ls")
    def list_bad_rows(url: Url = None, json: AsJson = False) -> None:
        """List rows that cannot be read, of every table: everybody passes over them."""
        found = with_ports(need_url(url), lambda ports: ports.board.survey_rows())
        if json:
            show_json([bad_row(row) for row in found.bad_rows])
        else:
            for row in found.bad_rows:
                shown = (row.table, row.row or "(all of it)", row.problem)
                show(with_commands("  ".join(shown) + f"\n  → `{row.step}`"))
            if not found.bad_rows:
                say_nothing(f"every row can be read: {found.row_count:,} of {counted(found.table_count, 'table')}")
        say = Console(stderr=True)
        if found.cut:
            more = f" and {len(found.cut) - CUT_COUNT} more" if len(found.cut) > CUT_COUNT else ""
            named = ", ".join(found.cut[:CUT_COUNT])
            say.print(f"looked at in part, as they are large: {named}{more}", highlight=False)
        if not found.is_whole:
            say.print("not all tables were looked at: remove these rows, then look again", highlight=False)

    @rows.command("rm")
    def remove_bad_row(
        table: Annotated[str, typer.Argument(help="The table, as `rollfab rows ls` says.", show_default=False)],
        row: Annotated[str, typer.Argument(help="The row; none: the table, which is of another type.")] = "",
        url: Url = None,
        json: AsJson = False,
    ) -> None:
        """Remove a row that cannot be read, and no other."""
        bad = BadRow(table, row, "")
        if not with_ports(need_url(url), lambda ports: ports.board.remove_row(bad)):
            raise InputError(
                f"there is no row {row!r} of table {table!r} that cannot be read; `rollfab rows ls` lists those"
            )
        show_json({"table": table, "row": row, "is_removed": True}) if json else show("removed")


async def _bad_rows(ports: RedisFabric) -> list[BadRow]:
    return list((await ports.board.survey()).bad_rows)


def _agrees(row: dict[str, Any]) -> bool:
    if row["depth"] == "?":
        held = "all that it has (its row cannot be read)"
    else:
        groups = f"{counted(row['groups_waiting'], 'group')} that nobody consumed"
        held = f"{counted(row['depth'], 'trajectory')}, {groups}, {counted(row['dead'], 'dead letter')}"
    return typer.confirm(f"delete run {row['run_id']} with {held} and its weights?", err=True)


async def _rows(ports: RedisFabric) -> list[dict[str, Any]]:
    statuses = [await ports.board.run_status(name) for name in sorted(await ports.board.runs())]
    return [
        {
            "run_id": status.config.run_id,
            "model": status.config.model,
            "environment": status.config.environment,
            "head_version": status.head_version,
            "depth": status.depth,
            "groups_waiting": status.groups_waiting,
            "dead": status.dead_count,
        }
        for status in statuses
    ]


def _table(rows: list[dict[str, Any]]) -> Table:
    figures = ("head", "open", "ready", "dead")
    table = new_table("run", "model", "environment", *figures, left=("run", "model", "environment"))
    for row in rows:
        counts = (row[name] for name in ("depth", "groups_waiting", "dead"))
        table.add_row(
            *cells(row["run_id"], row["model"], row["environment"], str(row["head_version"])),
            *cells(*map(brief, counts)),
        )
    return table
