"""The client: every request goes out at its time, whatever the server does, and every answer is read to its end.

- Open loop: no request waits for another one or is left out; how late the client itself was is in each outcome.
- An error of a request ends that request, with an outcome that names the kind of error.
- Connections are kept and used again, less long than vLLM's server keeps them (5 s): one that the server closes while
  a request is on its way would be our error, not its.
- The tail is waited for, up to `drain_s` after the last request was sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import aiohttp
import orjson

from ...fabric.contract.errors import ConfigError, EngineError
from ...fabric.host.helpers import end_all
from ...fabric.host.network import is_http_url, network_cause
from .prompts import Bodies, Endpoint, new_bodies
from .records import INTERRUPTED, Arrival, Outcome, no_gaps

CONNECT_S = 30.0
KEPT_S = 3.0
DETAIL_MAX = 300
VOCABULARY_SIZE = 100  # every model has so many ids


@dataclass(frozen=True, kw_only=True)
class Server:
    """A server that answers. url: without slash and /v1. context_tokens: None: it does not say."""

    url: str = field(repr=False)
    model: str
    context_tokens: int | None


@dataclass(kw_only=True)
class Tally:
    """The progress of a replay, for whoever watches; `stop` ends it early.

    started_at_s: of the monotonic clock.
    """

    started_at_s: float = 0.0
    sent_count: int = 0
    ended_count: int = 0
    failed_count: int = 0
    stop: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True, kw_only=True)
class Manner:
    """The manner of asking. vocabulary_size: bound of prompts' ids. prompt_seed: of these ids; None: a fresh one."""

    endpoint: Endpoint = "completions"
    api_key: str | None = field(default=None, repr=False)
    vocabulary_size: int = VOCABULARY_SIZE
    prompt_seed: int | None = None
    drain_s: float = 600.0


PLAIN = Manner()


async def find_server(url: str, model: str | None = None, api_key: str | None = None) -> Server:
    """Find a model that the server serves. model: one of its names; None: its first.

    Raises:
        ConfigError: the URL is none, or the server has no such model.
        EngineError: it cannot be reached, or answers with something else.
    """
    base = _base(url)
    try:
        async with _session(api_key) as session, session.get(base + "/v1/models") as response:
            status, raw = response.status, await response.read()
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise EngineError(
            f"server {base} cannot be reached: {network_cause(error)}. Start it, or give the address that it has"
        ) from error
    if status != 200:
        step = ": give its key as ROLLFAB_SERVER_KEY, by the environment" if status in (401, 403) else ""
        raise EngineError(f"server {base} answered {status} to /v1/models{step}", url=base, status=status)
    try:
        served = {str(each["id"]): each.get("max_model_len") for each in orjson.loads(raw)["data"]}
        name = next(iter(served)) if model is None else model
    except (ValueError, KeyError, TypeError, AttributeError, StopIteration) as error:
        raise EngineError(f"server {base} lists no models: {raw[:DETAIL_MAX].decode(errors='replace')}") from error
    if name not in served:
        raise ConfigError(f"server {base} has no model {name!r}; it has: {', '.join(served)}", url=base, model=name)
    return Server(url=base, model=name, context_tokens=served[name])


async def replay(
    arrivals: Sequence[Arrival],
    url: str,
    model: str,
    *,
    manner: Manner = PLAIN,
    start_at_s: float | None = None,
    tally: Tally | None = None,
) -> list[Outcome]:
    """Send every request at its time, and wait for all answers.

    Args:
        arrivals: in order.
        start_at_s: when time 0 is, of the machine's monotonic clock; None: now.
        tally: kept up to date while it goes on; its `stop` ends it early, with what there is by then.

    Returns:
        One outcome per request that was sent, in order of arrival: all of them, unless it was stopped.

    Raises:
        ConfigError: the URL is none.
    """
    tally = Tally() if tally is None else tally
    bodies = new_bodies(
        model,
        endpoint=manner.endpoint,
        vocabulary_size=manner.vocabulary_size,
        prompt_tokens_max=max((each.prompt_tokens for each in arrivals), default=0),
        seed=manner.prompt_seed,
    )
    async with _session(manner.api_key) as session:
        tally.started_at_s = time.monotonic() if start_at_s is None else start_at_s
        asker = _Asker(session, _base(url), bodies, tally)
        return await _Replay(asker, tally, manner.drain_s).run(arrivals)


