"""A receiver's side: taking part in the rounds that are offered, and keeping the chunks that came.

- The chunks are only kept, never applied: the head says what a version is, and the stage verifies them again.
- A round that fails leaves nothing behind; the version comes in the next round, by the broker, or from a peer.
"""

from __future__ import annotations

import logging
from collections import deque
from pathlib import Path

from ...contract.clock import Clock, SystemClock
from ...contract.errors import BrokerError, ConfigError, FabricError, WireError
from ...contract.records import GLOO, NCCL
from ..node_store import RelayedStore
from .addresses import LOOPBACK, host_towards, node
from .group import Nursery, check_torch
from .invitations import CLOSED, OPEN, OVER, Answer, CollectiveOptions, Offer, Watch
from .meeting import build
from .round import Room
from .transfer import receive

log = logging.getLogger(__name__)

ROUND_COUNT_MAX = 64  # rounds remembered as answered: far more than an offer's time to live leaves room for


def can_join(backend: str) -> bool:
    """Tell whether this machine has what such a group needs, as far as that is seen without loading torch."""
    return backend == GLOO or (backend == NCCL and any(Path("/dev").glob("nvidia[0-9]*")))


class CollectiveReceiver:
    """Takes part in rounds of any run, one at a time.

    Args:
        member: a name that no other receiver has (its worker id).
        watch: called with each message's number and bytes as they came.
        nursery: whose processes hold the groups, shared with others; None: one of its own.
    """

    def __init__(
        self,
        store: RelayedStore,
        member: str,
        *,
        options: CollectiveOptions | None = None,
        clock: Clock | None = None,
        watch: Watch | None = None,
        nursery: Nursery | None = None,
    ) -> None:
        self._store = store
        self._member = member
        self._options = options or CollectiveOptions()
        self._room = Room(store, self._options, clock or SystemClock(), watch, nursery or Nursery())
        self._seen: deque[str] = deque(maxlen=ROUND_COUNT_MAX)
        self._has_refused = False

    async def attend(self, run_id: str) -> bool:
        """Take part in the round that is offered now, if any; return whether a version came.

        After a failed round, stay for the next one, no longer than the offer's stall_s and answer_s. A failed round
        is logged, never raised.

        Raises:
            ConfigError: torch is not installed.
            BrokerError: the board cannot be reached.
        """
        try:
            return await self._attend(run_id)
        except (BrokerError, ConfigError):
            raise
        except Exception:  # of torch.distributed: the version comes by the broker, and we attend the next offer
            log.exception("collective.attending_failed", extra={"run_id": run_id})
            return False

    async def _attend(self, run_id: str) -> bool:
        is_richer, stay_s = False, 0.0
        while (offer := await self._next(run_id, stay_s)) is not None:
            self._seen.append(offer.round_id)
            has_come = await self._join(offer)
            is_richer |= has_come
            stay_s = 0.0 if has_come else offer.stall_s + offer.answer_s
        return is_richer

    async def close(self) -> None:
        """End the process that has torch loaded."""
        await self._room.nursery.close()

    async def _next(self, run_id: str, stay_s: float) -> Offer | None:
        """Return an offer to answer; wait up to `stay_s` for one, unless the publisher says that it is done."""

        async def question() -> Offer | str | None:
            offer = await self._offer(run_id)
            if offer is None or offer.state == OVER:
                return OVER
            return offer if await self._wants(offer) else None

        found = await self._room.look(self._room.clock.now_s() + stay_s, question)
        return found if isinstance(found, Offer) else None

    async def _wants(self, offer: Offer) -> bool:
        """Tell whether to answer: the offer is open, new, not too large, and its publisher has not been replaced."""
        if offer.state != OPEN or offer.round_id in self._seen or not can_join(offer.backend):
            return False
        if offer.payload_bytes > self._store.capacity_bytes:
            self._refuse(offer)
            return False
        return offer.epoch >= (await self._store.head(offer.run_id)).epoch

    def _refuse(self, offer: Offer) -> None:
        """Say, once, that versions are too large to be collected."""
        if not self._has_refused:
            size = {"payload_bytes": offer.payload_bytes, "capacity_bytes": self._store.capacity_bytes}
            text = "collective.too_large: it comes by the broker, or give the store more capacity_bytes"
            log.warning(text, extra={"run_id": offer.run_id, "policy_version": offer.version, **size})
            self._has_refused = True

    async def _join(self, offer: Offer) -> bool:
        """Take part in one round, from the answer to the chunks; return whether all chunks came."""
        facts = {"run_id": offer.run_id, "policy_version": offer.version, "round_id": offer.round_id}
        is_near = offer.node == node()
        host = self._options.host or (LOOPBACK if is_near else host_towards(offer.host))
        me = Answer(member=self._member, host=host, node=node(), keys={})
        check_torch()
        try:
            await self._room.answer(offer, me)  # before torch is loaded, which the first time takes seconds
            async with self._room.group(offer) as group:
                closed = await self._closed(offer)
                if closed is None or self._member not in closed.members:
                    log.info("collective.not_taken", extra=facts)
                    return False
                rank = 1 + closed.members.index(self._member)
                await build(group, self._room, closed, me, rank, peer=closed.host)
                collected = await receive(group, closed, self._room.tell)
        except ConfigError:
            raise
        except FabricError as error:
            log.warning("collective.not_received: it comes by the broker", extra={**facts, "error": str(error)})
            return False
        is_whole = await self._store.keep(collected.manifest, collected.chunks)
        log.info("collective.received", extra={**facts, "is_whole": is_whole})
        return is_whole

    async def _closed(self, offer: Offer) -> Offer | None:
        """Wait for the same offer, closed; None if it is over or the publisher falls silent."""

        async def question() -> Offer | None:
            now = await self._offer(offer.run_id)
            return now if now is None or now.round_id != offer.round_id or now.state != OPEN else None

        found = await self._room.look(self._room.clock.now_s() + offer.answer_s + offer.stall_s, question)
        is_this = found is not None and found.round_id == offer.round_id and found.state == CLOSED
        return found if is_this else None

    async def _offer(self, run_id: str) -> Offer | None:
        raw = await self._store.offers(run_id)
        if raw is None:
            return None
        try:
            return Offer.decode(raw)
        except WireError as error:
            log.warning("collective.offer_unread", extra={"run_id": run_id, "error": str(error)})
            return None
