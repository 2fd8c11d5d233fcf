"""An engine's HTTP as an ASGI application: which routes there are, and how each request passes through.

A request's way: key → room → body → protocol → fleet → protocol. Every route is also under /k/{key}, for clients that
can be given a base URL and no header.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import APIRouter, FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from ...fabric.contract.clock import Clock, SystemClock
from ...fabric.contract.ids import new_request_id
from ...fabric.contract.sampling import shown
from ...fabric.host.helpers import end_all
from ...fabric.ports.inference import Completions, Inference, Prompt, ServerFacts
from ..access.connections import BodyLimit
from ..gateway.config import GatewayConfig, check_gateway
from ..gateway.door import CallGate, unless_gone
from ..gateway.problems import answer, problem_answer, problem_of, unrouted_answer
from . import sglang, vllm
from .control import CONTROLS, REFUSED, Control
from .fields import read_body, session_of
from .samplers import SAMPLERS, Samplers

log = logging.getLogger(__name__)

Handler = Callable[[Request], Awaitable[Response]]
OPEN = ("/health", "/health_generate", "/ping")  # without a key: what starts a trainer waits for them
TEXT_TOKEN_COUNT = 4096  # above it text is made beside the loop


def make_inference(inference: Inference, config: GatewayConfig) -> FastAPI:
    """Make the application; `api.server.run` serves it.

    Raises:
        ConfigError: the settings are impossible, or not safe.
    """
    check_gateway(config)
    clock = SystemClock()
    gate = CallGate(NO_SESSIONS, config, clock)
    samplers = Samplers(inference, gate)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await samplers.close()

    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False, lifespan=lifespan)
    routes = _Routes(inference, samplers, gate, clock).all()
    app.include_router(routes)
    app.include_router(routes, prefix="/k/{key}")
    app.add_exception_handler(HTTPException, _unrouted)
    app.add_middleware(BodyLimit, arriving_bytes_max=config.arriving_bytes_max)
    return app


class _NoSessions:
    """The sessions of a gate that lets nobody in but by a creator's key: none."""

    def find(self, _: str) -> None:
        return None

    async def find_recorded(self, _: str) -> None:
        return None


NO_SESSIONS = _NoSessions()


class _Routes:
    """The routes, and what each does."""

    def __init__(self, inference: Inference, samplers: Samplers, gate: CallGate, clock: Clock) -> None:
        self._inference = inference
        self._samplers = samplers
        self._clock = clock
        self._gate = gate
        self._control = Control(inference)

    def all(self) -> APIRouter:
        """List them."""
        routes = APIRouter()
        for path in OPEN:
            _add(routes, ("GET",), path, self._health)
        self._guard(routes, ("POST",), "/inference/v1/generate", self._generate)
        self._guard(routes, ("POST",), "/v1/completions", self._completions)
        self._guard(routes, ("POST",), "/generate", self._sglang)
        self._guard(routes, ("POST",), "/detokenize", self._detokenize)
        self._guard(routes, ("GET",), "/v1/models", self._models)
        for methods, path, name in CONTROLS:
            self._guard(routes, methods, path, getattr(self._control, name))
        for methods, path, name in SAMPLERS:
            self._guard(routes, methods, path, getattr(self._samplers, name))
        for path in REFUSED:
            self._guard(routes, ("POST", "GET"), path, self._control.refuse)
        return routes

    def _guard(self, routes: APIRouter, methods: tuple[str, ...], path: str, handler: Handler) -> None:
        async def guarded(request: Request) -> Response:
            self._gate.check_creator(request)
            return await handler(request)

        _add(routes, methods, path, guarded)

    async def _health(self, _: Request) -> Response:
        return answer({"status": "ok"})

    async def _generate(self, request: Request) -> Response:
        async with self._gate.room_for(request):
            asked = await read_body(request, vllm.read_generate)
            made = await self._made(request, asked.prompt)
        return answer(vllm.generated(asked, made, self._head(), asked.prompt.request_id or new_request_id()))

    async def _completions(self, request: Request) -> Response:
        async with self._gate.room_for(request):
            asked = await read_body(request, vllm.read_completions)
            made = await self._made(request, asked.prompt)
        name = asked.prompt.request_id or f"cmpl-{new_request_id()}"
        return answer(vllm.completed(asked, made, self._head(), name, await self._texts(made)))

    async def _sglang(self, request: Request) -> Response:
        async with self._gate.room_for(request):
            asked = await read_body(request, sglang.read_generate)
            asked = replace(asked, prompts=[_with_id(each) for each in asked.prompts])
            session = session_of(request)
            work = [self._inference.generate(replace(each, session=session)) for each in asked.prompts]
            made = await unless_gone(request, _all(work))
        return answer(sglang.entries(asked, made, [await self._texts(each) for each in made]))

    async def _made(self, request: Request, prompt: Prompt) -> Completions:
        work = self._inference.generate(replace(prompt, session=session_of(request)))
        return await unless_gone(request, work)

    async def _texts(self, completions: Completions) -> list[str]:
        return [await self._text(made.token_ids) for made in completions.made]

    async def _text(self, ids: Sequence[int]) -> str:
        is_long = len(ids) > TEXT_TOKEN_COUNT
        return await asyncio.to_thread(self._inference.text_of, ids) if is_long else self._inference.text_of(ids)

    async def _detokenize(self, request: Request) -> Response:
        async with self._gate.room_for(request):
            ids = await read_body(request, partial(vllm.read_detokenize, self._inference.vocabulary_size))
            return answer({"prompt": await self._text(ids)})

    def _head(self) -> dict[str, Any]:
        return {"model": self._inference.model, "created": self._clock.wall_ms() // 1000}

    async def _models(self, _: Request) -> Response:
        return answer({"object": "list", "data": [_model(await self._inference.facts())]})


def _model(facts: ServerFacts) -> dict[str, Any]:
    card: dict[str, Any] = {"id": facts.model, "object": "model", "created": 0, "owned_by": "rollfab"}
    return {**card, "root": facts.model, "parent": None, "max_model_len": facts.context_tokens_max or None}


async def _all(work: list[Coroutine[Any, Any, Completions]]) -> list[Completions]:
    """Return what all of these return; if one fails, nobody needs the others."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await end_all(tasks)


def _with_id(prompt: Prompt) -> Prompt:
    return prompt if prompt.request_id else replace(prompt, request_id=new_request_id())


def _add(routes: APIRouter, methods: tuple[str, ...], path: str, handler: Handler) -> None:
    """Add a route, which answers its errors, whatever they are, in OpenAI's shape, as vLLM and SGLang do."""

    async def told(request: Request) -> Response:
        try:
            return await handler(request)
        except Exception as error:  # noqa: BLE001 - the call is answered; not logged, as it holds prompts
            return problem_answer(problem_of(error, path))

    routes.add_route(path, told, methods=list(methods))


async def _unrouted(request: Request, error: Exception) -> Response:
    text = f"there is no route {request.method} {shown(_path_of(request))}: docs/inference.md lists them"
    return unrouted_answer(error, text)


def _path_of(request: Request) -> str:
    """Return a path without the key that may be in it."""
    path = request.url.path
    return f"/k/…/{path.split('/', 3)[-1]}" if path.startswith("/k/") else path
