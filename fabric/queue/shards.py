"""A run's shards: which keys a script gets, and in which order.

A shard is the unit that lives whole in one slot of a Redis Cluster. A group and all that belongs to it is on the
shard that its id hashes to; claims visit shards in turn.
"""

from __future__ import annotations

from ..contract.ids import group_of, shard_of
from .keys import JobKeys, ShardKeys


class RunShards:
    """The key sets of a run's shards."""

    def __init__(self, run_id: str, shard_count: int) -> None:
        assert shard_count >= 1
        self.run_id = run_id
        self.all = tuple(ShardKeys(run_id, shard) for shard in range(shard_count))
        self._next = 0

    def index_of(self, job_id: str) -> int:
        """The shard of a group, trajectory or turn."""
        return shard_of(group_of(job_id), len(self.all)) if len(self.all) > 1 else 0

    def of(self, job_id: str) -> ShardKeys:
        """Keys of the shard of a group, trajectory or turn."""
        return self.all[self.index_of(job_id)]

    def in_turn(self) -> list[ShardKeys]:
        """All shards, starting one further each time, so that none is always served last."""
        self._next = (self._next + 1) % len(self.all)
        return [*self.all[self._next :], *self.all[: self._next]]


def turn_keys(keys: ShardKeys) -> list[str]:
    """What `forget_turns` deletes, in its order."""
    turn = keys.turn
    return [turn.record, turn.deadline, turn.held, turn.job, turn.log, keys.turn_agent, keys.turn_result]


def waking_keys(keys: ShardKeys, jobs: JobKeys) -> list[str]:
    """What `make_ready` writes and reads, in its order."""
    return [*jobs.ready, jobs.bell, keys.open]


def ending_keys(keys: ShardKeys, group_id: str) -> list[str]:
    """KEYS[1..19] of every script that ends trajectories: see queue/lua/use/drop.lua."""
    t = keys.trajectory
    own = [t.record, t.deadline, t.held, t.job, t.log]
    group = [keys.group(group_id), keys.rollouts(group_id), keys.completed, keys.counters]
    return [*own, *turn_keys(keys), *group, keys.run, keys.open, keys.late]


def rerun_keys(keys: ShardKeys, group_id: str) -> list[str]:
    """KEYS[1..24] of the scripts that may also run a trajectory again, or give it up."""
    t = keys.trajectory
    return [*ending_keys(keys, group_id), *t.ready, t.bell, keys.dead]
