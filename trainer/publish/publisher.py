"""Publishing weights: a model's tensors, as stored bits, become the next version of a run.

- One process publishes whole tensors. All ranks of a sharded trainer publish together, each its own parts (ranks.py):
  each has a publisher and calls `publish` alike, and rank 0 does here what one process does. The result is an ordinary
  version.
- The first version of a run is a keyframe, later ones are deltas to the version before. A publisher that takes over
  begins from the weights that the broker holds; if it cannot, or there are other ranks, with a keyframe. upkeep.py adds
  keyframes and jumps beside them, and deletes versions.
- Everything is checked before anything is written: names, shapes and dtypes against the run's, the version against
  the head, the epoch against other publishers.
- The manifest is written and the head moved when every rank has sent its chunks. The copies of the weights move only
  when the head has, to the bits that were encoded. A version whose sending failed, or was interrupted, is finished by
  the next `publish`. If the head is neither of the two, the next version is a keyframe.
- The directory of a delta (fabric/inspect/disk_delta.py) becomes the whole weights first, on our own copy.
- The tensors must not change until `publish` returns or raises; then they may, for nothing reads them any more.
- The carrier of a version's chunks is ordinarily the broker. A run whose `weight_carrier` says so uses
  torch.distributed beside it: always, or if the broker has no room or a version is large and all receivers take part
  (fabric/rules/weights/carrier.py). If that does not reach the receivers that answered, the version goes by the broker.
- Chunks that a collective carried come to the broker as well, once the head has moved and if there is room (upkeep.py):
  for receivers that were absent. Nothing is written to a broker that has no room for it.
- A task of the loop looks after published versions until `close`: see healing.py.
- Memory: one copy of the weights where they are compared, the encoded version, and a copy of its changes.
"""

from __future__ import annotations

import asyncio
import logging
import os
from dataclasses import asdict, dataclass, replace
from typing import Any, get_args

from ...fabric.contract.clock import Clock, LoopClock
from ...fabric.contract.errors import BrokerError, InputError, WeightError, WireError
from ...fabric.contract.records import AUTO, GLOO, RunConfig
from ...fabric.delivery.collective.invitations import CollectiveOptions
from ...fabric.delivery.collective.publisher import CollectivePublisher
from ...fabric.format.kernels.places import on_host
from ...fabric.format.layout import Layout
from ...fabric.format.manifest import BROKER, COLLECTIVE, Head, WeightManifest
from ...fabric.inspect.disk_delta import DiskDelta, check_base, new_bits
from ...fabric.ports.weights import WeightStore
from ...fabric.rules.weights.carrier import CarrierFacts, carrier
from ...fabric.rules.weights.chain import DELTA, KEYFRAME, Link
from ...fabric.rules.weights.publish import TAKEN_OVER, not_newer, refusal
from ...fabric.versions.held import readable
from ...fabric.versions.reader import fetch_bits
from ...fabric.versions.snapshot import Identity, Prepared
from .borrowing import in_thread
from .healing import Healing
from .model_check import check_model
from .ranks import Ranks
from .tensors import ComparesOn, Named, Stored, given_of
from .upkeep import Upkeep, check_room

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishReport:
    """The cost of publishing a version. density: changed elements as a fraction of all. keyframe_bytes, jump_bytes: of
    the keyframe and jumps published beside it, 0 without."""

    version: int
    kind: str
    payload_bytes: int
    dense_bytes: int
    changed_count: int
    density: float
    encode_s: float
    keyframe_bytes: int = 0
    jump_bytes: int = 0


