"""Publishing by shards: every rank of a trainer encodes and sends its own part, and together they are one version.

- No weights pass between ranks: what does is rows, digests and sums of their parts, by way of rank 0.
- Rank 0 leads. It runs the ordinary publisher (publisher.py), whose snapshot and store here stand for those of all
  ranks; the others do what it says until it says that the version is out, or why it is not. Every rank gets that
  answer.
- The manifest is written and the head moved by rank 0, after every rank has sent its chunks. A rank that fails, or
  dies, before that leaves the head where it was, and the error names it.
- The result is an ordinary version: readers see neither ranks nor shards, but for how tensors are cut.
- A job that starts again begins with a keyframe.
- Memory: on each rank a copy of its own part, and its part of the encoded version.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

import numpy as np
import torch.distributed as dist

from ...fabric.contract.errors import InputError, LayoutMismatch, WeightError
from ...fabric.format.codec import Bits
from ...fabric.format.layout import Layout
from ...fabric.format.manifest import Head, WeightManifest
from ...fabric.format.regions import Region, cut_digest, cut_region
from ...fabric.ports.weights import WeightStore
from ...fabric.rules.weights.chain import DELTA, KEYFRAME
from ...fabric.versions.rank_parts import check_regions
from ...fabric.versions.snapshot import (
    THREAD_COUNT_MAX,
    Check,
    Identity,
    Place,
    Prepared,
    Snapshot,
    make_manifest,
    no_check,
)
from .publisher import Publisher
from .rank_exchange import RankExchange, RankMessage
from .rank_member import Member, Share, require, told
from .report import PublishReport
from .tensors import Named

T = TypeVar("T")
log = logging.getLogger(__name__)


class ShardedPublisher:
    """Publishes versions of one run from all ranks of a trainer; each rank makes one, and calls `publish` alike.

    Args:
        group: of the ranks that hold the model together; None: all.
        shard_count: of the run; every shard learns the head.
        timeout_s: how long rank 0 waits for a rank.
        thread_count: how many blocks a rank encodes at a time; by default an even share of the processors.
        model: as Publisher's.
    """

    def __init__(
        self,
        store: WeightStore,
        run_id: str,
        shard_count: int = 1,
        *,
        group: dist.ProcessGroup | None = None,
        timeout_s: float = 300.0,
        thread_count: int | None = None,
        model: str | None = None,
    ) -> None:
        self._exchange = RankExchange(group, timeout_s=timeout_s)
        own = thread_count or min(THREAD_COUNT_MAX, max(1, (os.cpu_count() or 1) // self._exchange.size))
        self._member = Member(store, self._exchange, own)
        self._lead = _Lead(store, run_id, shard_count, self._member, model) if self._exchange.rank == 0 else None

    @property
    def rank_bytes(self) -> int:
        """What this rank has sent to other ranks so far."""
        return self._exchange.sent_bytes

    async def publish(self, named: Named, version: int, *, keyframe: bool = False) -> PublishReport:
        """Make `named` the run's version `version`, together with all other ranks. keyframe: as rank 0 says.

        Args:
            named: name → tensor, or pairs; the same names on every rank. DTensors by their own shards; other torch
                tensors are the same on every rank, and one of these publishes them.
            version: the same on every rank; above the head.

        Raises:
            As Publisher.publish, the same on every rank. WeightError also: a rank is gone.
        """
        self._exchange.check()
        try:
            hello = await self._member.collect(named, version)
            if self._lead is not None:
                return await self._lead.publish_all(hello, keyframe=keyframe)
            return await self._member.serve(hello)
        except asyncio.CancelledError:
            # A thread may still wait for a message that belongs to this publish, and would take one of the next.
            self._exchange.lost = f"rank {self._exchange.rank} was interrupted while publishing: start the ranks again"
            raise
        finally:
            await self._member.give_back()

    def start(self) -> None:
        """As Publisher.start, on rank 0; what takes the other ranks' copies, a keyframe, waits for the next publish."""
        if self._lead is not None:
            self._lead.start()

    async def close(self) -> None:
        """As Publisher.close."""
        if self._lead is not None:
            await self._lead.close()


