"""What verl finds in its registries under "rollfab", publishing to a run. With its whole trainer: test_training.py."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
from verl.checkpoint_engine import CheckpointEngineRegistry
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.rollout.base import get_rollout_class

from rollfab.errors import ConfigError, LayoutMismatch
from rollfab.trainer.client import Run
from rollfab.trainer.grpo import build_model
from rollfab.trainer.integrations.verl_weights import RunCheckpointEngine
from tests.support.processes.fabric_processes import Processes, check_rollout
from tests.verl.training import SAMPLING, WALK, config_of


def model_of(seed: int) -> torch.nn.Module:
    """A model, whose state is what verl lists: the tied head comes twice."""
    return build_model("tiny", seed)


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


def test_the_first_rank_publishes_where_verl_would_send(fabric: Processes, run: Run) -> None:
    # Given the engines that verl makes on two ranks: workers/engine_workers.py:686
    settings = {"bucket_size": 1, "run": run.run_id, "url": fabric.url}
    first, other = (CheckpointEngineRegistry.new("rollfab", is_master=each, **settings) for each in (True, False))
    # When they are sent the weights of two of its steps
    for step, version in ((7, 0), (8, 1)):
        weights = iter(model_of(step).state_dict().items())
        assert asyncio.run(other.send_weights(weights, global_steps=step)) == {}
        assert not list(weights)  # it took part in the gathering
        sent = asyncio.run(first.send_weights(iter(model_of(step).state_dict().items()), global_steps=step))
        # Then the run has them as its next version, with the tied head once
        assert sent == {"rollfab/version": version}
        check_holds(run, version, step)
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
    first.publisher.close()


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
