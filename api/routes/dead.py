"""Dead letters: how many by cause; retried or discarded, or only counted."""

from __future__ import annotations

import logging
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field, StrictBool, model_validator

from ...fabric.inspect.dead_letters import DeadAction, count_causes, deal_with_dead
from ...fabric.rules.queue.dead import CauseCount, Refusal
from ..access.auth import who
from ..schemas.answers import Problem
from ..schemas.base import Model, shown
from ..schemas.base import Request as Body
from .context import Context
from .read import UNKNOWN_RUN

log = logging.getLogger(__name__)

NAMES_A_CALL_MAX = 1000
TEXT_LENGTH_MAX = 1000
ERRORS: dict[int | str, dict[str, Any]] = {
    403: {"model": Problem, "description": "No right to control"},
    **UNKNOWN_RUN,
}


class DeadLettersRequest(Body):
    """Dead letters to retry or to discard: those named, or all."""

    trajectory_ids: (
        Annotated[list[Annotated[str, Field(max_length=TEXT_LENGTH_MAX)]], Field(max_length=NAMES_A_CALL_MAX)] | None
    ) = None
    """Those meant, by name."""
    all: StrictBool = False
    """All dead letters of the run."""
    cause: Annotated[str, Field(min_length=1, max_length=TEXT_LENGTH_MAX)] | None = None
    """Of all, only those whose reason has this text in it."""
    dry_run: StrictBool = False
    """Change nothing, and tell what would become of them."""

    @model_validator(mode="after")
    def _says_one_thing(self) -> DeadLettersRequest:
        if (self.trajectory_ids is None) != self.all:
            raise ValueError("say which: trajectory_ids, or all")
        if self.cause is not None and not self.all:
            raise ValueError("a cause chooses among all: give it with all, without trajectory_ids")
        return self


class DeadLettersDone(Model):
    """What became of dead letters, or what would."""

    is_dry_run: bool
    trajectory_count: int
    """Those for which it is done."""
    group_count: int
    """The groups of these."""
    refused: list[Refusal]
    """The others, by reason; they are as they were."""


class DeadCauses(Model):
    """A run's dead letters, counted by cause."""

    dead_count: int
    """The number of dead letters in all."""
    causes: list[CauseCount]
    """The most frequent first."""


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
