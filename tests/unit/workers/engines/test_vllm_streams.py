"""How many tokens of a vLLM server come at once."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from rollfab.fabric.contract.errors import EngineError
from rollfab.fabric.contract.records import Sampling
from rollfab.workers.engines.vllm.attached.admission import ServerRequests
from rollfab.workers.engines.vllm.attached.client import Client, Reply
from rollfab.workers.engines.vllm.attached.routes import (
    CompletionsRoute,
    GenerateRoute,
    find_logprob_count_max,
    find_route,
)
from rollfab.workers.engines.vllm.attached.streams import Streams
from rollfab.workers.engines.vllm.common.backend import Ask
from rollfab.workers.engines.vllm.common.pieces import (
    PACE_TOKENS_MIN,
    PIECE_S,
    PIECE_TOKENS_MAX,
    Pace,
    piece_tokens,
)


@pytest.mark.parametrize(
    ("token_s", "count"),
    [
        (None, 1),
        (1e-9, PIECE_TOKENS_MAX),
        (PIECE_S / PIECE_TOKENS_MAX / 1.01, PIECE_TOKENS_MAX),
        (PIECE_S / 4.5, 4),
        (PIECE_S, 1),
        (60.0, 1),
    ],
)
def test_a_piece_takes_so_long_to_make_and_has_at_least_a_token(token_s: float | None, count: int) -> None:
    assert piece_tokens(token_s) == count


def test_a_pace_is_told_once_enough_tokens_have_come_after_the_first() -> None:
    pace = Pace()
    assert pace.note(5, now_s=100.0) is None, "how long the first tokens took is the prompt's time"
    assert pace.note(PACE_TOKENS_MIN - 1, now_s=101.0) is None
    assert pace.note(1, now_s=102.0) == 2.0 / PACE_TOKENS_MIN


class PlayedServer:
    """Makes tokens 0, 1, 2 … of any request, in pieces as it was asked to.

    Attributes:
        bodies: what it was asked.
        connections: the transport of each request.
        drops: a request that comes on a connection which has carried one is dropped with it.
    """

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.connections: list[Any] = []
        self.drops = False

    async def health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        is_kept = request.transport in self.connections
        self.connections.append(request.transport)
        if is_kept and self.drops and request.transport:
            request.transport.abort()
        count, interval = body["max_tokens"], body["stream_interval"]
        ends = [1, *range(1 + interval, count, interval), count]
        response = web.StreamResponse()
        await response.prepare(request)
        for start, end in zip([0, *ends], ends, strict=False):
            ids = list(range(start, end))
            choice = {
                "token_ids": ids,
                "logprobs": {"token_logprobs": [-0.5] * len(ids)},
                "finish_reason": "length" if end == count else None,
            }
            await response.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response


@asynccontextmanager
async def streaming(directory: Path) -> AsyncIterator[tuple[Streams, PlayedServer]]:
    server, app = PlayedServer(), web.Application()
    app.router.add_get("/health", server.health)
    app.router.add_post("/v1/completions", server.complete)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.UnixSite(runner, str(directory / "vllm.sock")).start()
    client = Client(f"unix://{directory}/vllm.sock", None)
    streams = Streams(client, CompletionsRoute("m"), ServerRequests(4))
    try:
        yield streams, server
    finally:
        await streams.close()
        await client.close()
        await runner.cleanup()


async def pieces(streams: Streams, name: str, **sampling: Any) -> list[int]:
    """Sizes of the pieces in which 50 tokens came."""
    ask = Ask(request_id=name, input_ids=[1], token_count_max=50, sampling=Sampling(temperature=0.0, **sampling))
    chunks = [chunk async for chunk in streams.stream(ask)]
    assert [token for chunk in chunks for token in chunk.token_ids] == list(range(50))
    assert [chunk.finish_reason for chunk in chunks] == [""] * (len(chunks) - 1) + ["length"]
    return [len(chunk.token_ids) for chunk in chunks]


async def test_a_servers_tokens_come_in_pieces_once_its_pace_is_known(tmp_path: Path) -> None:
    async with streaming(tmp_path) as (streams, server):
        assert await pieces(streams, "first") == [1] * 50
        assert await pieces(streams, "second") == [1, 16, 16, 16, 1]
        assert [body["stream_interval"] for body in server.bodies] == [1, PIECE_TOKENS_MAX]


async def test_tokens_come_one_by_one_where_a_stop_text_is_looked_for(tmp_path: Path) -> None:
    async with streaming(tmp_path) as (streams, _):
        await pieces(streams, "first")
        assert await pieces(streams, "second", stop=("END",)) == [1] * 50


async def test_a_connection_that_came_to_its_end_carries_the_next_request(tmp_path: Path) -> None:
    async with streaming(tmp_path) as (streams, server):
        await pieces(streams, "first")
        await pieces(streams, "second")
        assert server.connections[0] is server.connections[1]


async def test_a_request_that_a_kept_connection_loses_is_asked_again(tmp_path: Path) -> None:
    async with streaming(tmp_path) as (streams, server):
        server.drops = True
        await pieces(streams, "first")
        await pieces(streams, "second")
        first, lost, again = server.connections
        assert lost is first and again is not first


def test_the_likeliest_tokens_are_read_in_order_and_what_was_cut_is_marked() -> None:
    # Given an event as vLLM writes it: the drawn token first, which is there once, or is none of the likeliest
    rows = [
        {"token_id:5": -1.0, "token_id:9": -0.5},
        {"token_id:4": -3.0, "token_id:8": -0.25, "token_id:6": -2.0},
        {"token_id:3": 0.0, "token_id:7": -9999.0},
    ]
    logprobs = {"token_logprobs": [-1.0, -3.0, 0.0], "top_logprobs": rows}
    event = {"choices": [{"token_ids": [5, 4, 3], "logprobs": logprobs, "finish_reason": None}]}
    ask = Ask(request_id="r", input_ids=[1], token_count_max=5, sampling=Sampling(logprobs=2))
    # When it is read
    piece = CompletionsRoute("m").piece(event, ask)
    # Then each token has the two likeliest beside it; minus infinity is none
    assert [(side.name, side.start, side.end) for side in piece.sides] == [("top_ids", 0, 3), ("top_logprobs", 0, 3)]
    ids, told = (side.array for side in piece.sides)
    assert (ids.tolist(), ids.dtype) == ([[9, 5], [8, 6], [3, -1]], np.int32)
    assert (told.tolist(), told.dtype) == ([[-0.5, -1.0], [-0.25, -2.0], [0.0, -math.inf]], np.float32)
    # And a row that is too short is no event that we know
    for count in (3, 4):
        with pytest.raises(ValueError, match="shape"):
            CompletionsRoute("m").piece(event, replace(ask, sampling=Sampling(logprobs=count)))
    logprobs["top_logprobs"] = rows[:1]
    with pytest.raises(ValueError, match="reshape"):
        CompletionsRoute("m").piece(event, replace(ask, sampling=Sampling(logprobs=3)))


def test_one_more_likeliest_token_is_asked_for_and_the_drawn_one_counts_where_it_is_one() -> None:
    # Given what vLLM writes of three asked for, the drawn one first: it is the second likeliest, or none of them
    def entry(*told: tuple[int, float]) -> dict[str, Any]:
        tops = [{"token_id": token, "logprob": logprob, "rank": None} for token, logprob in told]
        return {"token_id": told[0][0], "logprob": told[0][1], "rank": 2, "top_logprobs": tops}

    content = [entry((5, -1.0), (9, -0.5), (7, -1.5)), entry((4, -3.0), (8, -0.25), (6, -2.0))]
    content.append(entry((3, 0.0), (7, -9999.0), (1, -9999.0)))
    choice = {"token_ids": [5, 4, 3], "logprobs": {"content": content}, "finish_reason": None}
    ask = Ask(request_id="r", input_ids=[1], token_count_max=5, sampling=Sampling(logprobs=2))
    # When it is read
    piece = GenerateRoute(4).piece({"choices": [choice]}, ask)
    # Then each token has the two likeliest beside it, as the other route tells them
    ids, told = (side.array for side in piece.sides)
    assert (ids.tolist(), ids.dtype) == ([[9, 5], [8, 6], [3, -1]], np.int32)
    assert (told.tolist(), told.dtype) == ([[-0.5, -1.0], [-0.25, -2.0], [0.0, -math.inf]], np.float32)
    assert list(piece.logprobs) == [-1.0, -3.0, 0.0]
    assert GenerateRoute(4).piece({"choices": [choice]}, replace(ask, sampling=Sampling())).sides == ()


@pytest.mark.parametrize(
    ("tops", "count"),
    [([{"token_id": 3, "logprob": -1.0}], 19), ([], 0), ([{"token": "token_id:3", "logprob": -1.0}], 0), (None, 0)],
)
async def test_a_server_that_names_no_ids_is_not_asked_for_likeliest_tokens_there(tops: Any, count: int) -> None:
    class Told(Client):
        async def call(self, method: str, path: str, body: Any = None, **options: Any) -> Reply:
            return Reply(200, {"choices": [{"logprobs": {"content": [{"top_logprobs": tops}]}}]}, "")

    route = await find_route(Told("http://127.0.0.1:9", None), "m", 20)
    assert isinstance(route, GenerateRoute) and route.logprob_count_max == count


async def test_likeliest_tokens_are_asked_for_by_the_route_that_tells_all_of_them() -> None:
    telling, plain = CompletionsRoute("m"), GenerateRoute(logprob_count_max=4)
    streams = Streams(Client("http://127.0.0.1:9", None), plain, ServerRequests(4), telling)
    try:
        for count, route in ((0, plain), (4, plain), (5, telling)):
            ask = Ask(request_id="r", input_ids=[1], token_count_max=5, sampling=Sampling(logprobs=count))
            assert streams._route_of(ask) is route
            assert telling.body(ask, [1], 5, None, stream_interval=1)["logprobs"] == count
            asked = plain.body(ask, [1], 5, None, stream_interval=1)["sampling_params"]["logprobs"]
            assert asked == (count + 1 if count else 0), "one more, as the drawn token takes a place"
    finally:
        await streams.close()


class Answering(Client):
    """Tells `most` likeliest tokens, and answers more with `status`."""

    def __init__(self, most: int, status: int = 400) -> None:
        super().__init__("http://127.0.0.1:9", None)
        self.most, self.status, self.count = most, status, 0

    async def call(self, method: str, path: str, body: Any = None, **options: Any) -> Reply:
        self.count += 1
        return Reply(200 if body["logprobs"] <= self.most else self.status, {}, "")


@pytest.mark.parametrize("most", range(5, 30))
async def test_how_many_likeliest_tokens_a_server_tells_is_found_by_trying(most: int) -> None:
    client = Answering(most)
    assert await find_logprob_count_max(client, "m", 1000) == min(most, 20)
    assert client.count <= (1 if most >= 20 else 5)
    assert await find_logprob_count_max(client, "m", 12) == min(most, 12), "no more than there are tokens"


async def test_a_server_that_fails_while_it_is_tried_is_not_taken_for_one_that_tells_fewer() -> None:
    with pytest.raises(EngineError, match="500"):
        await find_logprob_count_max(Answering(9, 500), "m", 1000)


def test_both_routes_ask_for_pieces() -> None:
    ask = Ask(request_id="r", input_ids=[1], token_count_max=5, sampling=Sampling())
    assert CompletionsRoute("m").body(ask, [1], 5, None, stream_interval=7)["stream_interval"] == 7
    assert GenerateRoute().body(ask, [1], 5, None, stream_interval=7)["sampling_params"]["stream_interval"] == 7
