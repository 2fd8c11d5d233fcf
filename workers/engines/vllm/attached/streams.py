"""Requests at a vLLM server as streams that outlive an attempt at them.

- Holding, limits and a connection that was lost are one thing: the request is ended at the server, and asked again from
  the tokens that it has. The engine above sees one stream. Tokens that were on their way are made again; the server
  may still finish the step that it was in.
- From the moment that a request is held nothing of it is streamed, also nothing that has arrived already.
- A stop is one of the request's own stop tokens: where the server's own configuration ends one earlier, or somebody
  else aborts it, it is asked again.
- No stream waits for a server that is gone: it is asked for its health all the time.
- An event costs the server and us more than a token does, so tokens come in pieces of about PIECE_S, as fast as the
  server was last. What is held or lost in the middle of a piece is made again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from .....fabric.contract.errors import EngineError
from ...seeds import resumed_seed
from ..common.backend import Ask, Chunk
from ..common.pieces import Pace, piece_tokens
from .admission import ServerRequest, ServerRequests
from .client import Attempt, Client
from .routes import Piece, Route

HEALTH_EVERY_S = 2.0
HEALTH_S = 20.0  # a server that computes on a busy machine may take seconds to answer
HEALTH_PATIENCE = 2  # answers in a row that do not come
EMPTY_MAX = 3  # attempts in a row that made no token


class Streams:
    """All requests of one door.

    Attributes:
        requests: which of them run.
        failure: why no request is taken any more.
        event_count: events that brought tokens.
    """

    def __init__(self, client: Client, route: Route, requests: ServerRequests, telling: Route | None = None) -> None:
        """telling: the route for requests with more tokens to tell beside theirs than `route` does; None: the same."""
        self._client = client
        self._route = route
        self._telling = telling or route
        self.requests = requests
        self.failure: EngineError | None = None
        self.event_count = 0
        self._loop = asyncio.get_running_loop()
        self._token_s: float | None = None  # time per token, as some request showed last
        self._watch = asyncio.create_task(self._watch_health())

    async def close(self) -> None:
        """End every stream with an error."""
        self._fail(EngineError("the server's door is closed"))
        self._watch.cancel()
        await asyncio.gather(self._watch, return_exceptions=True)

    def check(self) -> None:
        """Raise EngineError if the server is gone, or this is closed."""
        if self.failure is not None:
            raise EngineError(self.failure.message, **self.failure.facts) from self.failure

    def _fail(self, error: EngineError) -> None:
        if self.failure is None:
            self.failure = error
            self.requests.wake_all()

    async def _watch_health(self) -> None:
        while self.failure is None:
            await asyncio.sleep(HEALTH_EVERY_S)
            await self._check_health()

    async def _check_health(self) -> None:
        """Ask for the server's health, and fail if it does not answer."""
        for missed_count in range(1, HEALTH_PATIENCE + 1):
            try:
                await self._client.ask("GET", "/health", timeout_s=HEALTH_S)
                return
            except EngineError as error:
                if missed_count == HEALTH_PATIENCE:
                    self._fail(error)
                await asyncio.sleep(0.1)

    async def stream(self, ask: Ask) -> AsyncGenerator[Chunk, None]:
        """Yield the request's chunks until one has a finish_reason."""
        self.check()
        request = self.requests.add(ask)
        empty_count = 0
        try:
            while empty_count < EMPTY_MAX:
                await request.may_go_on.wait()
                self.check()
                if request.is_aborted:
                    yield Chunk(finish_reason="abort")
                    return
                made_count = len(request.made)
                attempt = request.attempt = self._attempt(request)
                async for chunk in self._chunks(request, attempt):
                    request.made += chunk.token_ids
                    yield chunk
                    if chunk.finish_reason:
                        return
                if request.attempt is attempt:
                    request.attempt = None
                is_empty = len(request.made) == made_count and not attempt.is_cut
                empty_count = empty_count + 1 if is_empty else 0
            raise EngineError(
                f"vLLM server {self._client.url} ends request {ask.request_id!r} without a token: see its log"
            )
        finally:
            self.requests.remove(request)

    def _attempt(self, request: ServerRequest) -> Attempt:
        ask, made_count = request.ask, len(request.made)
        seed = ask.sampling.seed
        route = self._route_of(ask)
        body = route.body(
            ask,
            ask.input_ids + request.made,
            ask.token_count_max - made_count,
            None if seed is None else resumed_seed(seed, ask.prior_count + made_count),
            stream_interval=1 if ask.sampling.stop else piece_tokens(self._token_s),  # stop texts are found on our side
        )
        return Attempt(self._client, route.path, body)

    def _route_of(self, ask: Ask) -> Route:
        return self._route if ask.sampling.logprobs <= self._route.logprob_count_max else self._telling

    async def _chunks(self, request: ServerRequest, attempt: Attempt) -> AsyncGenerator[Chunk, None]:
        """Yield the chunks of an attempt.

        It may end without a finish_reason: cut, ended by the server's own will, or lost.
        """
        is_first = not request.made
        last: Piece | None = None
        cached_token_count = 0
        pace = Pace()
        try:
            async for event in attempt.events():
                piece = self._piece(event, request.ask)
                if piece.cached_token_count is not None:
                    cached_token_count = piece.cached_token_count
                if piece.token_ids:
                    self._token_s = pace.note(len(piece.token_ids), self._loop.time()) or self._token_s
                if piece.finish_reason:
                    last = piece  # usage follows it
                elif piece.token_ids:
                    self.event_count += 1
                    yield Chunk(token_ids=piece.token_ids, logprobs=piece.logprobs, sides=piece.sides)
        except EngineError as error:
            if last is None and await self._is_final(error):
                raise
        if last is not None and not attempt.is_cut:
            self.event_count += 1
            yield Chunk(
                token_ids=last.token_ids,
                logprobs=last.logprobs,
                finish_reason=_finish_reason(request, last),
                cached_token_count=cached_token_count if is_first else 0,
                sides=last.sides,
            )

    def _piece(self, event: Any, ask: Ask) -> Piece:
        """Read an event. Raises EngineError: it tells of an error, or is not as we know it."""
        try:
            if "error" in event:
                told = event["error"]["message"]
                raise EngineError(f"vLLM server {self._client.url} failed a request: {told}. See its log")
            piece = self._route_of(ask).piece(event, ask)
        except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
            raise EngineError(f"vLLM server {self._client.url} streams what we do not know: {event!r}") from error
        told = {len(piece.logprobs), *(side.end for side in piece.sides)}
        if told != {len(piece.token_ids)}:
            raise EngineError(f"vLLM server {self._client.url} does not tell every token's id and log-probability")
        return piece

    async def _is_final(self, error: EngineError) -> bool:
        """Tell whether to give up: the server refused, or is gone. A connection that was only lost is made again."""
        if not error.facts.get("is_lost"):
            return True
        await self._check_health()
        return self.failure is not None


def _finish_reason(request: ServerRequest, last: Piece) -> str:
    """Return why the request ended, or "" if it is not over for us."""
    made_count = len(request.made) + len(last.token_ids)
    if last.token_ids and last.token_ids[-1] in request.ask.stop_ids:
        return "stop"
    if made_count >= request.ask.token_count_max or last.finish_reason == "length":
        return "length"
    return ""