class _Ranks(Snapshot):
    """The snapshot of all ranks together, as the publisher on rank 0 sees it. `bits` are given to each rank by itself.

    Every order says which version the snapshot is at; so the others' parts advance when this one has.
    """

    def __init__(self, member: Member, layout: Layout, regions: Sequence[Region]) -> None:
        self.layout = layout
        self.version = -1
        self.sums = np.zeros(len(layout.tensors), dtype=np.uint64)
        self.prepared: WeightManifest | None = None
        self._firsts: list[int] = []
        self._member = member
        self._cut = cut_digest(regions)
        self.order({"do": "begin"})

    def prepare_delta(self, identity: Identity, new: Mapping[str, Bits], check: Check = no_check) -> Prepared:
        """The version `identity` as what differs between each rank's weights and its copy."""
        return self._prepare(identity, DELTA)

    def prepare_keyframe(self, identity: Identity, check: Check = no_check) -> Prepared:
        """The weights of all ranks' copies, as version `identity`."""
        return self._prepare(identity, KEYFRAME)

    def equals(self, other: Mapping[str, Bits], check: Check = no_check) -> bool:
        """Whether every rank's weights are its copy."""
        return all(message.facts["is_equal"] for message in self.order({"do": "compare"}))

    def advance(self, prepared: Prepared) -> None:
        """Become the version that was prepared; the others follow at the next order."""
        self.sums = prepared.manifest.sums
        self.version = prepared.manifest.version
        self._member.follow(self.version)

    def order(self, facts: Mapping[str, Any]) -> list[RankMessage]:
        """Have every rank do something, this one too; their answers, by rank.

        Raises:
            FabricError: a rank failed, or is gone; named.
        """
        exchange = self._member.exchange
        exchange.tell(RankMessage(facts={**facts, "at": self.version}))
        answers = [self._member.work(facts), *exchange.gather()]
        require(answers)
        return answers

    async def put(self, manifest: WeightManifest) -> None:
        """Have every rank send its chunks of the version prepared last.

        Raises:
            FabricError: as `order`.
        """
        identity = {"run_id": manifest.run_id, "epoch": manifest.epoch, "version": manifest.version}
        chain = {"kind": manifest.kind, "base_version": manifest.base_version}
        facts = {"do": "put", **identity, **chain, "chunk_count": len(manifest.chunk_bytes), "firsts": self._firsts}
        exchange = self._member.exchange
        await asyncio.to_thread(exchange.tell, RankMessage(facts={**facts, "at": self.version}))
        own = await self._member.put(facts)
        require([own, *await asyncio.to_thread(exchange.gather)])

    def _prepare(self, identity: Identity, kind: str) -> Prepared:
        is_first = self.version < 0
        has_sums = is_first or kind == DELTA
        facts = {"do": "encode", "kind": kind, "version": identity.version, "has_sums": has_sums}
        parts = [Share(message) for message in self.order(facts)]
        sums = self.sums
        if has_sums:
            sums = sums + np.sum([part.sums for part in parts], axis=0, dtype=np.uint64)
        base_version = -1 if kind == KEYFRAME else self.version
        place = Place(kind=kind, base_version=base_version, sums=sums)
        counts = [len(part.chunk_bytes) for part in parts]
        self._firsts = [sum(counts[:rank]) for rank in range(len(counts))]
        rows = [
            row._replace(chunk=row.chunk + first)
            for part, first in zip(parts, self._firsts, strict=True)
            for row in part.rows
        ]
        own = self._member.part  # the first in every list
        self.prepared = replace(
            make_manifest(identity, self.layout, own, place, cut=self._cut),
            blocks=np.array(rows, dtype=np.int64).reshape(-1),
            block_digests=np.array([digest for part in parts for digest in part.digests], dtype=np.uint64),
            chunk_bytes=np.array([size for part in parts for size in part.chunk_bytes], dtype=np.int32),
            chunk_digests=[digest for part in parts for digest in part.chunk_digests],
            chunk_hashes=[digest for part in parts for digest in part.chunk_hashes],
            payload_bytes=sum(sum(part.chunk_bytes) for part in parts),
            changed_count=sum(row.changed_count for row in rows),
        )
        return Prepared(self.prepared, own.chunks, [])


