"""What `rollfab bench …` runs: each bench is a module beside this one."""

from __future__ import annotations

import os
from importlib import import_module
from importlib.util import find_spec
from inspect import iscoroutine
from pathlib import Path
from typing import Annotated, Any

import typer

from rollfab.deploy.cli.exits import run_async
from rollfab.deploy.cli.options import Url, need_url
from rollfab.fabric.contract.errors import ConfigError

app = typer.Typer(no_args_is_help=True)

Quick = Annotated[bool, typer.Option("--quick", help="A rougher figure in under a minute.")]
Name = Annotated[str | None, typer.Option("--name")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]

# Those that take no options but --quick and --json: NAME/main.py has FULL, QUICK, measure and print_table.
PLAIN = {
    "affinity": "Turns that go where their context is cached, over turns at random or to whoever asks first.",
    "room": "Turns taken by the KV cache that they are likely to hold, over turns taken by slots alone (vLLM).",
    "tails": "Groups that take long first, over first come, first served: the time of a step with stragglers.",
    "sharing": "Runs that share two workers by weight, with real engines: who waits for how long, who has what.",
    "engine": "vLLM through the whole fabric, over vLLM's own offline generate; and how soon it stops when told to.",
    "gateway": "Chat completions through the gateway, over the same vLLM server asked directly: ms and tokens.",
    "placement": "What the broker pays to give out one job, by how many workers and trajectories there are.",
    "resume": "Turns taken from one worker in the middle: how soon they go on at another, and whether exactly.",
    "saving": "What a long turn costs the broker while its tokens are saved: in parts, over whole every time.",
    "conversation": "What a turn of a long chat costs its agent, over rendering and encoding all of it anew.",
    "page": "The page and its api before a large fabric: how fast they answer, and what they cost the broker.",
    "evaluation": "What an evaluation costs the training's groups beside it, over the same in a fabric of its own.",
    "prediction": "What the simulated cluster says of real runs on this machine, beside what they do.",
    "sim": "A simulated cluster of up to 112 GPUs: production's rules beside others, and how fast that is.",
}


def _plain(name: str, text: str) -> None:
    @app.command(name, help=text)
    def command(quick: Quick = False, json: AsJson = False) -> None:
        from .measure import run_bench

        bench = import_module(f".{name}.main", __package__)

        def measured() -> Any:
            report = bench.measure(bench.QUICK if quick else bench.FULL)
            return run_async(report) if iscoroutine(report) else report

        faults = getattr(bench, "faults", lambda report: ())
        raise typer.Exit(run_bench(measured, bench.print_table, json_output=json, faults=faults))


for _name, _text in PLAIN.items():
    _plain(_name, _text)


@app.command("queue")
def queue(quick: Quick = False, json: AsJson = False, url: Annotated[str | None, typer.Option()] = None) -> None:
    """Jobs per second and push-to-claim latency, beside other queues and the broker's own limit."""
    from .queue.main import bench_queue

    raise typer.Exit(bench_queue(quick=quick, json_output=json, url=url))


@app.command("loads")
def loads(
    quick: Quick = False,
    json: AsJson = False,
    trace: Annotated[list[Path] | None, typer.Option(help="Of serving, in place of those drawn; repeat it.")] = None,
) -> None:
    """A simulated cluster under serving loads that nothing was tuned on: production's rules beside others."""
    from .loads.main import bench_loads

    raise typer.Exit(bench_loads(quick=quick, json_output=json, traces=trace or ()))


@app.command("overhead")
def overhead(
    quick: Quick = False,
    json: AsJson = False,
    traces: Annotated[
        bool, typer.Option("--traces", help="With OpenTelemetry traces of every group, over the same without.")
    ] = False,
) -> None:
    """Tokens per second through the whole fabric, over the same engine fed directly; or with traces, over without."""
    from .overhead.main import bench_overhead

    raise typer.Exit(bench_overhead(quick=quick, json_output=json, traces=traces))


