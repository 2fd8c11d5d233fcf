"""`rollfab bench room`: turns taken by the KV cache that they are likely to hold, over turns taken by slots alone.

Two fabrics of two vLLM workers each, fed by turns with the same work. Both workers have slots for all; one has a KV
cache for few of the turns. By slots it takes half of them all the same, and vLLM lets them wait. Needs rollfab[vllm].
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass

from rollfab.deploy.replay.figures import Report, number, show
from rollfab.fabric.rules.queue.room import KvRoom
from tests.bench.lively import lively_weights
from tests.bench.measure import Figure, alternate

from ..overhead.arms import Round, WholeFabric, Workload

BLOCK_TOKENS = 32  # of a tiny preset on a CPU
ARMS = {"by likely KV": ("worker",), "by slots": ("bench", "by-slots")}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is measured. block_count: of the smaller KV cache."""

    workload: Workload
    slot_count: int
    block_count: int
    round_count: int


WORK = Workload(
    name="4 turns, 20 tokens read and 60 made",
    model="tiny",
    trajectory_count=32,
    turn_count=4,
    completion_tokens=60,
    observation_tokens=20,
)
FULL = Settings(workload=WORK, slot_count=32, block_count=24, round_count=7)
QUICK = Settings(workload=WORK, slot_count=32, block_count=24, round_count=2)


def measure(settings: Settings) -> Report:
    """Measure both arms.

    Raises:
        FabricError: a process of a fabric ended, or an arm made other tokens than it should.
    """
    with ExitStack() as stack:
        fabrics = {name: stack.enter_context(_fabric(settings, words)) for name, words in ARMS.items()}
        arms = {name: fabric.round for name, fabric in fabrics.items()}
        alternate(arms, 1)  # the first lease, the first weights, what turns make
        rounds = alternate(arms, settings.round_count)
    rates = {name: Figure(tuple(each.token_count / each.duration_s for each in made)) for name, made in rounds.items()}
    ours, other = (rates[name].rounds for name in ARMS)
    ratio = Figure(tuple(one / two for one, two in zip(ours, other, strict=True)))
    found = {
        name: {"tokens_per_s": rates[name].median, "spread": rates[name].spread, "small_fraction": _small(rounds[name])}
        for name in ARMS
    }
    return Report(
        name="room",
        params=asdict(settings),
        results=found["by likely KV"],
        baselines={"by slots": found["by slots"]},
        ratio={"by slots": ratio.median, "by slots_spread": ratio.spread},
    )


def _fabric(settings: Settings, worker: Sequence[str]) -> WholeFabric:
    kind = ["--engine", "vllm", "--model", settings.workload.model, "--context", "512"]
    kind += ["--slots", str(settings.slot_count)]
    least = ["--", "--gpu-memory-utilization", "0.05"]  # of the machine's memory, which vLLM asks to be free
    small = [*least, "--num-gpu-blocks-override", str(settings.block_count)]
    return WholeFabric(
        settings.workload,
        lively_weights(settings.workload.model),
        workers={
            "small": [*worker, "--name", "small", *kind, *small],
            "roomy": [*worker, "--name", "roomy", *kind, *least],
        },
    )


def _small(rounds: Sequence[Round]) -> float:
    """Return which share of the tokens the worker with the small cache made."""
    spans = [span for each in rounds for group in each.groups for rollout in group.rollouts for span in rollout.spans]
    made = {name: sum(span.end - span.start for span in spans if span.worker_id == name) for name in ("small", "roomy")}
    return made["small"] / max(1, sum(made.values()))


def work_by_slots() -> None:
    """Run `rollfab worker` with the words that follow, without the rule of room."""
    from rollfab.__main__ import main

    KvRoom.count = lambda *_, **__: None  # type: ignore[method-assign]
    sys.argv = [sys.argv[0], "worker", *sys.argv[sys.argv.index("by-slots") + 1 :]]
    main()


def print_table(report: Report) -> None:
    found = json.loads(report.json())
    arms = {"by likely KV": found["results"], **found["baselines"]}
    low, high = found["ratio"]["by slots_spread"]
    ratio = {"by likely KV": f"{found['ratio']['by slots']:.2f}  ({low:.2f} to {high:.2f})"}
    rows = [
        [name, number(arm["tokens_per_s"]), f"{arm['small_fraction']:.0%}", ratio.get(name, "")]
        for name, arm in arms.items()
    ]
    columns = ["turns taken", "tokens/s", "by the small cache", "over by slots"]
    small = f"small: {found['params']['block_count'] * BLOCK_TOKENS} tokens of KV cache"
    show("rollfab bench room", columns, rows, [f"{small}; machine: {found['machine']}"])
