"""Trajectories: fences, zombies, and nothing forgotten on the way from one agent to the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rollfab.fabric.contract.ids import group_of
from rollfab.fabric.contract.records import DeadLetter, Rollout
from rollfab.fabric.ports.queue import GroupPush, NotPushed, Reaped, TrajectoryClaim, TurnPush
from rollfab.fabric.queue.trajectories import CLAIM_MS
from rollfab.fabric.rules.queue.retries import BLAME_COUNT_MAX, GIVEN_UP, SUSPECT_LOSS_COUNT
from tests.sim.checks.check_turns import TurnChecker
from tests.sim.checks.checkers import Facts, Hold, check_taken_over, require
from tests.sim.environment import KILLER
from tests.sim.virtual_loop import Process

CLAIM_S = CLAIM_MS / 1000 - 0.05


@dataclass(slots=True)
class Trajectory:
    """A trajectory as the checkers know it."""

    hold: Hold | None = None
    attempt: int = 0
    snapshot: bytes | None = None
    settled_fence: int | None = None
    scored_fence: int | None = None
    policy_version: int = -1  # of what was settled
    may_have_failed: bool = False  # its settling was refused: its claim was lost, or it was stale and runs again
    claim_count: int = 0
    fail_count: int = 0


class TrajectoryChecker:
    """Promises 2 and 3, for trajectories."""

    def __init__(self, facts: Facts, turns: TurnChecker) -> None:
        self._facts = facts
        self._strictest = facts.options
        self._turns = turns
        self.trajectories: dict[str, Trajectory] = {}
        self._deadlines: dict[str, float] = {}
        self._wanted: dict[str, int] = {}  # by group: how many complete trajectories complete it

    def rollouts_push(self, process: Process, taken: list[bool], groups: Sequence[GroupPush]) -> None:
        for group, is_new in zip(groups, taken, strict=True):
            if is_new:
                self._wanted[group.group_id] = group.quorum or len(group.jobs)
            for job in group.jobs if is_new else ():
                self.trajectories[job.trajectory_id] = Trajectory()
            if is_new and group.deadline_s is not None:
                self._deadlines[group.group_id] = self._facts.broker_ms(group.group_id) + group.deadline_s * 1000

    def rollouts_reap(self, process: Process, count: int) -> None:
        """Whatever is past its deadline is complete now: by this, or before, also if it was run again in between."""
        due = self._deadlines if count else {}
        past = [name for name, until in due.items() if until <= self._facts.broker_ms(name)]
        for group_id in past:
            self._facts.note(process.name, "deadline", group_id, f"{count} closed of {len(past)}")
            self.close(group_id)

    def trajectories_claim(
        self, process: Process, claims: list[TrajectoryClaim], worker_id: str, want: int, **_: Any
    ) -> None:
        for claim in claims:
            name = claim.job.trajectory_id
            each = self.trajectories.get(name)
            require(each is not None, f"trajectory {name}: handed out, but nobody pushed it")
            assert each is not None
            if claim.attempt != each.attempt:
                require(claim.attempt > each.attempt, f"trajectory {name}: attempt went back to {claim.attempt}")
                self._begin_again(name, each, claim.attempt)
            if each.may_have_failed and not claim.turns:
                self._begin_again(name, each, claim.attempt)
            check_taken_over(self._facts, f"trajectory {name}", each.hold, claim.fence, CLAIM_S)
            each.may_have_failed = False
            if each.settled_fence is not None:
                require(self._is_stale(each.policy_version), f"trajectory {name}: handed out after it was settled")
                self._begin_again(name, each, claim.attempt)
            saved = self._turns.results_of(name)
            require(
                [result.turn_id for result in claim.turns] == [result.turn_id for result in saved],
                f"trajectory {name}: handed out with {len(claim.turns)} turns, {len(saved)} were settled",
            )
            require(claim.snapshot == each.snapshot, f"trajectory {name}: handed out with another snapshot than saved")
            each.hold = Hold(process, worker_id, claim.fence, self._facts.now_s())
            each.claim_count += 1
            self._facts.note(
                process.name, "claim", name, f"fence {claim.fence}, attempt {claim.attempt}, {len(saved)} turns"
            )

    def trajectories_renew(
        self, process: Process, lost: list[str], worker_id: str, claims: Sequence[TrajectoryClaim]
    ) -> None:
        for claim in claims:
            if claim.job.trajectory_id not in lost:
                self._held(claim.job.trajectory_id, worker_id, claim.fence, "renewed").renewed_s = self._facts.now_s()

    def trajectories_save(
        self, process: Process, is_saved: bool, worker_id: str, claim: TrajectoryClaim, snapshot: bytes
    ) -> None:
        if is_saved:
            name = claim.job.trajectory_id
            self._held(name, worker_id, claim.fence, "saved").renewed_s = self._facts.now_s()
            self.trajectories[name].snapshot = snapshot

    def turns_push(
        self, process: Process, answers: list[NotPushed | None], agent_id: str, pushes: Sequence[TurnPush]
    ) -> None:
        for push, why_not in zip(pushes, answers, strict=True):
            require(why_not != "over", f"turn {push.job.turn_id}: refused, as if the trajectory had had all its turns")
            if why_not is None:
                self._held(push.trajectory_id, agent_id, push.fence, "given a turn")

    def trajectories_settle(
        self, process: Process, is_settled: bool, claim: TrajectoryClaim, rollout: Rollout, *, is_scored: bool
    ) -> None:
        name = claim.job.trajectory_id
        each = self.trajectories[name]
        if not is_settled:
            is_held = each.hold is not None and each.hold.is_live and each.hold.is_of(claim.worker_id, claim.fence)
            each.may_have_failed |= is_held and self._is_stale(rollout.policy_version)
            return self._facts.note(process.name, "refused", name, claim.fence)
        if each.settled_fence is None:
            hold = self._held(name, None, claim.fence, "settled")
            hold.is_live = False
            each.settled_fence = claim.fence
            each.scored_fence = claim.fence if is_scored else None
            each.policy_version = rollout.policy_version
            self._turns.forget(name)
            if is_scored:
                self._complete(group_of(name))
        require(each.settled_fence == claim.fence, f"trajectory {name}: settled twice, under {claim.fence} too")
        return self._facts.note(process.name, "settle", name, f"fence {claim.fence}, reward {rollout.reward}")

    def trajectories_score(
        self, process: Process, is_taken: bool, trajectory_id: str, fence: int, reward: float
    ) -> None:
        each = self.trajectories[trajectory_id]
        if not is_taken:
            if each.settled_fence == fence and each.scored_fence is None and self._is_stale(each.policy_version):
                self._begin_again(trajectory_id, each, each.attempt)
            return
        require(each.settled_fence == fence, f"trajectory {trajectory_id}: scored under fence {fence}, not its own")
        each.scored_fence = fence
        self._facts.note(process.name, "score", trajectory_id, reward)
        self._complete(group_of(trajectory_id))

    def trajectories_fail(
        self,
        process: Process,
        outcome: str,
        trajectory_id: str,
        fence: int,
        letter: DeadLetter,
        *,
        is_final: bool = False,
    ) -> None:
        self._facts.note(process.name, f"fail.{outcome}", trajectory_id, letter.reason)
        if outcome == "lost":
            return
        each = self.trajectories[trajectory_id]
        is_held = each.hold is not None and each.hold.fence == fence
        require(is_held, f"trajectory {trajectory_id}: failed under fence {fence}, which is not the last one")
        require(each.scored_fence is None, f"trajectory {trajectory_id}: failed after it was completed")
        each.fail_count += 1
        self._begin_again(trajectory_id, each, each.attempt + 1)

    def rollouts_retry(self, process: Process, verdicts: dict[str, str], trajectory_ids: Sequence[str]) -> None:
        """What was given up begins anew, with all its attempts."""
        for name in (name for name, verdict in verdicts.items() if verdict == "done"):
            each = self.trajectories[name]
            require(each.fail_count or each.claim_count, f"trajectory {name}: given up before it ever ran")
            each.claim_count = each.fail_count = 0
            self._begin_again(name, each, 0)
            self._facts.note(process.name, "retry", name)

    def trajectories_release(
        self, process: Process, result: None, worker_id: str, claims: Sequence[TrajectoryClaim]
    ) -> None:
        for claim in claims:
            each = self.trajectories.get(claim.job.trajectory_id)
            if each is not None and each.hold is not None and each.hold.is_of(worker_id, claim.fence):
                each.hold.is_live = False
                self._facts.note(process.name, "release", claim.job.trajectory_id)

    def trajectories_reap(self, process: Process, reaped: Reaped, worker_id: str) -> None:
        if reaped.ready_count or reaped.scoring or reaped.dead_count:
            details = f"{reaped.ready_count} ready, {len(reaped.scoring)} unscored, {reaped.dead_count} given up"
            self._facts.note(process.name, "reap", "", details)

    def check_dead(self, letter: DeadLetter) -> None:
        """A trajectory that was given up must have been tried often enough, or cost enough workers."""
        name, options = letter.trajectory_id, self._facts.options
        each = self.trajectories[name]
        is_tried = each.fail_count >= options.attempt_count_max
        is_costly = each.claim_count >= SUSPECT_LOSS_COUNT + BLAME_COUNT_MAX or each.settled_fence is not None
        is_guilty = options.kills and name == KILLER
        require(
            letter.reason != GIVEN_UP["lost"] or is_guilty,
            f"trajectory {name}: given up for its agents' deaths, and never ended one",
        )
        is_stale = letter.reason.startswith("stale")
        require(is_tried or is_costly or is_stale, f"trajectory {name}: given up too early, {letter.reason}")

    def _complete(self, group_id: str) -> None:
        """A trajectory is complete; with the quorum, so is its group, and the others are not wanted any more."""
        members = [each for name, each in self.trajectories.items() if group_of(name) == group_id]
        if sum(each.scored_fence is not None for each in members) >= self._wanted[group_id]:
            self.close(group_id)

    def close(self, group_id: str) -> None:
        """What of a group is not complete is not wanted any more."""
        for name, each in self.trajectories.items():
            if group_of(name) == group_id and each.scored_fence is None:
                self._begin_again(name, each, each.attempt)

    def _is_stale(self, version: int) -> bool:
        """Tell whether it may run again: what somebody has loosened since was not so when it was looked at."""
        options = self._strictest
        return options.when_stale == "rerun" and self._facts.head_version - version > options.staleness

    def _begin_again(self, name: str, each: Trajectory, attempt: int) -> None:
        each.attempt, each.snapshot, each.may_have_failed = attempt, None, False
        each.settled_fence = each.scored_fence = None
        if each.hold is not None:
            each.hold.is_live = False
        self._turns.forget(name)

    def _held(self, name: str, worker_id: str | None, fence: int, what: str) -> Hold:
        each = self.trajectories.get(name)
        hold = each.hold if each is not None else None
        is_held = hold is not None and hold.is_live and hold.is_of(worker_id or hold.worker_id, fence)
        require(is_held, f"trajectory {name}: {what} under fence {fence}, but it is not the holder's any more")
        assert hold is not None
        return hold
