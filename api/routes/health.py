"""Probes and metrics: whether the process lives, whether work can flow, and how it goes."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from ... import __version__
from ...fabric.contract.errors import FabricError, RunUnknown
from ..metrics.answer import OPENMETRICS, PLAIN
from ..reading.views import run_readiness
from ..schemas.answers import Health, Problem, Readiness, RunReadiness
from .context import Context
from .read import find_run


def router(context: Context) -> APIRouter:
    """Make the routes /healthz, /readyz and /metrics."""
    routes = APIRouter(tags=["health"])

    @routes.get("/healthz")
    async def healthz() -> Health:
        """Say that the process is alive; says nothing of the broker."""
        return Health(version=__version__)

    @routes.get(
        "/readyz",
        responses={
            404: {"model": Problem, "description": "No such run"},
            503: {"model": RunReadiness | Readiness, "description": "Something is missing"},
        },
    )
    async def readyz(response: Response, run: str | None = None) -> RunReadiness | Readiness:
        """Say whether broker and controller are there, or whether `run` can move; 503 says what is missing."""
        try:
            status = await context.status.read()
            ready = status.readiness if run is None else run_readiness(await find_run(context, run))
        except RunUnknown:
            raise
        except FabricError as error:
            ready = Readiness(is_ready=False, missing=[error.message])
        if not ready.is_ready:
            response.status_code = 503
        return ready

    kinds: dict[str, Any] = {kind.partition(";")[0]: {} for kind in (PLAIN, OPENMETRICS)}

    @routes.get("/metrics", response_class=Response, responses={200: {"content": kinds}})
    async def metrics(request: Request) -> Response:
        """Write Prometheus text, or OpenMetrics for who accepts it. A broker that is away is `rollfab_broker_up 0`."""
        text, kind = await context.scraper.text(request.headers.get("accept", ""))
        return Response(text, headers={"content-type": kind, "vary": "Accept"})

    return routes
