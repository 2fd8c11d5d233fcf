"""`rollfab`: every command is also a library call; this file only reads arguments and chooses exit codes.

Exit codes: 0 done, also where whoever reads the output has enough, 1 failed, 2 wrong usage, 130 ended by Ctrl-C. Errors
name the thing, the cause and the next step; --debug shows where.
"""

from __future__ import annotations

import logging
import os
import select
import sys
from collections import UserDict
from collections.abc import Mapping
from importlib import import_module
from io import TextIOWrapper
from json import dumps
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from .. import __version__
from ..fabric.contract.errors import ConfigError, FabricError
from ..fabric.contract.text import printable, validated
from ..fabric.host.command import with_commands
from .cli.arguments import refuse_secrets, with_finite_numbers
from .cli.exits import is_interrupt, leaving_at_once
from .cli.logs import set_up_logs
from .cli.options import AsJson
from .local.supervisor import follow_parent

COMMANDS: Mapping[str, Mapping[str, str]] = {
    ".local.command": {
        "demo": "Everything at once on this machine: watch a tiny model learn, a GPU being lent, "
        "a worker being killed.",
        "up": "Start all roles on this machine for your own trainer; stops them on Ctrl-C.",
        "train": "Train the tiny model with GRPO on an environment that is offered.",
        "broker": "Run a private broker until Ctrl-C and print its URL.",
    },
    ".roles.command": {
        "controller": "Run a capacity controller (several may run: one leads).",
        "agent": "Run an agent worker: drives environments on CPUs.",
        "worker": "Run a rollout worker: generates turns while it holds a lease.",
        "reward": "Run an rq worker: reward functions and housekeeping.",
        "gateway": "Run a model API whose calls are turns: OpenAI's and Anthropic's clients, unmodified.",
    },
    ".roles.acl": {"acl": "Write a broker ACL file: one user per role, with the fewest rights its work needs."},
    ".cli.status": {"status": "Show runs, workers and leases, and why each run does or does not move."},
    ".looking.trace": {
        "trace": "Show which trajectories hold up a step and where they are; or one in full, turn by turn."
    },
    ".looking.history": {
        "history": "Show what happened over the last hours or days, and whether lending hurt anybody's users."
    },
    ".lending.command": {
        "lend": "Lend serving workers' spare time to rollouts, or take it back; see what it costs and gives."
    },
    ".doctor.command": {"doctor": "Say what is missing on this machine, or why a run does not move, and what to type."},
    ".cli.data": {
        "submit": "Push the tasks of a file, one group each.",
        "consume": "Print completed groups as JSON lines, acknowledging each; or write them to a file; or only look.",
    },
    ".local.logs": {
        "logs": "Show what the roles of `rollfab up` or `demo` on this machine have logged, in the order of time."
    },
    ".replay.command": {
        "replay": "Send recorded load to a serving engine, each request at its time; report TTFT and TPOT "
        "as users see them."
    },
    ".simulation.command": {
        "sim": "Simulate a cluster under production's rules beside other ways to run it. Every figure is simulated.",
        "plan": "Simulate how many serving GPUs are worth borrowing, when, and which step time to expect.",
    },
    ".roles.config": {"config": "The roles' settings: file, environment, defaults."},
    ".roles.api": {"api": "Run the HTTP server: status, metrics, live page. Below it: its keys."},
    ".cli.dead": {"dead": "Trajectories that were given up: why, run again, forgotten."},
    ".cli.runs": {
        "runs": "Runs: what there is, and deleting those that are over.",
        "rows": "Rows of the broker's tables that cannot be read.",
    },
    ".weights.command": {"weights": "Published weights: what is held, made of, right, different."},
    ".bench": {"bench": "Measure, with baselines in the same run."},
}
"""Module, whose `register` adds them → name of a command → what it is for: to list commands loads none of them."""


