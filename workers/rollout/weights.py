"""Keeping an engine's weights at the head of a run.

- The next version is fetched, decoded and verified beside the live weights while the engine generates; only the commit,
  `engine.apply`, pauses it.
- What cannot be fetched or verified is not applied: the engine stays at its version, `error` says why, the publisher is
  told, and it is tried again, by another way where there is one.
- That something cannot be had says nothing against the live weights. Only what shows of themselves puts them in doubt:
  sums that are not theirs, a commit that did not run through, a head that went back. A keyframe heals that.
- A receiver that lags takes all missing versions in one commit, by whichever way is fewer bytes. Where the way was
  deleted while it was walked, it commits what has come, and goes on from there.
- Weights are recognised: before anything of a run is fetched, the sums of the live weights are compared with those of
  its versions. A worker that served the run before, or another with the same weights, fetches what it lacks alone.
- The first weights of a run, and those that heal a doubt, are read back from the engine and compared in full before
  they count as live; so are all, now and then. Between, the sums of the live state are carried along.
- Where the engine's ranks stage their own parts (engines/ranks.py), versions are only gathered here for them.
- Where no chain of the store leads to the head, other sources are asked for a whole version, which must be what its
  manifest says; the chain goes on from there.
- Which runs to serve, when to stop serving one, and when a commit may begin is worker.py's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace

import numpy as np

from ...fabric.contract.clock import Clock, SystemClock
from ...fabric.contract.errors import (
    ChainBroken,
    DigestMismatch,
    EngineUnsupported,
    FabricError,
    WeightError,
    WireError,
)
from ...fabric.format.digest import state_sums
from ...fabric.format.layout import Layout
from ...fabric.format.manifest import Damage, Head, Holder, Sums, WeightManifest
from ...fabric.host.helpers import end_all
from ...fabric.ports.weights import WeightStore
from ...fabric.rules.queue.timings import RunTimings
from ...fabric.versions.commit import Staged
from ...fabric.versions.held import readable
from ...fabric.versions.rank_parts import whole
from ...fabric.versions.reader import ChainReader, report_damages
from ...fabric.versions.stage import Stage
from ..engines.base import Bits, Engine, TurnsAtCommit
from ..engines.ranks import HasRanks, Ranks, StagedByRanks
from .peer_copies import VersionSource, stage_snapshot

log = logging.getLogger(__name__)

NO_SUMS = np.zeros(0, dtype=np.uint64)

Gate = Callable[[], AbstractAsyncContextManager[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiverOptions:
    """How a receiver waits and checks."""

    poll_s: float = 5.0
    """Longest time without asking for the head; announcements come sooner."""
    retry_s: float = 0.25
    """Wait after a failure; doubles up to retry_s_max."""
    retry_s_max: float = 5.0
    audit_every: int = 64
    """Versions divisible by this are checked against their whole-state digest after the commit; 0: never."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AtCommit:
    """What a run wishes of turns in flight and of the prefix cache; see Engine.apply."""

    turns: TurnsAtCommit = "keep"
    may_reuse_prefix: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyReport:
    """What bringing the engine to a version took. stage_s passes while the engine generates, pause_s does not."""

    version: int
    kinds: tuple[str, ...]
    payload_bytes: int
    changed_count: int
    stage_s: float
    pause_s: float


