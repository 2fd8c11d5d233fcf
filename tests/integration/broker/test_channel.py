"""Do commands asked at the same time share round trips, and does each asker get its own answer or error?"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from rollfab.fabric.broker.clients import pools
from rollfab.fabric.broker.clients.channel import Channel, checked
from rollfab.fabric.broker.connection import open_broker


@pytest.fixture
async def client(url: str) -> AsyncIterator[Redis]:
    client = await open_broker(url, client_name="tests")
    await client.flushall()
    yield client
    await client.aclose()


async def read_count(client: Redis) -> int:
    return int((await client.info("stats"))["total_reads_processed"])


async def test_what_is_asked_at_once_shares_a_round_trip(client: Redis) -> None:
    channel = Channel(client)
    await channel.ask("PING")
    before = await read_count(client)

    answers = await asyncio.gather(*(channel.ask("ECHO", str(index)) for index in range(100)))

    assert answers == [str(index).encode() for index in range(100)]
    assert await read_count(client) - before <= 3


async def test_who_asks_nothing_is_not_told_that_the_broker_is_silent(
    client: Redis, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pools, "SAY_AFTER_S", 0.05)

    assert await Channel(client).ask_many([]) == []
    await asyncio.sleep(0.2)

    assert caplog.messages == []


async def test_who_stood_still_himself_does_not_blame_the_broker(
    client: Redis, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel = Channel(client)
    await channel.ask("PING")
    monkeypatch.setattr(pools, "SAY_AFTER_S", 0.05)

    asked = asyncio.create_task(channel.ask("EVAL", "for i = 1, 1e7 do end return 7", 0))  # a tenth of a second
    for _ in range(20):
        await asyncio.sleep(0)  # until it is sent
    assert not asked.done()
    time.sleep(0.5)  # noqa: ASYNC251 - the loop is to stand still
    assert await asked == 7

    assert caplog.messages == []


async def test_an_error_reaches_its_own_asker_alone(client: Redis) -> None:
    channel = Channel(client)

    good, bad, many = await asyncio.gather(
        channel.ask("ECHO", "a"),
        channel.ask("HGET", "a"),
        channel.ask_many([("ECHO", "b"), ("NONSENSE",), ("ECHO", "c")]),
        return_exceptions=True,
    )

    assert good == b"a"
    assert isinstance(bad, ResponseError)
    assert (many[0], many[2]) == (b"b", b"c")
    assert isinstance(many[1], ResponseError)
    with pytest.raises(ResponseError):
        checked(many)


async def test_commands_run_in_the_order_they_were_asked(client: Redis) -> None:
    channel = Channel(client)

    await asyncio.gather(*(channel.ask("RPUSH", "list", index) for index in range(600)))

    assert await channel.ask("LRANGE", "list", 0, -1) == [str(index).encode() for index in range(600)]


@pytest.mark.parametrize("wait_turn_count", [0, 1, 2, 3, 5])
async def test_a_cancelled_asker_takes_nobody_with_it(client: Redis, wait_turn_count: int) -> None:
    # Given one who asks alone and is cancelled, before or after its command was sent
    channel = Channel(client)
    leaver = asyncio.ensure_future(channel.ask("ECHO", "a"))
    for _ in range(wait_turn_count):
        await asyncio.sleep(0)
    leaver.cancel()
    # When others ask in the very next moment
    answers = await asyncio.gather(*(channel.ask("ECHO", "b") for _ in range(3)))
    # Then they are answered, and so is whoever comes later
    assert answers == [b"b"] * 3
    assert await channel.ask("ECHO", "c") == b"c"
    assert leaver.cancelled() or await leaver == b"a"


async def test_a_command_that_blocks_holds_nobody_up(client: Redis) -> None:
    channel = Channel(client)
    blocked = asyncio.ensure_future(channel.ask_alone([("BLPOP", "list", 5)]))
    await asyncio.sleep(0.05)

    assert await asyncio.wait_for(channel.ask("RPUSH", "list", "x"), 1) == 1

    assert await asyncio.wait_for(blocked, 1) == [[b"list", b"x"]]


async def test_a_lost_connection_goes_unnoticed(client: Redis) -> None:
    channel = Channel(client)
    await channel.ask("SET", "a", "1")
    other = Channel(client)
    await other.ask("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")

    assert await channel.ask("GET", "a") == b"1"
