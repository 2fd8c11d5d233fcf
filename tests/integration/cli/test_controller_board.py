"""The controller over a broker whose rows are not what it wrote: it goes on, and mends what is its own."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from rollfab.fabric.broker.connection import open_broker
from rollfab.fabric.contract.clock import SystemClock
from rollfab.fabric.contract.records import RunConfig, WorkerInfo
from rollfab.fabric.opened import RedisFabric
from rollfab.fabric.queue import keys
from rollfab.fabric.queue.keys import ShardKeys
from rollfab.fabric.queue.scripts import Scripts
from rollfab.trainer.checks import make_groups
from rollfab.workers.controller.controller import Controller, ControllerConfig

pytestmark = [pytest.mark.redis, pytest.mark.timeout(30)]

RUN = RunConfig(run_id="r1", model="m", environment="e", shard_count=3)
WORKER = WorkerInfo(worker_id="d1", role="dedicated", pid=1, host="h", model="m", slot_count=4)


@pytest.fixture
async def fabric(url: str) -> AsyncIterator[RedisFabric]:
    async with await RedisFabric.open(url, client_name="tests") as fabric:
        await fabric.board.create_run(RUN)
        await fabric.board.heartbeat(WORKER)
        yield fabric
    client = await open_broker(url, client_name="tests")
    await client.flushall()
    await client.aclose()


def controller(fabric: RedisFabric) -> Controller:
    return Controller(fabric.board, ControllerConfig(worker_id="c1"), SystemClock())


@pytest.mark.parametrize("shard", [0, 1])
async def test_a_standing_lease_that_one_shard_lost_is_written_again(url: str, fabric: RedisFabric, shard: int) -> None:
    # Given a standing lease, which a fail-over has taken from one shard
    leading = controller(fabric)
    client = await open_broker(url, client_name="tests")
    for index in range(RUN.shard_count):
        await client.hset(ShardKeys("r1", index).run, "head_version", 0)
    await leading.tick(1)
    rows = [ShardKeys("r1", index).leases for index in range(RUN.shard_count)]
    assert all([await client.hexists(key, "d1") for key in rows])
    await client.hdel(rows[shard], "d1")
    # When the controller plans again
    await leading.tick(1)
    # Then all shards have the same one, and it stays as it is
    found = [await client.hget(key, "d1") for key in rows]
    assert None not in found and len(set(found)) == 1
    await leading.tick(1)
    assert [await client.hget(key, "d1") for key in rows] == found
    await client.aclose()


async def want_a_serving_worker(client: Any, fabric: RedisFabric) -> None:
    """There is work, and a worker that may be lent for it."""
    await client.hset(ShardKeys("r1", 0).run, "head_version", 0)
    await fabric.rollouts(RUN).push(make_groups([{}] * 8, 8))
    await fabric.board.heartbeat(dataclasses.replace(WORKER, worker_id="s1", role="serving"))
    await fabric.board.set_lend("*", "on")


async def test_leases_of_a_run_whose_clock_is_behind_go_on_as_they_are(url: str, fabric: RedisFabric) -> None:
    # Given a run that nobody looked at for a while, so that the clocks of its shards are behind the fabric's
    client = await open_broker(url, client_name="tests")
    await behind(client, 60_000)
    await want_a_serving_worker(client, fabric)
    # When a controller lends a worker for it, and plans on
    leading = controller(fabric)
    await leading.tick(1)
    first = await fabric.board.heartbeat(dataclasses.replace(WORKER, worker_id="s1", role="serving"))
    for _ in range(3):
        await leading.tick(1)
    # Then its lease goes on under its epoch, and is granted once
    assert first is not None
    lease = (await fabric.board.leases("r1"))["s1"]
    assert (lease.lease_epoch, lease.slot_count) == (first.lease_epoch, first.slot_count)
    granted = [facts for _, kind, facts in await fabric.board.events("0", 100, 0.01) if kind == "lease.granted"]
    assert [facts["worker_id"] for facts in granted].count("s1") == 1
    await client.aclose()


@pytest.mark.parametrize("shard", [0, 1])
async def test_a_lease_that_has_ended_on_one_shard_is_granted_anew(url: str, fabric: RedisFabric, shard: int) -> None:
    # Given a lease whose time is over on one shard, whose clock went on while the others stood
    client = await open_broker(url, client_name="tests")
    await want_a_serving_worker(client, fabric)
    leading = controller(fabric)
    await leading.tick(1)
    before = (await fabric.board.leases("r1"))["s1"]
    await behind(client, -60_000, shards=[shard])
    assert (await fabric.board.survey()).leases["r1"]["s1"].slot_count == 0
    # When the controller plans again
    await leading.tick(1)
    # Then it is whole again, under another epoch
    lease = (await fabric.board.survey()).leases["r1"]["s1"]
    assert (lease.lease_epoch > before.lease_epoch, lease.slot_count) == (True, before.slot_count)
    await client.aclose()


async def behind(client: Any, by_ms: int, shards: Sequence[int] = range(RUN.shard_count)) -> None:
    """Put clocks of the run's shards back; by less than nothing: forward."""
    for shard in shards:
        keys = ShardKeys("r1", shard)
        now_ms, wall_ms, _ = await Scripts(client).call("clock", [keys.clock], [])
        await client.set(keys.clock, f"{wall_ms} {now_ms - by_ms}")


