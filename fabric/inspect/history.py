"""How all went: a sample of one moment, as a controller keeps one a minute, and what lay between samples. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Literal, get_type_hints

from ..contract.lease_plan import LeaseSample, RunSample, Sample, ServingSample
from ..contract.records import WorkerInfo
from ..contract.sharing import SharingReport
from ..ports.queue import Survey
from ..rules.queue.retries import ever
from .diagnosis import ROLLOUT_ROLES, Cause

SAMPLE_ROW_COUNT_MAX = 128  # runs, and serving workers, that have a row of their own in a sample
FRESH_MS = 3_000


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPoint:
    """One run between two samples."""

    tokens_per_s: float
    rollouts_per_s: float
    groups_waiting: int
    """At the end of it, as the next two."""
    head_version: int
    cause: str
    """The code of why it moved or did not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingPoint:
    """One serving worker between two samples: what its users saw, and what it lent."""

    guard_state: str | None
    """open, narrow, shut or silent, at the end of it; null: it had no guard."""
    slot_count: int
    """Of its lease, at the end of it; 0: none."""
    tokens_per_s: float
    """Rollout tokens."""
    request_count: int
    """Serving requests in whose time rollouts computed."""
    violation_count: int
    """Of those, beyond an objective."""
    request_count_alone: int
    """Serving requests in whose time no rollout computed."""
    violation_count_alone: int
    ttft_ms_p99: float
    """Of the newest requests beside rollouts at the end of it; 0: there were none. So are the next three."""
    tpot_ms_p99: float
    ttft_ms_p99_alone: float
    """Of the newest requests in whose time no rollout computed."""
    tpot_ms_p99_alone: float
    ttft_slo_ms: float
    """0: nobody has told an objective."""
    tpot_slo_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryPoint:
    """What lay between two samples: totals as rates, and levels as they were at the end of it."""

    time_ms: int
    """The end of it, by the broker's wall clock."""
    span_ms: int
    """Its length."""
    tokens_per_s: float
    rollouts_per_s: float
    lent_tokens_per_s: float
    """Of serving workers."""
    running_count: int
    slot_count: int
    groups_waiting: int
    dead_count: int
    worker_count: int
    runs: dict[str, RunPoint]
    """The busiest, 128 at most."""
    serving: dict[str, ServingPoint]
    """By worker; the busiest, 128 at most."""


def sample_of(
    survey: Survey,
    causes: Mapping[str, Sequence[Cause]],
    reports: Mapping[str, SharingReport],
    leases: tuple[LeaseSample, ...] = (),
) -> Sample:
    """Take a sample of the fabric as it was read. leases: what became of them since the sample before."""
    live = [info for info, age_ms in survey.workers.values() if age_ms <= FRESH_MS]
    generating = [info for info in live if info.role in ROLLOUT_ROLES]
    runs = [
        RunSample(
            run_id=run_id,
            token_count=status.counters.get("tokens", 0),
            rollout_count=ever(status.counters, "trajectories_completed"),
            groups_waiting=status.groups_waiting,
            dead_count=status.dead_count,
            head_version=status.head_version,
            cause=causes[run_id][0].code if causes.get(run_id) else "",
        )
        for run_id, status in survey.runs.items()
    ]
    slots = {name: lease.slot_count for leases in survey.leases.values() for name, lease in leases.items()}
    serving = [
        _serving(info, slots.get(info.worker_id, 0), reports.get(info.worker_id))
        for info in live
        if info.role == "serving"
    ]
    return Sample(
        time_ms=survey.wall_ms,
        token_count=sum(run.token_count for run in runs),
        rollout_count=sum(run.rollout_count for run in runs),
        groups_waiting=sum(run.groups_waiting for run in runs),
        dead_count=sum(run.dead_count for run in runs),
        worker_count=len(live),
        running_count=sum(info.running_count for info in generating),
        slot_count=sum(info.slot_count for info in generating),
        runs=tuple(sorted(runs, key=lambda run: (-run.token_count, run.run_id))[:SAMPLE_ROW_COUNT_MAX]),
        serving=tuple(sorted(serving, key=lambda row: (-row.token_count, row.worker_id))[:SAMPLE_ROW_COUNT_MAX]),
        leases=leases,
    )


