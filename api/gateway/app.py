"""The gateway as an ASGI application: routes, and how each request passes through.

A request's way: key → room → body → protocol → session → protocol. Every route under /v1 is also under /s/{session}/v1,
for clients to which only a base URL can be given. Addresses are never built from what a request says of its host.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from ...fabric.chat.image_parts import url_bytes
from ...fabric.contract.clock import SystemClock
from ...fabric.contract.errors import InputError
from ...fabric.contract.sampling import shown
from ...fabric.ports.sessions import Call, SessionFacts, Sessions, check_same_end
from ..access.connections import BodyLimit
from ..access.problems import Refused
from .body import Body, read_json
from .chat import CHAT, TEXT
from .config import GatewayConfig, check_gateway
from .dialect import Answered, Dialect
from .door import CallGate, unless_gone
from .messages import MESSAGES, read_count
from .problems import HEADERS, Shape, answer, anthropic_shape, openai_shape, problem_answer, problem_of, unrouted_answer
from .responses import RESPONSES

Handler = Callable[[Request], Awaitable[Response]]

DIALECTS = {"/chat/completions": CHAT, "/completions": TEXT, "/responses": RESPONSES, "/messages": MESSAGES}
KEY_LENGTH_MAX = 256  # of Idempotency-Key
IMAGE_BYTES_PER_TEXT_BYTE = 32  # that take as long: base64 and a digest beside a tokenizer
WAIT_S_DEFAULT, WAIT_S_MAX = 10.0, 300.0


def make_gateway(sessions: Sessions, config: GatewayConfig) -> FastAPI:
    """Make the application; `api.server.run` serves it.

    Raises:
        ConfigError: the settings are impossible, or not safe.
    """
    check_gateway(config)
    gate = CallGate(sessions, config, SystemClock())
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    model_routes = _model_routes(gate)
    app.include_router(model_routes, prefix="/v1")
    app.include_router(model_routes, prefix="/s/{session}/v1")
    app.include_router(_session_routes(gate, sessions, config))
    app.add_exception_handler(HTTPException, _unrouted)
    app.add_middleware(BodyLimit, arriving_bytes_max=config.arriving_bytes_max)
    return app


def _model_routes(gate: CallGate) -> APIRouter:
    routes = APIRouter()
    for path, dialect in DIALECTS.items():
        _add(routes, "POST", path, _complete(gate, dialect), dialect.shape)

    async def count_tokens(request: Request) -> Response:
        session = gate.session_of(request, may_be_key=True)
        async with gate.room_for(request):
            sent = await request.body()
            body = Body(read_json(sent))
            call = read_count(body)
            body.close()
            return answer({"input_tokens": await session.count(replace(call, size_bytes=_weight(call, sent)))})

    async def models(request: Request) -> Response:
        facts = gate.session_of(request, may_be_key=True).facts
        return answer({"object": "list", "data": [_model(facts)]})

    async def model(request: Request) -> Response:
        facts = gate.session_of(request, may_be_key=True).facts
        if request.path_params["model"] != facts.model:
            raise Refused(404, "model_not_found", "this session has another model: GET /v1/models names it")
        return answer(_model(facts))

    _add(routes, "POST", "/messages/count_tokens", count_tokens, anthropic_shape)
    _add(routes, "GET", "/models", models)
    _add(routes, "GET", "/models/{model:path}", model)
    return routes


def _complete(gate: CallGate, dialect: Dialect) -> Handler:
    async def complete(request: Request) -> Response:
        session = request.state.session = gate.session_of(request, may_be_key=True)
        async with gate.room_for(request):
            sent = await request.body()
            body = Body(read_json(sent))
            asked = dialect.read(body)
            body.close()
            key, is_repeated = _repetition_key(request), _is_repeated(request)
            call = replace(asked.call, key=key, is_repeated=is_repeated, size_bytes=_weight(asked.call, sent))
            reply = await unless_gone(request, session.ask(call))
        answered = Answered(asked=asked, reply=reply, model=session.facts.model)
        if asked.is_stream:
            return Response(b"".join(dialect.stream(answered)), headers=HEADERS, media_type="text/event-stream")
        return answer(dialect.whole(answered))

    return complete


def _session_routes(gate: CallGate, sessions: Sessions, config: GatewayConfig) -> APIRouter:
    routes = APIRouter()

    async def health(_: Request) -> Response:
        return answer({"status": "ok"})

    async def open_one(request: Request) -> Response:
        gate.check_creator(request)
        async with gate.room_for(request):
            body = Body(read_json(await request.body()))
            run_id, wait_s = body.required("run", str), _wait(body)
            body.close()
            opened = await unless_gone(request, sessions.open(run_id, wait_s=wait_s))
        facts = opened.session.facts
        paths = {"base_url_path": "/v1", "path": f"/s/{facts.session_id}/v1"}
        return answer({**_facts(facts), "key": opened.key, **paths}, 201)

    async def show(request: Request) -> Response:
        return answer(_facts(gate.session_of(request).facts))

    async def reward(request: Request) -> Response:
        session = gate.session_of(request)
        body = Body(read_json(await request.body()))
        value = _reward(body)
        if value is None:
            raise InputError("the request: reward is missing, expected a number", name="reward")
        body.close()
        session.reward(value)
        return answer(_facts(session.facts))

    async def end(request: Request) -> Response:
        if (facts := await gate.recorded(request)) is not None:  # the answer to its end was lost on the way
            said = await _read_end(request)
            check_same_end(facts, said["reward"], said["error"])
        else:
            session = gate.session_of(request)
            await session.end(**await _read_end(request))  # also if the client leaves: what has ended has ended
            facts = session.facts
        return answer({**_facts(facts), "state": "over"})

    _add(routes, "GET", "/healthz", health)
    if config.may_open:
        _add(routes, "POST", "/sessions", open_one)
    _add(routes, "GET", "/sessions/{session}", show)
    _add(routes, "POST", "/sessions/{session}/reward", reward)
    _add(routes, "POST", "/sessions/{session}/end", end)
    return routes


def _add(routes: APIRouter, method: str, path: str, handler: Handler, shape: Shape = openai_shape) -> None:
    """Add a route, which answers its errors, whatever they are, in its protocol's shape."""

    async def told(request: Request) -> Response:
        try:
            return await handler(request)
        except Exception as error:  # noqa: BLE001 - the call is answered; not logged, as it holds prompts
            problem = problem_of(error, path)
            if (session := getattr(request.state, "session", None)) is not None:
                session.note_refusal(f"{problem.status} {problem.code}: {problem.message}")
            return problem_answer(problem, shape)

    routes.add_route(path, told, methods=[method])


