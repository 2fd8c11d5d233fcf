"""`rollfab api`: the HTTP server, and its keys."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...api.access.config import ApiConfig, check_config
from ...api.access.keys import add_key, drop_key, read_keys_file
from ...fabric.contract.errors import ConfigError
from ..cli.options import AsJson, Port, Url, need_url
from ..cli.printing import show, show_json
from ..cli.speech import say_nothing

KEYS_FILE = "rollfab-api.keys"

KeysFile = Annotated[Path, typer.Option("--file", envvar="ROLLFAB_KEYS_FILE", help="The keys file.")]


def register(app: typer.Typer) -> None:
    """Add the command and those below it."""
    api = typer.Typer(help="Run the HTTP server: status, metrics, live page. Below it: its keys.")
    api.callback(invoke_without_command=True)(_serve)
    keys = typer.Typer(no_args_is_help=True, help="Bearer keys: made here, kept as hashes.")
    keys.command("new")(_new)
    keys.command("ls")(_list)
    keys.command("drop")(_drop)
    api.add_typer(keys, name="keys")
    app.add_typer(api, name="api")


def _serve(
    context: typer.Context,
    url: Url = None,
    host: Annotated[str, typer.Option(help="Address to listen on; anything but loopback needs keys.")] = "127.0.0.1",
    port: Port = 8765,
    keys: Annotated[
        Path | None, typer.Option(envvar="ROLLFAB_KEYS_FILE", help="File of hashed keys; see `rollfab api keys new`.")
    ] = None,
    tls_cert: Annotated[str | None, typer.Option(help="PEM file: speak https, with this certificate.")] = None,
    tls_key: Annotated[str | None, typer.Option(help="PEM file of its private key, if it is another.")] = None,
    read_key: Annotated[
        list[str] | None, typer.Option(envvar="ROLLFAB_READ_KEYS", help="sha256:<hex> of a key that may look.")
    ] = None,
    control_key: Annotated[
        list[str] | None, typer.Option(envvar="ROLLFAB_CONTROL_KEYS", help="Likewise: may look and act.")
    ] = None,
) -> None:
    """Run the HTTP server: status, metrics, live page."""
    if context.invoked_subcommand is not None:
        return
    from .run import RoleOptions, run_api

    for name, given in (("read_key", read_key), ("control_key", control_key)):
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            _refuse_plain(name, given or [])
    rows = [] if keys is None else read_keys_file(keys)
    config = ApiConfig(
        host=host,
        port=port,
        read_keys=(*(read_key or ()), *(row.hashed for row in rows if row.right == "read")),
        control_keys=(*(control_key or ()), *(row.hashed for row in rows if row.right == "control")),
        key_names=tuple((row.hashed, row.name) for row in rows),
        tls_certificate=tls_cert,
        tls_key=tls_key,
    )
    run_api(RoleOptions(url=need_url(url)), check_config(config))


def _refuse_plain(name: str, given: list[str]) -> None:
    """A key on the command line is seen by every user of the machine (`ps`); its hash is no secret."""
    option = "--" + name.replace("_", "-")
    if any(not key.startswith("sha256:") for key in given):
        raise ConfigError(
            f"{option} would show a key to every user of this machine (`ps`): give --keys FILE, which "
            f"`rollfab api keys new NAME` writes, or sha256:<hex> of the key, or set ROLLFAB_{name.upper()}S",
            option=option,
        )


def _new(
    name: Annotated[str, typer.Argument(help="Whose key it is, to find it again.")],
    control: Annotated[bool, typer.Option("--control", help="It may also act, not only look.")] = False,
    file: KeysFile = Path(KEYS_FILE),
) -> None:
    """Make a key, print it this once, and keep only its hash."""
    show(add_key(file, name, "control" if control else "read"))


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


def _drop(name: str, file: KeysFile = Path(KEYS_FILE)) -> None:
    """Forget a key. An api that runs knows it until it is started again."""
    drop_key(file, name)
    show("dropped; start the api again")
