"""Makes the command of a role from the fields of its options.

A value is what the command line says, or else the environment, the file, and the field's default, in this order.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ...fabric.contract.errors import ConfigError
from ...fabric.contract.text import did_you_mean
from ...fabric.host.options import Described, describe, make
from ..cli.options import need_url
from ..cli.printing import Console
from ..cli.speech import say
from .config_file import fault_of_variable, read_config
from .options import TABLES

HELP = {
    "controller": "Run a capacity controller (several may run: one leads).",
    "agent": "Run an agent worker: drives environments on CPUs.",
    "worker": "Run a rollout worker: generates turns while it holds a lease.",
    "reward": "Run an rq worker: reward functions and housekeeping.",
    "api": "Run the HTTP server: status, metrics, live page.",
    "gateway": "Run a model API whose calls are turns: OpenAI's and Anthropic's clients, unmodified.",
}
TYPES: Mapping[str, type] = {"str": str, "int": int, "float": float, "bool": bool}
OF_OTHERS = ("ROLLFAB_WORKER_IMAGE",)  # deploy/compose reads it


def register(app: typer.Typer) -> None:
    """Add the roles that are commands of their own."""
    for role in TABLES:
        if role != "api":  # which has commands below it
            app.command(role)(role_command(role))


def role_command(role: str) -> Callable[..., None]:
    """Make the function that typer makes the command of."""

    def command(call: typer.Context, **given: Any) -> None:
        if call.invoked_subcommand is not None:
            call.default_map = None  # what the file says of a role is not meant for commands below it
            return
        from . import run

        for each in describe(TABLES[role]):
            source = call.get_parameter_source(each.key)
            if each.option.check_open is not None and source is not None and source.name == "COMMANDLINE":
                each.option.check_open(given[each.key])
        options = options_of(role, given)
        need_url(options.url or None)
        warn_of_unknown_variables(role)
        getattr(run, f"run_{role}")(options)

    parameters = [_parameter(each, role) for each in describe(TABLES[role]) if not each.option.is_variable_only]
    parameters = [_keyword("call", typer.Context), *parameters, _keyword("config", _config_option(role), None)]
    command.__doc__ = HELP[role]
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return command


def read_options(context: typer.Context, role: str, words: Sequence[str]) -> tuple[Any, typer.Context]:
    """Return the options that a role would have if these words were typed after it, and the context that tells of each
    where it comes from.

    Raises:
        ConfigError: a value cannot be.
    """
    root = context.find_root()
    found = root.command.commands[role].make_context(role, list(words), parent=root)  # type: ignore[attr-defined]
    return options_of(role, found.params), found


def options_of(role: str, given: Mapping[str, Any]) -> Any:
    """Make the record of what was given.

    Raises:
        ConfigError: a value cannot be.
    """
    values: dict[str, Any] = {}
    for each in describe(TABLES[role]):
        value = os.environ.get(each.option.variables[0]) if each.option.is_variable_only else given[each.key]
        values[each.key] = tuple(value or ()) if each.is_list else each.default if value is None else value
        if each.option.check is not None:
            each.option.check(values[each.key])
    return make(TABLES[role], values)


def variables_of(each: Described, role: str) -> tuple[str, ...]:
    """Name the environment variables that may hold the option's value."""
    return each.option.variables or (f"ROLLFAB_{role}_{each.key}".upper(),)


def check_variables(role: str) -> None:
    """Refuse what the environment says of a role and cannot be.

    Raises:
        ConfigError: names the variable.
    """
    for each in describe(TABLES[role]):
        for name in variables_of(each, role):
            fault = fault_of_variable(each, os.environ[name]) if os.environ.get(name) else ""
            if fault:
                raise ConfigError(f"{name} {fault}", option=name)


def warn_of_unknown_variables(role: str) -> None:
    """Warn of variables that look like settings of a role and are none.

    A misspelt variable holds nothing; it is not refused, as it may be another program's.
    """
    known = {name for each in describe(TABLES[role]) for name in variables_of(each, role)}
    for name in sorted(os.environ):
        if name.startswith(f"ROLLFAB_{role.upper()}_") and name not in known and name not in OF_OTHERS:
            say(Console(stderr=True), f"{name} is no setting of {role}: {did_you_mean(name, known)}", "warning")


def _parameter(each: Described, role: str) -> inspect.Parameter:
    said, kind, variables = each.option, TYPES[each.type_name], variables_of(each, role)
    if each.is_list:
        annotation: Any = list[kind] | None  # type: ignore[valid-type]
    else:
        annotation = kind | None if each.default is None else kind
    dashed = "--" + each.key.replace("_", "-")
    info = typer.Argument if said.is_positional else typer.Option
    names = (dashed,) if each.default is False else ()  # else a switch gets two names, for on and off
    details: dict[str, Any] = {"min": said.least, "max": said.most} if said.least is not None else {}
    made = info(
        *names,
        help=said.help,
        metavar=said.metavar,
        envvar=list(variables),
        show_envvar=bool(said.variables) and "env:" not in said.help,
        show_default=not (each.is_list or each.default == ""),
        **details,
    )
    return _keyword(each.key, Annotated[annotation, made], None if each.is_list else each.default)


def _config_option(role: str) -> Any:
    def read(context: typer.Context, path: Path | None) -> Path | None:
        check_variables(role)
        if path is not None:
            context.default_map = read_config(path).get(role, {})
        return path

    text = (
        f"TOML file with a table \\[{role}], whose keys are these options, with underscores for dashes; so are the "
        f"variables ROLLFAB_{role.upper()}_<KEY>. `rollfab config` shows and checks them."
    )
    return Annotated[
        Path | None, typer.Option("--config", envvar="ROLLFAB_CONFIG", help=text, is_eager=True, callback=read)
    ]


def _keyword(name: str, annotation: Any, default: Any = inspect.Parameter.empty) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)
