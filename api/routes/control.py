"""Controlling: the serving team's switch."""

from __future__ import annotations

import logging
from typing import Any

from fastapi import APIRouter

from ..context import Context
from ..problems import Refused
from ..schemas import Lend, LendRequest, Problem
from ..status import ALL

log = logging.getLogger(__name__)

ERRORS: dict[int | str, dict[str, Any]] = {
    403: {"model": Problem, "description": "No right to control"},
    404: {"model": Problem, "description": "No such worker"},
}


def router(context: Context) -> APIRouter:
    """Everything that changes something."""
    routes = APIRouter(prefix="/v1", tags=["control"])

    @routes.post("/workers/{worker_id}/lend", responses=ERRORS)
    async def lend(worker_id: str, request: LendRequest) -> Lend:
        """Lend a serving worker's spare capacity, limit it, or take it back at once.

        The worker "*" stands for all: those without a switch of their own, those that come later, and those that had
        one, which is overwritten, so that "off" means off everywhere.
        """
        board = context.ports.board
        known = {name: info for name, (info, _) in (await board.workers()).items()}
        if worker_id != ALL:
            _check_serving(worker_id, known[worker_id].role if worker_id in known else None)
        value = str(request.value)
        own = await board.lends() if worker_id == ALL else {}
        for name in [worker_id, *(name for name in own if name != ALL)]:
            await board.set_lend(name, value)
        context.status.forget()
        serving = [name for name, info in known.items() if info.role == "serving" and worker_id in (ALL, name)]
        facts = {"worker_id": worker_id, "value": value, "source": "api"}
        log.info("lend.switched", extra=facts)
        await board.add_event("lend.switched", facts)
        return Lend(worker_id=worker_id, value=value, worker_ids=sorted(serving))

    return routes


def _check_serving(worker_id: str, role: str | None) -> None:
    if role is None:
        text = f"worker {worker_id!r} is not known to the broker: /v1/workers lists those that are"
        raise Refused(404, "WorkerUnknown", text, worker_id=worker_id)
    if role != "serving":
        text = f"worker {worker_id!r} is a {role} worker: only serving workers are lent and taken back"
        raise Refused(422, "NotLendable", text, worker_id=worker_id, role=role)
