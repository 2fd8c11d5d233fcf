"""`rollfab demo`, `up`, `train` and `broker`: what runs on this machine until it is done or is stopped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

import typer

from ...fabric.broker.clients.url import mask_url
from ...fabric.contract.errors import ConfigError, FabricError
from ..cli.exits import leaving_at_once
from ..cli.options import (
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
from ..cli.printing import show, show_json


def register(app: typer.Typer) -> None:
    """Add the commands of this file."""
    for name, command in (("demo", _demo), ("up", _up), ("train", _train), ("broker", _broker)):
        app.command(name)(command)


def _demo(
    environment: Annotated[str, typer.Option(help="frozenlake or guess-the-number.")] = "frozenlake",
    steps: Annotated[int | None, typer.Option(help="Optimizer steps. Default: until it is learnt.", min=1)] = None,
    seed: Annotated[int, typer.Option(help="Of the trainer's model and tasks.")] = 0,
    output: Annotated[str, typer.Option(help="Where logs, the reward curve and data go.")] = "rollfab-demo",
    engine: EngineName = "transformers",
    port: Port = 0,
    json: AsJson = False,
) -> None:
    """Everything at once on this machine: watch a tiny model learn, a GPU being lent, a worker being killed."""
    from ..roles.engines import EngineOptions, check_engine_options, require_engine
    from .demo import DemoOptions, run_demo

    check_engine_options(EngineOptions(engine=engine))
    require_engine(engine)
    options = DemoOptions(
        environment=environment, steps=steps, seed=seed, output=output, engine=engine, port=port, is_json=json
    )
    raise typer.Exit(run_demo(options))


def _up(
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
    """Start all roles on this machine for your own trainer; stops them on Ctrl-C.

    What is not typed comes from ROLLFAB_CONFIG and the roles' own variables, where these say something.
    """
    from ...fabric.model.presets import check_tokenizer_files
    from .up import UpOptions, run_up

    (worker, agent, _, api, _), said = _roles(context, words or ())
    if agents:
        check_tokenizer_files(worker.engine.model)
    options = UpOptions(
        url=url or said,
        url_from="--url" if _is_typed(context, "url") else "ROLLFAB_URL" if url else "ROLLFAB_CONFIG's file",
        model=worker.engine.model,
        dedicated=dedicated,
        serving=serving,
        agents=agents,
        slot_count=worker.engine.slot_count,
        engine=worker.engine.engine,
        dtype=worker.engine.dtype,
        engine_words=worker.engine.words,
        has_engine_log=worker.engine.log is None and worker.engine.server is None,
        device=worker.engine.device or "cpu",
        data=data,
        port=api.port,
        host=api.host,
        is_tls=api.tls_cert is not None,
        weights=api.weights,
        model_directories=api.model_directories,
        environments=tuple(environment or ()),
        rewards=tuple(reward or ()),
        passed=tuple(pass_env or ()),
        run_as=run_as,
        is_offline=no_network,
        hub_names=agent.hub_names,
    )
    raise typer.Exit(run_up(options))


def _roles(context: typer.Context, engine_words: Sequence[str]) -> tuple[list[Any], str | None]:
    """Return what a worker, an agent, a reward worker, the api and the controller would run by, with what was typed
    after `up`, and the broker that they are told of, if any.

    Raises:
        ConfigError: some of them would not start, and the text names all, or they are told of several brokers.
    """
    from ..roles.command import read_options
    from ..roles.starting import check_role, refuse_all

    foreign = _typed(context, "environment", "reward", "pass_env", "run_as", "no_network")
    words = {
        "worker": [
            *_typed(context, "model", "slots", "engine", "dtype"),
            *(["--", *engine_words] if engine_words else []),
        ],
        "agent": [*foreign, *_typed(context, "allow_hub")],
        "reward": foreign,
        "api": [*_typed(context, "port"), "--train"],
        "controller": [],
    }
    read: dict[str, Any] = {}
    faults: dict[str, FabricError] = {}
    for role, typed in words.items():
        try:
            read[role], _ = read_options(context, role, typed)
            check_role(replace(read[role], url=""))  # its broker is the one that `up` uses
        except FabricError as error:
            faults[role] = error
    refuse_all(faults)
    urls = {options.url: role for role, options in read.items() if options.url}
    if context.params["url"] is None and len(urls) > 1:
        names = " and ".join(f"[{role}] names {mask_url(url)}" for url, role in urls.items())
        raise ConfigError(
            f"ROLLFAB_CONFIG's file names several brokers, {names}: name one, or give --url", option="url"
        )
    return [replace(options, url="") for options in read.values()], next(iter(urls), None)


def _is_typed(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _typed(context: typer.Context, *names: str) -> list[str]:
    """Return the words for those of these options that were typed: of the others the roles know better."""
    words: list[str] = []
    for name in names:
        value, dashed = context.params[name], "--" + name.replace("_", "-")
        if not _is_typed(context, name):
            continue
        if isinstance(value, bool):
            words += [dashed] if value else []
            continue
        for each in value if isinstance(value, list | tuple) else [value]:
            words += [dashed, str(each)]
    return words


def _train(
    url: Url = None,
    run: Annotated[str, typer.Option(help="The run.")] = "train",
    environment: Annotated[str, typer.Option(help="frozenlake or guess-the-number.")] = "frozenlake",
    reward: Annotated[str | None, typer.Option(help="Registered reward function; default: the environment's.")] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps in all; default: as tuned.", min=1)] = None,
    seed: Annotated[int, typer.Option(help="Of model and tasks.")] = 0,
    output: Annotated[str, typer.Option(help="Checkpoints and summary.json go here.")] = "rollfab-train",
    fresh: Annotated[bool, typer.Option("--fresh", help="Ignore an earlier checkpoint.")] = False,
    json: AsJson = False,
) -> None:
    """Train the tiny model with GRPO on an environment that is offered."""
    url = need_url(url)
    with leaving_at_once():
        from ...trainer.grpo import build_model
        from ...trainer.loop import TrainOptions, run_training

        build_model("tiny")  # the libraries load what a model needs as it is first built

    summary = run_training(
        TrainOptions(
            url=url,
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
    if (before := summary["steps_before"]) == summary["steps"]:
        show(
            f"Nothing to do: the checkpoint in {output} has {before} steps behind it. --steps counts those, too: "
            f"--steps {before + 10} goes on from there, --fresh begins anew"
        )
        return
    again = f" ({before} of them before)" if before else ""
    rewards = f"mean reward {summary['reward_first']:.2f} → {summary['reward_last']:.2f}"
    show(f"{summary['steps']} steps{again}, {summary['rollouts']} rollouts, {rewards}; see {output}/summary.json")


def _broker(
    data: Annotated[str, typer.Option(help="Directory to keep.")] = "rollfab-data",
    port: Annotated[int | None, typer.Option(help="Loopback port. Default: a unix socket.", min=1, max=65535)] = None,
) -> None:
    """Run a private broker until Ctrl-C and print its URL."""
    from .up import run_broker

    raise typer.Exit(run_broker(data, port))
