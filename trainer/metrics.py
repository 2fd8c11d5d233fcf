"""A training step in numbers: one flat dict of floats, as wandb.log, trackio.log and TensorBoard take them.

- Of the groups: rewards, lengths, staleness, and how much of them was made on lent workers.
- Of the run: what has happened since the last call: tokens a second, and the mean of what it took (docs/metrics.md).
- Of the last comparison with the trainer's model, where there was one (docs/agreement.md).
- A figure that is not known, or no finite number, is left out. A broker that cannot be asked costs the figures that are
  its own, and no step.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from ..fabric.contract.clock import Clock, SystemClock
from ..fabric.contract.errors import FabricError
from ..fabric.contract.records import Group, Rollout
from ..fabric.ports.queue import LeaseBoard, RunStatus
from ..fabric.rules.queue.timings import Histograms

log = logging.getLogger(__name__)

TIMED = ("group", "trajectory_queue", "trajectory", "turn", "turn_queue", "environment_step", "reward")


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """A run at one time. at_s: by the caller's clock."""

    at_s: float
    status: RunStatus
    timings: Histograms


class StepMeter:
    """Makes one run's numbers, step by step."""

    def __init__(self, board: LeaseBoard, run_id: str, clock: Clock | None = None) -> None:
        self._board = board
        self._run_id = run_id
        self._clock = clock or SystemClock()
        self._last: Moment | None = None

    async def read(self, groups: Sequence[Group]) -> dict[str, float]:
        """Return the numbers of a step that learns from these groups."""
        found = group_metrics(groups)
        try:
            timings = (await self._board.timings(self._run_id)).get(self._run_id, {})
            status, workers = await self._board.run_status(self._run_id), await self._board.workers()
        except FabricError as error:
            log.warning("metrics.run_not_read", extra={"run_id": self._run_id, "error": str(error)})
            return found
        now = Moment(at_s=self._clock.now_s(), status=status, timings=timings)
        last, self._last = self._last, now
        roles = {name: info.role for name, (info, _) in workers.items()}
        found |= staleness_metrics(groups, status.head_version) | lent_metrics(groups, roles)
        found |= status.agreement.metrics() if status.agreement is not None else {}
        found |= run_metrics(last, now) if last is not None else {}
        return {name: float(value) for name, value in found.items() if math.isfinite(value)}


def deviation(rewards: Sequence[float]) -> float:
    """Compute the standard deviation of some rewards; 0 where they are all alike, whatever their mean is rounded to."""
    return float(np.std(rewards)) if min(rewards) != max(rewards) else 0.0


def group_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Compute the figures that follow from groups alone."""
    rollouts = list(_rollouts(groups))
    found = {
        "group_count": float(len(groups)),
        "rollout_count": float(len(rollouts)),
        "failure_count": float(sum(len(group.failures) for group in groups)),
        "cancelled_count": float(sum(len(group.cancelled) for group in groups)),
        "redelivered_count": float(sum(group.redelivered for group in groups)),
    }
    if rewards := [rollout.reward for rollout in rollouts if rollout.reward is not None]:
        found |= {"reward_min": min(rewards), "reward_max": max(rewards)}
        with np.errstate(over="ignore", invalid="ignore"):  # what is too large for a number is left out
            found |= {"reward_mean": float(np.mean(rewards)), "reward_deviation": deviation(rewards)}
    if rollouts:
        made = [int(rollout.completion_mask.sum()) for rollout in rollouts]
        found |= {"completion_tokens_mean": fmean(made), "completion_tokens_max": float(max(made))}
        found["turn_count_mean"] = fmean(rollout.turn_count for rollout in rollouts)
        found["cut_off_fraction"] = fmean(rollout.finish_reason != "terminated" for rollout in rollouts)
    return {name: value for name, value in found.items() if math.isfinite(value)}


def staleness_metrics(groups: Sequence[Group], head_version: int) -> dict[str, float]:
    """Compute how many versions the oldest token of each rollout is behind the head."""
    versions = [rollout.policy_version for rollout in _rollouts(groups) if rollout.policy_version >= 0]
    behind = [max(0, head_version - version) for version in versions] if head_version >= 0 else []
    return {"staleness_steps_mean": fmean(behind), "staleness_steps_max": float(max(behind))} if behind else {}


def lent_metrics(groups: Sequence[Group], roles: Mapping[str, str]) -> dict[str, float]:
    """Compute the fraction of tokens made on lent workers, of those made by workers that are still known."""
    counts = {"dedicated": 0, "serving": 0}
    for rollout in _rollouts(groups):
        for span in rollout.spans:
            role = roles.get(span.worker_id, "")
            if role in counts:
                counts[role] += span.end - span.start
    total = sum(counts.values())
    return {"lent_tokens_fraction": counts["serving"] / total} if total else {}


def run_metrics(before: Moment, now: Moment) -> dict[str, float]:
    """Compute what a run did between two moments; nothing of a count that began anew."""
    found: dict[str, float] = {}
    passed_s = now.at_s - before.at_s
    made = now.status.counters.get("tokens", 0) - before.status.counters.get("tokens", 0)
    if passed_s > 0 and made >= 0:
        found["tokens_per_s"] = made / passed_s
    for name in TIMED:
        (count, sum_s), (was_count, was_s) = _total(now.timings, name), _total(before.timings, name)
        if count > was_count and sum_s >= was_s:
            found[f"{name}_s_mean"] = (sum_s - was_s) / (count - was_count)
    return found


def _total(timings: Histograms, name: str) -> tuple[int, float]:
    found = [histogram for (timed, _), histogram in timings.items() if timed == name]
    return sum(sum(each.counts) for each in found), sum(each.sum_s for each in found)


def _rollouts(groups: Sequence[Group]) -> Iterator[Rollout]:
    return (rollout for group in groups for rollout in group.rollouts)
