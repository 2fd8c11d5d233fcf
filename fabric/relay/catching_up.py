"""Catching up by a fold: a receiver far behind gets what it is missing as one version, made for it by a relay.

- What the version is, its tensors, sums and epoch, is taken from the broker's manifest of it; from the relay only
  blocks and their digests. A relay that lies or errs is found out by the sums before anything is written.
- Whatever fails, the receiver takes the ordinary way, and asks nobody for retry_s. A relay that is too slow fails.
  What failures take is bounded by rules/patience.py.
- Chunks go through the node's cache, so the processes of a node fetch a fold once, together.

Whether it is worth it, and whom to ask, is decided in rules/catch_up.py; who folds, in folding.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from ..clock import Clock, SystemClock
from ..errors import FabricError, PeerLost, WireError
from ..ports_weights import WeightStore
from ..rules.catch_up import is_worth_asking, whom_to_ask
from ..rules.chain import FOLD
from ..rules.patience import FAIR_BYTES_PER_S, Patience
from ..weights.chain import ChainReader
from ..weights.manifest import BROKER, Holder, WeightManifest
from ..weights.stage import Stage, Staged
from .cache import ChunkCache, chunk_name
from .client import Connection, RelayClient
from .frames import Word
from .options import RelayOptions
from .parents import Parents
from .passing import PassingStore
from .store import RelayedStore

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class CatchUpOptions:
    """When a receiver asks for a fold, and how long it waits. Each field is above 0."""

    saved_bytes_min: int = 16 << 20
    """Bytes that a fold must spare, by an estimate, to be worth a relay's time."""
    wait_s: float = 60.0
    """Longest wait for relays to refuse or to fold; the engine generates meanwhile."""
    bytes_per_s_min: float = FAIR_BYTES_PER_S
    """A relay that sends less is given up: wait_s, and what the fold takes at this rate."""
    retry_s: float = 60.0
    """After a failure nobody is asked for this long."""


