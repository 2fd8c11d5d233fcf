"""The keeper of an agent: heartbeats, renewals and reaping, undisturbed by the agent's environments.

- The keeper has a thread, an event loop and a broker connection of its own: if the agent's loop stands still, nobody
  takes its trajectories for lost. (Without a way to open a connection, it shares the agent's loop.)
- An agent whose loop stands still for `hung_s` is hung: the keeper falls silent, and others take over its trajectories.
  The keeper counts looks, not time: a process that was stopped or starved is not accused.
- The keeper renews and reaps all runs side by side: a run that cannot be reached holds up no other.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from ...fabric.contract.clock import Clock
from ...fabric.contract.errors import BrokerError, FirstError, WireError
from ...fabric.contract.records import RunConfig, WorkerInfo
from ...fabric.host.helpers import Helpers
from ...fabric.ports.queue import Fabric, TrajectoryQueue
from ...fabric.rules.queue.timings import Timings

log = logging.getLogger(__name__)

FOLLOW_S = 0.1  # how often the keeper looks for runs that the agent has begun or ceased to serve
BEAT_S = 1.0
BROKER_PAUSE_S = 0.5
JOIN_S = 15.0  # for the thread to end: longer than any wait for a broker


class AskReward(Protocol):
    """Asks for the reward of a trajectory; `is_again`: an earlier request may still be on its way."""

    async def __call__(self, run_id: str, trajectory_id: str, fence: int, *, is_again: bool = False) -> None: ...


class Kept(Protocol):
    """The part of an agent that serves one run, as the keeper sees it, from its own thread."""

    @property
    def run(self) -> RunConfig:
        """The run, with its settings as they are now."""
        ...

    async def renew(self, trajectories: TrajectoryQueue) -> dict[str, int]:
        """Renew the claims; return the lost ones as trajectory → fence."""
        ...

    def lose(self, lost: Mapping[str, int]) -> None:
        """End the episodes of lost claims; called in the agent's own loop."""
        ...


@dataclass(frozen=True, kw_only=True)
class Elsewhere:
    """The factories that a keeper needs to work in a thread of its own; it calls both there."""

    open_fabric: Callable[[], Awaitable[AbstractAsyncContextManager[Fabric]]]
    make_ask_reward: Callable[[], AskReward]


@dataclass(frozen=True, kw_only=True)
class KeeperConfig:
    """Settings of a keeper."""

    worker_id: str
    renew_s: float
    reap_s: float
    hung_s: float


async def patiently(work: Callable[[], Awaitable[None]], clock: Clock) -> None:
    """Repeat some work for ever, through all broker errors."""
    while True:
        try:
            await work()
        except (BrokerError, WireError) as error:  # the broker is away, or holds unreadable rows
            log.warning("agent.broker_lost", extra={"error": str(error)})
            await clock.sleep(BROKER_PAUSE_S)


