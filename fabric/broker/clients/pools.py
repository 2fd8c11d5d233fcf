"""Connection pools to one broker's servers, all alike but for the address.

- Connections are bounded; a caller waits for a free one.
- Bytes in, bytes out (decode_responses is off), in the RESP2 shapes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Any

import redis.asyncio
from redis import exceptions
from redis.asyncio.connection import parse_url

from ...host.forks import Home
from .channel import Command
from .patience import SAY_AFTER_S, PatientRetry
from .routes import is_blocking
from .translate import name_of
from .url import Address, BrokerUrl


class NamedPool(redis.asyncio.BlockingConnectionPool):
    """A bounded pool that knows its broker's name for people: a URL without secrets."""

    def __init__(self, *, broker_name: str, **options: Any) -> None:
        super().__init__(**options)
        self.broker_name = broker_name
        self._home = Home()

    async def get_connection(self, *args: Any, **options: Any) -> Any:
        """Do the same as the library; refuse it in a forked child, whose sockets are its parent's."""
        self._home.check()
        connection: Any = await super().get_connection(*args, **options)  # type: ignore[no-untyped-call]
        return connection


class Pools:
    """Makes pools with the settings of a URL and of a process.

    Args:
        url: with credentials, TLS and the library's own settings.
        client_name: shown by CLIENT LIST at the broker; no spaces.
        max_connections: bound of each pool.
        socket_timeout_s: longest silence within one command.
    """

    def __init__(self, url: BrokerUrl, *, client_name: str, max_connections: int, socket_timeout_s: float) -> None:
        given: dict[str, Any] = dict(parse_url(url.client_url))
        self.kind: type[Any] = given.pop("connection_class", redis.asyncio.Connection)
        self._options: dict[str, Any] = {
            "client_name": client_name,
            "max_connections": max_connections,
            "socket_timeout": socket_timeout_s,
            "socket_connect_timeout": min(5.0, socket_timeout_s),
            "protocol": 2,  # RESP3 would add a handshake per connection and change no reply we read
            **given,
        }
        if "path" not in given:
            # Firewalls forget idle connections. TCP keepalive, not PING (health_check_interval): a loading broker
            # refuses PING.
            self._options["socket_keepalive"] = True

    @property
    def is_tls(self) -> bool:
        """True if connections are encrypted."""
        return issubclass(self.kind, redis.asyncio.SSLConnection)

    def make(
        self,
        patience_s: float,
        *,
        address: Address | None = None,
        kind: type[Any] | None = None,
        name: str | None = None,
        **changes: Any,
    ) -> NamedPool:
        """Make a pool for the URL's own address, or for another.

        Args:
            patience_s: how long each connecting and each command keeps trying.
            address: another server of the same broker, reached by TCP.
            kind: another class of connections than the URL's.
            name: the broker's name in texts; default: the address.
            changes: options of the library that differ from the URL's.
        """
        options = {**self._options, **changes}
        kind = kind or self.kind
        if address is not None:
            options["host"], options["port"] = address
            if options.pop("path", None) is not None:
                kind = redis.asyncio.Connection
        return NamedPool(
            broker_name=name or name_of(options, is_tls=self.is_tls),
            connection_class=prompt(kind),
            retry=PatientRetry(patience_s),
            **options,
        )


# ---------------------------------------------------------------- prompt
#
# Connections of the client library that stop when the task that uses them is cancelled.
#
# The library sends inside `asyncio.wait_for`, which up to Python 3.11 swallows a cancellation that comes in the moment
# the sending is done (python/cpython#86296): a loop that was told to end went on, and a caller that waited for its end
# waited for ever. Measured: of cancellations at random moments, one in 25 was lost. It also made a task for every
# command.
#
# These connections also log what they wait for, once a broker has been silent for SAY_AFTER_S on a command that does
# not block by itself: a frozen broker takes connections and bytes as if it lived, and we bear its silence for long.


log = logging.getLogger(__name__)

SAY_AGAIN_S = 60.0  # to all that wait for the same broker
LATE_S = 0.25  # of a timer, by which a process that was frozen or had no processor knows it
LOOK_AGAIN_S = 1.0  # then
said_at_s: dict[str, float] = {}  # by the broker's name


def prompt(connection_class: type[Any]) -> type[Any]:
    """Return the same class of connections, with sending that can be cancelled."""
    return type(connection_class.__name__, (_Prompt, connection_class), {})


class _Prompt:
    _blocks = False  # one of the commands that go next waits for data
    _teller: asyncio.TimerHandle | None = None

    def note(self, commands: Iterable[Command]) -> None:
        """Note the commands that go next: packing calls this, and so does a caller that packs by itself."""
        self._blocks = any(map(is_blocking, commands))

    def pack_command(self: Any, *args: Any) -> Any:
        """Do the same as the library, and note the commands."""
        self.note((args,))
        return super().pack_command(*args)  # type: ignore[misc]

    def pack_commands(self: Any, commands: Iterable[Any]) -> Any:
        """Do the same as the library, and note the commands."""
        commands = list(commands)
        self.note(commands)
        return super().pack_commands(commands)  # type: ignore[misc]

    async def read_response(self: Any, *args: Any, **options: Any) -> Any:
        """Do the same as the library; the first answer ends the warnings of silence."""
        try:
            return await super().read_response(*args, **options)  # type: ignore[misc]
        finally:
            if self._teller is not None:
                self._teller.cancel()
                self._teller = None

    def _tell(self: Any, due_s: float) -> None:
        loop = asyncio.get_running_loop()
        if loop.time() - due_s > LATE_S:  # it is we who stood still: what came meanwhile is not read yet
            self._teller = loop.call_later(LOOK_AGAIN_S, self._tell, loop.time() + LOOK_AGAIN_S)
            return
        options = {"path": self.path} if hasattr(self, "path") else {"host": self.host, "port": self.port}
        name = name_of({**options, "db": self.db}, is_tls=isinstance(self, redis.asyncio.SSLConnection))
        now_s = loop.time()
        if now_s - said_at_s.get(name, float("-inf")) >= SAY_AGAIN_S:
            said_at_s[name] = now_s
            left_s = max(0.0, (self.socket_timeout or 0.0) - SAY_AFTER_S)
            text = (
                "the broker %s has not answered for %.0f s: waiting for it another %.0f s. Is it stopped or overloaded?"
            )
            log.warning(text, name, SAY_AFTER_S, left_s)

    async def send_packed_command(self: Any, command: bytes | str | Iterable[bytes], check_health: bool = True) -> None:
        """Do the same as the library; close the connection if the send does not end well."""
        blocks = self._blocks  # before a greeting is packed
        if not self.is_connected:
            await self.connect_check_health(check_health=False)
        if check_health:
            await self.check_health()
        raw = command.encode() if isinstance(command, str) else command
        try:
            async with asyncio.timeout(self.socket_timeout):
                self._writer.writelines([raw] if isinstance(raw, bytes) else raw)
                await self._writer.drain()
            if not blocks and self._teller is None:
                loop = asyncio.get_running_loop()
                self._teller = loop.call_later(SAY_AFTER_S, self._tell, loop.time() + SAY_AFTER_S)
        except TimeoutError:
            await self.disconnect(nowait=True)
            raise exceptions.TimeoutError("Timeout writing to socket") from None
        except OSError as error:
            await self.disconnect(nowait=True)
            raise exceptions.ConnectionError(f"Error while writing to socket: {error}") from error
        except BaseException:
            await self.disconnect(nowait=True)
            raise
