"""Turns the fabric's records into what the api shows. Pure: what was read goes in, models come out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ...fabric.contract.agreement import Agreement
from ...fabric.contract.records import WorkerInfo
from ...fabric.contract.sharing import LendSetting
from ...fabric.ports.queue import RunStatus
from ...fabric.rules.lending.terms import LendTerms, terms
from ...fabric.rules.queue.curve import FINITE_MAX, Curve, put_together
from ..schemas.answers import (
    AgreementView,
    LeaseView,
    Readiness,
    RewardPoint,
    RunReadiness,
    RunView,
    Totals,
    WorkerAgreement,
    WorkerView,
)
from ..schemas.base import shown
from ..schemas.lending import LendingWorker

FRESH_MS = 3_000  # a heartbeat comes every second
GENERATING = ("dedicated", "serving")
COUNTERS = ("trajectories_completed", "turns_settled", "tokens")


def worker_view(
    info: WorkerInfo,
    age_ms: int,
    *,
    found: LendTerms | None,
    heads: Mapping[str, int],
    lease: LeaseView | None,
    tokens_per_s: float,
    plan_reason: str | None = None,
) -> WorkerView:
    """Show a worker with its terms (None: not a serving one) and its lease. heads: newest version by run, or -1."""
    return shown(
        WorkerView,
        info,
        tokens_per_s=round(tokens_per_s, 2),
        versions_behind=versions_behind(info, heads),
        heartbeat_age_ms=age_ms,
        is_fresh=age_ms <= FRESH_MS,
        lend=None if found is None else found.text,
        lend_terms=found,
        plan_reason=plan_reason,
        lease=lease,
    )


def versions_behind(info: WorkerInfo, heads: Mapping[str, int]) -> int | None:
    """Count the versions that a worker is behind the broker's head; None: it has no weights, or nothing is published.

    A worker that cannot reach the head does not know how far it is behind.
    """
    head = heads.get(info.run_id, -1) if info.run_id is not None else -1
    return max(0, head - info.active_version) if info.active_version >= 0 and head >= 0 else None


def agreement_view(agreement: Agreement) -> AgreementView:
    """Show how workers and trainer agree."""
    blamed = {alarm.worker_id for alarm in agreement.alarms}
    return shown(
        AgreementView,
        agreement,
        rule=agreement.rule.name,
        difference_mean_limit=agreement.rule.difference_mean_limit,
        workers=[shown(WorkerAgreement, row, is_over=row.worker_id in blamed) for row in agreement.workers],
    )


def readiness(workers: Iterable[WorkerView]) -> Readiness:
    """Say what is missing for work to flow, on a broker that answers."""
    missing = []
    controllers = [worker for worker in workers if worker.role == "controller"]
    if not any(worker.is_fresh for worker in controllers):
        ages_s = [worker.heartbeat_age_ms / 1000 for worker in controllers]
        gone = f"has been heard of for {min(ages_s):.0f} s" if ages_s else "is connected"
        missing.append(f"no controller {gone}, so no lease is given: start one (rollfab controller)")
    return Readiness(is_ready=not missing, missing=missing)


def run_readiness(run: RunView) -> RunReadiness:
    """Say what keeps one run from moving."""
    missing = [f"{each.text}. {each.step}" if each.step else each.text for each in run.causes if not each.is_well]
    return RunReadiness(run_id=run.run_id, is_ready=run.is_well, missing=missing, causes=run.causes)


def totals(runs: Iterable[RunView], workers: Iterable[WorkerView]) -> Totals:
    """Sum over all runs and workers."""
    runs, live = list(runs), [worker for worker in workers if worker.is_fresh]
    generating = [worker for worker in live if worker.role in GENERATING]
    return Totals(
        trajectories=sum_up(run.trajectories for run in runs),
        turns=sum_up(run.turns for run in runs),
        groups_waiting=sum(run.groups_waiting for run in runs),
        dead_count=sum(run.dead_count for run in runs),
        counters=sum_up(run.counters for run in runs),
        worker_count=len(live),
        slot_count=sum(worker.slot_count for worker in generating),
        running_count=sum(worker.running_count for worker in generating),
    )


def sum_up(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Add numbers of the same name."""
    summed: dict[str, int] = {}
    for part in parts:
        for name, value in part.items():
            summed[name] = summed.get(name, 0) + value
    return summed


def counters_of(statuses: Iterable[RunStatus]) -> dict[str, dict[str, int]]:
    """Return the counters that have rates, by run."""
    return {s.config.run_id: {name: s.counters.get(name, 0) for name in COUNTERS} for s in statuses}


def reward_curve(curve: Curve, count_max: int) -> list[RewardPoint]:
    """Return a run's rewards by version, at most `count_max` points."""
    return [
        RewardPoint(
            step=None,
            reward_mean=_finite(bucket.reward_mean),
            policy_version=bucket.version if bucket.version >= 0 else None,
            version_count=bucket.width,
            rollout_count=bucket.count,
            reward_deviation=_finite(bucket.reward_deviation),
            reward_min=_finite(bucket.reward_min),
            reward_max=_finite(bucket.reward_max),
            completion_tokens_mean=bucket.token_mean,
        )
        for bucket in put_together(curve, count_max)
    ]


def _finite(value: float) -> float | None:
    return value if abs(value) <= FINITE_MAX else None


def terms_of(info: WorkerInfo, lends: Mapping[str, LendSetting], minute: int) -> LendTerms | None:
    """Return the terms of a worker at this minute of the week; None if it is no serving worker."""
    return terms(lends, info.worker_id, info.pool, minute) if info.role == "serving" else None


def value_of(setting: LendSetting) -> str:
    """Write a setting in one word: its mode, or the slots that it is limited to."""
    slots = setting.slot_count_max
    return str(slots) if setting.mode == "on" and slots is not None else setting.mode


def lending_worker(worker: WorkerView) -> LendingWorker:
    """Return the part of a serving worker that is about lending."""
    assert worker.lend_terms is not None
    slot_count = worker.lease.slot_count if worker.lease is not None else 0
    return shown(LendingWorker, worker, terms=worker.lend_terms, slot_count=slot_count)
