"""Answers scrapes: reads what the metrics are made of, and writes them.

- All who scrape while one reading of the broker lasts (`cache_s`) get the same text, made once, in a thread.
- OpenMetrics, with units and exemplars, for those who accept it; else the plain text that everybody reads.
- A broker that does not answer is a metric.
"""

from __future__ import annotations

import asyncio

from ...fabric.contract.errors import FabricError
from ...fabric.ports.queue import LeaseBoard
from ..reading.status import StatusReader
from ..schemas.answers import Status
from .answer import OPENMETRICS, PLAIN, render


class Scraper:
    """Writes the metrics for all who scrape."""

    def __init__(self, status: StatusReader, board: LeaseBoard, *, timeout_s: float) -> None:
        """timeout_s: after which histograms are left out, where the broker does not answer."""
        self._status = status
        self._board = board
        self._timeout_s = timeout_s
        self._lock = asyncio.Lock()
        self._of: Status | None = None
        self._texts: dict[str, bytes] = {}

    async def text(self, accept: str) -> tuple[bytes, str]:
        """Return the metrics and their content type. accept: the types that the reader understands."""
        types = [part.partition(";")[0].strip() for part in accept.split(",")]
        kind = OPENMETRICS if OPENMETRICS.partition(";")[0] in types else PLAIN
        async with self._lock:
            try:
                status = await self._status.read()
            except FabricError:
                return render(None, {}, kind), kind
            if status is not self._of:
                self._of, self._texts = status, {}
            if kind not in self._texts:
                self._texts[kind] = await self._write(status, kind)
            return self._texts[kind], kind

    async def _write(self, status: Status, kind: str) -> bytes:
        try:
            async with asyncio.timeout(self._timeout_s):
                runs = await self._board.timings()
        except (FabricError, TimeoutError):
            runs = {}
        return await asyncio.to_thread(render, status, runs, kind)
