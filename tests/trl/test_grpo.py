"""TRL's own GRPOTrainer, fed by a whole fabric of real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rollfab
from rollfab.errors import ConfigError, JobDead
from rollfab.trainer.client import Run
from rollfab.trainer.integrations.trl import ROLLOUT, rollout_func, rollout_reward
from tests.support.processes.fabric_processes import Processes, check_rollout, check_totals
from tests.trl.training import SETTINGS, WALK, make_trainer

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "trl_frozenlake.py"


@pytest.fixture
def walk(fabric: Processes, request: pytest.FixtureRequest) -> Run:
    name = request.node.name.partition("[")[0][:60]
    return fabric.fabric.run(name, model="tiny", environment="walk", environment_options=WALK, **SETTINGS)


def test_the_example_learns(fabric: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given the example, on a map that takes two moves, and for half of its steps
    monkeypatch.setenv("ROLLFAB_URL", fabric.url)
    monkeypatch.chdir(tmp_path)
    source = EXAMPLE.read_text("utf-8")
    for old, new in (
        ('"max_steps": 240', '"max_steps": 120'),
        (
            'environment="frozenlake"',
            'environment="frozenlake", environment_options={"map": ["SFG"]}, turn_count_max=5',
        ),
    ):
        assert old in source
        source = source.replace(old, new)
    code = [line for line in source.split('"""')[2].splitlines() if line.strip() and "import" not in line]
    assert len(code) <= 20

    # When it is run as it stands
    names: dict[str, Any] = {}
    exec(compile(source, EXAMPLE.name, "exec"), names)

    # Then the policy has learnt, workers have what was learnt, and every group was used once
    rewards = names["rewards"]
    assert rewards[0] < 0
    assert sum(rewards[-3:]) / 3 > 0.9
    run = fabric.fabric.run("trl-lake")
    assert run.head_version() == 30  # one version for four of the optimiser's steps, and the last
    weights = run.weights()
    for name, each in names["trainer"].model.named_parameters():
        np.testing.assert_array_equal(weights[name], each.detach().numpy())
    assert check_totals(fabric, run)["groups_consumed"] == 30 * 4


def test_a_batch_is_the_rollouts_token_for_token(walk: Run, tmp_path: Path) -> None:
    # Given a trainer that computes what its own model makes of the tokens
    rollouts: list[Any] = []

    def reward(**columns: Any) -> list[float | None]:
        rollouts.extend(columns[ROLLOUT])
        assert columns["completion_ids"] == [each.completion_ids.tolist() for each in columns[ROLLOUT]]
        return rollout_reward(**columns)

    trainer = make_trainer(walk, tmp_path, rewards=reward, num_iterations=2, max_steps=4)
    # When it trains two batches twice each
    trainer.train()
    # Then tokens and masks are the rollouts', where turns and observations interleave too
    assert len(trainer.seen) == 2
    for batch, start in zip(trainer.seen, (0, 4), strict=True):
        for row, rollout in enumerate(rollouts[start : start + 4]):
            check_rollout(rollout)
            length = len(rollout.completion_ids)
            mask = rollout.completion_mask.astype(bool)
            assert not mask.all()
            assert batch["prompt_ids"][row][batch["prompt_mask"][row].bool()].tolist() == rollout.prompt_ids.tolist()
            assert batch["completion_ids"][row][:length].tolist() == rollout.completion_ids.tolist()
            assert batch["completion_mask"][row].sum() == length
            assert batch["tool_mask"][row][:length].tolist() == rollout.completion_mask.tolist()
            # And it finds every token of the policy as likely as the worker said: same weights, same temperature
            np.testing.assert_allclose(
                batch["old_per_token_logps"][row][:length][mask], rollout.logprobs[mask], atol=1e-4
            )
            np.testing.assert_array_equal(batch["sampling_per_token_logps"][row][:length], rollout.logprobs)
        assert int(batch["num_items_in_batch"]) == sum(
            int(each.completion_mask.sum()) for each in rollouts[start : start + 4]
        )
    # And each prompt was one group; versions follow the optimiser's steps
    assert [each.trajectory_id.rpartition(".")[2] for each in rollouts] == ["0", "1"] * 4
    assert {each.policy_version for each in rollouts} == {0, 1}
    assert walk.head_version() == 2


