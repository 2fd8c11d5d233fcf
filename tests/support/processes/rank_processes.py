"""Ranks as processes of their own, told what to do through pipes; some can be killed.

One server process imports what is slow to import, once, and every rank is forked from it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

CONTEXT = multiprocessing.get_context("forkserver")
PRELOADED = ["torch.distributed.fsdp", "torch._dynamo", "rollfab.trainer.publish.rank_lead", "rollfab.fabric.opened"]
ANSWER_S = 60.0

Answer = dict[str, Any]


@dataclass
class Ranks:
    """All ranks of one trainer."""

    processes: list[BaseProcess] = field(default_factory=list)
    pipes: list[Connection] = field(default_factory=list)

    def all(self, do: str, *arguments: Any) -> list[Answer]:
        """Have every rank do it at once; what they say, by rank. A rank that died says {"dead": True}."""
        return self.some(range(len(self.pipes)), do, *arguments)

    def some(self, ranks: Sequence[int], do: str, *arguments: Any) -> list[Answer]:
        for rank in ranks:
            with contextlib.suppress(BrokenPipeError):
                self.pipes[rank].send((do, arguments))
        return [self._answer(rank) for rank in ranks]

    def _answer(self, rank: int) -> Answer:
        try:
            assert self.pipes[rank].poll(ANSWER_S), f"rank {rank} says nothing"
            answer: Answer = self.pipes[rank].recv()
        except (EOFError, ConnectionResetError):
            return {"dead": True}
        return answer


@contextmanager
def ranks(size: int, main: Callable[..., None], *arguments: Any) -> Iterator[Ranks]:
    """`size` processes that run main(rank, size, pipe, *arguments)."""
    CONTEXT.set_forkserver_preload(PRELOADED)

    made = Ranks()
    try:
        for rank in range(size):
            ours, theirs = CONTEXT.Pipe()
            process = CONTEXT.Process(target=main, args=(rank, size, theirs, *arguments), daemon=True)
            process.start()
            theirs.close()
            made.processes.append(process)
            made.pipes.append(ours)
        yield made
    finally:
        for process in made.processes:
            process.kill()
            process.join()
