"""The ranks that publish together, as one. Rank 0 gives orders; every rank, itself too, carries them out on its part.

- One process is a group of one: it sends no messages, and raises errors as they are.
- No weights pass between ranks. Ranks say which parts they hold; rank 0 says who publishes which. Each sends a
  manifest of its part, which rank 0 joins.
- Ranks may name different tensors (stages of a pipeline, experts). Together they must hold every element. What several
  ranks hold alike is published by one of them, by turns, so that replicas share the work.
- Threads read the trainer's tensors, and have ended when `publish` has (borrowing.py).
- A rank answers with its error, so no other rank waits in vain. The error that rank 0 raises names the rank.
- Every order says at which version the copies are; so the other ranks advance theirs when rank 0 has.
- Memory: on each rank a copy of its own part, and its part of the encoded version.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...fabric.contract.errors import FabricError, LayoutMismatch, WeightError
from ...fabric.format.codec import Bits
from ...fabric.format.kernels.protocol import Flat
from ...fabric.format.layout import Layout, TensorSpec
from ...fabric.format.manifest import BlockRow, WeightManifest
from ...fabric.format.regions import Region, cut_digest
from ...fabric.ports.weights import WeightStore
from ...fabric.rules.weights.chain import DELTA, KEYFRAME
from ...fabric.rules.weights.publish import version_number
from ...fabric.versions.rank_parts import check_regions
from ...fabric.versions.snapshot import THREAD_COUNT_MAX, Check, Identity, Prepared, Snapshot, packed
from .borrowing import in_thread
from .messages import RankMessage, heard, rebuilt, said, told
from .tensors import ComparesOn, Held, Named, Parts, hold

if TYPE_CHECKING:
    from .exchange import RankExchange  # loads torch

log = logging.getLogger(__name__)

Order = Mapping[str, Any]
WIDTH = len(Region._fields)


class Ranks:
    """The copies of the weights that all ranks hold, and versions made from them; on each rank, one of these.

    Args:
        exchange: with the other ranks; None: there are no others.
        thread_count: how many blocks a rank encodes at a time; by default an even share of the processors.
        dtype: of floating-point tensors; "": their own.

    Attributes:
        version: of the copies; -1: there are none.
        parts: this rank's, from the trainer, while it publishes.
    """

    def __init__(
        self,
        store: WeightStore,
        exchange: RankExchange | None,
        *,
        compares_on: ComparesOn,
        thread_count: int | None = None,
        dtype: str = "",
    ) -> None:
        self.version = -1
        self.parts: Parts | None = None
        self._store = store
        self._exchange = exchange
        self._rank, self._size = (0, 1) if exchange is None else (exchange.rank, exchange.size)
        self._compares_on: ComparesOn = compares_on
        self._dtype = dtype
        share = max(1, (os.cpu_count() or 1) // self._size)
        self._thread_count = thread_count or min(THREAD_COUNT_MAX, share)
        self._snapshot: Snapshot | None = None
        self._own: Prepared | None = None  # on ranks other than 0: its part of the version prepared last
        self._held: Held | None = None  # by this rank, from the trainer, while it publishes
        self._met: Sharing | None = None  # as this publish has it
        self._said: list[tuple[Any, bytes]] = []  # by each rank, when all were told what they share
        self._share: tuple[Layout, list[Region]] = Layout(()), []  # of this rank
        self._begun: Sharing | None = None  # and as the copies have
        self._firsts: list[int] = []  # of the version prepared last: each rank's first chunk
        self._cut = ""

    # ---- on every rank

    @property
    def is_lead(self) -> bool:
        """Whether this is rank 0."""
        return self._rank == 0

    @property
    def is_alone(self) -> bool:
        """Whether this rank has the only copy: other ranks listen only while they publish."""
        return self._size == 1

    async def hello(self, named: Named, version: int) -> RankMessage:
        """Find what this rank holds; the message says where it lies, or why there is nothing.

        Raises:
            WeightError: a rank is gone.
        """
        if self._exchange is not None:
            self._exchange.check()

        def collected(check: Check) -> RankMessage:
            number = version_number(version)
            self._held = hold(named, self._compares_on, check, size=self._size, dtype=self._dtype)
            return RankMessage(
                facts={"version": number, "layout": self._held.layout.rows()}, rows=rows_of(self._held.boxes)
            )

        found = await self._outcome(partial(in_thread, collected))
        return found if isinstance(found, RankMessage) else said(found)

    def let_go(self) -> None:
        """Forget the trainer's tensors: a publish has ended."""
        self._held = self.parts = None

    def interrupt(self) -> None:
        """End this publish and all later ones: a late message of this one would be taken for one of the next."""
        if self._exchange is None:
            return
        self._exchange.lost = f"rank {self._rank} was interrupted while publishing: start the ranks again"
        if self.is_lead:  # no need to wait: the others may be gone
            error = WeightError(self._exchange.lost)
            asyncio.get_running_loop().run_in_executor(None, self._tell_now, {"do": "end", **told(error)})

    async def follow(self, hello: RankMessage) -> dict[str, Any]:
        """Carry out orders until rank 0 ends the publish; return the fields of its report.

        Raises:
            FabricError: rank 0 raised it, or is gone.
        """
        assert self._exchange is not None
        exchange = self._exchange
        await asyncio.to_thread(exchange.send, hello)
        while True:
            message = await asyncio.to_thread(exchange.receive)
            order = {**message.facts, "rows": message.rows}
            own, snapshot = self._own, self._snapshot
            if own is not None and snapshot is not None and own.manifest.version == order["at"] != snapshot.version:
                snapshot.advance(own)
            if order["do"] == "end":
                return self._ended(order)
            work = partial(self._put_own, order) if order["do"] == "put" else partial(in_thread, self._work_of(order))
            result = await self._outcome(work)
            self._own = result if isinstance(result, Prepared) else self._own
            await asyncio.to_thread(exchange.send, said(result))

    def _ended(self, order: Order) -> dict[str, Any]:
        assert self._exchange is not None
        if "error" in order:
            self._exchange.lost = self._exchange.lost or order["lost"]
            raise rebuilt(order)
        report: dict[str, Any] = order["report"]
        return report

    async def _outcome(self, work: Callable[[], Awaitable[Any]]) -> Any:
        """Return the result of `work`; where other ranks wait for it, also return an error."""
        try:
            return await work()
        except Exception as error:  # the lead gets it as this rank's answer, and ends the publish on all
            if self._exchange is None:
                raise
            log.warning("weights.rank_failed", exc_info=True, extra={"rank": self._rank})
            return error if isinstance(error, FabricError) else WeightError(f"{type(error).__name__}: {error}")

    def _work_of(self, order: Order) -> Callable[[Check], Any]:
        """The function that carries out an order on this rank's part."""

        def work(check: Check) -> Prepared | bool | None:
            if order["do"] == "share":
                assert self._held is not None
                if order["layout"] is not None:
                    self._share = Layout.from_rows(order["layout"]), boxes_of(order["rows"])
                self.parts = self._held.parts(*self._share, check)
                return None
            do, parts = order["do"], self.parts
            if do == "begin":
                assert parts is not None
                self._snapshot = self._copied(parts.layout, parts.bits, -1)
                return None
            assert self._snapshot is not None
            if do == KEYFRAME:
                identity = Identity(**order["identity"])
                return self._snapshot.prepare_keyframe(identity, check, finite_over=order["finite_over"])
            assert parts is not None
            if do == DELTA:
                identity = Identity(**order["identity"])
                return self._snapshot.prepare_delta(identity, parts.bits, check, finite_over=order["finite_over"])
            return self._snapshot.equals(parts.bits, check)

        return work

    def _copied(self, layout: Layout, bits: Mapping[str, Bits], version: int) -> Snapshot:
        """Copy bits of this rank's part to where the trainer's bits are."""
        assert self.parts is not None
        boxes, beside = self.parts.boxes, self.parts.bits
        return Snapshot(layout, bits, version, boxes=boxes, beside=beside, thread_count=self._thread_count)

    async def _put_own(self, order: Order) -> None:
        own = self._own
        assert own is not None and own.manifest.version == order["version"]
        # Only the part of the whole manifest that says where its chunks lie.
        stub = replace(own.manifest, chunk_bytes=np.zeros(order["chunk_count"], dtype=np.int32))
        await self._store.put_chunks(stub, order["firsts"][self._rank], own.chunks)

    # ---- on rank 0

    async def meet(self, hello: RankMessage) -> tuple[int, Layout]:
        """Gather all ranks; require that they publish one version of one model, and hold all of it; return both.

        Raises:
            FabricError: they do not, or a rank has failed or is gone; names it.
        """
        hellos = [hello, *await self._gathered()]
        self._require([heard(message) for message in hellos])
        words = [message.facts["version"] for message in hellos]
        other = next((rank for rank, word in enumerate(words) if word != words[0]), None)
        if other is not None:
            raise LayoutMismatch(
                f"rank {other} publishes version {words[other]}, rank 0 {words[0]}: all must publish the same",
                ranks=[other],
            )
        said = [(message.facts["layout"], message.rows.tobytes()) for message in hellos]
        if self._met is None or said != self._said:  # else all ranks know what they share
            self._met = await in_thread(lambda _: _met(hellos))
            self._said = []
            await self._all({"do": "share", "layout": self._met.layout.rows()}, rows=self._met.boxes)
            self._said = said
        else:
            await self._all({"do": "share", "layout": None})
        assert self.parts is not None
        return hello.facts["version"], self.parts.layout

    @property
    def is_regrouped(self) -> bool:
        """Whether the ranks' parts differ from those of the copies."""
        return self._begun != self._met

    @property
    def copies(self) -> tuple[Layout, Mapping[str, Flat]]:
        """This rank's copies, where `version` says that there are some; only to be read."""
        assert self.version >= 0 and self._snapshot is not None
        return self._snapshot.layout, self._snapshot.bits

    def forget(self) -> None:
        """Note that the copies differ from the receivers' weights: call `begin` before the next version."""
        self.version = -1

    async def begin(self) -> None:
        """Have every rank copy the trainer's part."""
        assert self.parts is not None and self._met is not None
        self.forget()
        await self._all({"do": "begin"})
        self._begun = self._met
        self._cut = cut_digest(packed(self.parts.layout, [box for boxes in self._met.boxes for box in boxes]))

    async def resume(self, layout: Layout, bits: Mapping[str, Bits], version: int) -> None:
        """Begin with bits that a store holds, instead of the trainer's; there are no other ranks."""
        assert self.is_alone
        self._snapshot = await in_thread(lambda _: self._copied(layout, bits, version))
        self._begun, self.version = self._met, version

    async def prepare(self, identity: Identity, kind: str, *, finite_over: int | None = None) -> Prepared:
        """Make a version ready to be sent. DELTA: the trainer's parts against the copies; KEYFRAME: the copies.

        finite_over: the live version (-1: none), over which only finite values may be published; None: any may.

        Raises:
            WeightsNotFinite: a new value is NaN or infinite, and may not be.
        """
        facts = {"run_id": identity.run_id, "epoch": identity.epoch, "version": identity.version}
        own, *others = await self._all({"do": kind, "identity": facts, "finite_over": finite_over})
        assert isinstance(own, Prepared)
        manifests = [own.manifest, *others]
        counts = [len(manifest.chunk_bytes) for manifest in manifests]
        self._firsts = [sum(counts[:rank]) for rank in range(len(counts))]
        return replace(own, manifest=joined(manifests, self._cut)) if others else own

    async def is_same(self) -> bool:
        """Whether every rank's part equals its copy."""
        return all(await self._all({"do": "compare"}))

    async def put(self, prepared: Prepared) -> None:
        """Have every rank send its chunks of the version prepared last. If all chunks are here, send those alone."""
        manifest, count = prepared.manifest, len(prepared.manifest.chunk_bytes)
        own = partial(self._store.put_chunks, manifest, 0, prepared.chunks)
        order = {"do": "put", "version": manifest.version, "chunk_count": count, "firsts": self._firsts}
        await (own() if len(prepared.chunks) == count else self._all(order, own))

    def advance(self, prepared: Prepared) -> None:
        """Become the version that was prepared; the other ranks follow at the next order."""
        assert self._snapshot is not None
        self.forget()  # if this is interrupted, the copy is neither the head nor the version before
        self._snapshot.advance(prepared)
        self.version = prepared.manifest.version

    async def end(self, ending: Mapping[str, Any] | Exception) -> None:
        """Tell the other ranks how the publish ended: with the report's fields, or an error."""
        facts = told(ending) if isinstance(ending, Exception) else {"report": ending}
        await self._tell({"do": "end", **facts})

    async def _all(
        self, order: Order, own: Callable[[], Awaitable[Any]] | None = None, rows: Sequence[Sequence[Region]] = ()
    ) -> list[Any]:
        """Have every rank carry out an order, this one by `own` if given; return their results, by rank.

        rows: of each rank, sent to it with the order.

        Raises:
            FabricError: a rank failed, or is gone; names it.
        """
        await self._tell(order, rows)
        mine = {**order, "rows": rows_of(rows[self._rank])} if rows else order
        results = [await self._outcome(own or partial(in_thread, self._work_of(mine)))]
        results += [heard(message) for message in await self._gathered()]
        self._require(results)
        return results

    async def _tell(self, order: Order, rows: Sequence[Sequence[Region]] = ()) -> None:
        if self._exchange is not None:
            await asyncio.to_thread(self._tell_now, order, rows)

    def _tell_now(self, order: Order, rows: Sequence[Sequence[Region]] = ()) -> None:
        assert self._exchange is not None
        facts = {**order, "at": self.version, "lost": self._exchange.lost}
        own = (lambda rank: rows_of(rows[rank])) if rows else None
        self._exchange.tell(RankMessage(facts=facts, rows=rows_of(())), own)

    async def _gathered(self) -> list[RankMessage]:
        return [] if self._exchange is None else await asyncio.to_thread(self._exchange.gather)

    def _require(self, results: Sequence[Any]) -> None:
        """Raise the first error of a rank, if any."""
        for rank, result in enumerate(results):
            if isinstance(result, FabricError):
                raise type(result)(f"rank {rank}: {result.message}", ranks=[rank])


