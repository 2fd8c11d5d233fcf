"""`rollfab config`: what a role would run by here, and where each value comes from."""

from __future__ import annotations

import os
from json import dumps
from pathlib import Path
from typing import Annotated, Any

import typer

from ...fabric.broker.clients.url import mask_url
from ...fabric.contract.errors import ConfigError, FabricError
from ...fabric.contract.text import counted, did_you_mean
from ...fabric.host.options import describe
from ..cli.options import AsJson
from ..cli.printing import Console, show, show_json
from ..cli.speech import say
from .command import read_options, variables_of, warn_of_unknown_variables
from .config_file import read_config
from .options import TABLES
from .starting import check_role, refuse_all


def register(app: typer.Typer) -> None:
    """Add the commands."""
    config = typer.Typer(no_args_is_help=True, help="The roles' settings: file, environment, defaults.")
    config.command("show")(_show)
    config.command("check")(_check)
    app.add_typer(config, name="config")


def _show(
    context: typer.Context,
    role: Annotated[str | None, typer.Argument(help="controller, agent, worker, reward or api. Default: all.")] = None,
    config: Annotated[Path | None, typer.Option(envvar="ROLLFAB_CONFIG", help="The file.")] = None,
    json: AsJson = False,
) -> None:
    """Show what each role would run by, and where it comes from. Secrets are masked."""
    if role is not None and role not in TABLES:
        raise ConfigError(f"there is no role {role!r}: {did_you_mean(role, TABLES)}", option="role")
    shown = {name: _effective(context, name, config) for name in ([role] if role else TABLES)}
    if json:
        show_json({name: rows for name, (_, rows) in shown.items()})
        return
    for name, (_, rows) in shown.items():
        warn_of_unknown_variables(name)
        for key, row in rows.items():
            value = "not set" if row["value"] is None else dumps(row["value"], ensure_ascii=False)
            show(f"{name}.{key} = {value}  ({row['from']})")


def _check(
    context: typer.Context, file: Annotated[Path, typer.Argument(help="The file.")], json: AsJson = False
) -> None:
    """Say whether the roles that it has tables of would start by a file, here and with this environment.

    No broker is asked, and no model loaded.
    """
    tables = read_config(file)
    faults: dict[str, FabricError] = {}
    for role in tables:
        warn_of_unknown_variables(role)
        try:
            options, _ = _effective(context, role, file)
            check_role(options)
        except FabricError as error:
            faults[role] = error
            continue
        if not options.url:
            say(Console(stderr=True), f"[{role}] has no broker yet: set ROLLFAB_URL where it is started", "warning")
    refuse_all(faults, f"{file}: ")
    count = sum(map(len, tables.values()))
    if json:
        show_json({"path": str(file), "is_right": True, "roles": list(tables), "setting_count": count})
        return
    if not tables:
        show(
            f"{file} sets nothing: every role would run as if it were not given. A role's settings stand in a table of "
            f"its name: {', '.join(f'[{name}]' for name in TABLES)}"
        )
        return
    show(f"{file} is right: {counted(count, 'setting')} of {', '.join(tables)}")


def _effective(context: typer.Context, role: str, file: Path | None) -> tuple[Any, dict[str, dict[str, Any]]]:
    """Return the options of a role if nothing is typed, and each by its key, with where it comes from."""
    options, found = read_options(context, role, [] if file is None else ["--config", str(file)])
    places, rows = {"DEFAULT": "default", "DEFAULT_MAP": str(file)}, {}
    for each in describe(TABLES[role]):
        variable = next((name for name in variables_of(each, role) if os.environ.get(name)), "default")
        source, value = found.get_parameter_source(each.key), each.value_in(options)
        whence = variable if source is None else places.get(source.name, variable)
        rows[each.key] = {"value": _masked(each.key, value) if each.option.is_secret else value, "from": whence}
    return options, rows


def _masked(key: str, value: Any) -> Any:
    return value if not value else mask_url(value) if key == "url" else "***"
