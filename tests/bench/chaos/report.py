"""What `rollfab bench chaos` says: figures out of faults, journals and counters; a table; a complaint.

What each figure means stands in main.py.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any

from rollfab.deploy.replay.figures import Report, number, percentile, show
from rollfab.fabric.ports.queue import RunStatus

from .director import Injected
from .journal import Verdict
from .schedule import BROKER, KINDS

CLAIM_ROLES = ("worker", "serving", "agent", "gateway", BROKER)
CALL_PROMISES = ("calls_lost", "errors_final", "turns_doubled", "answers_differing")
PROMISES = ("lost", "duplicated", "malformed", "diverged", "dead", "left", "unrecovered")


def count_faults(injected: list[Injected]) -> dict[str, Any]:
    by_role: dict[str, dict[str, int]] = {}
    for each in injected:
        kinds = by_role.setdefault(each.fault.role, {})
        kinds[each.fault.kind] = kinds.get(each.fault.kind, 0) + 1
    by_kind = Counter(each.fault.kind for each in injected)
    return {"faults": len(injected), "faults_by_role": by_role, "faults_by_kind": dict(by_kind)}


def count_fates(verdict: Verdict, status: RunStatus) -> dict[str, Any]:
    return {
        "groups": len(verdict.submitted),
        "lost": len(verdict.lost),
        "duplicated": len(verdict.duplicated),
        "malformed": len(verdict.malformed),
        "diverged": verdict.diverged_rollout_count,
        "dead": status.dead_count,
        "left": status.depth,
        "rollouts": verdict.rollout_count,
        "redelivered": verdict.redelivered_count,
        "resubmitted": verdict.resubmitted_count,
        "examples": [*verdict.lost[:3], *verdict.duplicated[:3], *verdict.malformed[:3]],
        "counters": dict(status.counters),
    }


def count_tokens(made: int, status: RunStatus, verdict: Verdict) -> dict[str, Any]:
    settled = status.counters.get("tokens", 0)
    return {
        "tokens_made": made,
        "tokens_settled": settled,
        "tokens_delivered": verdict.token_count,
        "regenerated_fraction": (made - settled) / made if made else 0.0,
    }


def time_recoveries(injected: list[Injected]) -> dict[str, Any]:
    timed = [each for each in injected if each.recovery_ms is not None]
    by_role: dict[str, list[float]] = {}
    for each in timed:
        by_role.setdefault(each.fault.role, []).append(each.recovery_ms or 0.0)
    of_claims = [value for role in CLAIM_ROLES for value in by_role.get(role, [])]
    slowest = sorted(timed, key=lambda each: -(each.recovery_ms or 0.0))[:8]
    return {
        "recovery_ms_p50": percentile(of_claims, 0.5) if of_claims else None,
        "recovery_ms_p99": percentile(of_claims, 0.99) if of_claims else None,
        "recovery_count": len(of_claims),
        "recovery_ms_by_role": {
            role: {"count": len(values), "p50": percentile(values, 0.5), "p99": percentile(values, 0.99)}
            for role, values in by_role.items()
        },
        "unrecovered": sum(not each.is_recovered for each in injected),
        "slowest": [
            {**asdict(each.fault), "at_s": each.at_s, "held": each.held_count, "recovery_ms": each.recovery_ms}
            for each in slowest
        ],
    }


def complain(results: dict[str, Any], again: str) -> str:
    """What broke a promise, in words, and the command for the same again; empty when nothing did."""
    broken = [f"{results[name]} {name}" for name in (*PROMISES, *CALL_PROMISES) if results.get(name)]
    if not broken:
        return ""
    examples = "; ".join([*results["examples"], *results.get("call_examples", [])])
    return f"chaos broke promises: {', '.join(broken)}. {examples}\nTo have the same faults again: {again}"


def print_table(report: Report) -> None:
    found = report.results
    rows = [
        [role, *(str(kinds.get(kind, 0)) for kind in KINDS), *_recovery_cells(found, role)]
        for role, kinds in found["faults_by_role"].items()
    ]
    rows.append(["all", *(str(found["faults_by_kind"].get(kind, 0)) for kind in KINDS), "", ""])
    columns = ["", *KINDS, "recovery p50, ms", "p99"]
    notes = [
        f"{found['faults']} faults; {found['groups']} groups: {found['lost']} lost, {found['duplicated']} duplicated,"
        f" {found['malformed']} malformed, {found['diverged']} rollouts diverged, {found['dead']} given up",
        f"regenerated {found['regenerated_fraction']:.2%} of {number(found['tokens_made'])} tokens; recovery of claims"
        f" p50 {found['recovery_ms_p50'] or 0:.0f} ms, p99 {found['recovery_ms_p99'] or 0:.0f} ms",
        f"{found['wall_s']:.0f} s in all, drained in {found['drain_s']:.1f} s; machine: {report.machine}",
    ]
    if "calls" in found:
        notes[1:1] = _call_notes(found)
    show("rollfab bench chaos", columns, rows, notes)


def _call_notes(found: dict[str, Any]) -> list[str]:
    errors = ", ".join(f"{count} {status}" for status, count in sorted(found["errors_retryable"].items())) or "none"
    return [
        f"{found['calls']} calls: {found['calls_completed']} completed, {found['calls_lost']} lost;"
        f" {found['calls_again']} asked for again by a later life, {found['calls_given_up']} given up by their client",
        f"errors: retryable {errors}; {found['sessions_over']} at the end of a session; {found['errors_final']} final",
        f"{found['turns_doubled']} turns doubled in the record, {found['turns_unused']} made and in no record;"
        f" {found['answers_differing']} answers differ from the undisturbed run's",
    ]


def _recovery_cells(found: dict[str, Any], role: str) -> list[str]:
    timed = found["recovery_ms_by_role"].get(role)
    return [number(timed["p50"]), number(timed["p99"])] if timed else ["", ""]
