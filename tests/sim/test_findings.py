"""What the simulator has found, each as the shortest case of it."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest

from rollfab.fabric.contract.errors import BrokerError
from rollfab.fabric.contract.records import Lease, Rollout, RunConfig
from rollfab.fabric.ports.queue import TurnClaim, TurnSettle
from rollfab.fabric.queue.rollouts import RedisRolloutStream
from rollfab.fabric.queue.trajectories import RedisTrajectoryQueue
from rollfab.fabric.queue.turns import RedisTurnQueue
from rollfab.trainer.aio import AsyncRun
from rollfab.trainer.checks import make_groups
from rollfab.workers.agent.worker import AgentConfig, AgentWorker
from tests.contracts.test_queue import result_of
from tests.sim.environment import KINDS
from tests.sim.policy import TEXT
from tests.sim.roles import registry
from tests.sim.virtual_loop import VirtualClock, on_virtual_time
from tests.standin.fabric import StandInFabric
from tests.support.brokers.port_life import Life
from tests.support.leases import set_lease

RUN = RunConfig(
    run_id="r1",
    model="tiny",
    environment=f"sim-{KINDS[0]}",
    environment_options={"turns": 1, "tokens": 2, "pace_s": 0.0},
)


async def rewards(run_id: str, trajectory_id: str, fence: int) -> None:
    """Nobody asks for rewards here."""


def test_an_agent_that_claims_its_own_lost_trajectory_again_drops_the_old_episode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the old one keeps a place for ever, and its late request for a turn ends the new one."""

    # Given an agent that cannot renew its claim, nor ask for a turn, until it has lost and claimed anew
    renew, push = RedisTrajectoryQueue.renew, RedisTurnQueue.push

    async def slow_renew(self: Any, worker_id: str, claims: Sequence[Any]) -> list[str]:
        is_away = asyncio.get_running_loop().time() < 2.6
        return [] if is_away else await renew(self, worker_id, claims)

    async def late_push(self: Any, agent_id: str, pushes: Sequence[Any]) -> list[str]:
        if asyncio.get_running_loop().time() < 3.0:
            raise BrokerError("away")
        return await push(self, agent_id, pushes)

    monkeypatch.setattr(RedisTrajectoryQueue, "renew", slow_renew)
    monkeypatch.setattr(RedisTurnQueue, "push", late_push)

    async def work() -> None:
        clock = VirtualClock(asyncio.get_running_loop())
        fabric = StandInFabric(clock)
        await fabric.board.create_run(RUN)
        await fabric.rollouts(RUN).push(make_groups([{"number": 1}], 1, ["g"]))
        agent = AgentWorker(fabric, registry(), AgentConfig(worker_id="a"), clock, ask_reward=rewards)
        stop = asyncio.Event()
        task = asyncio.create_task(agent.run(stop))
        state = fabric.tables_of("r1")
        first = state.trajectories.records["g.0"].fence
        await asyncio.sleep(2.9)
        assert state.trajectories.records["g.0"].fence == first + 2

        # When both episodes' requests for the turn reach the broker
        await asyncio.sleep(1.0)

        # Then one episode waits for its turn, under the claim that is good
        assert agent.running_count == 1
        assert min([agent.places.held_count for _ in range(5) if await asyncio.sleep(0.05) is None]) == 1
        assert state.trajectories.records["g.0"].fence == first + 2
        assert list(state.turns.records) == ["g.0.0"]
        stop.set()
        await task

    on_virtual_time(work())


