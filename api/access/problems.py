"""Errors as answers: one shape, `{error, message, facts}`, whatever went wrong.

What the caller can mend is 4xx, a broker that cannot be reached is 503 and may be tried again. Only what nobody foresaw
is 500; its text stays in the log. Query parameters that a route does not take, or that are given twice, are refused
here: passed over, they would make the answer another.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, get_origin

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic_core import PydanticSerializationError, to_json
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from ...fabric.contract.errors import (
    BrokerError,
    ConfigError,
    EngineUnsupported,
    FabricError,
    InputError,
    LayoutMismatch,
    QueueFull,
    RunUnknown,
    VersionConflict,
    VersionUnknown,
)
from ...fabric.contract.text import did_you_mean, validated
from .words import Words

log = logging.getLogger(__name__)

STATUS: tuple[tuple[type[FabricError], int], ...] = (  # the first that fits counts
    (RunUnknown, 404),
    (VersionUnknown, 404),
    (VersionConflict, 409),
    (LayoutMismatch, 422),
    (EngineUnsupported, 422),
    (QueueFull, 429),
    (InputError, 422),
    (ConfigError, 422),
    (BrokerError, 503),
)
JSON = "application/json"
Handler = Callable[[Request, Exception], Awaitable[Response]]

PROBLEM_COUNT_MAX, AT_LENGTH_MAX = 20, 200  # of one answer
RETRY_AFTER_S = {429: "1", 503: "1"}
PATHS = ("/v1/", "/readyz")  # elsewhere are pages, whose addresses may carry what others add to links


class Refused(Exception):
    """A request that is understood and refused here, not by the fabric."""

    def __init__(self, status: int, error: str, message: str, **facts: Any) -> None:
        super().__init__(message)
        self.status = status
        self.error = error
        self.message = message
        self.facts = facts


def problem(status: int, error: str, message: str, facts: dict[str, Any] | None = None) -> Response:
    """Make an error answer. Facts that JSON has no word for become text."""
    plain = {"error": error, "message": message, "facts": facts or {}}
    try:
        body = to_json(plain, serialize_unknown=True)
    except PydanticSerializationError:  # half a character, which was sent so
        body = json.dumps(plain, default=str).encode()
    headers = {"retry-after": RETRY_AFTER_S[status]} if status in RETRY_AFTER_S else None
    return Response(body, status, headers, "application/json")


def status_of(error: FabricError) -> int:
    """Return the HTTP status that says the same as a fabric error."""
    if isinstance(error, QueueFull) and error.facts.get("need", 0) > error.facts.get("limit", math.inf):
        return 422  # it would never fit
    return next((status for kind, status in STATUS if isinstance(error, kind)), 500)


def install_problems(app: FastAPI, words: Words) -> None:
    """Answer every exception in our shape. words: in which next steps are told."""
    app.add_exception_handler(FabricError, _fabric(words))
    app.add_exception_handler(Refused, _refused(words))
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(ClientDisconnect, _gone)
    app.add_exception_handler(Exception, _unforeseen)


def _fabric(words: Words) -> Handler:
    async def answer(request: Request, error: Exception) -> Response:
        assert isinstance(error, FabricError)
        status = status_of(error)
        if status >= 500:
            log.warning("api.request_failed", extra={"path": request.url.path, "error": error.message})
        return problem(status, type(error).__name__, words.say(error.message, _run_of(request)), error.facts)

    return answer


def _refused(words: Words) -> Handler:
    async def answer(request: Request, error: Exception) -> Response:
        assert isinstance(error, Refused)
        return problem(error.status, error.error, words.say(error.message, _run_of(request)), error.facts)

    return answer


def _run_of(request: Request) -> str:
    return str(request.path_params.get("run_id", ""))


async def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    all_of_them = error.errors()
    found = [_found(each, error.body) for each in all_of_them[:PROBLEM_COUNT_MAX]]
    kind = request.headers.get("content-type", "")[:AT_LENGTH_MAX]
    if found[0]["at"] == "body" and isinstance(error.body, bytes | str) and JSON not in kind:
        sent = f"it was sent as {kind}" if kind else "its type was not said"
        found = [{"at": "body", "message": f"{sent}: send JSON, with the header content-type: {JSON}"}]
    text = "; ".join(f"{each['at']}: {each['message']}" for each in found)
    more = f"; and {len(all_of_them) - len(found):,} more" if len(all_of_them) > len(found) else ""
    return problem(422, "InputError", f"the request cannot be used: {text}{more}", {"problems": found})


def _found(error: Mapping[str, Any], body: Any) -> dict[str, str]:
    """Say where a request cannot be used, and why. Of a body that is no JSON the library gives a place, not a field."""
    if error["type"] == "json_invalid":
        *where, character = error["loc"]
        why = error.get("ctx", {}).get("error", error["msg"])
        return {"at": ".".join(where), "message": no_json(body[:character] if isinstance(body, str) else "", why)}
    return {"at": ".".join(map(str, error["loc"]))[:AT_LENGTH_MAX], "message": validated(error)}


def no_json(before: str, why: str) -> str:
    """Say where a body is no JSON, by line and column. before: what stands before that place."""
    line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
    return f"the body is not JSON: line {line}, column {column}: {why}"


async def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 400 and isinstance(error.__cause__, ValueError | RecursionError):
        # The library says so of what json.loads has no place in the text for: no UTF-8, a number too long, too deep.
        why = f"no JSON that can be read: {error.__cause__}"
        found = [{"at": "body", "message": why}]
        return problem(422, "InputError", f"the request cannot be used: body: {why}", {"problems": found})
    if error.status_code == 404:
        return problem(404, "NotFound", f"there is nothing at {request.url.path}: /docs lists what there is")
    answer = problem(error.status_code, "Refused", f"{request.method} {request.url.path}: {error.detail}")
    answer.headers.update(error.headers or {})
    return answer


async def _gone(request: Request, error: Exception) -> Response:
    """Answer for form's sake: whoever sent half a body does not read it."""
    return problem(400, "Refused", f"{request.method} {request.url.path}: its client went away before its body ended")


async def _unforeseen(request: Request, error: Exception) -> Response:
    log.error("api.request_crashed", extra={"path": request.url.path}, exc_info=error)
    return problem(500, "Internal", "the api failed on this request: its log has the traceback")


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
