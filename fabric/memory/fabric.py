"""All ports in memory: a whole fabric in one process, for tests and simulation."""

from __future__ import annotations

from ..contract.clock import Clock
from ..contract.records import RunConfig
from .board import MemoryLeaseBoard
from .queue import MemoryTrajectoryQueue, MemoryTurnQueue
from .rollouts import MemoryRolloutStream
from .state import MemoryBroker
from .weights import MemoryWeightStore


class MemoryFabric:
    """Fabric (see ports) in memory."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.broker = MemoryBroker(clock)
        self.board = MemoryLeaseBoard(self.broker)
        self.weights = MemoryWeightStore(self.broker)

    def trajectories(self, run: RunConfig) -> MemoryTrajectoryQueue:
        return MemoryTrajectoryQueue(self.broker, run)

    def turns(self, run: RunConfig) -> MemoryTurnQueue:
        return MemoryTurnQueue(self.broker, run)

    def rollouts(self, run: RunConfig) -> MemoryRolloutStream:
        return MemoryRolloutStream(self.broker, run)

    async def close(self) -> None:
        """Nothing to close."""
        return
