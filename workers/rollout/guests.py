"""Guests of a worker: runs whose weights are, bit for bit, those of the run whose weights the worker follows.

- The worker fetched the live weights for the run that it follows, by that run's versions. Their sums are compared with
  those of the guest's own versions, as its manifests name them: its tokens are of the newest version that has the same.
- Where no version of the guest has them, as one of the two publishers has moved on, it gets no turn.
- Nothing of a guest's weights is fetched but its manifests.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import numpy as np

from ...fabric.contract.clock import Clock
from ...fabric.contract.errors import FabricError
from ...fabric.format.manifest import Head, Sums
from ...fabric.host.helpers import end_all
from ...fabric.ports.weights import WeightStore
from ...fabric.versions.held import readable
from .turns import ServedRun

log = logging.getLogger(__name__)

POLL_S = 5.0  # longest time without asking for the head; announcements come sooner
RETRY_S = 1.0
VERSION_COUNT_MAX = 8  # the newest that are remembered: as far as staleness mostly reaches


class Guest:
    """One guest, whose versions are kept in sight until it is closed.

    Attributes:
        served: its turns.
        moved_by: epoch of the publisher whose versions are known; 0: none are.
    """

    def __init__(self, served: ServedRun, store: WeightStore, clock: Clock, changed: Callable[[], None]) -> None:
        """changed: called when another version of it is known."""
        self.served = served
        self._store = store
        self._clock = clock
        self._changed = changed
        self._head: Head | None = None
        self.moved_by = 0
        self._sums: dict[int, Sums] = {}
        self._answer: tuple[Sums, int] | None = None  # the last one, until other versions are known
        self._task: asyncio.Task[None] | None = None

    def version_of(self, sums: Sums) -> int:
        """Return the newest of its versions that has these sums; -1: none has them."""
        if self._answer is None or self._answer[0] is not sums:
            same = (version for version, own in self._sums.items() if np.array_equal(own, sums))
            self._answer = sums, max(same, default=-1)
        return self._answer[1]

    def start(self) -> None:
        """Follow its head in a task of its own."""
        assert self._task is None
        self._task = asyncio.create_task(self._follow(), name=f"guest {self.served.run_id}")

    async def close(self) -> None:
        """Stop following, and listening at its doorbell."""
        tasks = [task for task in (self._task, self.served.ring) if task is not None]
        await end_all(tasks)
        self.served.end()

    async def _follow(self) -> None:
        while True:
            try:
                await self._look()
            except FabricError as error:
                log.warning("guest.versions_not_read", extra={"run_id": self.served.run_id, "error": str(error)})
                await self._clock.sleep(RETRY_S)

    async def _look(self) -> None:
        """Wait for another head, and read what its sums are.

        A publisher that took over, or a head that went back, may have given other weights a version that we know.
        """
        run_id, before = self.served.run_id, self._head
        head = await self._store.wait_head(run_id, -1 if before is None else before.version, POLL_S)
        if head == before:
            return
        if before is not None and (head.moved_by != before.moved_by or head.version <= before.version):
            self._sums, self._answer = {}, None
        self.moved_by = head.moved_by
        names = [name for name in await self._store.held(run_id) if name[0] == head.version]
        for manifest in (await readable(self._store, run_id, names)).values():
            self._sums[manifest.version] = manifest.sums
        self._sums, self._answer = dict(sorted(self._sums.items())[-VERSION_COUNT_MAX:]), None
        self._changed()
        if head.version >= 0 and head.version not in self._sums:  # it cannot be read, or was deleted just now
            await self._clock.sleep(RETRY_S)
        else:
            self._head = head
