"""`rollfab replay`: a recorded load at a real serving engine, with what its users would have seen."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from ...fabric.contract.errors import ConfigError, InputError
from ...fabric.contract.text import counted
from ...fabric.host.directories import replacing
from ...fabric.host.helpers import Helpers
from ..cli.exits import INTERRUPTED, run_async
from ..cli.options import AsJson
from ..cli.printing import Console, show
from ..cli.progress import progress
from .records import Arrival
from .scale import bursty, faster, fitted, with_lengths
from .traces import ALL, Part, read_trace

if TYPE_CHECKING:
    from ...fabric.rules.serving.facts import Slo
    from .client import Manner, Server, Tally
    from .prompts import Endpoint
    from .records import Outcome
    from .traces import Part

SHOW_EVERY_S = 0.25
VOCABULARY_MAX = 10_000_000

Trace = Annotated[
    str, typer.Argument(help="azure-conv, azure-code, or a file: CSV, JSON lines, ServeGen npz, a rate curve.")
]
ServerUrl = Annotated[
    str, typer.Option("--url", help="Server, OpenAI-compatible: http://host:8000. Its key: \\[env: ROLLFAB_SERVER_KEY]")
]
Positive = 1e-6


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command()
    def replay(
        trace: Trace,
        url: ServerUrl,
        model: Annotated[str | None, typer.Option(help="Its name at the server. Default: the server's first.")] = None,
        rate: Annotated[float | None, typer.Option(help="Mean requests per second. Default: as recorded.")] = None,
        start: Annotated[float, typer.Option(help="Seconds into the trace.", min=0)] = 0.0,
        duration: Annotated[float | None, typer.Option(help="Seconds of the trace. Default: to its end.")] = None,
        lengths: Annotated[float, typer.Option(help="Factor on prompts and completions.", min=Positive)] = 1.0,
        lengths_of: Annotated[str, typer.Option(help="Trace whose lengths a mere rate curve gets.")] = "azure-conv",
        peak: Annotated[
            float | None, typer.Option(help="Redraw the times, busiest second this many times the mean; ROSE: 4.22.")
        ] = None,
        speed: Annotated[float, typer.Option(help="Compress time; changes what bursts are like.", min=Positive)] = 1.0,
        seed: Annotated[int, typer.Option(help="Of all that is drawn: the same seed, the same load.", min=0)] = 0,
        slo_ttft_ms: Annotated[float | None, typer.Option(help="Promised time to first token.", min=0)] = None,
        slo_tpot_ms: Annotated[float | None, typer.Option(help="Promised time per token after it.", min=0)] = None,
        chat: Annotated[bool, typer.Option("--chat", help="Send text to chat completions, not token ids.")] = False,
        vocabulary: Annotated[
            int, typer.Option(help="Prompts are of token ids below it.", min=2, max=VOCABULARY_MAX)
        ] = 100,
        drain: Annotated[float, typer.Option(help="Seconds to wait for the last answers.", min=0)] = 600.0,
        outcomes: Annotated[Path | None, typer.Option(help="Write every request's outcome here, JSON lines.")] = None,
        json: AsJson = False,
    ) -> None:
        """Send recorded load to a serving engine, each request at its time; report TTFT and TPOT as users see them."""
        if find_spec("aiohttp") is None:
            raise ConfigError("rollfab replay needs aiohttp: pip install 'rollfab[workers]'")
        from ...fabric.rules.serving.facts import Slo
        from .client import Manner
        from .traces import Part

        for name, value in (("--rate", rate), ("--duration", duration), ("--peak", peak)):
            if value is not None and value <= 0:
                raise ConfigError(f"{name} is {value:g}, must be above 0")
        endpoint: Endpoint = "chat" if chat else "completions"
        options = ReplayOptions(
            trace=trace,
            url=url,
            model=model,
            part=Part(start_s=start, duration_s=duration, rate_per_s=rate, seed=seed, lengths=lengths_of),
            shaping=Shaping(peak_over_mean=peak, lengths_factor=lengths, speed=speed),
            slo=Slo(ttft_ms=_promised(slo_ttft_ms), tpot_ms=_promised(slo_tpot_ms)),
            manner=Manner(
                endpoint=endpoint,
                api_key=os.environ.get("ROLLFAB_SERVER_KEY"),
                vocabulary_size=vocabulary,
                drain_s=drain,
            ),
            outcomes_path=outcomes,
        )
        raise typer.Exit(run_replay(options, json_output=json))


def _promised(limit_ms: float | None) -> float:
    return math.inf if limit_ms is None else limit_ms


@dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    """The load to replay, the server, and the objectives promised there."""

    trace: str
    url: str = field(repr=False)
    model: str | None
    part: Part
    shaping: Shaping
    slo: Slo
    manner: Manner
    outcomes_path: Path | None

    def row(self, server: Server) -> dict[str, Any]:
        """Return the options for JSON, without the key."""
        return {
            "trace": self.trace,
            "server": asdict(server),
            "part": asdict(self.part),
            "shaping": asdict(self.shaping),
            "slo": asdict(self.slo),
            "endpoint": self.manner.endpoint,
            "prompts": "fresh for every replay",
        }


def run_replay(options: ReplayOptions, *, json_output: bool) -> int:
    """Replay and report; returns the exit code: 0 if every request was answered in full, 1 if not, 130 for Ctrl-C.

    Raises:
        ConfigError, InputError, EngineError: nothing was replayed.
    """
    from .client import find_server
    from .figures import Report
    from .records import dump_outcomes
    from .report import measured, print_measured
    from .scale import Load

    server = run_async(find_server(options.url, options.model, options.manner.api_key))
    with progress(f"reading {options.trace}"):
        load = workload(options.trace, options.part, options.shaping, context_tokens=server.context_tokens)
    with _written(options.outcomes_path) as write:
        outcomes, cpu_s, is_interrupted = run_async(_replayed(load, server, options.manner))
        wrong = write(dump_outcomes(outcomes))
    found = measured(outcomes, options.slo, seed=options.part.seed, client_cpu_s=cpu_s)
    if json_output:
        results = {**found.row(), "load": asdict(Load.of(load.arrivals, load.span_s)), "load_notes": load.notes}
        show(Report(name="replay", params=options.row(server), results=results, baselines={}, ratio={}).json())
    else:
        print_measured(f"{server.model} at {server.url}", found, options.slo, _load_notes(load))
    if wrong:  # after what was measured: that is not lost
        raise InputError(wrong)
    if is_interrupted:
        return INTERRUPTED
    return 1 if found.error_counts else 0


def _load_notes(load: Workload) -> list[str]:
    from .scale import Load

    sent = Load.of(load.arrivals, load.span_s)
    return [
        *load.notes,
        f"load: {counted(sent.count, 'request')} in {load.span_s:,.0f} s, {sent.mean_per_s:.3g} a second; of its"
        f" seconds P99 is {sent.p99_over_mean:.3g}, the busiest {sent.max_over_mean:.3g} times the mean; index of"
        f" dispersion {sent.idc:.3g}",
    ]


@contextmanager
def _written(path: Path | None) -> Iterator[Any]:
    """Yield a function that writes there, and returns why it cannot; finds that out at once, before the replay.

    A plain file gets its name when all of it is written. What else is there, as a pipe, is opened at once, and written
    to as it is.

    Raises:
        InputError: it cannot.
    """
    if path is None:
        yield lambda data: ""
        return
    is_plain = not path.is_symlink() and (path.is_file() or not path.exists())
    try:
        if is_plain:
            with replacing(path) as new:
                new.touch()
                new.unlink()  # so that nothing is replaced
        file = None if is_plain else path.open("wb", buffering=0)
    except OSError as error:
        raise InputError(f"outcomes cannot be written to {path}: {error.strerror}") from error

    def write(data: bytes) -> str:
        try:
            if file is None:
                with replacing(path) as new:
                    new.write_bytes(data)
                return ""
            rest = memoryview(data)
            while rest:
                rest = rest[file.write(rest) :]
        except OSError as error:
            return f"outcomes cannot be written to {path}: {error.strerror}"
        return ""

    with file or contextlib.nullcontext():
        yield write


async def _replayed(load: Workload, server: Server, manner: Manner) -> tuple[list[Outcome], float, bool]:
    """Replay; returns the outcomes, processor seconds that the client used, and whether Ctrl-C ended it."""
    from .client import Tally, raise_file_limit, replay

    raise_file_limit()
    tally = Tally()
    with contextlib.suppress(NotImplementedError):  # Windows: Ctrl-C then ends it without a report
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, tally.stop.set)
    began_cpu_s = time.process_time()
    async with Helpers(_show(tally, load)):
        outcomes = await replay(load.arrivals, server.url, server.model, manner=manner, tally=tally)
    return outcomes, time.process_time() - began_cpu_s, tally.stop.is_set()


async def _show(tally: Tally, load: Workload) -> None:
    """Show on a terminal's stderr how far the replay is; on anything else, show nothing."""
    if not sys.stderr.isatty():
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[facts]}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("replay", total=len(load.arrivals), facts="")
        while True:
            running = tally.sent_count - tally.ended_count
            facts = f"{tally.sent_count}/{len(load.arrivals)} sent, {running} running, {tally.failed_count} failed"
            progress.update(task, completed=tally.ended_count, facts=facts)
            await asyncio.sleep(SHOW_EVERY_S)


