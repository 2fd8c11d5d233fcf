"""Dead letters: how many by cause; retried or discarded, or only counted."""

from __future__ import annotations

import logging
from typing import Any

from fastapi import APIRouter, Request

from ...fabric.inspect.dead_letters import DeadAction, count_causes, deal_with_dead
from ..access.auth import who
from ..schemas.answers import Problem
from ..schemas.base import shown
from ..schemas.dead import DeadCauses, DeadLettersDone, DeadLettersRequest
from .context import Context
from .read import UNKNOWN_RUN

log = logging.getLogger(__name__)

ERRORS: dict[int | str, dict[str, Any]] = {
    403: {"model": Problem, "description": "No right to control"},
    **UNKNOWN_RUN,
}


def router(context: Context) -> APIRouter:
    """Make the routes below /v1/runs/{run_id}/dead-letters that do not list them."""
    routes = APIRouter(prefix="/v1/runs/{run_id}/dead-letters")

    @routes.get("/causes", responses=UNKNOWN_RUN, tags=["read"])
    async def causes(run_id: str) -> DeadCauses:
        """Count a run's dead letters by cause: reasons that differ in numbers and names of trajectories are of one."""
        found = await context.ports.board.run_status(run_id)
        rows = await count_causes(context.ports.rollouts(found.config), found.config)
        return DeadCauses(dead_count=found.dead_count, causes=rows)

    @routes.post("/retry", responses=ERRORS, tags=["control"])
    async def retry(run_id: str, body: DeadLettersRequest, request: Request) -> DeadLettersDone:
        """Let trajectories that were given up run again, each once, with all attempts, in their own groups.

        A complete group that nobody has received is taken back for them. Those of a group that was received, or ended
        by its quorum or deadline, are refused and stay as they are. A call whose answer was lost may be repeated.
        """
        return await _deal(context, run_id, "retry", body, request)

    @routes.post("/discard", responses=ERRORS, tags=["control"])
    async def discard(run_id: str, body: DeadLettersRequest, request: Request) -> DeadLettersDone:
        """Forget dead letters; their groups are as they were."""
        return await _deal(context, run_id, "discard", body, request)

    return routes


async def _deal(
    context: Context, run_id: str, action: DeadAction, body: DeadLettersRequest, request: Request
) -> DeadLettersDone:
    run = (await context.ports.board.run_status(run_id)).config
    stream = context.ports.rollouts(run)
    done = await deal_with_dead(stream, run, action, body.trajectory_ids, cause=body.cause, is_dry=body.dry_run)
    if not body.dry_run:
        context.status.forget()
        facts = {"run_id": run_id, "count": done.trajectory_count, "said_by": who(context.config, request.headers)}
        log.info("dead_letters.retried" if action == "retry" else "dead_letters.discarded", extra=facts)
    return shown(DeadLettersDone, done, is_dry_run=body.dry_run)