@pytest.mark.parametrize("is_transaction", [False, True])
def test_a_group_whose_acknowledging_failed_is_acknowledged_when_the_program_goes_on(
    is_transaction: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a trainer whose first acknowledging does not reach the broker
    acknowledge, failed = RedisRolloutStream.acknowledge, list[str]()

    async def once_away(self: Any, delivery: Any) -> bool:
        if not failed:
            failed.append(delivery.group.group_id)
            raise BrokerError("away")
        return await acknowledge(self, delivery)

    monkeypatch.setattr(RedisRolloutStream, "acknowledge", once_away)

    async def consume(run: AsyncRun, seen: list[str]) -> None:
        if is_transaction:
            async with run.groups(timeout=0.2, count=2) as groups:
                seen += [group.group_id async for group in groups]
        else:
            async for group in run.groups(timeout=0.2):
                seen.append(group.group_id)

    async def work() -> None:
        fabric = StandInFabric(VirtualClock(asyncio.get_running_loop()))
        await fabric.board.create_run(RUN)
        await fabric.rollouts(RUN).push(make_groups([{"number": 1}, {"number": 2}], 1, ["g", "h"]))
        for claim in await fabric.trajectories(RUN).claim("a", 2):
            await fabric.trajectories(RUN).settle(claim, made(claim.job), is_scored=True)
        run: Any = AsyncRun(fabric, RUN)  # type: ignore[arg-type]
        seen: list[str] = []

        # When the program is told, and goes on
        with pytest.raises(BrokerError):
            await consume(run, seen)
        await consume(run, seen)

        # Then every group was handed out once, and none is left
        assert seen == ["g", "h"]
        assert fabric.tables_of("r1").consumed == {"g", "h"}
        assert fabric.tables_of("r1").depth == 0

    on_virtual_time(work())


async def test_an_inbox_that_begins_again_after_the_time_was_set_back_is_read() -> None:
    """Its entries have lower ids than those that were read before it ended."""
    fabric = StandInFabric()

    async def set_back() -> None:
        await asyncio.sleep(0.2)
        fabric.broker.set_ahead_s = -3600.0
        for key in [key for key in fabric.broker.keys.held if b":inbox:" in key]:
            fabric.broker.carry_out(["DEL", key])

    turning = asyncio.create_task(set_back())
    tally = await Life(fabric, RUN, pace_s=0.05).play(10, timeout_s=20)  # type: ignore[arg-type]
    await turning
    tally.check()


def test_a_run_that_nobody_generates_for_lets_others_have_places() -> None:
    async def work() -> None:
        # Given an agent whose places are all held by a run without any worker, and runs that come later
        clock = VirtualClock(asyncio.get_running_loop())
        fabric = StandInFabric(clock)
        runs = [dataclasses.replace(RUN, run_id=name) for name in ("alone", "good", "idle")]
        await fabric.board.create_run(runs[0])
        await fabric.rollouts(runs[0]).push(make_groups([{"number": 1}], 8, ["g"]))
        config = AgentConfig(worker_id="a", environment_count=4)
        agent = AgentWorker(fabric, registry(), config, clock, ask_reward=rewards)
        stop = asyncio.Event()
        task = asyncio.create_task(agent.run(stop))
        await asyncio.sleep(2.0)
        assert agent.running_count == 4
        for run in runs[1:]:
            await fabric.board.create_run(run)
        await fabric.rollouts(runs[1]).push(make_groups([{"number": 1}], 6, ["g"]))

        # When a worker serves one of these
        done = asyncio.create_task(serve(fabric, runs[1], 6))
        await asyncio.wait_for(done, 300.0)

        # Then the first run keeps to its share of three runs while it stands: the others may have work at any time
        await asyncio.sleep(40.0)
        assert agent.running_count == 2
        await fabric.rollouts(runs[1]).push(make_groups([{"number": 1}], 2, ["next"]))
        await asyncio.wait_for(serve(fabric, runs[1], 2), 10.0)

        # When its turns are generated after all, then nothing of it has failed
        await asyncio.wait_for(serve(fabric, runs[0], 8), 300.0)
        assert await fabric.rollouts(runs[0]).dead_letters(8) == []
        stop.set()
        await task

    on_virtual_time(work())


async def serve(fabric: StandInFabric, run: RunConfig, count: int) -> None:
    """Generate turns of a run until so many are settled."""
    turns, settled = fabric.turns(run), 0
    lease = Lease(worker_id="w1", run_id=run.run_id, lease_epoch=1, slot_count=8, lease_until_ms=None)
    await set_lease(fabric.board, lease, None)
    claims: list[TurnClaim] = []
    while settled < count:
        ends = [TurnSettle(claim=claim, result=result_of(claim.job.turn_id)) for claim in claims]
        found = await turns.exchange("w1", settles=ends, want=8, lease_epoch=1)
        settled, claims = settled + len(ends), found.claims
        await asyncio.sleep(0.1)


def made(job: Any) -> Rollout:
    """A rollout without tokens."""
    nothing = TEXT.encode("")
    return Rollout(
        trajectory_id=job.trajectory_id,
        group_id=job.group_id,
        task_id=job.task_id,
        reward=0.0,
        finish_reason="terminated",
        turn_count=0,
        attempt=0,
        seed=job.seed,
        spans=(),
        prompt_ids=TEXT.encode("a"),
        completion_ids=nothing,
        logprobs=nothing.astype("f4"),
        completion_mask=nothing.astype("u1"),
    )