class Keeper:
    """Keeps the claims of one agent worker. kept: returns the parts that it serves now, by run.

    timings: what the agent measures; the keeper reports it with its heartbeats.
    """

    def __init__(
        self,
        config: KeeperConfig,
        clock: Clock,
        *,
        say: Callable[[], WorkerInfo],
        kept: Callable[[], Mapping[str, Kept]],
        timings: Timings,
    ) -> None:
        self._config = config
        self._clock = clock
        self._say = say
        self._kept = kept
        self._timings = timings
        self._agent_loop: asyncio.AbstractEventLoop | None = None  # None: the keeper runs in it
        self._has_turned = threading.Event()
        self._missed_count = 0
        self._keeping: dict[str, tuple[Kept, Helpers]] = {}

    @contextlib.asynccontextmanager
    async def keeping(self, fabric: Fabric, ask_reward: AskReward, elsewhere: Elsewhere | None) -> Any:
        """Keep while the block lasts; yield a function that raises the keeper's error if the keeper has died."""
        if elsewhere is None:
            async with Helpers(self._serve(fabric, ask_reward)) as helpers:
                yield helpers.check
            return
        self._agent_loop = asyncio.get_running_loop()
        thread = _Thread(lambda: self._serve_elsewhere(elsewhere))
        try:
            yield thread.check
        finally:
            await thread.end()

    async def _serve_elsewhere(self, elsewhere: Elsewhere) -> None:
        async def serve() -> None:
            async with await elsewhere.open_fabric() as fabric:
                await self._serve(fabric, elsewhere.make_ask_reward())

        await patiently(serve, self._clock)

    async def _serve(self, fabric: Fabric, ask_reward: AskReward) -> None:
        async with Helpers(self._beat(fabric), self._look()) as helpers:
            try:
                while True:
                    for each in (helpers, *(found for _, found in self._keeping.values())):
                        each.check()
                    await self._follow(fabric, ask_reward)
                    await self._clock.sleep(FOLLOW_S)
            finally:
                keeping, self._keeping = self._keeping, {}
                for _, each in keeping.values():
                    await each.end()

    async def _follow(self, fabric: Fabric, ask_reward: AskReward) -> None:
        """Keep the runs that the agent serves now, and no others."""
        kept = dict(self._kept())
        for name, (part, helpers) in list(self._keeping.items()):
            if kept.get(name) is not part:
                del self._keeping[name]
                await helpers.end()
        for name, part in kept.items():
            if name not in self._keeping:
                work = (partial(self._renew, fabric, part), partial(self._reap, fabric, part, ask_reward))
                self._keeping[name] = part, Helpers(*(patiently(each, self._clock) for each in work))

    # ---- is the agent's loop alive?

    @property
    def is_hung(self) -> bool:
        """True if the agent's loop has stood still for too long."""
        return self._missed_count * self._config.renew_s >= self._config.hung_s

    async def _look(self) -> None:
        """Look every `renew_s` whether the agent's loop has turned since the last look."""
        while self._agent_loop is not None:
            if self._has_turned.is_set() or self._missed_count == 0:
                self._missed_count = 0
                self._has_turned.clear()
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    self._agent_loop.call_soon_threadsafe(self._has_turned.set)
            self._missed_count += 1
            if self._missed_count * self._config.renew_s == self._config.hung_s:
                log.error("agent.is_hung", extra={"stood_s": self._config.hung_s})
            await self._clock.sleep(self._config.renew_s)

    # ---- signs of life to the broker

    async def _beat(self, fabric: Fabric) -> None:
        while True:
            try:
                if not self.is_hung:
                    info = self._say()
                    await fabric.board.heartbeat(info)
                    await fabric.board.add_timings(info, self._timings)
            except (BrokerError, WireError) as error:
                log.warning("agent.heartbeat_failed", extra={"error": str(error)})
            await self._clock.sleep(BEAT_S)

    async def _renew(self, fabric: Fabric, part: Kept) -> None:
        trajectories = fabric.trajectories(part.run)
        while True:
            await self._clock.sleep(self._config.renew_s)
            lost = {} if self.is_hung else await part.renew(trajectories)
            if lost and self._agent_loop is None:
                part.lose(lost)
            elif lost and self._agent_loop is not None:
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    self._agent_loop.call_soon_threadsafe(part.lose, lost)

    async def _reap(self, fabric: Fabric, part: Kept, ask_reward: AskReward) -> None:
        run = part.run
        trajectories, turns, rollouts = fabric.trajectories(run), fabric.turns(run), fabric.rollouts(run)
        while True:
            await self._clock.sleep(self._config.reap_s)
            if run != part.run:  # its settings have changed
                run = part.run
                trajectories = fabric.trajectories(run)
            first_error = FirstError()
            with first_error:
                await rollouts.reap()
            with first_error:
                await turns.reap(self._config.worker_id)
            with first_error:
                reaped = await trajectories.reap(self._config.worker_id)
                for name, fence in reaped.scoring:
                    await ask_reward(run.run_id, name, fence, is_again=True)
            first_error.raise_it()


class _Thread:
    """A coroutine in a thread and a loop of its own; `check` raises its error."""

    def __init__(self, work: Callable[[], Awaitable[None]]) -> None:
        self._work = work
        self._error: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._has_begun = threading.Event()
        self._thread = threading.Thread(target=self._run, name="keeper", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        async def main() -> None:
            self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
            self._has_begun.set()
            await self._work()

        try:
            asyncio.run(main())  # noqa: TID251
        except asyncio.CancelledError:
            pass
        except BaseException as error:  # noqa: BLE001 - the thread ends, and the agent raises it at its next look
            self._error = error

    def check(self) -> None:
        """Raise the error that has ended it, if any."""
        if self._error is not None:
            raise self._error

    async def end(self) -> None:
        """End the coroutine, and wait for its thread."""
        await asyncio.to_thread(self._has_begun.wait, JOIN_S)
        if self._loop is not None and self._task is not None:
            with contextlib.suppress(RuntimeError):  # it has ended by itself
                self._loop.call_soon_threadsafe(self._task.cancel)
        await asyncio.to_thread(self._thread.join, JOIN_S)
