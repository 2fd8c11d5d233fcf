"""Errors as clients of OpenAI and Anthropic expect them: which status, which words, and what stays inside.

- What the client asked for and cannot have is said in full, but for addresses. What goes wrong here has a fixed text:
  it would name workers and brokers. The log has the rest, but no text of an error that nobody foresaw: it may quote a
  prompt.
- A path may hold a key, so neither answers nor the log repeat one.
"""

from __future__ import annotations

import logging
import re
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from ...fabric.contract.errors import (
    BrokerError,
    BrokerFull,
    ClaimLost,
    ConfigError,
    EngineError,
    EngineUnsupported,
    FabricError,
    InputError,
    LayoutMismatch,
    PayloadTooLarge,
    QueueFull,
    RunUnknown,
    VersionConflict,
    VersionUnmet,
)
from ...fabric.contract.text import one_line
from ..access.problems import Refused
from ..access.words import Words

log = logging.getLogger(__name__)

ADDRESS = re.compile(r"\b(?!tinker://)[a-z][a-z+]*://[^\s'\"]+")
WORDS = Words(  # for next steps that the library tells in Python's words
    {
        r"create it(?: again)? with fabric\.run\(…\)": "have whoever trains or serves it create it",
        r"(?:Push tasks|push more tasks): run\.submit\([^()]*\)": "send requests",
        r"for group in run\.groups\(\): …, or ": "",
        r", ask at once as consumer=\"[^\"]*\", or with a shorter groups\(takeover=…\)": "",
        r"run\.publish\(model\.named_parameters\(\), version=0\)": "POST /update_weights_from_disk, with model_path",
    },
    {"allow_nonfinite": "allow_nonfinite", "version": "weight_version"},
)
WITHOUT_NUMBERS = (
    "the weights give no numbers for it. Look at the published weights for NaN and infinity, and publish others"
)
HEADERS = {"cache-control": "no-store", "x-content-type-options": "nosniff"}
TYPES: dict[int, tuple[str, str]] = {  # status → OpenAI's and Anthropic's type of error
    401: ("authentication_error", "authentication_error"),
    404: ("not_found_error", "not_found_error"),
    413: ("invalid_request_error", "request_too_large"),
    429: ("rate_limit_error", "rate_limit_error"),
    500: ("server_error", "api_error"),
    502: ("server_error", "api_error"),
    503: ("server_error", "overloaded_error"),
}
OTHER_TYPES = ("invalid_request_error", "invalid_request_error")
GONE = 499  # the client has closed the connection: nobody reads it


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One error as it is answered. param: which field of the request it is about. retry_s: when to try again."""

    status: int
    code: str
    message: str
    param: str | None = None
    retry_s: int | None = None


class ClientGone(Exception):
    """The client has closed its connection before its answer was there."""


def openai_shape(problem: Problem) -> dict[str, Any]:
    """Return the body of an error in OpenAI's form."""
    kind = TYPES.get(problem.status, OTHER_TYPES)[0]
    return {"error": {"message": problem.message, "type": kind, "param": problem.param, "code": problem.code}}


def anthropic_shape(problem: Problem) -> dict[str, Any]:
    """Return the body of an error in Anthropic's form."""
    kind = TYPES.get(problem.status, OTHER_TYPES)[1]
    return {"type": "error", "error": {"type": kind, "message": problem.message}}


Shape = Callable[[Problem], dict[str, Any]]


