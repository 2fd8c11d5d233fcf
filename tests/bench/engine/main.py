"""`rollfab bench engine`: vLLM at the end of a whole fabric over vLLM's own offline generate, how soon it stops, and
how long new weights hold it up.

- Rounds alternate, offline then fabric, after one of each that does not count. A ratio is that of two neighbours; what
  is reported is the median of these, with the lowest and the highest.
- The headline is a preset whose step takes as long on one CPU core as a step of some billion parameters on a GPU. A
  step of the tiny preset is several times shorter: what the fabric costs at its worst.
- With several turns, offline generate is called once a turn, and waits for the longest of it: that row is another way
  of using it, not the same schedule.
"""

from __future__ import annotations

import json
import tempfile
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rollfab.deploy.replay.figures import Report, number, show
from rollfab.fabric.contract.errors import EngineUnsupported
from tests.bench.measure import alternate

from ..lively import lively_weights
from ..overhead.arms import CONTEXT_TOKENS, GROUP_SIZE, SEED, SLOT_COUNT
from ..overhead.main import row
from ..remote import Remote
from .arms import READY_TIMEOUT_S, OfflineArm, Rollouts, VllmFabric, agreement
from .control import ACTIONS, Control, worst
from .stalls import Stalls

CONTROL_TIMEOUT_S = 600.0