def _serving(info: WorkerInfo, slot_count: int, report: SharingReport | None) -> ServingSample:
    found = report or SharingReport(worker_id=info.worker_id)
    return ServingSample(
        worker_id=info.worker_id,
        guard_state=info.guard_state or "",
        slot_count=slot_count,
        token_count=found.token_count,
        request_count=int(found.shared.get("request_count", 0)),
        violation_count=found.violation_count,
        request_count_alone=int(found.alone.get("request_count", 0)),
        violation_count_alone=_beyond(found.alone),
        ttft_ms_p99=float(found.shared.get("ttft_ms_p99", 0)),
        tpot_ms_p99=float(found.shared.get("tpot_ms_p99", 0)),
        ttft_ms_p99_alone=float(found.alone.get("ttft_ms_p99", 0)),
        tpot_ms_p99_alone=float(found.alone.get("tpot_ms_p99", 0)),
        ttft_slo_ms=found.ttft_slo_ms,
        tpot_slo_ms=found.tpot_slo_ms,
    )


def _beyond(figures: Mapping[str, float]) -> int:
    """Count the requests beyond an objective, of which a report tells the part within both."""
    return round(figures.get("request_count", 0) * (1 - figures.get("attained_fraction", 1.0)))


def points(samples: Sequence[Sample], count_max: int) -> list[HistoryPoint]:
    """Return what lay between samples, at most `count_max` points. Samples that are left out lose nothing: totals grow.

    samples: the oldest first.
    """
    return [between(before, after) for before, after in steps(samples, count_max)]


