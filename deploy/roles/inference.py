"""`rollfab gateway --inference RUN`: an engine's HTTP before the fleet, for trainers that know one vLLM or SGLang.

The run is made where it is not there yet, with staleness 0: whoever publishes by HTTP expects that what is asked for
afterwards comes of those weights, as from one engine.
"""

from __future__ import annotations

import asyncio
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

from ...api.gateway.config import GatewayConfig
from ...api.inference.app import make_inference
from ...api.server import run as serve
from ...fabric.contract.clock import SystemClock
from ...fabric.contract.errors import ConfigError, RunUnknown
from ...fabric.contract.records import RunConfig
from ...fabric.host.directories import told_below, weights_in
from ...fabric.host.helpers import serve_together
from ...fabric.model.presets import context_of, find_model
from ...fabric.opened import RedisFabric
from ...fabric.ports.inference import INFERENCE
from ...trainer.aio import AsyncRun
from ...trainer.checks import check_run
from ...workers.agent.inference import FleetInference, Model, check_inference_run, no_reward
from ...workers.agent.keeper import Elsewhere
from ...workers.engines.model_tokenizer import ends_of, load_tokenizer
from ..cli.printing import Console
from .options import BROKER_WAIT_S, GatewayOptions

CONNECTION_COUNT_MAX = 1024  # it waits at several places in each of the run's shards
TURN_COUNT_MAX = 16  # of a carrier: what its turns made waits in the broker for its end; a new one costs 3 round trips


async def serve_run(options: GatewayOptions, gateway: GatewayConfig, run_id: str, stop: asyncio.Event) -> None:
    """Serve a run's completions until `stop`.

    Raises:
        RunUnknown: the run is not there, and no model is named to make it with; or it was deleted meanwhile.
        ConfigError: agents play it, or its model has no tokenizer here.
    """
    worker_id = options.worker_id("gateway")
    opening = RedisFabric.open(options.url, client_name=worker_id, max_connections=CONNECTION_COUNT_MAX)
    async with await opening as ports:
        config, is_new = await _run_of(ports, run_id, options.model)
        may_download = options.model is not None or any(fnmatchcase(config.model, each) for each in options.hub_names)
        model = await asyncio.to_thread(_load, config.model, may_download)
        if is_new:  # not before its model is loaded: a run of a misspelt one would stand for good
            config = await ports.board.create_run(config)
        run = AsyncRun(ports, config)
        if options.model is not None:
            await publish_first(run)
        publish = partial(_publish, run, options.weights)
        inference = FleetInference(
            ports,
            config,
            model,
            SystemClock(),
            worker_id=worker_id,
            publish=publish,
            broker_wait_s=BROKER_WAIT_S,
        )
        elsewhere = Elsewhere(
            open_fabric=partial(RedisFabric.open, options.url, client_name=worker_id), make_ask_reward=lambda: no_reward
        )
        serving = serve(make_inference(inference, gateway), gateway, stop, on_ready=partial(_say, config))
        try:
            await serve_together(stop, inference.serve(stop, elsewhere), serving)
        finally:
            await run.close()


async def _run_of(ports: RedisFabric, run_id: str, model: str | None) -> tuple[RunConfig, bool]:
    """Return the run whose turns are asked for, and whether it is still to be made.

    Raises:
        RunUnknown: it is not there, and no model is named to make it with.
        ConfigError: it is there with another model, or agents play it.
    """
    existing = (await ports.board.runs()).get(run_id)
    if existing is None and model is None:
        raise RunUnknown(
            f"run {run_id!r} does not exist on this broker: give --model to create it, a preset, path or hub name that "
            "workers hold",
            run_id=run_id,
        )
    if existing is not None:
        check_inference_run(existing)
    if model is None:
        assert existing is not None
        return existing, False
    found = await asyncio.to_thread(find_model, model)
    if existing is not None and existing.model == found.name:
        return existing, False
    wanted = RunConfig(
        run_id=run_id,
        environment=INFERENCE,
        model=found.name,
        model_digest=found.digest,
        staleness=0,
        turn_count_max=TURN_COUNT_MAX,
    )
    checked = check_run(wanted)
    return (checked, True) if existing is None else (await ports.board.create_run(checked), False)  # which refuses it


async def publish_first(run: AsyncRun) -> None:
    """Publish the model's own weights as version 0, where nothing is published and they lie here.

    An engine answers with them from its start, so its clients ask before they send any.
    """
    place = Path(run.config.model)
    if await run.head_version() < 0 and await asyncio.to_thread(_has_weights, place):
        await run.publish(str(place), version=0)


def _has_weights(place: Path) -> bool:
    return place.is_absolute() and any(place.glob("*.safetensors"))


def _load(model: str, may_download: bool) -> Model:
    tokenizer = load_tokenizer(model, may_download=may_download)
    return Model(tokenizer=tokenizer, ends=ends_of(tokenizer, model), context_tokens_max=context_of(model))


async def _publish(run: AsyncRun, directory: str | None, path: str, version: int | None, allow_nonfinite: bool) -> int:
    """Publish what lies at a path in the directory that weights may come from; return its version.

    Raises:
        ConfigError: there is no such directory.
        InputError: it lies elsewhere, or is not there; or new values are NaN or infinite, and that is not allowed.
    """
    place = await asyncio.to_thread(_place, directory, path)
    wanted = await run.head_version() + 1 if version is None else version
    with told_below(None if directory is None else Path(directory)):
        return (await run.publish(str(place), version=wanted, allow_nonfinite=allow_nonfinite)).version


def _place(directory: str | None, path: str) -> Path:
    if directory is None:
        raise ConfigError(
            "no weights are taken by path here: have it started with `rollfab gateway --inference RUN --weights "
            "DIRECTORY`, in which the trainer saves them"
        )
    return weights_in(Path(directory), path)


def _say(run: RunConfig, url: str) -> None:
    text = f"inference API of run {run.run_id}, model {run.model}, at {url.rstrip('/')}"
    Console(stderr=True).print(text, highlight=False, soft_wrap=True)
