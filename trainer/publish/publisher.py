"""Publishing weights: a model's tensors, as stored bits, become the next version of a run.

- The first version of a run is a keyframe, later ones are deltas to the version before. A publisher that takes over
  begins from the weights that the broker holds; where it cannot, with a keyframe. What stands beside them (keyframes,
  jumps) and when versions are deleted is upkeep.py's.
- Everything is checked before anything is written: names, shapes and dtypes against the run's, the version against
  the head, the epoch against other publishers.
- The snapshot moves only when the head has moved, to the bits that were encoded. A version whose sending failed, or was
  interrupted, is finished by the next `publish`. Where the head is neither of the two, the next version is a keyframe.
- The tensors must not change until `publish` returns or raises; then they may, for nothing reads them any more.
- What is published is looked after from then on, in a task of the loop, until `close`: see healing.py.
- Memory: one copy of the weights where they are compared, the encoded version, and a copy of what changed in it.
  Parameters on a GPU are compared there (gpu_snapshot.py; unverified on a GPU), all others on the host.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, get_args

import numpy as np

from ...fabric.contract.clock import Clock, SystemClock
from ...fabric.contract.errors import BrokerError, InputError, WeightError, WireError
from ...fabric.contract.records import RunConfig
from ...fabric.format.codec import Bits
from ...fabric.format.layout import Layout
from ...fabric.format.manifest import BROKER, Head, WeightManifest
from ...fabric.ports.weights import WeightStore
from ...fabric.rules.weights.chain import Link
from ...fabric.rules.weights.publish import TAKEN_OVER, not_newer, refusal
from ...fabric.versions.held import readable
from ...fabric.versions.reader import fetch_bits
from ...fabric.versions.snapshot import Identity, Prepared, Snapshot
from .borrowing import Check, in_thread
from .carrying import Carrying
from .healing import Healing
from .model_check import check_model
from .report import PublishReport
from .tensors import ComparesOn, Named, collect_bits, devices_of
from .upkeep import Upkeep

T = TypeVar("T")
log = logging.getLogger(__name__)

VERSION_MAX = (1 << 53) - 1  # of whole numbers that a broker's scripts, which count in doubles, tell apart


class Publisher:
    """Publishes versions of one run.

    Args:
        shard_count: of the run; every shard learns the head.
        carrier: "broker", "collective" or "auto"; see carrying.py.
        model: the run's; its first weights are checked against it. None: they are not.
        compares_on: "auto": tensors on a GPU are compared there, which takes a copy of the weights there, others on the
            host. "host": all on the host, for a GPU without that room. "device": every torch tensor where it is.
        scrub_bytes_per_s: of what is held, read again to find damage; 0: none without a report.
    """

    def __init__(
        self,
        store: WeightStore,
        run_id: str,
        shard_count: int = 1,
        *,
        carrier: str = BROKER,
        compares_on: ComparesOn = "auto",
        scrub_bytes_per_s: int = RunConfig.scrub_bytes_per_s,
        model: str | None = None,
        clock: Clock | None = None,
    ) -> None:
        if compares_on not in get_args(ComparesOn):
            raise InputError(f"compares_on is {compares_on!r}: give 'auto', 'device' or 'host'")
        self._store = store
        self._run_id = run_id
        self._shard_count = shard_count
        self._clock = clock or SystemClock()
        self._lock = asyncio.Lock()
        self._epoch = 0
        self._layout: Layout | None = None
        self._snapshot: Snapshot | None = None
        self._pending: tuple[Snapshot, Prepared, PublishReport] | None = None
        self._upkeep = Upkeep(store, run_id)
        self._healing = Healing(
            store,
            run_id,
            self._upkeep,
            lock=self._lock,
            charge=lambda: (self._epoch, self._sound_snapshot()),
            clock=self._clock,
            bytes_per_s=scrub_bytes_per_s,
        )
        self._carrying = Carrying(store, run_id, carrier, self._clock)
        self._report: PublishReport | None = None
        self._compares_on = compares_on
        self._model = model
        self._devices: dict[str, Any] = {}  # where the snapshot is kept, by name; the rest on the host

    async def publish(self, named: Named, version: int, *, keyframe: bool = False) -> PublishReport:
        """Make `named` the run's version `version`.

        Args:
            named: name → tensor, or pairs: torch tensors or numpy arrays; numpy uint16 is taken as bfloat16 bits.
            version: above the head.
            keyframe: put a keyframe of it beside its delta. Where that does not succeed the version is out all the
                same, `keyframe_bytes` is 0, the log says why, and it is tried again.

        Raises:
            InputError: no tensors, or something that is not one.
            LayoutMismatch: names, shapes or dtypes are not the run's; nothing was written.
            VersionConflict: not newer than the head, or another publisher took over.
            BrokerFull: the broker has no room for it; nothing was written.
            BrokerError: not sent; the next call finishes it.
        """
        if isinstance(version, bool) or not isinstance(version, (int, np.integer)):
            raise InputError(f"version is {version!r}, expected a whole number above the head's", version=version)
        version = int(version)
        if version < 0:
            raise InputError(f"version {version} is below 0: versions count up from 0", version=version)
        if version > VERSION_MAX:
            raise InputError(f"version {version} is above {VERSION_MAX}: versions count up from 0", version=version)
        async with self._lock:
            layout, bits = await self._in_thread(partial(self._collect, named))
            await self._open(layout, version)
            await self._check_layout(layout)
            await self._mind_a_lost_head()
            if self._pending is not None:
                await self._send(*self._pending, is_repeated=True)
            if (repeated := await self._check_version(version, bits)) is not None:
                if keyframe and self._snapshot is not None:
                    keyframe_bytes = await self._upkeep.keyframe(self._snapshot, self._epoch)
                    repeated = replace(repeated, keyframe_bytes=keyframe_bytes)
                return repeated
            snapshot, prepared, report = await self._prepare(layout, bits, version)
            prepared = await self._carrying.carry(prepared)
            await self._send(snapshot, prepared, report)
            beside = await self._upkeep.tend(snapshot, prepared, self._epoch, wants_keyframe=keyframe)
            return replace(report, keyframe_bytes=beside.keyframe_bytes, jump_bytes=beside.jump_bytes)

    async def _in_thread(self, work: Callable[[Check], T]) -> T:
        """Work that reads what the caller handed over; a thread of it is never left behind."""
        return await in_thread(work)

    def _collect(self, named: Named, check: Check) -> tuple[Layout, dict[str, Bits]]:
        has_begun = self._snapshot is not None or self._pending is not None
        if has_begun and not self._devices:  # a snapshot of the host compares there, wherever tensors are by now
            return collect_bits(named, "host", check)
        layout, bits = collect_bits(named, self._compares_on, check)
        self._devices = self._devices or devices_of(bits)
        return layout, bits

    def _begin(self, layout: Layout, bits: Mapping[str, Bits]) -> Snapshot:
        return self._kept(layout, bits, -1)

    def _kept(self, layout: Layout, bits: Mapping[str, Bits], version: int) -> Snapshot:
        """A snapshot of `bits`, where the trainer's tensors are to be compared."""
        if not self._devices:
            return Snapshot(layout, bits, version)
        from .gpu_snapshot import DeviceSnapshot  # needs torch

        return DeviceSnapshot(layout, bits, version, devices=self._devices)

    def start(self) -> None:
        """Look after what is published, in a task of the running loop, until `close`."""
        self._healing.start()

    def _sound_snapshot(self) -> Snapshot | None:
        """Our copy of the head, for keyframes at any time."""
        return self._snapshot

    async def close(self) -> None:
        """Look after nothing more, let go of a collective that was given up; a version that was not sent is lost."""
        await self._healing.close()
        await self._carrying.close()

    async def _open(self, layout: Layout, version: int) -> None:
        """Take charge of the run, once, and learn what is published.

        What would be refused is refused before: a stray call must not put the run's living publisher out of charge.
        """
        if self._epoch:
            return
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
        self._snapshot = None
        if self._layout is not None and self._layout.digest == layout.digest:
            self._snapshot = await self._resumed(head)
        self._epoch = epoch

    async def _check_layout(self, layout: Layout) -> None:
        """The first version is compared with the run's model, where that can be read here; others with the first."""
        if self._layout is not None:
            self._layout.check(layout)
        elif self._model is not None:
            model = self._model
            await self._in_thread(lambda _: check_model(self._run_id, model, layout))
            self._model = None

    async def _held(self) -> list[WeightManifest]:
        return [*(await readable(self._store, self._run_id, await self._store.held(self._run_id))).values()]

    async def _resumed(self, head: Head) -> Snapshot | None:
        """The head as the broker holds it, to go on from with a delta; None where it cannot be read whole."""
        try:
            manifest, bits = await fetch_bits(self._store, self._run_id, head.version)
        except (WeightError, WireError) as error:
            log.warning("weights.not_resumed", extra={"run_id": self._run_id, "error": str(error)})
            return None
        return await self._in_thread(lambda _: self._kept(manifest.tensors, bits, head.version))

    async def _mind_a_lost_head(self) -> None:
        """A broker that lost its last writes (a replica took over) may lack what we built on: begin anew from here.

        The next version is then a keyframe, which needs nothing before it.
        """
        if self._snapshot is None:
            return
        head = await self._store.head(self._run_id)
        if head.epoch != self._epoch or head.version >= self._snapshot.version:
            return
        facts = {"run_id": self._run_id, "head_version": head.version, "policy_version": self._snapshot.version}
        log.warning("weights.head_went_back", extra=facts)
        self._snapshot = self._pending = self._report = None
        self._epoch = 0
        # A new epoch, or receivers that hold a lost version take the next one of its number for the same.
        epoch = await self._store.open_publisher(self._run_id)
        self._upkeep.begin(await self._held())
        self._epoch = epoch

    async def _check_version(self, version: int, bits: Mapping[str, Bits]) -> PublishReport | None:
        """Require a version above the head; returns the report when just this was published before."""
        head = await self._store.head(self._run_id)
        if head.epoch != self._epoch:
            link = Link(version=version, base_version=-1, kind="", epoch=self._epoch, payload_bytes=0, chunk_count=0)
            raise refusal(TAKEN_OVER, self._run_id, link, head_version=head.version, epoch=head.epoch)
        report, snapshot = self._report, self._snapshot
        if snapshot is not None and head.version < snapshot.version:
            raise BrokerError(
                f"the broker has just lost version {snapshot.version} of run {self._run_id!r} (head is {head.version}):"
                " publish again",
                head_version=head.version,
            )
        if snapshot is not None and head.version > snapshot.version:
            log.warning("weights.snapshot_in_doubt", extra={"run_id": self._run_id, "head_version": head.version})
            self._snapshot = self._report = None  # the next version is a keyframe, which needs nothing before it
        if version > head.version:
            return None
        is_mine = report is not None and snapshot is not None and version == report.version == head.version
        if is_mine and snapshot is not None and await self._in_thread(partial(snapshot.equals, bits)):
            return report
        raise not_newer(self._run_id, version, head.version)

    async def _prepare(
        self, layout: Layout, bits: Mapping[str, Bits], version: int
    ) -> tuple[Snapshot, Prepared, PublishReport]:
        identity = Identity(run_id=self._run_id, epoch=self._epoch, version=version)
        started_s = self._clock.now_s()
        snapshot = self._snapshot
        if snapshot is None:
            snapshot = await self._in_thread(lambda _: self._begin(layout, bits))
            prepared = await self._in_thread(partial(snapshot.prepare_keyframe, identity))
        else:
            prepared = await self._in_thread(partial(snapshot.prepare_delta, identity, bits))
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
        return snapshot, prepared, report

    async def _is_head(self, manifest: WeightManifest) -> bool:
        """Whether it is out already; its chunks, written again, would be for a time only."""
        head = await self._store.head(self._run_id)
        return (head.version, head.moved_by) == (manifest.version, manifest.epoch)

    async def _send(
        self, snapshot: Snapshot, prepared: Prepared, report: PublishReport, *, is_repeated: bool = False
    ) -> None:
        """Chunks, manifest, head; then the snapshot follows. Every part may be repeated."""
        manifest = prepared.manifest
        # Until it is known that the head has moved: the next publish repeats this version first, which is harmless.
        self._pending = (snapshot, prepared, report)
        try:
            if manifest.carrier == BROKER and not (is_repeated and await self._is_head(manifest)):
                await self._store.put_chunks(manifest, 0, prepared.chunks)
            await self._store.put_manifest(manifest)
            await self._store.advance_head(manifest, self._shard_count)
        except WeightError:
            self._pending = None  # refused for good: not to be tried again
            raise
        self._snapshot = self._pending = None  # where this is interrupted, it is neither the head nor what was before
        snapshot.advance(prepared)
        self._snapshot, self._layout, self._report = snapshot, snapshot.layout, report
        self._upkeep.take(manifest, prepared.chunks)
        log.info("weights.published", extra={"run_id": self._run_id, **_fields(report)})


def _fields(report: PublishReport) -> dict[str, Any]:
    return {name: getattr(report, name) for name in PublishReport.__slots__}