class Commands(TyperGroup):
    """The commands, each loaded when it is called: none pays for what another needs."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._shown = {name: TyperCommand(name, help=text) for each in COMMANDS.values() for name, text in each.items()}
        self.commands = Loading(self.commands)

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.commands)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return what help and shells show of a command."""
        return self._shown.get(cmd_name) or self.commands.get(cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command itself, with its name and the words after it."""
        name, _, rest = super().resolve_command(ctx, args)
        return name, name and self.commands[name], rest

    def invoke(self, ctx: Any) -> Any:
        """Run the command; what pydantic refuses of its words is told in ours."""
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            refused: Any = error.__cause__
            if hasattr(refused, "errors"):
                error.message = validated(refused.errors()[0])
            raise


class Loading(UserDict[str, Any]):
    """Commands by name, each loaded when it is looked up."""

    def __init__(self, loaded: Mapping[str, Any]) -> None:
        self._modules = {name: module for module, names in COMMANDS.items() for name in names}
        super().__init__({**loaded, **dict.fromkeys(self._modules)})

    def __getitem__(self, name: str) -> Any:
        if self.data[name] is None:
            part = typer.Typer()
            with leaving_at_once():
                import_module(self._modules[name], __package__).register(part)
            self.data[name] = with_finite_numbers(typer.main.get_group(part).commands[name])
        return self.data[name]


app = typer.Typer(
    name="rollfab",
    cls=Commands,
    help="A rollout fabric: trainers push tasks, dedicated and lent GPUs pull turns, nothing is lost or done twice.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Entry point: run a command, turn errors into one clear line."""
    arguments = [each for each in sys.argv[1:] if each != "--debug"]
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:], "--help"]
    is_debug = "--debug" in sys.argv[1:] or os.environ.get("ROLLFAB_DEBUG") == "1"
    if is_debug:
        os.environ["ROLLFAB_DEBUG"] = "1"  # also for the roles that `up` and `demo` start
    if isinstance(sys.stdout, TextIOWrapper):  # as stderr does: a terminal or file in ASCII or Latin-1 has no →
        sys.stdout.reconfigure(errors="backslashreplace")
    os.umask(0o077)  # logs, data and keys that this process or a child of it writes are for its user alone
    set_up_logs(logging.DEBUG if is_debug else logging.INFO)
    parent = os.environ.pop("ROLLFAB_PARENT", None)
    if parent is not None:
        follow_parent(int(parent))
    else:
        logging.getLogger("rollfab").setLevel(logging.DEBUG if is_debug else logging.WARNING)
    try:
        refuse_secrets(arguments)
        app(args=arguments)
    except BaseException as error:
        if is_interrupt(error):
            raise
        if isinstance(error, SystemExit) and isinstance(error.__context__, BrokenPipeError):  # typer hides it
            if _has_no_reader():
                sys.exit(0)
            error = error.__context__
        if is_debug or not isinstance(error, Exception):
            raise
        _tell(error)
        sys.exit(2 if isinstance(error, ConfigError) else 1)


def _has_no_reader() -> bool:
    """Whether whoever read the output has gone, as `… | head -1` does; rich has then put /dev/null in its place."""
    output = select.poll()
    output.register(1, 0)
    return bool(output.poll(0)) or os.path.samestat(os.fstat(1), os.stat(os.devnull))


def _tell(error: Exception) -> None:
    """One error in a line or two; where it comes from is told with --debug."""
    from .cli.printing import Console
    from .cli.speech import say

    text = str(error)
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    elif not isinstance(error, FabricError):  # nobody foresaw it
        text = f"{type(error).__name__}: {text.splitlines()[0] if text else 'no reason given'}; --debug shows where"
    say(Console(stderr=True), printable(with_commands(text)), "error")


def _show_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def start(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_show_version)
    ] = False,
) -> None:
    """Begin: every command comes after this."""


@app.command()
def version(json: AsJson = False) -> None:
    """Print the version."""
    typer.echo(dumps({"version": __version__}, separators=(",", ":")) if json else __version__)