def _met(hellos: Sequence[RankMessage]) -> Sharing:
    """What every rank publishes of what all said that they hold. Raises LayoutMismatch."""
    layouts = [Layout.from_rows(message.facts["layout"]) for message in hellos]
    shared = share([(layout, boxes_of(message.rows)) for layout, message in zip(layouts, hellos, strict=True)])
    check_regions(shared.layout, [box for boxes in shared.boxes for box in boxes])
    return shared


def joined(manifests: Sequence[WeightManifest], cut: str) -> WeightManifest:
    """Join the manifests of a version's parts, by rank; their chunks lie in that order. cut: of all parts."""
    rows: list[BlockRow] = []
    first = 0
    for manifest in manifests:
        rows += [row._replace(chunk=row.chunk + first) for row in manifest.rows]
        first += len(manifest.chunk_bytes)
    return replace(
        manifests[0],
        cut_digest=cut,
        blocks=np.array(rows, dtype=np.int64).reshape(-1),
        block_digests=np.concatenate([each.block_digests for each in manifests]),
        chunk_bytes=np.concatenate([each.chunk_bytes for each in manifests]),
        chunk_digests=[digest for each in manifests for digest in each.chunk_digests],
        chunk_hashes=[digest for each in manifests for digest in each.chunk_hashes],
        payload_bytes=sum(each.payload_bytes for each in manifests),
        sums=np.sum([each.sums for each in manifests], axis=0, dtype=np.uint64),
        changed_count=sum(each.changed_count for each in manifests),
    )


