"""The api under slow, silent and many clients: real sockets, short bounds."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

import pytest

from tests.support.processes.api_server import ApiWorld, running_api

pytestmark = [pytest.mark.redis, pytest.mark.timeout(60)]

Pair = tuple[asyncio.StreamReader, asyncio.StreamWriter]
HEAD = b"GET /v1/status HTTP/1.1\r\nHost: localhost\r\n"


@contextlib.asynccontextmanager
async def connected(api: ApiWorld, count: int = 1, **options: object) -> AsyncIterator[list[Pair]]:
    address = urlsplit(api.url)
    pairs = [await asyncio.open_connection(address.hostname, address.port, **options) for _ in range(count)]  # type: ignore[arg-type]
    try:
        yield pairs
    finally:
        for _, writer in pairs:
            writer.close()
        await asyncio.gather(*(writer.wait_closed() for _, writer in pairs), return_exceptions=True)


async def rest_of(reader: asyncio.StreamReader, timeout_s: float = 10.0) -> bytes:
    """All that comes until the other side ends it; a reset counts as the end."""
    with contextlib.suppress(ConnectionResetError):
        return await asyncio.wait_for(reader.read(), timeout_s)
    return b""


async def test_a_request_that_does_not_arrive_whole_is_ended_with_a_word(url: str) -> None:
    begun = [
        HEAD,  # no end of the head
        b"POST /v1/workers/w/lend HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{",
    ]
    async with running_api(url, request_timeout_s=0.5) as api:
        for part in begun:
            async with connected(api) as [(reader, writer)]:
                writer.write(part)
                assert b" 408 " in await rest_of(reader), part


async def test_a_trickling_head_is_ended_though_it_never_rests(url: str) -> None:
    async with running_api(url, request_timeout_s=0.5) as api, connected(api) as [(reader, writer)]:

        async def trickle() -> None:
            writer.write(HEAD)
            while True:
                writer.write(b"X-A: b\r\n")
                await asyncio.sleep(0.05)

        trickling = asyncio.create_task(trickle())
        assert b" 408 " in await rest_of(reader)
        trickling.cancel()


POST = b"POST /v1/%s HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n"


@pytest.mark.parametrize(
    "begun",
    [
        HEAD,
        POST % b"workers/w/lend" + b"{",
        POST % b"nothing",  # answered before its body
        b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n" + POST % b"workers/w/lend",  # sent ahead of an answer
    ],
    ids=["head", "body", "answered", "ahead"],
)
@pytest.mark.parametrize("pieces", [1, 1000])
async def test_no_connection_is_held_by_a_request_that_stops_half_way_or_trickles(
    url: str, begun: bytes, pieces: int
) -> None:
    times = {"silence_timeout_s": 1.0} if pieces == 1 else {"request_timeout_s": 1.5}
    async with running_api(url, **times) as api, connected(api) as [(reader, writer)]:
        await api.json("healthz")  # the first request waits for modules

        async def trickle() -> None:
            writer.write(begun)
            for _ in range(pieces):
                await asyncio.sleep(0.1)  # after the answer, where that does not wait for the body
                writer.write(b"x")

        trickling = asyncio.create_task(trickle())
        answer = await rest_of(reader, 5.0)
        trickling.cancel()
    assert b" 408 " in answer or b" 404 " in answer


async def test_a_body_that_pauses_less_than_it_may_is_taken(url: str) -> None:
    async with running_api(url, silence_timeout_s=1.0) as api, connected(api) as [(reader, writer)]:
        await api.json("healthz")
        writer.write(b"POST /v1/nothing HTTP/1.1\r\nHost: localhost\r\nContent-Length: 6\r\n\r\n")
        for _ in range(6):
            await asyncio.sleep(0.3)
            writer.write(b"x")
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        answer = await rest_of(reader)
    assert b" 404 " in answer and b" 200 " in answer


async def test_a_second_request_on_a_connection_has_its_own_time(url: str) -> None:
    async with running_api(url, request_timeout_s=1.0) as api, connected(api) as [(reader, writer)]:
        for _ in range(4):  # longer than one request may take, and each is answered
            writer.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b"200" in await reader.readline()
            await reader.readuntil(b"\r\n\r\n")
            await reader.read(1 << 16)
            await asyncio.sleep(0.4)
        writer.write(b"GET /hea")
        assert b" 408 " in await rest_of(reader)


async def test_silent_connections_make_room_for_who_asks(url: str) -> None:
    async with running_api(url, connection_count_max=20) as api, connected(api, 60) as pairs:
        for _, writer in pairs:
            with contextlib.suppress(ConnectionResetError):
                writer.write(b"GET / HT")
        for _ in range(5):
            assert (await api.json("v1/status"))["runs"]


async def test_where_all_connections_are_at_work_one_more_is_told(url: str) -> None:
    async with running_api(url, connection_count_max=3) as api, connected(api, 3) as pairs:
        for reader, writer in pairs:
            writer.write(b"GET /v1/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b"200" in await reader.readline()
        async with connected(api) as [(reader, writer)]:
            answer = await rest_of(reader)
            assert b" 503 " in answer and b"try again" in answer
        for reader, _ in pairs:
            assert await reader.readline(), "those at work go on"


async def test_a_reader_that_does_not_read_is_dropped_and_nobody_waits_for_it(url: str) -> None:
    async with running_api(url, write_timeout_s=0.5, event_reader_count_max=1) as api:
        address = urlsplit(api.url)
        slow = socket.socket()
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.setblocking(False)
        with slow:
            await asyncio.get_running_loop().sock_connect(slow, (address.hostname, address.port))
            await asyncio.get_running_loop().sock_sendall(
                slow, b"GET /v1/events?after=0 HTTP/1.1\r\nHost: localhost\r\n\r\n"
            )
            for _ in range(40):  # a stream that never reads, and events of 60 KiB
                await api.fabric.board.add_events([("test.large", {"text": "x" * 60_000})] * 5)
                await asyncio.sleep(0.05)
            for _ in range(100):  # its place is free again, and the api answers
                async with api.http.stream("GET", "v1/events") as answer:
                    if answer.status_code == 200:
                        break
                await asyncio.sleep(0.1)
            else:
                pytest.fail("the slow reader kept its place")
            assert (await api.json("v1/status"))["runs"]


async def test_streams_never_exceed_their_limit_however_they_come_at_once(url: str) -> None:
    async with running_api(url, event_reader_count_max=10) as api, connected(api, 80) as pairs:
        for _, writer in pairs:
            writer.write(b"GET /v1/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answers = [await asyncio.wait_for(reader.readline(), 10) for reader, _ in pairs]
        assert sum(b" 200 " in answer for answer in answers) == 10
        assert sum(b" 503 " in answer for answer in answers) == 70


async def test_a_stream_that_is_reset_before_it_begins_gives_its_place_back(url: str) -> None:
    async with running_api(url, event_reader_count_max=5) as api:
        for _ in range(30):
            async with connected(api) as [(_, writer)]:
                writer.write(b"GET /v1/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
                await asyncio.sleep(0.005)
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        for _ in range(50):
            async with api.http.stream("GET", "v1/events") as answer:
                if answer.status_code == 200:
                    return
            await asyncio.sleep(0.1)
        pytest.fail("places of streams that never began were not given back")
