"""Looking after published versions, while the trainer does other things.

- Once a second: versions that receivers report are read again, and a bounded share of everything held, in turn. Damage
  is healed at once (upkeep.py), under the publisher's lock, so that it never meets a publish.
- A report is a hint, and may be a lie. In a second REPORT_BYTES_MAX are read for reports; half as many in each second
  that follows lies, down to REPORT_BYTES_MIN. A version that is read whole for a lie counts until it is made up.
- Nothing of the trainer's memory is read: chunks are made again from the publisher's own copy.
- The publisher says that it lives, so that nobody else repairs beside it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence

from ...fabric.contract.clock import Clock
from ...fabric.contract.errors import FabricError
from ...fabric.format.manifest import BROKER, Damage, WeightManifest
from ...fabric.host.helpers import end_all
from ...fabric.inspect.healing import Wound, examine, is_listed, is_wrong
from ...fabric.ports.weights import WeightStore
from .upkeep import Upkeep

log = logging.getLogger(__name__)

TICK_S = 1.0
TEND_S = 5.0  # how long a silent publisher counts as living
TELL_S = 60.0  # between two words of why nothing is looked after
REPORT_BYTES_MAX = 64 << 20  # read in one tick for reports
REPORT_BYTES_MIN = 1 << 20  # after lies
REPORT_BYTES_BACK = 1 << 20  # a tick without reports gives back so many
VISIT_BYTES = 256 << 10  # a look at a version counts as at least this: 16 in a second at the default rate
RETRY_S_MAX = 60.0  # between attempts at damage that cannot be healed now, for want of room

Charge = Callable[[], int]  # our epoch, 0 before the first publish


class Healing:
    """Heals what one publisher holds on the broker.

    Args:
        lock: the publisher's, held while anything is written.
        charge: see Charge; asked under the lock.
        bytes_per_s: rate of reading the held versions, without any report; 0: none.
    """

    def __init__(
        self,
        store: WeightStore,
        run_id: str,
        upkeep: Upkeep,
        *,
        lock: asyncio.Lock,
        charge: Charge,
        clock: Clock,
        bytes_per_s: int,
    ) -> None:
        self._store = store
        self._run_id = run_id
        self._upkeep = upkeep
        self._lock = lock
        self._charge = charge
        self._clock = clock
        self._bytes_per_s = bytes_per_s
        self._report_bytes = REPORT_BYTES_MAX  # that reports may have read in a tick
        self._report_allowance = 0  # of them now; below 0: a version was read ahead
        self._allowance = 0.0  # bytes that may be read now; below 0: a large chunk was read ahead
        self._round: AsyncIterator[tuple[int, Wound | None]] | None = None
        self._retry_s, self._retry_at_s = TICK_S, 0.0
        self._task: asyncio.Task[None] | None = None
        self._told = ("", 0.0)  # why nothing was looked after, and when that was said

    def start(self) -> None:
        """Run in a task of the running loop, until `close`; further calls change nothing."""
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._go(), name=f"healing {self._run_id}")

    async def close(self) -> None:
        """End the task."""
        if self._task is not None:
            await end_all([self._task])
            self._task = None

    async def _go(self) -> None:
        while True:
            try:
                await self.look()
            except FabricError as error:
                self._tell(error)
            except Exception:  # publishing goes on without us: log it, and try again
                log.exception("weights.healing_failed", extra={"run_id": self._run_id})
            await self._clock.sleep(TICK_S)

    def _tell(self, error: FabricError) -> None:
        """Log why nothing is looked after: at once, and then once in TELL_S while it stays so."""
        now_s, text = self._clock.now_s(), type(error).__name__
        if text != self._told[0] or now_s - self._told[1] >= TELL_S:
            self._told = (text, now_s)
            log.warning("weights.not_looked_after", extra={"run_id": self._run_id, "error": str(error)})

    async def look(self) -> None:
        """Look into the reports, read a share of the held versions, heal damage.

        Raises:
            BrokerError: the broker could not be asked.
        """
        epoch = self._charge()
        if not epoch or (await self._store.head(self._run_id)).epoch != epoch:
            return  # nothing is published yet, or another publisher heals
        await self._store.tend(self._run_id, epoch, TEND_S)
        reports = await self._store.damages(self._run_id)
        seen, wounds = await self._proved(reports)
        if seen or not reports:
            self._believe(bool(reports), bool(wounds))
        wounds += await self._scrub()
        is_due = not self._upkeep.is_whole and self._clock.now_s() >= self._retry_at_s
        if wounds or is_due:
            await self._heal(wounds)
        await self._store.clear_damages(self._run_id, seen)

    async def _proved(self, reports: Sequence[Damage]) -> tuple[list[Damage], list[Wound]]:
        """Look into reports, the newest versions first; return the reports looked into, and the damage found."""
        held = {(each.version, each.kind): each for each in self._upkeep.held()}
        self._report_allowance = min(self._report_allowance + self._report_bytes, self._report_bytes)
        seen, wounds = [], []
        for report in sorted(reports, key=lambda report: -report.version):
            if self._report_allowance <= 0:
                break
            seen.append(report)
            manifest = held.get(report.name)
            if manifest is None:
                continue
            chunks = [index for index in report.chunks if index < len(manifest.chunk_bytes)]
            self._report_allowance -= VISIT_BYTES
            is_true = not await is_listed(self._store, manifest) or not report.chunks
            for index in chunks:
                if is_true or self._report_allowance <= 0:
                    break
                self._report_allowance -= int(manifest.chunk_bytes[index])
                is_true = await is_wrong(self._store, manifest, index)
            if is_true:
                self._report_allowance -= sum(_sizes(manifest))
                wound = await examine(self._store, manifest)
                wounds += [] if wound is None else [wound]
        return seen, wounds

    def _believe(self, has_reports: bool, is_true: bool) -> None:
        """Set how much reports may have read from now on."""
        if is_true:
            self._report_allowance = self._report_bytes = REPORT_BYTES_MAX
        elif has_reports:
            self._report_bytes = max(REPORT_BYTES_MIN, self._report_bytes // 2)
        else:
            self._report_bytes = min(REPORT_BYTES_MAX, self._report_bytes + REPORT_BYTES_BACK)

    async def _scrub(self) -> list[Wound]:
        """Read on through the held versions, as much as is allowed by now."""
        share = self._bytes_per_s * TICK_S
        self._allowance = min(self._allowance + share, share)
        wounds = []
        while self._allowance > 0:
            if self._round is None:
                self._round = self._once_round()
            try:
                size, wound = await anext(self._round)
            except StopAsyncIteration:
                self._round = None
                break  # at most once round in a tick
            except BaseException:
                self._round = None
                raise
            self._allowance -= size
            if wound is not None:
                wounds.append(wound)
        return wounds

    async def _once_round(self) -> AsyncIterator[tuple[int, Wound | None]]:
        """Read everything held, chunk by chunk: yield bytes read, and any damage."""
        held = self._upkeep.held()
        known = {(each.version, each.kind) for each in held}
        head = max((each.version for each in held), default=-1)
        if any(name[0] <= head and name not in known for name in await self._store.held(self._run_id)):
            self._upkeep.is_whole = False  # what is listed and not ours is seen to there
        for manifest in held:
            wrong = not await is_listed(self._store, manifest)
            yield VISIT_BYTES, None
            for index, size in enumerate(_sizes(manifest)):
                wrong = wrong or await is_wrong(self._store, manifest, index)
                if wrong:
                    break
                yield size, None
            if wrong:
                yield 0, await examine(self._store, manifest)

    async def _heal(self, wounds: Sequence[Wound]) -> None:
        """Heal damage after another look, while nobody publishes: a version deleted meanwhile is no damage."""
        async with self._lock:
            epoch = self._charge()
            head = await self._store.head(self._run_id)
            if not epoch or head.epoch != epoch:
                return
            held = {each.link for each in self._upkeep.held()}
            again = [await examine(self._store, each.manifest) for each in wounds if each.manifest.link in held]
            found = [each for each in again if each is not None]
            await self._upkeep.heal(found, head.version, epoch)
        self._retry_s = TICK_S if self._upkeep.is_whole else min(2 * self._retry_s, RETRY_S_MAX)
        self._retry_at_s = self._clock.now_s() + self._retry_s


def _sizes(manifest: WeightManifest) -> list[int]:
    return [int(size) for size in manifest.chunk_bytes] if manifest.carrier == BROKER else []