class Publisher:
    """Publishes versions of one run.

    Args:
        shard_count: of the run; every shard learns the head.
        group: of torch.distributed, the ranks that hold the model together; None: this process holds it.
        timeout_s: how long rank 0 waits for a rank.
        thread_count: as in Ranks.
        carrier: "broker", "collective" or "auto"; see Carrying. Ranks send by the broker.
        collective_backend: "gloo" or "nccl".
        dtype: the run's, to which floating-point tensors are rounded; "": each keeps its own.
        model: the run's; its first weights are checked against it. None: they are not.
        compares_on: "auto": tensors on a GPU are compared there, which takes a copy of the weights there, others on the
            host. "host": all on the host, for a GPU without that room. "device": every torch tensor where it is.
        scrub_bytes_per_s: rate of reading held versions again to find damage; 0: none without a report.
    """

    def __init__(
        self,
        store: WeightStore,
        run_id: str,
        shard_count: int = 1,
        *,
        group: Any = None,
        timeout_s: float = 300.0,
        thread_count: int | None = None,
        carrier: str = BROKER,
        collective_backend: str = GLOO,
        compares_on: ComparesOn = "auto",
        scrub_bytes_per_s: int = RunConfig.scrub_bytes_per_s,
        model: str | None = None,
        dtype: str = "",
        clock: Clock | None = None,
    ) -> None:
        if compares_on not in get_args(ComparesOn):
            raise InputError(f"compares_on is {compares_on!r}: give 'auto', 'device' or 'host'")
        exchange = None
        if group is not None:
            from .exchange import RankExchange  # needs torch

            exchange = RankExchange(group, timeout_s=timeout_s)
        self._store = store
        self._run_id = run_id
        self._shard_count = shard_count
        self._clock = clock or LoopClock()
        self._lock = asyncio.Lock()
        self._epoch = 0
        self._layout: Layout | None = None
        self._pending: tuple[Prepared, PublishReport] | None = None
        self._ranks = Ranks(store, exchange, compares_on=compares_on, thread_count=thread_count, dtype=dtype)
        self._upkeep = Upkeep(store, run_id, self._ranks)
        self._healing = Healing(
            store,
            run_id,
            self._upkeep,
            lock=self._lock,
            charge=lambda: self._epoch,
            clock=self._clock,
            bytes_per_s=scrub_bytes_per_s,
        )
        way = carrier if exchange is None else BROKER
        self._carrying = Carrying(store, run_id, way, self._clock, backend=collective_backend)
        self._report: PublishReport | None = None
        self._model = model

    async def publish(
        self, named: Named | DiskDelta, version: int, *, keyframe: bool = False, allow_nonfinite: bool = False
    ) -> PublishReport:
        """Make `named` the run's version `version`, together with all other ranks, whose publishers do it at once.

        Args:
            named: name → tensor, or pairs: torch tensors or numpy arrays; numpy uint16 is taken as bfloat16 bits. On
                several ranks: DTensors by their own shards, Slices, and tensors that are the same on every rank that
                names them. Or a path; that of a delta's directory, from one process alone.
            version: above the head.
            keyframe: put a keyframe of it beside its delta. If that fails the version is out all the same,
                `keyframe_bytes` is 0, the log says why, and it is tried again.
            allow_nonfinite: also publish new values that are NaN or infinite. On several ranks rank 0's counts.

        Raises:
            InputError: no tensors, or something that is not one.
            WeightsNotFinite: a value that is new in this version is NaN or infinite; nothing was published.
            LayoutMismatch: names, shapes or dtypes are not the run's; nothing was written.
            DigestMismatch: a delta's directory, or its base, is not what its trainer wrote; nothing was written.
            VersionConflict: not newer than the head, another publisher took over, or a delta is of another base.
            BrokerFull: the broker has no room for it; nothing was written.
            BrokerError: not sent; the next call finishes it.
            WeightError: a rank is gone. Every rank raises the same, and rank 0's names the rank that failed.
        """
        async with self._lock:
            try:
                hello = await self._ranks.hello(await self._whole(named, version), version)
                if not self._ranks.is_lead:
                    return PublishReport(**await self._ranks.follow(hello))
                try:
                    report = await self._publish(
                        *await self._ranks.meet(hello), wants_keyframe=keyframe, allow_nonfinite=allow_nonfinite
                    )
                except Exception as error:  # told to the other ranks, which wait, and raised
                    await self._ranks.end(error)
                    raise
                await self._ranks.end(asdict(report))
                return report
            except asyncio.CancelledError:
                self._ranks.interrupt()
                raise
            finally:
                self._ranks.let_go()

    async def _publish(
        self, version: int, layout: Layout, *, wants_keyframe: bool, allow_nonfinite: bool
    ) -> PublishReport:
        await self._open(layout, version, is_lost=await self._has_lost_head())
        await self._check_layout(layout)
        is_just_out = self._pending is not None
        if self._pending is not None:
            await self._send(*self._pending, is_repeated=True)
            await self._check_layout(layout)
        if self._ranks.is_regrouped:
            self._forget()
        if (repeated := await self._check_version(version, is_just_out=is_just_out)) is not None:
            if wants_keyframe:
                return replace(repeated, keyframe_bytes=await self._upkeep.keyframe(self._epoch))
            return repeated
        prepared, report = await self._prepare(version, allow_nonfinite=allow_nonfinite)
        prepared = await self._carrying.carry(prepared)
        await self._send(prepared, report)
        keyframe_bytes, jump_bytes = await self._upkeep.tend(prepared, self._epoch, wants_keyframe=wants_keyframe)
        return replace(report, keyframe_bytes=keyframe_bytes, jump_bytes=jump_bytes)

    async def _whole(self, named: Named | DiskDelta, version: int) -> Named:
        """Return the weights that a delta's directory makes of those that the run holds; other tensors as they are.

        The base is our own copy, or the broker's where we have none yet.
        """
        is_path = isinstance(named, (str, os.PathLike)) and self._ranks.is_alone
        given = given_of(named) if is_path else named
        if not isinstance(given, DiskDelta):
            return given
        assert self._ranks.is_alone  # on several ranks a path is read by each of them, and that of a delta refused
        head = await self._store.head(self._run_id)
        have = self._ranks.version
        is_ours = have >= 0 and head.epoch == self._epoch and (head.version <= have or self._pending is not None)
        check_base(given, self._run_id, version, have if is_ours else head.version)
        if is_ours:
            layout, bits = self._ranks.copies
        else:
            manifest, bits = await fetch_bits(self._store, self._run_id, head.version)
            layout = manifest.tensors
        changed = await in_thread(lambda check: new_bits(given, layout, bits, check))
        return [
            (spec.name, Stored(on_host(changed.get(spec.name, bits[spec.name])).reshape(spec.shape), spec.dtype))
            for spec in layout.tensors
        ]

    def _forget(self) -> None:
        """Make the next version a keyframe, which needs nothing before it."""
        self._ranks.forget()
        self._pending = self._report = None

    def start(self) -> None:
        """Look after published versions, in a task of the running loop, until `close`; rank 0 does this for all."""
        if self._ranks.is_lead:
            self._healing.start()

    async def close(self) -> None:
        """Stop looking after versions, let go of an abandoned collective; a version that was not sent is lost."""
        await self._healing.close()
        await self._carrying.close()

    async def _has_lost_head(self) -> bool:
        """Whether the broker lacks the head that we built on: it may have lost its last writes to a fail-over."""
        if self._ranks.version < 0:
            return False
        head = await self._store.head(self._run_id)
        if head.epoch != self._epoch or head.version >= self._ranks.version:
            return False
        facts = {"run_id": self._run_id, "head_version": head.version, "policy_version": self._ranks.version}
        log.warning("weights.head_went_back", extra=facts)
        self._forget()
        return True

    async def _open(self, layout: Layout, version: int, *, is_lost: bool) -> None:
        """Take charge of the run, once, and learn what is published.

        Refuse a bad call before that: a stray call must not put the run's living publisher out of charge.

        Args:
            is_lost: begin anew, without the versions there. In a new epoch, or receivers that hold a lost version take
                the next one of its number for the same.
        """
        if self._epoch and not is_lost:
            return
        self._epoch = 0
        published = await self._store.head(self._run_id)
        if version <= published.version:
            raise not_newer(self._run_id, version, published.version)
        for manifest in await self._held():
            if manifest.version == published.version:
                manifest.tensors.check(layout)
                break
        epoch = await self._store.open_publisher(self._run_id)
        head = await self._store.head(self._run_id)
        manifests = await self._held()
        self._upkeep.begin(manifests)
        self._layout = next((item.tensors for item in manifests if item.version == head.version), None)
        self._ranks.forget()
        is_same = self._layout is not None and self._layout.digest == layout.digest
        if is_same and not is_lost and self._ranks.is_alone:
            await self._resume(head)
        self._epoch = epoch

    async def _check_layout(self, layout: Layout) -> None:
        """Compare the first version with the run's model, if that can be read here; others with the first."""
        if self._layout is not None:
            self._layout.check(layout)
        elif self._model is not None:
            model = self._model
            await in_thread(lambda _: check_model(self._run_id, model, layout))
            self._model = None

    async def _held(self) -> list[WeightManifest]:
        return [*(await readable(self._store, self._run_id, await self._store.held(self._run_id))).values()]

    async def _resume(self, head: Head) -> None:
        """Go on with a delta from the head as the broker holds it, if it can be read whole."""
        try:
            manifest, bits = await fetch_bits(self._store, self._run_id, head.version)
        except (WeightError, WireError) as error:
            log.warning("weights.not_resumed", extra={"run_id": self._run_id, "error": str(error)})
            return
        await self._ranks.resume(manifest.tensors, bits, head.version)

    async def _check_version(self, version: int, *, is_just_out: bool) -> PublishReport | None:
        """Require a version above the head; return the report if just this version was published before.

        is_just_out: this call has finished the head, which the one before had begun.
        """
        head = await self._store.head(self._run_id)
        if head.epoch != self._epoch:
            link = Link(version=version, base_version=-1, kind="", epoch=self._epoch, payload_bytes=0, chunk_count=0)
            raise refusal(TAKEN_OVER, self._run_id, link, head_version=head.version, epoch=head.epoch)
        have = self._ranks.version
        if head.version < have:
            raise BrokerError(
                f"the broker has just lost version {have} of run {self._run_id!r} (head is {head.version}):"
                " publish again",
                head_version=head.version,
            )
        if 0 <= have < head.version:
            log.warning("weights.snapshot_in_doubt", extra={"run_id": self._run_id, "head_version": head.version})
            self._forget()
        if version > head.version:
            return None
        report = self._report
        if report is not None and version == report.version == head.version and await self._ranks.is_same():
            return report
        raise not_newer(self._run_id, version, head.version, is_just_out=is_just_out)

    async def _prepare(self, version: int, *, allow_nonfinite: bool) -> tuple[Prepared, PublishReport]:
        live_version = (await self._store.head(self._run_id)).version
        identity = Identity(run_id=self._run_id, epoch=self._epoch, version=version)
        started_s = self._clock.now_s()
        kind = DELTA if self._ranks.version >= 0 else KEYFRAME
        if kind == KEYFRAME:
            await self._ranks.begin()
        prepared = await self._ranks.prepare(identity, kind, finite_over=None if allow_nonfinite else live_version)
        manifest = prepared.manifest
        report = PublishReport(
            version=version,
            kind=manifest.kind,
            payload_bytes=manifest.payload_bytes,
            dense_bytes=manifest.dense_bytes,
            changed_count=manifest.changed_count,
            density=manifest.density,
            encode_s=self._clock.now_s() - started_s,
        )
        return prepared, report

    async def _send(self, prepared: Prepared, report: PublishReport, *, is_repeated: bool = False) -> None:
        """Send chunks, manifest, head; then the copies follow. Every part may be repeated."""
        manifest = prepared.manifest
        # Until it is known that the head has moved: the next publish repeats this version first, which is harmless.
        self._pending = (prepared, report)
        try:
            head = await self._store.head(self._run_id) if is_repeated else Head()
            # Chunks of a version that is out, written again, would get a time to live.
            if manifest.carrier == BROKER and (head.version, head.moved_by) != (manifest.version, manifest.epoch):
                await self._ranks.put(prepared)
            await self._store.put_manifest(manifest)
            await self._store.advance_head(manifest, self._shard_count)
        except WeightError:
            self._pending = None  # refused for good: not to be tried again
            raise
        self._pending = None
        self._ranks.advance(prepared)
        self._layout, self._report = manifest.tensors, report
        self._upkeep.take(manifest, prepared.chunks)
        log.info("weights.published", extra={"run_id": self._run_id, **asdict(report)})


