"""What the broker sends when one version goes to one worker, and to all workers of one node.

- One worker reads the broker itself; those of the node read through the relay of their node, each a real process.
- Counted is all that the broker says it sent, commands' answers included.
- Workers fetch, decode and verify beside weights that they share through the page cache; they do not commit, so that
  many of them fit into one machine. What they fetch is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import redis

from rollfab.fabric.broker.embedded import EmbeddedBroker
from rollfab.fabric.contract.errors import FabricError
from rollfab.fabric.delivery.node_cache import open_cache
from rollfab.fabric.delivery.node_store import RelayedStore
from rollfab.fabric.format.digest import state_sums
from rollfab.fabric.versions.rank_parts import whole
from rollfab.fabric.versions.reader import ChainReader
from rollfab.fabric.versions.stage import Stage

from ..remote import Remote
from .live import CALL_S, READY_S, without_log
from .roles import OURS, LiveTrainer, Role


@dataclass(frozen=True, kw_only=True)
class Node:
    """Bytes that the broker sent for one version: to one worker, and to all `worker_count` of a node."""

    worker_count: int
    payload_bytes: float
    one_bytes: int
    all_bytes: int

    @property
    def ratios(self) -> list[float]:
        return [self.all_bytes / self.one_bytes]


class NodeWorker(Role):
    """Stages the next version, as often as it is asked to. cache: directory of the node's relay; None: without one."""

    def __init__(self, url: str, directory: Path, version: int, cache: Path | None) -> None:
        super().__init__(url, directory, version)
        self._cache = cache

    def __enter__(self) -> Self:
        super().__enter__()
        self._bits = self.recording.split(self.recording.mapped_base())
        self._sums = state_sums(self.layout, self._bits)
        self._relayed = self._relay(self._cache) if self._cache else None
        return self

    def __exit__(self, *_: object) -> None:
        if self._relayed is not None:
            self.run(self._relayed.close())
        super().__exit__()

    def _relay(self, directory: Path) -> RelayedStore:
        cache = open_cache(OURS, root=directory)
        if cache is None:
            raise FabricError(f"{directory} has no room for a node's cache: free some of its disk")
        return RelayedStore(self.store, cache)

    def stage(self) -> int:
        """Fetch, decode and verify the head; returns how many elements it changes."""
        return self.run(self._stage())

    async def _stage(self) -> int:
        head = await self.head_above(OURS, self.version)
        reader = ChainReader(self._relayed or self.store, OURS)
        manifests = await reader.plan(self.version, head)
        staged = await reader.stage(manifests, Stage(whole(self.layout), self._bits, self.version, self._sums))
        return staged.changed_count


def measure_node(directory: Path, recording: Path, worker_count: int, say: Callable[[str], None]) -> Node:
    """Both counts, of the recording's first change.

    Args:
        directory: for the broker, the relay's cache and logs.
        recording: of two states.
        worker_count: on the node.
        say: told what happens.

    Raises:
        FabricError: a process ended, or workers staged different things.
    """
    with ExitStack() as stack:
        broker = stack.enter_context(EmbeddedBroker.start(directory / "node-broker"))
        without_log(broker.url)
        log = directory / "publisher.log"
        trainer = stack.enter_context(Remote("the publisher", log, LiveTrainer, broker.url, recording, 0))
        cache = directory / "cache"
        caches = [None] + [cache] * worker_count
        workers = []
        for index, each in enumerate(caches):
            log = directory / f"worker-{index}.log"
            arguments = (broker.url, recording, 0, each)
            workers.append(stack.enter_context(Remote(f"worker {index}", log, NodeWorker, *arguments)))
        for process in (trainer, *workers):
            process.ready(READY_S)
        trainer.call("publish_first", timeout_s=CALL_S)
        trainer.call("train", timeout_s=CALL_S)
        published = trainer.call("publish", timeout_s=CALL_S)
        one_bytes, alone = _sent(broker.url, workers[:1])
        all_bytes, together = _sent(broker.url, workers[1:])
    if set(alone) != set(together):
        raise FabricError("workers of one node staged something else than one by itself")
    say(f"node: {one_bytes:,} bytes to one worker, {all_bytes:,} to {worker_count}")
    return Node(
        worker_count=worker_count,
        payload_bytes=published["payload_bytes"],
        one_bytes=one_bytes,
        all_bytes=all_bytes,
    )


def _sent(url: str, workers: Sequence[Remote]) -> tuple[int, list[int]]:
    """Bytes that the broker sends while all of them stage the head at once; and what each staged."""
    with redis.Redis.from_url(url) as client, ThreadPoolExecutor(len(workers)) as pool:
        before = client.info("stats")["total_net_output_bytes"]
        staged = list(pool.map(lambda worker: worker.call("stage", timeout_s=CALL_S), workers))
        return int(client.info("stats")["total_net_output_bytes"] - before), staged
