"""A worker's lease: the keeper learns of it, follows it, and lets go of it in time.

- Every heartbeat brings the lease that the broker has for us; a doorbell makes the next heartbeat due at once, so we
  learn of a revocation within milliseconds, and the interval is only the safety net below it.
- When a lease runs out, the keeper holds the engine at that moment, even while the broker cannot be reached.
- A lease is in doubt once the broker has refused it: no turns are taken until a heartbeat has said which one is good.
- On a serving worker its team's word comes first, and needs no controller: the doorbell rings when the word changes. If
  the team does not let the worker lend, the keeper holds the engine before it even asks for the lease, and any lease
  counts as none. Lending hours follow the broker machine's time as last read, also while the broker is away.
- worker.py decides what becomes of running turns.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ...fabric.contract.clock import Clock
from ...fabric.contract.errors import BrokerError, WireError
from ...fabric.contract.records import HeldLease, Lease, WorkerInfo
from ...fabric.contract.sharing import LendSetting
from ...fabric.ports.queue import LeaseBoard
from ...fabric.rules.lending.hours import minute_of_week
from ...fabric.rules.lending.terms import LendTerms, terms
from ...fabric.rules.queue.timings import Timings
from ..engines.base import Engine
from .engine_watch import answered

log = logging.getLogger(__name__)

RING_S = 5.0  # longest wait at the doorbell
RING_GAP_S = 0.02  # least time between two rings: bounds the heartbeats of a bell that never stops ringing
WATCH_S = 0.02  # a lease that ran out goes unnoticed for at most this long
HOLD = "lease"  # why the engine is paused when a lease has run out,
SWITCH = "switch"  # and when its team wants it back
UNREAD = LendTerms(mode="observe", reason="what its serving team says has not been read yet")


@dataclass(frozen=True, kw_only=True)
class LeaseOptions:
    """Options of a lease keeper. heartbeat_s: time between heartbeats. retry_s: wait after a broker error."""

    worker_id: str
    heartbeat_s: float
    retry_s: float


@dataclass(frozen=True, slots=True)
class _Said:
    """The serving team's word, with the broker machine's time and ours when we read it."""

    settings: Mapping[str, LendSetting]
    wall_ms: int
    read_at_s: float


class LeaseKeeper:
    """Keeps one worker's lease.

    Attributes:
        lease: the right to run turns now; None: there is none.
        terms: what the serving team allows now; None on a dedicated worker.
        has_run_out: the engine is held, and running turns must be given back before `let_go`.
    """

    def __init__(
        self,
        board: LeaseBoard,
        engine: Engine,
        options: LeaseOptions,
        clock: Clock,
        *,
        tell: Callable[[], WorkerInfo],
        changed: Callable[[], None],
        timings: Timings,
    ) -> None:
        """Make a keeper.

        Args:
            tell: makes the record of every heartbeat.
            changed: is called when the lease or the terms have changed.
            timings: what the worker measures; it is reported with the heartbeats.
        """
        self.lease: HeldLease | None = None
        self.terms: LendTerms | None = None
        self.has_run_out = False
        self._board = board
        self._engine = engine
        self._options = options
        self._clock = clock
        self._tell = tell
        self._changed = changed
        self._timings = timings
        self._until_s: float | None = None
        self._is_in_doubt = False
        self._is_held = False  # the engine has confirmed that the switch holds it
        self._may_be_held = False  # we asked the engine to hold, and it has not confirmed a release since
        self._said: _Said | None = None
        self._is_beat_due = asyncio.Event()
        self._has_beaten = asyncio.Event()

    @property
    def slot_count(self) -> int:
        """The number of turns that may run now; 0 without a lease, or while it is in doubt."""
        if self.lease is None or self._is_in_doubt:
            return 0
        cap = self.terms.slot_count_max if self.terms else None
        return self.lease.slot_count if cap is None else min(cap, self.lease.slot_count)

    def lease_of(self, run_id: str) -> Lease | None:
        """Return the lease on this run, that of a guest included."""
        own = self.lease
        return next((each for each in (own, *own.guests) if each.run_id == run_id), None) if own else None

    def doubt(self) -> None:
        """Ask the broker for the lease at once, as it has another or none; until then our turns may still be ours."""
        self._is_in_doubt = True
        self._is_beat_due.set()

    async def let_go(self) -> None:
        """Release the engine for another lease; the turns of the one that ran out are given back."""
        self.has_run_out = False
        await answered(self._engine.resume(HOLD))

    async def beat(self) -> None:
        """Say that the worker lives, and take the lease that the answer brings; for ever."""
        while True:
            self._is_beat_due.clear()
            try:
                info = self._tell()
                if info.role == "serving":
                    await self._obey(info)
                asked_at_s = self._clock.now_s()
                self._take(await self._board.heartbeat(info), asked_at_s)
                await self._board.add_timings(info, self._timings)
            except (BrokerError, WireError) as error:
                log.warning("worker.heartbeat_failed", extra={"error": str(error)})
            self._has_beaten.set()
            timer = asyncio.get_running_loop().call_later(self._options.heartbeat_s, self._is_beat_due.set)
            await self._is_beat_due.wait()
            timer.cancel()

    async def listen(self) -> None:
        """Beat at once when the lease may have changed; one ring, one heartbeat; for ever."""
        while True:
            try:
                await self._board.wait_lease(self._options.worker_id, RING_S)
            except (BrokerError, WireError) as error:
                log.warning("worker.doorbell_lost", extra={"error": str(error)})
                await self._clock.sleep(self._options.retry_s)
                continue
            self._has_beaten.clear()
            self._is_beat_due.set()
            await self._has_beaten.wait()
            await self._clock.sleep(RING_GAP_S)

    async def watch(self) -> None:
        """Hold the engine the moment a lease runs out; for ever."""
        while True:
            is_over = self.lease is not None and self._until_s is not None and self._clock.now_s() >= self._until_s
            if is_over:
                self.lease, self.has_run_out = None, True
                log.warning("worker.lease_ran_out", extra={"worker_id": self._options.worker_id})
                await answered(self._engine.pause(HOLD))
                self._changed()
            await self._clock.sleep(WATCH_S)

    # ---- the team's word

    async def _obey(self, info: WorkerInfo) -> None:
        """Read the team's word, and obey it; while the broker is away, obey the last word.

        Raises:
            BrokerError: the broker could not be asked; the last word's hours were followed nevertheless.
        """
        try:
            settings, wall_ms = await self._board.lends_of(info.worker_id, info.pool)
            self._said = _Said(settings, wall_ms, self._clock.now_s())
        finally:
            await self._follow(self._terms_of(info), info)

    def _terms_of(self, info: WorkerInfo) -> LendTerms:
        said = self._said
        if said is None:
            return UNREAD
        wall_ms = said.wall_ms + round(1000 * (self._clock.now_s() - said.read_at_s))
        return terms(said.settings, info.worker_id, info.pool, minute_of_week(wall_ms))

    async def _follow(self, found: LendTerms, info: WorkerInfo) -> None:
        """Follow the team's terms: if the worker may not lend, drop the lease, and hold an engine that has turns."""
        has_work = self.lease is not None or info.running_count > 0
        before, self.terms = self.terms, found
        if not found.may_lend:
            self.lease = self._until_s = None
        if found != before:
            log.info("worker.lend_terms", extra={"mode": found.mode, "reason": found.reason})
            self._changed()
        if not found.may_lend and not self._is_held and (has_work or self._may_be_held):
            self._may_be_held = True
            self._is_held = await answered(self._engine.pause(SWITCH))
        elif found.may_lend and self._may_be_held:
            self._is_held = False
            self._may_be_held = not await answered(self._engine.resume(SWITCH))

    def _take(self, lease: HeldLease | None, asked_at_s: float) -> None:
        """Take a heartbeat's lease. Count its time from before the request, so that we never outlive the broker's."""
        if self.terms is not None and not self.terms.may_lend:
            lease = None
        is_other = self._is_in_doubt or _name(lease) != _name(self.lease)
        self.lease, self._is_in_doubt = lease, False
        ends = [each.remaining_ms for each in (lease, *lease.guests)] if lease else []
        remaining_ms = min((each for each in ends if each is not None), default=None)
        self._until_s = None if remaining_ms is None else asked_at_s + remaining_ms / 1000
        if is_other:
            self._changed()


def _name(lease: HeldLease | None) -> list[tuple[str, int]]:
    return [(each.run_id, each.lease_epoch) for each in (lease, *lease.guests)] if lease else []
