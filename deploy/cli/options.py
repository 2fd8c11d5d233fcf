"""Options that several commands share, and the broker and the run that they mean."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from typer.core import TyperCommand

from ...fabric.contract.errors import ConfigError, FabricError
from ...fabric.contract.text import did_you_mean
from ...fabric.rules.queue.push import no_such_run
from .exits import run_async

if TYPE_CHECKING:
    from ...fabric.contract.records import RunConfig
    from ...fabric.opened import RedisFabric

T = TypeVar("T")
PATIENCE_S = 2.0


def _run_names(incomplete: str) -> list[str]:
    """Return the runs on the broker of ROLLFAB_URL, for the shell to complete; none if it does not answer at once."""
    try:
        runs = with_ports(os.environ.get("ROLLFAB_URL", ""), lambda ports: ports.board.runs(), patience_s=0.0)
    except FabricError:
        return []
    return [name for name in runs if name.startswith(incomplete)]


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
    typer.Option(
        "--run",
        metavar="RUN",
        help="The run. Default: the only one there is.",
        show_default=False,
        autocompletion=_run_names,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
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


def with_ports(url: str, work: Callable[[RedisFabric], Awaitable[T]], *, patience_s: float = PATIENCE_S) -> T:
    """Open the broker, do one thing, close it."""
    from ...fabric.opened import RedisFabric  # takes 0.2 s, which the help of a command does not pay

    async def main() -> T:
        async with await RedisFabric.open(url, client_name="cli", patience_s=patience_s) as ports:
            return await work(ports)

    return run_async(main())


async def find_run(ports: RedisFabric, run: str | None) -> RunConfig:
    """Return the run of that name; None: the only one there is.

    Raises:
        RunUnknown: there is none of that name. ConfigError: none was named, and there is not just one.
    """
    runs = await ports.board.runs()
    if run is not None and run not in runs:
        raise no_such_run(run, known=runs)
    if run is None and len(runs) != 1:
        raise ConfigError(f"say which run: --run RUN; {did_you_mean('', runs)}", option="--run")
    return runs[run] if run is not None else next(iter(runs.values()))


class RunFirst(TyperCommand):
    """A command that takes the run as its first word, too, where that is no number: `weights ls RUN`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Make an option of the word."""
        at = self._first_word(args, set(ctx.help_option_names))
        has_numbers = any(each.param_type_name == "argument" for each in self.params)
        is_named = any(word.partition("=")[0] == "--run" for word in args)
        if at < len(args) and not is_named and not (has_numbers and args[at].isdigit()):
            args = [f"--run={args[at]}", *args[:at], *args[at + 1 :]]
        return super().parse_args(ctx, args)

    def _first_word(self, args: list[str], flags: set[str]) -> int:
        """Find the first word that is neither an option nor an option's value."""
        flags |= {name for each in self.params if getattr(each, "is_flag", False) for name in each.opts}
        at = 0
        while at < len(args) and args[at].startswith("-"):
            if args[at] == "--":
                return at + 1
            at += 1 if "=" in args[at] or args[at] in flags else 2
        return at
