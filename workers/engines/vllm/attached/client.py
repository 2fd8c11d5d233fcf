"""HTTP to a vLLM OpenAI server: calls that answer once, and calls that stream.

- A connection carries one request at a time, as ending one at the server means closing its connection. A stream that
  came to its end leaves its connection to the next stream for KEPT_S. A call has a connection of its own: one that the
  server closes just then would lose the call, where a stream is asked again.
- An attempt may be cut from another task; from that moment on not one more event comes out of it.
- Every failure leaves as an EngineError that names the URL, the cause and the next step. The key is never shown.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

from .....fabric.contract.errors import ConfigError, EngineError, EngineTimeout
from .....fabric.host.network import is_http_url, network_cause

CONNECT_S = 10.0
CALL_S = 60.0
KEPT_S = 2.0  # vLLM closes an idle connection after 5 s
TEXT_MAX = 500  # of a server's own words: enough to recognise the cause
UNIX = "unix://"
EVENT_PREFIX, LAST_EVENT = b"data: ", b"[DONE]"


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to a call. data: the JSON, or None where there was none."""

    status: int
    data: Any
    text: str

    @property
    def is_ok(self) -> bool:
        """True if the server did what was asked."""
        return self.status == 200


class Client:
    """One server. url: as the user gave it, without the slash and the /v1 that it may end with; or unix:///PATH."""

    def __init__(self, url: str, api_key: str | None) -> None:
        if not (is_http_url(url) or url.startswith(f"{UNIX}/")):
            raise ConfigError(f"server is {url!r}, must be a URL like http://host:8000, or {UNIX}/PATH", url=url)
        self.url = url.rstrip("/").removesuffix("/v1")
        self._socket = self.url.removeprefix(UNIX) if url.startswith(UNIX) else ""
        self.base = "http://localhost" if self._socket else self.url
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._sessions: dict[bool, aiohttp.ClientSession] = {}
        self._is_closed = False

    def session(self, *, keeps: bool = False) -> aiohttp.ClientSession:
        """Return the session, made at first use, in the loop that uses it. keeps: connections are used again."""
        if self._is_closed:
            raise EngineError(f"the connection to vLLM server {self.url} is closed", url=self.url)
        if keeps not in self._sessions:
            limits: dict[str, Any] = {"limit": 0, **({"keepalive_timeout": KEPT_S} if keeps else {"force_close": True})}
            self._sessions[keeps] = aiohttp.ClientSession(
                headers=self._headers,
                connector=aiohttp.UnixConnector(self._socket, **limits)
                if self._socket
                else aiohttp.TCPConnector(**limits),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            )
        return self._sessions[keeps]

    async def close(self) -> None:
        """Close the connections, which ends every attempt."""
        self._is_closed = True
        while self._sessions:
            _, session = self._sessions.popitem()
            await session.close()

    async def call(self, method: str, path: str, body: Any = None, *, timeout_s: float = CALL_S) -> Reply:
        """Call the server, and return its one answer, whatever its status.

        Raises:
            EngineError: there is none; EngineTimeout: not in time.
        """
        data = None if body is None else orjson.dumps(body)
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_S)
        with self.translated(timeout_s):
            async with self.session().request(method, self.base + path, data=data, timeout=timeout) as response:
                return _reply(response.status, await response.read())

    async def ask(self, method: str, path: str, body: Any = None, *, timeout_s: float = CALL_S) -> Any:
        """Call the server, and return the JSON of an answer that must be 200.

        Raises:
            EngineError: it is not; says what the server says.
        """
        reply = await self.call(method, path, body, timeout_s=timeout_s)
        if not reply.is_ok:
            raise self.refusal(path, reply)
        return reply.data

    def refusal(self, path: str, reply: Reply) -> EngineError:
        """Make the error for an answer with another status than 200."""
        step = ": set ROLLFAB_SERVER_KEY to its key" if reply.status == 401 else ""
        return EngineError(
            f"vLLM server {self.url} answered {reply.status} to {path}: {reply.text or 'no text'}{step}",
            url=self.url,
            status=reply.status,
        )

    @contextlib.contextmanager
    def translated(self, timeout_s: float = CONNECT_S) -> Iterator[None]:
        """Translate errors of the network into EngineError; is_lost: no answer came, or half of one."""
        try:
            yield
        except TimeoutError as error:
            raise EngineTimeout(
                f"vLLM server {self.url} did not answer within {timeout_s:.0f} s: see its log",
                url=self.url,
                is_lost=True,
            ) from error
        except orjson.JSONDecodeError as error:
            raise EngineError(f"{self.url} answers what no vLLM server would: {error}", url=self.url) from error
        except (aiohttp.ClientError, OSError) as error:
            cause = network_cause(error)
            raise EngineError(
                f"vLLM server {self.url} cannot be reached: {cause}. Is it running, and is this its address?",
                url=self.url,
                is_lost=True,
            ) from error


class Attempt:
    """One streamed answer."""

    def __init__(self, client: Client, path: str, body: Any) -> None:
        self._client = client
        self._path = path
        self._body = body
        self._opening: asyncio.Task[aiohttp.ClientResponse] | None = None
        self.is_cut = False

    def cut(self) -> None:
        """End the attempt here and at the server; its events stop now."""
        self.is_cut = True
        self._close()

    def _close(self) -> None:
        opening = self._opening
        if opening is None:
            return
        if not opening.done():
            opening.cancel()
        elif not opening.cancelled() and opening.exception() is None:
            opening.result().close()

    async def events(self) -> AsyncIterator[Any]:
        """Yield the JSON of every event; ends with the answer, or once the attempt is cut.

        Raises:
            EngineError: refused, or lost on the way.
        """
        try:
            with self._client.translated():
                response = await self._opened()
                if response is None:
                    return
                async for event in _events(response):
                    if self.is_cut:
                        return
                    yield event
        except EngineError:
            if not self.is_cut:
                raise
        finally:
            self._close()

    async def _opened(self) -> aiohttp.ClientResponse | None:
        """Open the stream; None: it was cut.

        Opens it in a task: a connection that is being made has nothing to close yet.
        """
        client, data = self._client, orjson.dumps(self._body)
        self._opening = asyncio.ensure_future(client.session(keeps=True).post(client.base + self._path, data=data))
        await asyncio.wait({self._opening})
        if self._opening.cancelled():
            return None
        response = self._opening.result()
        if response.status != 200:
            raise client.refusal(self._path, _reply(response.status, await response.read()))
        return response


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[Any]:
    rest = b""
    while data := await response.content.readany():
        *whole, rest = (rest + data).split(b"\n\n")
        for event in whole:
            if event.startswith(EVENT_PREFIX) and not event.endswith(LAST_EVENT):
                yield orjson.loads(event[len(EVENT_PREFIX) :])


def _reply(status: int, raw: bytes) -> Reply:
    try:
        data = orjson.loads(raw)
    except orjson.JSONDecodeError:
        data = None
    found = data.get("error", data.get("detail", "")) if isinstance(data, dict) else ""
    text = found.get("message", "") if isinstance(found, dict) else str(found)
    return Reply(status, data, (text or raw.decode(errors="replace"))[:TEXT_MAX])
