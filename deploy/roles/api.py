"""`rollfab api`: the HTTP server, and its keys."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...api.access.keys import add_key, drop_key, read_keys_file
from ..cli.options import AsJson
from ..cli.printing import show, show_json
from ..cli.speech import say_nothing
from .command import role_command

KEYS_FILE = "rollfab-api.keys"

KeysFile = Annotated[Path, typer.Option("--file", envvar="ROLLFAB_KEYS_FILE", help="The keys file.")]


def register(app: typer.Typer) -> None:
    """Add the command and those below it."""
    api = typer.Typer(help="Run the HTTP server: status, metrics, live page. Below it: its keys.")
    api.callback(invoke_without_command=True)(role_command("api"))
    keys = typer.Typer(no_args_is_help=True, help="Bearer keys: made here, kept as hashes.")
    keys.command("new")(_new)
    keys.command("ls")(_list)
    keys.command("drop")(_drop)
    api.add_typer(keys, name="keys")
    app.add_typer(api, name="api")


def _new(
    name: Annotated[str, typer.Argument(help="Whose key it is, to find it again.")],
    control: Annotated[bool, typer.Option("--control", help="It may also act, not only look.")] = False,
    file: KeysFile = Path(KEYS_FILE),
    json: AsJson = False,
) -> None:
    """Make a key, print it this once, and keep only its hash."""
    right = "control" if control else "read"
    key = add_key(file, name, right)
    show_json({"name": name, "right": right, "key": key}) if json else show(key)


def _list(file: KeysFile = Path(KEYS_FILE), json: AsJson = False) -> None:
    """List the keys by name and right."""
    rows = [{"name": row.name, "right": row.right} for row in read_keys_file(file)]
    if json:
        show_json(rows)
        return
    if not rows:
        say_nothing(f"{file} holds no keys: `rollfab api keys new NAME` makes one")
    for row in rows:
        show(f"{row['right']:8} {row['name']}")


def _drop(
    name: Annotated[str, typer.Argument(help="Whose key it is.")],
    file: KeysFile = Path(KEYS_FILE),
    json: AsJson = False,
) -> None:
    """Forget a key. An api that runs knows it until it is started again."""
    drop_key(file, name)
    show_json({"name": name, "is_dropped": True}) if json else show("dropped; start the api again")
