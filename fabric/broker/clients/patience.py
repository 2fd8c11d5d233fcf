"""How long, and how, a command keeps trying."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable
from random import SystemRandom
from types import TracebackType
from typing import Any, TypeVar

from redis import exceptions
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

T = TypeVar("T")

log = logging.getLogger(__name__)

SAY_AFTER_S = 5.0  # of trying in vain: then the log says what the caller waits for

BEAT_S = 0.25
LATE_S = 0.25  # of a beat, by which a process that was frozen, or had no processor, knows it

NEVER_PASSING = (exceptions.AuthenticationError, exceptions.AuthorizationError, exceptions.MaxConnectionsError)


class Patience:
    """A span of time in which this loop ran: `with Patience(10.0) as patience: … patience.left_s()`.

    How long the loop stood still meanwhile, as in a process that was stopped and goes on (Ctrl-Z, a container that was
    paused), is no part of it: answers that came meanwhile are not read yet, and the broker is not to blame.
    """

    __slots__ = ("_beat", "_due_s", "_loop", "_until_s")

    def __init__(self, span_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._until_s = self._loop.time() + span_s

    def left_s(self) -> float:
        """Return how much of it is left; below 0: nothing."""
        return self._until_s - self._loop.time()

    def __enter__(self) -> Patience:
        self._set_beat()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._beat.cancel()

    def _set_beat(self) -> None:
        self._due_s = self._loop.time() + BEAT_S
        self._beat = self._loop.call_at(self._due_s, self._look)

    def _look(self) -> None:
        """See how late this comes: so long the loop stood still."""
        late_s = self._loop.time() - self._due_s
        if late_s > LATE_S:
            self._until_s += late_s
        self._set_beat()


class PatientRetry(Retry):
    """Retries for some seconds in all, however deep the client library nests its retries.

    Its own `Retry` counts attempts and nests them (commands over connects), so that ten attempts can mean a
    hundred; and it would try a wrong password as often as a lost connection.
    """

    def __init__(self, patience_s: float) -> None:
        super().__init__(NoBackoff(), retries=-1)  # `pause_s` is the pause
        self._patience_s = patience_s
        self._said_at_s = float("-inf")

    async def call_with_retry(
        self,
        do: Callable[[], Awaitable[T]],
        fail: Callable[[Exception], Any] | Callable[[Exception, int], Any],
        is_retryable: Callable[[Exception], bool] | None = None,
        with_failure_count: bool = False,
    ) -> T:
        """Call `do` until it succeeds, fails for good, or patience ends; call `fail` with every failure."""
        failure_count = 0
        with Patience(self._patience_s) as patience:
            while True:
                try:
                    return await do()
                except self._supported_errors as error:
                    if is_retryable and not is_retryable(error):
                        raise
                    failure_count += 1
                    await (fail(error, failure_count) if with_failure_count else fail(error))  # type: ignore[call-arg]
                    left_s = patience.left_s()
                    if left_s <= 0 or not may_pass(error):
                        raise
                    if left_s <= self._patience_s - SAY_AFTER_S:
                        self._say(error, left_s, asyncio.get_running_loop().time())
                    await asyncio.sleep(min(left_s, pause_s(failure_count)))

    def _say(self, error: BaseException, left_s: float, now_s: float) -> None:
        """Log the wait once for all calls that wait for the same broker."""
        if now_s - self._said_at_s >= self._patience_s:
            self._said_at_s = now_s
            text = "the broker has not answered for %.0f s (%s): trying for another %.0f s. Is it running?"
            log.warning(text, self._patience_s - left_s, error, left_s)


def pause_s(failure_count: int) -> float:
    """Return how long to wait after this many failures: 20 ms, doubling up to half a second; half of it is drawn.

    The dice are the system's, as the library's own pauses draw from `random`, which a trainer seeds.
    """
    return min(0.5, 0.02 * 2.0 ** min(failure_count, 10)) * (0.5 + 0.5 * SystemRandom().random())


def may_pass(error: BaseException) -> bool:
    """Tell whether trying the same again can help."""
    if isinstance(error, NEVER_PASSING):
        return False
    return not isinstance(error.__cause__ or error.__context__, ssl.SSLError)
