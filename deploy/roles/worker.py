"""`rollfab worker`: its options, and what they come to."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Annotated

import typer

from ...fabric.contract.errors import ConfigError
from ..cli.options import EngineName, EngineWords, Name, Url, need_url

Role = Annotated[str, typer.Option(help="dedicated or serving.")]
Model = Annotated[str | None, typer.Option(help="Preset, path or hub name. Default: tiny.")]
Slots = Annotated[int, typer.Option(help="Turns it runs at once.", min=1)]
Context = Annotated[
    int | None, typer.Option(help="Longest context in tokens. Default: 512; the server's with --server.", min=2)
]
Seed = Annotated[int | None, typer.Option(help="Of sampling; default: fresh.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 …; with vLLM set CUDA_VISIBLE_DEVICES.")]
Server = Annotated[str | None, typer.Option(help="vllm: attach to the OpenAI server at this URL.")]
EngineLog = Annotated[
    str | None, typer.Option(help="vllm: file for its output; - for where ours goes. Default: in ~/.local/state.")
]
AdapterRank = Annotated[
    int | None, typer.Option(help="vllm: the run's weights are a LoRA adapter of this rank.", min=1)
]
AdapterAlpha = Annotated[float | None, typer.Option(help="vllm: its scale times the rank. Default: the rank.")]
SleepAfter = Annotated[
    float | None, typer.Option(help="Seconds without a lease after which the engine gives its memory back.", min=0)
]
SharedWeights = Annotated[
    bool, typer.Option(help="Fetch weights once for all workers of this machine, by shared memory.")
]
WeightsListen = Annotated[
    str, typer.Option(help="HOST:PORT to serve weights to other machines at. Weights travel in clear.")
]
WeightsHost = Annotated[str, typer.Option(help="How other machines reach that HOST, if by another name.")]
Region = Annotated[str, typer.Option(help="Where this machine is: regions are crossed once.")]
HomeRegion = Annotated[str, typer.Option("--home-region", help="Where the broker is.")]
PeerWeights = Annotated[bool, typer.Option(help="Take live weights of other workers; off where a worker may lie.")]
Probe = Annotated[
    str | None, typer.Option(help="serving: what shows the serving engine: its ROLLFAB_PROBE page, or its http:// URL.")
]
ProbeUser = Annotated[str | None, typer.Option(help="serving: user that runs the serving engine, if another one.")]
SloTtft = Annotated[float | None, typer.Option(help="serving: its objective for P99 time to first token.")]
SloTpot = Annotated[float | None, typer.Option(help="serving: its objective for P99 time per output token.")]
Pool = Annotated[str, typer.Option(help="serving: the group of workers that its team switches together.")]
Priority = Annotated[
    str | None,
    typer.Option(help="serving: of rollouts on the device: yield, idle, low or normal. Default: yield, or else idle."),
]
KvMemory = Annotated[
    str | None,
    typer.Option(
        help="serving: static, release (vLLM unmaps its KV cache while not lent) or kvcached. Default: static."
    ),
]
KvcachedSegment = Annotated[str | None, typer.Option(help="kvcached: the rollout engine's KVCACHED_IPC_NAME.")]
KvcachedTokenBytes = Annotated[
    int | None, typer.Option(help="kvcached: bytes of KV cache of one token, in all layers.", min=1)
]
Observe = Annotated[bool, typer.Option("--observe", help="serving: lend nothing ever, show what could be lent.")]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("worker")(_worker)


def _worker(
    url: Url = None,
    name: Name = None,
    role: Role = "dedicated",
    engine: EngineName = "transformers",
    model: Model = None,
    slots: Slots = 64,
    context: Context = None,
    seed: Seed = None,
    device: Device = None,
    server: Server = None,
    engine_log: EngineLog = None,
    adapter_rank: AdapterRank = None,
    adapter_alpha: AdapterAlpha = None,
    sleep_after: SleepAfter = None,
    shared_weights: SharedWeights = True,
    weights_listen: WeightsListen = "",
    weights_host: WeightsHost = "",
    region: Region = "",
    home: HomeRegion = "",
    peer_weights: PeerWeights = True,
    probe: Probe = None,
    probe_user: ProbeUser = None,
    slo_ttft_ms: SloTtft = None,
    slo_tpot_ms: SloTpot = None,
    pool: Pool = "",
    priority: Priority = None,
    observe: Observe = False,
    kv_memory: KvMemory = None,
    kvcached_segment: KvcachedSegment = None,
    kvcached_token_bytes: KvcachedTokenBytes = None,
    words: EngineWords = None,
) -> None:
    """Run a rollout worker: generates turns while it holds a lease."""
    from ...workers.rollout.weight_sources import SupplyOptions
    from ...workers.serving.device.memory import MemoryOptions
    from ...workers.serving.options import ServingOptions
    from .engines import EngineOptions
    from .run import RoleOptions, run_worker

    options = EngineOptions(
        engine=engine,
        model=_named(model, server),
        slot_count=slots,
        context_tokens_max=context,
        seed=seed,
        device=device,
        server=server,
        server_key=os.environ.get("ROLLFAB_SERVER_KEY"),
        log=engine_log,
        words=tuple(words or ()),
        adapter_rank=adapter_rank,
        adapter_alpha=adapter_alpha,
    )
    supply = SupplyOptions(is_shared=shared_weights, listen=weights_listen, believes_peers=peer_weights)
    supply = replace(supply, public_host=weights_host, region=region, home_region=home)
    serving = ServingOptions(
        probe=probe,
        probe_user=probe_user,
        ttft_slo_ms=slo_ttft_ms,
        tpot_slo_ms=slo_tpot_ms,
        pool=pool,
        priority=priority,
        is_observing=observe,
        memory=MemoryOptions(backend=kv_memory, segment=kvcached_segment, token_bytes=kvcached_token_bytes),
    )
    place = RoleOptions(url=need_url(url), name=name)
    run_worker(place, role=role, engine=options, sleep_after_s=sleep_after, supply=supply, serving=serving)


def _named(model: str | None, server: str | None) -> str:
    if server is not None and model is None:
        raise ConfigError(
            "--server needs --model: the name that the server has for it, which is the model of the runs it works for"
        )
    return model or "tiny"
