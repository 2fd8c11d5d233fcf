"""What keeps a run's chain short and the broker's memory bounded: keyframes, jumps, and deleting what nobody needs.

- All of it happens beside versions that are out already, so a failure here costs nothing but time: it is a warning, and
  the next publish tries again.
- What is due and what may go is decided in fabric/rules/chain.py.
- Nothing is written that the broker has no room for.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ..fabric.errors import BrokerFull, ChainBroken, DigestMismatch, FabricError, WireError
from ..fabric.ports_weights import WeightStore
from ..fabric.rules.chain import Jump, Link, garbage, jumps_due, keyframe_due, newest_keyframe
from ..fabric.weights.fold import fold, may_fold
from ..fabric.weights.held import readable
from ..fabric.weights.manifest import BROKER, WeightManifest
from ..fabric.weights.snapshot import Identity, Prepared, Snapshot
from .borrowing import in_thread

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpkeepReport:
    """Bytes published beside a version: of its keyframe and of jumps into it."""

    keyframe_bytes: int = 0
    jump_bytes: int = 0


class Upkeep:
    """Tends the chain of one run for the publisher that is in charge."""

    def __init__(self, store: WeightStore, run_id: str) -> None:
        self._store = store
        self._run_id = run_id
        self._links: list[Link] = []  # that the broker holds, as far as this publisher knows
        self._is_elsewhere: set[Link] = set()  # of these, whose chunks a collective carried
        self._unfoldable: set[Jump] = set()  # jumps whose sources are gone, elsewhere, unreadable, or cut differently
        self._is_torn = False  # something that is held cannot be read
        self._unsure: WeightManifest | None = None  # whether it is held is not known

    def begin(self, manifests: Iterable[WeightManifest]) -> None:
        """These are what the broker holds, and no others."""
        self._links, self._is_elsewhere, self._unfoldable = [], set(), set()
        self._is_torn = False
        self._unsure = None
        for manifest in manifests:
            self.take(manifest)

    def take(self, manifest: WeightManifest) -> None:
        """The broker holds this one, too."""
        self._links.append(manifest.link)
        if manifest.carrier != BROKER:
            self._is_elsewhere.add(manifest.link)

    async def tend(self, snapshot: Snapshot, prepared: Prepared, epoch: int) -> UpkeepReport:
        """The head has moved to `snapshot` by `prepared`: publish what is due beside it, delete what nobody needs.

        Each step is for itself: a chunk that cannot be read must not keep the broker from being cleaned up.
        """
        identity = Identity(run_id=self._run_id, epoch=epoch, version=snapshot.version)
        await self._tried(self._look_again())
        await self._tried(self._keep(prepared))
        jump_bytes = await self._tried(self._jump(identity))
        keyframe_bytes = await self._tried(self._keyframe(identity, snapshot))
        await self._tried(self._drop(snapshot.version, epoch))
        return UpkeepReport(keyframe_bytes=keyframe_bytes, jump_bytes=jump_bytes)

    async def _tried(self, step: Awaitable[int]) -> int:
        try:
            return await step
        except FabricError as error:
            log.warning("weights.tending_failed", extra={"run_id": self._run_id, "error": str(error)})
            return 0

    async def _look_again(self) -> int:
        """What the broker holds, where an answer of it was lost."""
        unsure = self._unsure
        if unsure is None:
            return 0
        found = await readable(self._store, self._run_id, await self._store.held(self._run_id))
        links = {manifest.link for manifest in found.values()}
        self.begin(manifest for manifest in found.values() if manifest.link != unsure.link)
        if unsure.link in links:
            self._unsure = unsure
            await self._store.put_manifest(unsure)  # its chunks may have been left with a time to live
            self._unsure = None
            self.take(unsure)
        return 0

    async def _keep(self, prepared: Prepared) -> int:
        """What a collective has carried is for those who were there; the broker has it for the others."""
        manifest = prepared.manifest
        if manifest.link not in self._is_elsewhere:
            return 0
        await check_room(self._store, manifest)
        await self._store.put_chunks(manifest, 0, prepared.chunks)
        await self._store.put_manifest(manifest)
        self._is_elsewhere.discard(manifest.link)
        return manifest.payload_bytes

    async def _jump(self, identity: Identity) -> int:
        """Fold what is due, and what becomes due by that; returns the bytes of the jumps."""
        total = 0
        while due := [jump for jump in jumps_due(identity.version, self._links) if jump not in self._unfoldable]:
            for jump in due:
                total += await self._folded(identity, jump)
        return total

    async def _folded(self, identity: Identity, jump: Jump) -> int:
        found = await self._store.manifests(self._run_id, [(link.version, link.kind) for link in jump.sources])
        sources = [manifest for manifest in found if manifest is not None]
        is_here = self._is_elsewhere.isdisjoint(jump.sources) and [each.link for each in sources] == [*jump.sources]
        if not is_here or not may_fold(sources):
            self._unfoldable.add(jump)
            return 0
        try:
            folded = await fold(self._store, replace(identity, version=jump.version), jump.kind, sources)
        except (ChainBroken, DigestMismatch, WireError) as error:
            # What cannot be read here cannot be read by receivers: they need a way around it.
            log.warning("weights.source_unreadable", extra={"run_id": self._run_id, "error": str(error)})
            self._unfoldable.add(jump)
            self._is_torn = True
            return 0
        return await self._beside(folded)

    async def _keyframe(self, identity: Identity, snapshot: Snapshot) -> int:
        here = [link for link in self._links if link not in self._is_elsewhere]
        if not self._is_torn and not keyframe_due(snapshot.version, here):
            return 0
        room_bytes = await self._store.room_bytes()
        if room_bytes is not None and room_bytes < self._keyframe_bytes(snapshot):
            log.warning("weights.no_room_for_a_keyframe", extra={"run_id": self._run_id, "room_bytes": room_bytes})
            return 0
        keyframe_bytes = await self._beside(await in_thread(partial(snapshot.prepare_keyframe, identity)))
        self._is_torn = False
        return keyframe_bytes

    def _keyframe_bytes(self, snapshot: Snapshot) -> int:
        """About what a keyframe has: as the last one, or half of the weights. Encoding it to know would take long."""
        last = newest_keyframe(snapshot.version, self._links)
        return snapshot.layout.byte_count // 2 if last is None else last.payload_bytes

    async def _beside(self, prepared: Prepared) -> int:
        """Publish a manifest beside the delta of its version; returns its bytes."""
        manifest = prepared.manifest
        await check_room(self._store, manifest)
        self._unsure = manifest  # until it is known to be there: what is not known is never deleted
        await self._store.put_chunks(manifest, 0, prepared.chunks)
        await self._store.put_manifest(manifest)
        self.take(manifest)
        self._unsure = None
        return manifest.payload_bytes

    async def _drop(self, head: int, epoch: int) -> int:
        held_versions = {holder.version for holder in await self._store.holders(self._run_id) if holder.version >= 0}
        dropped: Sequence[Link] = garbage(head, self._links, held_versions=held_versions)
        await self._store.drop(self._run_id, dropped, epoch)
        self._links = [link for link in self._links if link not in dropped]
        self._is_elsewhere.difference_update(dropped)
        return len(dropped)


async def check_room(store: WeightStore, manifest: WeightManifest) -> None:
    """Require that the broker has room for a version, before anything of it is written.

    Raises:
        BrokerFull: it has not.
    """
    room_bytes = await store.room_bytes()
    if room_bytes is not None and manifest.payload_bytes > room_bytes:
        raise BrokerFull(
            f"version {manifest.version} ({manifest.kind}) of run {manifest.run_id!r} has {manifest.payload_bytes:,}"
            f" bytes, the broker has room for {room_bytes:,}: nothing was written. Raise its maxmemory, delete runs"
            " that have ended, or create the run with weight_carrier='auto'",
            version=manifest.version,
            payload_bytes=manifest.payload_bytes,
            room_bytes=room_bytes,
        )
