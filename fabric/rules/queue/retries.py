"""Decides when a job is given up, and words the reason. queue/lua/jobs/use/suspect.lua counts.

A worker's death is not the fault of what it held. A job comes under suspicion only when it loses workers one after the
other and never gets on; then it is a suspect, of which a worker holds one at a time. A worker that is lost with a
suspect has nothing else to blame, and a job that is to blame for BLAME_COUNT_MAX of them is given up. Any progress
clears it: nothing that gets on is ever given up for its workers' deaths.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from ...contract.errors import ClaimLost
from ...contract.records import DeadLetter, TrajectoryJob

SUSPECT_LOSS_COUNT = 5  # workers lost one after the other, without progress, that make a job a suspect; with fewer a
# storm of kills makes suspects of many that only replay what they had, and those go on one at a time
BLAME_COUNT_MAX = 5  # workers lost with it as the only suspect, or that it stalled, until it is given up
SCORE_LOSS_MAX = 10  # of one reward. A worker that dies may compute many at once, and costs each 1; a process of a
PROCESS_LOSS = 5  # reward function computes one alone, so its second loss is the last
RERUN_COUNT_MAX = 20  # that often a trajectory may end too stale: by then the trainer is too fast for its runs

TAKEN_BACK = {"groups_completed": "groups_taken_back", "trajectories_completed": "rollouts_taken_back"}

GIVEN_UP = {
    "lost": (
        f"{BLAME_COUNT_MAX} agent workers died or froze while its environment ran in them, with no other suspect, and "
        'it never got on: without isolation = "none" and inline it has a process of its own, and can end only that'
    ),
    "unscored": "reward workers died or froze again and again while they computed its reward: run the reward function "
    "by hand on this task, and see their logs",
    "damaged": "what the broker held of it could not be read: somebody who may write there wrote over it",
}

NO_LETTER = "its dead letter was retried or discarded since"


def lost_turn(turn_id: str) -> str:
    """Say why a turn that costs every worker is given up."""
    return (
        f"{BLAME_COUNT_MAX} workers died or froze with turn {turn_id} as their only suspect, or stalled on it, "
        "and it never got on"
    )


def is_suspect(loss: int) -> bool:
    """Tell whether a job that lost so many workers is a suspect, of which a worker holds one at a time."""
    return loss >= SUSPECT_LOSS_COUNT


def too_stale(policy_version: int, head_version: int) -> str:
    """Say why a finished trajectory is run again, or given up."""
    return (
        f"stale: its oldest tokens are of policy version {policy_version}, the head is {head_version} by now; "
        'raise the run\'s staleness, or set its when_stale to "keep"'
    )


def is_stale(policy_version: int, head_version: int, staleness: int) -> bool:
    """Tell whether tokens of a version are too old to be trained on; -1: there are no tokens."""
    return policy_version >= 0 and head_version - policy_version > staleness


def ever(counters: Mapping[str, int], name: str) -> int:
    """Return a run's counter, with what was taken back since as it was too stale: it only grows."""
    return counters.get(name, 0) + counters.get(TAKEN_BACK.get(name, ""), 0)


def not_held(run_id: str, group_id: str) -> ClaimLost:
    """Make the error for a consumer that acknowledges a group it has lost meanwhile."""
    return ClaimLost(
        f"group {group_id!r} of run {run_id!r} is not acknowledged: another consumer took it over, or it runs again",
        run_id=run_id,
        job_id=group_id,
    )


def given_up(run_id: str, worker_id: str, job: TrajectoryJob, reason: str) -> DeadLetter:
    """Make the dead letter of a trajectory that no user's code made fail."""
    return DeadLetter(
        trajectory_id=job.trajectory_id,
        run_id=run_id,
        worker_id=worker_id,
        reason=reason,
        traceback="",
        attempt=0,
        job=dataclasses.asdict(job),
    )