async def test_rows_under_another_worker_s_name_stop_no_controller(url: str, fabric: RedisFabric) -> None:
    # Given a row that says that it is somebody else's, and an assignment that is no text
    client = await open_broker(url, client_name="tests")
    await client.hset(keys.WORKERS, "w2", WORKER.encode())
    await client.hset(keys.ASSIGNMENTS, "d1", b"\xff\xfe")
    await client.zadd(keys.HEARTBEATS, {"w2": 9e15})  # it does not go away by itself
    await client.aclose()
    # When a controller plans
    grants = await controller(fabric).tick(1)
    # Then it plans for the one that is one, and the other shows as what it is
    assert [grant.worker_id for grant in grants] == ["d1"]
    seen = (await fabric.board.workers())["w2"][0]
    assert (seen.role, seen.worker_id) == ("unreadable", "w2")
    assert "of a worker 'd1'" in (seen.error or "")


async def test_workers_whose_names_are_no_text_are_forgotten_as_the_silent_are(url: str, fabric: RedisFabric) -> None:
    # Given rows under names that are no UTF-8, two of which are shown alike, beside a worker that lives
    client = await open_broker(url, client_name="tests")
    odd = (b"bad\xff", b"bad\xfe", b"\xf0\x9f")
    for name in odd:
        await client.hset(keys.WORKERS, name, WORKER.encode())
        await client.hset(keys.ASSIGNMENTS, name, b"r1")
        await client.hset(keys.SHARING, name, b"{}")
    await client.zadd(keys.HEARTBEATS, {odd[0]: 1})
    assert len(await fabric.board.workers()) == 3
    # When a controller plans
    await controller(fabric).tick(1)
    # Then the live one alone is left
    for key in (keys.WORKERS, keys.ASSIGNMENTS, keys.SHARING):
        assert not {*odd} & {*await client.hkeys(key)}
    assert await client.zrange(keys.HEARTBEATS, 0, -1) == [b"d1"]
    assert set(await fabric.board.workers()) == {"d1"}
    await client.aclose()


async def test_what_is_written_of_a_run_while_it_is_deleted_does_not_stay(url: str, fabric: RedisFabric) -> None:
    client = await open_broker(url, client_name="tests")
    deleting = asyncio.create_task(fabric.board.delete_run("r1"))
    while await client.keys("rf:{r1*"):  # noqa: ASYNC110  the broker tells nobody
        await asyncio.sleep(0.01)
    await client.set(ShardKeys("r1", 0).clock, 1)  # by a script that knew the run
    await deleting
    assert await client.keys("rf:{r1*") == []
    await client.aclose()


async def test_a_run_that_is_made_anew_while_its_like_is_deleted_is_let_be(fabric: RedisFabric) -> None:
    deleting = asyncio.create_task(fabric.board.delete_run("r1"))
    while "r1" in await fabric.board.runs():  # noqa: ASYNC110  the broker tells nobody
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.3)
    await fabric.board.create_run(RUN)
    before = await fabric.board.run_status("r1")
    await deleting
    assert await fabric.board.run_status("r1") == before


@pytest.mark.parametrize("data", [b"", b"x", b"nan", b"9" * 30, b"%d" % 10**12])
async def test_terms_and_leases_that_are_none_keep_no_controller_from_its_work(
    url: str, fabric: RedisFabric, data: bytes
) -> None:
    # Given a controller that leads, and somebody who writes over terms and leases
    board, client = fabric.board, await open_broker(url, client_name="tests")
    for index in range(RUN.shard_count):
        await client.hset(ShardKeys("r1", index).run, "head_version", 0)
    await controller(fabric).tick(first := await board.lead("c1", 60_000))
    await client.set(keys.LEASE_EPOCH, data)
    for index in range(RUN.shard_count):
        await client.set(ShardKeys("r1", index).lease_term, data)
        await client.hset(ShardKeys("r1", index).leases, "d1", data + b" 1 0")
    await client.delete(keys.PLAN, keys.ASSIGNMENTS)
    # When it leads and plans again
    await controller(fabric).tick(term := await board.lead("c1", 60_000))
    # Then it does so in a term above all, shows its plan, and the worker finds its lease
    assert first <= term == int(await client.get(keys.LEASE_EPOCH))
    assert (await board.plan()).term == term
    assert (await board.heartbeat(WORKER)).slot_count == 4
    await client.aclose()
