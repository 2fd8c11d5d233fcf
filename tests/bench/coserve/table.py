"""`rollfab bench coserve` for people."""

from __future__ import annotations

import json
from typing import Any

from rollfab.deploy.replay.figures import Report, number, show

from .figures import ALONE

SERVING = (
    "serving",
    "P99 beyond SLO",
    "requests beyond",
    "TTFT P50, ms",
    "TTFT P99",
    "TPOT P50, ms",
    "TPOT P99",
    "tax TTFT P99",
    "tax TPOT P99",
)
ROLLOUTS = ("rollouts", "borrowed, tokens/s", "within SLO", "total", "of oracle", "over dedicated", "refusal P99, ms")


def print_table(report: Report) -> None:
    """A row per arm, for each load."""
    found = json.loads(report.json())
    results, params = found["results"], found["params"]
    curve = results["curve"] or [
        {"load": None, "rate_per_s": params["settings"]["rate_per_s"], "arms": found["baselines"]}
    ]
    for each in curve:
        arms = each["arms"].items()
        load = "" if each["load"] is None else f"{each['load']:.0%} of SLO capacity, "
        title = f"rollfab bench coserve: {load}{number(each['rate_per_s'])} requests/s"
        show(title, SERVING, [_serving(arm, figures) for arm, figures in arms])
        show("", ROLLOUTS, [_rollouts(arm, figures) for arm, figures in arms])
    show("beside", ["", ""], _facts(found), [f"machine: {found['machine']}"])


def _serving(arm: str, figures: dict[str, Any]) -> list[str]:
    latencies = [_median(figures[name][key]) for name in ("ttft_ms", "tpot_ms") for key in ("p50", "p99")]
    return [
        arm,
        f"{figures['violations']} of {len(figures['within_by_repetition'])}",
        str(figures["requests_beyond"]),
        *latencies,
        _percent(figures["ttft_tax_p99"]),
        _percent(figures["tpot_tax_p99"]),
    ]


def _rollouts(arm: str, figures: dict[str, Any]) -> list[str]:
    return [
        arm,
        _median(figures["tokens_per_s"]["borrowed"]),
        _median(figures["tokens_per_s"]["borrowed_within_slo"]),
        _median(figures["tokens_per_s"]["total"]),
        _harvest(figures),
        _number(figures["speedup_over_dedicated"]),
        _number(figures["reclaim_ms_p99"]),
    ]


def _facts(found: dict[str, Any]) -> list[list[str]]:
    params, results = found["params"], found["results"]
    slo = params["slo"]
    rows = [
        ["objectives (P99 of serving alone x 1.25)", f"TTFT {slo['ttft_ms']:.0f} ms, TPOT {slo['tpot_ms']:.1f} ms"],
        ["tokens made again", f"{results['regenerated_fraction']:.2%} of {results['tokens_made']:,}"],
        ["busiest second over mean, by slice", _span(params["burstiness"])],
    ]
    if spoiled := sum(each["arm"] == ALONE for each in results.get("spoiled_repetitions", ())):
        rows.append(["measured again", f"{spoiled} repetitions in which serving alone missed its objectives"])
    if again := {arm: each["slices_again"] for arm, each in found["baselines"].items() if each["slices_again"]}:
        counts = ", ".join(f"{arm} {count}" for arm, count in again.items())
        rows.append(["slices measured again", f"the hypervisor kept processors away: {counts}"])
    if params["is_quick"]:
        rows.append(["quick", "too few requests for a P99: only the order of magnitude counts"])
    if switch := results.get("kill_switch"):
        rows.append(["kill switch, controller dead", f"P50 {switch['ms_p50']:.0f} ms, P99 {switch['ms_p99']:.0f} ms"])
    if bursts := results.get("bursts"):
        rows += _burst_rows(bursts)
    if frozen := results.get("frozen_broker"):
        rows.append(
            [
                f"broker frozen for {frozen['frozen_s']:.0f} s in a burst",
                f"{'within' if frozen['is_within'] else 'BEYOND'} SLO, {_stop(frozen)}",
            ]
        )
    return rows


def _burst_rows(bursts: dict[str, Any]) -> list[list[str]]:
    count = bursts["burst_count"]
    if not count:
        return [["bursts", f"none of {bursts['sent_count']} came while rollouts computed"]]
    taken, noticed, after = (
        f"P50 {bursts[f'{name}_p50']:.0f} ms, P99 {bursts[f'{name}_p99']:.0f} ms"
        for name in ("taken_ms", "noticed_ms", "taken_after_ms")
    )
    return [
        [f"taken in {count} bursts, until the first token", f"{taken}; a rollout step: {number(bursts['step_ms'])} ms"],
        ["of it once serving's engine had a request", f"{after}; it had one after {noticed}"],
    ]


def _span(values: list[float]) -> str:
    return f"{number(min(values))} to {number(max(values))}" if values else "-"


def faults(report: Report) -> list[str]:
    """Name what did not do its work, though all of it could be measured."""
    frozen = report.results.get("frozen_broker")
    if not frozen or frozen["has_ended"]:
        return []
    return [f"the lent engine still stepped when the broker had been frozen for {frozen['frozen_s']:.0f} s"]


def _stop(frozen: dict[str, Any]) -> str:
    if not frozen["has_ended"]:
        return "rollouts DID NOT STOP"
    return f"rollouts stopped after {frozen['lease_ended_after_s']:.1f} s"


def _harvest(figures: dict[str, Any]) -> str:
    """Of those repetitions in which the oracle borrowed anything."""
    if figures["harvest_of_oracle"] is None:
        return "-"
    counted, measured = figures["harvest_repetitions"], len(figures["within_by_repetition"])
    return _number(figures["harvest_of_oracle"]) + ("" if counted == measured else f" ({counted} of {measured})")


def _median(figure: dict[str, Any]) -> str:
    return _number(figure["median"])


def _number(value: float | None) -> str:
    return "-" if value is None else number(value)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:+.0%}"
