"""Whole versions from other sources than the store's chain, and the test whether they may be trusted.

- We take a version only if it is of this run's line: it must agree with the store's manifests of the version. If the
  store has forgotten it, a version at the head must be of the head's own publisher, and the deltas that follow prove
  an older one.
- We hand a version out only as the very state that its manifest names.
- A source may take long, and the run goes on meanwhile: we look up the head again afterwards.
- Peers that fail take no more time than fabric/rules/weights/patience.py allows.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Protocol
from zlib import crc32

import numpy as np

from ...fabric.contract.clock import Clock, SystemClock
from ...fabric.contract.errors import FabricError, PeerLost
from ...fabric.delivery.peer_copy import fetch_snapshot
from ...fabric.delivery.relay_options import RelayOptions
from ...fabric.format.layout import Layout
from ...fabric.format.manifest import Head, Holder, WeightManifest, check_state
from ...fabric.ports.weights import WeightStore
from ...fabric.rules.weights.patience import Patience
from ...fabric.versions.commit import Staged
from ..engines.base import Bits

log = logging.getLogger(__name__)

PEER_COUNT_MAX = 3  # asked in one round

Snapshot = tuple[WeightManifest, Mapping[str, Bits]]  # a manifest, and all its flat stored bits by tensor


class VersionSource(Protocol):
    """A source of whole versions, for when no chain of the store leads to the head: a peer, a collective."""

    async def version_above(self, run_id: str, layout: Layout, above: int) -> Snapshot | None:
        """Fetch the newest version above `above`; None if there is none.

        Raises:
            FabricError: the version cannot be had now.
        """
        ...


class PeerSource:
    """Fetches live weights of other workers. own_id: of our own hold; each id asks the peers in another order."""

    def __init__(
        self, store: WeightStore, own_id: str, options: RelayOptions | None = None, clock: Clock | None = None
    ) -> None:
        self._store = store
        self._own_id = own_id
        self._options = options
        self._clock = clock or SystemClock()
        self._patience = Patience(self._clock.now_s())

    async def version_above(self, run_id: str, layout: Layout, above: int) -> Snapshot | None:
        """Fetch a version from the first of the newest holders that gives it."""
        for holder in self._in_order(await self._store.holders(run_id), above):
            started_s = self._clock.now_s()
            if not self._patience.is_left(started_s):
                break
            try:
                version = holder.version
                return await fetch_snapshot(
                    self._store, run_id, holder.address, at_least_version=version, options=self._options
                )
            except PeerLost as error:
                now_s = self._clock.now_s()
                self._patience = self._patience.after(now_s, now_s - started_s)
                log.warning("weights.peer_lost", extra={"run_id": run_id, "error": str(error)})
        return None

    def _in_order(self, holders: Sequence[Holder], above: int) -> list[Holder]:
        others = [each for each in holders if each.address and each.holder_id != self._own_id and each.version > above]
        shares = {each.holder_id: crc32(f"{self._own_id} {each.holder_id}".encode()) for each in others}
        return sorted(others, key=lambda each: (-each.version, shares[each.holder_id]))[:PEER_COUNT_MAX]


async def stage_snapshot(
    sources: Sequence[VersionSource], store: WeightStore, layout: Layout, *, run_id: str, above: int
) -> tuple[WeightManifest, Staged, Head] | None:
    """Fetch a version above `above` from the first source that has one, staged for a commit.

    Returns:
        The manifest, the staged version, and the head as it was after the fetch; None if no source has one.

    Raises:
        BrokerError: the store could not be asked.
    """
    for source in sources:
        try:
            found = await source.version_above(run_id, layout, above)
            if found is None:
                continue
            manifest, bits = found
            layout.check_run(manifest.tensors)
            sums = await asyncio.to_thread(check_state, manifest, bits)
        except FabricError as error:
            log.warning("weights.source_failed", extra={"run_id": run_id, "error": str(error)})
            continue
        head = await store.head(run_id)
        if manifest.run_id == run_id and manifest.version > above and await _is_of_line(store, manifest, head):
            return manifest, Staged(manifest.version, {name: (None, each) for name, each in bits.items()}, sums), head
    return None


async def _is_of_line(store: WeightStore, manifest: WeightManifest, head: Head) -> bool:
    names = [name for name in await store.held(manifest.run_id) if name[0] == manifest.version]
    known = [each for each in await store.manifests(manifest.run_id, names) if each is not None]
    if known:
        return manifest.version <= head.version and all(np.array_equal(each.sums, manifest.sums) for each in known)
    return manifest.version < head.version or (manifest.version, manifest.epoch) == (head.version, head.moved_by)
