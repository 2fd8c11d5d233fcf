"""Reads the events once for everyone: one blocking reader at the broker, however many pages are open.

- The newest RING_COUNT are kept here; older ones are read from the broker when a reader asks for them.
- What each run's trainer reported last (`trainer.step`) is kept.
- A broker that cannot be reached is waited for; nothing is lost by it, because reading goes on after the last id.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress
from itertools import islice
from typing import Any

from ...fabric.contract.clock import Clock
from ...fabric.contract.errors import FabricError
from ...fabric.ports.queue import LeaseBoard
from ..schemas.answers import EventView, Training

log = logging.getLogger(__name__)

START = "0"
RING_COUNT = 1_000
RUN_COUNT_MAX = 256  # runs whose step is kept; the one that reported longest ago is dropped
READ_COUNT = 500
BLOCK_S = 5.0  # below the connection's timeout
AT_ONCE_S = 0.001
RETRY_S = 1.0
TRAINER_STEP = "trainer.step"

Order = tuple[int, int]


def order_of(event_id: str) -> Order:
    """Turn an event's id into numbers that sort."""
    time, _, sequence = event_id.partition("-")
    return int(time), int(sequence or 0)


class EventTail:
    """The end of the event log. `run` reads it; all else is memory."""

    def __init__(self, board: LeaseBoard, clock: Clock) -> None:
        self._board = board
        self._clock = clock
        self._ring: deque[EventView] = deque()
        self._floor = START  # nothing up to this id is in the ring
        self._last = START
        self._moved = asyncio.Event()
        self._steps: OrderedDict[str, Training] = OrderedDict()
        self.is_closed = False

    async def run(self) -> None:
        """Read until cancelled or closed."""
        while not self.is_closed:
            try:
                self._take(await self._board.events(self._last, READ_COUNT, BLOCK_S))
            except FabricError as error:
                log.warning("api.events_failed", extra={"error": str(error)})
                await self._clock.sleep(RETRY_S)

    def close(self) -> None:
        """End every stream."""
        self.is_closed = True
        self._wake()

    def newest(self, count: int) -> list[EventView]:
        """Return the last events but for trainers' steps, the newest first."""
        return list(islice((event for event in reversed(self._ring) if event.kind != TRAINER_STEP), count))

    def training(self, run_id: str) -> Training | None:
        """Return the last report of the run's trainer."""
        return self._steps.get(run_id)

    async def stream(self, after: str | None, keep_alive_s: float) -> AsyncIterator[list[EventView]]:
        """Yield events after an id (None: from now on), in order, each once; an empty list after a silence."""
        last = self._last if after is None else after
        while not self.is_closed:
            moved = self._moved
            found = await self._since(last)
            if found:
                last = found[-1].event_id
                yield found
                continue
            with suppress(TimeoutError):
                async with asyncio.timeout(keep_alive_s):
                    await moved.wait()
                continue
            yield []

    async def _since(self, after: str) -> list[EventView]:
        since = order_of(after)
        if since < order_of(self._floor):
            return [_view(*row) for row in await self._board.events(after, READ_COUNT, AT_ONCE_S)]
        return [event for event in self._ring if order_of(event.event_id) > since]

    def _take(self, rows: Iterable[tuple[str, str, dict[str, Any]]]) -> None:
        for row in rows:
            event = _view(*row)
            self._last = event.event_id
            self._ring.append(event)
            if len(self._ring) > RING_COUNT:
                self._floor = self._ring.popleft().event_id
            if event.kind == TRAINER_STEP:
                self._note_step(event)
            self._wake()

    def _note_step(self, event: EventView) -> None:
        run_id = event.facts.get("run_id")
        if not isinstance(run_id, str):
            return
        reward = event.facts.get("reward_mean")
        self._steps[run_id] = Training(
            time_ms=event.time_ms,
            step=_whole(event.facts.get("step")),
            reward_mean=float(reward) if isinstance(reward, (int, float)) else None,
            policy_version=_whole(event.facts.get("policy_version")),
            facts=event.facts,
        )
        self._steps.move_to_end(run_id)
        if len(self._steps) > RUN_COUNT_MAX:
            self._steps.popitem(last=False)

    def _wake(self) -> None:
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()


def _view(event_id: str, kind: str, facts: dict[str, Any]) -> EventView:
    return EventView(event_id=event_id, time_ms=order_of(event_id)[0], kind=kind, facts=facts)


def _whole(value: Any) -> int | None:
    return int(value) if isinstance(value, (int, float)) else None
