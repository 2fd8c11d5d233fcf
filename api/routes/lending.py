"""Lending: the serving team's switch, and what it reads before and after it uses it."""

from __future__ import annotations

import logging
from typing import Any

from fastapi import APIRouter, Request

from ...fabric.contract.clock import SystemClock
from ...fabric.contract.errors import InputError
from ...fabric.contract.sharing import POOL
from ...fabric.inspect.lend_switch import switch
from ...fabric.rules.lending.terms import CLEAR
from ...fabric.rules.serving.tax import sharing_totals, with_taxes
from ..access.auth import who
from ..access.problems import Refused
from ..reading.views import lending_worker, readiness, value_of
from ..schemas.answers import Problem
from ..schemas.base import shown
from ..schemas.lending import Lend, Lending, LendRequest, LendSettingView, Plan, RouterAdvice, Sharing, SharingView
from .context import Context

TAKEN_BACK_S = 1.0  # how long an answer waits for what workers give back

log = logging.getLogger(__name__)

ERRORS: dict[int | str, dict[str, Any]] = {
    403: {"model": Problem, "description": "No right to control"},
    404: {"model": Problem, "description": "No such worker or pool"},
}


def router(context: Context) -> APIRouter:
    """Make the routes /v1/lending, /v1/lending/advice, /v1/sharing, /v1/plan, and the switches of workers and pools."""
    routes = APIRouter(prefix="/v1")

    @routes.post("/workers/{worker_id}/lend", responses=ERRORS, tags=["control"])
    async def lend(worker_id: str, body: LendRequest, request: Request) -> Lend:
        """Lend a serving worker's spare capacity, bound it, or take it back at once; needs no controller.

        The worker "*" stands for all. Of what is said of a worker, its pool and all, the strictest holds: "off" for all
        is off everywhere, also for those that come later. "on" for all is said of those that are known now.
        """
        return await _switch(context, worker_id, body, request)

    @routes.post("/pools/{pool}/lend", responses=ERRORS, tags=["control"])
    async def lend_pool(pool: str, body: LendRequest, request: Request) -> Lend:
        """Lend, bound or take back the spare capacity of all serving workers of a pool, as of one worker."""
        return await _switch(context, f"{POOL}{pool}", body, request)

    @routes.get("/lending", tags=["read"])
    async def lending() -> Lending:
        """Show all that serving teams said, and what it comes to on every serving worker."""
        status = await context.status.read()
        workers = [lending_worker(worker) for worker in status.workers if worker.lend_terms is not None]
        return Lending(settings=status.lending, workers=workers)

    @routes.get("/lending/advice", tags=["read"])
    async def advice() -> RouterAdvice:
        """Tell serving's router which workers to spare while the others can serve, so that rollouts have them alone.

        A router that does not follow loses nothing: guards keep the objectives either way.
        """
        status, plan = await context.status.read(), await context.ports.board.plan()
        is_led = readiness(status.workers).is_ready
        return RouterAdvice(extra_requests=plan.extra_requests if plan is not None and is_led else {})

    @routes.get("/sharing", tags=["read"])
    async def sharing() -> Sharing:
        """Show what sharing devices with rollouts cost serving requests, and what it gave."""
        reports = await context.ports.board.sharing()
        rows = [SharingView(**with_taxes(report)) for _, report in sorted(reports.items())]
        return Sharing(workers=rows, totals=sharing_totals(reports.values()))

    @routes.get("/plan", tags=["read"])
    async def plan() -> Plan:
        """Show the capacity controller's newest plan, with a reason for every worker."""
        return Plan(plan=await context.ports.board.plan())

    return routes


async def _switch(context: Context, subject: str, body: LendRequest, request: Request) -> Lend:
    changes = {**body.changes(), "said_by": who(context.config, request.headers)}
    board = context.ports.board
    try:
        done = await switch(board, SystemClock(), subject, changes, is_future=body.future, wait_s=TAKEN_BACK_S)
    except InputError as error:
        raise _refused(subject, error) from error
    context.status.forget()
    setting = done.setting
    facts = {"worker_id": subject, "value": value_of(setting), "said_by": setting.said_by, "reason": setting.reason}
    log.info("lend.switched", extra=facts)
    return Lend(
        worker_id=subject,
        value=value_of(setting),
        worker_ids=done.worker_ids,
        lending_ids=done.lending_ids,
        taken_ids=done.taken_ids,
        turn_count=done.turn_count,
        waiting={name: count for name, (count, _) in done.waiting.items()},
        setting=None if setting.mode == CLEAR else shown(LendSettingView, setting, subject=subject),
    )


def _refused(subject: str, error: InputError) -> Exception:
    """Turn the refusal of a name that cannot be switched into HTTP's words; returns other errors as they are."""
    if "role" in error.facts:
        return Refused(422, "NotLendable", str(error), worker_id=subject, role=error.facts["role"])
    if "known" not in error.facts:
        return error
    if subject.startswith(POOL):
        return Refused(404, "PoolUnknown", str(error), pool=subject.removeprefix(POOL))
    return Refused(404, "WorkerUnknown", str(error), worker_id=subject)
