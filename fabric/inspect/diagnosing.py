"""Reads over the ports why runs do or do not move, and has the rule (diagnosis.py) name the causes.

The client, `rollfab status`, `rollfab doctor`, the api and the controller all ask here, so all of them say the same.

- A reading costs O(runs + workers) in a few round trips. Details that only some causes need (who consumes, why a dead
  letter died) are read for those runs alone that they may explain.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from ..contract.errors import RunUnknown
from ..contract.lease_plan import LeasePlan
from ..contract.records import WorkerInfo
from ..contract.sharing import LendSetting
from ..ports.queue import LeaseBoard, RunDetails, RunStatus, Survey
from ..rules.lending.hours import minute_of_week
from ..rules.lending.terms import LendTerms, terms
from ..rules.queue.push import no_such_run
from .diagnosis import MISSING, SILENT_MS, Cause, Scene, diagnose

EVENT_COUNT = 256  # the newest, among which those of half a minute are looked for
DETAILED_COUNT_MAX = 64  # runs whose details are read at once: more of them would not be read by people either


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The fabric at one moment. causes: by run, why it does or does not move."""

    survey: Survey
    lends: Mapping[str, LendSetting]
    plan: LeasePlan | None
    causes: Mapping[str, list[Cause]]


async def diagnose_run(board: LeaseBoard, run_id: str) -> list[Cause]:
    """Say why one run does or does not move.

    Raises:
        RunUnknown: there is no such run.
    """
    return (await read_fabric(board, run_id)).causes[run_id]


async def read_fabric(board: LeaseBoard, run_id: str | None = None, *, has_rewards: bool = False) -> Reading:
    """Read everything that people look at, and say why runs do or do not move.

    Raises:
        RunUnknown: there is no such run.
    """
    survey, lends, plan, memory = await asyncio.gather(
        board.survey(has_rewards=has_rewards), board.lends(), board.plan(), board.memory_bytes()
    )
    if run_id is not None and run_id not in survey.runs:
        try:
            await board.run_status(run_id)  # it says what became of the run, unless that was made a moment ago
        except RunUnknown as error:
            if "deleted_ago_ms" in error.facts:
                raise
        raise no_such_run(run_id, known=survey.runs)
    causes = await diagnose_survey(board, survey, lends, plan, memory, None if run_id is None else [run_id])
    return Reading(survey=survey, lends=lends, plan=plan, causes=causes)


async def diagnose_survey(
    board: LeaseBoard,
    survey: Survey,
    lends: Mapping[str, LendSetting],
    plan: LeasePlan | None,
    memory: tuple[int, int],
    run_ids: Iterable[str] | None = None,
) -> dict[str, list[Cause]]:
    """Diagnose runs from a reading that is there already; run_ids: these alone."""
    names = list(survey.runs if run_ids is None else run_ids)
    wanted = [survey.runs[name] for name in names if _needs_details(survey.runs[name])]
    rows = await asyncio.gather(*(board.run_details(status.config) for status in wanted[:DETAILED_COUNT_MAX]))
    details = {status.config.run_id: row for status, row in zip(wanted, rows, strict=False)}
    scene = _scene(survey, lends, plan, details, memory)
    causes = {name: diagnose(scene, name) for name in names}
    if any(each.code in MISSING and each.kind == "stuck" for found in causes.values() for each in found):
        scene = replace(scene, gone=await forgotten(board, survey.wall_ms))
        causes = {name: diagnose(scene, name) for name in names}
    return causes


async def forgotten(board: LeaseBoard, wall_ms: int) -> dict[str, tuple[WorkerInfo, int]]:
    """Return whom the controller has forgotten of late, with his age in ms: long before he is surely dead.

    wall_ms: the time of the broker's machine. Of a worker its name, role and pool are known.
    """
    found: dict[str, tuple[WorkerInfo, int]] = {}
    for event_id, kind, facts in await board.newest_events("", EVENT_COUNT):
        if kind == "worker.gone" and isinstance(facts.get("silent_ms"), int):
            name, role, pool = (str(facts.get(word) or "") for word in ("worker_id", "role", "pool"))
            age_ms = wall_ms - int(event_id.partition("-")[0]) + facts["silent_ms"]
            found.setdefault(name, (WorkerInfo(worker_id=name, role=role, pid=0, host="", pool=pool), age_ms))
    return found


def _needs_details(status: RunStatus) -> bool:
    """Tell whether a run's numbers alone may not say why it stands."""
    is_failing = status.dead_count and not status.counters.get("trajectories_completed")
    return bool(is_failing or (status.groups_waiting and not status.trajectories["running"]))


def _scene(
    survey: Survey,
    lends: Mapping[str, LendSetting],
    plan: LeasePlan | None,
    details: Mapping[str, RunDetails],
    memory: tuple[int, int],
) -> Scene:
    rows, demand = (plan.rows, plan.runs) if plan is not None and _is_led(survey) else ((), ())
    return Scene(
        workers=survey.workers,
        runs=survey.runs,
        leases=survey.leases,
        terms=_terms(survey, lends),
        reasons={row.worker_id: row.reason for row in rows},
        quiet_s={row.run_id: (survey.now_ms - row.moved_at_ms) / 1000 for row in demand if row.moved_at_ms},
        stale_counts={row.run_id: row.stale_count for row in demand},
        details=details,
        memory_bytes=memory,
        bad_rows=survey.bad_rows,
    )


def _is_led(survey: Survey) -> bool:
    """Tell whether the plan is current: what a controller wrote before it was gone says nothing."""
    return any(info.role == "controller" and age_ms <= SILENT_MS for info, age_ms in survey.workers.values())


def _terms(survey: Survey, lends: Mapping[str, LendSetting]) -> dict[str, LendTerms]:
    minute = minute_of_week(survey.wall_ms)
    infos = [info for info, _ in survey.workers.values() if info.role == "serving"]
    return {info.worker_id: terms(lends, info.worker_id, info.pool, minute) for info in infos}
