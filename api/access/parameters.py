"""Refuses query parameters that a route does not take: a mistyped one would be passed over, and the answer another."""

from __future__ import annotations

from fastapi import Request
from fastapi.routing import APIRoute

from ...fabric.contract.text import did_you_mean
from .problems import Refused

PATHS = "/v1/"  # elsewhere are pages, whose addresses may carry what others add to links


async def known_parameters(request: Request) -> None:
    """Raise Refused if the query has a parameter that the route does not name."""
    route = request.scope["route"]
    if not isinstance(route, APIRoute) or not route.path.startswith(PATHS):
        return
    known = {each.alias for each in route.dependant.query_params}
    for name in request.query_params:
        if name not in known:
            words = did_you_mean(name, known)
            raise Refused(422, "InputError", f"{request.url.path} has no query parameter {name[:100]!r}; {words}")
