"""`rollfab bench overhead`: tokens per second through the whole fabric, over the same engine fed directly.

- Rounds alternate, engine alone then fabric, after one of each that does not count. A ratio is that of two neighbours;
  what is reported is the median of these, with the lowest and the highest.
- The headline is the shape that agents have: turns of some dozen tokens. One token per turn is the worst case there
  is, all overhead and hardly any generation; it is reported as it is.
- With --traces the arms are the whole fabric without traces, with a collector but no group traced, and with traces of
  every group, sent to a collector that throws them away. What is left to send when a round's time was taken is in its
  CPU time. A part of the groups costs that part of the difference: what is traced by default is stated by arithmetic,
  since chance would choose no group in most rounds.
- What the fabric costs is also counted in CPU time per turn, by process, which other load on the machine moves less.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

from rollfab.deploy.replay.figures import Report, number, show
from rollfab.fabric.contract.errors import FabricError
from rollfab.fabric.tracing.export import FRACTION, PAUSE_MS
from tests.bench.measure import Figure, alternate, run_bench

from .arms import CONTEXT_TOKENS, GROUP_SIZE, SLOT_COUNT, EngineAlone, Round, WholeFabric, Workload
from .collector import Collector

# With 64 slots a step of the tiny preset takes 10 to 30 ms on a CPU core, as one of some billion parameters does on a
# GPU. A step of the small preset takes ten times longer with these contexts, which would hide the fabric.
TURNS = Workload(
    name="64 tokens a turn",
    model="tiny",
    trajectory_count=128,
    turn_count=4,
    completion_tokens=64,
    observation_tokens=32,
)
SHORT_TURNS = Workload(
    name="8 tokens a turn", model="tiny", trajectory_count=128, turn_count=8, completion_tokens=8, observation_tokens=8
)
ONE_TOKEN = Workload(
    name="1 token a turn", model="tiny", trajectory_count=256, turn_count=14, completion_tokens=1, observation_tokens=1
)
SMALL = Workload(
    name="small preset, 32 tokens a turn",
    model="small",
    trajectory_count=64,
    turn_count=2,
    completion_tokens=32,
    observation_tokens=32,
)


SETTLE_S = PAUSE_MS / 1000 + 1.0  # the last spans of a round are sent by then
TRACED = {"unsampled": "parentbased_always_off", "traced": "parentbased_always_on"}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is measured. The first workload is the headline."""

    workloads: tuple[Workload, ...]
    round_count: int


FULL = Settings(workloads=(TURNS, SHORT_TURNS, ONE_TOKEN, SMALL), round_count=5)
QUICK = Settings(
    workloads=(
        Workload(**{**asdict(TURNS), "trajectory_count": 64, "turn_count": 3}),
        Workload(**{**asdict(ONE_TOKEN), "trajectory_count": 128}),
    ),
    round_count=3,
)


def bench_overhead(*, quick: bool, json_output: bool, traces: bool = False) -> int:
    """Measure and print; returns the exit code: 1 when an arm did not do its work."""
    if traces:
        return run_bench(lambda: measure_traces(QUICK if quick else FULL), _print_traces, json_output=json_output)
    return run_bench(lambda: measure(QUICK if quick else FULL), _print_table, json_output=json_output)


def measure(settings: Settings) -> Report:
    """Measure every workload.

    Raises:
        FabricError: a process of the fabric ended, or an arm made other tokens than it should.
    """
    rows = [_measure(workload, settings.round_count) for workload in settings.workloads]
    headline = rows[0]
    return Report(
        name="overhead",
        params={
            "slot_count": SLOT_COUNT,
            "context_tokens": CONTEXT_TOKENS,
            "group_size": GROUP_SIZE,
            "settings": asdict(settings),
        },
        results={
            "tokens_per_s": headline["fabric"]["tokens_per_s"],
            "tokens_per_s_spread": headline["fabric"]["spread"],
            "rows": rows,
        },
        baselines={"engine alone": headline["engine_alone"]},
        ratio={
            "engine_alone": headline["ratio"],
            "engine_alone_spread": headline["ratio_spread"],
            "by_workload": {row["name"]: row["ratio"] for row in rows},
        },
    )


def _measure(workload: Workload, round_count: int) -> dict[str, Any]:
    with EngineAlone(workload) as alone, WholeFabric(workload, alone.weights()) as fabric:
        arms = {"engine_alone": alone.round, "fabric": fabric.round}
        alternate(arms, 1)  # the first lease, the first weights, caches
        rounds = alternate(arms, round_count)
    return row(workload, rounds["engine_alone"], rounds["fabric"])


def measure_traces(settings: Settings) -> Report:
    """Measure the fabric without and with traces, by the headline and the shortest turns.

    Raises:
        FabricError: as `measure`, or no traces came from the arm that sends them.
    """
    shortest = min(settings.workloads, key=lambda each: each.completion_tokens)
    workloads = tuple(dict.fromkeys((settings.workloads[0], shortest)))
    rows = [_measure_traces(workload, settings.round_count) for workload in workloads]
    return Report(
        name="overhead of traces",
        params={"slot_count": SLOT_COUNT, "group_size": GROUP_SIZE, "settings": asdict(settings)},
        results={"rows": rows},
        baselines={"without traces": rows[0]["without"]},
        ratio={
            "without_traces": rows[0]["ratio"],
            "without_traces_spread": rows[0]["ratio_spread"],
            "by_workload": {each["name"]: each["ratio"] for each in rows},
        },
    )


