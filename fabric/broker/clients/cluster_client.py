"""The client library's commands, on a Redis Cluster.

The library has a client for clusters of its own. It keeps other connections than ours, counts attempts instead of
seconds, and cannot share round trips; so here its commands go through ClusterChannel, and only the shaping of their
answers is the library's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import redis.asyncio
from redis.asyncio.client import Pipeline

from .channel import checked
from .cluster import ClusterChannel
from .patience import PatientRetry
from .pools import NamedPool, Pools
from .routes import is_blocking
from .topology import Topology
from .translate import translate
from .typed import TypedClient
from .url import Address, shown

__all__ = ["ClusterClient"]


class ClusterClient(TypedClient):
    """A client of all of a cluster's primaries.

    Args:
        topology: the map, read once at least.
        pool: leads to the node that was given first; its name stands for the cluster.
        patience_s: how long a command keeps trying.
    """

    def __init__(self, topology: Topology, pool: NamedPool, patience_s: float) -> None:
        super().__init__(connection_pool=pool)
        self._topology = topology
        self._seed_pool = pool
        self._patience_s = patience_s
        self._channel = self.channel()

    @classmethod
    async def open(
        cls, seeds: Sequence[Address], pools: Pools, patience_s: float, open_patience_s: float
    ) -> ClusterClient:
        """Find out who holds what. Arguments as of `open_broker`; `seeds`: nodes to ask.

        Raises:
            BrokerError: no node answers, or it refused us.
        """
        name = f"redis{'s' * pools.is_tls}+cluster://{','.join(map(shown, seeds))}"
        topology = Topology(pools, seeds, name)
        client = cls(topology, pools.make(open_patience_s, name=name), patience_s)

        async def again(error: Exception) -> None:
            return None

        try:
            with translate(client):
                await PatientRetry(open_patience_s).call_with_retry(lambda: topology.read(0), again)
        except BaseException:
            await client.aclose()
            raise
        return client

    def channel(self) -> ClusterChannel:
        """Another way to ask, that shares round trips with nobody else's."""
        return ClusterChannel(self._topology, self._patience_s)

    def primaries(self) -> list[redis.asyncio.Redis]:
        """A client for each node that holds slots; these know nothing of the others, and have no patience."""
        return [self._topology.client(address) for address in self._topology.primaries()]

    async def _ask(self, *args: Any, **options: Any) -> Any:
        command = _command(args)
        (answer,) = checked(
            await (self._channel.ask_alone([command]) if is_blocking(command) else self._channel.ask_many([command]))
        )
        return _shaped(self.response_callbacks, args[0], answer, options)

    def pipeline(self, transaction: bool = True, shard_hint: str | None = None) -> Pipeline:
        """Commands that travel together; never a transaction, which scripts are for."""
        assert not transaction
        return _Pipeline(self._seed_pool, self.response_callbacks, self._channel)

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        """Close every connection."""
        await super().aclose(close_connection_pool)
        await self._seed_pool.disconnect()
        await self._topology.close()


class _Pipeline(Pipeline):
    def __init__(self, pool: NamedPool, callbacks: Any, channel: ClusterChannel) -> None:
        super().__init__(pool, callbacks, False, None)
        self._channel = channel

    async def execute(self, raise_on_error: bool = True) -> list[Any]:
        stack: list[Any] = self.command_stack
        self.command_stack = []
        answers = await self._channel.ask_alone([_command(args) for args, _ in stack])
        if raise_on_error:
            checked(answers)
        return [
            _shaped(self.response_callbacks, args[0], answer, options)
            for (args, options), answer in zip(stack, answers, strict=True)
        ]


def _command(args: Any) -> list[Any]:
    """As the broker wants it; the library writes "XGROUP CREATE" as one word."""
    return [*str(args[0]).split(), *args[1:]]


def _shaped(callbacks: Any, name: str, answer: Any, options: dict[str, Any]) -> Any:
    if isinstance(answer, Exception) or name not in callbacks:
        return answer
    return callbacks[name](answer, **{key: value for key, value in options.items() if key != "keys"})
