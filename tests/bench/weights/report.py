"""What the arms of `rollfab bench weights` found, as the figures that others read, with the goals beside them.

- A figure is a median of rounds, its spread the lowest and the highest; a ratio is made round by round.
- Goals are what the engine must show; a figure that misses one is printed as it is.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rollfab.deploy.replay.figures import Report
from tests.bench.measure import Figure

from .chain import LAG, Chain
from .codec import Measured, headline
from .floors import FloorRound
from .live import Round as LiveRound
from .node import Node

COO, XOR = "int32 + bf16 (TRL, vLLM, verl)", "XOR + zstd-1 (slime, SkyRL)"
Figures = dict[str, Figure]


@dataclass(frozen=True, kw_only=True)
class Found:
    """What the arms found. codecs: by learning rate; the first is the headline. floors: none without a compiler."""

    codecs: list[Measured]
    floors: list[FloorRound]
    live: list[LiveRound]
    node: Node
    chain: Chain


@dataclass(frozen=True)
class Goal:
    """A bound on a figure. is_least: it must not be lower; else not higher. at_every_rate: at all learning rates."""

    key: str
    title: str
    bound: float
    is_least: bool
    at_every_rate: bool = False

    def is_met(self, figure: Figure) -> bool:
        return figure.median >= self.bound if self.is_least else figure.median <= self.bound


GOALS = (
    Goal("bytes_per_changed", "bytes per changed element", 1.4, False),
    Goal("of_entropy_floor", "entropy floor ÷ ours", 0.9, True, at_every_rate=True),
    Goal("xor_over_ours", "XOR + zstd-1 ÷ ours, bytes", 1.9, True, at_every_rate=True),
    Goal("coo_over_ours", "int32 + bf16 ÷ ours, bytes", 4.3, True, at_every_rate=True),
    Goal("dense_over_delta", "dense ÷ a delta, bytes", 100, True),
    Goal("amortised_over_dense", "dense ÷ published, bytes, over all versions of the chain", 60, True),
    Goal("encode_of_memcpy", "speed of encoding ÷ memory copy, CPU", 0.5, True),
    Goal("apply_of_memcpy", "speed of decoding and applying ÷ memory copy, CPU", 1.5, True),
    Goal("encode_of_floor", "speed of encoding ÷ its floor (compare and gather), CPU", 0.75, True),
    Goal("apply_of_floor", "speed of decoding and applying ÷ its floor (read and write), CPU", 0.7, True),
    Goal("pause_of_floor", "pause ÷ its floor (write)", 1.3, False),
    Goal("pause_of_dense_copy", "pause ÷ a dense copy", 0.4, False),
    Goal("pause_of_publish_to_live", "pause ÷ publish to live", 0.05, False),
    Goal("publish_to_live_of_dense", "publish to live ÷ dense, 1 receiver", 0.6, False),
    Goal("publish_to_live_of_dense_4", "publish to live ÷ dense, 4 receivers", 0.4, False),
    Goal("joiner_40_of_sum", f"what one {LAG} versions behind fetches ÷ its deltas", 0.2, False),
    Goal("egress_8_workers", "broker's egress for all workers of a node ÷ for one", 1.1, False),
)


def make_report(found: Found, params: dict[str, Any]) -> Report:
    """All of it as one object."""
    first = found.codecs[0]
    figures = {
        **codec_figures(first),
        **floor_figures(found.floors),
        **live_figures(found.live),
        **chain_figures(found.chain),
        "egress_8_workers": Figure(tuple(found.node.ratios)),
    }
    rows = [_row(measured) for measured in found.codecs]
    names = {headline(first)}
    results: dict[str, Any] = {
        **{key: figure.median for key, figure in figures.items()},
        "spread": {key: figure.spread for key, figure in figures.items()},
        "goals": _goals(figures, found.codecs),
        "rows": rows,
        "floors": [asdict(each) for each in found.floors],
        "live": [asdict(each) for each in found.live],
        "node": asdict(found.node),
        "chain": asdict(found.chain),
    }
    baselines = {name: row for name, row in rows[0]["codecs"].items() if name not in names}
    ratio = {name: row["bytes_over_ours"] for name, row in baselines.items()}
    return Report(name="weights", params=params, results=results, baselines=baselines, ratio=ratio)


def codec_figures(measured: Measured) -> Figures:
    """Of one learning rate, change by change."""
    rounds, counts = measured.rounds, measured.changed_counts
    ours = rounds[headline(measured)]
    sizes = [each.byte_count for each in ours]

    def over(values: Sequence[float]) -> Figure:
        return Figure(tuple(value / size for value, size in zip(values, sizes, strict=True)))

    return {
        "density": Figure(tuple(count / measured.element_count for count in counts)),
        "bytes_per_changed": Figure(tuple(size / count for size, count in zip(sizes, counts, strict=True))),
        "of_entropy_floor": over(measured.floor_bytes),
        "of_block_entropy_floor": over(measured.block_floor_bytes),
        "dense_over_delta": over([2 * measured.element_count] * len(sizes)),
        "xor_over_ours": over([each.byte_count for each in rounds[XOR]]),
        "coo_over_ours": over([each.byte_count for each in rounds[COO]]),
        "encode_of_memcpy": Figure(tuple(each.copy_s / each.encode_s for each in ours)),
        "apply_of_memcpy": Figure(tuple(each.copy_s / each.apply_s for each in ours)),
    }


def floor_figures(rounds: Sequence[FloorRound]) -> Figures:
    """Of each change, the ratio of the medians of its turns; speeds are floor ÷ ours, pauses ours ÷ floor."""
    if not rounds:
        return {}
    return {
        "encode_of_floor": Figure(tuple(each.encode.floor_over_ours for each in rounds)),
        "apply_of_floor": Figure(tuple(each.apply.floor_over_ours for each in rounds)),
        "pause_of_floor": Figure(tuple(1 / each.pause.floor_over_ours for each in rounds)),
        "pause_cpu_of_floor": Figure(tuple(1 / each.pause_cpu.floor_over_ours for each in rounds)),
    }


def live_figures(rounds: Sequence[LiveRound]) -> Figures:
    """The pause is taken with one receiver; with several on few cores they wait for one another."""
    one = [each for each in rounds if each.receiver_count == 1]
    figures = {
        "pause_of_dense_copy": Figure(tuple(each.pause_s[0] / each.copy_s[0] for each in one)),
        "pause_of_publish_to_live": Figure(tuple(each.pause_s[0] / each.ours_s for each in one)),
    }
    for count in sorted({each.receiver_count for each in rounds}):
        key = "publish_to_live_of_dense" + (f"_{count}" if count > 1 else "")
        figures[key] = Figure(tuple(each.ours_s / each.dense_s for each in rounds if each.receiver_count == count))
    return figures


def chain_figures(chain: Chain) -> Figures:
    """Published bytes are payloads and manifests."""
    total = sum(chain.payload_bytes.values()) + chain.manifest_bytes
    return {
        "amortised_over_dense": Figure((chain.version_count * chain.dense_bytes / total,)),
        "joiner_40_of_sum": Figure(tuple(join.fetched_bytes / join.deltas_bytes for join in chain.joins)),
    }


def _row(measured: Measured) -> dict[str, Any]:
    figures = codec_figures(measured)
    ours = measured.rounds[headline(measured)]

    def code(name: str) -> dict[str, Any]:
        rounds = measured.rounds[name]
        pairs = list(zip(rounds, measured.changed_counts, strict=True))
        encode = Figure(tuple(each.copy_s / each.encode_s for each in rounds))
        apply = Figure(tuple(each.copy_s / each.apply_s for each in rounds))
        return {
            "bytes_per_changed": statistics.median(each.byte_count / count for each, count in pairs),
            "dense_over_delta": statistics.median(2 * measured.element_count / each.byte_count for each in rounds),
            "bytes_over_ours": statistics.median(
                each.byte_count / mine.byte_count for each, mine in zip(rounds, ours, strict=True)
            ),
            "encode_of_memcpy": encode.median,
            "encode_of_memcpy_spread": encode.spread,
            "apply_of_memcpy": apply.median,
            "apply_of_memcpy_spread": apply.spread,
        }

    return {
        "learning_rate": measured.learning_rate,
        "round_count": len(ours),
        "ours": headline(measured),
        **{key: figure.median for key, figure in figures.items()},
        "spread": {key: figure.spread for key, figure in figures.items()},
        "memory_copy_bytes_per_s": statistics.median(2 * measured.element_count / each.copy_s for each in ours),
        "codecs": {name: code(name) for name in measured.rounds} | {"dense": _dense(figures)},
    }


def _dense(figures: Figures) -> dict[str, Any]:
    """Sending everything: nothing to encode, and applying it is the memory copy itself."""
    over_ours = figures["dense_over_delta"].median
    return {
        "bytes_per_changed": figures["bytes_per_changed"].median * over_ours,
        "dense_over_delta": 1.0,
        "bytes_over_ours": over_ours,
        "encode_of_memcpy": None,
        "apply_of_memcpy": 1.0,
    }


def _goals(figures: Figures, codecs: Sequence[Measured]) -> list[dict[str, Any]]:
    rows = []
    for goal in GOALS:
        cases = [("", figures)] if not goal.at_every_rate else []
        if goal.at_every_rate:
            cases = [(f", lr {each.learning_rate:.0e}", codec_figures(each)) for each in codecs]
        for suffix, case in cases:
            if goal.key in case:
                rows.append(_goal_row(goal, suffix, case[goal.key]))
    return rows


def _goal_row(goal: Goal, suffix: str, figure: Figure) -> dict[str, Any]:
    return {
        "key": goal.key,
        "title": goal.title + suffix,
        "value": figure.median,
        "spread": figure.spread,
        "bound": goal.bound,
        "is_least": goal.is_least,
        "is_met": goal.is_met(figure),
    }
