"""The door to any broker: fit ones, unfit ones, and ones that go away."""

from __future__ import annotations

import asyncio
import os
import signal
import time
import traceback
from pathlib import Path

import pytest
import redis.asyncio

from rollfab.deploy.roles.engines import EngineOptions
from rollfab.deploy.roles.options import WorkerOptions
from rollfab.deploy.roles.run import run_worker
from rollfab.fabric.broker.clients.translate import translate
from rollfab.fabric.broker.connection import check_broker, open_broker
from rollfab.fabric.contract.errors import BrokerError, BrokerFull
from rollfab.fabric.opened import RedisFabric
from rollfab.workers.engines.base import Engine
from tests.support.brokers.redis_server import redis_server


async def connect(url: str, **options: float) -> redis.asyncio.Redis:
    return await open_broker(url, client_name="test", open_patience_s=0.0, **options)  # type: ignore[arg-type]


async def test_a_given_broker_is_checked(tmp_path: Path) -> None:
    with redis_server(tmp_path, "appendonly yes") as server:
        for url in (server.url, server.unix_url, server.unix_url + "?db=3"):
            client = await connect(url)
            assert (await check_broker(client)).version >= (8, 0, 0)
            assert await client.client_getname() == "test"
            await client.aclose()


async def test_a_broker_without_aof_is_used_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with redis_server(tmp_path) as server:
        client = await connect(server.url)
        assert not (await check_broker(client)).is_aof_on
        await client.aclose()
    assert "broker.not_durable" in caplog.messages


async def test_a_replica_is_refused(tmp_path: Path) -> None:
    with redis_server(tmp_path, "replicaof 127.0.0.1 1") as server:
        client = await connect(server.url)
        with pytest.raises(BrokerError, match="read-only replica"):
            await check_broker(client)
        with pytest.raises(BrokerError) as caught, translate(client):
            await client.set("key", b"value")
        assert caught.value.facts["reason"] == "replica"
        await client.aclose()


async def test_a_wrong_or_missing_password_is_refused_at_once_and_never_shown(tmp_path: Path) -> None:
    with redis_server(tmp_path, "requirepass correct") as server:
        for credentials in ("", ":hunter2@", "alice:hunter2@"):
            started_s = time.monotonic()
            with pytest.raises(BrokerError) as caught:
                await open_broker(f"redis://{credentials}127.0.0.1:{server.port}", client_name="test")
            assert caught.value.facts["reason"] == "auth"
            assert "redis://user:password@host" in str(caught.value)
            assert "hunter2" not in str(caught.value)
            assert time.monotonic() - started_s < 1.0
        client = await connect(f"redis://:correct@127.0.0.1:{server.port}")
        await client.aclose()


def test_a_worker_is_refused_by_the_broker_before_its_engine_takes_time_to_load(tmp_path: Path) -> None:
    made: list[str] = []

    def make_engine(options: EngineOptions, worker_id: str) -> Engine:
        made.append(worker_id)
        raise AssertionError("the engine was loaded")

    with redis_server(tmp_path, "requirepass correct") as server:
        options = WorkerOptions(url=f"redis://:wrong@127.0.0.1:{server.port}", role="dedicated")
        with pytest.raises(BrokerError) as caught:
            run_worker(options, make_engine=make_engine)

    assert caught.value.facts["reason"] == "auth" and made == []


async def test_a_user_without_config_rights_is_enough_and_one_without_info_is_told(tmp_path: Path) -> None:
    lines = ("user app on >pw ~* &* +@all -@dangerous +info", "user poor on >pw ~* +@all -@dangerous")
    with redis_server(tmp_path, *lines) as server:
        client = await connect(f"redis://app:pw@127.0.0.1:{server.port}")
        assert (await check_broker(client)).maxmemory_policy == "noeviction"
        await client.aclose()

        client = await connect(f"redis://poor:pw@127.0.0.1:{server.port}")
        with pytest.raises(BrokerError, match=r"'info'.*ACL SETUSER <user> \+<command>$") as refused:
            await check_broker(client)
        assert "~*" not in str(refused.value)
        await client.aclose()


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("redis://no-such-host.invalid", "resolve"),
        ("redis://127.0.0.1:1", "unreachable"),
        ("unix:///nowhere/broker.sock", "unreachable"),
    ],
)
async def test_a_broker_that_is_not_there_is_told_apart(url: str, reason: str) -> None:
    with pytest.raises(BrokerError) as caught:
        await connect(url)
    assert caught.value.facts["reason"] == reason


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ("redis://:hunter2@", "", "refused this user and password, and lets everybody in without: leave them out"),
        ("redis://alice:hunter2@", "", "refused this user and password, and lets everybody in without: leave them out"),
        ("redis+cluster://", "", "is one broker by itself, no Redis Cluster: write redis:// instead of redis+cluster"),
        ("redis+sentinel://", "/main", "is no sentinel but a broker itself: write redis://host:port instead of redis+"),
        ("rediss://", "", "does not speak TLS on this port: write redis:// instead of rediss://"),
        ("rediss+cluster://", "", "does not speak TLS on this port: write redis+cluster:// instead of rediss+cluster"),
        ("rediss+sentinel://", "/main", "does not speak TLS on this port: write redis+sentinel:// instead of rediss+"),
    ],
)
async def test_a_url_of_another_kind_of_broker_is_told_which_scheme_it_takes(
    tmp_path: Path, before: str, after: str, says: str
) -> None:
    with redis_server(tmp_path) as server, pytest.raises(BrokerError) as caught:
        await open_broker(f"{before}127.0.0.1:{server.port}{after}", client_name="test")
    assert says in str(caught.value)
    assert "hunter2" not in str(caught.value)


