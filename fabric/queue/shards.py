"""A run's shards, and which of them a job is on.

A shard is the unit that lives whole in one slot of a Redis Cluster. A group and all that belongs to it is on the
shard that its id hashes to; claims visit shards in turn.
"""

from __future__ import annotations

from ..contract.errors import WireError
from ..contract.ids import group_of, shard_of
from .keys import ShardKeys


class RunShards:
    """The key sets of a run's shards."""

    def __init__(self, run_id: str, shard_count: int) -> None:
        assert shard_count >= 1
        self.run_id = run_id
        self.all = tuple(ShardKeys(run_id, shard) for shard in range(shard_count))
        self._next = 0

    def index_of(self, job_id: str) -> int:
        """Return the index of the shard of a group, trajectory or turn."""
        return shard_of(group_of(job_id), len(self.all)) if len(self.all) > 1 else 0

    def of(self, job_id: str) -> ShardKeys:
        """Return the keys of the shard of a group, trajectory or turn."""
        return self.all[self.index_of(job_id)]

    def check(self, job_id: str, keys: ShardKeys) -> None:
        """Require that a job lies in its own shard: any other job was made up, and nobody who asks for it looks there.

        Raises:
            WireError: it lies in another shard.
        """
        if self.of(job_id) is not keys:
            raise WireError(f"it lies in shard {self.all.index(keys)} and belongs to shard {self.index_of(job_id)}")

    def in_turn(self) -> list[ShardKeys]:
        """Return all shards, starting one further each time, so that none is always served last."""
        self._next = (self._next + 1) % len(self.all)
        return [*self.all[self._next :], *self.all[: self._next]]
