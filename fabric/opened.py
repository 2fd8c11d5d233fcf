"""All ports on one broker: what a process opens at its start and closes at its end."""

from __future__ import annotations

from types import TracebackType

from redis.asyncio import Redis

from .broker.clients.url import Durability, read_url
from .broker.connection import CONNECTION_COUNT_MAX, check_broker, open_broker
from .contract.ids import new_worker_id
from .contract.records import RunConfig
from .queue.board import RedisLeaseBoard
from .queue.reading import RedisTrajectoryReader
from .queue.rollouts import RedisRolloutStream
from .queue.scripts import check_durability
from .queue.trajectories import RedisTrajectoryQueue
from .queue.turns import RedisTurnQueue
from .versions.store import RedisWeightStore


class RedisFabric:
    """Fabric (see ports) on Redis or Valkey: one server, a cluster, or whichever Sentinel names."""

    def __init__(self, client: Redis, *, durability: Durability = "memory", has_reward_queue: bool = True) -> None:
        self._client = client
        self._durability = durability
        self._client_id = new_worker_id("client")
        self.board = RedisLeaseBoard(client, has_reward_queue=has_reward_queue)
        self.weights = RedisWeightStore(client)

    @classmethod
    async def open(
        cls,
        url: str,
        *,
        client_name: str,
        patience_s: float = 10.0,
        durability: Durability | None = None,
        max_connections: int = CONNECTION_COUNT_MAX,
    ) -> RedisFabric:
        """Connect and check the broker.

        Args:
            url: one broker, a node of a Redis Cluster, or sentinels (broker/clients/url.py).
            client_name: shown by CLIENT LIST at the broker; no spaces.
            patience_s: how long a command keeps trying while the broker is away.
            durability: what a push waits for (queue/scripts.py). Default: what the URL says, else "memory".
            max_connections: see open_broker.

        Raises:
            ConfigError: the URL is not one of ours, or the broker cannot confirm that durability.
            BrokerError: unreachable, refused, too old, or it would evict keys.
        """
        parts = read_url(url)
        wanted = durability or parts.durability
        client = await open_broker(url, client_name=client_name, patience_s=patience_s, max_connections=max_connections)
        try:
            facts = await check_broker(client)
            check_durability(facts, wanted)
        except BaseException:
            await client.aclose()
            raise
        return cls(client, durability=wanted, has_reward_queue=bool(parts.reward_queue) or not facts.is_cluster)

    def trajectories(self, run: RunConfig) -> RedisTrajectoryQueue:
        return RedisTrajectoryQueue(self._client, run)

    def turns(self, run: RunConfig) -> RedisTurnQueue:
        return RedisTurnQueue(self._client, run)

    def rollouts(self, run: RunConfig) -> RedisRolloutStream:
        return RedisRolloutStream(self._client, run, durability=self._durability, client_id=self._client_id)

    def reading(self, run: RunConfig) -> RedisTrajectoryReader:
        return RedisTrajectoryReader(self._client, run)

    async def close(self) -> None:
        await self._client.aclose()

    async def __aenter__(self) -> RedisFabric:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
