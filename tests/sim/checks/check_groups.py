"""Groups: everything pushed arrives once, whole, and exactly as the model and the environment make it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rollfab.fabric.contract.records import Group, Rollout, Sampling, TrajectoryJob
from rollfab.fabric.ports.queue import Delivery, GroupPush
from rollfab.fabric.rules.filters import Refill
from tests.sim import environment
from tests.sim.checks.check_trajectories import TrajectoryChecker
from tests.sim.checks.checkers import Facts, require
from tests.sim.policy import TEXT, context_of, ending, extend, next_token
from tests.sim.virtual_loop import Process


@dataclass(slots=True)
class Pushed:
    """A group as the checkers know it."""

    push: GroupPush
    delivered_count: int = 0
    holder: str = ""  # the process that received it last
    used_by: str | None = None
    is_dropped: bool = False  # so something replaces it
    end: str = ""  # consumed or cancelled


class GroupChecker:
    """Promises 1, 2 and 5, from end to end."""

    def __init__(self, facts: Facts, trajectories: TrajectoryChecker) -> None:
        self._facts = facts
        self._trajectories = trajectories
        self.groups: dict[str, Pushed] = {}
        self.pushed_count = 0
        self.failures: dict[str, None] = {}

    def rollouts_push(self, process: Process, taken: list[bool], groups: Sequence[GroupPush]) -> None:
        for group, is_new in zip(groups, taken, strict=True):
            known = self.groups.get(group.group_id)
            require(is_new or known is not None, f"group {group.group_id}: pushed and not taken")
            is_free = known is None or known.end == "cancelled"  # what was cancelled may be pushed anew
            require(not is_new or is_free, f"group {group.group_id}: taken twice")
            if is_new:
                self._add(process, group)

    def _add(self, process: Process, group: GroupPush) -> None:
        self.pushed_count += 1
        self.groups[group.group_id] = Pushed(group)
        self._facts.note(process.name, "push", group.group_id, f"{len(group.jobs)} trajectories")
        depth = sum(len(each.push.jobs) for each in self.groups.values() if not each.end)
        limit = self._facts.options.trajectory_count_max
        require(depth <= limit, f"group {group.group_id}: taken though the run holds {depth} of {limit} then")

    def rollouts_swap(self, process: Process, is_in: bool, delivery: Delivery, group: GroupPush) -> None:
        """Both happen, or one that had happened before has its other half."""
        known, each = self.groups.get(group.group_id), self.groups[delivery.group.group_id]
        if not each.end:
            self.rollouts_acknowledge(process, True, delivery)
        if is_in and known is None:
            wishes = {name: getattr(each.push, name) for name in ("quorum", "priority", "deadline_s")}
            self._add(process, replace(group, **wishes))
            self._trajectories.rollouts_push(process, [True], [self.groups[group.group_id].push])
        require(is_in or known is not None, f"group {delivery.group.group_id}: dropped, and nothing replaces it")

    def rollouts_receive(
        self, process: Process, deliveries: list[Delivery], consumer: str, count: int, timeout_s: float
    ) -> None:
        for delivery in deliveries:
            group = delivery.group
            self._facts.note(process.name, "receive", group.group_id, "again" if group.redelivered else "")
            each = self.groups.get(group.group_id)
            require(each is not None, f"group {group.group_id}: received, but nobody pushed it")
            assert each is not None
            require(not each.end, f"group {group.group_id}: received after it was {each.end}")
            is_again = each.delivered_count > 0
            require(group.redelivered == is_again, f"group {group.group_id}: redelivered is {group.redelivered}")
            each.delivered_count += 1
            each.holder = process.name
            self._check_fresh(group)
            self._check_group(group, each)

    def use(self, process: Process, group_id: str) -> None:
        """A trainer is done with a group."""
        self.groups[group_id].used_by = process.name
        self._facts.note(process.name, "use", group_id)

    def drop(self, process: Process, group_id: str) -> None:
        """A trainer does not want a group, and has a task in its place."""
        self.use(process, group_id)
        self.groups[group_id].is_dropped = True

    def check_replaced(self) -> None:
        """Nothing is lost of what was dropped."""
        names = Refill(tasks=iter(()), shard_count=self._facts.options.shard_count)
        for group_id, each in self.groups.items():
            is_replaced = names.name_of(group_id) in self.groups
            require(
                is_replaced or not each.is_dropped or each.end == "cancelled", f"group {group_id}: nothing replaces it"
            )

    def rollouts_acknowledge(self, process: Process, is_taken: bool, delivery: Delivery) -> None:
        each = self.groups[delivery.group.group_id]
        if is_taken:
            require(not each.end, f"group {delivery.group.group_id}: acknowledged after it was {each.end}")
            is_used = each.used_by is not None
            require(is_used, f"group {delivery.group.group_id}: acknowledged before the trainer was done with it")
            require(
                each.holder == process.name,
                f"group {delivery.group.group_id}: acknowledged by {process.name}, {each.holder} holds it",
            )
            each.end = "consumed"
            self.failures.update(dict.fromkeys(each.trajectory_id for each in delivery.group.failures))
            self._facts.note(process.name, "acknowledge", delivery.group.group_id)
        else:
            is_others = each.holder != process.name
            name = delivery.group.group_id
            require(each.end or is_others, f"group {name}: not acknowledged, though it is neither used nor gone")

    def rollouts_cancel(self, process: Process, is_cancelled: bool, group_id: str) -> None:
        if is_cancelled:
            require(not self.groups[group_id].end, f"group {group_id}: cancelled after it ended")
            self.groups[group_id].end = "cancelled"
            self._trajectories.close(group_id)
            self._facts.note(process.name, "cancel", group_id)

    # ---- what a group must be

    def _check_fresh(self, group: Group) -> None:
        options = self._facts.options
        lags = [self._facts.head_version - rollout.policy_version for rollout in group.rollouts]
        is_fresh = options.when_stale == "keep" or max(lags, default=0) <= options.staleness
        require(is_fresh, f"group {group.group_id}: delivered with rollouts that are {lags} versions old")
        is_enough = group.ended_by != "quorum" or len(group.rollouts) >= (options.quorum or options.group_size)
        require(is_enough, f"group {group.group_id}: {len(group.rollouts)} rollouts are no quorum")
        may_cancel = options.quorum is not None or options.deadline_s is not None
        require(may_cancel or not group.cancelled, f"group {group.group_id}: {group.cancelled} are missing")

    def _check_group(self, group: Group, each: Pushed) -> None:
        names = [rollout.trajectory_id for rollout in group.rollouts]
        expected = sorted(job.trajectory_id for job in each.push.jobs)
        found = sorted([*names, *(each.trajectory_id for each in group.failures), *group.cancelled])
        require(found == expected, f"group {group.group_id}: holds {found}, pushed were {expected}")
        jobs = {job.trajectory_id: job for job in each.push.jobs}
        for rollout in group.rollouts:
            self._check_rollout(rollout, jobs[rollout.trajectory_id])

    def _check_rollout(self, rollout: Rollout, job: TrajectoryJob) -> None:
        """Play the episode again, with the weights that the spans name, and compare everything."""
        name, options = f"rollout {rollout.trajectory_id}", self._facts.options
        spans = rollout.spans
        marks = rollout.completion_mask
        require(len(marks) == len(rollout.completion_ids) == len(rollout.logprobs), f"{name}: lengths differ")
        versions: dict[int, int] = {}
        for span in spans:
            versions.update(dict.fromkeys(range(span.start, span.end), span.policy_version))
        require(sorted(versions) == np.flatnonzero(marks).tolist(), f"{name}: spans and mask differ")
        require(len(versions) == sum(span.end - span.start for span in spans), f"{name}: spans overlap")
        world = _Play(job, options.turns, options.tokens, options.stops)
        ids, logprobs, rewards = world.play(versions, self._facts.weights)
        require(rollout.prompt_ids.tolist() == world.prompt_ids, f"{name}: its prompt is not the first observation")
        require(rollout.completion_ids.tolist() == ids, f"{name}: its tokens are not what model and world make")
        require(rollout.logprobs.tolist() == logprobs, f"{name}: its log-probabilities are not the model's")
        require(rollout.turn_count == len(rewards), f"{name}: {rollout.turn_count} turns, should be {len(rewards)}")
        require(rollout.info["rewards"] == rewards, f"{name}: its rewards are not the world's")
        expected = score(rollout) if options.has_reward else sum(rewards)
        require(rollout.reward == expected, f"{name}: reward is {rollout.reward}, should be {expected}")
        require(rollout.finish_reason == world.finish_reason, f"{name}: finished as {rollout.finish_reason!r}")


def score(rollout: Rollout) -> float:
    """The simulated reward function."""
    return float(len(rollout.completion_ids))


class _Play:
    """An episode without any fabric."""

    def __init__(self, job: TrajectoryJob, turns: int, tokens: int, stops: str) -> None:
        self._turns = turns
        self._sampling = Sampling(max_tokens=tokens, stop_ids=(*TEXT.encode(stops).tolist(), TEXT.eos_id))
        self._state, text = environment.begin(job.task, job.seed)
        self.prompt_ids: list[int] = TEXT.encode(text).tolist()
        self.finish_reason = ""

    def play(self, versions: dict[int, int], weights: dict[int, int]) -> tuple[list[int], list[float], list[float]]:
        """Tokens, log-probabilities and rewards, when the token at i is made by version versions[i]."""
        ids: list[int] = []
        logprobs: list[float] = []
        rewards: list[float] = []
        context = context_of(np.array(self.prompt_ids, np.int32))
        while not self.finish_reason:
            start, reason = len(ids), ""
            while not reason and len(ids) in versions:
                token, logprob = next_token(context, weights[versions[len(ids)]])
                context = extend(context, token)
                ids.append(token)
                logprobs.append(float(logprob))
                reason = ending(self._sampling, len(ids) - start, token)
            if not reason:
                break  # the spans stop in the middle of a turn: what is compared next will differ
            self._state, step = environment.follow(self._state, TEXT.decode(ids[start:]), len(rewards) + 1, self._turns)
            rewards.append(step.reward)
            self.finish_reason = "terminated" if step.terminated else "truncated" if step.truncated else ""
            if not step.is_done:
                for token in TEXT.encode(step.text).tolist():
                    context = extend(context, token)
                    ids.append(token)
                    logprobs.append(0.0)
        return ids, logprobs, rewards
