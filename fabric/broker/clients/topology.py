"""A Redis Cluster as we know it: which node holds which slot, and a client for each node.

- Our map is a guess that any answer may correct: a MOVED corrects one slot, anything else is a reason to read the
  whole map again, from the first node that answers.
- Clients of nodes have no patience of their own; the caller keeps trying (cluster_client.py), so that it gives up a
  lost node for the replica that takes its place.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

import redis.asyncio
from redis import exceptions

from ...host.helpers import end_all
from .channel import Channel
from .pools import Pools
from .routes import SLOT_COUNT
from .url import Address, shown

log = logging.getLogger(__name__)

T = TypeVar("T")

MAP_TIMEOUT_S = 2.0  # a node that is alive says in milliseconds what it knows


class Topology:
    """Nodes and slots of one cluster.

    Args:
        pools: makes the connections to a node.
        seeds: nodes to ask first.
        name: the cluster's name in texts.
    """

    def __init__(self, pools: Pools, seeds: Sequence[Address], name: str) -> None:
        assert seeds
        self.reading_count = 0  # grows with every reading of the map
        self.name = name
        self._pools = pools
        self._seeds = tuple(seeds)
        self._slots: list[Address | None] = [None] * SLOT_COUNT
        self._nodes: tuple[Address, ...] = ()  # all that the map names, replicas too: a replica may survive the rest
        self._clients: dict[Address, redis.asyncio.Redis] = {}
        self._lock = asyncio.Lock()

    def holder(self, slot: int) -> Address:
        """Return the node that holds a slot, as far as we know.

        Raises:
            ClusterDownError: nobody does.
        """
        found = self._slots[slot]
        if found is None:
            raise exceptions.ClusterDownError(f"no node holds slot {slot}")
        return found

    def primaries(self) -> list[Address]:
        """Return every node that holds slots."""
        return sorted({address for address in self._slots if address is not None})

    def client(self, address: Address) -> redis.asyncio.Redis:
        """Return the client for one node, without patience."""
        if address not in self._clients:
            self._clients[address] = redis.asyncio.Redis.from_pool(self._pools.make(0.0, address=address))
        return self._clients[address]

    def moved(self, slot: int, address: Address) -> None:
        """Note that another node holds this slot, as a node said."""
        self._slots[slot] = address

    async def read(self, seen: int) -> None:
        """Read the map again, unless that was done since `seen` readings.

        Raises:
            ConnectionError: no node could be asked. The map stays as it was.
        """
        async with self._lock:
            if self.reading_count != seen:
                return
            known = dict.fromkeys((*self._nodes, *self._seeds))
            slots, self._nodes = await first_answer([self._read_from(address) for address in known])
            if slots != self._slots:
                self._slots = slots
                log.info("cluster.map_changed", extra={"broker": self.name, "nodes": self.primaries()})
            self.reading_count += 1

    async def _read_from(self, asked: Address) -> tuple[list[Address | None], tuple[Address, ...]]:
        """Read slots and nodes as one node knows them."""
        try:
            async with asyncio.timeout(MAP_TIMEOUT_S):
                rows = await Channel(self.client(asked)).ask("CLUSTER", "SLOTS")
        except TimeoutError as error:
            raise exceptions.TimeoutError(f"{shown(asked)} does not say who holds the slots") from error
        slots: list[Address | None] = [None] * SLOT_COUNT
        nodes: dict[Address, None] = {}
        for start, end, *holders in rows:
            found = [_address(holder, asked) for holder in holders]
            slots[start : end + 1] = [found[0]] * (end + 1 - start)
            nodes.update(dict.fromkeys(found))
        if not nodes:
            raise exceptions.ClusterDownError("no node holds any slot")
        return slots, tuple(nodes)

    async def close(self) -> None:
        """Close every connection."""
        for client in self._clients.values():
            await client.aclose()


def _address(holder: Sequence[Any], asked: Address) -> Address:
    """Return the address of a node of the map; a node without a name is the node that we asked."""
    name = (holder[0] or b"").decode()
    return (name if name not in ("", "?") else asked[0]), int(holder[1])


async def first_answer(asked: Sequence[Coroutine[Any, Any, T]]) -> T:
    """Return the first answer and cancel the other questions; raise the last error if none is answered."""
    waiting = {asyncio.ensure_future(one) for one in asked}
    tasks = list(waiting)
    try:
        while True:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if task.exception() is None:
                    return task.result()
            if not waiting:
                raise done.pop().exception() or AssertionError
    finally:
        await end_all(tasks)
