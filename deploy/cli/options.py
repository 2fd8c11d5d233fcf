"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

from ...fabric.contract.errors import ConfigError

Url = Annotated[
    str | None,
    typer.Option(
        "--url",
        envvar="ROLLFAB_URL",
        help="Broker: redis://, rediss://, unix://, or redis+sentinel://hosts/service; with a password: "
        "\\[env: ROLLFAB_URL]",
        show_envvar=False,
    ),
]
Run = Annotated[
    str | None,
    typer.Option("--run", metavar="RUN", help="The run. Default: the only one there is.", show_default=False),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Allowed = Annotated[
    list[str] | None,
    typer.Option(
        "--environment",
        help="NAME=module:attr, or NAME=/venv/bin/python:module:attr for one with its own packages. Repeatable.",
    ),
]
Rewards = Annotated[
    list[str] | None,
    typer.Option("--reward", help="NAME=module:attr: a reward function this process may import. Repeatable."),
]
PassEnv = Annotated[
    list[str] | None,
    typer.Option(
        "--pass-env",
        metavar="NAME",
        help="A variable that environments and rewards get, besides PATH, HOME and such. Repeatable.",
    ),
]
RunAs = Annotated[
    str | None, typer.Option("--run-as", metavar="USER", help="Run environments and rewards as this user. Needs root.")
]
NoNetwork = Annotated[
    bool, typer.Option("--no-network", help="Environments and rewards reach their own 127.0.0.1 only (Linux).")
]
AllowHub = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-hub",
        metavar="'ORG/*'",
        help="Hub names whose tokenizers agents may download for a run. Default: none. Repeatable.",
    ),
]
EngineName = Annotated[str, typer.Option("--engine", help="What generates: transformers or vllm.")]
EngineWords = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[-- WORD...]",
        help="vllm: its own engine arguments, after `--`: `-- --tensor-parallel-size 2`; `-- --help` lists them.",
        show_default=False,
    ),
]
Port = Annotated[int, typer.Option("--port", help="Port; 0 picks a free one.", min=0, max=65535)]


def need_url(url: str | None) -> str:
    """Return the broker's URL, given or found.

    Raises:
        ConfigError: none is known.
    """
    if url is None:
        raise ConfigError(
            "no broker: give --url redis://host:port, set ROLLFAB_URL, or start everything with `rollfab up`",
            setting="url",
        )
    return url