class WeightReceiver:
    """Brings one engine to the head of one run, in the background, until closed.

    Attributes:
        version: the version live in the engine, -1 before the first.
        moved_by: the epoch of the publisher that made it the head.
        head_version: the head as last seen.
        last: report of the last commit.
        ready_s: what it took from `start` until a version was live; None: none is yet.
        is_engine_still: whether no commit can be under way in the engine, of this receiver or of one before it: then
            the live weights stay what they are.
        note: what the engine cannot do of `at_commit`, and does instead; None: it can.
        gate: entered around every commit, which waits until it is through.
        at_commit: what becomes of turns in flight.
        timings: of the run, where what a version takes is noted.
        on_close: called when it is closed.
    """

    def __init__(
        self,
        store: WeightStore,
        run_id: str,
        engine: Engine,
        *,
        options: ReceiverOptions | None = None,
        clock: Clock | None = None,
        holder: Holder | None = None,
        sources: Sequence[VersionSource] = (),
        attend: Callable[[], Awaitable[object]] | None = None,
        may_stage_by_ranks: bool = True,
    ) -> None:
        """Nothing is read before `start` or `update`.

        Args:
            holder: who we are among those who hold the run's weights; None: nobody is told.
            sources: asked in that order where no chain leads to the head.
            attend: takes part in a collective, if one is offered; called between two looks at the head.
            may_stage_by_ranks: whether the engine's ranks may be all that holds the weights. Others can copy them from
                this receiver only if not.
        """
        self.version = -1
        self.head_version = -1
        self.last: ApplyReport | None = None
        self.ready_s: float | None = None
        self.is_engine_still = True
        self.note: str | None = None
        self.gate: Gate = contextlib.nullcontext
        self.at_commit = AtCommit()
        self.timings = RunTimings()
        self.on_close: Callable[[], None] | None = None
        self._store = store
        self._run_id = run_id
        self._engine = engine
        self._options = options or ReceiverOptions()
        self._clock = clock or SystemClock()
        self._holding = None if holder is None else Holding(store, run_id, holder)
        self._reporter = "" if holder is None else holder.holder_id
        self._sources = sources
        self._attend = attend
        self._may_stage_by_ranks = may_stage_by_ranks
        self._reader = ChainReader(store, run_id)
        self.moved_by = 0
        self._epoch = 0  # of the publisher in charge, as last seen
        self._commit_count = 0
        self._audited_version = -1  # the last one that an audit, or a step towards it, was considered at
        self._sums: Sums | None = None  # of the live state
        self._is_in_doubt = True  # whether the live weights may not be `version`
        self._has_looked = False  # whether they are a version of the run
        self._failure_count = 0
        self._error: FabricError | None = None
        self._changed = asyncio.Event()
        self._started_s = self._clock.now_s()
        self._task: asyncio.Task[None] | None = None

    @property
    def error(self) -> FabricError | None:
        """Why the engine is not at the head; None while all is well."""
        return self._error

    @property
    def is_sound(self) -> bool:
        """Whether `version` is live, with nothing against it."""
        return self.version >= 0 and not self._is_in_doubt

    @property
    def live_sums(self) -> Sums | None:
        """The sums of what is live; None: nothing is, or it is in doubt."""
        return self._sums if self.is_sound else None

    @property
    def store(self) -> WeightStore:
        """Where it reads what there is."""
        return self._store

    # ---- what others may copy: see relay.live.SnapshotSource

    @property
    def layout(self) -> Layout:
        return self._engine.layout

    def stamp(self) -> tuple[int, int] | None:
        """The version that is live, and how many there were; None while a commit runs, in doubt, or held in parts."""
        return None if self._is_in_doubt or self._ranks is not None else (self.version, self._commit_count)

    def bits(self) -> Mapping[str, Bits]:
        """Flat stored bits by name, live."""
        return self._engine.weight_bits()

    # ---- following

    def start(self) -> None:
        """Follow the head in a task of its own."""
        assert self._task is None
        if self._holding is not None:
            self._holding.start()
        self._started_s = self._clock.now_s()
        self._task = asyncio.create_task(self._follow(), name=f"weights {self._run_id}")

    async def close(self) -> None:
        """Stop following; a commit under way is finished by the engine."""
        if self._task is not None:
            await end_all([self._task])
        self._is_in_doubt = True  # others may write into the engine from here on
        if self.on_close is not None:
            self.on_close()
        if self._holding is not None:
            await self._holding.close()

    async def wait(self, at_least: int, timeout_s: float) -> bool:
        """Whether version `at_least` (or a newer one) is live, within `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.version < at_least:
                    await self._changed.wait()
        return self.version >= at_least

    async def update(self, timeout_s: float = 0.0) -> bool:
        """One round: wait up to `timeout_s` for a newer head, stage it, commit it. Returns whether weights changed.

        Raises:
            WeightError, WireError: not applied; the live weights are as before.
            BrokerError: the broker could not be asked.
        """
        head = await self._store.wait_head(self._run_id, -1 if self._is_in_doubt else self.version, timeout_s)
        self.head_version = head.version
        if head.epoch != self._epoch:
            # Only another publisher can give a version that was lost another meaning under its old name.
            self._epoch, self._reader = head.epoch, ChainReader(self._store, self._run_id)
        is_other = head.version == self.version and head.moved_by != self.moved_by
        if not self._is_in_doubt and (head.version < self.version or is_other):
            # A broker that lost its last writes: the version that we hold may mean other weights by now.
            log.warning("weights.head_went_back", extra={"run_id": self._run_id, "head_version": head.version})
            self._is_in_doubt = True
            self._reader = ChainReader(self._store, self._run_id)
        if head.version < 0 or (head.version == self.version and not self._is_in_doubt):
            return False
        if await self._recognise(head) and self.version == head.version:
            return True
        try:
            await self._bring_to(head)
        except (WeightError, WireError) as error:
            self._failure_count += 1
            await self._report(head, is_without_way=isinstance(error, ChainBroken))
            if isinstance(error, DigestMismatch) and "chunk" not in error.facts:
                await self._suspect_live()
            raise
        self._failure_count = 0
        await self._report(head)  # of what we came round, too: others may have no way round it
        return True

    async def _report(self, head: Head, *, is_without_way: bool = False) -> None:
        """Tell the publisher what could not be read; where nothing leads to the head, that it should look at that."""
        damages = self._reader.take_damages()
        if is_without_way and not damages:
            damages = [Damage(head.version, head.kind, head.moved_by)]
        await report_damages(self._store, self._run_id, damages, self._reporter)

    async def _suspect_live(self) -> None:
        """Sums of a version were not met: either what was staged is wrong, or what it was staged on.

        The latter are other weights than we wrote, or a version that the broker lost and that others gave its number.
        """
        if self._is_in_doubt or self._sums is None:
            return
        try:
            sums = await self._live_sums()
        except DigestMismatch:  # ranks that hold the same hold it otherwise
            sums = NO_SUMS
        names = [name for name in await self._store.held(self._run_id) if name[0] == self.version]
        known = await readable(self._store, self._run_id, names)
        meant = [self._sums, *(manifest.sums for manifest in known.values())]
        if not known or not all(np.array_equal(sums, each) for each in meant):
            log.error("weights.live_are_wrong", extra={"run_id": self._run_id, "policy_version": self.version})
            self._is_in_doubt = True

    async def _recognise(self, head: Head) -> bool:
        """Take what is live for the newest version that has its sums; once, before the first version."""
        if self._has_looked or self.version >= 0 or not self.is_engine_still:
            return False
        names = [name for name in await self._store.held(self._run_id) if name[0] <= head.version]
        held = await readable(self._store, self._run_id, names)
        self._has_looked = True
        try:
            sums = await self._live_sums() if held else NO_SUMS
            version = max((each.version for each in held.values() if np.array_equal(sums, each.sums)), default=None)
            if version is None:
                return False
            await self._reader.plan(version, head.version, epoch=head.epoch)
        except (ChainBroken, DigestMismatch):  # nothing leads on from it; or ranks that hold the same differ in it
            return False
        async with self.gate():
            await self._name_live(Staged(version, {}, sums))
            self._hold(version, head, sums)
        self._audited_version = version
        log.info("weights.recognised", extra={"run_id": self._run_id, "policy_version": version})
        self._tell_change()
        return True

    async def _name_live(self, same: Staged) -> None:
        """Commit nothing but the version's name: what these weights have computed may be used on."""
        try:
            await self._engine.apply(same, turns="keep", may_reuse_prefix=True)
        except EngineUnsupported:
            await self._engine.apply(same, turns="recompute")

    async def _bring_to(self, head: Head) -> None:
        started_s = self._clock.now_s()
        is_known = not self._is_in_doubt
        manifests, staged, head = await self._stage(head)
        stage_s = self._clock.now_s() - started_s
        async with self.gate():
            self._is_in_doubt, self.is_engine_still = True, False  # until the commit is through
            pause_s = await self._apply(staged, is_known=is_known)
            self.is_engine_still = True
            if is_known:
                self._hold(staged.version, head, staged.sums)
        if not is_known:
            self._hold(staged.version, head, await self._look_at_live(manifests[-1]))
        self.last = ApplyReport(
            version=self.version,
            kinds=tuple(manifest.kind for manifest in manifests),
            payload_bytes=sum(manifest.payload_bytes for manifest in manifests),
            changed_count=staged.changed_count,
            stage_s=stage_s,
            pause_s=pause_s,
        )
        self.timings.note("weights_stage", stage_s)
        self.timings.note("weights_switch", pause_s)
        log.info("weights.applied", extra={"run_id": self._run_id, "policy_version": self.version, "stage_s": stage_s})
        self._tell_change()
        every = self._options.audit_every
        if is_known and every and self.version // every > self._audited_version // every:
            self._sums = await self._look_at_live(manifests[-1])
        self._audited_version = self.version

    def _tell_change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    @property
    def _ranks(self) -> Ranks | None:
        """By which to stage; None: whole versions are staged here."""
        engine = self._engine
        return engine.ranks if self._may_stage_by_ranks and isinstance(engine, HasRanks) else None

    async def _stage(self, head: Head) -> tuple[list[WeightManifest], Staged | StagedByRanks, Head]:
        """The head by the store's chain, or what there still is of it; else the newest version that others have.

        Never an older one than was live before, also where the live weights are in doubt: turns go on from it.
        """
        have = None if self._is_in_doubt else self.version
        enough = min(self.version, head.version)
        layout = self._engine.layout
        try:
            manifests = await self._reader.plan(have, head.version, epoch=head.epoch)
            if self._ranks is not None:
                return manifests, await self._stage_by_ranks(self._ranks, manifests, have), head
            live = None if have is None else self._engine.weight_bits()
            stage = Stage(whole(layout), live, self.version, self._sums)
            staged = await self._reader.stage(manifests, stage, enough=enough)
            return [each for each in manifests if each.version <= staged.version], staged, head
        except (ChainBroken, DigestMismatch, WireError):
            above = enough - 1 if have is None else have
            found = await stage_snapshot(self._sources, self._store, layout, run_id=self._run_id, above=above)
            if found is None:
                raise
            manifest, staged, head = found
            return [manifest], staged, head

    async def _stage_by_ranks(
        self, ranks: Ranks, manifests: Sequence[WeightManifest], have: int | None
    ) -> StagedByRanks:
        """Fetch the chunks once for all ranks."""
        with contextlib.closing(ranks.gather()) as gathering:
            await self._reader.stage(manifests, gathering)
            try:
                return await ranks.stage(gathering, have)
            except (WeightError, WireError):
                self._reader.doubt(manifests)  # one may have been damaged on the way
                raise

    async def _apply(self, staged: Staged | StagedByRanks, *, is_known: bool) -> float:
        """As the run wishes and the engine can; what doubtful weights, or another run's, have computed is dropped."""
        wish = self.at_commit
        if not is_known or wish.turns == "recompute" or self.note is not None:
            return await self._commit(staged, turns="recompute")
        try:
            return await self._commit(staged, turns="keep", may_reuse_prefix=wish.may_reuse_prefix)
        except EngineUnsupported as error:
            self.note = str(error)
            log.warning("weights.recomputes", extra={"run_id": self._run_id, "note": self.note})
            return await self._commit(staged, turns="recompute")

    async def _commit(
        self, staged: Staged | StagedByRanks, *, turns: TurnsAtCommit, may_reuse_prefix: bool = False
    ) -> float:
        if isinstance(staged, Staged):
            return await self._engine.apply(staged, turns=turns, may_reuse_prefix=may_reuse_prefix)
        assert self._ranks is not None
        return await self._ranks.apply(staged, turns=turns, may_reuse_prefix=may_reuse_prefix)

    def _hold(self, version: int, head: Head, sums: Sums) -> None:
        """The engine holds `version` now, for certain."""
        self._commit_count += 1
        self.version, self.moved_by = version, head.moved_by
        if self.ready_s is None:
            self.ready_s = self._clock.now_s() - self._started_s
        self._is_in_doubt, self._sums = False, sums  # last: `stamp` is read by threads, too
        if self._holding is not None:
            self._holding.move(version)

    async def _look_at_live(self, manifest: WeightManifest) -> Sums:
        """Sums of what the engine computes with. Raises DigestMismatch: it is not this version."""
        sums = await self._live_sums()
        manifest.check_sums(sums)
        return sums

    async def _live_sums(self) -> Sums:
        ranks = self._engine.ranks if isinstance(self._engine, HasRanks) else None
        if ranks is not None:
            return await ranks.live_sums()
        return await asyncio.to_thread(state_sums, self._engine.layout, await self._engine.read_weights())

    async def _follow(self) -> None:
        while True:
            try:
                await self.update(self._options.poll_s)
                self._error = None
            except Exception as error:  # noqa: BLE001 - no memory, no thread: told, and tried again after a pause
                self._error = self._expected(error)
                log.warning("weights.not_applied", extra={"run_id": self._run_id, "error": str(self._error)})
                await self._take_part()  # what is missing may be on offer
                exponent = min(self._failure_count, 16)
                await self._clock.sleep(min(self._options.retry_s * 2**exponent, self._options.retry_s_max))
            else:
                await self._take_part()

    def _expected(self, error: Exception) -> FabricError:
        """What went wrong, said as what is foreseen."""
        if isinstance(error, FabricError):
            return error
        log.error("weights.failed", extra={"run_id": self._run_id}, exc_info=error)
        self._failure_count += 1
        return WeightError(f"bringing run {self._run_id!r} to its head failed: {type(error).__name__}: {error}")

    async def _take_part(self) -> None:
        """In a collective, if there is one. What goes wrong there is not the weights' trouble."""
        if self._attend is None:
            return
        try:
            await self._attend()
        except FabricError as error:
            log.warning("weights.not_attended", extra={"run_id": self._run_id, "error": str(error)})


