"""The api as an ASGI application, put together from its parts; nothing global, so a process may hold several.

A request's way: access check (who may come in) → body limit → route → status reader (one shared reading) or board →
model → JSON.
While the application lives, two tasks run: one follows the events, one takes a sample per second for rates.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Security
from fastapi.security import HTTPBearer

from .. import __version__
from ..fabric.contract.clock import Clock, SystemClock
from ..fabric.host.helpers import end_all
from ..fabric.model.shown_tokens import Tokenizers
from .access.auth import AccessCheck
from .access.config import ApiConfig, check_config
from .access.connections import BodyLimit
from .access.problems import install_problems, known_parameters
from .metrics.scrape import Scraper
from .page import PageFiles, page_router
from .reading.events import EventTail
from .reading.status import Ports, StatusReader
from .reading.weights import WeightReader
from .routes import dead, events, health, history, lending, read, trajectories
from .routes.context import Context
from .schemas.answers import Problem
from .schemas.base import all_requests
from .training.words import TRAINING

log = logging.getLogger(__name__)

DESCRIPTION = "Runs, workers, leases and weights of a rollout fabric: to watch, and to lend GPUs or take them back."
ERRORS: dict[int | str, dict[str, Any]] = {
    422: {"model": Problem, "description": "Bad input"},
    503: {"model": Problem, "description": "No broker"},
}


def make_app(ports: Ports, config: ApiConfig, *, training: APIRouter | None = None) -> FastAPI:
    """Make the application.

    Args:
        ports: an open connection, which stays the caller's to close. Open it with a short patience (1 s): what the
            broker cannot answer within `broker_timeout_s` is reported, not waited for.
        config: checked here.
        training: the routes for trainers (api/training), where it serves any.

    Raises:
        ConfigError: the settings are impossible, or not safe without keys.
    """
    check_config(config)
    context = make_context(ports, config, SystemClock())
    app = Api(
        title="rollfab",
        version=__version__,
        description=DESCRIPTION,
        docs_url=None,  # the stock page loads its scripts from elsewhere; `_pages` has one of our own
        redoc_url=None,
        lifespan=_lifespan(context),
        responses=ERRORS,
        dependencies=[
            Depends(known_parameters),
            *([Security(HTTPBearer(auto_error=False))] if config.has_keys else []),  # says so in the documentation
        ],
    )
    app.state.context = context
    for routes in (health, read, trajectories, history, dead, events, lending):
        app.include_router(routes.router(context))
    if training is not None:
        app.include_router(training)
    files = PageFiles()
    app.include_router(page_router(files))
    app.mount("/static", files, name="static")
    install_problems(app, TRAINING)
    app.add_middleware(BodyLimit, arriving_bytes_max=config.arriving_bytes_max)
    app.add_middleware(AccessCheck, config=config)
    return app


class Api(FastAPI):
    """FastAPI, with a description that says of every answer that it carries all of its fields, as it does."""

    def openapi(self) -> dict[str, Any]:
        """Describe the api; pydantic calls optional what has a default, though it is always written."""
        document = super().openapi()
        requests = {each.__name__ for each in all_requests()}
        for name, schema in document["components"]["schemas"].items():
            if name not in requests:
                schema["required"] = list(schema["properties"])
        return document


def make_context(ports: Ports, config: ApiConfig, clock: Clock) -> Context:
    """Make the context that the routes share."""
    tail = EventTail(ports.board, clock)
    weights = WeightReader(ports.weights)
    status = StatusReader(ports, tail=tail, weights=weights, config=config, clock=clock)
    scraper, tokenizers = Scraper(status, ports.board, timeout_s=config.broker_timeout_s), Tokenizers()
    return Context(
        ports=ports, config=config, tail=tail, weights=weights, status=status, scraper=scraper, tokenizers=tokenizers
    )


def _lifespan(context: Context) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(context.tail.run()), asyncio.create_task(context.status.watch())]
        for task in tasks:
            task.add_done_callback(_say_if_crashed)
        try:
            yield
        finally:
            context.tail.close()
            await end_all(tasks)

    return lifespan


def _say_if_crashed(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        log.error("api.task_crashed", exc_info=task.exception())
