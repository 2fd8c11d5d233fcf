"""The publisher that a run needs: of one process, or of every rank of a sharded trainer."""

from __future__ import annotations

from typing import Any, Protocol

from ..fabric.contract.records import RunConfig
from ..fabric.ports.weights import WeightStore
from .publish.publisher import Publisher
from .publish.report import PublishReport
from .publish.tensors import ComparesOn, Named


class AnyPublisher(Protocol):
    """What publishes versions of one run: from one process, or from every rank of a sharded trainer (rank_lead.py)."""

    async def publish(self, named: Named, version: int, *, keyframe: bool = False) -> PublishReport:
        """Make `named` the run's version `version`. keyframe: put a keyframe of it beside its delta."""
        ...

    def start(self) -> None:
        """Look after what is published, in a task of the running loop, until `close`."""
        ...

    async def close(self) -> None:
        """Let go of everything but what is published."""
        ...


def make_publisher(
    store: WeightStore, config: RunConfig, group: Any = None, compares_on: ComparesOn = "auto"
) -> AnyPublisher:
    """The publisher that a run needs. group: of torch.distributed, where every rank publishes its own shards."""
    if group is None:
        return Publisher(
            store,
            config.run_id,
            config.shard_count,
            carrier=config.weight_carrier,
            compares_on=compares_on,
            scrub_bytes_per_s=config.scrub_bytes_per_s,
            model=config.model,
        )
    from .publish.rank_lead import ShardedPublisher  # needs torch

    return ShardedPublisher(store, config.run_id, config.shard_count, group=group, model=config.model)
