"""`rollfab bench gateway`: what a call costs more through the gateway than at the vLLM server behind it.

- Rounds of all arms alternate, after one of each that does not count. An overhead is what two arms of one turn differ
  by, a ratio their tokens per second; reported are medians of the rounds, with lowest and highest.
- Beside the server asked for text stands what a rollout needs: the same server asked for every token's id and
  log-probability (`told`), and a process that only passes bytes on (`forwarded`), which no gateway goes below.
- The P99 is that of all calls of an arm, as a round has too few.
- Answers of one token, one at a time, show the way alone. With longer ones, steps of the engine on a CPU vary by more
  than the way costs; they are also somewhat faster where more processes keep the machine awake.
- The floor is what the way takes that does nothing: one more HTTP hop, and the round trips to the broker that wait for
  one another (push, claim, settle, result).
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rollfab.deploy.replay.figures import Report, number, percentile, show
from rollfab.fabric.contract.errors import EngineUnsupported, FabricError
from tests.bench.measure import Figure, alternate

from .arms import SLOT_COUNT, Load, Round, Stage

BROKER_TRIPS = 4
FLOOR_COUNT = 300
AGREE = {
    is_ids: Load(concurrency=4, calls_each=2, completion_tokens=16, prompt_letters=60, is_ids=is_ids)
    for is_ids in (False, True)
}
AGREE_FRACTION_MIN = 0.75  # a near tie may go either way where batches differ
ARMS = ("direct", "told", "forwarded", "through")
GOALS = {"overhead_p50_ms": 10.0, "overhead_p99_ms": 30.0, "tokens_ratio": 0.95}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is measured. ids: loads whose calls post token ids; way: answers of one token."""

    loads: tuple[Load, ...]
    ids: tuple[Load, ...]
    way: Load
    round_count: int


def _load(concurrency: int, calls_each: int, completion_tokens: int = 64, *, is_ids: bool = False) -> Load:
    return Load(
        concurrency=concurrency,
        calls_each=calls_each,
        completion_tokens=completion_tokens,
        prompt_letters=120,
        is_ids=is_ids,
    )


def _settings(counts: Sequence[tuple[int, int]], way_calls: int, round_count: int) -> Settings:
    return Settings(
        loads=tuple(_load(*each) for each in counts),
        ids=tuple(_load(*each, is_ids=True) for each in counts),
        way=_load(1, way_calls, 1),
        round_count=round_count,
    )


FULL = _settings([(1, 24), (8, 8), (64, 4)], way_calls=60, round_count=7)
QUICK = _settings([(1, 4), (8, 2), (64, 1)], way_calls=10, round_count=2)


def measure(settings: Settings) -> Report:
    """Measure every load.

    Raises:
        EngineUnsupported: vLLM is not installed.
        FabricError: a process ended, a call failed, or an arm made other tokens than it should.
    """
    if find_spec("vllm") is None:
        raise EngineUnsupported("vLLM is not installed here: in a clone of rollfab type `make bench BENCH=gateway`")
    with (
        tempfile.TemporaryDirectory(prefix="rollfab-bench-") as directory,
        Stage(Path(directory), [*settings.loads, settings.way]) as stage,
    ):
        fractions = {is_ids: _agreement(stage, load) for is_ids, load in AGREE.items()}
        rows = [_measure(stage, load, settings.round_count) for load in settings.loads]
        ids = [_measure(stage, load, settings.round_count) for load in settings.ids]
        way = _measure(stage, settings.way, settings.round_count)
        trips = stage.floor_ms(FLOOR_COUNT)
        engine_has_a_core = stage.engine_has_a_core
    names = ("overhead_p50_ms", "overhead_p99_ms", "tokens_ratio")
    figures = {f"gateway_{name}_{row['concurrency']}": row[name] for name in names for row in rows}
    figures |= {f"gateway_ids_{name}_{row['concurrency']}": row[name] for name in names for row in ids}
    return Report(
        name="gateway",
        params={"settings": asdict(settings), "slot_count": SLOT_COUNT, "engine_has_a_core": engine_has_a_core},
        results={
            **figures,
            "gateway_way_p50_ms": way["overhead_p50_ms"],
            "gateway_way_p99_ms": way["overhead_p99_ms"],
            "floor_ms": trips["gateway"] + BROKER_TRIPS * trips["broker"],
            "broker_trip_ms": trips["broker"],
            "gateway_hop_ms": trips["gateway"],
            "same_texts_fraction": fractions[False],
            "same_ids_fraction": fractions[True],
            "goals": GOALS,
            "rows": rows,
            "ids": ids,
            "way": way,
        },
        baselines={f"vLLM server, {row['concurrency']}": row["direct"] for row in rows},
        ratio={str(row["concurrency"]): row["tokens_ratio"] for row in rows},
    )


