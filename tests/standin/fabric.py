"""All ports on a stand-in broker: a whole fabric in one process, with the ports and the scripts that are deployed."""

from __future__ import annotations

from rollfab.fabric.contract.clock import Clock, SystemClock
from rollfab.fabric.contract.records import RunConfig
from rollfab.fabric.opened import RedisFabric
from rollfab.fabric.queue.rollouts import RedisRolloutStream
from tests.standin.broker import Broker, DirectClient
from tests.standin.tables import FabricTables, RunTables


class StandInFabric(RedisFabric):
    """Fabric (see ports) of one client of a stand-in broker."""

    def __init__(
        self, clock: Clock | None = None, *, broker: Broker | None = None, client_id: str | None = None
    ) -> None:
        self.clock = clock or SystemClock()
        self.broker = broker or Broker(self.clock)
        super().__init__(DirectClient(self.broker))
        self._client_id = client_id or self._client_id

    @property
    def tables(self) -> FabricTables:
        """What the broker holds that is of no run."""
        return FabricTables(self.broker)

    def tables_of(self, run_id: str, shard: int = 0) -> RunTables:
        """What the broker holds of a run, in one shard."""
        return RunTables(self.broker, run_id, shard)

    def rollouts(self, run: RunConfig) -> RedisRolloutStream:
        return RedisRolloutStream(self._client, run, clock=self.clock, client_id=self._client_id)