class CatchUp:
    """Folds for one receiver.

    Args:
        store: the broker's; holders are looked up there.
        me: who the receiver is; its node and region count.
        cache: the node's. parents: the relays above it, which may have a fold's chunks already.
        home_region: where the broker is.
    """

    def __init__(
        self,
        store: WeightStore,
        me: Holder,
        *,
        cache: ChunkCache | None = None,
        parents: Parents | None = None,
        home_region: str = "",
        options: CatchUpOptions | None = None,
        relay_options: RelayOptions | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._store = store
        self._me = me
        self._cache = cache
        self._parents = parents
        self._home_region = home_region
        self._options = options or CatchUpOptions()
        self._relay_options = relay_options or RelayOptions()
        self._clock = clock or SystemClock()
        self._idle_until_s = self._clock.now_s()
        self._patience = Patience(self._clock.now_s())

    async def stage(
        self, way: Sequence[WeightManifest], make_stage: Callable[[], Stage]
    ) -> tuple[WeightManifest, Staged] | None:
        """A fold of `way`, staged and verified, with its manifest; None: take the way itself.

        Args:
            way: manifests as `ChainReader.plan` gives them.
            make_stage: a new stage over the live weights, which are the base of the way's first.
        """
        started_s = self._clock.now_s()
        if started_s < self._idle_until_s or not self._patience.is_left(started_s):
            return None
        try:
            if not await self._is_worth_asking(way):
                return None
            async with asyncio.timeout(self._options.wait_s) as limit:
                found = await self._staged(way, make_stage, limit)
        except (FabricError, TimeoutError) as error:
            text = str(error) or "a relay is too slow"
            log.warning("relay.fold_failed", extra={"run_id": way[-1].run_id, "error": text})
            found = None
        if found is None:
            now_s = self._clock.now_s()
            self._patience = self._patience.after(now_s, now_s - started_s)
            self._idle_until_s = now_s + self._options.retry_s
        return found

    async def _is_worth_asking(self, way: Sequence[WeightManifest]) -> bool:
        links = [manifest.link for manifest in way]
        missing_bytes = sum(link.payload_bytes for link in links)
        if not is_worth_asking(links, missing_bytes, saved_bytes_min=self._options.saved_bytes_min):
            return False
        cached_bytes = await asyncio.to_thread(_cached_bytes, self._cache, way)
        return is_worth_asking(links, missing_bytes - cached_bytes, saved_bytes_min=self._options.saved_bytes_min)

    async def _staged(
        self, way: Sequence[WeightManifest], make_stage: Callable[[], Stage], limit: asyncio.Timeout
    ) -> tuple[WeightManifest, Staged] | None:
        run_id = way[-1].run_id
        holders = await self._store.holders(run_id)
        for holder in whom_to_ask(self._me, holders, way[-1].version, home_region=self._home_region):
            try:
                fold = await self._ask(holder.address, way)
            except (PeerLost, WireError) as error:
                log.info("relay.not_folded", extra={"run_id": run_id, "error": str(error)})
                continue
            limit_s = self._options.wait_s + fold.payload_bytes / self._options.bytes_per_s_min
            limit.reschedule(asyncio.get_running_loop().time() + limit_s)
            return fold, await self._fetch(holder.address, fold, make_stage())
        return None

    async def _ask(self, address: str, way: Sequence[WeightManifest]) -> WeightManifest:
        """The manifest of the fold, as far as it is to be trusted.

        Raises:
            PeerLost: the relay is gone, refuses, or folds too slowly. WireError: it sent something else.
        """
        goal, base_version = way[-1], way[0].base_version
        request = {"run_id": goal.run_id, "base_version": base_version, "version": goal.version, "epoch": goal.epoch}
        connection = await Connection.open(address, replace(self._relay_options, patience_s=self._options.wait_s))
        try:
            await connection.ask_json(Word.FOLD, request)
            fold = _trusted(goal, base_version, WeightManifest.decode(await connection.answer(Word.FOLDED)))
        finally:
            connection.close()
        if fold.payload_bytes >= sum(manifest.payload_bytes for manifest in way):
            raise PeerLost(f"a fold of {fold.payload_bytes:,} bytes spares nothing")
        return fold

    async def _fetch(self, address: str, fold: WeightManifest, stage: Stage) -> Staged:
        client = RelayClient(address, self._relay_options)
        store = RelayedStore(
            _FromRelay(self._store, client),
            self._cache,
            parents=self._parents,
            options=self._relay_options,
            clock=self._clock,
        )
        try:
            return await ChainReader(store, fold.run_id).stage([fold], stage)
        finally:
            client.close()


class _FromRelay(PassingStore):
    """A store whose chunks one relay has."""

    def __init__(self, inner: WeightStore, client: RelayClient) -> None:
        super().__init__(inner)
        self._client = client

    async def chunks(self, manifest: WeightManifest, indices: Sequence[int]) -> list[bytes | None]:
        found: dict[int, bytes | None] = {}
        async with aclosing(self._client.chunks(manifest, indices)) as arriving:
            async for index, data in arriving:
                found[index] = data
        return [found[index] for index in indices]


def _trusted(goal: WeightManifest, base_version: int, said: WeightManifest) -> WeightManifest:
    """A fold that leads to the broker's `goal`: of what a relay said only where the blocks lie and what they are.

    Raises:
        WireError: they cannot be.
    """
    fold = replace(
        goal,
        base_version=base_version,
        kind=FOLD,
        codec=said.codec,
        blocks=said.blocks,
        block_digests=said.block_digests,
        chunk_bytes=said.chunk_bytes,
        chunk_digests=said.chunk_digests,
        hash_name=said.hash_name,
        chunk_hashes=said.chunk_hashes,
        payload_bytes=int(said.chunk_bytes.sum()),
        carrier=BROKER,
        of_entropy_floor=0.0,
    )
    fold.check()
    if not fold.has_proofs:
        raise WireError("a fold came without hashes: upgrade its maker")
    for index in range(len(fold.chunk_bytes)):
        chunk_name(fold, index)
    return replace(fold, changed_count=sum(row.changed_count for row in fold.rows))


def _cached_bytes(cache: ChunkCache | None, way: Sequence[WeightManifest]) -> int:
    """Of the chunks of a way, how many bytes the node has."""
    if cache is None:
        return 0
    names = [chunk_name(manifest, index) for manifest in way for index in range(len(manifest.chunk_bytes))]
    return sum(name.size for name in names if cache.has(name))