class Carrying:
    """Brings the chunks of one run's versions to where receivers find them.

    Args:
        setting: "broker", "collective" or "auto". backend: of a collective, one of BACKENDS.
    """

    def __init__(self, store: WeightStore, run_id: str, setting: str, clock: Clock, *, backend: str = GLOO) -> None:
        self._store = store
        self._run_id = run_id
        self._setting = setting
        self._collective: CollectivePublisher | None = None
        if setting != BROKER:
            options = CollectiveOptions(backend=backend)
            self._collective = CollectivePublisher(store, run_id, options=options, clock=clock)

    async def carry(self, prepared: Prepared) -> Prepared:
        """Return the version, ready for the broker: with its chunks, or with a manifest that names another carrier.

        Raises:
            BrokerFull: the broker must carry it, and has no room; nothing was written.
        """
        if self._collective is not None:
            by_collective = await self._carried(self._collective, prepared)
            if by_collective is not None:
                return by_collective
        await check_room(self._store, prepared.manifest)
        return prepared

    async def _carried(self, collective: CollectivePublisher, prepared: Prepared) -> Prepared | None:
        receivers = [holder.holder_id for holder in await self._store.holders(self._run_id)]
        facts = CarrierFacts(
            kind=prepared.manifest.kind,
            payload_bytes=prepared.manifest.payload_bytes,
            dense_bytes=prepared.manifest.dense_bytes,
            room_bytes=await self._store.room_bytes(),
            member_count=len(receivers),
            receiver_count=len(receivers),
        )
        if carrier(self._setting, facts) == BROKER:
            return None
        manifest = replace(prepared.manifest, carrier=COLLECTIVE)
        has_room = facts.room_bytes is None or facts.room_bytes >= facts.payload_bytes
        quorum = len(receivers) if self._setting == AUTO and has_room else None
        report = await collective.send(manifest, prepared.chunks, expected=receivers, quorum=quorum)
        extra = {"run_id": self._run_id, "version": manifest.version, "reached": len(report.reached)}
        if not report.is_enough:
            log.warning("weights.collective_failed", extra={**extra, "error": report.error})
            return None
        log.info("weights.collective", extra={**extra, "left_out": len(report.left_out)})
        return replace(prepared, manifest=manifest)

    async def close(self) -> None:
        """Wait for a transfer that was given up to let go."""
        if self._collective is not None:
            await self._collective.close()
