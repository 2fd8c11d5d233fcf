"""Lending: the serving team's switch, and what it reads before and after it uses it."""

from __future__ import annotations

import logging
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request

from ...fabric.rules.lending import CLEAR, concerns
from ...fabric.rules.tax import sharing_totals, with_taxes
from ...fabric.sharing import ALL, POOL
from ..context import Context
from ..guard import who
from ..lending import lending_worker, setting_view, value_of
from ..problems import Refused
from ..schemas import Problem
from ..schemas_lending import Lend, Lending, LendRequest, Plan, PlanView, Sharing, SharingTotals, SharingView

log = logging.getLogger(__name__)

ERRORS: dict[int | str, dict[str, Any]] = {
    403: {"model": Problem, "description": "No right to control"},
    404: {"model": Problem, "description": "No such worker or pool"},
}


def router(context: Context) -> APIRouter:
    """/v1/lending, /v1/sharing, /v1/plan, and the switches of workers and pools."""
    routes = APIRouter(prefix="/v1")

    @routes.post("/workers/{worker_id}/lend", responses=ERRORS, tags=["control"])
    async def lend(worker_id: str, body: LendRequest, request: Request) -> Lend:
        """Lend a serving worker's spare capacity, bound it, or take it back at once; needs no controller.

        The worker "*" stands for all, also those that come later. Of what is said of a worker, its pool and all, the
        strictest holds: "off" for all is off everywhere.
        """
        if worker_id != ALL:
            known = await context.ports.board.workers()
            _check_serving(worker_id, known[worker_id][0].role if worker_id in known else None)
        return await _switch(context, worker_id, body, request)

    @routes.post("/pools/{pool}/lend", responses=ERRORS, tags=["control"])
    async def lend_pool(pool: str, body: LendRequest, request: Request) -> Lend:
        """The same for all serving workers of a pool."""
        known = await context.ports.board.workers()
        if not pool or all(info.role != "serving" or info.pool != pool for info, _ in known.values()):
            text = f"no serving worker is in a pool {pool!r}: /v1/lending lists those that are known, with their pools"
            raise Refused(404, "PoolUnknown", text, pool=pool)
        return await _switch(context, f"{POOL}{pool}", body, request)

    @routes.get("/lending", tags=["read"])
    async def lending() -> Lending:
        """All that serving teams said, and what it comes to on every serving worker."""
        status = await context.status.read()
        workers = [lending_worker(worker) for worker in status.workers if worker.lend_terms is not None]
        return Lending(settings=status.lending, workers=workers)

    @routes.get("/sharing", tags=["read"])
    async def sharing() -> Sharing:
        """What sharing devices with rollouts cost serving requests, and what it gave."""
        reports = await context.ports.board.sharing()
        rows = [SharingView(**with_taxes(report)) for _, report in sorted(reports.items())]
        return Sharing(workers=rows, totals=SharingTotals(**sharing_totals(reports.values())))

    @routes.get("/plan", tags=["read"])
    async def plan() -> Plan:
        """The capacity controller's newest plan, with a reason for every worker."""
        found = await context.ports.board.plan()
        return Plan(plan=None if found is None else PlanView.model_validate(asdict(found)))

    return routes


async def _switch(context: Context, subject: str, body: LendRequest, request: Request) -> Lend:
    board = context.ports.board
    changes = {**body.changes(), "said_by": who(context.config, request.headers)}
    setting = await board.change_lend(subject, changes)
    context.status.forget()
    facts = {"worker_id": subject, "value": value_of(setting), "said_by": setting.said_by, "reason": setting.reason}
    log.info("lend.switched", extra=facts)
    concerned = [name for name, (info, _) in (await board.workers()).items() if concerns(subject, info)]
    view = None if setting.mode == CLEAR else setting_view(subject, setting)
    return Lend(worker_id=subject, value=value_of(setting), worker_ids=sorted(concerned), setting=view)


def _check_serving(worker_id: str, role: str | None) -> None:
    if role is None:
        text = f"worker {worker_id!r} is not known to the broker: /v1/workers lists those that are"
        raise Refused(404, "WorkerUnknown", text, worker_id=worker_id)
    if role != "serving":
        text = f"worker {worker_id!r} is a {role} worker: only serving workers are lent and taken back"
        raise Refused(422, "NotLendable", text, worker_id=worker_id, role=role)
