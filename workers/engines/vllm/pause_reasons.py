"""Why a vLLM makes no steps: reasons are counted here, because it has one pause for all; and it may sleep.

- The door is held while any reason holds it. Who gives up waiting for that does not leave it half held.
- While it sleeps, pauses are only noted; they hold when it wakes.
- Without its KV cache it sleeps too: no request may be inside when that is released.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import orjson

from ....fabric.contract.clock import SystemClock
from ....fabric.contract.errors import EngineUnsupported
from ....fabric.contract.sharing import GuardView
from ...serving.guarding.guard import GuardOrders
from .common.backend import Door


class Holding:
    """Of one door; changed only by those who await `sleep` and `wake`.

    awake: set while it does not sleep. in_place: set while its weights are where they are computed with, also if its
    KV cache is not.
    """

    def __init__(self, door: Door) -> None:
        self._door = door
        self._reasons: set[str] = set()
        self._is_held = False
        self.awake = asyncio.Event()
        self.awake.set()
        self.in_place = asyncio.Event()
        self.in_place.set()
        self._lock = asyncio.Lock()

    @property
    def reasons(self) -> tuple[str, ...]:
        return tuple(sorted(self._reasons))

    async def add(self, reason: str) -> None:
        """However often it is given, a reason holds once."""
        self._reasons.add(reason)
        await self._follow_to_the_end()

    async def take(self, reason: str) -> None:
        """Take a reason back."""
        self._reasons.discard(reason)
        await self._follow_to_the_end()

    @asynccontextmanager
    async def held(self, reason: str, *, is_gone: Callable[[], bool]) -> AsyncIterator[None]:
        """Hold for as long as the block runs. is_gone: asked at its end, whether there is nothing left to release."""
        self._reasons.add(reason)
        try:
            await self.follow()
            yield
        finally:
            self._reasons.discard(reason)
            if not is_gone():
                await self.follow()

    async def follow(self) -> None:
        """Bring the door to what the reasons say."""
        async with self._lock:
            if not self.awake.is_set():
                return
            is_wanted = bool(self._reasons)
            if is_wanted and not self._is_held:
                await self._door.hold()
            elif self._is_held and not is_wanted:
                await self._door.release()
            self._is_held = is_wanted

    async def _follow_to_the_end(self) -> None:
        await asyncio.shield(asyncio.ensure_future(self.follow()))

    async def sleep(self, fall_asleep: Callable[[], Awaitable[None]], *, with_weights: bool = True) -> None:
        """Raises EngineUnsupported, where nothing has changed, or EngineError, where that is not known."""
        async with self._lock:
            was_in_place = self.in_place.is_set()
            self.awake.clear()  # from here on only waking makes sure that it is not
            if with_weights:
                self.in_place.clear()
            try:
                await fall_asleep()
            except EngineUnsupported:
                self.awake.set()
                if was_in_place:
                    self.in_place.set()
                raise

    async def wake(self, wake: Callable[[], Awaitable[None]]) -> None:
        """Also of one that is awake, where only the reasons are followed."""
        if not self.awake.is_set():
            async with self._lock:
                await wake()
                self._is_held = False
                self.in_place.set()
                self.awake.set()  # vLLM goes on by itself
        await self.follow()


# ---------------------------------------------------------------- backend guard
#
# The worker's side of the guard that runs beside vLLM's scheduler (engines/vllm/step/scheduler.py).


SILENT_S = 1.0  # ten times as long as it takes from word to word


class DoorGuard:
    """GuardPort (see workers/serving/guarding/guard.py) over a door."""

    def __init__(self, door: Door) -> None:
        self._door = door
        self._clock = SystemClock()

    def order(self, orders: GuardOrders) -> None:
        self._door.order(orders)

    def view(self) -> GuardView:
        said = self._said()
        if not said:
            return GuardView()
        age_s = self._clock.now_s() - said["at_s"]
        if age_s > SILENT_S:
            return GuardView(state="silent", reason=f"the guard has said nothing for {age_s:.1f} s")
        return GuardView(**said["view"])

    def sharing(self) -> dict[str, Any] | None:
        return self._said().get("sharing")

    def _said(self) -> dict[str, Any]:
        """What it said last; it is being written for a microsecond now and then, ten times a second."""
        for _ in range(100):
            text = self._door.guard_said()
            if text is not None:
                said: dict[str, Any] = orjson.loads(text)
                return said
        return {}
