"""Trajectories and turns in memory: the twin of bus/trajectories.py and turns.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from ..ids import group_of, turn_id
from ..ports import Exchange, Reaped, TrajectoryClaim, TurnClaim, TurnProgress, TurnPush, TurnSettle
from ..records import NO_IDS, NO_LOGPROBS, DeadLetter, Rollout, RunConfig, TurnResult
from ..rules.push import no_such_run
from .state import JobRecord, JobTable, MemoryBroker, RunState

CLAIM_MS = 5_000
TURN_CLAIM_MS = 2_000
SCORE_MS = 30_000
SCORE_COUNT_MAX = 20
LOSS_COUNT_MAX = 5
REASONS = {
    "lost": f"{LOSS_COUNT_MAX} agent workers died or froze while they held it",
    "unscored": f"its reward was asked for {SCORE_COUNT_MAX} times, without an answer: is a reward worker running?",
}


class RunPort:
    """What the ports of one run share."""

    def __init__(self, broker: MemoryBroker, run: RunConfig) -> None:
        self._broker = broker
        self._config = run

    @property
    def run(self) -> RunState:
        state = self._broker.runs.get(self._config.run_id)
        if state is None:
            raise no_such_run(self._config.run_id)
        return state

    def _take_ready(self, table: JobTable, worker_id: str, want: int, claim_ms: int) -> list[tuple[str, JobRecord]]:
        taken: list[tuple[str, JobRecord]] = []
        while table.ready and len(taken) < want:
            name = table.ready.pop(0)
            record = table.records.get(name)
            if record is None or record.state != "ready":
                continue
            record.state, record.fence, record.worker = "claimed", record.fence + 1, worker_id
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

    def _release(self, table: JobTable, worker_id: str, rows: Sequence[tuple[str, int, Any]]) -> None:
        for name, fence, log in rows:
            if not table.is_held(name, worker_id, fence):
                continue
            record = table.records[name]
            table.end_claim(name, record)
            record.state, record.worker = "ready", "-"
            if log is not None:
                table.logs[name] = log
            table.make_ready(name)
            self.run.count("released")

    def _expired(self, table: JobTable, worker_id: str, claim_ms: int, score_ms: int = 0) -> list[tuple[str, str, int]]:
        now = self._broker.now_ms()
        rows: list[tuple[str, str, int]] = []
        for name in [name for name, until in table.deadlines.items() if until <= now]:
            record = table.records.get(name)
            if record is None or record.state not in ("claimed", "scoring"):
                del table.deadlines[name]
                continue
            if record.state == "scoring":
                record.loss += 1
                what = "scoring" if record.loss < SCORE_COUNT_MAX else "unscored"
                table.deadlines[name] = now + score_ms
            else:
                what = self._take_back(table, name, record, worker_id, claim_ms)
            rows.append((what, name, record.fence))
        return rows

    def _take_back(self, table: JobTable, name: str, record: JobRecord, worker_id: str, claim_ms: int) -> str:
        table.end_claim(name, record)
        record.loss += 1
        self.run.count("reaped")
        if record.loss < LOSS_COUNT_MAX:
            record.state, record.worker = "ready", "-"
            table.make_ready(name)
            return "ready"
        record.fence, record.worker = record.fence + 1, worker_id
        table.deadlines[name] = self._broker.now_ms() + claim_ms
        table.held[worker_id] = table.held.get(worker_id, 0) + 1
        return "lost"


class MemoryTrajectoryQueue(RunPort):
    """TrajectoryQueue (see ports) in memory."""

    def __init__(
        self, broker: MemoryBroker, run: RunConfig, *, claim_ms: int = CLAIM_MS, score_ms: int = SCORE_MS
    ) -> None:
        super().__init__(broker, run)
        self._claim_ms = claim_ms
        self._score_ms = score_ms

    async def claim(self, worker_id: str, want: int) -> list[TrajectoryClaim]:
        run = self.run
        claims: list[TrajectoryClaim] = []
        for name, record in self._take_ready(run.trajectories, worker_id, want, self._claim_ms):
            turns: list[TurnResult] = []
            while (turn := turn_id(name, len(turns))) in run.results:
                turns.append(run.results[turn])
            claims.append(
                TrajectoryClaim(
                    job=run.trajectories.jobs[name],
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
        return self._settle(claim.fence, rollout, "completed" if is_scored else "scoring")

    def _settle(self, fence: int, rollout: Rollout, state: str) -> bool:
        run, name = self.run, rollout.trajectory_id
        record = run.trajectories.records.get(name)
        if record is not None and record.fence == fence and record.state == state:
            return True
        if record is None or record.fence != fence or record.state not in ("claimed", "scoring"):
            run.count("refused")
            return False
        run.trajectories.end_claim(name, record)
        run.groups[rollout.group_id].rollouts[name] = rollout
        run.forget_turns(name)
        run.trajectories.logs.pop(name, None)
        record.state = state
        if state == "scoring":
            run.trajectories.deadlines[name] = self._broker.now_ms() + self._score_ms
        else:
            run.trajectories.jobs.pop(name, None)
            run.close(rollout.group_id, "completed")
        return True

    async def score(self, trajectory_id: str, fence: int, reward: float) -> bool:
        found = self._made(trajectory_id)
        return found is not None and self._settle(fence, dataclasses.replace(found[1], reward=reward), "completed")

    async def scoring(self, trajectory_id: str) -> tuple[dict[str, Any], Rollout] | None:
        found = self._made(trajectory_id)
        return found if found is not None and found[1].reward is None else None

    def _made(self, trajectory_id: str) -> tuple[dict[str, Any], Rollout] | None:
        group = self.run.groups.get(group_of(trajectory_id))
        rollout = group.rollouts.get(trajectory_id) if group else None
        return None if group is None or rollout is None else (group.task, rollout)

    async def fail(self, trajectory_id: str, fence: int, letter: DeadLetter, *, is_final: bool = False) -> str:
        run = self.run
        record = run.trajectories.records.get(trajectory_id)
        if record is None or record.fence != fence or record.state not in ("claimed", "scoring"):
            return "lost"
        run.trajectories.end_claim(trajectory_id, record)
        run.forget_turns(trajectory_id)
        run.trajectories.logs.pop(trajectory_id, None)
        run.groups[group_of(trajectory_id)].rollouts.pop(trajectory_id, None)
        record.attempt, record.worker = record.attempt + 1, "-"
        run.count("attempts_failed")
        if not is_final and record.attempt < self._config.attempt_count_max:
            record.state = "ready"
            run.trajectories.make_ready(trajectory_id)
            return "retry"
        record.state = "failed"
        run.trajectories.jobs.pop(trajectory_id, None)
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
            if what in REASONS:
                await self.fail(name, fence, self._given_up(worker_id, name, REASONS[what]), is_final=True)
        return Reaped(
            ready_count=sum(row[0] == "ready" for row in rows),
            scoring=tuple((name, fence) for what, name, fence in rows if what == "scoring"),
            dead_count=sum(row[0] in REASONS for row in rows),
        )

    def _given_up(self, worker_id: str, name: str, reason: str) -> DeadLetter:
        return DeadLetter(
            trajectory_id=name,
            run_id=self._config.run_id,
            worker_id=worker_id,
            reason=reason,
            traceback="",
            attempt=0,
            job=dataclasses.asdict(self.run.trajectories.jobs[name]),
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
                run.turns.records[name] = JobRecord()
                run.turns.make_ready(name)
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
    ) -> Exchange:
        outcome = Exchange()
        outcome.refused = [
            row.claim.job.turn_id for row in settles if not self._settle(worker_id, row.claim, row.result)
        ]
        rows = [(row.claim.job.turn_id, row.claim.fence, row.log) for row in progress]
        outcome.lost = self._renew(self.run.turns, worker_id, self._claim_ms, rows)
        if want > 0:
            self._claim(worker_id, want, lease_epoch, active_version, outcome)
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
            if claim.fence > 1:
                run.count("turns_resumed")
            run.count("tokens", len(result.completion_ids))
        return True

    def _claim(self, worker_id: str, want: int, epoch: int, active_version: int, outcome: Exchange) -> None:
        run = self.run
        lease = run.leases.get(worker_id)
        if lease is None or lease[0] != epoch or (lease[2] and lease[2] <= self._broker.now_ms()):
            outcome.has_lease = False
            return
        if run.head_version - active_version > run.config.staleness:
            outcome.behind = run.head_version
            return
        want = min(want, lease[1] - run.turns.held.get(worker_id, 0))
        for name, record in self._take_ready(run.turns, worker_id, want, self._claim_ms):
            outcome.claims.append(
                TurnClaim(job=run.turns.jobs[name], fence=record.fence, loss=record.loss, log=run.turns.logs.get(name))
            )

    async def release(self, worker_id: str, progress: Sequence[TurnProgress]) -> None:
        rows = [(row.claim.job.turn_id, row.claim.fence, row.log) for row in progress]
        self._release(self.run.turns, worker_id, rows)

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
            error=f"{LOSS_COUNT_MAX} workers died or froze while they ran turn {name}",
        )
        return TurnSettle(
            claim=TurnClaim(job=self.run.turns.jobs[name], fence=fence, loss=LOSS_COUNT_MAX), result=result
        )

    async def wait(self, timeout_s: float) -> None:
        await self._broker.wait(self.run.turns.bell, timeout_s)
