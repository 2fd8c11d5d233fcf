"""A gateway over fake sessions, served by uvicorn on loopback in the test's own loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from rollfab.api.gateway.app import make_gateway
from rollfab.api.gateway.config import GatewayConfig
from rollfab.api.server import run
from tests.support.fake_sessions import KEY, FakeSessions

CREATOR_KEY = "a-key-that-opens-sessions"


@pytest.fixture
def sessions() -> FakeSessions:
    return FakeSessions()


@pytest.fixture
async def base(sessions: FakeSessions) -> AsyncIterator[str]:
    """The gateway's address, with a slash at its end."""
    async with gateway(sessions) as address:
        yield address


@contextlib.asynccontextmanager
async def gateway(sessions: FakeSessions, **settings: Any) -> AsyncIterator[str]:
    """Serve one with these settings; gives its address, with a slash at its end."""
    stop, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
    config = GatewayConfig(port=0, creator_keys=(CREATOR_KEY,), **settings)
    serving = asyncio.create_task(run(make_gateway(sessions, config), config, stop, on_ready=ready.set_result))
    await asyncio.wait((serving, ready), return_when=asyncio.FIRST_COMPLETED)
    if serving.done():
        await serving
    yield await ready
    stop.set()
    await serving


@pytest.fixture
async def client(base: str) -> AsyncIterator[openai.AsyncOpenAI]:
    """The unmodified client of OpenAI, before that gateway."""
    async with openai.AsyncOpenAI(base_url=f"{base}v1", api_key=KEY, max_retries=0) as made:
        yield made
