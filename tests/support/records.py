"""Finished turns and trajectories, for tests that run none: what a test does not name is the same everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rollfab.fabric.contract.records import Int32, Rollout, Span, TrajectoryJob, TurnResult

Ids = Sequence[int] | Int32


def made_of(ids: Ids, worker_id: str = "w1", version: int = 0) -> dict[str, Any]:
    """These tokens, as one worker made them at one version."""
    return {
        "spans": (Span(0, len(ids), worker_id, version),),
        "completion_ids": np.array(ids, np.int32),
        "logprobs": np.array([-0.5 / (index + 1) for index in range(len(ids))], np.float32),
    }


def result_of(turn_id: str, ids: Ids = (0,), **fields: Any) -> TurnResult:
    """A turn that made these tokens; any field may be another."""
    return TurnResult(turn_id=turn_id, **{"finish_reason": "stop", **made_of(ids), **fields})


def new_rollout(ids: Ids = (4, 5), **fields: Any) -> Rollout:
    """One turn of these tokens; any field may be another."""
    named = {"trajectory_id": "g.0", "group_id": "g", "task_id": "t", "seed": 0, "attempt": 0, "turn_count": 1}
    ended = {"reward": 1.0, "finish_reason": "terminated", "prompt_ids": np.array([1, 2, 3], np.int32)}
    return Rollout(**{**named, **ended, **made_of(ids), "completion_mask": np.ones(len(ids), np.uint8), **fields})


def rollout_of(job: TrajectoryJob, reward: float | None = 1.0, ids: Ids = (4, 5), **fields: Any) -> Rollout:
    """The rollout that a trajectory's job becomes."""
    named = {name: getattr(job, name) for name in ("trajectory_id", "group_id", "task_id", "seed")}
    return new_rollout(ids, **{**named, "reward": reward, **fields})