def _agreement(stage: Stage, load: Load) -> float:
    """Return the fraction of greedy answers that are the same in both arms. Raises FabricError: too few are."""
    prompts = stage.prompts.take(load)
    through, direct = (arm(load, prompts).texts for arm in (stage.through, stage.direct))
    fraction = sum(_ended(through[prompt]) == _ended(direct[prompt]) for prompt in prompts) / len(prompts)
    if fraction < AGREE_FRACTION_MIN:
        raise FabricError(f"{fraction:.0%} of greedy answers are the same in both arms: they do not do the same work")
    return fraction


def _ended(text: str) -> str:
    """Leave out half a character at the end, which vLLM's text does not have."""
    return text.rstrip("\ufffd")


def _measure(stage: Stage, load: Load, round_count: int) -> dict[str, Any]:
    names = [name for name in ARMS if not (load.is_ids and name == "told")]  # ids are told in every arm
    arms = {name: lambda name=name: getattr(stage, name)(load, stage.prompts.take(load)) for name in names}
    alternate(arms, 1)  # connections, caches
    return row(load, alternate(arms, round_count))


def row(load: Load, rounds: Mapping[str, list[Round]]) -> dict[str, Any]:
    """Compute the figures of one load from the rounds of its arms, which are neighbours turn by turn."""
    return {
        "concurrency": load.concurrency,
        **_beside(rounds["direct"], rounds["through"]),
        **({"beside_told": _beside(rounds["told"], rounds["through"])} if "told" in rounds else {}),
        "floor": _beside(rounds["direct"], rounds["forwarded"]),
        **{name: _arm(each) for name, each in rounds.items()},
    }


def _beside(theirs: list[Round], ours: list[Round]) -> dict[str, Any]:
    pairs = list(zip(theirs, ours, strict=True))
    p50 = Figure(tuple(_latency(our, 0.5) - _latency(their, 0.5) for their, our in pairs))
    ratio = Figure(tuple(_rate(our) / _rate(their) for their, our in pairs))
    return {
        "overhead_p50_ms": p50.median,
        "overhead_p50_spread": p50.spread,
        "overhead_p99_ms": _arm(ours)["latency_p99_ms"] - _arm(theirs)["latency_p99_ms"],
        "tokens_ratio": ratio.median,
        "tokens_ratio_spread": ratio.spread,
    }


def _arm(rounds: list[Round]) -> dict[str, Any]:
    rate = Figure(tuple(map(_rate, rounds)))
    latencies_ms = [each for one in rounds for each in one.latencies_ms]
    return {
        "tokens_per_s": rate.median,
        "tokens_per_s_spread": rate.spread,
        "call_count": len(latencies_ms),
        "latency_p50_ms": percentile(latencies_ms, 0.5),
        "latency_p99_ms": percentile(latencies_ms, 0.99),
        "cpu_ms_per_call": {
            name: 1000 * sum(each.cpu_s[name] for each in rounds) / len(latencies_ms) for name in rounds[0].cpu_s
        },
    }


def _latency(one: Round, fraction: float) -> float:
    return percentile(one.latencies_ms, fraction)


def _rate(one: Round) -> float:
    return one.token_count / one.duration_s


PAIRS = {"gateway beside direct": None, "gateway beside told": "beside_told", "forwarded beside direct": "floor"}


def print_table(report: Report) -> None:
    found = json.loads(report.json())["results"]
    rows, notes = [], []
    kinds = {"": found["rows"], ", token ids": found["ids"], ", one token": [found["way"]]}
    for each, kind in ((each, kind) for kind, row in kinds.items() for each in row):
        what = f"{each['concurrency']}{kind}"
        for pair, key in PAIRS.items():
            if key is not None and key not in each:
                continue
            figures = each if key is None else each[key]
            low, high = figures["overhead_p50_spread"]
            ratio_low, ratio_high = figures["tokens_ratio_spread"]
            rows.append(
                [
                    what if key is None else "",
                    pair,
                    f"{number(figures['overhead_p50_ms'])}  ({number(low)} to {number(high)})",
                    number(figures["overhead_p99_ms"]),
                    f"{figures['tokens_ratio']:.2f}  ({ratio_low:.2f} to {ratio_high:.2f})",
                ]
            )
        for name in (name for name in ARMS if name in each):
            shares = ", ".join(f"{process} {ms:.1f}" for process, ms in each[name]["cpu_ms_per_call"].items())
            notes.append(f"{what} at once, {name}: {number(each[name]['latency_p50_ms'])} ms; CPU ms per call {shares}")
    notes.append(
        f"floor {number(found['floor_ms'])} ms: a hop of {number(found['gateway_hop_ms'])} ms, and {BROKER_TRIPS} "
        f"round trips to the broker of {number(found['broker_trip_ms'])} ms; goals: overhead under "
        f"{GOALS['overhead_p50_ms']:g} ms (P99 {GOALS['overhead_p99_ms']:g}), ratio {GOALS['tokens_ratio']:g}"
    )
    columns = ["calls at once", "arms", "overhead, ms", "overhead P99, ms", "tokens/s, ratio"]
    show("rollfab bench gateway", columns, rows, [*notes, f"machine: {report.machine}"])
