"""Bounds HTTP connections, so that slow, silent and many clients cost themselves alone.

- A request must be here, head and body, within `request_timeout_s` of its first byte, or of the connection's start, and
  may not pause for `silence_timeout_s`. Both hold for a body that comes after its answer, too.
- A client must read its answer: one that takes less than WRITE_STEP_BYTES within `write_timeout_s` is dropped.
- Above `connection_count_max` the oldest connection without a whole request makes room for a new one; where all are at
  work, the new one is refused with 503.
- Keep-alive connections without a request end after uvicorn's own five seconds.

h11 bounds the header's size (64 KiB), BodyLimit below the body's and that of all together; event streams have a count.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import h11
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from ...fabric.contract.limits import HTTP_BODY_BYTES_MAX
from .config import ListenConfig

log = logging.getLogger(__name__)

WRITE_STEP_BYTES = (
    64 << 10
)  # asyncio's own high-water mark: a client that takes less in the time counts as taking nothing
REFUSALS = {
    408: b"the request did not arrive whole in time: send it at once",
    503: b"every connection of this api is at work: try again in a second",
}
PHRASES = {408: b"Request Timeout", 503: b"Service Unavailable"}


def bounded_protocol(limits: ListenConfig) -> type[asyncio.Protocol]:
    """Make the protocol that uvicorn runs for each connection."""

    return type("Protocol", (BoundedProtocol,), {"limits": limits})


class BoundedProtocol(H11Protocol):
    """One connection. limits: set by `bounded_protocol`."""

    limits: ListenConfig

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.access_log = False  # whatever handlers uvicorn's logger has: a path may hold a session's key
        self._arriving: asyncio.TimerHandle | None = None
        self._heard_at_s = self._whole_until_s = 0.0  # of the loop's clock
        self._writing: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a connection in, if there is room for it."""
        super().connection_made(transport)
        if len(self.connections) > self.limits.connection_count_max and not self._make_room():
            log.warning("api.connection_refused", extra={"limit": self.limits.connection_count_max})
            self._refuse(503)
            return
        self._hear()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the timers."""
        self._stop_arriving()
        self._stop_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read on, and look whether the request is whole."""
        self._hear()
        super().data_received(data)
        self._look()

    def on_response_complete(self) -> None:
        """Look again: after an answer, a request that was sent ahead may have begun."""
        super().on_response_complete()
        self._look()

    def pause_writing(self) -> None:
        """Watch the client: more waits to be read than it takes."""
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        """Stop watching the client: it has read."""
        self._stop_writing()
        super().resume_writing()

    @property
    def is_at_work(self) -> bool:
        """True if a whole request is being answered."""
        return self.cycle is not None and not self.cycle.response_complete and not self.cycle.more_body

    @property
    def _is_arriving(self) -> bool:
        """True if more of a request must come; where none is under way, keep-alive has a clock of its own."""
        if self.cycle is None or not self.cycle.response_complete:
            return not self.is_at_work
        return self.conn.their_state is h11.SEND_BODY or bool(self.conn.trailing_data[0])

    def _hear(self) -> None:
        self._heard_at_s = self.loop.time()
        self._look()

    def _look(self) -> None:
        """Let the clock run exactly while a request arrives."""
        if self.transport.is_closing() or not self._is_arriving:
            self._stop_arriving()
        elif self._arriving is None:
            self._whole_until_s = self.loop.time() + self.limits.request_timeout_s
            self._watch_arrival()

    def _watch_arrival(self) -> None:
        now_s = self.loop.time()
        heard_at_s = now_s if self.flow.read_paused else self._heard_at_s  # we are the one who does not read
        due_s = min(self._whole_until_s, heard_at_s + self.limits.silence_timeout_s)
        if due_s > now_s:
            self._arriving = self.loop.call_at(due_s, self._watch_arrival)
            return
        self._arriving = None
        if not self.transport.is_closing():
            log.info("api.request_too_slow", extra={"silent_s": round(now_s - heard_at_s, 1)})
            self._refuse(408)

    def _refuse(self, status: int) -> None:
        """Answer, where no answer has begun, and close."""
        if self.conn.our_state is h11.IDLE or self.conn.our_state is h11.SEND_RESPONSE:
            text = REFUSALS[status]
            head = b"HTTP/1.1 %d %s\r\ncontent-type: text/plain\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
            self.transport.write(head % (status, PHRASES[status], len(text)) + text)
        self.transport.close()

    def _make_room(self) -> bool:
        """Close the connection that has waited longest without a whole request; False: all are at work."""
        waiting = [each for each in self.connections if isinstance(each, BoundedProtocol) and each is not self]
        idle = [each for each in waiting if not each.is_at_work]
        if not idle:
            return False
        oldest = min(idle, key=lambda each: each._whole_until_s if each._arriving else 0.0)
        self.connections.discard(oldest)
        oldest.transport.abort()
        return True

    def _watch_reader(self) -> None:
        self._stop_writing()
        left_bytes = self.transport.get_write_buffer_size()
        self._writing = self.loop.call_later(self.limits.write_timeout_s, self._check_reader, left_bytes)

    def _check_reader(self, left_bytes: int) -> None:
        if left_bytes - self.transport.get_write_buffer_size() >= WRITE_STEP_BYTES:
            self._watch_reader()
            return
        log.warning("api.slow_reader_dropped", extra={"timeout_s": self.limits.write_timeout_s})
        self.transport.abort()

    def _stop_arriving(self) -> None:
        if self._arriving is not None:
            self._arriving.cancel()
        self._arriving = None

    def _stop_writing(self) -> None:
        if self._writing is not None:
            self._writing.cancel()
        self._writing = None


# ---------------------------------------------------------------- body
#
# No request's body may be larger than HTTP_BODY_BYTES_MAX, whatever its header says of its length. It is refused where
# it is read, so that every application answers in its own words, and strangers before anything else.
# All bodies that are not whole yet share so many bytes. Who has one whole is bounded by the application.


TEXT = f"a request's body may have {HTTP_BODY_BYTES_MAX:,} bytes: send less at once, or a reference to a file"
CROWDED = "other requests whose bodies are still on their way take all the memory there is for them: try again"


class BodyLimit:
    """ASGI middleware; stands behind the guard, so strangers are refused before a byte is read.

    A body that comes in one piece is always taken.
    """

    def __init__(self, app: ASGIApp, arriving_bytes_max: int) -> None:
        self._app = app
        self._left_bytes = arriving_bytes_max

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "0")
        is_declared_large = declared.isdigit() and int(declared[:20]) > HTTP_BODY_BYTES_MAX
        size = held = 0

        async def receive_some() -> Message:
            nonlocal size, held
            if is_declared_large:
                raise HTTPException(413, TEXT)
            message = await receive()
            arrived = len(message.get("body", b""))
            size += arrived
            if size > HTTP_BODY_BYTES_MAX:
                raise HTTPException(413, TEXT)
            if message.get("more_body"):
                if arrived > self._left_bytes:
                    raise HTTPException(503, CROWDED, {"retry-after": "1"})
                self._left_bytes -= arrived
                held += arrived
            else:
                self._left_bytes += held
                held = 0
            return message

        try:
            await self._app(scope, receive_some, send)
        finally:
            self._left_bytes += held
