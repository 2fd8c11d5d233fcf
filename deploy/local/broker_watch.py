"""Watches the broker of `rollfab up`: which processes are there, and whether it answers at all.

A thread asks, so that a frozen broker holds up nobody, and says so once for each silence, and when it is over.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Literal

from ...fabric.broker.clients.patience import SAY_AFTER_S
from ...fabric.broker.clients.url import mask_url
from ...fabric.contract.errors import FabricError
from ...fabric.contract.records import WorkerInfo
from ...fabric.opened import RedisFabric

LOOK_S = 0.25
ANSWER_S = 3.0  # for one answer: then it is asked anew, by another connection


class BrokerWatch:
    """Looks until its process ends. workers: this machine's, by process id, as they last were."""

    def __init__(self, url: str, say: Callable[[str, Literal["", "error", "warning"]], None]) -> None:
        self.workers: Mapping[int, WorkerInfo] = {}
        self._url = url
        self._say = say
        self._answered_at_s = time.monotonic()
        self._is_told = False

    def start(self) -> None:
        """Begin to look."""
        threading.Thread(
            target=lambda: asyncio.run(self._look()),  # noqa: TID251
            name="broker-watch",
            daemon=True,
        ).start()

    async def _look(self) -> None:
        while True:
            why = ""
            try:
                async with asyncio.timeout(ANSWER_S):
                    ports = await RedisFabric.open(self._url, client_name="up", patience_s=0.0)
                try:
                    await self._follow(ports)
                finally:
                    await ports.close()
            except FabricError as error:
                why = str(error)
            except TimeoutError:
                pass
            self.note(None, why, time.monotonic())
            await asyncio.sleep(LOOK_S)

    async def _follow(self, ports: RedisFabric) -> None:
        while True:
            async with asyncio.timeout(ANSWER_S):
                seen = await ports.board.workers()
            self.note(
                {info.pid: info for info, _ in seen.values() if info.host == socket.gethostname()}, "", time.monotonic()
            )
            await asyncio.sleep(LOOK_S)

    def note(self, workers: Mapping[int, WorkerInfo] | None, why: str, now_s: float) -> None:
        """Take down what was seen, or (None) why nothing was; "": it did not answer."""
        silent_s = now_s - self._answered_at_s
        if workers is not None:
            if self._is_told:
                self._say(f"the broker {mask_url(self._url)} answers again, after {silent_s:.0f} s", "")
            self.workers, self._answered_at_s, self._is_told = workers, now_s, False
        elif silent_s >= SAY_AFTER_S and not self._is_told:
            self._is_told = True
            what = why or f"the broker {mask_url(self._url)} does not answer; is it stopped or overloaded?"
            self._say(f"everything waits for the broker, for {silent_s:.0f} s now: {what}", "warning")
