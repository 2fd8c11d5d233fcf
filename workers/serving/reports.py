"""What sharing a device cost and gave, sent to the broker: the serving team decides on it.

- The guard measures; this adds who it is and how many tokens the worker made.
- A report that cannot be sent is dropped: the next one holds all of it again.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from typing import Any

from ...fabric.contract.clock import Clock
from ...fabric.contract.errors import BrokerError
from ...fabric.contract.sharing import SharingReport
from ...fabric.ports.queue import LeaseBoard
from ...fabric.rules.serving.facts import Slo

log = logging.getLogger(__name__)

SEND_S = 5.0
FIELDS = {each.name for each in dataclasses.fields(SharingReport)}


class SharingSender:
    """Sends one worker's reports."""

    def __init__(
        self,
        board: LeaseBoard,
        blank: SharingReport,
        clock: Clock,
        *,
        measured: Callable[[], Mapping[str, Any] | None],
        token_count: Callable[[], int],
    ) -> None:
        """
        Args:
            blank: whose report it is.
            measured: fields of it, by the guard; None: there is none yet.
            token_count: of rollouts, since the engine's start.
        """
        self._board = board
        self._blank = blank
        self._clock = clock
        self._measured = measured
        self._token_count = token_count

    async def run(self) -> None:
        """For ever."""
        while True:
            await self._clock.sleep(SEND_S)
            await self.send()

    async def send(self) -> None:
        """Once."""
        try:
            await self._board.set_sharing(self.report())
        except BrokerError as error:
            log.warning("sharing.not_sent", extra={"error": str(error)})

    def report(self) -> SharingReport:
        """As of now."""
        measured = {name: value for name, value in (self._measured() or {}).items() if name in FIELDS}
        return dataclasses.replace(self._blank, **{**measured, "token_count": self._token_count()})


def blank_report(worker_id: str, slo: Slo) -> SharingReport:
    """Nothing measured yet."""
    return SharingReport(worker_id=worker_id, ttft_slo_ms=slo.ttft_ms, tpot_slo_ms=slo.tpot_ms)
