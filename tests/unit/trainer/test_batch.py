"""Do groups become tensors without a token, mask or version moving?"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollfab.fabric.contract.records import Failure, Group, Node, Rollout, Span
from rollfab.trainer.corrections import group_advantages, loss_shares, made_count, pad_rows
from rollfab.trainer.grpo import _describe, pad_groups
from tests.support.records import new_rollout


def rollout(
    prompt: list[int], completion: list[int], mask: list[int], *, reward: float | None = 0.0, **other: Any
) -> Rollout:
    return new_rollout(
        completion,
        **{
            "reward": reward,
            "turn_count": sum(mask),
            "prompt_ids": np.array(prompt, np.int32),
            "logprobs": -np.array(mask, np.float32),
            "completion_mask": np.array(mask, np.uint8),
            **other,
        },
    )


def group(*rollouts: Rollout, failures: tuple[Failure, ...] = ()) -> Group:
    return Group(group_id="g", task_id="t", rollouts=rollouts, failures=failures)


def test_rows_are_padded_on_the_right() -> None:
    batch = pad_groups([group(rollout([5], [6, 7, 8], [1, 0, 1]), rollout([5, 9], [6], [1]))])
    assert batch.tokens_B_T.tolist() == [[5, 6, 7, 8], [5, 9, 6, 0]]
    assert batch.completion_mask_B_T.tolist() == [[False, True, False, True], [False, False, True, False]]
    assert batch.logprobs_B_T.tolist() == [[0.0, -1.0, 0.0, -1.0], [0.0, 0.0, -1.0, 0.0]]


def test_every_token_carries_the_version_that_made_it() -> None:
    spans = (Span(0, 1, "w1", 3), Span(2, 3, "w2", 4))
    batch = pad_groups([group(rollout([5], [6, 7, 8], [1, 0, 1], spans=spans))])
    assert batch.versions_B_T.tolist() == [[-1, 3, -1, 4]]


def test_log_probabilities_outside_the_mask_count_for_nothing() -> None:
    batch = pad_groups([group(rollout([5], [6, 7], [1, 0], logprobs=np.array([-1, -9], np.float32)))])
    assert batch.logprobs_B_T.tolist() == [[0.0, -1.0, 0.0]]


def test_each_group_is_its_own_yardstick() -> None:
    # Given an easy task and a hard one; when their rewards become advantages
    easy = [rollout([1], [2], [1], reward=reward) for reward in (1.0, 0.8)]
    hard = [rollout([1], [2], [1], reward=reward) for reward in (0.2, 0.0)]
    batch = pad_groups([group(*easy), group(*hard)])
    # Then the better of the hard task is worth as much as the better of the easy one
    assert batch.advantages_B.tolist() == pytest.approx([1.0, -1.0, 1.0, -1.0], abs=1e-5)


def test_a_group_without_rollouts_adds_no_rows() -> None:
    failed = group(failures=(Failure("g.0", "it raised"), Failure("g.1", "it raised")))
    batch = pad_groups([failed, group(rollout([1], [2], [1], reward=3.0)), failed])
    assert len(batch) == 1
    assert batch.advantages_B.tolist() == [0.0]


def test_a_rollout_without_its_reward_is_never_taken_for_zero() -> None:
    with pytest.raises(AssertionError, match="no reward"):
        pad_groups([group(rollout([1], [2], [1], reward=None))])


def test_nothing_but_failures_is_no_batch() -> None:
    with pytest.raises(AssertionError, match="failed"):
        pad_groups([group(failures=(Failure("g.0", "it raised"),))])


def test_rows_keep_together() -> None:
    import torch

    batch = pad_groups([group(*[rollout([n], [n], [1], reward=float(n % 2)) for n in range(4)])])
    part = batch.rows(torch.tensor([3, 0]))
    assert part.tokens_B_T.tolist() == [[3, 3], [0, 0]]
    assert part.advantages_B.tolist() == [1.0, -1.0]


def test_branches_are_rows_and_their_tokens_count_once() -> None:
    # Given a rollout whose second turn was made twice, and one in a line
    nodes = (Node(-1, 2), Node(0, 3), Node(0, 4))
    spans = (Span(0, 1, "w", 5), Span(2, 3, "w", 6), Span(3, 4, "w", 7))
    branched = rollout([1], [2, 3, 4, 5], [1, 0, 1, 1], reward=1.0, nodes=nodes, spans=spans)
    groups = [group(branched, rollout([1], [9], [1], reward=0.0))]
    batch = pad_groups(groups)
    # Then
    assert batch.tokens_B_T.tolist() == [[1, 2, 3, 4], [1, 2, 3, 5], [1, 9, 0, 0]]
    assert batch.completion_mask_B_T.int().tolist() == [[0, 1, 0, 1], [0, 0, 0, 1], [0, 1, 0, 0]]
    assert batch.versions_B_T.tolist() == [[-1, 5, -1, 6], [-1, 5, -1, 7], [-1, 0, -1, -1]]
    assert batch.advantages_B.tolist() == [1.0, 1.0, -1.0]
    # And as one rollout they have half of the loss, though they are two rows
    rows = pad_rows(groups)
    assert (rows.rollout_B.tolist(), made_count(branched)) == ([0, 0, 1], 3)
    shares = loss_shares(rows.completion_mask_B_T, "rollout", rollout_B=rows.rollout_B)
    assert shares.sum(axis=1).tolist() == pytest.approx([1 / 3, 1 / 6, 1 / 2])


@given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=32))
def test_advantages_are_centred_and_scaled(rewards: list[float]) -> None:
    advantages = group_advantages(np.array(rewards, np.float32))
    assert advantages.dtype == np.float32 and np.isfinite(advantages).all()
    assert abs(advantages.mean()) < 1e-3
    if advantages.any():
        assert advantages.std() == pytest.approx(1.0, abs=1e-3)
        assert advantages[int(np.argmax(rewards))] > 0 > advantages[int(np.argmin(rewards))]


@pytest.mark.parametrize("reward", [0.1, 0.7, 1 / 3])
def test_equal_rewards_of_a_step_do_not_deviate(reward: float) -> None:
    groups = [group(*[rollout([n], [n], [1], reward=reward) for n in range(30)])]
    assert _describe(groups, pad_groups(groups))["reward_std"] == 0
