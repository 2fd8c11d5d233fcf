"""A wire between a client and a server that can be slow, and that breaks wherever a test wants it to."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

CHUNK_BYTES = 65536


class TcpRelay:
    """Passes bytes between its own port and another one of 127.0.0.1.

    Attributes:
        request_delay_s: how long every piece of a request waits before it is passed on.
        reply_delay_s: the same for replies.
        request_bytes: called for each new connection: after so many bytes of requests it is cut; None: never.
        reply_bytes: the same for replies.
        cut_count: connections cut so far.
    """

    def __init__(self, server_port: int) -> None:
        self.request_delay_s = 0.0
        self.reply_delay_s = 0.0
        self.request_bytes: Callable[[], int] | None = None
        self.reply_bytes: Callable[[], int] | None = None
        self.cut_count = 0
        self.port = 0
        self._server_port = server_port
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        """Where clients connect to."""
        return f"redis://127.0.0.1:{self.port}/0"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, until either side ends it or it is cut."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        requests = self.request_bytes() if self.request_bytes else None
        replies = self.reply_bytes() if self.reply_bytes else None
        # Cancelled at the end of a test: asyncio would report that as an error of this connection.
        with contextlib.suppress(OSError, asyncio.CancelledError):
            from_server, to_server = await asyncio.open_connection("127.0.0.1", self._server_port)
            ways = [
                asyncio.ensure_future(self._pass(reader, to_server, requests, "request_delay_s")),
                asyncio.ensure_future(self._pass(from_server, writer, replies, "reply_delay_s")),
            ]
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
                for end in (to_server, writer):
                    end.transport.abort()  # a reset, as of a cable that was pulled; what was not sent is lost
        writer.transport.abort()

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, left: int | None, delay: str
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(CHUNK_BYTES):
                if delay_s := getattr(self, delay):
                    await asyncio.sleep(delay_s)
                if left is not None and len(data) >= left:
                    writer.write(data[:left])
                    await asyncio.sleep(0)  # out with what still may pass
                    self.cut_count += 1
                    return
                left = None if left is None else left - len(data)
                writer.write(data)
                await writer.drain()

    async def close(self) -> None:
        """Cut every connection."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@asynccontextmanager
async def tcp_relay(server_port: int) -> AsyncIterator[TcpRelay]:
    """A running relay to a port of this machine."""
    relay = TcpRelay(server_port)
    server = await asyncio.start_server(relay.serve, "127.0.0.1", 0)
    relay.port = int(server.sockets[0].getsockname()[1])
    try:
        yield relay
    finally:
        server.close()
        await relay.close()