def test_evaluation_gets_rollouts_of_its_own(fabric: Processes, walk: Run, tmp_path: Path) -> None:
    # When a training evaluates after each step, and once more in the end
    trainer = make_trainer(
        walk, tmp_path, eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=6, num_generations_eval=3
    )
    trainer.train()
    again = trainer.evaluate()
    # Then each evaluation saw both of its prompts three times, and no version was made for it
    evaluations = [row for row in trainer.state.log_history if "eval_reward" in row]
    assert [row["eval_reward"] for row in evaluations] == pytest.approx([1.0] * 3)  # what every walk is worth
    assert again["eval_reward"] == pytest.approx(1.0)
    assert walk.head_version() == 2
    assert check_totals(fabric, walk)["trajectories_completed"] == 2 * 4 + 3 * 6


def test_a_failed_trajectory_is_no_reward_of_0(fabric: Processes, tmp_path: Path) -> None:
    # Given two tasks, of which one fails each of its trajectories
    run = fabric.fabric.run("broken", model="tiny", environment="broken", attempt_count_max=1, **SETTINGS)
    tasks = {"0": {}, "1": {"fault": "step"}}
    trainer = make_trainer(run, tmp_path, task=tasks.__getitem__, count=2, max_steps=1)
    trainer.train()
    # Then its rows have no advantage and no token to train on, and are no part of the mean
    (batch,) = trainer.seen
    is_bad = (batch["tool_mask"] * batch["completion_mask"]).sum(1) == 0
    assert is_bad.sum() == 2
    assert batch["advantages"][is_bad].tolist() == [0, 0]
    assert trainer.state.log_history[0]["reward"] == pytest.approx(1.0)
    assert all(torch.isfinite(each).all() for each in trainer.model.parameters())

    # And when all fail, that is an error with the cause, once
    tasks["0"] = {"fault": "step"}
    trainer = make_trainer(run, tmp_path, task=tasks.__getitem__, count=2, max_steps=1)
    with pytest.raises(JobDead, match="the world fell over"):
        trainer.train()
    tasks.update({"0": {}, "1": {}})
    trainer.train()
    assert trainer.state.log_history[-2]["reward"] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"temperature": 0.7}, r"temperature 1.0, and TRL divides logits by 0.7.*sampling=\{'temperature': 0.7\}"),
        ({"mask_truncated_completions": True}, "mask_truncated_completions=True judges by the last token"),
    ],
    ids=["temperature", "masking"],
)
def test_settings_that_rollouts_cannot_follow_are_refused(
    walk: Run, tmp_path: Path, settings: dict[str, Any], why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        make_trainer(walk, tmp_path, **settings).train()
    assert walk.head_version() == -1


def test_a_run_that_hands_out_older_rollouts_is_refused(fabric: Processes) -> None:
    run = fabric.fabric.run("stale", model="tiny", environment="walk", staleness=1)
    with pytest.raises(ConfigError, match=r"staleness=0"):
        rollout_func(run)


def test_a_group_of_somebody_else_is_left_alone(walk: Run, tmp_path: Path) -> None:
    # Given a run on which somebody else has a group
    trainer = make_trainer(walk, tmp_path, max_steps=1)
    walk.submit([{"seed": 5}], group_ids=["mine"])
    # When TRL trains on it
    with pytest.raises(ConfigError, match="'mine', which this trainer did not ask for"):
        trainer.train()
    # Then it is still there
    with walk.groups(timeout=30, count=3) as groups:
        assert "mine" in {group.group_id for group in groups}


def test_an_evaluation_before_training_takes_nothing_of_what_a_dead_process_asked_for(
    fabric: Processes, walk: Run, tmp_path: Path
) -> None:
    # Given a process that ended as it had its rollouts, with weights like ours
    def fail(**columns: Any) -> list[float | None]:
        raise ArithmeticError

    with rollfab.connect(fabric.url) as dead, pytest.raises(ArithmeticError):
        make_trainer(dead.run(walk.run_id), tmp_path, rewards=fail).train()
    assert walk.head_version() == 0
    # When the next one evaluates first, then trains
    settings = {"eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True, "per_device_eval_batch_size": 4}
    trainer = make_trainer(walk, tmp_path, max_steps=1, **settings)
    trainer.train()
    # Then each gets rollouts of its own
    assert [row["reward"] for row in trainer.state.log_history if "reward" in row] == pytest.approx([1.0])
    assert walk.status().counters["groups_submitted"] == 2 + 2 + 2 + 2