def _base(url: str) -> str:
    if not is_http_url(url):
        raise ConfigError(f"server is {url!r}, must be a URL like http://host:8000", url=url)
    return url.rstrip("/").removesuffix("/v1")


def _session(api_key: str | None) -> aiohttp.ClientSession:
    headers = {"Content-Type": "application/json"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    return aiohttp.ClientSession(
        headers=headers,
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEPT_S),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
        cookie_jar=aiohttp.DummyCookieJar(),
    )


class _Replay:
    """The sender, and the requests that it has sent."""

    def __init__(self, asker: _Asker, tally: Tally, drain_s: float) -> None:
        self._asker = asker
        self._tally = tally
        self._drain_s = drain_s
        self._asks: list[asyncio.Task[Outcome]] = []

    async def run(self, arrivals: Sequence[Arrival]) -> list[Outcome]:
        """Return all outcomes; no task of the replay outlives this call."""
        sending = asyncio.create_task(self._send(arrivals))
        stopping = asyncio.create_task(self._tally.stop.wait())
        try:
            await asyncio.wait({sending, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
                await self._drain(stopping)
            self._asker.reason = INTERRUPTED if stopping.done() else "unfinished"
        finally:
            await end_all([sending, stopping, *self._asks])
        return [each.result() for each in self._asks if not each.cancelled()]

    async def _send(self, arrivals: Sequence[Arrival]) -> None:
        for index, arrival in enumerate(arrivals):
            body = self._asker.bodies.body(index, arrival)  # ahead of its time
            due_s = self._tally.started_at_s + arrival.at_s
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            self._asks.append(asyncio.create_task(self._asker.ask(arrival, body)))
            self._tally.sent_count += 1
        await asyncio.sleep(0)  # the last one begins too

    async def _drain(self, stopping: asyncio.Task[bool]) -> None:
        answered = asyncio.ensure_future(asyncio.gather(*self._asks, return_exceptions=True))
        waited: set[asyncio.Future[Any]] = {answered, stopping}
        await asyncio.wait(waited, timeout=self._drain_s, return_when=asyncio.FIRST_COMPLETED)


@dataclass
class _Asker:
    """Asks request after request, and returns the outcome of each. reason: the error of one cut short from outside."""

    session: aiohttp.ClientSession
    url: str = field(repr=False)
    bodies: Bodies
    tally: Tally
    reason: str = ""

    async def ask(self, arrival: Arrival, body: bytes) -> Outcome:
        """Send a request now, read its answer to the end, and return its outcome."""
        sent_at_s = time.monotonic()
        stream = TokenStream(opens_empty=self.bodies.opens_empty)
        error, detail = await self._answered(body, stream)
        told = stream.told()
        if not error:
            error, detail = _shortcoming(stream, told, arrival)
        self.tally.ended_count += 1
        self.tally.failed_count += bool(error)
        began_s = self.tally.started_at_s
        return Outcome(
            arrival=arrival,
            sent_at_s=sent_at_s - began_s,
            ttft_s=None if told.first_at_s is None else told.first_at_s - began_s - arrival.at_s,
            tpot_s=told.tpot_s,
            ended_at_s=time.monotonic() - began_s,
            token_count=told.token_count,
            gaps_us=told.gaps_us,
            error=error,
            detail=detail[:DETAIL_MAX],
        )

    async def _answered(self, body: bytes, stream: TokenStream) -> tuple[str, str]:
        """Return the kind of error and its words, both empty when the answer came to its end."""
        try:
            async with self.session.post(self.url + self.bodies.path, data=body) as response:
                if response.status != 200:
                    return f"http {response.status}", (await response.read()).decode(errors="replace")
                while data := await response.content.readany():
                    stream.feed(data, time.monotonic())
        except asyncio.CancelledError:
            if not self.reason:
                raise
            return self.reason, ""
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            return "connection", network_cause(error)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            return "cut", network_cause(error)
        return "", ""


def _shortcoming(stream: TokenStream, told: Told, arrival: Arrival) -> tuple[str, str]:
    """Say what is wrong with an answer that came to its end."""
    if told.error:
        return "server", told.error
    if not stream.is_done:
        return "cut", "the stream ended without [DONE]"
    if told.token_count < arrival.completion_tokens:
        return "short", f"{told.token_count} of {arrival.completion_tokens} tokens"
    return "", ""


def raise_file_limit() -> None:
    """Allow as many connections at once as this system allows a process."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


# ---------------------------------------------------------------- stream
#
# A streamed answer, read as it comes: when tokens arrived, and what the server says at the end.
#
# - Only the last event is parsed (and the first of a chat): the client shares its cores with what it measures.
# - An event of tokens may bring several when the server could not send them one by one; `usage` tells their count.


GAP_US_MAX = 2**32 - 1  # 71 minutes: what an array of them holds


@dataclass(frozen=True, kw_only=True)
class Told:
    """An answer so far. first_at_s, last_at_s: of the events that brought tokens; None without any."""

    token_count: int = 0
    first_at_s: float | None = None
    last_at_s: float | None = None
    gaps_us: array[int]
    error: str = ""

    @property
    def tpot_s(self) -> float | None:
        """Mean time per token after the first; None: fewer than two tokens."""
        if self.first_at_s is None or self.last_at_s is None or self.token_count < 2:
            return None
        return (self.last_at_s - self.first_at_s) / (self.token_count - 1)


class TokenStream:
    """Server-sent events of one answer. opens_empty: the first may bring no token (a chat's role). is_done: [DONE]."""

    def __init__(self, *, opens_empty: bool = False) -> None:
        self._opens_empty = opens_empty
        self._rest = b""
        self._times: list[float] = []
        self._first = self._last = b""
        self.is_done = False

    def feed(self, data: bytes, at_s: float) -> None:
        """Take in bytes that have just come, in any pieces."""
        buffer = self._rest + data
        if b"\r" in buffer:
            buffer = buffer.replace(b"\r\n", b"\n")
        *events, self._rest = buffer.split(b"\n\n")
        for event in events:
            if event.startswith(b"data:"):
                self._add(event[5:].strip(), at_s)

    def _add(self, event: bytes, at_s: float) -> None:
        if event == b"[DONE]":
            self.is_done = True
            return
        self._times.append(at_s)
        self._first = self._first or event
        self._last = event

    def told(self) -> Told:
        """Tell what has come, events without tokens left out."""
        times, last = self._times[:], _parsed(self._last)
        usage = last.get("usage") or {}
        if times and not last.get("choices"):
            times.pop()
        if times and self._opens_empty and not _has_text(_parsed(self._first)):
            times.pop(0)
        gaps_us = no_gaps()
        gaps_us.extend(min(round((after - before) * 1e6), GAP_US_MAX) for before, after in pairwise(times))
        return Told(
            token_count=usage.get("completion_tokens", len(times)),
            first_at_s=times[0] if times else None,
            last_at_s=times[-1] if times else None,
            gaps_us=gaps_us,
            error=_error(last),
        )


def _parsed(event: bytes) -> dict[str, Any]:
    """Parse an event; an absent one reads as an event with tokens that says nothing more."""
    try:
        found = orjson.loads(event) if event else {"choices": [{}]}
    except orjson.JSONDecodeError:
        return {"error": event.decode(errors="replace")}
    return found if isinstance(found, dict) else {"error": str(found)}


def _error(event: dict[str, Any]) -> str:
    error = event.get("error")
    if not error:
        return ""
    return str(error.get("message", error) if isinstance(error, dict) else error)


def _has_text(event: dict[str, Any]) -> bool:
    choices = event.get("choices") or [{}]
    delta = choices[0].get("delta") or {}
    return any(delta.get(name) for name in ("content", "reasoning_content", "reasoning", "tool_calls"))
