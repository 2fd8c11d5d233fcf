"""A way between a client and a server that can be slow, held up, or cut wherever a test or a bench wants it to be.

- `cut`: every connection is reset, with whatever was under way in either direction; new ones are reset as they come.
- `hold`: nothing passes in either direction, as when the network drops every packet; new connections hang. Afterwards
  what was sent arrives late, as a TCP that sends it again would have it.
- Both are counted by reason, so that two who harm it do not heal each other's harm.
- All else passes unchanged, with back-pressure. Runs on the event loop of whoever starts it.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import struct
from collections.abc import Callable, Iterable

CHUNK_BYTES = 65536
RESET = struct.pack("ii", 1, 0)  # SO_LINGER of 0 s: closing sends a reset and drops what was not yet sent


class Relay:
    """Listens on a port of 127.0.0.1, with TLS if it is given a context, and passes everything on to another port.

    Attributes:
        request_delay_s: how long every piece of a request waits before it is passed on.
        reply_delay_s: the same for replies.
        request_bytes: called for each new connection: after so many bytes of requests it is cut; None: never.
        reply_bytes: the same for replies.
        cut_count: connections cut so far at such a number of bytes.
    """

    def __init__(self, target_port: int, *, tls: ssl.SSLContext | None = None) -> None:
        self.request_delay_s = self.reply_delay_s = 0.0
        self.request_bytes: Callable[[], int] | None = None
        self.reply_bytes: Callable[[], int] | None = None
        self.cut_count = 0
        self.port = 0
        self._target_port = target_port
        self._tls = tls
        self._server: asyncio.Server | None = None
        self._open: dict[asyncio.Task[None] | None, list[asyncio.StreamWriter]] = {}  # who serves it → its ends
        self._cut_by: set[str] = set()
        self._held_by: set[str] = set()
        self._passing = asyncio.Event()

    async def start(self) -> int:
        """Returns the port it listens on."""
        self._passing.set()
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._tls)
        self.port = int(self._server.sockets[0].getsockname()[1])
        return self.port

    async def close(self) -> None:
        """Stop listening, reset what is open."""
        assert self._server is not None
        self._server.close()
        tasks = [task for task in self._open if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # transports close in the next round of the loop

    async def __aenter__(self) -> Relay:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def url(self) -> str:
        """Where clients connect to."""
        return f"redis://127.0.0.1:{self.port}/0"

    def cut(self, reason: str) -> None:
        """Reset every connection, and every new one until `heal`."""
        self._cut_by.add(reason)
        for ends in self._open.values():
            _reset(ends)

    def hold(self, reason: str) -> None:
        """Let nothing pass until `heal`."""
        self._held_by.add(reason)
        self._passing.clear()

    def heal(self, reason: str) -> None:
        """Take one reason back. Without any everything passes again, and what was held up first."""
        self._cut_by.discard(reason)
        self._held_by.discard(reason)
        if not self._held_by:
            self._passing.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, until either side ends it or it is cut."""
        ends, task = [writer], asyncio.current_task()
        if self._cut_by:
            _reset(ends)
            return
        self._open[task] = ends
        try:
            # Cancelled as it closes: asyncio would report that as an error of this connection.
            with contextlib.suppress(OSError, asyncio.CancelledError):
                await self._passing.wait()
                server = await asyncio.open_connection("127.0.0.1", self._target_port)
                ends.append(server[1])
                if await self._pass_both(reader, writer, server):
                    for end in ends:
                        end.close()  # once what was passed on is sent
                    return
            _reset(ends)
        finally:
            del self._open[task]

    async def _pass_both(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        server: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    ) -> bool:
        """Pass on in both directions until one has ended; returns whether its sender ended it."""
        requests, replies = (each() if each else None for each in (self.request_bytes, self.reply_bytes))
        ways = [
            asyncio.ensure_future(self._pass(reader, server[1], requests, "request_delay_s")),
            asyncio.ensure_future(self._pass(server[0], writer, replies, "reply_delay_s")),
        ]
        try:
            done, _ = await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            return all(way.result() for way in done)
        finally:
            for way in ways:
                way.cancel()

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, left: int | None, delay: str
    ) -> bool:
        with contextlib.suppress(OSError):
            while data := await reader.read(CHUNK_BYTES):
                if delay_s := getattr(self, delay):
                    await asyncio.sleep(delay_s)
                await self._passing.wait()
                if left is not None and len(data) >= left:
                    writer.write(data[:left])
                    await asyncio.sleep(0)  # out with what still may pass
                    self.cut_count += 1
                    return False
                left = None if left is None else left - len(data)
                writer.write(data)
                await writer.drain()
        return True


def _reset(ends: Iterable[asyncio.StreamWriter]) -> None:
    for end in ends:
        raw = end.get_extra_info("socket")
        if raw is not None and raw.fileno() >= 0:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        end.transport.abort()
