"""verl's own CheckpointEngineManager and registries, publishing to a run."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import ray
import torch
from verl.checkpoint_engine import CheckpointEngineManager, CheckpointEngineRegistry
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.rollout.base import get_rollout_class
from verl.workers.rollout.llm_server import LLMServerManager

from rollfab.errors import ConfigError, LayoutMismatch
from rollfab.trainer.client import Run
from rollfab.trainer.grpo import build_model
from rollfab.trainer.integrations.verl_weights import RunCheckpointEngine
from tests.support.processes.fabric_processes import Processes, check_rollout
from tests.verl.training import SAMPLING, WALK, config_of


def model_of(seed: int) -> torch.nn.Module:
    """A model, and with it the tensors as verl lists them: its state, where the tied head comes twice."""
    return build_model("tiny", seed)


class Actor(Worker):
    """A rank that trains, as verl's ActorRolloutRefWorker is to CheckpointEngineManager: workers/engine_workers.py."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__()
        self.engine = CheckpointEngineRegistry.new("rollfab", is_master=self.rank == 0, bucket_size=1, **settings)
        self.read_count = 0

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int, mode: str) -> Any:
        def weights() -> Iterator[tuple[str, torch.Tensor]]:
            for each in model_of(global_steps).state_dict().items():
                self.read_count += 1
                yield each[0], each[1].clone()

        return await self.engine.send_weights(weights(), global_steps=global_steps)

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
    def execute_checkpoint_engine(self, method: str, *given: Any, **settings: Any) -> Any:
        return getattr(self.engine, method)(*given, **settings)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def counted(self) -> int:
        return self.read_count


@pytest.fixture
def run(fabric: Processes, request: pytest.FixtureRequest) -> Run:
    name = request.node.name[:60]
    return fabric.fabric.run(name, model="tiny", environment="walk", environment_options=WALK, sampling=SAMPLING)


def check_holds(run: Run, version: int, seed: int) -> None:
    """The run's head is this version, and it is that model, bit for bit."""
    assert run.head_version() == version
    weights = run.weights()
    named = dict(model_of(seed).named_parameters())
    assert set(weights) == set(named)
    for name, each in named.items():
        np.testing.assert_array_equal(weights[name], each.detach().numpy())


def test_verl_publishes_where_it_would_send_and_starts_no_server(fabric: Processes, run: Run) -> None:
    # Given what verl's PPOTrainerSeparateAsync makes: standalone servers, ranks that train, a manager of both
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # verl's wheel has a package `tests`, too
    config = config_of(run, fabric.url)
    servers = LLMServerManager.create(config=config)
    settings = {"run": run.run_id, "url": fabric.url}
    pool = RayResourcePool([2], use_gpu=False, name_prefix="actors", max_colocate_count=1)
    actors = RayWorkerGroup(
        resource_pool=pool,
        ray_cls_with_init=RayClassWithInitArgs(cls=ray.remote(Actor), settings=settings),
        use_gpu=False,
        device_name="cpu",
    )
    engine = omega_conf_to_dataclass(config.actor_rollout_ref.rollout.checkpoint_engine)
    manager = CheckpointEngineManager(config=engine, actor_wg=actors, replicas=servers.get_replicas())
    # When it updates weights at two of its steps
    assert manager.update_weights(7) == {"rollfab/version": 0.0}
    check_holds(run, 0, 7)
    assert manager.update_weights(8) == {"rollfab/version": 1.0}
    # Then the run has them as its next versions, with the tied head once, and every rank took part
    check_holds(run, 1, 8)
    assert len(set(actors.counted())) == 1
    # And a worker generates with them
    run.submit([{"seed": 1}])
    (group,) = list(run.groups(timeout=30, count=1))
    check_rollout(group.rollouts[0])
    assert {span.policy_version for span in group.rollouts[0].spans} == {1}
    (rollout,) = group.rollouts
    ids = torch.tensor([[*rollout.prompt_ids.tolist(), *rollout.completion_ids.tolist()]])
    with torch.no_grad():
        found = model_of(8)(input_ids=ids).logits[0].log_softmax(-1)
    made = found[len(rollout.prompt_ids) - 1 : -1].gather(1, ids[0, len(rollout.prompt_ids) :, None])[:, 0]
    mask = rollout.completion_mask.astype(bool)
    np.testing.assert_allclose(made.numpy()[mask], rollout.logprobs[mask], atol=1e-4)
    for each in actors.workers:
        ray.kill(each)


def test_a_colocated_rank_publishes_too(fabric: Processes, run: Run) -> None:
    # Given the class that verl's ranks make in the modes sync and colocate_async
    config = config_of(run, fabric.url).actor_rollout_ref.rollout
    kind = get_rollout_class("rollfab", "async")
    rollout = kind.__new__(kind)
    rollout.config = omega_conf_to_dataclass(config)
    rollout.connect()
    # When verl updates weights as its update_weights does
    asyncio.run(rollout.update_weights(iter(model_of(3).state_dict().items()), peft_config=None, global_steps=1))
    check_holds(run, 0, 3)
    # And other tensors are refused by name
    with pytest.raises(LayoutMismatch):
        asyncio.run(rollout.update_weights(iter([("other.weight", torch.zeros(2))]), global_steps=2))
    check_holds(run, 0, 3)
    rollout.publisher.close()


def test_a_server_of_verl_s_own_is_refused(run: Run) -> None:
    engine = RunCheckpointEngine(bucket_size=1, run=run.run_id)
    with pytest.raises(ConfigError, match=r"rollout\.name=rollfab starts none"):
        asyncio.run(engine.receive_weights())
