"""Streams events as they happen: server-sent events."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Header, Query
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from ...fabric.contract.errors import InputError
from ..access.problems import Refused
from .context import Context

EVENT_ID = re.compile(r"[0-9]{1,18}(-[0-9]{1,18})?\Z")
RECONNECT_MS = 1_000


def router(context: Context) -> APIRouter:
    """Make the route /v1/events."""
    routes = APIRouter(prefix="/v1", tags=["read"])
    reader_count = 0

    async def stream(after: str | None) -> AsyncIterator[bytes]:
        yield f"retry: {RECONNECT_MS}\n: rollfab events\n\n".encode()
        async for batch in context.tail.stream(after, context.config.keep_alive_s):
            rows = [f"id: {event.event_id}\ndata: {event.model_dump_json()}\n\n" for event in batch]
            yield "".join(rows).encode() or b": still here\n\n"

    class Reserved(StreamingResponse):
        """A stream whose place was taken when it was granted, and is given up however it ends."""

        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            nonlocal reader_count
            try:
                await super().__call__(scope, receive, send)
            finally:
                reader_count -= 1

    @routes.get(
        "/events",
        response_class=StreamingResponse,
        responses={200: {"content": {"text/event-stream": {}}, "description": "Each message is an EventView"}},
    )
    async def events(
        last_event_id: Annotated[str | None, Header()] = None,
        after: Annotated[str | None, Query(description="where there is no Last-Event-ID; 0: all that is kept")] = None,
    ) -> StreamingResponse:
        """Stream events as they happen, after `Last-Event-ID` where one is given, else from now on."""
        nonlocal reader_count
        start = last_event_id or after
        if start is not None and not EVENT_ID.match(start):
            raise InputError(
                f"event id {start!r} is none of ours: give one that an event carried, or 0", event_id=start
            )
        limit = context.config.event_reader_count_max
        if reader_count >= limit:
            text = f"{limit} event streams are open, which is the limit: close one, or ask /v1/status instead"
            raise Refused(503, "TooManyReaders", text, limit=limit)
        answer = Reserved(stream(start), media_type="text/event-stream", headers={"x-accel-buffering": "no"})
        reader_count += 1  # last: nothing is awaited from the look at the limit to here
        return answer

    return routes