def steps(samples: Sequence[Sample], count_max: int) -> list[tuple[Sample, Sample]]:
    """Return the samples that points lie between; arguments as those of `points`."""
    step = max(1, -(-(len(samples) - 1) // count_max))
    return [(before, after) for before, after in pairwise(samples[::-step][::-1]) if after.time_ms > before.time_ms]


def between(before: Sample, after: Sample) -> HistoryPoint:
    """Return what lay between two samples."""
    span_s = (after.time_ms - before.time_ms) / 1000
    runs = {run.run_id: run for run in before.runs}
    workers = {row.worker_id: row for row in before.serving}
    serving = {row.worker_id: _serving_point(workers.get(row.worker_id), row, span_s) for row in after.serving}
    return HistoryPoint(
        time_ms=after.time_ms,
        span_ms=after.time_ms - before.time_ms,
        tokens_per_s=_rate(before.token_count, after.token_count, span_s),
        rollouts_per_s=_rate(before.rollout_count, after.rollout_count, span_s),
        lent_tokens_per_s=round(sum(point.tokens_per_s for point in serving.values()), 3),
        running_count=after.running_count,
        slot_count=after.slot_count,
        groups_waiting=after.groups_waiting,
        dead_count=after.dead_count,
        worker_count=after.worker_count,
        runs={run.run_id: _run_point(runs.get(run.run_id), run, span_s) for run in after.runs},
        serving=serving,
    )


def _run_point(before: RunSample | None, after: RunSample, span_s: float) -> RunPoint:
    return RunPoint(
        tokens_per_s=_rate(before.token_count if before else 0, after.token_count, span_s),
        rollouts_per_s=_rate(before.rollout_count if before else 0, after.rollout_count, span_s),
        groups_waiting=after.groups_waiting,
        head_version=after.head_version,
        cause=after.cause,
    )


def _serving_point(before: ServingSample | None, after: ServingSample, span_s: float) -> ServingPoint:
    return ServingPoint(
        guard_state=after.guard_state or None,
        slot_count=after.slot_count,
        tokens_per_s=_rate(before.token_count if before else 0, after.token_count, span_s),
        request_count=_grown(before.request_count if before else 0, after.request_count),
        violation_count=_grown(before.violation_count if before else 0, after.violation_count),
        request_count_alone=_grown(before.request_count_alone if before else 0, after.request_count_alone),
        violation_count_alone=_grown(before.violation_count_alone if before else 0, after.violation_count_alone),
        ttft_ms_p99=after.ttft_ms_p99,
        tpot_ms_p99=after.tpot_ms_p99,
        ttft_ms_p99_alone=after.ttft_ms_p99_alone,
        tpot_ms_p99_alone=after.tpot_ms_p99_alone,
        ttft_slo_ms=after.ttft_slo_ms,
        tpot_slo_ms=after.tpot_slo_ms,
    )


def _grown(before: int, after: int) -> int:
    """Return the growth of a total; one that is smaller than before began anew."""
    return after - before if after >= before else after


def _rate(before: int, after: int, span_s: float) -> float:
    return round(_grown(before, after) / span_s, 3)


# ---------------------------------------------------------------- in files


def row_of(point: HistoryPoint) -> dict[str, Any]:
    """Return a point as a row of a file: its runs and serving workers are lists, each with its name."""
    row = asdict(point)
    row["runs"] = [{"run_id": name, **each} for name, each in row["runs"].items()]
    row["serving"] = [{"worker_id": name, **each} for name, each in row["serving"].items()]
    return row


def row_columns() -> dict[str, Any]:
    """Return the types of a row's columns by name; of a list of rows, those of its own."""
    return get_type_hints(HistoryPoint) | {
        "runs": {"run_id": str, **get_type_hints(RunPoint)},
        "serving": {"worker_id": str, **get_type_hints(ServingPoint)},
    }


# ---------------------------------------------------------------- did lending hurt?


Z_95 = 1.645  # one-sided
Answer = Literal["no", "yes", "unclear", "idle"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LendingVerdict:
    """What lending did to the users of one serving worker, over some time."""

    worker_id: str
    answer: Answer
    """yes: of the requests beside rollouts a larger part was beyond an objective than of the others, more than by
    chance (a test of two proportions, 95 %); no: not a larger one; unclear: there is nothing to compare with, or
    chance may explain it; idle: nothing was lent."""
    words: str
    """The answer in one sentence."""
    lent_ms: int
    """Time in which rollouts made tokens there."""
    token_count: int
    """Of rollouts."""
    request_count: int
    """Requests in whose time rollouts computed."""
    violation_count: int
    """Of those, beyond an objective."""
    request_count_alone: int
    violation_count_alone: int
    ttft_ms_p99_worst: float
    """The highest that was sampled beside rollouts; 0: none. So is the next one."""
    tpot_ms_p99_worst: float
    ttft_slo_ms: float
    tpot_slo_ms: float
    hurt_at_ms: list[int]
    """The ends of the points in which a request beside rollouts was beyond an objective."""


def lending_verdicts(history: Sequence[HistoryPoint]) -> list[LendingVerdict]:
    """Say of every serving worker whether lending hurt its users. The worst first."""
    names = dict.fromkeys(name for point in history for name in point.serving)
    found = [_verdict(name, history) for name in names]
    return sorted(found, key=lambda each: (-each.violation_count, -each.token_count, each.worker_id))


def _verdict(name: str, history: Sequence[HistoryPoint]) -> LendingVerdict:
    rows = [(point, point.serving[name]) for point in history if name in point.serving]
    counts = [
        (row.violation_count, row.request_count, row.violation_count_alone, row.request_count_alone) for _, row in rows
    ]
    bad, count, bad_alone, count_alone = (sum(column) for column in zip(*counts, strict=True))
    tokens = round(sum(row.tokens_per_s * point.span_ms / 1000 for point, row in rows))
    answer, words = _answer(tokens, (bad, count), (bad_alone, count_alone))
    return LendingVerdict(
        worker_id=name,
        answer=answer,
        words=words,
        lent_ms=sum(point.span_ms for point, row in rows if row.tokens_per_s > 0),
        token_count=tokens,
        request_count=count,
        violation_count=bad,
        request_count_alone=count_alone,
        violation_count_alone=bad_alone,
        ttft_ms_p99_worst=max(row.ttft_ms_p99 for _, row in rows),
        tpot_ms_p99_worst=max(row.tpot_ms_p99 for _, row in rows),
        ttft_slo_ms=rows[-1][1].ttft_slo_ms,
        tpot_slo_ms=rows[-1][1].tpot_slo_ms,
        hurt_at_ms=[point.time_ms for point, row in rows if row.violation_count],
    )


def _answer(tokens: int, shared: tuple[int, int], alone: tuple[int, int]) -> tuple[Answer, str]:
    (bad, count), (bad_alone, count_alone) = shared, alone
    if not tokens and not count:
        return "idle", "nothing was lent"
    if not count:
        return "no", "no: no request came while rollouts computed"
    if not bad:
        return "no", f"no: all {count:,} requests beside rollouts were within the objectives"
    beside = f"{bad:,} of {count:,} requests beside rollouts were beyond an objective"
    if not count_alone:
        return "unclear", f"unclear: {beside}, and none came without rollouts to compare with"
    without = f"{bad_alone:,} of {count_alone:,} without"
    excess = bad / count - bad_alone / count_alone
    if excess <= 0:
        return "no", f"no: {beside}, {without}, which is no smaller part"
    pooled = (bad + bad_alone) / (count + count_alone)
    error = math.sqrt(pooled * (1 - pooled) * (1 / count + 1 / count_alone))
    if error == 0 or excess / error > Z_95:
        return "yes", f"yes: {beside}, {without}"
    return "unclear", f"unclear: {beside}, {without}: chance may explain it"
