"""A receiver's place among those who hold a run's weights, kept while it lives.

- Publishers delete nothing that a live holder needs, and others ask holders for bytes: so the version is told at once
  when it changes, and again well before the broker forgets it.
- A broker that is away is tried again; a hold that ended meanwhile is made anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import replace

from ...fabric.contract.errors import FabricError
from ...fabric.format.manifest import Holder
from ...fabric.ports.weights import WeightStore

log = logging.getLogger(__name__)

TTL_S = 30.0  # a dead receiver's versions are kept for this long
TELLS_IN_TTL = 3  # two may be lost


class Holding:
    """One receiver's hold on one run.

    Args:
        holder: who it is, and where it may be asked; its version is the one that it begins with.
    """

    def __init__(self, store: WeightStore, run_id: str, holder: Holder, *, ttl_s: float = TTL_S) -> None:
        self._store = store
        self._run_id = run_id
        self._holder = holder
        self._ttl_s = ttl_s
        self._is_due = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Tell, and go on telling."""
        assert self._task is None
        self._task = asyncio.create_task(self._tell(), name=f"holding {self._run_id}")

    def move(self, version: int) -> None:
        """It holds `version` now."""
        self._holder = replace(self._holder, version=version)
        self._is_due.set()

    async def close(self) -> None:
        """Give the hold back; where the broker cannot be told, it ends by itself."""
        if self._task is None:
            return
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        with contextlib.suppress(FabricError):
            await self._store.release_hold(self._run_id, self._holder.holder_id)

    async def _tell(self) -> None:
        while True:
            self._is_due.clear()
            try:
                await self._store.hold(self._run_id, self._holder, self._ttl_s)
            except FabricError as error:
                log.warning("weights.not_held", extra={"run_id": self._run_id, "error": str(error)})
            timer = asyncio.get_running_loop().call_later(self._ttl_s / TELLS_IN_TTL, self._is_due.set)
            await self._is_due.wait()
            timer.cancel()