# ---------------------------------------------------------------- workload
#
# From a trace to what is sent: its part, rate, bursts, speed and lengths, in this order, and what to say of them.


CUT_FRACTION_MAX = 0.5  # beyond it the lengths that are left are the model's, not the trace's


@dataclass(frozen=True, kw_only=True)
class Shaping:
    """The changes to a part of a trace.

    Attributes:
        peak_over_mean: of its seconds, by `bursty`; None: its own bursts.
        lengths_factor: of prompts and completions.
        speed: by how much time is compressed; the part's rate then is what the server sees.
    """

    peak_over_mean: float | None = None
    lengths_factor: float = 1.0
    speed: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The requests to send. arrivals: within [0, span_s), in order; notes: how it differs from what was recorded."""

    arrivals: list[Arrival]
    span_s: float
    notes: tuple[str, ...]


AS_IT_IS = Shaping()


def workload(
    source: str | Path, part: Part = ALL, shaping: Shaping = AS_IT_IS, *, context_tokens: int | None = None
) -> Workload:
    """Take a trace's part, shape it, and cut it to the model's context. context_tokens: None: no limit.

    Raises:
        ConfigError: no such trace or part of it, or more than half of its requests do not fit into the context.
        InputError: the trace cannot be read.
    """
    rate_per_s = None if part.rate_per_s is None else part.rate_per_s / shaping.speed
    trace = read_trace(source, replace(part, rate_per_s=rate_per_s))
    arrivals, notes = trace.arrivals, [f"trace {source}, {trace.origin}"]
    if shaping.peak_over_mean is not None:
        arrivals = bursty(arrivals, shaping.peak_over_mean, span_s=trace.span_s, seed=part.seed)
        notes.append(f"times redrawn: Gamma-modulated Poisson, busiest second near {shaping.peak_over_mean:g} x mean")
    if shaping.speed != 1:
        arrivals = faster(arrivals, shaping.speed)
        notes.append(f"time compressed {shaping.speed:g} times: bursts are shorter and steeper than they were")
    if shaping.lengths_factor != 1:
        arrivals = with_lengths(arrivals, shaping.lengths_factor)
        notes.append(f"prompts and completions times {shaping.lengths_factor:g}")
    if context_tokens is not None:
        arrivals, cut_count = fitted(arrivals, context_tokens)
        if cut_count > CUT_FRACTION_MAX * len(arrivals):
            raise _too_long(source, trace.arrivals, context_tokens)
        if cut_count:
            how_many = f"{cut_count} of {counted(len(arrivals), 'request')}"
            notes.append(f"{how_many} cut to the model's {context_tokens} tokens")
    return Workload(arrivals=arrivals, span_s=trace.span_s / shaping.speed, notes=tuple(notes))


def _too_long(source: str | Path, arrivals: Sequence[Arrival], context_tokens: int) -> ConfigError:
    tokens = [each.prompt_tokens + each.completion_tokens for each in arrivals]
    median, most = (float(np.quantile(tokens, fraction)) for fraction in (0.5, 0.95))
    return ConfigError(
        f"the model's context is {context_tokens} tokens, too small for most requests of {source} (as recorded, half"
        f" of them need {median:.0f} and more): scale them, --lengths {context_tokens / most:.2g}",
        context_tokens=context_tokens,
    )
