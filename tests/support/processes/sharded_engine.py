"""Tensor-parallel ranks of an engine as processes, each with its own part of the weights and its own connection."""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection

from rollfab.fabric.format.layout import Layout
from rollfab.fabric.opened import RedisFabric
from rollfab.fabric.versions.rank_parts import ShardMap, local_zeros
from rollfab.fabric.versions.rank_plan import ShardPlan
from rollfab.fabric.versions.rank_reader import ShardReader
from rollfab.fabric.versions.rank_stage import ShardStage, vote
from rollfab.fabric.versions.reader import ChainReader
from rollfab.fabric.versions.stage import Staged, commit
from tests.support.processes.rank_processes import Answer, Ranks, ranks


def engine_ranks(size: int, url: str, run_id: str, layout: Layout) -> AbstractContextManager[Ranks]:
    """An engine of `size` ranks, without weights yet."""
    return ranks(size, _main, url, run_id, layout)


def map_of(layout: Layout, rank: int, size: int) -> ShardMap:
    """Matrices that are called "row…" by columns, other matrices by rows, the rest on every rank."""
    plan = ShardPlan(layout, rank=rank, rank_count=size)
    for spec in layout.tensors:
        split = plan.row if spec.name.startswith("row") else plan.column
        (split if len(spec.shape) == 2 else plan.replicated)(spec.name)
    return plan.build()


def _main(rank: int, size: int, pipe: Connection, url: str, run_id: str, layout: Layout) -> None:
    with asyncio.Runner() as runner:
        engine = runner.run(_Rank.connect(rank, size, url, run_id, layout))
        while True:
            do, arguments = pipe.recv()
            pipe.send(runner.run(getattr(engine, do)(*arguments)))


class _Rank:
    @classmethod
    async def connect(cls, rank: int, size: int, url: str, run_id: str, layout: Layout) -> _Rank:
        made = cls()
        store = (await RedisFabric.open(url, client_name="engine")).weights
        made.rank, made.map, made.version = rank, map_of(layout, rank, size), -1
        made.live = local_zeros(made.map)
        made.planner, made.reader = ChainReader(store, run_id), ShardReader(store, made.map)
        made.staged: Staged | None = None
        return made

    async def stage(self, goal: int) -> Answer:
        """Stage what leads to `goal`; tells the vote."""
        manifests = await self.planner.plan(None if self.version < 0 else self.version, goal)
        self.staged = await self.reader.stage(manifests, ShardStage(self.map, self.live, self.version))
        return {"vote": vote(self.rank, self.map, self.staged)}

    async def commit(self) -> Answer:
        assert self.staged is not None
        commit(self.staged, self.live)
        self.version = self.staged.version
        return {}

    async def state(self) -> Answer:
        bits = {name: array.tobytes() for name, array in self.live.items()}
        return {"version": self.version, "bits": bits, "fetched_bytes": self.reader.fetched_bytes}
