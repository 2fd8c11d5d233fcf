"""From groups of rollouts to padded tensors.

B rollouts, T tokens of the longest (prompt and completion), G rollouts of one group.

- Rows are padded on the right, so a causal model needs no attention mask: padding never precedes a token.
- Position t of `completion_mask_B_T` and `logprobs_B_T` speaks of token t itself, not of the one that follows it.
- Rollouts that failed are not in a group at all (`Group.failures`); nothing here is ever scored as 0 for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..fabric.contract.records import Group, Rollout

VARIANCE_MIN = 1e-12  # rewards of one group that differ by less are one reward in float arithmetic


@dataclass(frozen=True, slots=True)
class Batch:
    """Padded rollouts.

    tokens_B_T: int64, padded with 0. completion_mask_B_T: bool, True where the policy made the token.
    logprobs_B_T: float32, natural log, as sampled; 0 where the mask is False.
    versions_B_T: int64, the policy version that made the token, -1 where none did.
    advantages_B: float32. rewards_B: float32. turn_counts_B: int64.
    """

    tokens_B_T: Tensor
    completion_mask_B_T: Tensor
    logprobs_B_T: Tensor
    versions_B_T: Tensor
    advantages_B: Tensor
    rewards_B: Tensor
    turn_counts_B: Tensor

    def __len__(self) -> int:
        return int(self.tokens_B_T.shape[0])

    def rows(self, index_B: Tensor) -> Batch:
        """The batch of some rows; index_B: int64, shape (B',)."""
        return Batch(*(getattr(self, name)[index_B] for name in Batch.__slots__))

    def to(self, device: Any) -> Batch:
        """The same batch on another device."""
        return Batch(*(getattr(self, name).to(device) for name in Batch.__slots__))


def group_advantages(rewards_G: NDArray[np.float32]) -> NDArray[np.float32]:
    """How much better than its group each rollout was, in standard deviations of the group.

    A group whose rewards are all equal says nothing about which rollout was better: zeros.

    Args:
        rewards_G: float32, shape (G,), finite.

    Returns:
        float32, shape (G,), mean 0.

    Source: GRPO, "DeepSeekMath" (arXiv 2402.03300), outcome supervision.
    """
    assert np.isfinite(rewards_G).all()
    if not len(rewards_G):
        return np.zeros(0, dtype=np.float32)
    centred_G = rewards_G.astype(np.float64) - rewards_G.mean(dtype=np.float64)
    variance = float(np.mean(centred_G**2))
    if variance < VARIANCE_MIN:
        return np.zeros(len(rewards_G), dtype=np.float32)
    advantages_G: NDArray[np.float32] = (centred_G / np.sqrt(variance)).astype(np.float32)
    return advantages_G


def pad_groups(groups: Sequence[Group]) -> Batch:
    """All rollouts of `groups`, in order, as one batch on the CPU.

    Groups without rollouts add no rows. There must be at least one rollout, and every one must have its reward.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    assert rollouts, "no rollouts: every trajectory of these groups failed"
    rewards_B = np.array([_reward(rollout) for rollout in rollouts], dtype=np.float32)
    advantages: list[NDArray[np.float32]] = []
    start = 0
    for group in groups:
        advantages.append(group_advantages(rewards_B[start : start + len(group.rollouts)]))
        start += len(group.rollouts)
    length = max(len(rollout.prompt_ids) + len(rollout.completion_ids) for rollout in rollouts)
    tokens_B_T = np.zeros((len(rollouts), length), dtype=np.int64)
    mask_B_T = np.zeros((len(rollouts), length), dtype=bool)
    logprobs_B_T = np.zeros((len(rollouts), length), dtype=np.float32)
    versions_B_T = np.full((len(rollouts), length), -1, dtype=np.int64)
    for row, rollout in enumerate(rollouts):
        middle = len(rollout.prompt_ids)
        end = middle + len(rollout.completion_ids)
        tokens_B_T[row, :middle] = rollout.prompt_ids
        tokens_B_T[row, middle:end] = rollout.completion_ids
        mask_B_T[row, middle:end] = rollout.completion_mask != 0
        logprobs_B_T[row, middle:end] = rollout.logprobs
        for span in rollout.spans:
            versions_B_T[row, middle + span.start : middle + span.end] = span.policy_version
    return Batch(
        tokens_B_T=torch.from_numpy(tokens_B_T),
        completion_mask_B_T=torch.from_numpy(mask_B_T),
        logprobs_B_T=torch.from_numpy(logprobs_B_T * mask_B_T),
        versions_B_T=torch.from_numpy(versions_B_T),
        advantages_B=torch.from_numpy(np.concatenate(advantages)),
        rewards_B=torch.from_numpy(rewards_B),
        turn_counts_B=torch.tensor([rollout.turn_count for rollout in rollouts]),
    )


def _reward(rollout: Rollout) -> float:
    assert rollout.reward is not None, f"rollout {rollout.trajectory_id} has no reward yet"
    return rollout.reward
