"""What the adapter for TRL does without TRL: rows of groups, and what it refuses. With the real one: tests/trl."""

from __future__ import annotations

import math
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rollfab.errors import ConfigError, InputError
from rollfab.fabric.contract.records import Failure, Group, Node, Rollout, RunConfig
from rollfab.trainer.integrations.trl import check_trainer, columns, rollout_func, rows_of, runs_of
from rollfab.trainer.integrations.trl_async import RolloutWorker
from tests.support.records import new_rollout

FILLER = 0


def rollout(ids: list[int], mask: list[int], **fields: Any) -> Rollout:
    logprobs = np.array([-0.5 * each for each in mask], np.float32)
    return new_rollout(ids, completion_mask=np.array(mask, np.uint8), logprobs=logprobs, **fields)


def group(*rollouts: Rollout) -> Group:
    return Group(group_id="g", task_id="t", rollouts=rollouts, failures=(Failure("g.9", "it fell"),))


def test_prompts_are_cut_where_they_change_and_after_as_many_as_a_group_has() -> None:
    assert list(runs_of(["a", "a", "b", "b", "b", "b", "a"], 2)) == [("a", 2), ("b", 2), ("b", 2), ("a", 1)]
    assert list(runs_of([], 2)) == []


def test_a_row_is_a_rollout_as_it_is() -> None:
    made = rollout([1, 2, 3, 4], [1, 0, 0, 1], reward=0.25)
    (row,) = rows_of(group(made), 1, FILLER)
    assert columns([row]) == {
        "prompt_ids": [[1, 2, 3]],
        "completion_ids": [[1, 2, 3, 4]],
        "logprobs": [[-0.5, 0.0, 0.0, -0.5]],
        "env_mask": [[1, 0, 0, 1]],
        "rollfab_reward": [0.25],
        "rollfab_rollout": [made],
    }


def test_what_did_not_come_is_a_row_without_reward_and_without_a_token_to_train_on() -> None:
    rows = rows_of(group(rollout([1, 2, 3], [1, 1, 1]), rollout([1], [1])), 4, FILLER)
    assert [row.reward for row in rows] == [1.0, 1.0, None, None]
    for row in rows[2:]:
        assert len(row.completion_ids) == len(row.logprobs) == len(row.mask) == 1
        assert not any(row.mask)
    (empty,) = rows_of(group(), 1, FILLER)
    assert (empty.prompt_ids, empty.completion_ids, empty.mask, empty.reward) == ([0], [0], [0], None)


def test_a_rollout_in_which_the_policy_made_nothing_keeps_its_reward() -> None:
    (row,) = rows_of(group(rollout([], [], reward=-1.0)), 1, FILLER)
    assert (row.completion_ids, row.logprobs, row.mask, row.reward) == ([FILLER], [0.0], [0], -1.0)


def test_a_rollout_that_branches_is_refused() -> None:
    branching = rollout([1, 2], [1, 1], nodes=(Node(-1, 1), Node(-1, 2)))
    with pytest.raises(ConfigError, match=r"g\.0 branches into 2 lines"):
        rows_of(group(branching), 1, FILLER)


def trainer(*, kind: str = "NO", **settings: Any) -> Any:
    """As much of a GRPOTrainer as is looked at: the real one cannot be made so on a CPU."""
    given = {
        "temperature": 1.0,
        "use_vllm": False,
        "tools": [],
        "environment_factories": None,
        "mask_truncated_completions": False,
        "model": SimpleNamespace(parameters=lambda: iter([object()])),
        **settings,
    }
    accelerator = SimpleNamespace(unwrap_model=lambda model: model, distributed_type=f"DistributedType.{kind}")
    return SimpleNamespace(accelerator=accelerator, **given)


def of(*parameters: Any, **facts: Any) -> Any:
    return SimpleNamespace(parameters=lambda: iter(parameters), **facts)


RUN: Any = SimpleNamespace(
    run_id="r", config=RunConfig(run_id="r", model="tiny", environment="walk", sampling={"temperature": 1.0})
)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"temperature": 0.5}, r"sampling=\{'temperature': 0.5\}"),
        ({"use_vllm": True}, "use_vllm=True"),
        ({"tools": [print]}, "tools= and environment_factory="),
        ({"environment_factories": {}}, "tools= and environment_factory="),
        ({"mask_truncated_completions": True}, "mask_truncated_completions=True"),
        ({"model": of(object(), peft_config={})}, "Leave peft_config out"),
        ({"model": of(SimpleNamespace(full_tensor=print))}, "sharded"),
        ({"model": of(SimpleNamespace(ds_id=1))}, "sharded"),
        ({"kind": "FSDP"}, r"sharded \(FSDP\)"),
    ],
)
def test_a_trainer_that_rollouts_cannot_follow_is_refused(settings: dict[str, Any], why: str) -> None:
    check_trainer(trainer(kind="MULTI_GPU"), RUN)
    with pytest.raises(ConfigError, match=why):
        check_trainer(trainer(**settings), RUN)


def test_importing_the_adapters_loads_neither_trl_nor_torch() -> None:
    code = (
        "import sys, rollfab.trainer.integrations.trl, rollfab.trainer.integrations.trl_async\n"
        "print(sorted({'accelerate', 'datasets', 'torch', 'transformers', 'trl'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


@pytest.mark.parametrize("name", ["num_generations", "ahead", "sample_count_max"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_a_worker_of_trl_refuses_a_number_of_things_that_is_none(name: str, value: Any) -> None:
    run: Any = None
    with pytest.raises(InputError, match=f"RolloutWorker: {name} is {value}, expected a whole number of at least 1"):
        RolloutWorker(run, [], **{name: value})


@pytest.mark.parametrize("timeout", [-1, math.nan])
def test_a_function_of_trl_refuses_a_time_that_nobody_can_wait(timeout: float) -> None:
    run: Any = None
    with pytest.raises(InputError, match=f"rollout_func: timeout is {timeout}, expected seconds of at least 0"):
        rollout_func(run, timeout=timeout)
