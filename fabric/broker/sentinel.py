"""A primary that Sentinel watches: every connection asks the sentinels where it is, and checks that it is one.

- The sentinels are asked anew for every connection, inside its retries: after a fail-over the next attempt finds the
  replica that was promoted.
- A connection whose server stops being the primary is dropped, and its commands go again (scripts bear it). A former
  primary is never believed: each connection reads its server's role as it opens.
- Replication is asynchronous: writes that the old primary accepted and did not pass on are gone. docs/guarantees.md
  says what that means for each kind of write.
"""

from __future__ import annotations

import contextlib
from typing import Any

import redis.asyncio
from redis import exceptions

from .clients.patience import PatientRetry
from .clients.pools import NamedPool, Pools
from .clients.translate import PrimaryUnknown, translate
from .clients.typed import TypedClient
from .clients.url import Address, BrokerUrl, shown

ASK_TIMEOUT_S = 1.0  # per sentinel: the next one knows as much
FAILOVER_S = 10.0  # from "it is down" to a promoted replica: agreeing, electing, telling; 1-3 s where nobody is late


class Sentinels:
    """The sentinels, which know where the primary is; any of them will do."""

    def __init__(self, url: BrokerUrl, pools: Pools) -> None:
        assert url.hosts
        assert url.service
        self.service = url.service
        self._hosts = list(url.hosts)
        changes: dict[str, Any] = {
            "username": url.sentinel_username,
            "password": url.sentinel_password,
            "db": 0,
            "max_connections": 4,
            "socket_timeout": ASK_TIMEOUT_S,
            "socket_connect_timeout": ASK_TIMEOUT_S,
        }
        self._clients: dict[Address, redis.asyncio.Redis] = {
            host: redis.asyncio.Redis.from_pool(pools.make(0.0, address=host, **changes)) for host in url.hosts
        }

    async def primary(self) -> Address:
        """Ask where the primary is now.

        Raises:
            PrimaryUnknown: no sentinel answers, or none of them watches this service.
        """
        found = await self._ask("GET-MASTER-ADDR-BY-NAME")
        return found[0].decode(), int(found[1])

    async def down_after_s(self) -> float:
        """Ask how long the primary must be silent before they replace it."""
        found = await self._ask("MASTER")
        facts = dict(zip(found[::2], found[1::2], strict=True))
        return int(facts[b"down-after-milliseconds"]) / 1000

    async def _ask(self, question: str) -> list[bytes]:
        said = []
        for host in list(self._hosts):
            try:
                answer: list[bytes] = await _raw(self._clients[host], "SENTINEL", question, self.service)
            except exceptions.RedisError as error:
                said.append(f"{shown(host)}: {error}")
                self._hosts.append(self._hosts.pop(self._hosts.index(host)))  # the others come first from now on
                continue
            if answer:
                return answer
            said.append(f"{shown(host)}: not watched there")
        raise PrimaryUnknown(f"no sentinel names the primary of {self.service!r}: {'; '.join(said)}")

    async def close(self) -> None:
        """Close every connection."""
        for client in self._clients.values():
            await client.aclose()


async def _raw(client: redis.asyncio.Redis, *words: str) -> Any:
    """Return the answer as it came: the library shapes these answers differently from version to version."""
    pool: Any = client.connection_pool
    connection = await pool.get_connection()
    try:
        await connection.send_command(*words)
        return await connection.read_response()
    finally:
        await pool.release(connection)


class LedClient(TypedClient):
    """A client of whichever server is the primary."""

    def __init__(self, sentinels: Sentinels, pool: NamedPool) -> None:
        super().__init__(connection_pool=pool)
        self._sentinels = sentinels
        self._pool = pool

    @classmethod
    async def open(cls, url: BrokerUrl, pools: Pools, patience_s: float, open_patience_s: float) -> LedClient:
        """Find the primary and greet it. Arguments as in `open_broker`.

        Raises:
            BrokerError: no sentinel or no primary is there, or it refused us.
        """
        sentinels = Sentinels(url, pools)
        name = f"redis{'s' * pools.is_tls}+sentinel://{','.join(map(shown, url.hosts))}/{url.service}"
        client = cls(sentinels, pools.make(open_patience_s, kind=led_by(sentinels, pools.kind), name=name))
        try:
            with translate(client), contextlib.suppress(exceptions.BusyLoadingError):
                await client.ping()
                if patience_s > 0:
                    patience_s = max(patience_s, await sentinels.down_after_s() + FAILOVER_S)
        except BaseException:
            await client.aclose()
            raise
        client.set_retry(PatientRetry(patience_s))
        return client

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        await super().aclose(close_connection_pool)
        await self._pool.disconnect()
        await self._sentinels.close()


def led_by(sentinels: Sentinels, kind: type[Any]) -> type[Any]:
    """Return the same class of connections, going wherever the primary is."""
    return type(f"Led{kind.__name__}", (_Led, kind), {"sentinels": sentinels})


class _Led:
    sentinels: Sentinels

    async def _connect(self: Any) -> None:
        self.host, self.port = await self.sentinels.primary()
        await super()._connect()  # type: ignore[misc]

    async def on_connect_check_health(self: Any, check_health: bool = True) -> None:
        """Do the same as the library; then make sure of the server's role."""
        await super().on_connect_check_health(check_health)  # type: ignore[misc]
        await self.send_command("INFO", "replication", check_health=False)
        if b"role:master" not in await self.read_response():
            raise PrimaryUnknown(f"{self.host}:{self.port} is not the primary of {self.sentinels.service!r} now")

    async def read_response(self: Any, *args: Any, **options: Any) -> Any:
        """Do the same as the library; treat a server that has become a replica as a lost connection."""
        try:
            return await super().read_response(*args, **options)  # type: ignore[misc]
        except exceptions.ResponseError as error:
            if isinstance(error, exceptions.ReadOnlyError) or str(error).startswith("UNBLOCKED"):
                await self.disconnect(nowait=True)
                raise exceptions.ConnectionError(f"{self.host}:{self.port} became a replica") from error
            raise
