"""`rollfab`: every command is also a library call; this file only reads arguments and chooses exit codes.

Exit codes: 0 done, 1 failed, 2 wrong usage, 130 ended by Ctrl-C. Errors name the thing, the cause and the next step;
--debug shows where.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Annotated

import typer

from .. import __version__
from ..fabric.contract.errors import ConfigError, FabricError
from ..fabric.contract.text import printable
from ..fabric.host.command import with_commands
from .cli.arguments import refuse_secrets
from .cli.exits import INTERRUPTED
from .cli.logs import set_up_logs
from .cli.options import (
    Allowed,
    AllowHub,
    AsJson,
    EngineName,
    EngineWords,
    NoNetwork,
    PassEnv,
    Port,
    Rewards,
    RunAs,
    Url,
    need_url,
)
from .cli.printing import Console, show, show_json
from .cli.speech import say
from .local.supervisor import follow_parent

app = typer.Typer(
    name="rollfab",
    help="A rollout fabric: trainers push tasks, dedicated and lent GPUs pull turns, nothing is lost or done twice.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Entry point: run a command, turn errors into one clear line."""
    arguments = [each for each in sys.argv[1:] if each != "--debug"]
    is_debug = len(arguments) < len(sys.argv) - 1 or os.environ.get("ROLLFAB_DEBUG") == "1"
    if is_debug:
        os.environ["ROLLFAB_DEBUG"] = "1"  # also for the roles that `up` and `demo` start
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
        if _is_interrupt(error):
            sys.exit(INTERRUPTED)
        if is_debug or not isinstance(error, Exception):
            raise
        _tell(error)
        sys.exit(2 if isinstance(error, ConfigError) else 1)


