"""Trajectories and turns in memory: the twin of queue/trajectories.py and turns.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from ..contract.ids import group_of, turn_id
from ..contract.records import NO_IDS, NO_LOGPROBS, DeadLetter, Rollout, RunConfig, TurnResult
from ..ports.queue import Exchange, Reaped, ScoreClaim, TrajectoryClaim, TurnClaim, TurnProgress, TurnPush, TurnSettle
from ..rules.queue.retries import (
    BLAME_COUNT_MAX,
    GIVEN_UP,
    PROCESS_LOSS,
    RERUN_COUNT_MAX,
    SCORE_LOSS_MAX,
    Suspicion,
    after_loss,
    after_stall,
    given_up,
    is_stale,
    is_suspect,
    lost_turn,
    too_stale,
)
from .state import FENCES_PER_CLAIM, JobRecord, JobTable, MemoryBroker, RunState

CLAIM_MS = 2_000
TURN_CLAIM_MS = 2_000
SCORE_MS = 2_000


class RunPort:
    """What the ports of one run share."""

    def __init__(self, broker: MemoryBroker, run: RunConfig) -> None:
        self._broker = broker
        self._config = run

    @property
    def run(self) -> RunState:
        state = self._broker.runs.get(self._config.run_id)
        if state is None:
            raise self._broker.no_run(self._config.run_id)
        return state

    def _take_ready(
        self,
        table: JobTable,
        worker_id: str,
        want: int,
        claim_ms: int,
        *,
        class_count: int = 3,
        takes_suspect: bool = True,
        is_inside: bool = True,
    ) -> list[tuple[str, JobRecord]]:
        taken: list[tuple[str, JobRecord]] = []
        names = [table.suspects.pop(0)] if takes_suspect and want > 0 and table.suspects else []
        while len(taken) < want:
            waiting = names or next(filter(None, table.ready[:class_count]), [])
            if not waiting:
                break
            name = waiting.pop(0)
            record = table.records.get(name)
            if record is None or record.state != "ready":
                continue
            if is_suspect(record.loss) and not takes_suspect:
                table.suspects.append(name)
                continue
            takes_suspect = takes_suspect and not is_suspect(record.loss)
            record.state, record.fence, record.worker = "claimed", record.fence + 1, worker_id
            record.is_inside = is_inside
            table.deadlines[name] = self._broker.now_ms() + claim_ms
            table.held[worker_id] = table.held.get(worker_id, 0) + 1
            taken.append((name, record))
        return taken

    def _renew(self, table: JobTable, worker_id: str, claim_ms: int, rows: Sequence[tuple[str, int, Any]]) -> list[str]:
        lost: list[str] = []
        for name, fence, log in rows:
            if not table.is_held(name, worker_id, fence):
                lost.append(name)
                continue
            table.deadlines[name] = self._broker.now_ms() + claim_ms
            if log is not None:
                table.logs[name] = log
        return lost

    def _release(
        self, table: JobTable, worker_id: str, rows: Sequence[tuple[str, int, Any]], *, is_stalled: bool = False
    ) -> None:
        for name, fence, log in rows:
            if not table.is_held(name, worker_id, fence):
                continue
            record = table.records[name]
            if log is not None:
                table.logs[name] = log
            if is_stalled:
                record.suspicion = after_stall(record.suspicion, self._come(table, name, record)[0])
                if record.blame >= BLAME_COUNT_MAX:
                    table.deadlines[name] = 0
                    continue
            table.end_claim(name, record)
            record.state, record.worker = "ready", "-"
            self.run.make_ready(table, name, was_held=True)
            self.run.count("stalled" if is_stalled else "released")

    def _expired(self, table: JobTable, worker_id: str, claim_ms: int, score_ms: int = 0) -> list[tuple[str, str, int]]:
        now = self._broker.now_ms()
        rows: list[tuple[str, str, int]] = []
        for name in [name for name, until in table.deadlines.items() if until <= now]:
            record = table.records.get(name)
            if record is None or record.state not in ("claimed", "scoring"):
                del table.deadlines[name]
                continue
            if record.state == "scoring":
                if record.worker != "-":  # it had begun, and fell silent
                    record.loss, record.worker = record.loss + 1, "-"
                    self.run.count("rewards_lost")
                what = "scoring" if record.loss < SCORE_LOSS_MAX else "unscored"
                table.deadlines[name] = now + score_ms
            else:
                what = self._take_back(table, name, record, worker_id, claim_ms)
            rows.append((what, name, record.fence))
        return rows

    def _take_back(self, table: JobTable, name: str, record: JobRecord, worker_id: str, claim_ms: int) -> str:
        come, could_be_it = self._come(table, name, record)
        table.end_claim(name, record)
        record.suspicion = after_loss(record.suspicion, come, could_be_it=could_be_it)
        self.run.count("reaped")
        if record.blame < BLAME_COUNT_MAX:
            record.state, record.worker = "ready", "-"
            self.run.make_ready(table, name, was_held=True)
            return "ready"
        record.fence, record.worker = record.fence + 1, worker_id
        table.deadlines[name] = self._broker.now_ms() + claim_ms
        table.held[worker_id] = table.held.get(worker_id, 0) + 1
        return "lost"

    def _come(self, table: JobTable, name: str, record: JobRecord) -> tuple[int, bool]:
        """How far a job has come, and whether its worker was at it: a trajectory whose turn is under way only waits."""
        if table is self.run.turns:
            log = table.logs.get(name)
            return (len(log.encode()) if log is not None else 0), True
        come, turns = record.seen, self.run.turns.records
        while (turn := turns.get(turn_id(name, come))) is not None and turn.state == "settled":
            come += 1
        return come, record.is_inside and turn is None


def _may_settle(record: JobRecord, fence: int, worker_id: str) -> bool:
    """As in queue/lua/jobs/settle_trajectory.lua."""
    if record.fence != fence:
        return False
    return record.state == "scoring" if not worker_id else (record.state, record.worker) == ("claimed", worker_id)


class MemoryTrajectoryQueue(RunPort):
    """TrajectoryQueue (see ports) in memory."""

    def __init__(
        self, broker: MemoryBroker, run: RunConfig, *, claim_ms: int = CLAIM_MS, score_ms: int = SCORE_MS
    ) -> None:
        super().__init__(broker, run)
        self._claim_ms = claim_ms
        self._score_ms = score_ms

    async def claim(
        self, worker_id: str, want: int, *, takes_suspect: bool = True, is_inside: bool = True
    ) -> list[TrajectoryClaim]:
        run = self.run
        claims: list[TrajectoryClaim] = []
        # As queue/lua/jobs/use/limit.lua.
        must_wait = run.bytes_held >= run.config.memory_bytes_max and bool(run.completed)
        count = 1 if must_wait else 3
        which: dict[str, Any] = {"class_count": count, "takes_suspect": takes_suspect, "is_inside": is_inside}
        for name, record in self._take_ready(run.trajectories, worker_id, want, self._claim_ms, **which):
            turns: list[TurnResult] = []
            while (turn := turn_id(name, len(turns))) in run.results:
                turns.append(run.results[turn])
            claims.append(
                TrajectoryClaim(
                    job=run.trajectories.jobs[name],
                    worker_id=worker_id,
                    fence=record.fence,
                    attempt=record.attempt,
                    loss=record.loss,
                    snapshot=run.trajectories.logs.get(name),
                    turns=tuple(turns),
                )
            )
        return claims

    async def renew(self, worker_id: str, claims: Sequence[TrajectoryClaim]) -> list[str]:
        rows = [(claim.job.trajectory_id, claim.fence, None) for claim in claims]
        return self._renew(self.run.trajectories, worker_id, self._claim_ms, rows)

    async def save(self, worker_id: str, claim: TrajectoryClaim, snapshot: bytes) -> bool:
        rows = [(claim.job.trajectory_id, claim.fence, snapshot)]
        return not self._renew(self.run.trajectories, worker_id, self._claim_ms, rows)

    async def settle(self, claim: TrajectoryClaim, rollout: Rollout, *, is_scored: bool) -> bool:
        return await self._settle(claim.fence, claim.worker_id, rollout, "completed" if is_scored else "scoring")

    async def _settle(self, fence: int, worker_id: str, rollout: Rollout, state: str) -> bool:
        run, name = self.run, rollout.trajectory_id
        record = run.trajectories.records.get(name)
        if record is not None and record.fence == fence and record.state == state:
            return True
        if record is None or not _may_settle(record, fence, worker_id):
            run.count("refused")
            return False
        is_old = is_stale(rollout.policy_version, run.head_version, run.config.staleness)
        if is_old and run.config.when_stale == "rerun":
            reason = too_stale(rollout.policy_version, run.head_version)
            letter = given_up(run.config.run_id, worker_id, run.trajectories.jobs[name], reason)
            self._fail(name, fence, letter, 0, RERUN_COUNT_MAX)
            return False
        run.trajectories.end_claim(name, record)
        run.keep_rollout(run.groups[rollout.group_id], rollout)
        run.forget_turns(name)
        run.trajectories.logs.pop(name, None)
        record.state, record.suspicion, record.worker = state, Suspicion(), "-"
        if state == "scoring":
            run.trajectories.deadlines[name] = self._broker.now_ms() + self._score_ms
        else:
            run.note_reward(rollout)
            run.close(rollout.group_id, "completed")
        return True

    async def score(self, trajectory_id: str, fence: int, reward: float) -> bool:
        group = self.run.groups.get(group_of(trajectory_id))
        rollout = group.rollouts.get(trajectory_id) if group else None
        if rollout is None:
            return False
        return await self._settle(fence, "", dataclasses.replace(rollout, reward=reward), "completed")

    def _waiting(self, trajectory_id: str, fence: int) -> JobRecord | None:
        record = self.run.trajectories.records.get(trajectory_id)
        waits = record is not None and record.state == "scoring" and record.fence == fence
        return record if waits else None

    async def begin_score(
        self, trajectory_id: str, fence: int, worker_id: str, duration_s: float, *, loss_max: int = 0
    ) -> ScoreClaim | None:
        record, run = self._waiting(trajectory_id, fence), self.run
        if record is None or record.worker not in ("-", worker_id):
            return None
        if record.loss > loss_max:
            return ScoreClaim(loss=record.loss)
        record.worker = worker_id
        run.trajectories.deadlines[trajectory_id] = self._broker.now_ms() + duration_s * 1000
        group = run.groups[group_of(trajectory_id)]
        return ScoreClaim(loss=record.loss, rollout=group.rollouts[trajectory_id], task=group.task)

    async def lose_score(self, trajectory_id: str, fence: int, letter: DeadLetter) -> str:
        record, run = self._waiting(trajectory_id, fence), self.run
        if record is None:
            return "lost"
        if record.worker == letter.worker_id:
            run.count("rewards_lost")
            record.loss, record.worker = record.loss + PROCESS_LOSS, "-"
            run.trajectories.deadlines[trajectory_id] = self._broker.now_ms()
        if record.loss >= SCORE_LOSS_MAX:
            return await self.fail(trajectory_id, fence, letter, is_final=True)
        return "retry"

    async def keep_scoring(
        self, rows: Sequence[tuple[str, int]], duration_s: float, *, worker_id: str = "-"
    ) -> list[str]:
        gone = []
        for name, fence in rows:
            record = self._waiting(name, fence)
            if record is None:
                gone.append(name)
                continue
            self.run.trajectories.deadlines[name] = self._broker.now_ms() + duration_s * 1000
            if duration_s == 0 and record.worker == worker_id:
                record.worker = "-"
        return gone

    async def fail(self, trajectory_id: str, fence: int, letter: DeadLetter, *, is_final: bool = False) -> str:
        return self._fail(trajectory_id, fence, letter, 0 if is_final else self._config.attempt_count_max, 0)

    def _fail(self, trajectory_id: str, fence: int, letter: DeadLetter, attempt_max: int, rerun_max: int) -> str:
        run = self.run
        record = run.trajectories.records.get(trajectory_id)
        if record is None or record.fence != fence or record.state not in ("claimed", "scoring"):
            return "lost"
        run.trajectories.end_claim(trajectory_id, record)
        run.forget_turns(trajectory_id)
        run.trajectories.logs.pop(trajectory_id, None)
        run.forget_rollout(run.groups[group_of(trajectory_id)], trajectory_id)
        record.worker = "-"
        if record.state == "scoring" and not rerun_max:
            run.count("rewards_failed")
        record.suspicion = Suspicion()  # whoever says so lives
        if run.spend_attempt(record, attempt_max, rerun_max):
            record.state = "ready"
            run.make_ready(run.trajectories, trajectory_id, was_held=True)
            return "retry"
        record.state = "failed"
        run.dead[trajectory_id] = letter
        run.close(group_of(trajectory_id), "failed")
        return "dead"

    async def release(self, worker_id: str, claims: Sequence[TrajectoryClaim]) -> None:
        rows = [(claim.job.trajectory_id, claim.fence, None) for claim in claims]
        self._release(self.run.trajectories, worker_id, rows)

    async def reap(self, worker_id: str) -> Reaped:
        run = self.run
        rows = self._expired(run.trajectories, worker_id, self._claim_ms, self._score_ms)
        for what, name, fence in rows:
            if what in GIVEN_UP:
                letter = given_up(run.config.run_id, worker_id, run.trajectories.jobs[name], GIVEN_UP[what])
                await self.fail(name, fence, letter, is_final=True)
        return Reaped(
            ready_count=sum(row[0] == "ready" for row in rows),
            scoring=tuple((name, fence) for what, name, fence in rows if what == "scoring"),
            dead_count=sum(row[0] in GIVEN_UP for row in rows),
        )

    async def wait(self, timeout_s: float) -> None:
        await self._broker.wait(self.run.trajectories.bell, timeout_s)


class MemoryTurnQueue(RunPort):
    """TurnQueue (see ports) in memory."""

    def __init__(self, broker: MemoryBroker, run: RunConfig, *, claim_ms: int = TURN_CLAIM_MS) -> None:
        super().__init__(broker, run)
        self._claim_ms = claim_ms

    async def push(self, agent_id: str, pushes: Sequence[TurnPush]) -> list[str]:
        run = self.run
        lost: list[str] = []
        for push in pushes:
            if not run.trajectories.is_held(push.trajectory_id, agent_id, push.fence):
                lost.append(push.trajectory_id)
                continue
            name = push.job.turn_id
            record = run.turns.records.get(name)
            run.agents[name] = agent_id
            if record is None:
                run.turns.jobs[name] = push.job
                run.turns.records[name] = JobRecord(fence=push.fence * FENCES_PER_CLAIM)
                run.make_ready(run.turns, name, was_held=False)
            elif record.state == "settled":
                run.deliver(agent_id, run.results[name])
        return lost

    async def results(self, agent_id: str, timeout_s: float) -> list[TurnResult]:
        run = self.run
        deadline = self._broker.clock.now_s() + timeout_s
        while not run.inboxes.get(agent_id):
            left_s = deadline - self._broker.clock.now_s()
            if left_s <= 0:
                return []
            await self._broker.wait(run.inbox_bell, left_s)
        return run.inboxes.pop(agent_id)

    async def exchange(
        self,
        worker_id: str,
        *,
        settles: Sequence[TurnSettle] = (),
        progress: Sequence[TurnProgress] = (),
        want: int = 0,
        lease_epoch: int = 0,
        active_version: int = -1,
        takes_suspect: bool = True,
    ) -> Exchange:
        outcome = Exchange()
        outcome.refused = [
            row.claim.job.turn_id for row in settles if not self._settle(worker_id, row.claim, row.result)
        ]
        rows = [(row.claim.job.turn_id, row.claim.fence, row.log) for row in progress]
        outcome.lost = self._renew(self.run.turns, worker_id, self._claim_ms, rows)
        if want > 0:
            self._claim(worker_id, want, lease_epoch, active_version, outcome, takes_suspect)
        return outcome

    def _settle(self, worker_id: str, claim: TurnClaim, result: TurnResult) -> bool:
        run, name = self.run, claim.job.turn_id
        record = run.turns.records.get(name)
        if record is None or record.fence != claim.fence or record.worker != worker_id or record.state == "ready":
            run.count("refused")
            return False
        if record.state == "claimed":
            run.turns.end_claim(name, record)
            record.state = "settled"
            run.turns.jobs.pop(name, None)
            run.turns.logs.pop(name, None)
            run.results[name] = result
            run.deliver(run.agents[name], result)
            run.count("turns_settled")
            if claim.fence % FENCES_PER_CLAIM > 1:
                run.count("turns_resumed")
            run.count("tokens", len(result.completion_ids))
        return True

    def _claim(
        self, worker_id: str, want: int, epoch: int, active_version: int, outcome: Exchange, takes_suspect: bool = True
    ) -> None:
        run = self.run
        lease = run.leases.get(worker_id)
        if lease is None or lease[0] != epoch or (lease[2] and lease[2] <= self._broker.now_ms()):
            outcome.has_lease = False
            return
        if run.head_version - active_version > run.config.staleness:
            outcome.behind = run.head_version
            return
        want = min(want, lease[1] - run.turns.held.get(worker_id, 0))
        for name, record in self._take_ready(run.turns, worker_id, want, self._claim_ms, takes_suspect=takes_suspect):
            outcome.claims.append(
                TurnClaim(job=run.turns.jobs[name], fence=record.fence, loss=record.loss, log=run.turns.logs.get(name))
            )

    async def release(self, worker_id: str, progress: Sequence[TurnProgress], *, is_stalled: bool = False) -> None:
        rows = [(row.claim.job.turn_id, row.claim.fence, row.log) for row in progress]
        self._release(self.run.turns, worker_id, rows, is_stalled=is_stalled)

    async def reap(self, worker_id: str) -> Reaped:
        rows = self._expired(self.run.turns, worker_id, self._claim_ms)
        lost = [self._give_up(name, fence) for what, name, fence in rows if what == "lost"]
        if lost:
            await self.exchange(worker_id, settles=lost)
        return Reaped(ready_count=sum(row[0] == "ready" for row in rows), dead_count=len(lost))

    def _give_up(self, name: str, fence: int) -> TurnSettle:
        result = TurnResult(
            turn_id=name,
            finish_reason="error",
            spans=(),
            completion_ids=NO_IDS,
            logprobs=NO_LOGPROBS,
            error=lost_turn(name),
        )
        return TurnSettle(
            claim=TurnClaim(job=self.run.turns.jobs[name], fence=fence, loss=BLAME_COUNT_MAX), result=result
        )

    async def wait(self, timeout_s: float) -> None:
        await self._broker.wait(self.run.turns.bell, timeout_s)
