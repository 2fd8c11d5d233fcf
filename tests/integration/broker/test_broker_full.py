"""A broker at its memory limit: nothing new is taken in, all that was taken in ends, and nothing is lost."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from rollfab.aio import connect
from rollfab.fabric.contract.errors import BrokerFull, RunUnknown
from rollfab.fabric.contract.ids import trajectory_id, turn_id
from rollfab.fabric.contract.records import (
    Lease,
    Rollout,
    RunConfig,
    Sampling,
    TrajectoryJob,
    TurnJob,
    WorkerInfo,
)
from rollfab.fabric.opened import RedisFabric
from rollfab.fabric.ports.queue import GroupPush, TrajectoryClaim, TurnPush, TurnQueue, TurnSettle
from rollfab.fabric.queue.keys import ShardKeys
from rollfab.fabric.queue.scripts import load_script, script_names
from rollfab.trainer.aio import AsyncRun
from tests.bench.lively import lively_weights
from tests.support import records
from tests.support.brokers.redis_server import redis_server
from tests.support.leases import set_lease

RUN = RunConfig(run_id="r1", model="tiny", environment="frozenlake")
TASK_BYTES = 20_000
TOKEN_COUNT = 500
LEASE = Lease(worker_id="w1", run_id="r1", lease_epoch=1, slot_count=64, lease_until_ms=None)
WORKER = WorkerInfo(worker_id="w1", role="dedicated", pid=1, host="h")


@pytest.fixture
async def ports(tmp_path: Path) -> AsyncIterator[RedisFabric]:
    with redis_server(tmp_path, "maxmemory 8mb", "maxmemory-policy noeviction") as server:
        async with await RedisFabric.open(server.url, client_name="tests") as opened:
            await opened.board.create_run(RUN)
            await opened.board.heartbeat(WORKER)
            await set_lease(opened.board, LEASE, None)
            yield opened


def group(name: str) -> GroupPush:
    task = {"text": "x" * TASK_BYTES}
    job = TrajectoryJob(trajectory_id=trajectory_id(name, 0), group_id=name, task_id="t", index=0, task=task, seed=1)
    return GroupPush(group_id=name, task_id="t", task=task, jobs=(job,))


async def fill(ports: RedisFabric) -> list[str]:
    """Push until the broker refuses; returns the groups that it said yes to."""
    taken: list[str] = []
    for index in range(2000):
        try:
            await ports.rollouts(RUN).push([group(f"g{index}")])
        except BrokerFull:
            return taken
        taken.append(f"g{index}")
    raise AssertionError("the broker took everything")


async def run_one_turn(turns: TurnQueue, claim: TrajectoryClaim) -> None:
    """Ask for a turn, run it and hand it in."""
    name = turn_id(claim.job.trajectory_id, 0)
    ids = np.arange(TOKEN_COUNT, dtype=np.int32)
    job = TurnJob(turn_id=name, agent_id="a1", sampling=Sampling(), prompt_ids=ids)
    pushed = TurnPush(trajectory_id=claim.job.trajectory_id, fence=claim.fence, job=job)
    assert not any(await turns.push("a1", [pushed]))
    (turn,) = (await turns.exchange("w1", want=1, lease_epoch=1, active_version=0)).claims
    result = records.result_of(name, ids)
    assert not (await turns.exchange("w1", settles=[TurnSettle(claim=turn, result=result)])).refused
    assert [each.turn_id for each in await turns.results("a1", 1.0)] == [name]


def rollout_of(claim: TrajectoryClaim) -> Rollout:
    ids = np.arange(TOKEN_COUNT, dtype=np.int32)
    return records.rollout_of(claim.job, ids=ids, prompt_ids=ids)


@pytest.mark.timeout(60)
async def test_a_full_broker_lets_everything_end_that_it_took_in(ports: RedisFabric) -> None:
    # Given a broker that is filled up to its limit
    taken = await fill(ports)
    assert taken

    # When everything is run, while it stays full at first
    trajectories, turns, rollouts = ports.trajectories(RUN), ports.turns(RUN), ports.rollouts(RUN)
    delivered: list[str] = []
    while len(delivered) < len(taken):
        for claim in await trajectories.claim("a1", 4):
            await run_one_turn(turns, claim)
            assert await trajectories.settle(claim, rollout_of(claim), is_scored=True)
        for delivery in await rollouts.receive("t", 8, 1.0):
            assert await rollouts.acknowledge(delivery)
            delivered.append(delivery.group.group_id)

    # Then each group came once, and there is room again
    assert sorted(delivered) == sorted(taken)
    status = await ports.board.run_status("r1")
    assert (status.depth, status.memory_bytes) == (0, 0)
    assert await rollouts.push([group("after")]) == [True]


async def test_a_full_broker_still_hears_heartbeats_and_changes_leases(ports: RedisFabric) -> None:
    await fill(ports)
    assert await ports.board.heartbeat(WORKER) is not None
    assert await set_lease(ports.board, dataclasses.replace(LEASE, lease_epoch=2, slot_count=1), 1000)
    assert await ports.board.lead("c1", 1000) > 0
    await ports.board.add_event("lease.granted", {"worker_id": "w1"})


async def test_a_refused_push_writes_nothing_and_says_what_to_do(ports: RedisFabric) -> None:
    taken = await fill(ports)
    before = await ports.board.run_status("r1")
    with pytest.raises(BrokerFull, match="consume or delete finished work, or raise maxmemory"):
        await ports.rollouts(RUN).push([group("refused")])
    assert await ports.board.run_status("r1") == before
    assert before.depth == len(taken)


async def test_settings_change_whole_and_a_run_is_opened_at_the_limit(ports: RedisFabric) -> None:
    taken = await fill(ports)
    lower = dataclasses.replace(RUN, trajectory_count_max=len(taken), weight=2.0)
    assert await ports.board.change_run(RUN, lower)
    assert (await ports.board.runs())["r1"] == lower
    await ports.rollouts(lower).pin(0)
    shard = await ports.board._client.hmget(ShardKeys("r1", 0).run, "depth_max", "pinned")
    assert [int(each) for each in shard] == [len(taken), 0], "the row and its shard agree"
    assert await ports.board.create_run(lower) == lower
    other = dataclasses.replace(lower, run_id="r2")
    assert await ports.board.create_run(other) == other


async def test_a_run_can_be_deleted_at_the_limit_which_makes_room(ports: RedisFabric) -> None:
    await fill(ports)
    await ports.board.delete_run("r1")
    assert "r1" not in await ports.board.runs()
    with pytest.raises(RunUnknown, match="deleted"):
        await ports.board.run_status("r1")
    assert await ports.board.create_run(RUN) == RUN
    assert await fill(ports), "there is room again"


def test_only_what_takes_work_in_is_refused_at_the_limit() -> None:
    refused = {"push_group", "put_manifest", "mend", "keep_differences"}  # mend puts back what was lost
    found = {name for name in script_names() if "allow-oom" not in load_script(name).split("\n")[0]}
    assert found == refused


@pytest.mark.timeout(60)
async def test_a_submit_that_meets_a_full_broker_says_what_it_took_in(ports: RedisFabric) -> None:
    run = AsyncRun(ports, RUN)
    names = [f"g{index}" for index in range(500)]
    with pytest.raises(BrokerFull, match=r"\d+ of 500 groups of this submit were taken in") as caught:
        await run.submit([{"text": "x" * TASK_BYTES}] * 500, group_ids=names)
    facts = caught.value.facts
    status = await ports.board.run_status("r1")
    assert 0 < status.depth == len(facts["taken"]) < 500
    assert facts["doubtful"] == []
    claims = await ports.trajectories(RUN).claim("a1", 500)
    assert sorted(claim.job.group_id for claim in claims) == sorted(facts["taken"])


async def test_an_evaluation_that_finds_no_room_stays_at_its_version(tmp_path: Path) -> None:
    with redis_server(tmp_path, "maxmemory-policy noeviction") as server:
        async with (
            await RedisFabric.open(server.url, client_name="tests") as opened,
            await connect(server.url) as fabric,
        ):
            # Given a first evaluation that is refused for want of room: nothing is left of it
            run = await fabric.run("r1", model="tiny", environment="frozenlake")
            await run.publish(lively_weights(), version=0)
            await opened.board._client.config_set("maxmemory", "1mb")
            with pytest.raises(BrokerFull):
                await fabric.evaluation("r1", 0, prefix_cache="trajectory", shard_count=2)
            assert list(await fabric.runs()) == ["r1"]
            await opened.board._client.config_set("maxmemory", "0")
            # And an evaluation of version 0, while the run has gone on to version 1
            evaluation = await fabric.evaluation("r1", 0)
            assert evaluation.config.shard_count == run.config.shard_count
            await run.publish({name: each + 1 for name, each in lively_weights().items()}, version=1)
            # When the next one finds the broker full
            await opened.board._client.config_set("maxmemory", "1mb")
            with pytest.raises(BrokerFull):
                await fabric.evaluation("r1", 1)
            # Then it is as it was, and goes on when there is room
            await opened.board._client.config_set("maxmemory", "0")
            assert await evaluation.submit([{"seed": 1}], group_ids=["a"]) == ["a"]
            assert await evaluation.head_version() == 0
            assert await evaluation.cancel("a")
            assert await (await fabric.evaluation("r1", 1)).head_version() == 1
