"""One rank's part in publishing together, and what ranks tell one another of it.

- A rank does what rank 0 says (rank_lead.py), one thing after the other, and answers each: with its share, or with what
  went wrong. Nothing that goes wrong on a rank leaves the others waiting.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np

from ...fabric.contract import errors
from ...fabric.contract.errors import FabricError, WeightError
from ...fabric.format.layout import Layout
from ...fabric.format.manifest import BlockRow, WeightManifest, chunk_digest
from ...fabric.ports.weights import WeightStore
from ...fabric.rules.weights.chain import DELTA
from ...fabric.versions.snapshot import Identity, Part, Place, make_manifest
from .borrowing import in_thread
from .rank_exchange import RankExchange, RankMessage
from .rank_shares import LocalShards, LocalSnapshot, collect_shards
from .report import PublishReport
from .tensors import Named

log = logging.getLogger(__name__)


class Member:
    """One rank's part of the work."""

    def __init__(self, store: WeightStore, exchange: RankExchange, thread_count: int) -> None:
        self.exchange = exchange
        self.shards: LocalShards | None = None
        self._store = store
        self._thread_count = thread_count
        self._snapshot: LocalSnapshot | None = None
        self._reading = threading.Lock()  # held while the trainer's memory is read
        self._is_over = True

    async def collect(self, named: Named, version: int) -> RankMessage:
        """What this rank begins with: its parts, or why it has none. They are read until `give_back`."""
        self._is_over = False
        return await in_thread(lambda _: self._collect(named, version))

    async def give_back(self) -> None:
        """Let go of the trainer's memory; a thread that still encodes stops at its next region, and is waited for."""
        self._is_over = True
        await in_thread(lambda _: self._let_go())

    def _let_go(self) -> None:
        with self._reading:
            self.shards = None

    def _check(self) -> None:
        if self._is_over:
            raise WeightError(f"rank {self.exchange.rank} was interrupted while it encoded")

    def _collect(self, named: Named, version: int) -> RankMessage:
        self.shards = None
        try:
            self.shards = collect_shards(named, self.exchange.rank, self.exchange.size)
        except Exception as error:  # an answer in any case: the others wait for it
            log.warning("weights.rank_failed", exc_info=True, extra={"rank": self.exchange.rank})
            return RankMessage(facts=told(error))
        boxes = np.array(self.shards.boxes, dtype=np.int64).reshape(-1)
        is_whole = isinstance(version, (int, np.integer)) and not isinstance(version, bool)
        facts = {"version": int(version) if is_whole else repr(version), "layout": self.shards.layout.digest}
        return RankMessage(facts=facts, rows=boxes)

    async def serve(self, hello: RankMessage) -> PublishReport:
        """Do what rank 0 says, until it says how it ended."""
        await asyncio.to_thread(self.exchange.send, hello)
        while True:
            order = await asyncio.to_thread(self.exchange.receive)
            self.follow(order.facts["at"])
            if order.facts["do"] == "end":
                return self._ended(order.facts)
            work = self.put(order.facts) if order.facts["do"] == "put" else asyncio.to_thread(self.work, order.facts)
            await asyncio.to_thread(self.exchange.send, await work)

    def work(self, facts: Mapping[str, Any]) -> RankMessage:
        """Do one thing with this rank's part; the answer says what came of it, or what went wrong."""
        try:
            with self._reading:
                self._check()
                return self._work(facts)
        except Exception as error:
            log.warning("weights.rank_failed", exc_info=True, extra={"rank": self.exchange.rank})
            return RankMessage(facts=told(error))

    async def put(self, facts: Mapping[str, Any]) -> RankMessage:
        """Send this rank's chunks of what was prepared last; the answer says whether they were."""
        try:
            identity = Identity(run_id=facts["run_id"], epoch=facts["epoch"], version=facts["version"])
            first = facts["firsts"][self.exchange.rank]
            await self._store.put_chunks(_stub(identity, facts), first, self.part.chunks)
            return RankMessage(facts={})
        except Exception as error:
            log.warning("weights.rank_failed", exc_info=True, extra={"rank": self.exchange.rank})
            return RankMessage(facts=told(error))

    def follow(self, version: int) -> None:
        """The head has moved to `version`, or is there still."""
        if self._snapshot is not None:
            self._snapshot.follow(version)

    @property
    def part(self) -> Part:
        """What this rank prepared last."""
        assert self._snapshot is not None
        return self._snapshot.part

    def _work(self, facts: Mapping[str, Any]) -> RankMessage:
        assert self.shards is not None
        if facts["do"] == "begin":
            self._snapshot = LocalSnapshot(self.shards, thread_count=self._thread_count)
            return RankMessage(facts={})
        assert self._snapshot is not None
        if facts["do"] == "compare":
            return RankMessage(facts={"is_equal": self._snapshot.equals(self.shards, self._check)})
        new = self.shards if facts["kind"] == DELTA else None
        part = self._snapshot.encode(facts["version"], new, has_sums=facts["has_sums"], check=self._check)
        return _share(part)

    def _ended(self, facts: Mapping[str, Any]) -> PublishReport:
        if "error" in facts:
            self.exchange.lost = facts["lost"]
            raise _rebuilt(facts)
        return PublishReport(**facts["report"])


