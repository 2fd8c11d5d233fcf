"""Connection pools to one broker's servers, all alike but for the address.

- Connections are bounded; a caller waits for a free one.
- Bytes in, bytes out (decode_responses is off), in the RESP2 shapes.
"""

from __future__ import annotations

from typing import Any

import redis.asyncio
from redis.asyncio.connection import parse_url

from ...host.forks import Home
from .patience import PatientRetry
from .prompt import prompt
from .translate import name_of
from .url import Address, BrokerUrl

__all__ = ["NamedPool", "Pools"]


class NamedPool(redis.asyncio.BlockingConnectionPool):
    """A bounded pool that knows what people call the broker it leads to: a URL without secrets."""

    def __init__(self, *, broker_name: str, **options: Any) -> None:
        super().__init__(**options)
        self.broker_name = broker_name
        self._home = Home()

    async def get_connection(self, *args: Any, **options: Any) -> Any:
        """As the library's; refused in a forked child, whose sockets are its parent's."""
        self._home.check()
        connection: Any = await super().get_connection(*args, **options)  # type: ignore[no-untyped-call]
        return connection


class Pools:
    """Makes pools from what a URL and a process want.

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
        """Whether connections are encrypted."""
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
        """A pool for the URL's own address, or for another.

        Args:
            patience_s: how long each connecting and each command keeps trying.
            address: another server of the same broker, reached by TCP.
            kind: another class of connections than the URL's.
            name: what texts call the broker; default: the address.
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
