"""verl's weights, published as versions of a run; and a rollout of verl's that starts no server: docs/verl.md.

Importing this module registers both with verl, as "rollfab", in the process that does it:

    VERL_USE_EXTERNAL_MODULES=rollfab.trainer.integrations.verl_weights

- trainer_mode=separate_async publishes with the checkpoint engine, sync and colocate_async with the rollout class.
- The first rank publishes whole tensors, as verl gathers them; the others take part in the gathering alone.
- Each call is the run's next version, whatever verl's step: a training that goes on from an older checkpoint publishes
  on top of what the run has.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import ray
import torch
from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry
from verl.workers.rollout import base, replica
from verl.workers.rollout.utils import ensure_async_iterator

from ...fabric.contract.errors import ConfigError
from ..publish.model_check import HEAD
from .verl import NAME, open_run

EMBEDDING = "embed_tokens.weight"  # how the names of embeddings end


class _Publisher:
    """Publishes verl's named tensors to the run of these settings; not on ranks but the first."""

    def __init__(self, settings: Mapping[str, Any], *, is_first: bool) -> None:
        self._settings = dict(settings)
        self._is_first = is_first
        self._fabric: Any = None
        self._run: Any = None

    async def publish(self, weights: Any) -> dict[str, float]:
        """Publish every (name, tensor) as the next version; returns it for verl's metrics. All are held at once, whole.

        Raises:
            LayoutMismatch: they are not the run's.
        """
        named: list[tuple[str, torch.Tensor]] = []
        async for name, tensor in ensure_async_iterator(weights):
            if self._is_first:
                named.append((name, tensor.detach().cpu()))
        return await asyncio.to_thread(self._publish, named) if self._is_first else {}

    def _publish(self, named: list[tuple[str, torch.Tensor]]) -> dict[str, float]:
        if self._run is None:
            self._fabric, self._run = open_run(self._settings)
        version = self._run.head_version() + 1
        self._run.publish(without_tied_head(named), version)
        return {"rollfab/version": float(version)}

    def close(self) -> None:
        """Close the connection, if there is one."""
        if self._fabric is not None:
            self._fabric.close()


def without_tied_head(named: list[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    """Leave out an output layer that is the embedding, bit for bit: verl lists tied tensors twice, models once."""
    tensors = dict(named)
    embedding = next((tensor for name, tensor in named if name.endswith(EMBEDDING)), None)
    if HEAD in tensors and embedding is not None and torch.equal(tensors[HEAD], embedding):
        del tensors[HEAD]
    return list(tensors.items())


@CheckpointEngineRegistry.register(NAME)
class RunCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """Publishes instead of sending: verl's CheckpointEngine.

    Args:
        bucket_size: verl's, not used.
        is_master: whether this is the first rank of those that train.
        **settings: as in `open_run`.
    """

    def __init__(self, bucket_size: int, is_master: bool = False, **settings: Any) -> None:
        self.publisher = _Publisher(settings, is_first=is_master)

    def prepare(self) -> dict[str, Any]:
        """Do nothing: the broker carries weights."""
        return {}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Return no arguments of init_process_group: see above."""
        return {}, {}

    def init_process_group(self, **_: Any) -> None:
        """Do nothing: see above."""

    def finalize(self) -> None:
        """Do nothing: see above."""

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> dict[str, float]:
        """Publish: see `_Publisher.publish`."""
        return await self.publisher.publish(weights)

    async def receive_weights(self, global_steps: int | None = None) -> Any:
        """Refuse: workers of the run fetch weights, and verl's own servers would get none.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "a server of verl's own wants weights of the rollfab backend, which goes to a run's workers alone:"
            f" actor_rollout_ref.rollout.name={NAME} starts none"
        )


class PublishingRollout(base.BaseRollout):  # type: ignore[misc]
    """The rollout side of a rank that trains, where verl colocates both: it publishes, and holds no engine."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, *given: Any, **settings: Any) -> None:
        super().__init__(config, model_config, device_mesh)
        self.connect()

    def connect(self) -> None:
        """Make what publishes, by `self.config`."""
        is_first = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
        self.publisher = _Publisher(self.config.checkpoint_engine.engine_kwargs.get(NAME) or {}, is_first=is_first)

    async def resume(self, tags: list[str]) -> None:
        """Do nothing: no engine is here."""

    async def release(self) -> None:
        """Do nothing: see above."""

    async def update_weights(self, weights: Any, wire_format: str = "named_tensors", **_: Any) -> None:
        """Publish: see `_Publisher.publish`."""
        await self.publisher.publish(weights)


class Stand:
    """Answers as a worker of verl's rollout does when weights are sent: CheckpointEngineManager wants one at least."""

    def execute_checkpoint_engine(self, method: str, *_: Any, **__: Any) -> dict[str, Any]:
        """Do nothing: the ranks that train publish."""
        return {}

    def update_weights(self, global_steps: int | None = None) -> None:
        """Do nothing: see above."""


class NoReplica(replica.RolloutReplica):  # type: ignore[misc]
    """A replica of verl's that starts no server and takes no GPU: verl's word for where rollouts are made."""

    async def init_standalone(self) -> None:
        """Start the stand that CheckpointEngineManager talks to, on no resources."""
        self._server_address = f"{NAME}-{self.replica_rank}"
        self.workers = [ray.remote(num_cpus=0)(Stand).remote()]

    async def init_hybrid(self, worker_group: Any) -> None:
        """Start nothing: the ranks that train publish by themselves."""
        self._server_address = f"{NAME}-{self.replica_rank}"

    async def launch_servers(self) -> None:
        """Do nothing: the run's workers make rollouts."""


base._ROLLOUT_REGISTRY[NAME, "async"] = f"{__name__}.{PublishingRollout.__name__}"
replica.RolloutReplicaRegistry.register(NAME, lambda: NoReplica)
