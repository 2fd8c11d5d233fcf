"""What a push waits for before it counts: memory, disk, a replica."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from rollfab.fabric.contract.errors import BrokerError, ConfigError, QueueFull
from rollfab.fabric.contract.records import RunConfig
from rollfab.fabric.opened import RedisFabric
from rollfab.fabric.queue import scripts
from tests.support.brokers.port_life import GROUP_SIZE, group_of
from tests.support.brokers.redis_cluster import redis_cluster
from tests.support.brokers.redis_server import ask, redis_server
from tests.support.records import rollout_of
from tests.support.until import wait_until

pytestmark = [pytest.mark.redis, pytest.mark.timeout(30)]

RUN = RunConfig(run_id="r1", model="tiny", environment="frozenlake", trajectory_count_max=1000, shard_count=2)
GROUPS = [group_of(f"g{index}") for index in range(6)]


async def opened(url: str) -> RedisFabric:
    async with await RedisFabric.open(url, client_name="creator") as creator:
        await creator.board.create_run(RUN)
    return await RedisFabric.open(url, client_name="test")


async def test_a_push_with_durability_disk_is_acknowledged_once_the_disk_has_it(tmp_path: Path) -> None:
    # The kernel has a write long before the disk does; WAITAOF tells them apart, and the next test shows that we wait.
    with redis_server(tmp_path, "appendonly yes", "appendfsync everysec") as server:
        async with await opened(f"{server.url}?durability=disk") as fabric:
            assert await fabric.rollouts(RUN).push(GROUPS) == [True] * len(GROUPS)
            assert await fabric.rollouts(RUN).push(GROUPS) == [False] * len(GROUPS)
            assert ask(server, "INFO", "commandstats").count(b"cmdstat_waitaof:calls=") == 1


async def test_a_disk_that_does_not_confirm_in_time_is_an_error_and_the_push_may_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a disk that is never synced
    monkeypatch.setitem(scripts.BARRIERS, "disk", ("WAITAOF", 1, 0, 50))
    with redis_server(tmp_path, "appendonly yes", "appendfsync no") as server:
        async with await opened(f"{server.url}?durability=disk") as fabric:
            rollouts = fabric.rollouts(RUN)
            # When a group is pushed, then also again, then nothing is acknowledged
            for _ in range(2):
                with pytest.raises(BrokerError) as caught:
                    await rollouts.push(GROUPS[:1])
                assert caught.value.facts["reason"] == "durability"
            # And once the disk is synced, the same push is, without having been taken twice
            ask(server, "CONFIG", "SET", "appendfsync", "always")
            assert await rollouts.push(GROUPS[:1]) == [False]
            assert (await fabric.board.run_status(RUN.run_id)).depth == GROUP_SIZE


async def test_a_swap_that_is_repeated_over_another_connection_is_confirmed_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunConfig(run_id="r1", model="tiny", environment="frozenlake")
    with redis_server(tmp_path, "appendonly yes", "appendfsync always") as server:
        url = f"{server.url}?durability=disk"
        async with await RedisFabric.open(url, client_name="test") as fabric:
            # Given a group that its trainer has received, and a disk that is never synced from now on
            await fabric.board.create_run(run)
            await fabric.rollouts(run).push(GROUPS[:1])
            for claim in await fabric.trajectories(run).claim("a1", GROUP_SIZE):
                assert await fabric.trajectories(run).settle(claim, rollout_of(claim.job, 1.0, (0,)), is_scored=True)
            (delivery,) = await fabric.rollouts(run).receive("t", 1, 5.0)
            ask(server, "CONFIG", "SET", "appendfsync", "no")
            monkeypatch.setitem(scripts.BARRIERS, "disk", ("WAITAOF", 1, 0, 50))
            # When it is swapped for another, then it is not acknowledged, neither at first nor over a connection that
            # has not written anything yet
            for _ in range(2):
                async with await RedisFabric.open(url, client_name="again") as other:
                    with pytest.raises(BrokerError, match="did not confirm"):
                        await other.rollouts(run).swap(delivery, GROUPS[1])
            # And once the disk is synced, it is, without having been done twice
            ask(server, "CONFIG", "SET", "appendfsync", "always")
            assert await fabric.rollouts(run).swap(delivery, GROUPS[1])
            assert (await fabric.board.run_status(run.run_id)).depth == GROUP_SIZE


async def test_a_push_with_durability_replica_waits_for_one_and_says_so_where_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(scripts.BARRIERS, "replica", ("WAIT", 1, 300))
    (tmp_path / "p").mkdir()
    (tmp_path / "r").mkdir()
    with redis_server(tmp_path / "p", "repl-diskless-sync-delay 0") as primary:
        async with await opened(f"{primary.url}?durability=replica") as fabric:
            with pytest.raises(BrokerError, match="see that a replica is connected"):
                await fabric.rollouts(RUN).push(GROUPS[:1])
            with redis_server(tmp_path / "r", f"replicaof 127.0.0.1 {primary.port}") as replica:
                wait_until(
                    lambda: b"master_link_status:up" in ask(replica, "INFO", "replication"), "it follows", limit_s=20.0
                )
                assert await fabric.rollouts(RUN).push(GROUPS) == [False] + [True] * 5

                # a replica that is connected and does not move confirms nothing, neither at first nor to another
                # connection, which has not written anything yet
                os.kill(replica.pid, signal.SIGSTOP)
                with pytest.raises(BrokerError, match="did not confirm"):
                    await fabric.rollouts(RUN).push([group_of("late")])
                async with await opened(f"{primary.url}?durability=replica") as other:
                    with pytest.raises(BrokerError, match="did not confirm"):
                        await other.rollouts(RUN).push([group_of("late")])
                os.kill(replica.pid, signal.SIGCONT)
                assert await fabric.rollouts(RUN).push([group_of("late")]) == [False]


async def test_a_broker_that_cannot_confirm_its_disk_is_refused_at_the_start(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server, pytest.raises(ConfigError, match="set appendonly yes"):
        await RedisFabric.open(server.url, client_name="test", durability="disk")


async def test_a_full_run_is_told_at_once_whatever_the_durability(tmp_path: Path) -> None:
    run = RunConfig(run_id="r2", model="tiny", environment="frozenlake", trajectory_count_max=GROUP_SIZE)
    with redis_server(tmp_path, "appendonly yes") as server:
        async with await RedisFabric.open(server.url, client_name="test", durability="disk") as fabric:
            await fabric.board.create_run(run)
            assert await fabric.rollouts(run).push(GROUPS[:1]) == [True]
            with pytest.raises(QueueFull):
                await fabric.rollouts(run).push(GROUPS[1:2])


async def test_each_shard_of_a_cluster_confirms_its_own(tmp_path: Path) -> None:
    with redis_cluster(tmp_path, "appendonly yes") as cluster:
        async with await opened(f"{cluster.url}?durability=disk") as fabric:
            assert await fabric.rollouts(RUN).push(GROUPS) == [True] * len(GROUPS)
            assert await fabric.rollouts(RUN).push(GROUPS) == [False] * len(GROUPS)
