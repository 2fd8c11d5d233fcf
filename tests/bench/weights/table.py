"""What `rollfab bench weights` shows to people."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from rollfab.deploy.replay.figures import Report, number, show

from .chain import LAG


def print_table(report: Report) -> None:
    """The goals, every code at every learning rate, and the stages of the way to live."""
    found = json.loads(report.json())
    results, params = found["results"], found["params"]
    title = f"rollfab bench weights: {params['parameter_count']:,} parameters, CPU, loopback"
    rows = [
        [
            each["title"],
            number(each["value"]),
            f"{number(each['spread'][0])} to {number(each['spread'][1])}",
            f"{'at least' if each['is_least'] else 'at most'} {number(each['bound'])}",
            "met" if each["is_met"] else "not met",
        ]
        for each in results["goals"]
    ]
    show(title, ["", "median", "spread", "goal", ""], rows)
    for row in results["rows"]:
        _print_codecs(row)
    if results["floors"]:
        show("beside the machine's floor", ["", "ours, ms", "floor, ms"], _floor_rows(results["floors"]))
    show("from publishing until live", ["", *_LIVE], [_live_row(count, results["live"]) for count in _counts(results)])
    for note in _notes(found):
        print(note)


def _print_codecs(row: dict[str, Any]) -> None:
    columns = ["", "bytes a change", "dense ÷ this", "this ÷ ours", "encode, memory copies/s", "apply"]
    keys = ("bytes_per_changed", "dense_over_delta", "bytes_over_ours", "encode_of_memcpy", "apply_of_memcpy")
    rows = [
        [name, *("" if code.get(key) is None else number(code[key]) for key in keys)]
        for name, code in row["codecs"].items()
    ]
    title = f"learning rate {row['learning_rate']:g}: {row['density']:.2%} of elements change"
    show(title, columns, rows)


def _floor_rows(rounds: Sequence[dict[str, Any]]) -> list[list[str]]:
    names = {"encode": "encoding, CPU", "apply": "applying, CPU", "pause": "pause", "pause_cpu": "pause, CPU"}
    return [
        [name, *(_spread_ms([s for each in rounds for s in each[key][arm]]) for arm in ("ours_s", "floor_s"))]
        for key, name in names.items()
    ]


def _spread_ms(seconds: Sequence[float]) -> str:
    low, high = 1000 * min(seconds), 1000 * max(seconds)
    return f"{number(1000 * statistics.median(seconds))}  ({number(low)} to {number(high)})"


_LIVE: dict[str, Callable[[dict[str, Any]], float]] = {
    "ours, s": lambda each: each["ours_s"],
    "dense, s": lambda each: each["dense_s"],
    "encoding, ms": lambda each: 1000 * each["encode_s"],
    "staging, ms": lambda each: 1000 * max(each["stage_s"]),
    "pause, ms": lambda each: 1000 * max(each["pause_s"]),
    "a dense copy, ms": lambda each: 1000 * max(each["copy_s"]),
}


def _counts(results: dict[str, Any]) -> list[int]:
    return sorted({each["receiver_count"] for each in results["live"]})


def _live_row(count: int, rounds: Sequence[dict[str, Any]]) -> list[str]:
    mine = [each for each in rounds if each["receiver_count"] == count]
    name = f"{count} receiver{'s' if count > 1 else ''}"
    return [name, *(number(statistics.median(read(each) for each in mine)) for read in _LIVE.values())]


def _notes(found: dict[str, Any]) -> list[str]:
    results, params = found["results"], found["params"]
    chain, node = results["chain"], results["node"]
    kinds = ", ".join(f"{kind} {size / 1e6:,.1f} MB" for kind, size in chain["payload_bytes"].items())
    return [
        "updates: real AdamW steps on a randomly initialised model of Qwen2's shape,"
        f" {params['optimizer_step_s']:.2f} s each, {params['recorder_peak_bytes'] / 2**30:.1f} GiB at most;"
        " engines are plain arrays; all on one machine",
        f"chain: {chain['version_count']} versions of {params['chain_parameter_count']:,} parameters: {kinds},"
        f" manifests {chain['manifest_bytes'] / 1e6:,.1f} MB; a receiver {LAG} versions behind takes jumps",
        f"node: the broker sent {node['one_bytes'] / 1e6:,.2f} MB to one worker, {node['all_bytes'] / 1e6:,.2f} MB to"
        f" {node['worker_count']} on one node, everything counted",
        f"entropy floor of each block by itself ÷ ours: {results['of_block_entropy_floor']:.3f}",
        f"memory copy: {results['rows'][0]['memory_copy_bytes_per_s'] / 1e9:.1f} GB/s; figures are of"
        f" {results['rows'][0]['ours']}; {params['wall_s']:.0f} s in all",
        f"machine: {found['machine']}",
    ]