def _is_interrupt(error: BaseException | None) -> bool:
    """Whether Ctrl-C is behind it: a library that was loading, or a question, may have made something else of it."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _tell(error: Exception) -> None:
    """One error in a line or two; where it comes from is told with --debug."""
    text = str(error)
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    elif not isinstance(error, FabricError):  # nobody foresaw it
        text = f"{type(error).__name__}: {text.splitlines()[0] if text else 'no reason given'}; --debug shows where"
    say(Console(stderr=True), printable(with_commands(text)), "error")


def _show_version(is_asked: bool) -> None:
    if is_asked:
        show(__version__)
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
    show_json({"version": __version__}) if json else show(__version__)


# ---------------------------------------------------------------- everything on this machine


@app.command()
def demo(
    environment: Annotated[str, typer.Option(help="frozenlake or guess-the-number.")] = "frozenlake",
    steps: Annotated[int | None, typer.Option(help="Optimizer steps. Default: until it is learnt.", min=1)] = None,
    seed: Annotated[int, typer.Option(help="Of the trainer's model and tasks.")] = 0,
    output: Annotated[str, typer.Option(help="Where logs, the reward curve and data go.")] = "rollfab-demo",
    engine: EngineName = "transformers",
    port: Port = 0,
    json: AsJson = False,
) -> None:
    """Everything at once on this machine: watch a tiny model learn, a GPU being lent, a worker being killed."""
    from .local.demo import DemoOptions, run_demo
    from .roles.engines import EngineOptions, check_engine_options, require_engine

    check_engine_options(EngineOptions(engine=engine))
    require_engine(engine)
    options = DemoOptions(
        environment=environment, steps=steps, seed=seed, output=output, engine=engine, port=port, is_json=json
    )
    raise typer.Exit(run_demo(options))


@app.command()
def up(
    context: typer.Context,
    url: Url = None,
    model: Annotated[str, typer.Option(help="Preset, path or hub name that the workers hold.")] = "tiny",
    dedicated: Annotated[int, typer.Option(help="Dedicated workers.", min=0)] = 1,
    serving: Annotated[int, typer.Option(help="Serving workers, lent by `rollfab lend on --pool local`.", min=0)] = 0,
    agents: Annotated[int, typer.Option(help="Agent workers.", min=0)] = 1,
    slots: Annotated[int, typer.Option(help="Turns a worker runs at once.", min=1)] = 64,
    engine: EngineName = "transformers",
    dtype: Annotated[str, typer.Option(help="What the workers hold weights in; auto: float32 for presets.")] = "auto",
    data: Annotated[str, typer.Option(help="Where the private broker keeps its data, and logs go.")] = "rollfab-data",
    port: Port = 8765,
    environment: Allowed = None,
    reward: Rewards = None,
    pass_env: PassEnv = None,
    run_as: RunAs = None,
    no_network: NoNetwork = False,
    allow_hub: AllowHub = None,
    words: EngineWords = None,
) -> None:
    """Start all roles on this machine for your own trainer; stops them on Ctrl-C."""
    from .local.up import UpOptions, run_up
    from .roles.engines import EngineOptions, check_engine_options, require_engine

    check_engine_options(EngineOptions(engine=engine, model=model, dtype=dtype, words=tuple(words or ())))
    require_engine(engine)
    source = context.get_parameter_source("url")
    options = UpOptions(
        url=url,
        is_url_given=source is not None and source.name == "COMMANDLINE",
        model=model,
        dedicated=dedicated,
        serving=serving,
        agents=agents,
        slot_count=slots,
        engine=engine,
        dtype=dtype,
        engine_words=tuple(words or ()),
        data=data,
        port=port,
        environments=tuple(environment or ()),
        rewards=tuple(reward or ()),
        passed=tuple(pass_env or ()),
        run_as=run_as,
        is_offline=no_network,
        hub_names=tuple(allow_hub or ()),
    )
    raise typer.Exit(run_up(options))


# ---------------------------------------------------------------- one role


@app.command()
def train(
    url: Url = None,
    run: Annotated[str, typer.Option(help="The run.")] = "train",
    environment: Annotated[str, typer.Option(help="frozenlake or guess-the-number.")] = "frozenlake",
    reward: Annotated[str | None, typer.Option(help="Registered reward function; default: the environment's.")] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps; default: as tuned.", min=1)] = None,
    seed: Annotated[int, typer.Option(help="Of model and tasks.")] = 0,
    output: Annotated[str, typer.Option(help="Checkpoints and summary.json go here.")] = "rollfab-train",
    fresh: Annotated[bool, typer.Option("--fresh", help="Ignore an earlier checkpoint.")] = False,
    json: AsJson = False,
) -> None:
    """Train the tiny model with GRPO on an environment that is offered."""
    from ..trainer.loop import TrainOptions, run_training

    summary = run_training(
        TrainOptions(
            url=need_url(url),
            run_id=run,
            environment=environment,
            reward=reward,
            steps=steps,
            seed=seed,
            output=output,
            is_fresh=fresh,
        )
    )
    if json:
        show_json(summary)
        return
    rewards = f"mean reward {summary['reward_first']:.2f} → {summary['reward_last']:.2f}"
    show(f"{summary['steps']} steps, {summary['rollouts']} rollouts, {rewards}; see {output}/summary.json")


@app.command()
def broker(
    data: Annotated[str, typer.Option(help="Directory to keep.")] = "rollfab-data",
    port: Annotated[int | None, typer.Option(help="Loopback port. Default: a unix socket.", min=1, max=65535)] = None,
) -> None:
    """Run a private broker until Ctrl-C and print its URL."""
    from .local.up import run_broker

    raise typer.Exit(run_broker(data, port))


def _register() -> None:
    """Commands that live in files of their own."""
    from . import bench
    from .cli import data, dead, runs, status
    from .doctor import command as doctor
    from .lending import command as lend
    from .local import logs
    from .looking import history, trace
    from .replay import command as replay
    from .roles import acl, api, command, config
    from .simulation import command as simulation
    from .weights import command as weights

    shown = (status, trace, history, lend, doctor, data, dead, logs, runs, weights, replay, simulation)
    for module in (command, config, api, acl, *shown):
        module.register(app)
    app.add_typer(bench.app, name="bench", help="Measure, with baselines in the same run.")


_register()
