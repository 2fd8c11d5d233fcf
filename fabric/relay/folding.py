"""Folding on demand: what leads a receiver far behind to a version, made into one by a relay that has it at hand.

- A fold is never published: it is kept here, bounded in bytes, for as long as it is asked for, and served by digest
  like any other chunk. However many ask for the same one, it is made once.
- Folding needs no weights, and bounded memory beside the result. Where live weights of the wanted version are at hand
  they make it smaller (weights/ranked.py); a block that was not of that version all the while is folded without them.
- Few are made at a time, as it takes a processor from generating; whoever comes meanwhile with another wish is refused,
  and takes the ordinary way.
- Sources may be dropped by the publisher while they are folded: then it is refused, too.

Who asks, and why it need not trust us, is catching_up.py's.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from ..errors import WeightError, WireError
from ..ports_weights import Range
from ..rules.catch_up import SOURCE_BYTES_MAX
from ..rules.chain import FOLD, KEYFRAME, plan
from ..weights.fold import ReadGoal, fold, may_fold
from ..weights.manifest import WeightManifest
from ..weights.snapshot import Identity
from .cache import ChunkName, chunk_name
from .live import SnapshotSource, read_at
from .passing import PassingStore
from .store import RelayedStore

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderOptions:
    """How much a relay folds. Each field is above 0."""

    running_count_max: int = 1
    """Folds made at the same time."""
    kept_bytes_max: int = 256 << 20
    """Of folds that are kept; the newest is, whatever its size."""
    ranked_s: float = 15.0
    """Of a fold, in which live weights make it smaller; what is left then is folded without, as somebody waits."""
    keep_s: float = 120.0
    """A fold that nobody has asked for is forgotten after this long."""


class FoldRequest(NamedTuple):
    """From which version to which. epoch: of the publisher of the latter."""

    run_id: str
    base_version: int
    version: int
    epoch: int

    @classmethod
    def read(cls, facts: Any) -> FoldRequest:
        """A request as it was sent. Raises WireError: it is not one."""
        try:
            return cls(str(facts["run_id"]), int(facts["base_version"]), int(facts["version"]), int(facts["epoch"]))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise WireError(f"not a request for a fold: {error}") from error


@dataclass(slots=True)
class _Fold:
    """A fold that was made: its manifest as it is sent, its chunks, and when to forget it."""

    manifest: bytes
    chunks: dict[ChunkName, bytes]
    timer: asyncio.TimerHandle | None = None

    @property
    def size(self) -> int:
        return sum(name.size for name in self.chunks)


class Folder:
    """Makes folds for one relay.

    Args:
        store: the relay's.
        may_fetch: whether sources that the node's cache lacks may be fetched: where the broker is near. Elsewhere they
            would cost the slow way more than the fold spares.

    Attributes:
        made_count: folds made since the start.
    """

    def __init__(self, store: RelayedStore, *, options: FolderOptions | None = None, may_fetch: bool = True) -> None:
        self.made_count = 0
        self._store = store
        self._sources = store if may_fetch else _CachedOnly(store)
        self._options = options or FolderOptions()
        self._kept: OrderedDict[FoldRequest, _Fold] = OrderedDict()  # least recently used first
        self._running: dict[FoldRequest, asyncio.Task[_Fold]] = {}
        self._live: dict[str, SnapshotSource] = {}

    def offer(self, run_id: str, source: SnapshotSource | None) -> None:
        """Live weights of a run, to fold by from now on; None: no more."""
        if source is None:
            self._live.pop(run_id, None)
        else:
            self._live[run_id] = source

    async def manifest(self, wanted: FoldRequest) -> bytes:
        """The fold's manifest, encoded; its chunks can be had from then on.

        Raises:
            FabricError: it cannot be made here; the text says why.
        """
        kept = self._kept.get(wanted)
        if kept is None:
            kept = await asyncio.shield(self._task(wanted))  # who leaves does not stop it for the others
        self._touch(wanted, kept)
        return kept.manifest

    def chunk(self, name: ChunkName) -> bytes | None:
        """A chunk of a fold that is kept."""
        for wanted, kept in self._kept.items():
            data = kept.chunks.get(name)
            if data is not None:
                self._touch(wanted, kept)
                return data
        return None

    async def close(self) -> None:
        """Stop folding, and forget what was made."""
        tasks = [*self._running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for wanted in [*self._kept]:
            self._forget(wanted)

    def _task(self, wanted: FoldRequest) -> asyncio.Task[_Fold]:
        if wanted not in self._running:
            if len(self._running) >= self._options.running_count_max:
                raise WeightError(f"it folds {len(self._running)} already, as many as it may")
            task = asyncio.create_task(self._make(wanted), name=f"fold {wanted.run_id}")
            self._running[wanted] = task
            task.add_done_callback(lambda done: self._keep(wanted, done))
        return self._running[wanted]

    async def _make(self, wanted: FoldRequest) -> _Fold:
        sources = await self._plan(wanted)
        identity = Identity(run_id=wanted.run_id, epoch=wanted.epoch, version=wanted.version)
        made = await fold(self._sources, identity, FOLD, sources, read_goal=self._goal_of(sources[-1]))
        manifest = made.manifest
        names = [chunk_name(manifest, index) for index in range(len(made.chunks))]
        self.made_count += 1
        facts = {"run_id": wanted.run_id, "policy_version": wanted.version, "base_version": wanted.base_version}
        log.info("relay.folded", extra={**facts, "size_bytes": manifest.payload_bytes})
        return _Fold(manifest.encode(), dict(zip(names, made.chunks, strict=True)))

    def _goal_of(self, manifest: WeightManifest) -> ReadGoal:
        """Reads blocks of that version out of the live weights, as far as they are of it."""
        source = self._live.get(manifest.run_id)
        if source is None or source.layout.digest != manifest.layout_digest:
            return lambda region: None
        loop = asyncio.get_running_loop()
        until_s = loop.time() + self._options.ranked_s
        read = partial(read_at, source, manifest.version)
        return lambda region: read(region) if loop.time() < until_s else None

    async def _plan(self, wanted: FoldRequest) -> list[WeightManifest]:
        """What to fold, in order."""
        run_id, base_version, version = wanted.run_id, wanted.base_version, wanted.version
        held = await self._store.held(run_id)
        names = [name for name in held if base_version < name[0] <= version and name[1] != KEYFRAME]
        found = [each for each in await self._store.manifests(run_id, names) if each is not None]
        known = {each.link: each for each in found}
        sources = [known[link] for link in plan(base_version, version, list(known))]
        what = f"what leads from version {base_version} to {version} of run {run_id!r}"
        if not sources or sources[-1].epoch != wanted.epoch:
            raise WeightError(f"{what} is by another publisher, or nothing")
        if not may_fold(sources):
            raise WeightError(f"{what} was cut differently on the way, so it cannot be folded")
        size = sum(each.payload_bytes for each in sources)
        if size > SOURCE_BYTES_MAX:
            raise WeightError(f"{what} has {size:,} bytes, at most {SOURCE_BYTES_MAX:,} are folded")
        return sources

    def _keep(self, wanted: FoldRequest, task: asyncio.Task[_Fold]) -> None:
        """Keep what was made, and no more in all than there may be."""
        del self._running[wanted]
        if task.cancelled() or task.exception() is not None:
            return
        self._kept[wanted] = task.result()
        self._touch(wanted, task.result())
        while len(self._kept) > 1 and sum(kept.size for kept in self._kept.values()) > self._options.kept_bytes_max:
            self._forget(next(iter(self._kept)))

    def _touch(self, wanted: FoldRequest, kept: _Fold) -> None:
        """It is of use: keep it longer."""
        if kept.timer is not None:
            kept.timer.cancel()
        if wanted in self._kept:
            self._kept.move_to_end(wanted)
            kept.timer = asyncio.get_running_loop().call_later(self._options.keep_s, self._forget, wanted)

    def _forget(self, wanted: FoldRequest) -> None:
        kept = self._kept.pop(wanted, None)
        if kept is not None and kept.timer is not None:
            kept.timer.cancel()


class _CachedOnly(PassingStore):
    """A relay's store that gives only what the node's cache has."""

    def __init__(self, store: RelayedStore) -> None:
        super().__init__(store)
        self._relayed = store

    async def chunk_ranges(self, manifest: WeightManifest, ranges: Sequence[Range]) -> list[bytes | None]:
        indices = sorted({index for index, _, _ in ranges})
        found = await self._relayed.cached([chunk_name(manifest, index) for index in indices])
        whole = dict(zip(indices, found, strict=True))
        parts = [(whole[index], start, length) for index, start, length in ranges]
        return [None if data is None else data[start : start + length] for data, start, length in parts]