async def _unrouted(request: Request, error: Exception) -> Response:
    text = f"there is no route {request.method} {shown(request.url.path)}: a base URL ends with /v1 for OpenAI's "
    return unrouted_answer(error, f"{text}clients, and before it for Anthropic's")


async def _read_end(request: Request) -> dict[str, Any]:
    body = Body(read_json(await request.body()))
    said = {"reward": _reward(body), "info": body.optional("info", dict), "error": body.optional("error", str)}
    body.close()
    return said


def _facts(facts: SessionFacts) -> dict[str, Any]:
    return {
        "session": facts.session_id,
        "state": "open",
        "run": facts.run_id,
        "group": facts.group_id,
        "model": facts.model,
        "task": facts.task,
        "seed": facts.seed,
        "attempt": facts.attempt,
        "calls": facts.call_count,
        "calls_max": facts.call_count_max,
        "reward": facts.reward,
        "idle_s": facts.idle_s_max,
    }


def _model(facts: SessionFacts) -> dict[str, Any]:
    return {"id": facts.model, "object": "model", "created": 0, "owned_by": "rollfab"}


def _repetition_key(request: Request) -> str:
    key = request.headers.get("idempotency-key", "")
    if len(key) > KEY_LENGTH_MAX:
        raise InputError(f"Idempotency-Key has {len(key):,} characters, the limit is {KEY_LENGTH_MAX}")
    return key


def _is_repeated(request: Request) -> bool:
    count = request.headers.get("x-stainless-retry-count", "0")
    return count.isdigit() and count.strip("0") != ""


def _weight(call: Call, sent: bytes) -> int:
    """Return how large a request is for who tokenises it: an image's bytes are only decoded, which takes far less."""
    urls = url_bytes(call.messages or ())
    return len(sent) - urls + urls // IMAGE_BYTES_PER_TEXT_BYTE


def _wait(body: Body) -> float:
    value = body.take("wait_s")
    if value is None:
        return WAIT_S_DEFAULT
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= WAIT_S_MAX:
        raise InputError(f"the request: wait_s is {shown(value)}, expected 0 to {WAIT_S_MAX:g}", name="wait_s")
    return float(value)


def _reward(body: Body) -> float | None:
    value = body.take("reward")
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise InputError(f"the request: reward is {shown(value)}, expected a number", name="reward")
    return None if value is None else float(value)