@app.command("weights")
def weights(
    quick: Quick = False,
    json: AsJson = False,
    parameters: Annotated[
        int | None, typer.Option(help="Of the model, at least; default 0.5 B, quick 30 M.", min=1)
    ] = None,
) -> None:
    """Real weight updates as deltas: bytes, speed, pause and time until live, beside how others send them."""
    from .weights.main import bench_weights

    raise typer.Exit(bench_weights(quick=quick, json_output=json, parameters=parameters))


@app.command("chaos")
def chaos(
    quick: Quick = False,
    json: AsJson = False,
    seed: Annotated[int, typer.Option(help="Of the faults: the same seed, the same faults.")] = 0,
    duration: Annotated[float | None, typer.Option(help="Seconds of faults; default 600, quick 22.", min=1)] = None,
    kill_agents: Annotated[int, typer.Option(help="Kill agents so many times, and do nothing else.", min=0)] = 0,
    calls: Annotated[
        str, typer.Option(help="Chat calls in place of trajectories, of: agents (environments), gateway (sessions).")
    ] = "",
) -> None:
    """A real workload under kills, freezes and cuts of every role and the broker: what is lost, what comes twice."""
    from .chaos.main import CALLS, bench_chaos

    if calls not in ("", *CALLS):
        raise typer.BadParameter(f"expected {' or '.join(CALLS)}", param_hint="--calls")
    code = bench_chaos(
        quick=quick, json_output=json, seed=seed, duration_s=duration, agent_kill_count=kill_agents, calls=calls
    )
    raise typer.Exit(code)


def _check_figure(path: Path) -> None:
    """Require that a figure can be drawn to a file, before anything is measured for it.

    Raises:
        ConfigError: it cannot.
    """
    if path.suffix not in (".png", ".svg"):
        raise ConfigError(f"--figure {path} ends in {path.suffix or 'no suffix'}: name it .png or .svg")
    if not path.parent.is_dir():
        raise ConfigError(f"--figure: the directory of {path} is not there: make it first")
    if not os.access(path.parent, os.W_OK):
        raise ConfigError(f"--figure: you may not write into the directory of {path}: name a file elsewhere")
    if find_spec("matplotlib") is None:
        raise ConfigError("--figure draws with matplotlib, which is not installed: pip install matplotlib")


@app.command("training")
def training(
    quick: Quick = False,
    json: AsJson = False,
    figure: Annotated[str, typer.Option(help="A .png or .svg file to draw to.")] = "",
) -> None:
    """GRPO through a disturbed fabric, over the same in one process; and lengths of answers under revocation."""
    from .training.main import bench_training

    if figure:
        _check_figure(Path(figure))
    raise typer.Exit(bench_training(quick=quick, json_output=json, figure=figure))


@app.command("coserve")
def coserve(
    quick: Quick = False,
    json: AsJson = False,
    rate: Annotated[float | None, typer.Option(help="Serving requests per second.", min=0.1)] = None,
    requests: Annotated[int | None, typer.Option(help="Of each arm in each repetition.", min=2)] = None,
    rounds: Annotated[int | None, typer.Option(help="Repetitions of every arm.", min=1)] = None,
    arms: Annotated[str, typer.Option(help="Comma-separated; default all (quick: some).")] = "",
    load: Annotated[str, typer.Option(help="Fractions of the SLO capacity to go through, as 0.1,0.5,0.95.")] = "",
    control: Annotated[
        bool, typer.Option("--control", help="Only the kill switch, bursts and the frozen broker.")
    ] = False,
) -> None:
    """Rollouts beside a real serving engine: what they make, what serving pays, beside other ways of sharing."""
    from .coserve.main import bench_coserve, settings_of

    settings = settings_of(
        quick=quick, control=control, rate=rate, requests=requests, rounds=rounds, arms=arms, loads=load
    )
    raise typer.Exit(bench_coserve(settings, json_output=json))


# ---------------------------------------------------------------- processes that benches start


