"""Would it be noticed if the queue's tables, or a rollout worker's turns, did not fit together?"""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from rollfab.fabric.contract.clock import SystemClock
from rollfab.fabric.contract.records import RunConfig, Sampling, TurnJob
from rollfab.fabric.ports.queue import TurnClaim, TurnPush
from rollfab.fabric.rules.queue.engine_watch import StallRule
from rollfab.trainer.checks import make_groups
from rollfab.workers.rollout.turns import RunningOptions, RunningTurn, RunningTurns
from tests.standin.fabric import StandInFabric
from tests.standin.tables import RunTables
from tests.support.queue.played_worker import PlayedEngine

RUN = RunConfig(run_id="r1", model="tiny", environment="frozenlake")
JOB = TurnJob(turn_id="g.0.0", agent_id="a", sampling=Sampling(), prompt_ids=np.array([5], np.int32))


async def busy() -> tuple[StandInFabric, RunTables]:
    """Three trajectories, one of them claimed and with a turn that is claimed."""
    fabric = StandInFabric()
    await fabric.board.create_run(RUN)
    await fabric.rollouts(RUN).push(make_groups([{}], 3, ["g"]))
    (claim,) = await fabric.trajectories(RUN).claim("a", 1)
    await fabric.turns(RUN).push("a", [TurnPush(trajectory_id=claim.job.trajectory_id, fence=claim.fence, job=JOB)])
    return fabric, fabric.tables_of("r1")


async def test_a_run_at_work_is_in_order() -> None:
    _, tables = await busy()
    tables.check_integrity()


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda k: ("DEL", k.trajectory.ready[1]), "in no queue"),
        (lambda k: ("ZREM", k.trajectory.deadline, "g.0"), "with a deadline or a claim alone"),
        (lambda k: ("HINCRBY", k.trajectory.held, "a", 1), "claims are counted as"),
        (lambda k: ("HDEL", k.turn.job, "g.0.0"), "has no text"),
        (lambda k: ("HSET", k.turn.log, "g.7.0", "x"), "logs of what is over"),
        (lambda k: ("HSET", k.turn.log, "g.7.0~2", "x"), "logs of what is over"),
        (lambda k: ("HINCRBY", k.run, "depth", 1), "depth is counted as 4, and is 3"),
        (lambda k: ("HINCRBY", k.run, "bytes", -1), "bytes is counted"),
        (lambda k: ("HDEL", k.open, "g"), "open"),
        (lambda k: ("HSET", k.turn.record, "g.9.0", "settled 1 0 0 0 0 0 1 -"), "turns of trajectories that are over"),
    ],
)
async def test_a_table_that_does_not_fit_the_others_is_found(damage: Any, says: str) -> None:
    fabric, tables = await busy()
    fabric.broker.carry_out(damage(tables.keys))
    with pytest.raises(AssertionError, match=says):
        tables.check_integrity()


async def test_two_claims_of_one_turn_on_one_worker_are_found() -> None:
    rule = StallRule(stall_s=60.0, first_token_s=60.0)
    options = RunningOptions(worker_id="w", log_s=1.0, stall=rule)
    running = RunningTurns(PlayedEngine(), options, SystemClock(), wake=asyncio.Event().set)  # type: ignore[arg-type]
    for fence in (1, 2):
        turn = RunningTurn.begin(TurnClaim(job=JOB, fence=fence, loss=0), "w", 0.0, number=1)
        running.check_integrity()
        running._turns[turn.request_id] = turn
    with pytest.raises(AssertionError, match="two claims of one turn"):
        running.check_integrity()
