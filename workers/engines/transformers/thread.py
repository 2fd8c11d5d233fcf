"""The one thread of a transformers engine, and the ways across to it and back.

- The thread builds the loop, runs it, and tells the event loop what ended. It is a daemon and is stopped at interpreter
  exit, so a process never hangs on it, whatever became of its event loop.
- Every call across is answered: with its result, or with EngineError once the thread has ended.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from ....fabric.contract.errors import EngineError
from ..base import Generation

if TYPE_CHECKING:
    from .loop import EngineLoop

log = logging.getLogger(__name__)

CLOSE_S = 1.9  # how long close() waits for the step at hand; after that the daemon thread is left to end by itself

Deliver = Callable[[list[Generation]], None]
T = TypeVar("T")


class LoopThread:
    """Owns the thread. Methods are for the event loop's thread unless they say otherwise."""

    def __init__(self, build: Callable[[Deliver], EngineLoop], receive: Deliver) -> None:
        """`build` runs on the thread and is given the function to deliver with; `receive` runs on the event loop."""
        self._build = build
        self._receive = receive
        self._thread: threading.Thread | None = None
        self._engine_loop: EngineLoop | None = None
        self._lock = threading.Lock()  # guards the two below: the thread's end against a call being posted
        self._failure: EngineError | None = EngineError("the engine is not started: await start() first")
        self._open_calls: set[asyncio.Future[Any]] = set()
        self._is_closing = False

    @property
    def engine_loop(self) -> EngineLoop:
        """The running loop.

        Raises:
            EngineError: not started, closed or crashed.
        """
        failure = self._failure
        if failure is not None:
            raise EngineError(failure.message, **failure.facts) from failure
        assert self._engine_loop is not None
        return self._engine_loop

    async def start(self) -> None:
        """Build and begin to run. Raises EngineError."""
        assert self._thread is None, "an engine starts once"
        self._event_loop = asyncio.get_running_loop()
        self._started: asyncio.Future[None] = self._event_loop.create_future()
        self._stopped = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="rollfab-engine", daemon=True)
        atexit.register(self._join)  # a daemon thread still inside torch when the interpreter goes aborts the process
        self._thread.start()
        await self._started

    async def close(self) -> None:
        """End the thread after the step at hand."""
        if self._thread is None:
            return
        self._request_end()
        try:
            async with asyncio.timeout(CLOSE_S):
                await self._stopped.wait()
        except TimeoutError:
            log.warning("engine.close_timeout", extra={"timeout_s": CLOSE_S})
        atexit.unregister(self._join)
        self._engine_loop = None

    async def call(self, function: Callable[[EngineLoop], T], *, is_fatal: bool = False) -> T:
        """Run `function` on the thread between two steps, also while the engine is held.

        Raises:
            EngineError: the thread has ended before it could answer.
            Exception: what `function` raised; with `is_fatal` the loop then ends as in a crash.
        """
        engine_loop = self.engine_loop
        future: asyncio.Future[T] = self._event_loop.create_future()

        def command() -> None:
            try:
                answer = partial(_answer, future, function(engine_loop))
            except Exception as error:
                answer = partial(_refuse, future, error)
                if is_fatal:
                    raise
            finally:
                with self._lock:
                    self._open_calls.discard(future)
                self._cross(answer)

        with self._lock:
            if self._failure is not None:
                raise EngineError(self._failure.message) from self._failure
            self._open_calls.add(future)
            engine_loop.post(command)
        return await future

    def _run(self) -> None:
        cause: BaseException | None = None
        try:
            engine_loop = self._build(self._deliver)
            with self._lock:
                self._engine_loop = engine_loop
                self._failure = None
        except Exception as error:  # noqa: BLE001  the top of a thread: it belongs to whoever awaits start()
            failure = error if isinstance(error, EngineError) else EngineError(f"the engine could not start: {error!r}")
            failure.__cause__ = None if failure is error else error
            self._fail(failure)
            self._cross(partial(_refuse, self._started, failure))
        else:
            self._cross(partial(_answer, self._started, None))
            if not self._is_closing:
                cause = engine_loop.run()
            self._end(engine_loop, cause)
        self._cross(self._stopped.set)

    def _end(self, engine_loop: EngineLoop, cause: BaseException | None) -> None:
        if cause is None:
            self._fail(EngineError("the engine is closed"))
            return
        failure = EngineError(f"the generation loop crashed: {cause!r}. Start a new engine")
        failure.__cause__ = cause
        log.error("engine.crashed", extra={"error": repr(cause)})
        self._fail(failure)
        self._deliver(engine_loop.drain(failure.message))

    def _fail(self, failure: EngineError) -> None:
        with self._lock:
            self._failure = failure
            futures, self._open_calls = self._open_calls, set()
        for future in futures:
            self._cross(partial(_refuse, future, failure))

    def _deliver(self, ended: list[Generation]) -> None:
        self._cross(partial(self._receive, ended))

    def _cross(self, callback: Callable[[], Any]) -> None:
        try:
            self._event_loop.call_soon_threadsafe(callback)
        except RuntimeError:  # the event loop is closed: nobody is left to be told
            self._request_end()

    def _request_end(self) -> None:
        with self._lock:
            self._is_closing = True
            self._failure = self._failure or EngineError("the engine is closed")
            engine_loop = self._engine_loop
        if engine_loop is not None:
            engine_loop.request_end()

    def _join(self) -> None:
        self._request_end()
        assert self._thread is not None
        self._thread.join(timeout=CLOSE_S)


def _answer(future: asyncio.Future[T], value: T) -> None:
    if not future.done():
        future.set_result(value)


def _refuse(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