class _RanksStore:
    """The store as the publisher on rank 0 sees it: when it puts a version of all ranks, every rank puts its part."""

    def __init__(self, store: WeightStore) -> None:
        self._store = store
        self.ranks: _Ranks | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def put_chunks(self, manifest: WeightManifest, first_index: int, chunks: Sequence[bytes]) -> None:
        """As WeightStore."""
        if self.ranks is not None and manifest is self.ranks.prepared:
            await self.ranks.put(manifest)
        else:
            await self._store.put_chunks(manifest, first_index, chunks)


class _Lead(Publisher):
    """The publisher on rank 0."""

    def __init__(self, store: WeightStore, run_id: str, shard_count: int, member: Member, model: str | None) -> None:
        self._ranks_store = _RanksStore(store)
        super().__init__(cast(WeightStore, self._ranks_store), run_id, shard_count, model=model)
        self._member = member
        self._rows: list[bytes] = []
        self._regions: list[Region] = []

    async def publish_all(self, hello: RankMessage, *, keyframe: bool = False) -> PublishReport:
        """One publish of all ranks; says to the others how it ended."""
        exchange = self._member.exchange
        ending, is_interrupted = told(WeightError("rank 0 was interrupted")), False
        try:
            hellos = [hello, *await asyncio.to_thread(exchange.gather)]
            await asyncio.to_thread(self._meet, hellos)
            report = await self.publish({}, _version(hellos), keyframe=keyframe)
            ending = {"report": {name: getattr(report, name) for name in PublishReport.__slots__}}
            return report
        except Exception as error:
            ending = told(error)
            raise
        except asyncio.CancelledError:
            is_interrupted = True
            raise
        finally:
            ranks = self._ranks_store.ranks
            at = -1 if ranks is None else ranks.version
            facts = {"do": "end", "at": at, "lost": exchange.lost, **ending}
            telling = asyncio.get_running_loop().run_in_executor(None, exchange.tell, RankMessage(facts=facts))
            if not is_interrupted:  # else the others may be gone, and who interrupted does not wait for that
                await telling

    def _meet(self, hellos: Sequence[RankMessage]) -> None:
        """All ranks mean the same version of the same model, and together hold all of it."""
        require(hellos)
        for what in ("version", "layout"):
            said = [str(message.facts[what]) for message in hellos]
            other = next((rank for rank, word in enumerate(said) if word != said[0]), None)
            if other is not None:
                raise LayoutMismatch(
                    f"rank {other} publishes {what} {said[other]}, rank 0 {said[0]}: all must publish the same",
                    ranks=[other],
                )
        shards = self._member.shards
        assert shards is not None
        rows = [message.rows.tobytes() for message in hellos]
        if rows == self._rows:
            return
        self._snapshot = self._pending = self._report = None  # of other parts than the ranks hold now
        width = len(Region._fields)
        boxes = [Region(*row) for message in hellos for row in message.rows.reshape(-1, width).tolist()]
        check_regions(shards.layout, boxes)
        self._regions = [region for box in boxes for region in cut_region(box, shards.layout.tensors[box.tensor])]
        self._rows = rows

    async def _in_thread(self, work: Callable[[Check], T]) -> T:
        """A thread may be left behind: it waits for other ranks, and what it reads is the member's to guard."""
        return await asyncio.to_thread(work, no_check)

    def _collect(self, named: Named, check: Check) -> tuple[Layout, dict[str, Bits]]:
        assert self._member.shards is not None
        return self._member.shards.layout, self._member.shards.bits

    def _begin(self, layout: Layout, bits: Mapping[str, Bits]) -> Snapshot:
        self._ranks_store.ranks = _Ranks(self._member, layout, self._regions)
        return self._ranks_store.ranks

    async def _resumed(self, head: Head) -> Snapshot | None:
        return None

    def _sound_snapshot(self) -> Snapshot | None:
        """None: between two publishes the other ranks do not listen."""
        return None


def _version(hellos: Sequence[RankMessage]) -> int:
    version = hellos[0].facts["version"]
    if not isinstance(version, int):
        raise InputError(f"version is {version}, expected a whole number above the head's", version=version)
    return version
