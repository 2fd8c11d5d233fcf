"""Does GRPO move the policy where the rewards are, say what it measures, and go on exactly where it stopped?"""

from __future__ import annotations

import io
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rollfab.fabric.contract.errors import InputError
from rollfab.fabric.contract.records import Group, Rollout, Span
from rollfab.fabric.model.presets import model_config
from rollfab.trainer.grpo import PRESETS, Batch, Grpo, GrpoSettings, build_model
from tests.support.records import new_rollout

VOCABULARY = 5
SETTINGS = GrpoSettings(learning_rate=0.05, learning_rate_end=1.0, minibatch_size=8, step_count=10)


class Bandit(nn.Module):
    """A policy that ignores what it reads: one row of logits."""

    def __init__(self) -> None:
        super().__init__()
        self.logits_V = nn.Parameter(torch.zeros(VOCABULARY))

    def forward(self, tokens_B_T: Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.logits_V.expand(*tokens_B_T.shape, VOCABULARY))

    def chances(self) -> list[float]:
        return torch.softmax(self.logits_V, dim=-1).tolist()


def rollout(token: int, reward: float, *, version: int = 0, logprob: float = -math.log(VOCABULARY)) -> Rollout:
    """One turn: the policy wrote `token`, and an observation that it must not learn from followed."""
    return new_rollout(
        (token, 4),
        trajectory_id=f"g.{token}",
        reward=reward,
        spans=(Span(0, 1, "w", version),),
        prompt_ids=np.array([0], np.int32),
        logprobs=np.array([logprob, 0.0], np.float32),
        completion_mask=np.array([1, 0], np.uint8),
        info={"success": reward == 1.0},
    )


def group(*rollouts: Rollout) -> Group:
    return Group(group_id="g", task_id="t", rollouts=rollouts)


def learn(grpo: Grpo, groups: list[Group], version: int | None = None) -> dict[str, float]:
    return grpo.step(grpo.look(groups), version)


def test_what_was_rewarded_becomes_likelier() -> None:
    model = Bandit()
    learn(Grpo(model, SETTINGS), [group(rollout(1, 1.0), rollout(2, 0.0))])
    chances = model.chances()
    assert chances[1] > 1 / VOCABULARY > chances[2]


def test_tokens_of_the_environment_are_not_learnt() -> None:
    # Given rollouts in which token 4 only ever comes from the environment; when they are learnt from
    model = Bandit()
    learn(Grpo(model, SETTINGS), [group(rollout(1, 1.0), rollout(2, 0.0))])
    # Then it fares like token 0, which nobody wrote
    assert model.chances()[4] == pytest.approx(model.chances()[0])


def test_groups_that_are_all_alike_change_nothing() -> None:
    model = Bandit()
    metrics = learn(Grpo(model, SETTINGS), [group(rollout(1, 1.0), rollout(2, 1.0))])
    assert model.chances() == pytest.approx([1 / VOCABULARY] * VOCABULARY)
    assert metrics["gradient_norm"] == 0.0


def test_one_step_moves_no_further_than_the_clip() -> None:
    # Given many passes over the same rollouts at a high rate
    model = Bandit()
    settings = replace(SETTINGS, epoch_count=50, clip_fraction=0.2)
    metrics = learn(Grpo(model, settings), [group(rollout(1, 1.0), rollout(2, 0.0))])
    # Then the rewarded token's ratio stops a little behind the bound, where the gradient ends
    assert 1.2 <= model.chances()[1] * VOCABULARY < 1.6
    assert metrics["clipped_fraction"] > 0.5


def test_a_kl_weight_keeps_one_odd_rollout_from_moving_everything() -> None:
    def chance(kl_weight: float) -> float:
        """Of what all but one chose, who did a little worse: which makes an advantage of -4."""
        model = Bandit()
        settings = replace(SETTINGS, learning_rate=0.2, epoch_count=8, minibatch_size=16, kl_weight=kl_weight)
        learn(Grpo(model, settings), [group(*[rollout(1, 1.0)] * 15, rollout(2, 0.95))])
        return model.chances()[1]

    assert chance(0.0) > 2 / VOCABULARY
    assert chance(1.0) < 1.3 / VOCABULARY


def test_a_lucky_choice_may_rise_further_than_an_unlucky_one_falls() -> None:
    model = Bandit()
    settings = replace(SETTINGS, learning_rate=0.01, epoch_count=120, clip_fraction=0.2, clip_fraction_up=1.0)
    learn(Grpo(model, settings), [group(rollout(1, 1.0), rollout(2, 0.0))])
    assert 2.0 <= model.chances()[1] * VOCABULARY < 2.4


def test_tokens_of_older_weights_count_for_what_they_are_still_worth() -> None:
    def moved(logprob: float) -> float:
        model = Bandit()
        grpo = Grpo(model, replace(SETTINGS, epoch_count=1))
        rows = [rollout(1, 1.0, logprob=logprob), rollout(2, 0.0)]
        loss = grpo._loss(*_prepared(grpo, group(*rows)))[0]
        loss.backward()
        assert model.logits_V.grad is not None
        return -float(model.logits_V.grad[1])

    now = -math.log(VOCABULARY)
    assert moved(now + math.log(4)) < moved(now)  # then four times as likely: seen too often
    assert moved(now - math.log(2)) > moved(now)
    assert moved(now - math.log(100)) == pytest.approx(moved(now - math.log(2)))  # bounded by importance_max