@app.command("lent", hidden=True)
def lent(
    probe: Annotated[Path, typer.Option()],
    switch: Annotated[Path, typer.Option()],
    ttft: Annotated[float, typer.Option("--slo-ttft-ms")],
    tpot: Annotated[float, typer.Option("--slo-tpot-ms")],
    model: Annotated[str, typer.Option()],
    slots: Annotated[int, typer.Option()],
    context: Annotated[int, typer.Option()],
    words: Annotated[list[str] | None, typer.Argument()] = None,
    mps: Annotated[bool, typer.Option("--mps")] = False,
    mps_threads: Annotated[int | None, typer.Option()] = None,
    url: Url = None,
    name: Name = None,
) -> None:
    """A serving worker whose guard decides as the bench switches."""
    from rollfab.deploy.roles.engines import EngineOptions
    from rollfab.deploy.roles.options import WorkerOptions
    from rollfab.workers.serving.device.mps import MpsOptions
    from rollfab.workers.serving.options import ServingOptions

    from .coserve.worker import run_lent

    engine = EngineOptions(
        engine="vllm",
        model=model,
        slot_count=slots,
        context_tokens_max=context,
        log="-",
        words=tuple(words or ()),
    )
    sharing = MpsOptions(is_asked=mps, threads_percent=mps_threads)
    serving = ServingOptions(probe=str(probe), ttft_slo_ms=ttft, tpot_slo_ms=tpot, mps=sharing)
    options = WorkerOptions(url=need_url(url), name=name, role="serving", engine=engine, serving=serving)
    run_lent(options, switch=switch)


@app.command("witness", hidden=True)
def witness(
    directory: Annotated[Path, typer.Option()],
    slots: Annotated[int, typer.Option()],
    url: Url = None,
    name: Name = None,
    role: Annotated[str, typer.Option()] = "dedicated",
) -> None:
    """A rollout worker that records what its engine did."""
    from .witness import run_witness

    run_witness(need_url(url), name, role=role, slot_count=slots, directory=directory)


@app.command("paced", hidden=True)
def paced(
    slots: Annotated[int, typer.Option()],
    step: Annotated[float, typer.Option()],
    context: Annotated[int, typer.Option()] = 512,
    model: Annotated[str, typer.Option()] = "tiny",
    role: Annotated[str, typer.Option()] = "dedicated",
    pool: Annotated[str, typer.Option()] = "",
    url: Url = None,
) -> None:
    """A rollout worker whose engine makes a step in a fixed time."""
    from .evaluation.worker import run_paced

    run_paced(need_url(url), model=model, slot_count=slots, step_s=step, context_tokens=context, role=role, pool=pool)


@app.command("counting", hidden=True)
def counting(
    name: Annotated[str, typer.Option()],
    model: Annotated[str, typer.Option()],
    slots: Annotated[int, typer.Option()],
    context: Annotated[int, typer.Option()],
    directory: Annotated[Path, typer.Option()],
    patient: Annotated[bool, typer.Option("--patient")] = False,
    url: Url = None,
) -> None:
    """A rollout worker that counts the tokens of prompts that it reads."""
    from .affinity.cast import run_counting

    run_counting(
        need_url(url),
        name,
        model=model,
        slot_count=slots,
        context_tokens=context,
        directory=directory,
        is_patient=patient,
    )


@app.command("drawing", hidden=True, context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
def drawing() -> None:
    """An agent that hands every turn to a worker at random; names of workers, `--`, and an agent's words follow."""
    from .affinity.cast import draw_homes

    draw_homes()


@app.command("by-slots", hidden=True, context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
def by_slots() -> None:
    """A rollout worker without the rule of room; the words of `rollfab worker` follow."""
    from .room.main import work_by_slots

    work_by_slots()


@app.command("trainer", hidden=True)
def trainer(
    directory: Annotated[Path, typer.Option()],
    index: Annotated[int, typer.Option()],
    group_size: Annotated[int, typer.Option()],
    turns: Annotated[int, typer.Option()],
    depth: Annotated[int, typer.Option()],
    url: Url = None,
) -> None:
    """A trainer of chaos: trains nothing, keeps a journal of every group."""
    from .chaos.trainer import TrainerOptions, run_trainer

    options = TrainerOptions(
        url=need_url(url), index=index, directory=directory, group_size=group_size, turn_count=turns, depth=depth
    )
    run_trainer(options)