class Sharing(NamedTuple):
    """What every rank publishes. layout: of all ranks. boxes: by rank, numbered in it, in its order."""

    layout: Layout
    boxes: list[list[Region]]


def share(held: Sequence[tuple[Layout, Sequence[Region]]]) -> Sharing:
    """Join what the ranks hold, each by its own layout.

    Raises:
        LayoutMismatch: two ranks hold a tensor in different shapes or dtypes; names both.
    """
    first: dict[str, tuple[int, TensorSpec]] = {}
    for rank, (layout, _) in enumerate(held):
        for spec in layout.tensors:
            other, known = first.setdefault(spec.name, (rank, spec))
            if known != spec:
                raise LayoutMismatch(
                    f"rank {rank} publishes tensor {spec}, rank {other} {known}: all must publish the same model",
                    ranks=[rank],
                )
    joined = Layout(tuple(spec for _, spec in first.values()))
    numbers = {spec.name: number for number, spec in enumerate(joined.tensors)}
    holders: dict[Region, list[int]] = {}
    for rank, (layout, boxes) in enumerate(held):
        for box in boxes:
            own = box._replace(tensor=numbers[layout.tensors[box.tensor].name])
            holders.setdefault(own, []).append(rank)
    mine: list[list[Region]] = [[] for _ in held]
    for box in sorted(holders):
        ranks = holders[box]
        mine[ranks[box.tensor % len(ranks)]].append(box)
    return Sharing(joined, mine)


def rows_of(boxes: Sequence[Region]) -> NDArray[np.int64]:
    """Return boxes as int64 (P * 5,), to be sent."""
    return np.array(boxes, dtype=np.int64).reshape(-1)


def boxes_of(rows: NDArray[np.int64]) -> list[Region]:
    """Read boxes out of `rows_of`."""
    return [Region(*row) for row in rows.reshape(-1, WIDTH).tolist()]
