"""The sources of a worker's weights: the broker, its node, other relays, a collective, a peer.

- One worker of a node fetches a chunk, the others find it in shared memory.
- A worker that listens serves its node's chunks and its live weights to other nodes, and takes its place in the tree
  of relays.
- We keep a version that a collective brings until it is live, in the node's memory too. Torch is loaded when the first
  collective is offered, in a process beside this one.
- All of these stand in front of the broker's store; receivers (weights.py) need not know of them.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import xxhash

from ...fabric.contract.clock import SystemClock
from ...fabric.contract.errors import ConfigError
from ...fabric.delivery.collective.addresses import node
from ...fabric.delivery.collective.receiver import CollectiveReceiver
from ...fabric.delivery.node_cache import ChunkCache, open_cache
from ...fabric.delivery.node_store import RelayedStore
from ...fabric.delivery.relay_parents import Parents
from ...fabric.delivery.relay_server import RelayServer
from ...fabric.format.manifest import Holder
from ...fabric.ports.weights import WeightStore
from ..engines.base import Engine
from .peer_copies import PeerSource
from .supply_options import SupplyOptions, place_of
from .weights import WeightReceiver

log = logging.getLogger(__name__)


@asynccontextmanager
async def weights_for(
    store: WeightStore, worker_id: str, broker_id: str, options: SupplyOptions | None = None
) -> AsyncIterator[WeightSupply]:
    """Open a WeightSupply while the block lasts. Raises ConfigError."""
    supply = WeightSupply(store, worker_id, broker_id, options or SupplyOptions())
    try:
        await supply.open()
        yield supply
    finally:
        await supply.close()


class WeightSupply:
    """Opens and closes the sources that a worker's receivers read from.

    Args:
        store: the broker's store.
        broker_id: the same for all workers of this broker, and another for every other broker.
    """

    def __init__(self, store: WeightStore, worker_id: str, broker_id: str, options: SupplyOptions) -> None:
        self._broker = store
        self._options = options
        self._clock = SystemClock()
        self._me = Holder(worker_id, -1, node=node(), region=options.region)
        self._broker_id = xxhash.xxh3_64_hexdigest(broker_id.encode())
        self._cache: ChunkCache | None = None
        self._parents: Parents | None = None
        self._relayed: RelayedStore | None = None
        self._server: RelayServer | None = None
        self._collective: CollectiveReceiver | None = None

    async def open(self) -> None:
        """Open the cache, the server and the way up.

        Raises:
            ConfigError: this machine cannot listen at `options.listen`.
        """
        options = self._options
        self._cache = await asyncio.to_thread(open_cache, self._broker_id) if options.is_shared else None
        is_in_tree = bool(options.listen or options.region or options.home_region)
        seat = Holder(self._me.holder_id, -1, "serves" if options.listen else "", self._me.node, self._me.region)
        self._parents = Parents(self._broker, seat, home_region=options.home_region) if is_in_tree else None
        self._relayed = RelayedStore(self._broker, self._cache, parents=self._parents, clock=self._clock)
        if options.listen:
            await self._listen(self._relayed)
        self._collective = CollectiveReceiver(self._relayed, self._me.holder_id, clock=self._clock)

    def receiver(self, run_id: str, engine: Engine) -> WeightReceiver:
        """Make a receiver of one run that reads from these sources; if this worker listens, others may copy from it."""
        assert self._relayed is not None, "not open"
        store = self._relayed

        async def attend() -> None:
            store.forget(run_id, made.version)
            if self._collective is not None and await store.offers(run_id) is not None:
                await self._attend(self._collective, run_id)

        def end() -> None:
            store.forget(run_id, sys.maxsize)
            if self._server is not None:
                self._server.offer(run_id, None)

        made = WeightReceiver(
            store,
            run_id,
            engine,
            clock=self._clock,
            holder=self._me,
            sources=[PeerSource(self._broker, self._me.holder_id, clock=self._clock)]
            if self._options.believes_peers
            else (),
            attend=attend,
            may_stage_by_ranks=self._server is None,  # a worker that joins copies whole weights from us
        )
        made.on_close = end
        if self._server is not None:
            self._server.offer(run_id, made)
        return made

    async def close(self) -> None:
        """Stop serving, and close all sources; the receivers must be closed already."""
        if self._server is not None:
            await self._server.close()
        if self._collective is not None:
            await self._collective.close()
        if self._relayed is not None:
            await self._relayed.close()

    async def _attend(self, collective: CollectiveReceiver, run_id: str) -> None:
        try:
            await collective.attend(run_id)
        except ConfigError as error:
            self._collective = None  # no torch here: versions come by the broker, or from a peer
            log.warning("weights.no_collective", extra={"run_id": run_id, "error": str(error)})

    async def _listen(self, store: RelayedStore) -> None:
        host, port = place_of(self._options)
        self._server = RelayServer(store)
        try:
            await self._server.start(host, port, public_host=self._options.public_host)
        except OSError as error:
            raise ConfigError(f"weights cannot be served at {self._options.listen}: {error}") from error
        self._me = Holder(self._me.holder_id, -1, self._server.address, self._me.node, self._me.region)