@pytest.mark.parametrize("logprob", [math.nan, math.inf])
def test_a_number_that_nobody_computed_is_refused_by_name_and_nothing_is_learnt(logprob: float) -> None:
    model = Bandit()
    grpo = Grpo(model, SETTINGS)
    with pytest.raises(InputError, match=r"^logprobs\[1, 0\] is (nan|inf), one of 1 "):
        learn(grpo, [group(rollout(1, 1.0), rollout(2, 0.0, logprob=logprob))])
    assert model.chances() == pytest.approx([1 / VOCABULARY] * VOCABULARY)


def _prepared(grpo: Grpo, *groups: Group) -> tuple[Batch, Tensor, Tensor]:
    seen = grpo.look(groups)
    return seen.batch, seen.start_B_K, grpo._weights(seen.batch, seen.start_B_K)


def test_the_metrics_say_how_old_the_tokens_are() -> None:
    rows = [rollout(1, 1.0, version=3), rollout(2, 0.0, version=2)]
    assert learn(Grpo(Bandit(), SETTINGS), [group(*rows)], version=4)["staleness_mean"] == 1.5


def test_log_probabilities_are_those_of_each_rollouts_own_tokens() -> None:
    # Given rollouts of different lengths, and a model that tells tokens apart
    grpo = Grpo(build_model("tiny"), SETTINGS)
    rows = [rollout(1, 1.0), _longer(rollout(2, 0.0)), rollout(3, 0.0)]
    # When they are looked at in one batch; then each has what it has alone
    together = grpo.look([group(*rows[:2]), group(rows[2])]).logprobs()
    for row, found in zip(rows, together, strict=True):
        (alone,) = grpo.look([group(row)]).logprobs()
        assert found.shape == row.completion_ids.shape
        assert np.allclose(found, alone, atol=1e-6)
    ids = torch.from_numpy(np.concatenate([rows[1].prompt_ids, rows[1].completion_ids]).astype(np.int64))
    with torch.no_grad():
        table = torch.log_softmax(grpo.model(ids[None]).logits[0], dim=-1)
    expected = [float(table[at - 1, ids[at]]) for at in range(len(rows[1].prompt_ids), len(ids))]
    assert together[1].tolist() == pytest.approx(expected, abs=1e-5)


def test_the_metrics_are_the_rollouts_in_numbers() -> None:
    metrics = learn(Grpo(Bandit(), SETTINGS), [group(rollout(1, 1.0), rollout(2, 0.0))])
    assert metrics["reward_mean"] == 0.5 and metrics["success_fraction"] == 0.5
    assert (metrics["rollout_count"], metrics["turn_count"], metrics["token_count"]) == (2, 2, 2)
    assert 0 < metrics["entropy"] <= math.log(VOCABULARY) + 1e-6
    assert all(math.isfinite(value) for value in metrics.values())


def test_the_learning_rate_falls_in_a_line() -> None:
    grpo = Grpo(Bandit(), replace(SETTINGS, learning_rate=1.0, learning_rate_end=0.5, step_count=3))
    rates = [learn(grpo, [group(rollout(1, 0.0))])["learning_rate"] for _ in range(4)]
    assert rates == pytest.approx([1.0, 0.75, 0.5, 0.5])


def test_a_restored_trainer_takes_the_very_same_steps() -> None:
    # Given a trainer that was saved after one step
    rows = [group(*[rollout(token % 4, float(token == 1)) for token in range(12)])]
    first, other = Grpo(Bandit(), SETTINGS), Grpo(Bandit(), SETTINGS)
    learn(first, rows)
    saved = io.BytesIO()
    torch.save(first.state_dict(), saved)
    saved.seek(0)
    other.load_state_dict(torch.load(saved, weights_only=True))
    # When both go on; then they are equal to the bit
    assert learn(first, rows) == learn(other, rows)
    assert torch.equal(first.model.logits_V, other.model.logits_V)


def test_a_preset_is_built_from_its_seed_alone() -> None:
    torch.manual_seed(1)
    one = build_model("tiny", seed=5)
    torch.manual_seed(2)
    two, three = build_model("tiny", seed=5), build_model("tiny", seed=6)
    pairs = list(zip(one.parameters(), two.parameters(), three.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b, _ in pairs)
    assert not all(torch.equal(a, c) for a, _, c in pairs)
    assert {parameter.dtype for parameter in one.parameters()} == {torch.float32}
    assert {each.dtype for each in build_model("tiny", dtype="bfloat16").parameters()} == {torch.bfloat16}
    assert not one.training
    assert sum(parameter.numel() for parameter in one.parameters()) < 200_000
    assert dict(one.named_parameters())["model.embed_tokens.weight"].shape[0] == model_config("tiny")["vocab_size"]


def _longer(row: Rollout) -> Rollout:
    return replace(
        row,
        completion_ids=np.arange(1, 9, dtype=np.int32),
        logprobs=np.zeros(8, np.float32),
        completion_mask=np.ones(8, np.uint8),
    )


def test_the_presets_are_for_environments_that_ship() -> None:
    from rollfab.workers.environments.registry import Registry

    assert set(PRESETS) <= set(Registry().offered())
    for settings in PRESETS.values():
        assert settings.group_count * settings.group_size <= 160  # a step must stay short on two cores
