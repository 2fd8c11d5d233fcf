"""When a job is given up, and in which words; Redis and memory say the same."""

from __future__ import annotations

import dataclasses

from ..errors import ClaimLost
from ..records import DeadLetter, TrajectoryJob

LOSS_COUNT_MAX = 5  # workers that one job may cost before it is taken for the cause
SCORE_LOSS_MAX = 10  # of one reward. A worker that dies may compute many at once, and costs each 1; a process of a
PROCESS_LOSS = 5  # reward function computes one alone, so its second loss is the last
RERUN_COUNT_MAX = 20  # that often a trajectory may end too stale: by then the trainer is too fast for its runs

GIVEN_UP = {
    "lost": f"{LOSS_COUNT_MAX} agent workers died or froze while they held it",
    "unscored": "reward workers died or froze again and again while they computed its reward: run the reward function "
    "by hand on this task, and see their logs",
}

NO_LETTER = "its dead letter was retried or discarded since"


def lost_turn(turn_id: str) -> str:
    """Why a turn that costs every worker is given up."""
    return f"{LOSS_COUNT_MAX} workers died, froze or stalled while they ran turn {turn_id}"


def too_stale(policy_version: int, head_version: int) -> str:
    """Why a finished trajectory is run again, or given up."""
    return (
        f"stale: its oldest tokens are of policy version {policy_version}, the head is {head_version} by now; "
        'raise staleness, or keep such rollouts with when_stale="keep"'
    )


def is_stale(policy_version: int, head_version: int, staleness: int) -> bool:
    """Whether tokens of a version are too old to be trained on; -1: there are none."""
    return policy_version >= 0 and head_version - policy_version > staleness


def not_held(run_id: str, group_id: str) -> ClaimLost:
    """A group is to be acknowledged by somebody who lost it meanwhile."""
    return ClaimLost(
        f"group {group_id!r} of run {run_id!r} is not acknowledged: another consumer took it over, or it runs again",
        run_id=run_id,
        job_id=group_id,
    )


def given_up(run_id: str, worker_id: str, job: TrajectoryJob, reason: str) -> DeadLetter:
    """The dead letter of a trajectory that no code of a user failed."""
    return DeadLetter(
        trajectory_id=job.trajectory_id,
        run_id=run_id,
        worker_id=worker_id,
        reason=reason,
        traceback="",
        attempt=0,
        job=dataclasses.asdict(job),
    )
