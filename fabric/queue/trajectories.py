"""Trajectories on Redis: claimed by agent workers, ended by settling, failing or cancelling.

- A claim ends CLAIM_MS after its last renewal; then anyone's reap gives the trajectory to another agent.
- Turns that an earlier claim of the same attempt settled come with the new claim, so the environment can be replayed.
- A trajectory whose job or settled turns cannot be read is given up as it is claimed, and holds up no other.
- A shard that fails takes nothing from the others: a call returns their claims, and raises the error only if it has
  nothing to return. Claims that were thrown away would count as those of a lost agent.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

from redis.asyncio import Redis

from ..broker.clients.translate import translate
from ..broker.clients.waiting import first_found
from ..contract.errors import FirstError, WireError
from ..contract.ids import group_of, turn_id
from ..contract.records import DeadLetter, Rollout, RunConfig, TurnResult
from ..contract.wire import load_json
from ..ports.queue import Reaped, ScoreClaim, TrajectoryClaim
from ..rules.queue.length import length_of, task_name
from ..rules.queue.retries import (
    BLAME_COUNT_MAX,
    GIVEN_UP,
    PROCESS_LOSS,
    RERUN_COUNT_MAX,
    SCORE_LOSS_MAX,
    SUSPECT_LOSS_COUNT,
    is_suspect,
    too_stale,
)
from .keys import RunShards, ShardKeys
from .rows import given_up_row, job_row, waited_s
from .scripts import Scripts

log = logging.getLogger(__name__)

CLAIM_MS = 2_000  # an agent renews four times as often; missing that means it is gone
SCORE_MS = 2_000  # within this a reward must have been asked for, or be renewed by the worker that computes it
REAP_COUNT = 256  # per call: bounds the time a script holds the broker


class RedisTrajectoryQueue:
    """TrajectoryQueue (see ports) of one run."""

    def __init__(self, client: Redis, run: RunConfig, *, claim_ms: int = CLAIM_MS, score_ms: int = SCORE_MS) -> None:
        self._client: Any = client  # its stubs do not know that replies are bytes
        self._scripts = Scripts(client)
        self._run = run
        self._shards = RunShards(run.run_id, run.shard_count)
        self._claim_ms = claim_ms
        self._score_ms = score_ms

    async def claim(
        self, worker_id: str, want: int, *, takes_suspect: bool = True, is_inside: bool = True
    ) -> list[TrajectoryClaim]:
        claims: list[TrajectoryClaim] = []
        first_error = FirstError()
        for keys in self._shards.in_turn():
            if want <= len(claims):
                break
            may_be = int(takes_suspect and not any(is_suspect(claim.loss) for claim in claims))
            args: list[Any] = [worker_id, want - len(claims), self._claim_ms, "-", 0, may_be, int(is_inside)]
            args += [SUSPECT_LOSS_COUNT, 0]
            with first_error, translate():
                answer = await self._scripts.call("claim", [keys, keys.trajectory], args)
                for row in answer[3:]:
                    claim = await self._claim(worker_id, keys, row, wall_ms=answer[1], first_fence=answer[2])
                    claims += [claim] if claim is not None else []
        if not claims:
            first_error.raise_it()
        return claims

    async def _claim(
        self, worker_id: str, keys: ShardKeys, row: list[Any], *, wall_ms: int, first_fence: int
    ) -> TrajectoryClaim | None:
        """Read a claim; None if part of it is unreadable: then the trajectory was given up."""
        raw_name, fence, attempt, loss, raw, (snapshot, *_), entry_id = row
        is_first = bool(fence == first_fence + 1)
        try:
            job = job_row(raw_name, raw)
            self._shards.check(job.trajectory_id, keys)
            turns = await self._settled_turns(keys, job.trajectory_id) if not is_first else ()
        except WireError as error:
            await self._give_up(worker_id, keys, raw_name, fence, raw, f"{GIVEN_UP['damaged']}: {error}")
            return None
        return TrajectoryClaim(
            job=job,
            worker_id=worker_id,
            fence=fence,
            is_first=is_first,
            attempt=attempt,
            loss=loss,
            waited_s=waited_s(entry_id, wall_ms),
            snapshot=snapshot,
            turns=turns,
            turn_count_max=self._run.turn_count_max,
        )

    async def _settled_turns(self, keys: ShardKeys, trajectory_id: str) -> tuple[TurnResult, ...]:
        names = [turn_id(trajectory_id, index) for index in range(self._run.turn_count_max)]
        rows = await self._client.hmget(keys.turn_result, names)
        return tuple(TurnResult.decode(raw) for raw in rows if raw is not None)

    async def _give_up(
        self, worker_id: str, keys: ShardKeys, raw_name: bytes, fence: int, raw: bytes | None, reason: str
    ) -> None:
        """Fail a trajectory for good in the shard where it is: a made-up one may be in any."""
        name = raw_name.decode()
        log.warning("trajectory.given_up", extra={"job_id": name, "reason": reason})
        await self._fail(keys, name, fence, given_up_row(self._run.run_id, worker_id, name, raw, reason), 0, 0)

    async def renew(self, worker_id: str, claims: Sequence[TrajectoryClaim]) -> list[str]:
        return await self._renew(worker_id, [(claim, b"") for claim in claims])

    async def save(self, worker_id: str, claim: TrajectoryClaim, snapshot: bytes) -> bool:
        return not await self._renew(worker_id, [(claim, snapshot)])

    async def _renew(self, worker_id: str, rows: Sequence[tuple[TrajectoryClaim, bytes]]) -> list[str]:
        by_shard: dict[int, list[tuple[TrajectoryClaim, bytes]]] = {}
        for row in rows:
            by_shard.setdefault(self._shards.index_of(row[0].job.trajectory_id), []).append(row)
        lost: list[str] = []
        first_error = FirstError()
        for shard, part in by_shard.items():
            keys = self._shards.all[shard]
            args: list[Any] = [worker_id, self._claim_ms]
            for claim, log in part:
                args += [claim.job.trajectory_id, claim.fence, log, "", "", ""]
            with first_error, translate():
                kept = await self._scripts.call("renew", [keys, keys.trajectory], args)
                lost += [claim.job.trajectory_id for (claim, _), is_kept in zip(part, kept, strict=True) if not is_kept]
        if not lost:
            first_error.raise_it()
        return lost

    async def settle(self, claim: TrajectoryClaim, rollout: Rollout, *, is_scored: bool) -> bool:
        return await self._settle(claim.fence, claim.worker_id, rollout, "completed" if is_scored else "scoring")

    async def _settle(self, fence: int, worker_id: str, rollout: Rollout, state: str) -> bool:
        keys = self._shards.of(rollout.trajectory_id)
        args: list[Any] = [rollout.trajectory_id, fence, rollout.group_id, state, rollout.encode(), self._score_ms]
        reward = "" if rollout.reward is None else repr(float(rollout.reward))
        args += [worker_id, rollout.policy_version, reward, len(rollout.completion_ids)]
        args += [task_name(self._run, rollout.task_id), length_of(rollout)]
        with translate():
            answer = await self._scripts.call("settle_trajectory", [keys, keys.of_group(rollout.group_id)], args)
        if not isinstance(answer, list):
            return bool(answer)
        with translate():
            raw = await self._client.hget(keys.trajectory.job, rollout.trajectory_id)
        if raw is not None:
            reason = too_stale(rollout.policy_version, answer[1])
            letter = given_up_row(self._run.run_id, worker_id, rollout.trajectory_id, raw, reason)
            await self._fail(keys, rollout.trajectory_id, fence, letter, 0, RERUN_COUNT_MAX)
        return False

    async def score(self, trajectory_id: str, fence: int, reward: float) -> bool:
        keys = self._shards.of(trajectory_id)
        with translate():
            raw = await self._client.hget(keys.rollouts(group_of(trajectory_id)), trajectory_id)
        if raw is None:
            return False
        return await self._settle(fence, "", dataclasses.replace(Rollout.decode(raw), reward=reward), "completed")

    async def begin_score(
        self, trajectory_id: str, fence: int, worker_id: str, duration_s: float, *, loss_max: int = 0
    ) -> ScoreClaim | None:
        keys, group_id = self._shards.of(trajectory_id), group_of(trajectory_id)
        with translate():
            code, *rest = await self._scripts.call(
                "begin_score",
                [keys, keys.of_group(group_id)],
                [trajectory_id, fence, worker_id, int(duration_s * 1000), loss_max],
            )
        if code == 0:
            return None
        if code == 2:
            return ScoreClaim(loss=rest[0])
        loss, raw, facts = rest
        return ScoreClaim(loss=loss, rollout=Rollout.decode(raw), task=_task_in(facts, group_id))

    async def lose_score(self, trajectory_id: str, fence: int, letter: DeadLetter) -> str:
        keys = self._shards.of(trajectory_id)
        with translate():
            code = await self._scripts.call(
                "lose_score",
                [keys],
                [trajectory_id, fence, letter.worker_id, PROCESS_LOSS, SCORE_LOSS_MAX],
            )
        if code == 2:
            return await self.fail(trajectory_id, fence, letter, is_final=True)
        return "retry" if code else "lost"

    async def keep_scoring(
        self, rows: Sequence[tuple[str, int]], duration_s: float, *, worker_id: str = "-"
    ) -> list[str]:
        by_shard: dict[int, list[tuple[str, int]]] = {}
        for row in rows:
            by_shard.setdefault(self._shards.index_of(row[0]), []).append(row)
        gone: list[str] = []
        for shard, part in by_shard.items():
            keys = self._shards.all[shard]
            args: list[Any] = [int(duration_s * 1000), worker_id, *(word for row in part for word in row)]
            with translate():
                kept = await self._scripts.call("keep_scoring", [keys], args)
            gone += [name for (name, _), is_kept in zip(part, kept, strict=True) if not is_kept]
        return gone

    async def fail(self, trajectory_id: str, fence: int, letter: DeadLetter, *, is_final: bool = False) -> str:
        attempt_max = 0 if is_final else self._run.attempt_count_max
        return await self._fail(self._shards.of(trajectory_id), trajectory_id, fence, letter, attempt_max, 0)

    async def _fail(
        self, keys: ShardKeys, trajectory_id: str, fence: int, letter: DeadLetter, attempt_max: int, rerun_max: int
    ) -> str:
        group_id = group_of(trajectory_id)
        with translate():
            code = await self._scripts.call(
                "fail_trajectory",
                [keys, keys.of_group(group_id)],
                [trajectory_id, fence, group_id, letter.encode(), attempt_max, rerun_max],
            )
        return {0: "lost", 2: "retry", 3: "dead"}[code]

    async def release(self, worker_id: str, claims: Sequence[TrajectoryClaim]) -> None:
        for claim in claims:
            keys = self._shards.of(claim.job.trajectory_id)
            with translate():
                await self._scripts.call(
                    "release",
                    [keys, keys.trajectory],
                    [worker_id, 0, claim.job.trajectory_id, claim.fence, b""],
                )

    async def reap(self, worker_id: str) -> Reaped:
        ready, dead = 0, 0
        scoring: list[tuple[str, int]] = []
        first_error = FirstError()
        for keys in self._shards.all:
            with first_error, translate():
                limits = [BLAME_COUNT_MAX, SUSPECT_LOSS_COUNT, self._claim_ms, self._score_ms, SCORE_LOSS_MAX]
                rows = await self._scripts.call("reap", [keys, keys.trajectory], [worker_id, REAP_COUNT, *limits])
                scoring += [(name.decode(), fence) for what, name, fence, _ in rows if what == b"scoring"]
                ready += sum(what == b"ready" for what, *_ in rows)
                for what, name, fence, raw in rows:
                    reason = GIVEN_UP.get(what.decode())
                    if reason is not None:
                        dead += 1
                        with first_error:  # a trajectory that cannot be given up keeps no other waiting
                            await self._give_up(worker_id, keys, name, fence, raw, reason)
        if not scoring:
            first_error.raise_it()
        return Reaped(ready_count=ready, scoring=tuple(scoring), dead_count=dead)

    async def wait(self, timeout_s: float) -> None:
        parts = self._scripts.apart([keys.trajectory.bell for keys in self._shards.all])
        with translate():
            await first_found([self._client.blpop(part, timeout=timeout_s) for part in parts])


def _task_in(facts: bytes, group_id: str) -> dict[str, Any]:
    """Read the task from the facts of a group's hash."""
    found = load_json(facts)
    if not isinstance(found, dict) or not isinstance(found.get("task"), dict):
        raise WireError(f"task of group {group_id} is not an object")
    task: dict[str, Any] = found["task"]
    return task
