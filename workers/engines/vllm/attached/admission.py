"""Decides which requests of a server's door run at the server now, and which wait on our side.

- Oldest first. A lowered running count, or a hold, cuts the youngest: they are ended at the server, keep their tokens,
  and are asked again from there.
- A limit on KV tokens admits by what requests hold; those that run go on, and go on growing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field

from ...base import EngineLimits
from ..common.backend import Ask
from .client import Attempt


@dataclass(slots=True, eq=False)
class ServerRequest:
    """A request. made: tokens so far. attempt: what runs for it at the server, if anything does."""

    ask: Ask
    made: list[int] = field(default_factory=list)
    attempt: Attempt | None = None
    is_aborted: bool = False
    may_go_on: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def kv_tokens(self) -> int:
        """Tokens whose keys and values it holds, or will once it has begun."""
        return len(self.ask.input_ids) + len(self.made)

    def stop(self) -> None:
        """Have the request wait from now on; end what runs for it."""
        self.may_go_on.clear()
        if self.attempt is not None:
            self.attempt.cut()
            self.attempt = None

    def wake(self) -> None:
        """Have the request's stream look again at what there is to do, whatever it is doing."""
        self.stop()
        self.may_go_on.set()


class ServerRequests:
    """All open requests, oldest first. slot_count: most that run at once."""

    def __init__(self, slot_count: int) -> None:
        self._slot_count = slot_count
        self._requests: dict[str, ServerRequest] = {}
        self._limits = EngineLimits()
        self._is_held = False
        self._is_over = False

    @property
    def running_count(self) -> int:
        """Requests that run at the server."""
        return sum(request.attempt is not None for request in self._requests.values())

    def add(self, ask: Ask) -> ServerRequest:
        """Add a request, as the youngest."""
        request = self._requests[ask.request_id] = ServerRequest(ask)
        self._arrange()
        return request

    def remove(self, request: ServerRequest) -> None:
        """Remove a request that has ended, or that nobody wants any more."""
        request.stop()
        if self._requests.get(request.ask.request_id) is request:
            del self._requests[request.ask.request_id]
            self._arrange()

    def abort(self, request_ids: Iterable[str]) -> None:
        """Abort requests: they make no more tokens."""
        for request in [self._requests[name] for name in request_ids if name in self._requests]:
            request.is_aborted = True
            request.wake()
        self._arrange()

    def wake_all(self) -> None:
        """Wake every request because the server is gone: each finds out, and nothing waits any more."""
        self._is_over = True
        for request in list(self._requests.values()):
            request.wake()

    def hold(self, is_held: bool) -> None:
        """Have all requests wait, or go on."""
        self._is_held = is_held
        self._arrange()

    def set_limits(self, limits: EngineLimits) -> None:
        """Set limits that hold from now on. Of a limit on the tokens of a step only 0 has an effect: nothing runs."""
        self._limits = limits
        self._arrange()

    def _arrange(self) -> None:
        if self._is_over:
            return
        requests = [request for request in self._requests.values() if not request.is_aborted]
        running_max = self._running_max()
        kv_tokens = sum(request.kv_tokens for request in requests if request.attempt is not None)
        is_full = False
        for index, request in enumerate(requests):
            if index >= running_max:
                request.stop()
            elif request.attempt is None:
                kv_tokens += request.kv_tokens
                is_full = is_full or (self._limits.kv_tokens is not None and kv_tokens > self._limits.kv_tokens)
                if is_full:
                    request.stop()
                else:
                    request.may_go_on.set()

    def _running_max(self) -> int:
        if self._is_held or self._limits.step_tokens == 0:
            return 0
        own = self._limits.running_count
        return self._slot_count if own is None else min(self._slot_count, own)
