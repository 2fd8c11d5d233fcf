"""Keeps a run's chain short and whole, and the broker's memory bounded: makes keyframes and jumps, heals, and deletes
versions that nobody needs.

- All of it happens beside versions that are out already, so a failure here costs nothing but time: it is a warning, and
  the next publish tries again.
- fabric/rules/weights/chain.py decides which versions are due and which may go.
- Nothing is written that the broker has no room for.
- A damaged version is written again, byte for byte, if its bytes are kept or can be made again: late deltas and jumps
  are kept, a keyframe of the head is encoded anew. If not, a keyframe of the head goes round it; once that is out, the
  unreadable version is deleted, so all held versions can be read.
- Memory: encoded bytes of late deltas and jumps, KEPT_BYTES_MIN or a KEPT_SHAREth of the weights.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Iterable, Sequence
from dataclasses import replace

from ...fabric.contract.errors import BrokerFull, ChainBroken, DigestMismatch, FabricError, WireError
from ...fabric.format.manifest import BROKER, WeightManifest
from ...fabric.inspect.healing import Wound, examine, mend
from ...fabric.ports.weights import WeightStore
from ...fabric.rules.weights.chain import (
    KEYFRAME,
    Jump,
    Link,
    garbage,
    jumps_due,
    keyframe_due,
    newest_keyframe,
    readable_versions,
    way_to,
)
from ...fabric.versions.fold import fold, may_fold
from ...fabric.versions.held import readable
from ...fabric.versions.snapshot import Identity, Prepared
from .ranks import Ranks

log = logging.getLogger(__name__)

KEPT_BYTES_MIN = 64 << 20  # all late versions of a small model
KEPT_SHARE = 16  # of a larger one: ten deltas at 1 % density; beyond that a keyframe is as good


class Upkeep:
    """Tends the chain of one run for the publisher that is in charge. ranks: the copies of the head."""

    def __init__(self, store: WeightStore, run_id: str, ranks: Ranks) -> None:
        self._store = store
        self._run_id = run_id
        self._ranks = ranks
        self._held: dict[Link, WeightManifest] = {}  # by the broker, as far as this publisher knows
        self._is_elsewhere: set[Link] = set()  # of these, whose chunks a collective carried
        self._unfoldable: set[Jump] = set()  # jumps whose sources are gone, elsewhere, unreadable, or cut differently
        self._unsure: WeightManifest | None = None  # the broker may hold it or not
        self._wounds: dict[Link, Wound] = {}  # versions that are held and cannot be read
        self._kept: dict[Link, Sequence[bytes]] = {}  # chunks of late deltas and jumps, oldest first
        self._wants_keyframe = False
        self.is_whole = True  # whether all damage is healed

    def begin(self, manifests: Iterable[WeightManifest]) -> None:
        """Note that the broker holds these versions, and no others."""
        self._held, self._is_elsewhere, self._unfoldable = {}, set(), set()
        self._wounds = {}
        self._unsure = None
        self.is_whole = False  # unreadable versions that others left are not among them
        for manifest in manifests:
            self.take(manifest)

    def take(self, manifest: WeightManifest, chunks: Sequence[bytes] = ()) -> None:
        """Note that the broker holds this version, too. chunks: its own; kept for a while if of a delta or jump."""
        link = manifest.link
        self._held[link] = manifest
        if manifest.carrier != BROKER:
            self._is_elsewhere.add(link)
        if chunks and link.kind != KEYFRAME:
            self._kept[link] = chunks
        room_bytes = max(KEPT_BYTES_MIN, manifest.dense_bytes // KEPT_SHARE)
        while sum(each.payload_bytes for each in self._kept) > room_bytes:
            self._kept.pop(next(iter(self._kept)))

    def held(self) -> list[WeightManifest]:
        """List the held versions: the newest keyframe and the way from it to the head, then the rest, newest first."""
        head = max((link.version for link in self._held), default=-1)
        way = way_to(None, head, self._links)
        rest = sorted((link for link in self._held if link not in way), key=lambda link: -link.version)
        return [self._held[link] for link in [*way, *rest]]

    @property
    def _links(self) -> list[Link]:
        """Return the versions that are held and can be read."""
        return [link for link in self._held if link not in self._wounds]

    async def heal(self, wounds: Iterable[Wound], head: int, epoch: int) -> None:
        """Mend the damage that can be mended, go round the rest, and delete unreadable versions.

        Work that needs a copy of the head waits for a later call if there is none just now: a version is half out, or
        other ranks, which listen only while they publish, hold parts of it.
        """
        self._wounds |= {wound.manifest.link: wound for wound in wounds if wound.manifest.link in self._held}
        self.is_whole = False
        has_copy = self._ranks.is_alone and self._ranks.version == head
        await self._tried(self._mend(epoch, has_copy=has_copy))
        if has_copy:
            await self._tried(self._adopt(head, epoch))
            await self._tried(self._keyframe(epoch))
            await self._tried(self._drop(head, epoch))
            is_reached = bool(way_to(None, head, self._links))
            self.is_whole = is_reached and not self._wounds and not self._wants_keyframe

    async def keyframe(self, epoch: int) -> int:
        """Put a keyframe of the head beside it, if there is none; return its bytes."""
        self._wants_keyframe, self.is_whole = True, False  # if this fails now, it is healed later
        return await self._tried(self._keyframe(epoch))

    async def tend(self, prepared: Prepared, epoch: int, *, wants_keyframe: bool = False) -> tuple[int, int]:
        """Publish keyframes and jumps that are due, as the head has moved by `prepared`, and the copies with it; delete
        versions that nobody needs. Return the bytes of its keyframe and of jumps into it.

        Each step stands alone: an unreadable chunk must not keep the broker from being cleaned up.
        """
        version = prepared.manifest.version
        self._wants_keyframe |= wants_keyframe
        await self._tried(self._look_again())
        await self._tried(self._keep(prepared))
        jump_bytes = await self._tried(self._jump(Identity(run_id=self._run_id, epoch=epoch, version=version)))
        keyframe_bytes = await self._tried(self._keyframe(epoch))
        await self._tried(self._drop(version, epoch))
        return keyframe_bytes, jump_bytes

    async def _tried(self, step: Awaitable[int]) -> int:
        try:
            return await step
        except FabricError as error:
            log.warning("weights.tending_failed", extra={"run_id": self._run_id, "error": str(error)})
            return 0

    async def _look_again(self) -> int:
        """Ask what the broker holds, if an answer of it was lost."""
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
        """Also store collective-sent chunks in the broker, for receivers that were absent."""
        manifest = prepared.manifest
        if manifest.link not in self._is_elsewhere:
            return 0
        await check_room(self._store, manifest)
        await self._store.put_chunks(manifest, 0, prepared.chunks)
        await self._store.put_manifest(manifest)
        self._is_elsewhere.discard(manifest.link)
        return manifest.payload_bytes

    async def _jump(self, identity: Identity) -> int:
        """Fold the jumps that are due, and those that become due by that; return their bytes."""
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
            # Receivers cannot read it either: they need a way around it.
            log.warning("weights.source_unreadable", extra={"run_id": self._run_id, "error": str(error)})
            wounds = [wound for source in sources if (wound := await examine(self._store, source)) is not None]
            if not wounds:  # the digests are right: another attempt would fail alike
                self._unfoldable.add(jump)
                self._wants_keyframe = True
            self._wounds |= {wound.manifest.link: wound for wound in wounds}
            self.is_whole = False
            await self._mend(identity.epoch, has_copy=False)
            raise  # the next publish folds the healed versions
        return await self._beside(folded)

    async def _keyframe(self, epoch: int) -> int:
        version = self._ranks.version
        here = [link for link in self._links if link not in self._is_elsewhere]
        has_one = any(link.kind == KEYFRAME and link.version == version for link in here)
        if has_one or not (self._wants_keyframe or keyframe_due(version, here)):
            self._wants_keyframe = self._wants_keyframe and not has_one
            return 0
        same = [link for link in self._wounds if link.kind == KEYFRAME and link.version == version]
        await self._forget(same, epoch)
        room_bytes = await self._store.room_bytes()
        if room_bytes is not None and room_bytes < self._keyframe_bytes(version):
            log.warning("weights.no_room_for_a_keyframe", extra={"run_id": self._run_id, "room_bytes": room_bytes})
            await self._forget([*self._wounds], epoch)  # nobody can read it: room for the next attempt
            return 0
        identity = Identity(run_id=self._run_id, epoch=epoch, version=version)
        keyframe_bytes = await self._beside(await self._ranks.prepare(identity, KEYFRAME))
        self._wants_keyframe = False
        return keyframe_bytes

    def _keyframe_bytes(self, version: int) -> int:
        """Estimate a keyframe's bytes: as the last one, or half of the weights. Encoding it to know would take long."""
        last = newest_keyframe(version, self._links)
        dense_bytes = max((manifest.dense_bytes for manifest in self._held.values()), default=0)
        return dense_bytes // 2 if last is None else last.payload_bytes

    async def _beside(self, prepared: Prepared) -> int:
        """Publish a manifest beside the delta of its version; return its bytes."""
        manifest = prepared.manifest
        await check_room(self._store, manifest)
        self._unsure = manifest  # until we know that it is there: an unknown version is never deleted
        await self._ranks.put(prepared)
        await self._store.put_manifest(manifest)
        self.take(manifest, prepared.chunks)
        self._unsure = None
        return manifest.payload_bytes

    async def _mend(self, epoch: int, *, has_copy: bool) -> int:
        """Write damaged versions again if their bytes can be had; return how many were healed."""
        count = 0
        for link, wound in list(self._wounds.items()):
            facts = {"run_id": self._run_id, "policy_version": link.version, "damage": str(wound)}
            chunks = await self._chunks_of(wound, has_copy=has_copy)
            if await mend(self._store, wound, chunks, epoch):
                del self._wounds[link]
                log.warning("weights.healed: %s", wound, extra=facts)
                count += 1
            else:
                log.warning(
                    "weights.damaged: %s; its bytes are not to be had, a keyframe goes round it", wound, extra=facts
                )
        return count

    async def _chunks_of(self, wound: Wound, *, has_copy: bool) -> Sequence[bytes] | None:
        """Return all chunks of a version, kept or made again; None if neither is possible."""
        link = wound.manifest.link
        if wound.chunks and has_copy and link.kind == KEYFRAME and link.version == self._ranks.version:
            identity = Identity(run_id=self._run_id, epoch=link.epoch, version=link.version)
            return (await self._ranks.prepare(identity, KEYFRAME)).chunks
        return self._kept.get(link)

    async def _adopt(self, head: int, epoch: int) -> int:
        """Take in readable versions that the broker lists and we do not know; delete the rest, which nobody can use."""
        known = {(link.version, link.kind) for link in self._held}
        names = [each for each in await self._store.held(self._run_id) if each[0] <= head and each not in known]
        found = await readable(self._store, self._run_id, names)
        for manifest in found.values():
            self.take(manifest)
        strange = [name for name in names if name not in found]
        if strange:
            log.warning("weights.not_ours", extra={"run_id": self._run_id, "names": [*map(str, strange)]})
        links = [
            Link(version=version, base_version=-1, kind=kind, epoch=0, payload_bytes=0, chunk_count=0)
            for version, kind in strange
        ]
        await self._store.drop(self._run_id, links, epoch)
        return len(strange)

    async def _drop(self, head: int, epoch: int) -> int:
        held_versions = {holder.version for holder in await self._store.holders(self._run_id) if holder.version >= 0}
        dropped: Sequence[Link] = garbage(head, self._links, held_versions=held_versions)
        left = [link for link in self._links if link not in dropped]
        if self._wounds and way_to(None, head, left):
            there = readable_versions(head, left)
            lost = [*self._wounds, *(link for link in left if link.version not in there)]
            known = {link.version for link in left if link not in lost}
            versions = sorted({link.version for link in lost} - known)
            facts = {"run_id": self._run_id, "head_version": head, "versions": versions}
            log.warning("weights.lost: what could not be read is deleted; no longer held: %s", versions, extra=facts)
            dropped = [*dropped, *lost]
        return await self._forget(dropped, epoch)

    async def _forget(self, links: Sequence[Link], epoch: int) -> int:
        """Delete versions from the broker, and from our records."""
        await self._store.drop(self._run_id, links, epoch)
        for link in links:
            self._held.pop(link, None)
            self._wounds.pop(link, None)
            self._kept.pop(link, None)
        self._is_elsewhere.difference_update(links)
        return len(links)


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
            " that have ended, or create the run with the weight_carrier 'auto'",
            version=manifest.version,
            payload_bytes=manifest.payload_bytes,
            room_bytes=room_bytes,
        )
