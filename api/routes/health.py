"""Probes and metrics: does the process live, can work flow, and how does it go."""

from __future__ import annotations

from fastapi import APIRouter, Response

from ... import __version__
from ...fabric.errors import FabricError
from ..context import Context
from ..metrics import CONTENT_TYPE, render
from ..schemas import Health, Readiness


def router(context: Context) -> APIRouter:
    """/healthz, /readyz, /metrics."""
    routes = APIRouter(tags=["health"])

    @routes.get("/healthz")
    async def healthz() -> Health:
        """The process is alive; says nothing of the broker."""
        return Health(version=__version__)

    @routes.get("/readyz", responses={503: {"model": Readiness, "description": "Something is missing"}})
    async def readyz(response: Response) -> Readiness:
        """The broker answers and a controller is there; 503 says what is missing."""
        try:
            ready = (await context.status.read()).readiness
        except FabricError as error:
            ready = Readiness(is_ready=False, missing=[error.message])
        if not ready.is_ready:
            response.status_code = 503
        return ready

    @routes.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def metrics() -> Response:
        """Prometheus text. A broker that does not answer is `rollfab_broker_up 0`."""
        try:
            status = await context.status.read()
        except FabricError:
            status = None
        return Response(render(status), media_type=CONTENT_TYPE)

    return routes