async def test_a_database_that_does_not_exist_is_told(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server, pytest.raises(BrokerError) as caught:
        await connect(f"redis://127.0.0.1:{server.port}/99")
    assert caught.value.facts["reason"] == "database"


async def test_a_full_broker_writes_nothing_and_says_so(tmp_path: Path) -> None:
    with redis_server(tmp_path, "maxmemory 1mb") as server:
        client = await connect(server.url)
        with pytest.raises(BrokerFull), translate(client):
            await client.set("key", b"value")
        with pytest.raises(BrokerFull), translate(client):
            await client.eval("return redis.call('SET', KEYS[1], 'value')", 1, "key")
        assert await client.exists("key") == 0
        await client.aclose()


async def test_a_loading_broker_is_waited_for_and_refused_when_it_takes_too_long(tmp_path: Path) -> None:
    # Given a server that takes about two seconds to read its data back
    with redis_server(tmp_path, "appendonly yes", "enable-debug-command yes") as server:
        client = await connect(server.url)
        await client.execute_command("DEBUG", "POPULATE", "2000")
        await client.bgrewriteaof()
        async with asyncio.timeout(5):
            while (await client.info())["aof_rewrite_in_progress"]:  # noqa: ASYNC110 - another process ends this
                await asyncio.sleep(0.02)
        await client.aclose()
        server.kill()
        server.configure("key-load-delay 1000", "loading-process-events-interval-bytes 1024")
        server.start()

        # When we are in a hurry, then it is refused; else it is waited for
        client = await connect(server.url)
        with pytest.raises(BrokerError, match="still loading"):
            await check_broker(client, loading_timeout_s=0.0)
        assert not (await check_broker(client, loading_timeout_s=8.0)).is_loading
        assert await client.dbsize() == 2000
        await client.aclose()


@pytest.mark.fault
async def test_a_restart_of_the_broker_goes_unnoticed_by_commands_in_flight(tmp_path: Path) -> None:
    # Given eight tasks that write without a pause
    with redis_server(tmp_path, "appendonly yes", "appendfsync always") as server:
        client = await connect(server.url)
        is_over = False

        async def work(name: int) -> int:
            count = 0
            while not is_over:
                count += 1
                with translate(client):
                    await client.set(f"key-{name}", count)
            return count

        tasks = [asyncio.create_task(work(name)) for name in range(8)]
        await asyncio.sleep(0.2)

        # When the broker is killed, and back a second later
        server.kill()
        await asyncio.sleep(1.0)
        await asyncio.to_thread(server.start)
        await asyncio.sleep(0.7)
        is_over = True
        counts = await asyncio.gather(*tasks)

        # Then no command failed and none was forgotten
        assert [int(await client.get(f"key-{name}") or 0) for name in range(8)] == counts
        await client.aclose()


@pytest.mark.fault
async def test_a_broker_that_stays_away_is_an_error_when_patience_ends(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server:
        client = await connect(server.url, patience_s=0.5)
        server.kill()
        started_s = time.monotonic()
        with pytest.raises(BrokerError) as caught, translate(client):
            await client.get("key")
        assert caught.value.facts["reason"] == "unreachable"
        assert 0.5 <= time.monotonic() - started_s < 2.0
        await client.aclose()


@pytest.mark.fault
async def test_a_stopped_broker_is_a_timeout_not_a_hang(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server:
        client = await connect(server.url, patience_s=0.0, socket_timeout_s=0.3)
        os.kill(server.pid, signal.SIGSTOP)
        with pytest.raises(BrokerError) as caught, translate(client):
            await client.get("key")
        assert caught.value.facts["reason"] == "timeout"
        await client.aclose()


async def test_more_callers_than_connections_wait_their_turn(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server:
        client = await connect(server.url, max_connections=2)
        assert sorted(await asyncio.gather(*(client.incr("key") for _ in range(200)))) == list(range(1, 201))
        assert len(await client.client_list()) == 2
        await client.aclose()


async def test_an_error_of_the_broker_comes_without_the_frames_of_the_client_library() -> None:
    with pytest.raises(BrokerError) as caught:
        await RedisFabric.open("redis://127.0.0.1:1", client_name="tests", patience_s=0.1)
    told = "".join(traceback.format_exception(caught.value))
    assert "ConnectionRefusedError" in told and "nothing listens there" in told
    assert "redis/asyncio" not in told and len(told.splitlines()) < 30
