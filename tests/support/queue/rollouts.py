"""A finished trajectory for tests that do not run one."""

from __future__ import annotations

import numpy as np

from rollfab.fabric.contract.records import Rollout, Span, TrajectoryJob


def rollout_of(job: TrajectoryJob, reward: float | None = 1.0) -> Rollout:
    """One turn of two tokens, made at version 0."""
    return Rollout(
        trajectory_id=job.trajectory_id,
        group_id=job.group_id,
        task_id=job.task_id,
        reward=reward,
        finish_reason="terminated",
        turn_count=1,
        attempt=0,
        seed=job.seed,
        spans=(Span(0, 2, "w1", 0),),
        prompt_ids=np.array([1, 2, 3], np.int32),
        completion_ids=np.array([4, 5], np.int32),
        logprobs=np.array([-0.5, -0.25], np.float32),
        completion_mask=np.ones(2, np.uint8),
    )