# ---------------------------------------------------------------- holder beacon
#
# A receiver's place among those who hold a run's weights, kept while it lives.
#
# - Publishers delete nothing that a live holder needs, and others ask holders for bytes: so the version is told at once
#   when it changes, and again well before the broker forgets it.
# - A broker that is away is tried again; a hold that ended meanwhile is made anew.


TTL_S = 30.0  # a dead receiver's versions are kept for this long
TELLS_IN_TTL = 3  # two may be lost


class Holding:
    """One receiver's hold on one run.

    Args:
        holder: who it is, and where it may be asked; its version is the one that it begins with.
    """

    def __init__(self, store: WeightStore, run_id: str, holder: Holder) -> None:
        self._store = store
        self._run_id = run_id
        self._holder = holder
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
        await end_all([self._task])
        with contextlib.suppress(FabricError):
            await self._store.release_hold(self._run_id, self._holder.holder_id)

    async def _tell(self) -> None:
        while True:
            self._is_due.clear()
            try:
                await self._store.hold(self._run_id, self._holder, TTL_S)
            except FabricError as error:
                log.warning("weights.not_held", extra={"run_id": self._run_id, "error": str(error)})
            timer = asyncio.get_running_loop().call_later(TTL_S / TELLS_IN_TTL, self._is_due.set)
            await self._is_due.wait()
            timer.cancel()
