"""Refuses query parameters that a route does not take: a mistyped one would be passed over, and the answer another.

One that is given twice is refused too: all but the last would be passed over.
"""

from __future__ import annotations

from typing import get_origin

from fastapi import Request
from fastapi.routing import APIRoute

from ...fabric.contract.text import did_you_mean
from .problems import Refused

PATHS = ("/v1/", "/readyz")  # elsewhere are pages, whose addresses may carry what others add to links


async def known_parameters(request: Request) -> None:
    """Raise Refused if the query has a parameter that the route does not name, or has it twice."""
    route = request.scope["route"]
    if not isinstance(route, APIRoute) or not route.path.startswith(PATHS):
        return
    known = {each.alias: get_origin(each.field_info.annotation) is list for each in route.dependant.query_params}
    asked = [name for name, _ in request.query_params.multi_items()]
    for name in asked:
        if known.get(name) is False and asked.count(name) > 1:
            count = asked.count(name)
            raise Refused(422, "InputError", f"{request.url.path} takes {name!r} once, and it is given {count} times")
        if name not in known:
            words = did_you_mean(name, known)
            raise Refused(422, "InputError", f"{request.url.path} has no query parameter {name[:100]!r}; {words}")
