"""Reading: status, runs, workers, leases, weights, dead letters."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Response

from ...fabric.contract.errors import RunUnknown
from ...fabric.rules.queue.curve import BUCKET_COUNT_MAX
from ..reading.views import reward_curve
from ..schemas.answers import (
    DeadLetters,
    Leases,
    Problem,
    Runs,
    RunView,
    Status,
    Weights,
    Workers,
)
from .context import Context

UNKNOWN_RUN: dict[int | str, dict[str, Any]] = {404: {"model": Problem, "description": "No such run"}}
VERSION_COUNT = 64

Count = Annotated[int, Query(ge=1, le=1000)]


def router(context: Context) -> APIRouter:
    """Make the routes under /v1 that only read, but for the events."""
    routes = APIRouter(prefix="/v1", tags=["read"])

    @routes.get("/status", response_model=Status)
    async def status() -> Response:
        """Show everything the page shows, at most a second old."""
        return Response(await context.status.body(), media_type="application/json")

    @routes.get("/runs")
    async def runs() -> Runs:
        """List all runs in numbers."""
        return Runs(runs=(await context.status.read()).runs)

    @routes.get("/runs/{run_id}", responses=UNKNOWN_RUN)
    async def run(run_id: str) -> RunView:
        """Show one run, with its whole reward curve."""
        found = await find_run(context, run_id)
        status = await context.ports.board.run_status(run_id)
        return found.model_copy(update={"reward_curve": reward_curve(status.rewards, BUCKET_COUNT_MAX)})

    @routes.get("/runs/{run_id}/dead-letters", responses=UNKNOWN_RUN)
    async def dead_letters(run_id: str, count: Count = 100) -> DeadLetters:
        """List trajectories of a run that were given up, with the reason and the traceback; no order is promised."""
        found = await context.ports.board.run_status(run_id)
        letters = await context.ports.rollouts(found.config).dead_letters(count)
        return DeadLetters(dead_count=found.dead_count, dead_letters=letters)

    @routes.get("/workers")
    async def workers() -> Workers:
        """List all workers that the broker knows, also those that fell silent a moment ago."""
        return Workers(workers=(await context.status.read()).workers)

    @routes.get("/leases")
    async def leases() -> Leases:
        """List all leases that have not ended."""
        return Leases(leases=(await context.status.read()).leases)

    @routes.get("/weights")
    async def weights() -> Weights:
        """Show the head and held versions of every run."""
        names = [run.run_id for run in (await context.status.read()).runs]
        return Weights(weights=[await context.weights.read(name, VERSION_COUNT) for name in names])

    return routes


async def find_run(context: Context, run_id: str) -> RunView:
    """Find a run by its name.

    Raises:
        RunUnknown: it was never created, or is deleted.
    """
    for view in (await context.status.read()).runs:
        if view.run_id == run_id:
            return view
    await context.ports.board.run_status(run_id)  # raises; or it is so new that the shared reading lacks it
    context.status.forget()
    for view in (await context.status.read()).runs:
        if view.run_id == run_id:
            return view
    raise RunUnknown(f"run {run_id!r} was deleted just now", run_id=run_id)
