"""Our own reward functions: each scores a finished rollout in place of the environment's own sum.

A reward function takes the task and the rollout and returns a finite float. It runs in a reward worker, may be called
twice for one rollout, and must give the same answer both times. An exception fails the attempt; it never counts as 0.
"""

from __future__ import annotations

from typing import Any

from ...fabric.contract.errors import RewardFailed
from ...fabric.contract.records import Rollout, sum_rewards


def environment_sum(task: dict[str, Any], rollout: Rollout) -> float:
    """Sum the environment's own rewards, turn by turn.

    Raises:
        RewardFailed: the rollout carries no rewards by turn, or their sum overflows.
    """
    rewards = rollout.info.get("rewards")
    if rewards is None:
        raise RewardFailed(
            f"rollout {rollout.trajectory_id} carries no rewards by turn, so they cannot be summed", reason="reward"
        )
    return sum_rewards(rewards, f"the environment of rollout {rollout.trajectory_id}", RewardFailed)


def success(task: dict[str, Any], rollout: Rollout) -> float:
    """Return 1 if the environment said at the end that its task was solved, else 0.

    Raises:
        RewardFailed: the environment ended by itself without info["success"].
    """
    said = rollout.info.get("success")
    if said is None and rollout.finish_reason == "terminated":
        raise RewardFailed(
            f"the environment of rollout {rollout.trajectory_id} ended without info['success']: use another reward",
            reason="reward",
        )
    return float(bool(said))
