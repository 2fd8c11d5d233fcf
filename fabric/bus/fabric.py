"""All ports on one Redis: what a process opens at its start and closes at its end."""

from __future__ import annotations

from types import TracebackType

from redis.asyncio import Redis

from ..records import RunConfig
from .board import RedisLeaseBoard
from .connection import check_broker, open_broker
from .rollouts import RedisRolloutStream
from .trajectories import RedisTrajectoryQueue
from .turns import RedisTurnQueue
from .weights import RedisWeightStore


class RedisFabric:
    """Fabric (see ports) on one Redis."""

    def __init__(self, client: Redis) -> None:
        self._client = client
        self.board = RedisLeaseBoard(client)
        self.weights = RedisWeightStore(client)

    @classmethod
    async def open(cls, url: str, *, client_name: str, patience_s: float = 10.0) -> RedisFabric:
        """Connect and check the broker.

        Raises:
            ConfigError: the URL is not one of ours.
            BrokerError: unreachable, refused, too old, or it would evict keys.
        """
        client = await open_broker(url, client_name=client_name, patience_s=patience_s)
        try:
            await check_broker(client)
        except BaseException:
            await client.aclose()
            raise
        return cls(client)

    def trajectories(self, run: RunConfig) -> RedisTrajectoryQueue:
        return RedisTrajectoryQueue(self._client, run)

    def turns(self, run: RunConfig) -> RedisTurnQueue:
        return RedisTurnQueue(self._client, run)

    def rollouts(self, run: RunConfig) -> RedisRolloutStream:
        return RedisRolloutStream(self._client, run)

    async def close(self) -> None:
        await self._client.aclose()

    async def __aenter__(self) -> RedisFabric:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
