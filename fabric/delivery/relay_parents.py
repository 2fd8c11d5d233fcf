"""The relays above this node, asked one after the other for the chunks that each of them can give.

- A parent that is dead, frozen or wrong is left after parent_stall_s for the next one, and left alone for retry_s.
  A parent that has none of the chunks asked for (it keeps no cache) is left alone for refresh_s.
- All parents together waste no more time than rules/weights/patience.py allows, whatever the rows of holders say.
- The chunks they yield are proven; chunks that none of them yields, or that could not be proven, come from the broker
  (node_store.py).
- tree.py chooses the parents among the holders that the broker knows, looked up now and then.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from ..contract.clock import Clock, SystemClock
from ..contract.errors import BrokerError, PeerLost
from ..format.manifest import Holder, WeightManifest
from ..ports.weights import WeightStore
from ..rules.weights.patience import Patience
from .relay_client import RelayClient
from .relay_options import RelayOptions
from .tree import ancestors

log = logging.getLogger(__name__)


class Parents:
    """The way up from one node.

    Args:
        store: where the holders of a run are looked up: the broker's, not a relayed one.
        me: this process; its node and region count, not its address.
        home_region: where the broker is.
    """

    def __init__(
        self,
        store: WeightStore,
        me: Holder,
        *,
        home_region: str = "",
        options: RelayOptions | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._store = store
        self._me = me
        self._home_region = home_region
        self._options = options or RelayOptions()
        self._clock = clock or SystemClock()
        self._clients: dict[str, RelayClient] = {}
        self._above: dict[str, list[str]] = {}  # addresses by run, nearest first
        self._looked_s: dict[str, float] = {}
        self._left_until_s: dict[str, float] = {}
        self._patience = Patience(self._clock.now_s())

    async def chunks(self, manifest: WeightManifest, indices: Sequence[int]) -> AsyncGenerator[tuple[int, bytes], None]:
        """Yield chunks as they come, verified; leave out chunks that no parent has."""
        left = dict.fromkeys(indices)
        for address in await self._usable(manifest.run_id) if manifest.has_proofs else ():
            if not left or not self._patience.is_left(self._clock.now_s()):
                return
            client = self._clients.setdefault(address, RelayClient(address, self._options))
            count, asked_s = len(left), self._clock.now_s()
            try:
                async with aclosing(client.chunks(manifest, list(left))) as arriving:
                    async for index, data in arriving:
                        has_patience = self._wait(manifest.run_id, asked_s, len(data or b""))
                        if data is not None:
                            del left[index]
                            yield index, data
                        if not has_patience:
                            return
                        asked_s = self._clock.now_s()
                if len(left) == count:
                    self._left_until_s[address] = self._clock.now_s() + self._options.refresh_s
            except PeerLost as error:
                self._wait(manifest.run_id, asked_s)
                self._left_until_s[address] = self._clock.now_s() + self._options.retry_s
                log.warning("relay.parent_left", extra={"run_id": manifest.run_id, "error": str(error)})

    async def close(self) -> None:
        """Drop all connections."""
        for client in self._clients.values():
            client.close()
        self._clients.clear()

    def _wait(self, run_id: str, since_s: float, byte_count: int = 0) -> bool:
        """Note the end of a wait that brought so many bytes; return whether there is patience left."""
        now_s = self._clock.now_s()
        self._patience = self._patience.after(now_s, now_s - since_s, byte_count)
        is_left = self._patience.is_left(now_s)
        if not is_left:
            log.warning("relay.patience_lost", extra={"run_id": run_id})
        return is_left

    async def _usable(self, run_id: str) -> list[str]:
        """Return the addresses to ask now, nearest first."""
        now_s = self._clock.now_s()
        if now_s - self._looked_s.get(run_id, -self._options.refresh_s) >= self._options.refresh_s:
            self._looked_s[run_id] = now_s
            try:
                self._adopt(run_id, await self._store.holders(run_id))
            except BrokerError as error:
                log.warning("relay.tree_unknown", extra={"run_id": run_id, "error": str(error)})
        above = [address for address in self._above.get(run_id, []) if self._left_until_s.get(address, now_s) <= now_s]
        return above[: self._options.parent_count_max]

    def _adopt(self, run_id: str, holders: Sequence[Holder]) -> None:
        above = ancestors(self._me, holders, home_region=self._home_region)
        self._above[run_id] = [holder.address for holder in above]
        known = {address for addresses in self._above.values() for address in addresses}
        for address in [*self._clients]:
            if address not in known:
                self._clients.pop(address).close()
        self._left_until_s = {address: until for address, until in self._left_until_s.items() if address in known}
