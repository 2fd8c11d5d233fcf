"""`rollfab bench weights`: real updates as deltas, beside how others send them; and what a receiver notices of it.

- Updates are those of AdamW on a model of Qwen2's shape (updates.py), recorded first by a process that has
  ended when the measuring begins.
- Codecs (codec.py): bytes, entropy floor and CPU time of every code on the same deltas, in one process.
- Floors (floors.py): encoding, applying and the pause beside the least that this machine can do them in.
- Live (live.py): from publishing until live, and the pause, beside dense through the same broker.
- Chain (chain.py): bytes published over many versions, and those of a receiver far behind. A smaller model.
- Node (node.py): what the broker sends to eight workers of one node, and to one.
- All of it is CPU and loopback. A figure is a median over rounds, each with another delta; ratios are of neighbours.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rollfab.deploy.replay.figures import Report
from tests.bench.measure import complain, run_bench

from ..remote import Remote
from . import live as weights_live
from .chain import JOIN_COUNT, LAG, measure_chain
from .codec import measure_codecs
from .floors import measure_floors
from .live import measure_live
from .node import measure_node
from .recording import Recording
from .report import Found, make_report
from .table import print_table
from .updates import UpdateMaker, shape_of

LOW, HIGH = 1e-6, 3e-6  # learning rates
UNSETTLED_COUNT = 2  # steps after the learning rate changed that are recorded and not measured
MAKE_S, STEP_S = 300.0, 300.0


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is measured. low_count, high_count: steps recorded at each learning rate; codec_rounds: of these at most.

    chain_*: of the model whose versions are counted. live_rounds: for each number of receivers.
    """

    parameter_count: int
    warm_up_count: int
    low_count: int
    high_count: int
    codec_rounds: int
    live_rounds: int
    receiver_counts: tuple[int, ...]
    worker_count: int
    chain_parameter_count: int
    chain_warm_up_count: int
    version_count: int


FULL = Settings(
    parameter_count=494_000_000,
    warm_up_count=24,
    low_count=10,
    high_count=4,
    codec_rounds=5,
    live_rounds=4,
    receiver_counts=(1, 4),
    worker_count=8,
    chain_parameter_count=16_000_000,
    chain_warm_up_count=40,
    version_count=256,
)
QUICK = Settings(
    parameter_count=30_000_000,
    warm_up_count=8,
    low_count=6,
    high_count=2,
    codec_rounds=2,
    live_rounds=2,
    receiver_counts=(1, 4),
    worker_count=8,
    chain_parameter_count=2_000_000,
    chain_warm_up_count=20,
    version_count=64,
)


def bench_weights(*, quick: bool, json_output: bool, parameters: int | None) -> int:
    """Measure and print; returns the exit code: 1 when weights did not arrive as they were, or a process ended.

    Args:
        quick: fewer rounds of a smaller model.
        json_output: one object instead of a table.
        parameters: at least so many; None: as the settings say.
    """
    settings = QUICK if quick else FULL
    if parameters is not None:
        settings = replace(settings, parameter_count=parameters)
    return run_bench(lambda: measure(settings, complain), print_table, json_output=json_output)


def measure(settings: Settings, say: Callable[[str], None]) -> Report:
    """Record, then measure all arms.

    Args:
        settings: how much of it.
        say: told what happens.

    Raises:
        EngineUnsupported: there is no torch to make updates with.
        FabricError: a process ended, or weights did not arrive as they were.
    """
    started_s = time.monotonic()
    assert settings.low_count >= (1 + settings.live_rounds) * len(settings.receiver_counts)
    with tempfile.TemporaryDirectory(prefix="rollfab-bench-") as name:
        directory = Path(name)
        model, chain = directory / "model", directory / "chain"
        made = record_model(model, settings, say)
        record_chain(chain, settings, say)
        codecs = []
        for learning_rate in (LOW, HIGH):
            say(f"codecs at learning rate {learning_rate:g}")
            codecs.append(measure_codecs(Recording(model), learning_rate, settings.codec_rounds))
        say("floors of encoding, applying and the pause")
        floors = measure_floors(Recording(model), LOW, settings.codec_rounds)
        live_settings = weights_live.Settings(
            receiver_counts=settings.receiver_counts, round_count=settings.live_rounds, first=0
        )
        found = Found(
            codecs=codecs,
            floors=floors,
            live=measure_live(directory, model, live_settings, say),
            node=measure_node(directory, model, settings.worker_count, say),
            chain=measure_chain(directory, chain, settings.version_count, say),
        )
    params = {
        "settings": asdict(settings),
        "shape": asdict(shape_of(settings.parameter_count)),
        "parameter_count": found.codecs[0].element_count,
        "chain_parameter_count": found.chain.dense_bytes // 2,
        "optimizer_step_s": made["step_s"],
        "recorder_peak_bytes": made["peak_bytes"],
        "wall_s": time.monotonic() - started_s,
    }
    return make_report(found, params)


def record_model(directory: Path, settings: Settings, say: Callable[[str], None]) -> dict[str, float]:
    """Record the updates that are measured one by one; returns what a step took and the memory of it."""
    steps = [(LOW, settings.low_count, True), (HIGH, UNSETTLED_COUNT, False), (HIGH, settings.high_count, True)]
    return _record(directory, settings.parameter_count, settings.warm_up_count, steps, say)


def record_chain(directory: Path, settings: Settings, say: Callable[[str], None]) -> dict[str, float]:
    """Record the updates that make a chain."""
    assert settings.version_count > LAG + JOIN_COUNT
    steps = [(LOW, settings.version_count - 1, True)]
    return _record(directory, settings.chain_parameter_count, settings.chain_warm_up_count, steps, say)


def _record(
    directory: Path,
    parameter_count: int,
    warm_up_count: int,
    steps: list[tuple[float, int, bool]],
    say: Callable[[str], None],
) -> dict[str, float]:
    directory.mkdir()
    shape = shape_of(parameter_count)
    say(f"recording updates of {shape.parameter_count:,} parameters: {warm_up_count} steps of warm-up")
    with Remote("the recorder", directory / "log", UpdateMaker, directory, shape) as maker:
        maker.ready(MAKE_S)
        maker.call("warm_up", LOW, warm_up_count, timeout_s=STEP_S * (1 + warm_up_count))
        step_s = 0.0
        for learning_rate, count, is_settled in steps:
            step_s = maker.call("record", learning_rate, count, is_settled, timeout_s=STEP_S * (1 + count))
            say(f"recorded {count} steps at learning rate {learning_rate:g}, {step_s:.2f} s each")
        return {"step_s": step_s, "peak_bytes": maker.call("peak_bytes", timeout_s=STEP_S)}