def answer(body: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Make an answer of JSON, which nobody on the way keeps."""
    return Response(orjson.dumps(body), status, {**HEADERS, **(headers or {})}, "application/json")


def problem_answer(problem: Problem, shape: Shape = openai_shape) -> Response:
    """Make the answer that tells a problem."""
    headers = {"www-authenticate": 'Bearer realm="rollfab"'} if problem.status == 401 else {}
    if problem.retry_s is not None:
        headers["retry-after"] = str(problem.retry_s)
    return answer(shape(problem), problem.status, headers)


def problem_of(error: Exception, where: str) -> Problem:
    """Say which problem a client has with an error. where: the route, for the log."""
    if isinstance(error, Refused):
        return Problem(status=error.status, code=error.error, message=error.message, retry_s=error.facts.get("retry_s"))
    if isinstance(error, HTTPException):
        return _of_http(error)
    if isinstance(error, ClientGone | ClientDisconnect):
        return Problem(status=GONE, code="client_gone", message="the client has gone")
    if isinstance(error, FabricError):
        return _of_request(error) or _of_fabric(error, where)
    frames = "".join(traceback.format_tb(error.__traceback__))
    log.error("gateway.request_crashed", extra={"route": where, "error": type(error).__name__, "frames": frames})
    return Problem(status=500, code="internal_error", message="the gateway failed on this request: its log says more")


def unrouted_answer(error: Exception, text: str) -> Response:
    """Make the answer to a request that no route takes. text: says so, and the next step, if there is no such path."""
    problem = problem_of(error, "none")
    response = problem_answer(replace(problem, message=text) if problem.status == 404 else problem)
    if isinstance(error, HTTPException):
        response.headers.update(error.headers or {})
    return response


def _of_http(error: HTTPException) -> Problem:
    codes = {404: "not_found", 405: "method_not_allowed", 413: "payload_too_large", 503: "unavailable"}
    texts = {405: "this route does not take this method"}
    status, text = error.status_code, texts.get(error.status_code, error.detail)
    code, retry_s = codes.get(status, "invalid_request"), 1 if status == 503 else None
    return Problem(status=status, code=code, message=text, retry_s=retry_s)


def _of_request(error: FabricError) -> Problem | None:
    """Return the problem with what was asked for; None: the request is not to blame."""
    text = ADDRESS.sub("(address)", one_line(WORDS.say(error.message)))
    param = error.facts.get("name")
    if error.facts.get("is_over_context"):
        return Problem(status=400, code="context_length_exceeded", message=text, param="messages")
    if error.facts.get("is_conflict"):
        return Problem(status=409, code="conflict", message=text, param=param if isinstance(param, str) else None)
    if isinstance(error, PayloadTooLarge):
        return Problem(status=413, code="payload_too_large", message=text)
    if isinstance(error, RunUnknown):
        return Problem(status=404, code="run_unknown", message=text, param="run")
    if isinstance(error, QueueFull):
        if error.facts.get("is_final"):  # 429 would have clients try again, again and again
            return Problem(status=400, code="budget_exhausted", message=text)
        return Problem(status=429, code="rate_limit_exceeded", message=text, retry_s=1)
    if isinstance(error, VersionUnmet):
        return Problem(status=409, code="version_unmet", message=text, param="weight_version", retry_s=1)
    if isinstance(error, InputError | ConfigError | EngineUnsupported | LayoutMismatch | VersionConflict):
        return Problem(
            status=400, code="invalid_request", message=text, param=param if isinstance(param, str) else None
        )
    return None


def _of_fabric(error: FabricError, where: str) -> Problem:
    if isinstance(error, ClaimLost):
        return Problem(status=410, code="session_over", message="the session is over: its key is worth nothing now")
    facts = {"route": where, "error": type(error).__name__, "message_text": one_line(error.message)[:500]}
    log.warning("gateway.request_failed", extra=facts)
    if isinstance(error, BrokerError):
        why = "is at its memory limit" if isinstance(error, BrokerFull) else "does not answer"
        return Problem(status=503, code="unavailable", message=f"the broker {why}: try again", retry_s=1)
    if isinstance(error, EngineError):
        step = WITHOUT_NUMBERS if error.facts.get("of_weights") else "try again"
        return Problem(status=502, code="engine_failed", message=f"the engine failed on this request: {step}")
    return Problem(status=500, code="internal_error", message="the gateway failed on this request: its log says more")
