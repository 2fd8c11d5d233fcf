"""Ranks of a sharded trainer as processes: real FSDP2 over gloo, and publishers that can be made to fail or die.

One server process imports what is slow to import, once, and every rank is forked from it.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from tests.support.brokers.redis_server import free_port
from tests.support.weights.megatron import CONFIG, LAYER_COUNT, VOCABULARY, checkpoint, stage

CONTEXT = multiprocessing.get_context("forkserver")
PRELOADED = ["torch.distributed.fsdp", "torch._dynamo", "rollfab.trainer.publish.exchange", "rollfab.fabric.opened"]
ANSWER_S = 60.0
TIMEOUT_S = 20.0  # how long rank 0 waits for a rank that lives, on a loaded machine

Answer = dict[str, Any]


@dataclass
class Ranks:
    """All ranks of one trainer."""

    processes: list[BaseProcess] = field(default_factory=list)
    pipes: list[Connection] = field(default_factory=list)

    def all(self, do: str, *arguments: Any, **wishes: Any) -> list[Answer]:
        """Have every rank do it at once; what they say, by rank. A rank that died says {"dead": True}."""
        return self.some(range(len(self.pipes)), do, *arguments, **wishes)

    def some(self, ranks: Sequence[int], do: str, *arguments: Any, **wishes: Any) -> list[Answer]:
        for rank in ranks:
            with contextlib.suppress(BrokenPipeError):
                self.pipes[rank].send((do, arguments, wishes))
        return [self._answer(rank) for rank in ranks]

    def _answer(self, rank: int) -> Answer:
        try:
            assert self.pipes[rank].poll(ANSWER_S), f"rank {rank} says nothing"
            answer: Answer = self.pipes[rank].recv()
        except (EOFError, ConnectionResetError):
            return {"dead": True}
        return answer


@contextmanager
def trainer_ranks(size: int, url: str) -> Iterator[Ranks]:
    """A trainer of `size` ranks; `open` gives it a model and a run."""
    CONTEXT.set_forkserver_preload(PRELOADED)
    port = free_port()

    made = Ranks()
    try:
        for rank in range(size):
            ours, theirs = CONTEXT.Pipe()
            process = CONTEXT.Process(target=_main, args=(rank, size, theirs, port, url), daemon=True)
            process.start()
            theirs.close()
            made.processes.append(process)
            made.pipes.append(ours)
        yield made
    finally:
        for process in made.processes:
            process.kill()
            process.join()


def _main(rank: int, size: int, pipe: Connection, port: int, url: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=size)
    with asyncio.Runner() as runner:
        trainer = runner.run(_Trainer.connect(url))
        while True:
            do, arguments, wishes = pipe.recv()
            pipe.send(runner.run(getattr(trainer, do)(*arguments, **wishes)))


class _Trainer:
    """What one rank can do."""

    @classmethod
    async def connect(cls, url: str) -> _Trainer:
        from rollfab.fabric.opened import RedisFabric

        made = cls()
        made.patience_s = None
        made.store = _trapped((await RedisFabric.open(url, client_name="trainer")).weights)
        return made

    async def open(self, run_id: str, kind: str = "fsdp") -> Answer:
        """A new model and a publisher of a run. kind: see `_build`."""
        import torch.distributed as dist

        from rollfab.trainer.publish.publisher import Publisher

        self.publisher = Publisher(self.store, run_id, group=dist.group.WORLD, timeout_s=TIMEOUT_S, thread_count=1)
        self.checkpoint = checkpoint() if kind == "megatron" else None
        self.model, self.optimizer = (None, None) if kind == "megatron" else _build(kind)
        self.extra = None
        return {}

    async def train(self, steps: int) -> Answer:
        """Optimiser steps on this rank's own data."""
        import torch
        import torch.distributed as dist

        dice = torch.Generator().manual_seed(100 + dist.get_rank())
        for _ in range(steps):
            loss = self.model(torch.randn(4, 96, generator=dice)).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return {}

    async def nudge(self) -> Answer:
        """Change one element of every part that this rank holds."""
        import torch

        if self.checkpoint is not None:
            for tensor in self.checkpoint.values():
                tensor.view(-1)[::7] += 1
            return {}
        with torch.no_grad():
            for parameter in self.model.parameters():
                local = parameter.to_local().view(-1)
                local[:1] += 1
        return {}

    async def spoil(self) -> Answer:
        """Make a value of this rank's parts NaN."""
        import torch

        with torch.no_grad():
            next(iter(self.model.parameters())).to_local().view(-1)[:1] = float("nan")
        return {}

    async def publish(self, version: int, **wishes: bool) -> Answer:
        from rollfab.fabric.contract.errors import FabricError

        try:
            async with asyncio.timeout(self.patience_s):
                report = await self.publisher.publish([*self._named()], version, **wishes)
        except (FabricError, TimeoutError) as error:
            return {"error": type(error).__name__, "text": str(error)}
        return {"report": report, "rank_bytes": self.publisher._ranks._exchange.sent_bytes}

    async def publish_by_run(self, url: str, run_id: str, version: int) -> Answer:
        """As a user does it: `run.publish(…, group=…)` on every rank."""
        import torch.distributed as dist

        import rollfab.aio

        async with await rollfab.aio.connect(url) as fabric:
            run = await fabric.run(run_id, model="any", environment="frozenlake")
            report = await run.publish([*self._named()], version=version, group=dist.group.WORLD)
        return {"report": report}

    async def full(self) -> Answer:
        """The whole tensors as stored bits, gathered: for checks only."""
        found = {}
        for name, tensor in self._named() if self.checkpoint is None else self.checkpoint.items():
            whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            found[name] = whole.detach().contiguous().numpy().tobytes()
        return found

    async def trap(self, kind: str) -> Answer:
        """The next sending of chunks fails: "raise", ends the process: "kill", or is interrupted: "hang"."""
        self.patience_s = 2.0 if kind == "hang" else None
        self.store.trap = kind
        return {}

    async def add(self, what: str) -> Answer:
        """Publish a tensor more, of this form."""
        self.extra = what
        return {}

    def _named(self) -> Iterator[tuple[str, Any]]:
        import torch
        import torch.distributed as dist

        if self.checkpoint is not None:
            yield from self._of_megatron(dist.get_rank(), dist.get_world_size())
            return
        yield from self.model.named_parameters()
        yield "plain", torch.arange(6, dtype=torch.int32)
        if self.extra == "partial":
            from torch.distributed.tensor import DTensor, Partial

            mesh = next(self.model.parameters()).device_mesh
            yield "partial", DTensor.from_local(torch.ones(3), mesh, [Partial()])
        elif self.extra is not None:
            yield self.extra, torch.ones(3 if self.extra == "more" else 3 + dist.get_rank())

    def _of_megatron(self, rank: int, size: int) -> Iterator[tuple[str, Any]]:
        """This rank's part: two ranks share the tensors of a stage of the pipeline."""
        from rollfab import megatron_slices

        each = LAYER_COUNT * 2 // size
        layers = range(rank // 2 * each, rank // 2 * each + each)
        own = stage(self.checkpoint, rank % 2, 2, layers)
        where = {"tp_rank": rank % 2, "tp_size": 2, "first_layer": layers.start}
        return megatron_slices(own, CONFIG, vocabulary_size=VOCABULARY, **where)


def _trapped(store: Any) -> Any:
    from rollfab.fabric.contract.errors import BrokerError

    put_chunks = store.put_chunks
    store.trap = ""

    async def put(*arguments: Any) -> None:
        kind, store.trap = store.trap, ""
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "raise":
            raise BrokerError("the broker is away")
        if kind == "hang":
            await asyncio.Event().wait()
        await put_chunks(*arguments)

    store.put_chunks = put
    return store


def _even(parameter: Any) -> Any:
    """FSDP2 splits dimension 1 only evenly."""
    from torch.distributed.tensor import Shard

    return Shard(int(parameter.dim() == 2 and parameter.shape[1] % 4 == 0))


def _build(kind: str) -> tuple[Any, Any]:
    """A small model. kind: fsdp, hsdp (replicas of shards), dim1 (split along dimension 1), tiles (both dimensions)."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    torch.manual_seed(0)
    layers = [torch.nn.Linear(96, 257), torch.nn.LayerNorm(257), torch.nn.Linear(257, 768), torch.nn.Linear(768, 3)]
    model = torch.nn.Sequential(*layers)
    size = dist.get_world_size()
    if kind == "tiles":
        mesh = init_device_mesh("cpu", (2, size // 2))
        for module in model:
            for name, parameter in list(module.named_parameters(recurse=False)):
                placements = [Shard(0), Shard(1)] if parameter.dim() == 2 else [Shard(0), Shard(0)]
                split = torch.nn.Parameter(distribute_tensor(parameter.detach(), mesh, placements))
                setattr(module, name, split)
        return model, None
    shape, names = ((2, size // 2), ("replicas", "shards")) if kind == "hsdp" else ((size,), ("shards",))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    place = _even if kind == "dim1" else None
    for layer in layers[:-1]:
        fully_shard(layer, mesh=mesh, shard_placement_fn=place)
    fully_shard(model, mesh=mesh, shard_placement_fn=place)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4)