def _measure_traces(workload: Workload, round_count: int) -> dict[str, Any]:
    with EngineAlone(workload) as engine:
        weights = {name: array.copy() for name, array in engine.weights().items()}
    with ExitStack() as stack:
        collector = stack.enter_context(Collector())
        places: dict[str, dict[str, Any]] = {"without": {}}
        places |= {name: {"collector": collector.url, "sampler": sampler} for name, sampler in TRACED.items()}
        fabrics = {name: WholeFabric(workload, weights, settle_s=SETTLE_S, **place) for name, place in places.items()}
        arms = {name: stack.enter_context(fabric).round for name, fabric in fabrics.items()}
        alternate(arms, 1)
        before_count = collector.byte_count
        rounds = alternate(arms, round_count)
        byte_count = collector.byte_count - before_count
    if not byte_count:
        raise FabricError("no traces came from the arm that sends them: pip install 'rollfab[otel]', and try again")
    found = row(workload, rounds["without"], rounds["traced"], names=("without", "traced"))
    found |= {"unsampled": row(workload, rounds["without"], rounds["unsampled"])["fabric"]}
    shares = {name: _more_cpu(rounds["without"], rounds[name]) for name in TRACED}
    return {
        **found,
        "trace_bytes_per_turn": byte_count / (round_count * workload.turns),
        "more_cpu": {name: {"median": share.median, "spread": share.spread} for name, share in shares.items()},
        "more_cpu_by_default": FRACTION * shares["traced"].median,
        "default_fraction": FRACTION,
    }


def _more_cpu(without: list[Round], other: list[Round]) -> Figure:
    """CPU seconds of all processes above those of the neighbouring round, as a part of them."""
    pairs = zip(without, other, strict=True)
    return Figure(tuple(sum(theirs.cpu_s.values()) / sum(ours.cpu_s.values()) - 1 for ours, theirs in pairs))


def row(
    workload: Workload, alone: list[Round], fabric: list[Round], names: tuple[str, str] = ("engine_alone", "fabric")
) -> dict[str, Any]:
    """The figures of one workload from the rounds of its arms (`names`), which are neighbours pair by pair."""
    rates = [Figure(tuple(each.token_count / each.duration_s for each in arm)) for arm in (alone, fabric)]
    ratio = Figure(tuple(ours / theirs for theirs, ours in zip(rates[0].rounds, rates[1].rounds, strict=True)))
    return {
        "name": workload.name,
        names[0]: _arm(workload, rates[0], alone),
        names[1]: _arm(workload, rates[1], fabric),
        "ratio": ratio.median,
        "ratio_spread": ratio.spread,
    }


def _arm(workload: Workload, rate: Figure, rounds: list[Round]) -> dict[str, Any]:
    names = rounds[0].cpu_s
    return {
        "tokens_per_s": rate.median,
        "spread": rate.spread,
        "tokens_per_round": rounds[0].token_count,
        "turns_per_s": rate.median * workload.turns / workload.tokens,
        "cpu_ms_per_turn": {
            name: 1000 * Figure(tuple(each.cpu_s[name] for each in rounds)).median / workload.turns for name in names
        },
    }


def _print_table(report: Report) -> None:
    found = json.loads(report.json())
    rows, notes = [], []
    for each in found["results"]["rows"]:
        ours, alone = each["fabric"], each["engine_alone"]
        low, high = each["ratio_spread"]
        rows.append(
            [
                each["name"],
                number(alone["tokens_per_s"]),
                number(ours["tokens_per_s"]),
                number(ours["turns_per_s"]),
                f"{each['ratio']:.2f}  ({low:.2f} to {high:.2f})",
            ]
        )
        shares = ", ".join(f"{name} {cpu_ms:.2f}" for name, cpu_ms in ours["cpu_ms_per_turn"].items())
        notes.append(f"{each['name']}: CPU ms per turn {shares}; engine alone {alone['cpu_ms_per_turn']['engine']:.2f}")
    columns = ["", "engine alone, tokens/s", "fabric, tokens/s", "turns/s", "fabric ÷ engine alone"]
    show("rollfab bench overhead", columns, rows, [*notes, f"machine: {found['machine']}"])


def _print_traces(report: Report) -> None:
    found = json.loads(report.json())
    rows, notes = [], []
    for each in found["results"]["rows"]:
        low, high = each["ratio_spread"]
        rates = [number(each[arm]["tokens_per_s"]) for arm in ("without", "traced")]
        rows.append([each["name"], *rates, f"{each['ratio']:.2f}  ({low:.2f} to {high:.2f})"])
        costs = [sum(each[arm]["cpu_ms_per_turn"].values()) for arm in ("without", "unsampled", "traced")]
        more = [
            f"{share['median']:+.1%} ({share['spread'][0]:+.1%} to {share['spread'][1]:+.1%})"
            for share in each["more_cpu"].values()
        ]
        notes.append(
            f"{each['name']}: CPU ms per turn, all processes: {costs[0]:.2f} without traces, {costs[1]:.2f} with none "
            f"chosen, {more[0]}, {costs[2]:.2f} with all, {more[1]}, so {each['more_cpu_by_default']:+.2%} with the "
            f"{each['default_fraction']:.0%} that are traced by default; {each['trace_bytes_per_turn']:,.0f} bytes a "
            "turn that is traced"
        )
    columns = ["", "without traces, tokens/s", "with, tokens/s", "with ÷ without"]
    show("rollfab bench overhead --traces", columns, rows, [*notes, f"machine: {found['machine']}"])
