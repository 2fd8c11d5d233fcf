"""How many tokens of a vLLM server come at once."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from rollfab.fabric.contract.records import Sampling
from rollfab.workers.engines.vllm.attached.admission import Turns
from rollfab.workers.engines.vllm.attached.client import Client
from rollfab.workers.engines.vllm.attached.routes import CompletionsRoute, GenerateRoute
from rollfab.workers.engines.vllm.attached.streams import (
    PACE_TOKENS_MIN,
    PIECE_S,
    PIECE_TOKENS_MAX,
    Pace,
    Streams,
    piece_tokens,
)
from rollfab.workers.engines.vllm.common.backend import Ask


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
    """Makes tokens 0, 1, 2 … of any request, in pieces as it was asked to; bodies: what it was asked."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []

    async def health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
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
    streams = Streams(client, CompletionsRoute("m"), Turns(4))
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


def test_both_routes_ask_for_pieces() -> None:
    ask = Ask(request_id="r", input_ids=[1], token_count_max=5, sampling=Sampling())
    assert CompletionsRoute("m").body(ask, [1], 5, None, stream_interval=7)["stream_interval"] == 7
    assert GenerateRoute().body(ask, [1], 5, None, stream_interval=7)["sampling_params"]["stream_interval"] == 7
