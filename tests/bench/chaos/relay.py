"""A process' own way to the broker, which can be cut, or held up.

- `cut`: every connection is reset, with whatever was under way in either direction; new ones are reset as they come.
- `hold`: nothing passes in either direction, as when the network drops every packet; new connections hang. Afterwards
  what was sent arrives late, as a TCP that sends it again would have it.
- Both are counted by reason, so that two who harm it do not heal each other's harm.
- All else passes unchanged, with back-pressure. Runs on the event loop of whoever starts it.
"""

from __future__ import annotations

import asyncio
import socket
import struct

RESET = struct.pack("ii", 1, 0)  # SO_LINGER of 0 s: closing sends a reset and drops what was not yet sent


class Relay:
    """Listens on a port of 127.0.0.1 and passes everything on to another one."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._server: asyncio.Server | None = None
        self._inner: set[_Inner] = set()
        self._connecting: set[asyncio.Task[None]] = set()
        self._cut_by: set[str] = set()
        self._held_by: set[str] = set()
        self._passing = asyncio.Event()

    async def start(self) -> int:
        """Returns the port it listens on."""
        self._passing.set()
        self._server = await asyncio.get_running_loop().create_server(lambda: _Inner(self), "127.0.0.1", 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def close(self) -> None:
        """Stop listening, reset what is open."""
        assert self._server is not None
        self._server.close()
        for task in self._connecting:
            task.cancel()
        self._reset_all()

    @property
    def connection_count(self) -> int:
        """Connections that are open on the side of the process."""
        return len(self._inner)

    def cut(self, reason: str) -> None:
        """Reset every connection, and every new one until `heal`."""
        self._cut_by.add(reason)
        self._reset_all()

    def hold(self, reason: str) -> None:
        """Let nothing pass until `heal`."""
        self._held_by.add(reason)
        self._passing.clear()
        self._follow()

    def heal(self, reason: str) -> None:
        """Take one reason back. Without any everything passes again, and what was held up first."""
        self._cut_by.discard(reason)
        self._held_by.discard(reason)
        if not self._held_by:
            self._passing.set()
            self._follow()

    @property
    def is_held(self) -> bool:
        """Whether nothing passes now."""
        return bool(self._held_by)

    def _reset_all(self) -> None:
        for inner in list(self._inner):
            inner.reset()

    def _follow(self) -> None:
        for inner in self._inner:
            inner.follow()
            if inner.peer is not None:
                inner.peer.follow()

    def _admit(self, inner: _Inner) -> None:
        """A process has connected."""
        if self._cut_by:
            inner.reset()
            return
        self._inner.add(inner)
        task = asyncio.ensure_future(self._connect(inner))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _connect(self, inner: _Inner) -> None:
        await self._passing.wait()
        try:
            loop = asyncio.get_running_loop()
            await loop.create_connection(lambda: _Side(self, inner), "127.0.0.1", self._target_port)
        except OSError:  # the broker is away: so is this way to it
            inner.reset()
        if inner.is_over and inner.peer is not None:
            inner.peer.reset()

    def forget(self, inner: _Inner) -> None:
        """The process' side of a connection is over."""
        self._inner.discard(inner)


class _Side(asyncio.Protocol):
    """One of the two ends of a connection through a relay; this one is the broker's."""

    def __init__(self, relay: Relay, peer: _Side | None) -> None:
        self.relay = relay
        self.peer = peer
        self.is_over = False
        self._transport: asyncio.Transport | None = None
        self._is_peer_full = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Connected to the broker: from here on everything passes."""
        assert isinstance(transport, asyncio.Transport)
        assert self.peer is not None
        self._transport = transport
        self.peer.peer = self
        self.follow()
        self.peer.follow()

    def data_received(self, data: bytes) -> None:
        """Pass it on."""
        if self.peer is not None and self.peer._transport is not None:
            self.peer._transport.write(data)

    def pause_writing(self) -> None:
        """This end takes no more: stop reading at the other one."""
        if self.peer is not None:
            self.peer._is_peer_full = True
            self.peer.follow()

    def resume_writing(self) -> None:
        """This end takes more."""
        if self.peer is not None:
            self.peer._is_peer_full = False
            self.peer.follow()

    def connection_lost(self, error: Exception | None) -> None:
        """One end is gone: close the other one too, when what was passed on is sent."""
        self.is_over = True
        if self.peer is not None and self.peer._transport is not None:
            self.peer._transport.close()

    def follow(self) -> None:
        """Read, or leave it to the kernel to hold the sender up."""
        if self._transport is None or self._transport.is_closing():
            return
        if self.peer is None or self.relay.is_held or self._is_peer_full:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def reset(self) -> None:
        """End both sides at once."""
        for side in (self, self.peer):
            if side is not None and side._transport is not None:
                _reset(side._transport)


class _Inner(_Side):
    """The process' end."""

    def __init__(self, relay: Relay) -> None:
        super().__init__(relay, None)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for the other end, reading nothing."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.follow()
        self.relay._admit(self)

    def connection_lost(self, error: Exception | None) -> None:
        """As the other end; and it counts no more."""
        super().connection_lost(error)
        self.relay.forget(self)


def _reset(transport: asyncio.Transport) -> None:
    raw = transport.get_extra_info("socket")
    if raw is not None and raw.fileno() >= 0:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    transport.abort()