class Share:
    """A rank's share of a version, as its message says."""

    def __init__(self, message: RankMessage) -> None:
        width, numbers = len(BlockRow._fields), message.numbers
        self.rows = [BlockRow(*row) for row in message.rows.reshape(-1, width).tolist()]
        self.digests: list[int] = numbers[: len(self.rows)].tolist()
        self.sums = numbers[len(self.rows) :]
        self.chunk_bytes: list[int] = message.facts["chunk_bytes"]
        self.chunk_digests: list[str] = message.facts["chunk_digests"]
        self.chunk_hashes: list[str] = message.facts["chunk_hashes"]


def _share(part: Part) -> RankMessage:
    facts = {
        "chunk_bytes": [len(chunk) for chunk in part.chunks],
        "chunk_digests": [chunk_digest(chunk) for chunk in part.chunks],
        "chunk_hashes": part.hashes,
    }
    numbers = np.concatenate([np.array(part.digests, dtype=np.uint64), part.sums])
    return RankMessage(facts=facts, rows=np.array(part.rows, dtype=np.int64).reshape(-1), numbers=numbers)


def _stub(identity: Identity, facts: Mapping[str, Any]) -> WeightManifest:
    """As much of the manifest as says where its chunks lie."""
    nothing = np.zeros(0, dtype=np.uint64)
    place = Place(kind=facts["kind"], base_version=facts["base_version"], sums=nothing)
    stub = make_manifest(identity, Layout(()), Part([], [], [], [], nothing, []), place, cut="")
    return replace(stub, chunk_bytes=np.zeros(facts["chunk_count"], dtype=np.int32))


def told(error: Exception) -> dict[str, Any]:
    """An error as plain values."""
    if isinstance(error, FabricError):
        ranks = error.facts.get("ranks", [])
        return {"error": error.message, "error_kind": type(error).__name__, "ranks": ranks}
    return {"error": f"{type(error).__name__}: {error}", "error_kind": "WeightError", "ranks": []}


def require(answers: Sequence[RankMessage]) -> None:
    """Raise the first rank's error, if one has one."""
    for rank, message in enumerate(answers):
        if "error" in message.facts:
            raise _rebuilt({**message.facts, "ranks": [rank]}, f"rank {rank}: ")


def _rebuilt(facts: Mapping[str, Any], who: str = "") -> FabricError:
    kind = getattr(errors, facts["error_kind"], WeightError)
    return cast(FabricError, kind(f"{who}{facts['error']}", ranks=facts["ranks"]))
