"""The gate of the gateway: whose request this is, whether there is room for it, and whether its client is there.

- Authority comes from the key alone. Wrong keys of every sort get one answer, so that nobody learns which sessions
  there are.
- Who sends wrong keys is told to wait; a right key is always let in, so that a stranger behind the same address (a
  proxy's, a container host's) locks nobody out.
- What has the form of a session's key is no guess, for nobody guesses 256 bits. As a gateway dies all its sessions end
  at once, and each of their clients is to hear it, not to wait.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Protocol, TypeVar

from starlette.requests import Request

from ...fabric.contract.clock import Clock
from ...fabric.contract.text import counted
from ...fabric.host.helpers import end_all
from ...fabric.ports.sessions import KEY_FORM, Session, SessionFacts
from ..access.auth import bearer
from ..access.keys import place_among
from ..access.problems import Refused
from .config import GatewayConfig
from .problems import ClientGone

T = TypeVar("T")

KEY_LENGTH_MAX = 512
WINDOW_S = 60.0  # in which wrong keys are counted
ADDRESS_COUNT_MAX = 10_000  # that are remembered; the oldest goes first


class Keys(Protocol):
    """What the gate asks of sessions, see ports/sessions.py."""

    def find(self, key: str) -> Session | None: ...
    async def find_recorded(self, key: str) -> SessionFacts | None: ...


class CallGate:
    """The gate of one gateway."""

    def __init__(self, sessions: Keys, config: GatewayConfig, clock: Clock) -> None:
        self._sessions = sessions
        self._config = config
        self._failures = Failures(config.failed_key_count_max, clock)
        self._call_count = 0

    def session_of(self, request: Request, *, may_be_key: bool = False) -> Session:
        """Return the session whose key a request has.

        may_be_key: where no header has a key, what names the session in the path is taken for one.

        Raises:
            Refused: the key is wrong, over, or another session's than the path names.
        """
        sent, named = _key_of(request), request.path_params.get("session", "")
        is_key = may_be_key and not sent
        key = named if is_key else sent
        session = self._sessions.find(key) if 0 < len(key) <= KEY_LENGTH_MAX else None
        if session is None or not (is_key or named in ("", session.facts.session_id)):
            raise self._refusal(request, key)
        return session

    async def recorded(self, request: Request) -> SessionFacts | None:
        """Return what is known of the session whose key a request has, if it has ended and is recorded."""
        facts = await self._sessions.find_recorded(_key_of(request)[:KEY_LENGTH_MAX])
        return facts if facts is not None and facts.session_id == request.path_params["session"] else None

    def check_creator(self, request: Request) -> None:
        """Require a creator's key, in a header or, where the path has a place for one, there. Raises Refused."""
        sent, named = _key_of(request), request.path_params.get("key", "")
        if all(place_among(key, self._config.creator_keys) is None for key in (sent, named)):
            raise self._refusal(request, sent or named)

    @contextmanager
    def room(self) -> Iterator[None]:
        """Hold room for one call. Raises Refused: all of it is taken."""
        if self._call_count >= self._config.call_count_max:
            text = f"the gateway has {counted(self._call_count, 'call')} under way, which is its limit: try again"
            raise Refused(429, "rate_limit_exceeded", text, retry_s=1)
        self._call_count += 1
        try:
            yield
        finally:
            self._call_count -= 1

    @asynccontextmanager
    async def room_for(self, request: Request) -> AsyncIterator[None]:
        """Hold room for one call once its body is there: one that arrives slowly takes none. Raises Refused."""
        await request.body()
        with self.room():
            yield

    def _refusal(self, request: Request, key: str) -> Refused:
        is_guess = not KEY_FORM.fullmatch(key)
        wait_s = self._failures.count(request.client.host if request.client else "") if is_guess else 0
        if wait_s:
            return Refused(429, "rate_limit_exceeded", "too many wrong keys from this address: wait", retry_s=wait_s)
        text = "the key is missing, wrong, or its session is over: send the header Authorization: Bearer <key>"
        return Refused(401, "invalid_api_key", text)


class Failures:
    """Counts the wrong keys of each address in windows of a minute."""

    def __init__(self, count_max: int, clock: Clock) -> None:
        self._count_max = count_max
        self._clock = clock
        self._counts: OrderedDict[str, tuple[float, int]] = OrderedDict()  # address → when its window began, failures

    def count(self, address: str) -> int:
        """Count one more; return the whole seconds for which this address is to wait, or 0."""
        now_s = self._clock.now_s()
        began_s, count = self._counts.pop(address, (now_s, 0))
        if now_s - began_s >= WINDOW_S:
            began_s, count = now_s, 0
        self._counts[address] = (began_s, count + 1)
        if len(self._counts) > ADDRESS_COUNT_MAX:
            self._counts.popitem(last=False)
        return int(began_s + WINDOW_S - now_s) + 1 if count >= self._count_max else 0


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return what `work` returns; it is cancelled as soon as the client closes its connection.

    The request's body must have been read.

    Raises:
        ClientGone: it was cancelled.
    """
    working, leaving = asyncio.create_task(work), asyncio.create_task(_gone(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        await end_all((working, leaving))


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _key_of(request: Request) -> str:
    """Return the key in a request's header: OpenAI's clients', or Anthropic's."""
    return bearer(request.headers.get("authorization", "")) or request.headers.get("x-api-key", "").strip()
