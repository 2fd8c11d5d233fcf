"""A fake of an OpenAI-compatible serving engine: makes no tokens, sends events at known times, misbehaves on demand."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

CONTEXT_TOKENS = 4096


@dataclass
class SseServer:
    """Answers /v1/completions and /v1/chat/completions with as many tokens as were asked for.

    Attributes:
        gap_s: the wait before the token with that index.
        tokens_per_event: how many tokens an event brings.
        cut_after: by prompt: after so many tokens its connection is cut; None: never.
        short_by: so many tokens fewer than asked for come.
        has_end: whether streams end with [DONE].
        failure: sent as the last event of every stream.
        status: of every answer.
        has_stalled: while set, nothing is sent; `goes_on` ends it.
        arrived_at_s: when each request arrived, of the monotonic clock. bodies: what each asked for.
    """

    url: str = ""
    gap_s: Callable[[int], float] = lambda index: 0.0
    tokens_per_event: int = 1
    cut_after: Callable[[dict[str, Any]], int | None] = lambda body: None
    short_by: int = 0
    has_end: bool = True
    failure: str = ""
    status: int = 200
    goes_on: asyncio.Event = field(default_factory=asyncio.Event)
    arrived_at_s: list[float] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    connections: set[Any] = field(default_factory=set)
    keys: set[str | None] = field(default_factory=set)

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "fake", "max_model_len": CONTEXT_TOKENS}]})

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.arrived_at_s.append(time.monotonic())
        self.connections.add(request.transport)
        self.keys.add(request.headers.get("Authorization"))
        body = await request.json()
        self.bodies.append(body)
        if self.status != 200:
            return web.json_response({"error": {"message": "no room"}}, status=self.status)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await self.goes_on.wait()
        is_chat = "messages" in body
        if is_chat:
            await _send(response, {"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        cut_after, count = self.cut_after(body), body["max_tokens"] - self.short_by
        for index in range(0, count, self.tokens_per_event):
            if cut_after is not None and index >= cut_after:
                assert request.transport is not None
                request.transport.abort()
                return response
            await asyncio.sleep(self.gap_s(index))
            await _send(response, {"choices": [{"delta": {"content": "x"}} if is_chat else {"text": ""}]})
        if self.failure:
            await _send(response, {"error": {"message": self.failure}})
        else:
            await _send(response, {"choices": [], "usage": {"completion_tokens": count}})
        if self.has_end:
            await response.write(b"data: [DONE]\n\n")
        return response


async def _send(response: web.StreamResponse, event: dict[str, Any]) -> None:
    await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")


@asynccontextmanager
async def sse_server() -> AsyncIterator[SseServer]:
    """A server on a free port of this machine. It answers at once, unless told otherwise."""
    server = SseServer()
    server.goes_on.set()
    app = web.Application()
    app.router.add_get("/v1/models", server.models)
    app.router.add_post("/v1/completions", server.answer)
    app.router.add_post("/v1/chat/completions", server.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield server
    finally:
        await runner.cleanup()