ONE_TURN = Rollouts(
    name="one turn",
    model="small",
    trajectory_count=256,
    turn_count=1,
    completion_tokens_min=64,
    completion_tokens=192,
    observation_tokens=32,
)
TURNS = Rollouts(
    name="four turns, one call each",
    model="small",
    trajectory_count=128,
    turn_count=4,
    completion_tokens_min=32,
    completion_tokens=64,
    observation_tokens=32,
)
TINY = Rollouts(**{**asdict(ONE_TURN), "name": "tiny preset, one turn", "model": "tiny", "trajectory_count": 512})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is measured. The first workload is the headline; control_model: whose stops, and stalls at versions, are."""

    workloads: tuple[Rollouts, ...]
    round_count: int
    control_model: str
    sample_count: int
    version_count: int
    rank_counts: tuple[int, ...] = (1, 2)


FULL = Settings(
    workloads=(ONE_TURN, TURNS, TINY), round_count=5, control_model="small", sample_count=60, version_count=40
)
QUICK = Settings(
    workloads=(Rollouts(**{**asdict(ONE_TURN), "trajectory_count": 192, "completion_tokens": 96}),),
    round_count=3,
    control_model="small",
    sample_count=15,
    version_count=10,
    rank_counts=(1,),
)


def measure(settings: Settings) -> Report:
    """Measure every workload, then the stops, then the stalls.

    Raises:
        EngineUnsupported: vLLM is not installed.
        FabricError: a process ended, an arm made other tokens than it should, or the engine did not stop.
    """
    if find_spec("vllm") is None:
        raise EngineUnsupported(
            "vLLM is not installed in this environment: in a clone of rollfab type `make bench BENCH=engine`; elsewhere"
            " pip install 'rollfab[vllm]' where there is an NVIDIA GPU, and for a CPU see `rollfab doctor`"
        )
    rows = [_measure(workload, settings.round_count) for workload in settings.workloads]
    stops = _measure_stops(settings)
    stalls = [_measure_stalls(settings, rank_count) for rank_count in settings.rank_counts]
    headline = rows[0]
    return Report(
        name="engine",
        params={
            "vllm": _version(),
            "slot_count": SLOT_COUNT,
            "context_tokens": CONTEXT_TOKENS,
            "group_size": GROUP_SIZE,
            "settings": asdict(settings),
        },
        results={
            "tokens_per_s": headline["fabric"]["tokens_per_s"],
            "tokens_per_s_spread": headline["fabric"]["spread"],
            "same_tokens_fraction": min(each["same_tokens_fraction"] for each in rows),
            **worst(stops),
            "rows": rows,
            "stops": stops,
            **{name: max(each[name] for each in stalls) for name in ("stalled_ms_p99", "stalled_of_step")},
            "stalls": stalls,
        },
        baselines={"offline generate": headline["engine_alone"]},
        ratio={
            "engine_alone": headline["ratio"],
            "engine_alone_spread": headline["ratio_spread"],
            "by_workload": {each["name"]: each["ratio"] for each in rows},
        },
    )


def _measure(workload: Rollouts, round_count: int) -> dict[str, Any]:
    weights = lively_weights(workload.model)
    with ExitStack() as stack:
        alone = stack.enter_context(OfflineArm(workload, weights))
        fabric = stack.enter_context(VllmFabric(workload, weights))
        alone.ready()
        fraction = agreement(workload, alone, fabric)
        arms = {"engine_alone": alone.round, "fabric": fabric.round}
        alternate(arms, 1)  # caches, and whatever else happens once
        rounds = alternate(arms, round_count)
    return {**row(workload, rounds["engine_alone"], rounds["fabric"]), "same_tokens_fraction": fraction}


def _measure_stops(settings: Settings) -> list[dict[str, Any]]:
    with (
        tempfile.TemporaryDirectory(prefix="rollfab-bench-") as directory,
        Remote("the engine", Path(directory) / "log", Control, settings.control_model, SEED) as control,
    ):
        control.ready(READY_TIMEOUT_S)
        stops: list[dict[str, Any]] = control.call("measure", settings.sample_count, timeout_s=CONTROL_TIMEOUT_S)
        return stops


def _measure_stalls(settings: Settings, rank_count: int) -> dict[str, Any]:
    with (
        tempfile.TemporaryDirectory(prefix="rollfab-bench-") as directory,
        Remote("the engine", Path(directory) / "log", Stalls, settings.control_model, rank_count, SEED) as stalls,
    ):
        stalls.ready(READY_TIMEOUT_S)
        found: dict[str, Any] = stalls.call("measure", settings.version_count, timeout_s=CONTROL_TIMEOUT_S)
        return found


def _version() -> str:
    from rollfab.workers.engines.vllm.common.environment import installed_version

    return installed_version()


def print_table(report: Report) -> None:
    found = json.loads(report.json())
    rows, notes = [], []
    for each in found["results"]["rows"]:
        ours, alone = each["fabric"], each["engine_alone"]
        low, high = each["ratio_spread"]
        rates = [number(arm["tokens_per_s"]) for arm in (alone, ours)]
        rows.append([each["name"], *rates, f"{each['ratio']:.2f}  ({low:.2f} to {high:.2f})"])
        for title, arm in (("offline", alone), ("fabric", ours)):
            shares = ", ".join(f"{name} {cpu_ms:.2f}" for name, cpu_ms in arm["cpu_ms_per_turn"].items())
            notes.append(f"{each['name']}, {title}: CPU ms per turn {shares}")
    columns = ["", "offline generate, tokens/s", "fabric, tokens/s", "fabric ÷ offline"]
    show(f"rollfab bench engine (vLLM {found['params']['vllm']})", columns, rows, notes)
    columns = ["to the last token", "batch", "steps p50", "p99", "ms p50", "p99", "a step, ms p50", "p99"]
    figures = ("steps_p50", "steps_p99", "ms_p50", "ms_p99", "step_ms_p50", "step_ms_p99")
    stops = [
        [ACTIONS[each["action"]], str(each["batch"]), *(number(each[name]) for name in figures)]
        for each in found["results"]["stops"]
    ]
    show("standing still", columns, stops, [])
    columns = ["ranks", "a step, ms p50", "p99", "longest at a version, ms p50", "p99", "÷ a step", "held, ms p50"]
    figures = ("step_ms_p50", "step_ms_p99", "stalled_ms_p50", "stalled_ms_p99", "stalled_of_step", "pause_ms_p50")
    stalls = [
        [str(each["rank_count"]), *(number(each[name]) for name in figures)] for each in found["results"]["stalls"]
    ]
    show("new versions, 1 % of the elements each", columns, stalls, [f"machine: {found['machine']}"])
